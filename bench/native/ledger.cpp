// How fast the native ledger takes records, on one core: one line of JSON on standard output.
//
//     ledger [--pages N] [--tenants N] [--live N] [--policy lifo|fifo|shuffled] [--records N] [--mode live|replay]
//     ledger --rows FILE          the records of a file, as `spans` writes it, instead
//
// The records stand in memory before the clock starts, a chunk at a time. What is timed is what the guard does with
// each: `parse` and `feed`, and every 1000 records, in live mode, `advance` and the taking of what `feed` left behind.
// The time is the thread's own CPU time. Exit status 1: the ledger found something, or missed or dropped a record,
// so that what was measured is not what was meant.
#include <time.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <vector>

#include "ledger/ledger.hpp"
#include "options.hpp"
#include "trace.hpp"

namespace kvguard::bench {
namespace {

constexpr std::uint64_t kChunk = 65'536;
constexpr std::uint64_t kRound = 1000;  // records between two rounds of the guard's loop

double seconds(clockid_t clock) {
    timespec t;
    clock_gettime(clock, &t);
    return static_cast<double>(t.tv_sec) + static_cast<double>(t.tv_nsec) * 1e-9;
}

std::uint64_t resident_bytes() {
    std::uint64_t size = 0, resident = 0;
    std::FILE* file = std::fopen("/proc/self/statm", "r");
    if (file == nullptr) return 0;
    if (std::fscanf(file, "%lu %lu", &size, &resident) != 2) resident = 0;
    std::fclose(file);
    return resident * 4096;
}

struct Guard {
    Guard(bool live, std::uint64_t pool_pages) : live(live), ledger(policy(), settings(live, pool_pages)) {
        ledger.want_judged(live);
    }

    static Policy policy() {
        Policy policy;
        for (int k = 0; k < kKinds; ++k) policy.actions[k] = Action::kill;
        return policy;
    }
    static Settings settings(bool live, std::uint64_t pool_pages) {
        Settings settings;
        if (!live) settings.window_ns = -1;
        settings.max_pool_pages = std::max(settings.max_pool_pages, pool_pages);
        return settings;
    }

    void feed(const Rows& rows) {
        std::size_t at = 0;
        const bool whole = each_expected(ledger, rows, at, SIZE_MAX, [&](const Record& record) {
            now_ns = std::max<std::int64_t>(now_ns, static_cast<std::int64_t>(record.time_ns));
            ledger.feed(record, now_ns);
            if (++fed % kRound == 0) round();
        });
        if (!whole) {
            std::fprintf(stderr, "a record that is none, at byte %zu\n", at);
            std::exit(1);
        }
    }
    void round() {
        if (live) ledger.advance(now_ns);
        for (const Event& event : ledger.events())
            if (event.what == Event::What::found && ++findings <= 5)
                std::fprintf(stderr, "found %s: %s (request %s, pool %s, %s#%lu)\n", name_of(event.finding->kind),
                             event.finding->reason.c_str(), event.finding->request.c_str(),
                             event.finding->pool.c_str(), event.finding->stream.c_str(), event.finding->seq);
        ledger.events().clear();
        ledger.moved().clear();
        ledger.judged().clear();
    }

    bool live;
    Ledger ledger;
    std::int64_t now_ns = 0;
    std::uint64_t fed = 0, findings = 0;
};

double parse_all(const Rows& rows) {
    const double started = seconds(CLOCK_THREAD_CPUTIME_ID);
    const char* at = rows.bytes.data();
    const char* const end = at + rows.bytes.size();
    Record record;
    while (at < end) {
        if (parse(at, static_cast<std::size_t>(end - at), record) != nullptr) return 0;
        at += padded(record.bytes.size());
    }
    return seconds(CLOCK_THREAD_CPUTIME_ID) - started;
}

int run_file(const std::string& path, bool live) {
    std::FILE* file = std::fopen(path.c_str(), "rb");
    if (file == nullptr) {
        std::perror(path.c_str());
        return 2;
    }
    Rows rows;
    char block[1 << 16];
    for (std::size_t n; (n = std::fread(block, 1, sizeof block, file)) != 0;) rows.bytes.append(block, n);
    std::fclose(file);
    Guard guard(live, 0);
    const double started = seconds(CLOCK_THREAD_CPUTIME_ID);
    guard.feed(rows);
    const double cpu = seconds(CLOCK_THREAD_CPUTIME_ID) - started;
    guard.round();
    std::printf("{\"records\":%lu,\"cpu_s\":%.6f,\"records_per_s\":%.0f}\n", guard.fed, cpu,
                static_cast<double>(guard.fed) / cpu);
    return guard.findings == 0 && guard.ledger.gaps() == 0 && guard.ledger.dropped() == 0 ? 0 : 1;
}

int run(const Options& options) {
    if (const std::string path = options.text("rows", ""); !path.empty())
        return run_file(path, options.text("mode", "live") == "live");
    const Shape shape = shape_of(options);
    const bool live = options.text("mode", "live") == "live";
    const std::uint64_t records = options.number("records", 2'000'000);
    // Until as many requests have come and gone as are live, and the ones remembered after their end are as many as
    // they get.
    const std::uint64_t warm = options.number("warm", std::uint64_t{shape.live} * 60 + 600'000);
    Trace trace(shape);
    Guard guard(live, shape.pages / std::max(2u, shape.workers));
    Rows rows;
    const auto take = [&](std::uint64_t count) {
        rows.bytes.clear();
        rows.count = 0;
        trace.fill(rows, count);
    };
    rows.bytes.reserve(std::size_t{kChunk} * 512);
    take(1);
    guard.feed(rows);
    rows.bytes.clear();
    rows.count = 0;
    trace.touch(rows);
    const std::uint64_t resident_before = resident_bytes();
    guard.feed(rows);
    guard.round();
    const std::uint64_t resident_after = resident_bytes();
    const std::uint64_t pages = guard.ledger.sizes().pages;
    for (std::uint64_t done = 0; done < warm; done += kChunk) {
        take(kChunk);
        guard.feed(rows);
    }
    const Mix before = trace.mix();
    std::vector<double> rates;
    double cpu = 0, wall = 0, parsing = 0;
    std::uint64_t fed = 0;
    while (fed < records) {
        take(std::min(kChunk, records - fed));
        parsing += parse_all(rows);
        const double wall_started = seconds(CLOCK_MONOTONIC);
        const double started = seconds(CLOCK_THREAD_CPUTIME_ID);
        guard.feed(rows);
        const double spent = seconds(CLOCK_THREAD_CPUTIME_ID) - started;
        wall += seconds(CLOCK_MONOTONIC) - wall_started;
        cpu += spent;
        fed += rows.count;
        rates.push_back(rows.count / spent);
    }
    guard.round();
    const Mix& mix = trace.mix();
    const double count = static_cast<double>(mix.records - before.records);
    const std::size_t half = rates.size() / 2;
    const auto mean = [&](std::size_t from, std::size_t to) {  // harmonic: of equal chunks
        double sum = 0;
        for (std::size_t i = from; i < to; ++i) sum += 1 / rates[i];
        return to > from ? static_cast<double>(to - from) / sum : 0;
    };
    const double first_half = mean(0, half), second_half = mean(half, rates.size());
    std::sort(rates.begin(), rates.end());
    const Sizes sizes = guard.ledger.sizes();
    std::printf(
        "{\"pages\":%lu,\"tenants\":%u,\"live\":%u,\"workers\":%u,\"policy\":\"%s\",\"mode\":\"%s\",\"records\":%lu,"
        "\"cpu_s\":%.6f,\"wall_s\":%.6f,\"parse_s\":%.6f,\"records_per_s\":%.0f,\"p10\":%.0f,\"median\":%.0f,"
        "\"p90\":%.0f,\"first_half\":%.0f,\"second_half\":%.0f,\"pages_per_record\":%.3f,\"runs_per_record\":%.3f,"
        "\"bytes_per_record\":%.1f,\"shared\":%.3f,\"page_bytes\":%.2f,\"ledger_bytes\":%lu,\"pages_kept\":%lu,"
        "\"requests_live\":%lu,\"requests_ended\":%lu,\"transfers\":%lu,\"records_held\":%lu,\"findings\":%lu,"
        "\"gaps\":%lu,\"dropped\":%lu}\n",
        shape.pages, shape.tenants, shape.live, shape.workers, options.text("policy", "fifo").c_str(),
        live ? "live" : "replay", fed, cpu, wall, parsing, static_cast<double>(fed) / cpu, rates[rates.size() / 10],
        rates[rates.size() / 2], rates[rates.size() * 9 / 10], first_half, second_half,
        static_cast<double>(mix.pages - before.pages) / count, static_cast<double>(mix.runs - before.runs) / count,
        static_cast<double>(mix.bytes - before.bytes) / count,
        static_cast<double>(mix.shared - before.shared) / static_cast<double>(mix.requests - before.requests),
        static_cast<double>(resident_after - resident_before) / static_cast<double>(std::max<std::uint64_t>(pages, 1)),
        guard.ledger.bytes(), sizes.pages, sizes.requests_live, sizes.requests_ended, sizes.transfers,
        sizes.records_held, guard.findings, guard.ledger.gaps(), guard.ledger.dropped());
    return guard.findings == 0 && guard.ledger.gaps() == 0 && guard.ledger.dropped() == 0 ? 0 : 1;
}

}  // namespace
}  // namespace kvguard::bench

int main(int argc, char** argv) { return kvguard::bench::run(kvguard::bench::Options(argc, argv)); }
