// One engine process of several that write records into the guard's ring at a steady rate, and how long each record
// waits for its verdict: one line of JSON on standard output.
//
//     writer --ring FILE --board FILE --worker W --keys LOW:HIGH --rate N --seconds S --start-ns T [--pages N] ...
//     writer --ring FILE --touch 1 --pages N      hands out, writes and frees every page of all pools once
//
// Every process makes the whole trace and writes the streams that are its own: worker W's, and the router's with
// worker 0's. The k-th record of the trace is due k/N s after the monotonic time T, and written in the first tick from
// then on, with the time of that moment in it. A decode worker learns of what arrived two ticks later than the sender
// began, as over a network; else its receiver's ends might be written before there was anything to end.
//
// In every fourth tick the process then looks at the board until a record of that tick, whichever it draws, is judged:
// the time from the stamp in the record to there is a sample. --keys is the digest of the worker's stream id.
#include "kvguard/ring.h"

#include <sys/prctl.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <memory>
#include <vector>

#include "board.hpp"
#include "options.hpp"
#include "trace.hpp"

namespace kvguard::bench {
namespace {

constexpr std::uint64_t kSecond = 1'000'000'000;
constexpr std::uint64_t kGiveUp = kSecond / 10;
constexpr std::uint64_t kSpin = kSecond / 4000;  // 0.25 ms
constexpr std::uint64_t kSampleEvery = 4;
constexpr std::uint64_t kLagTicks = 2;

std::uint64_t monotonic_ns() {
    timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return static_cast<std::uint64_t>(now.tv_sec) * kSecond + static_cast<std::uint64_t>(now.tv_nsec);
}

void sleep_until(std::uint64_t at_ns) {
    const timespec at{static_cast<time_t>(at_ns / kSecond), static_cast<long>(at_ns % kSecond)};
    while (clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &at, nullptr) == EINTR) continue;
}

class Lane {
  public:
    Lane(const std::string& path, const std::string& stream) {
        const char* wrong =
            kvg_ring_enter(&writer_, path.c_str(), KVG_RING_LANES, KVG_RING_ROWS, stream.data(), stream.size());
        if (wrong == nullptr) return;
        std::fprintf(stderr, "ring %s: %s\n", path.c_str(), wrong);
        std::exit(2);
    }
    ~Lane() { kvg_ring_leave(&writer_); }
    Lane(const Lane&) = delete;
    Lane& operator=(const Lane&) = delete;

    bool put(const char* record) {
        std::uint32_t bytes;
        std::memcpy(&bytes, record, sizeof bytes);
        return kvg_ring_put(&writer_, record, bytes) != 0;
    }
    std::uint64_t dropped() const { return writer_.dropped; }

  private:
    kvg_ring_writer writer_;
};

// Where the records of some rows are: offset, stream's index.
template <typename Each>
void each_record(const Rows& rows, const std::vector<std::string>& streams, Each each) {
    Record record;
    for (std::size_t at = 0; at < rows.bytes.size(); at += padded(record.bytes.size())) {
        if (const char* wrong = parse(rows.bytes.data() + at, rows.bytes.size() - at, record); wrong != nullptr) {
            std::fprintf(stderr, "a record that is none: %s\n", wrong);
            std::exit(1);
        }
        const auto stream = std::find(streams.begin(), streams.end(), record.stream) - streams.begin();
        each(at, static_cast<std::uint32_t>(stream), record);
    }
}

int touch(const Options& options) {
    Trace trace(shape_of(options));
    Rows rows;
    trace.fill(rows, 1);
    trace.touch(rows);
    std::vector<std::unique_ptr<Lane>> lanes;
    const std::string ring = options.text("ring", "");
    for (const auto& stream : trace.streams()) lanes.push_back(std::make_unique<Lane>(ring, stream));
    std::string last = "{";
    std::vector<std::uint64_t> seqs(lanes.size());
    each_record(rows, trace.streams(), [&](std::size_t at, std::uint32_t stream, const Record& record) {
        while (!lanes[stream]->put(rows.bytes.data() + at)) sleep_until(monotonic_ns() + kSecond / 1000);
        seqs[stream] = record.seq;
    });
    for (std::size_t s = 0; s < seqs.size(); ++s)
        last += (s != 0 ? ",\"" : "\"") + trace.streams()[s] + "\":" + std::to_string(seqs[s]);
    std::printf("%s}\n", last.c_str());
    return 0;
}

struct Due {
    std::uint64_t at_ns;  // after the start
    std::uint32_t offset;
    std::uint32_t lane;
};

int run(const Options& options) {
    Shape shape = shape_of(options);
    const std::uint64_t rate = options.number("rate", 100'000);
    const std::uint64_t seconds = options.number("seconds", 10);
    const std::uint64_t tick_ns = options.number("tick-us", 1000) * 1000;
    const auto worker = static_cast<std::uint32_t>(options.number("worker", 0));
    shape.step_ns = kSecond / rate;
    shape.held_up_one_in = 0;
    Trace trace(shape);
    const std::uint32_t mine = worker + 1;
    const bool decodes = worker >= shape.workers / 2;
    Rows rows;
    std::vector<Due> due;
    {
        Rows all;
        std::uint64_t number = 0;
        while (number < rate * seconds) {
            all.bytes.clear();
            all.count = 0;
            trace.fill(all, 4096);
            each_record(all, trace.streams(), [&](std::size_t at, std::uint32_t stream, const Record& record) {
                const std::uint64_t at_ns = number++ * kSecond / rate + (decodes ? kLagTicks * tick_ns : 0);
                if (stream != mine && !(worker == 0 && stream == 0)) return;
                due.push_back({at_ns, static_cast<std::uint32_t>(rows.bytes.size()), stream == mine ? 0u : 1u});
                rows.bytes.append(all.bytes, at, padded(record.bytes.size()));
            });
        }
    }
    Lane lane(options.text("ring", ""), trace.streams()[mine]);
    std::unique_ptr<Lane> router;
    if (worker == 0) router = std::make_unique<Lane>(options.text("ring", ""), trace.streams()[0]);
    const Board board(options.text("board", ""));
    std::uint64_t low = 0, high = 0;
    if (std::sscanf(options.text("keys", "").c_str(), "%lu:%lu", &low, &high) != 2) {
        std::fprintf(stderr, "--keys: is not LOW:HIGH\n");
        return 2;
    }
    const std::uint64_t start = options.number("start-ns", monotonic_ns());
    const std::uint64_t measured_from = options.number("warm-ms", 1000) * (kSecond / 1000);
    std::vector<std::uint64_t> samples;
    std::uint64_t written = 0, latest_ns = 0, draw = shape.seed + worker;
    std::size_t next = 0;
    for (std::uint64_t tick = 0; next < due.size(); ++tick) {
        sleep_until(start + tick * tick_ns);
        const std::uint64_t now = monotonic_ns() - start;
        if (tick != 0) latest_ns = std::max(latest_ns, now - std::min(now, tick * tick_ns));
        std::uint64_t drawn_seq = 0, drawn_ns = 0, own = 0;
        for (; next < due.size() && due[next].at_ns <= now; ++next) {
            char* const record = rows.bytes.data() + due[next].offset;
            const std::uint64_t stamp = kvg_now_ns();
            std::memcpy(record + offsetof(kvg_record, time_ns), &stamp, sizeof stamp);
            written += (due[next].lane == 0 ? lane : *router).put(record);
            if (due[next].lane != 0) continue;
            draw = draw * 6364136223846793005u + 1442695040888963407u;
            if ((draw >> 33) % ++own == 0) {  // each of them is as likely
                std::memcpy(&drawn_seq, record + offsetof(kvg_record, seq), sizeof drawn_seq);
                drawn_ns = stamp;
            }
        }
        if (own == 0 || tick % kSampleEvery != worker % kSampleEvery) continue;
        std::uint64_t waited;
        do {
            waited = kvg_now_ns() - drawn_ns;
            if (waited > kSpin) sleep_until(monotonic_ns() + kSpin / 10);  // leave the core to the guard
        } while (board.watermark(low, high, 1) < static_cast<std::int64_t>(drawn_seq) && waited < kGiveUp);
        if (now >= measured_from) samples.push_back(kvg_now_ns() - drawn_ns);
        tick = std::max(tick, (monotonic_ns() - start) / tick_ns);
    }
    std::printf("{\"stream\":\"%s\",\"written\":%lu,\"dropped\":%lu,\"latest_us\":%lu,\"samples\":[",
                trace.streams()[mine].c_str(), written, lane.dropped() + (router ? router->dropped() : 0),
                latest_ns / 1000);
    for (std::size_t i = 0; i < samples.size(); ++i) std::printf(i != 0 ? ",%lu" : "%lu", samples[i]);
    std::printf("]}\n");
    return 0;
}

}  // namespace
}  // namespace kvguard::bench

int main(int argc, char** argv) {
    const kvguard::bench::Options options(argc, argv);
    prctl(PR_SET_TIMERSLACK, 1000ul);  // sleeps end when they should
    return options.number("touch", 0) != 0 ? kvguard::bench::touch(options) : kvguard::bench::run(options);
}
