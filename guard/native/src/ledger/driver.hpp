// Drives the rules: takes records in any order of arrival, applies them in each stream's order. After
// guard/ledger/ledger.py.
#pragma once

#include <algorithm>
#include <deque>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "ledger/ledger.hpp"
#include "ledger/lookahead.hpp"
#include "ledger/streams.hpp"
#include "ledger/world.hpp"

namespace kvguard {

inline constexpr std::int64_t kForever = INT64_MAX;

struct Ledger::Impl {
    Impl(const Policy& policy, const Settings& settings)
        : world(policy, settings), by_name(world.hash), lookahead(world, by_name) {}
    ~Impl() { tearing_down = true; }

    World world;
    Index<Stream> by_name;
    Lookahead lookahead;
    std::vector<std::unique_ptr<Stream>> streams;
    std::vector<Stream*> sorted;  // by name
    Stream* lately[8] = {};  // by a glance at their names: records of few streams alternate
    std::map<std::string, std::vector<Stream*>, std::less<>> waiting;  // transfer id -> streams that wait for it
    std::uint64_t time_ns = 0, fed = 0;
    std::map<Stream*, std::uint64_t> restarting;  // in replay: how many records may be fed before a new epoch begins
    std::vector<std::uint32_t> moved;
    std::vector<std::uint64_t> judged;
    bool want_judged = false;

    std::int64_t deadline(std::int64_t now_ns) const {
        return world.settings.window_ns < 0 ? kForever : now_ns + world.settings.window_ns;
    }

    Stream* find(std::string_view name) {
        Stream*& known = lately[(name.size() + static_cast<unsigned char>(name.front()) +
                                 static_cast<unsigned char>(name.back())) % 8];
        if (known != nullptr && known->name->text == name) return known;
        Stream* const stream = by_name.find(name);
        if (stream != nullptr) known = stream;
        return stream;
    }

    Stream* make(std::string_view name) {
        streams.push_back(std::make_unique<Stream>());
        Stream* const stream = streams.back().get();
        stream->name = world.stream_name(name);
        stream->index = static_cast<std::uint32_t>(streams.size() - 1);
        by_name.insert(stream);
        sorted.insert(std::upper_bound(sorted.begin(), sorted.end(), stream,
                                       [](const Stream* a, const Stream* b) { return a->name->text < b->name->text; }),
                      stream);
        return stream;
    }

    void drop(Limit limit, const Where& where) {
        if (world.dropped[static_cast<int>(limit)]++ == 0) tell(world, limit, where);
    }

    void feed(const Record& record, std::int64_t now_ns) {
        world.now_ns = now_ns;
        ++fed;
        Stream* stream = find(record.stream);
        if (stream == nullptr) {
            if (streams.size() >= world.settings.max_streams) {
                StreamName name{std::string(record.stream), nullptr};
                drop(Limit::streams, {record.time_ns, &name, record.epoch, record.seq});
                return;
            }
            stream = make(record.stream);
        }
        if (stream->epoch < 0) stream->epoch = static_cast<std::int64_t>(record.epoch);
        // Most records are simply the next ones of their streams: those are judged where they lie.
        if (record.seq == stream->next_seq && record.epoch == static_cast<std::uint64_t>(stream->epoch) &&
            stream->idle() && !waits(record)) {
            stream->remember(record.seq, world.hash(record.bytes));
            ++stream->next_seq;
            apply(*stream, record);
            if (!waiting.empty() && (record.kind == KVG_TRANSFER_BEGIN || record.kind == KVG_TRANSFER_END)) {
                const std::string id(record.transfer);
                run(woken({id, std::string(base_of(id))}));
            }
        } else {
            const std::uint64_t seq = record.seq;
            if (!stream->push(record, deadline(now_ns), world.hash))
                lost(world, *stream, {seq, static_cast<std::int64_t>(stream->next_seq - 1)}, "the sequence ran backwards");
            run({stream});
        }
        if (!stream->successors.empty() && world.settings.window_ns < 0)
            restarting.try_emplace(stream, fed + world.settings.restart_records);
        while (!restarting.empty() && overdue()) start_overdue();
        while (stream->holding() > world.settings.max_held) give_up_most_stuck();
    }

    bool waits(const Record& record) {
        return record.kind == KVG_TRANSFER_END && record.code == KVG_RECV && missing_begin(world, record);
    }

    void advance(std::int64_t now_ns) {
        world.now_ns = now_ns;
        for (Stream* stream : std::vector<Stream*>(sorted)) {
            const bool due[3] = {stream->has_wait_deadline && stream->wait_deadline_ns <= now_ns,
                                 stream->has_deadline && stream->deadline_ns <= now_ns,
                                 stream->has_successor_deadline && stream->successor_deadline_ns <= now_ns};
            for (const bool is_due : due)
                if (is_due) give_up(*stream, now_ns);
        }
        confirm_due(now_ns);
        const std::int64_t window = world.settings.window_ns < 0 ? 0 : world.settings.window_ns;
        if (now_ns - window > 0)
            for (const auto& stream : streams) look_for_leaks(*stream, static_cast<std::uint64_t>(now_ns - window));
    }

    void finish() {
        while (give_up_most_stuck()) {
        }
        confirm_due(kForever);
        for (const auto& stream : streams) look_for_leaks(*stream, time_ns);
    }

    bool overdue() const {
        return std::any_of(restarting.begin(), restarting.end(), [&](const auto& r) { return r.second <= fed; });
    }

    // In replay, begins the epochs that have waited long enough for what is left of the old ones.
    void start_overdue() {
        std::vector<Stream*> due;
        for (Stream* stream : sorted)
            if (const auto at = restarting.find(stream); at != restarting.end() && at->second <= fed)
                due.push_back(stream);
        for (Stream* stream : due) {
            while (!stream->successors.empty() && !stream->waiting) give_up(*stream, kForever);
            if (!stream->successors.empty()) {
                restarting[stream] = fed + world.settings.restart_records;
            } else {
                restarting.erase(stream);
            }
        }
    }

    // Gives up one thing that a stream waits for; false when none waits.
    bool give_up_most_stuck() {
        // Holes first: what stands behind one may be the begin that another stream waits for.
        Stream* worst = nullptr;
        for (Stream* stream : sorted) {
            if (stream->holding() == 0) continue;
            if (worst == nullptr || (worst->waiting && !stream->waiting) ||
                (worst->waiting == stream->waiting && stream->holding() > worst->holding()))
                worst = stream;
        }
        if (worst == nullptr) return false;
        give_up(*worst, kForever);
        return true;
    }

    void confirm_due(std::int64_t now_ns) {
        std::vector<std::pair<std::int64_t, Ref<Late>>> suspects;
        suspects.swap(world.suspects);
        for (auto& [due, late] : suspects) {
            if (due <= now_ns) {
                if (!late->written) confirm(world, late.get());
            } else if (!late->confirmed && !late->written) {
                world.suspects.emplace_back(due, std::move(late));
            }
        }
        world.decide(now_ns);
    }

    // Goes on without what the stream waits for, if that is overdue.
    void give_up(Stream& stream, std::int64_t due) {
        if (stream.waiting) {
            if (stream.wait_deadline_ns > due) return;
            stop_waiting(stream);
            apply_first(stream);
        } else if (!stream.held.empty()) {
            if (stream.has_deadline && stream.deadline_ns > due) return;
            Gap gap{};
            if (stream.skip_hole(world.hash, gap)) lost(world, stream, gap, "a hole in kv.seq");
        } else if (!stream.successors.empty()) {
            if (stream.has_successor_deadline && stream.successor_deadline_ns > due) return;
            restart(world, stream);
            stream.leaks.clear();
            stream.start_successor(deadline(world.now_ns), world.hash);
            if (world.witness != nullptr)
                world.witness->epoch(stream.name->text, static_cast<std::uint64_t>(stream.epoch));
            note_moved(stream);
            std::vector<std::string> all;
            for (const auto& [id, names] : waiting) all.push_back(id);
            run(woken(all));
        }
        run({&stream});
    }

    // Judges what is ready, on these streams and on those that waited for what they bring.
    void run(std::vector<Stream*> first) {
        std::deque<Stream*> runnable(first.begin(), first.end());
        while (!runnable.empty()) {
            Stream& stream = *runnable.front();
            runnable.pop_front();
            while (!stream.ready.empty() && !stream.waiting) {
                Record record;
                const Stream::Kept& first = stream.ready.front();
                parse(first.bytes.data(), first.bytes.size(), record);
                // Many that wait behind each other have waited together.
                if (waits(record) && first.due > world.now_ns) {
                    stream.waiting = true;
                    stream.waiting_for = record.transfer;
                    stream.has_wait_deadline = true;
                    stream.wait_deadline_ns = first.due;
                    auto& names = waiting[stream.waiting_for];
                    names.insert(std::upper_bound(names.begin(), names.end(), &stream,
                                                  [](const Stream* a, const Stream* b) {
                                                      return a->name->text < b->name->text;
                                                  }),
                                 &stream);
                    break;
                }
                const bool wakes = record.kind == KVG_TRANSFER_BEGIN || record.kind == KVG_TRANSFER_END;
                const std::string id(wakes ? record.transfer : std::string_view{});
                apply_first(stream);
                if (!wakes || waiting.empty()) continue;
                const auto more = woken({id, std::string(base_of(id))});
                runnable.insert(runnable.end(), more.begin(), more.end());
            }
        }
    }

    // The streams that need not wait for these transfers any more.
    std::vector<Stream*> woken(std::vector<std::string> transfers) {
        std::vector<Stream*> out;
        std::sort(transfers.begin(), transfers.end());
        transfers.erase(std::unique(transfers.begin(), transfers.end()), transfers.end());
        for (const std::string& transfer : transfers) {
            const auto at = waiting.find(transfer);
            if (at == waiting.end()) continue;
            for (Stream* stream : std::vector<Stream*>(at->second)) {
                Record record;
                parse(stream->ready.front().bytes.data(), stream->ready.front().bytes.size(), record);
                if (missing_begin(world, record)) continue;
                stop_waiting(*stream);
                out.push_back(stream);
            }
        }
        return out;
    }

    void stop_waiting(Stream& stream) {
        if (!stream.waiting) return;
        if (const auto at = waiting.find(stream.waiting_for); at != waiting.end()) {
            std::erase(at->second, &stream);
            if (at->second.empty()) waiting.erase(at);
        }
        stream.waiting = stream.has_wait_deadline = false;
        stream.waiting_for.clear();
    }

    void apply_first(Stream& stream) {
        const std::string bytes = std::move(stream.ready.front().bytes);
        stream.ready.pop_front();
        Record record;
        parse(bytes.data(), bytes.size(), record);
        apply(stream, record);
    }

    void note_moved(Stream& stream) {
        if (stream.moved_at < moved.size() && moved[stream.moved_at] == stream.index) return;
        stream.moved_at = moved.size();
        moved.push_back(stream.index);
    }

    void apply(Stream& stream, const Record& record) {
        const Where where{record.time_ns, stream.name, record.epoch, record.seq};
        stream.time_ns = std::max(stream.time_ns, record.time_ns);
        time_ns = std::max(time_ns, record.time_ns);
        find_leaks(stream, stream.time_ns);
        Request* const request = record.request.empty() ? nullptr : world.find_request(record.request, world.request_hash(record));
        if (const auto limit = exceeded(world, stream, record, request)) {
            drop(*limit, where);
        } else if (record.kind == KVG_POOL) {
            announce(world, stream, record, where);
        } else if (record.kind == KVG_SCRUB) {
            scrub(world, stream, record);
        } else if (record.kind != KVG_PLACE) {
            apply_to_request(stream, record, where, request);
        }
        stream.processed = static_cast<std::int64_t>(record.seq);
        note_moved(stream);
        if (want_judged) judged.push_back(record.time_ns);
    }

    void apply_to_request(Stream& stream, const Record& record, const Where& where, Request* known) {
        RequestStream* rs = world.request(record, stream, known);
        if (rs->gone) {
            reborn(world, rs);
            rs = world.request(record, stream, rs->request);
        }
        const RsRef keep(rs);
        rs->epoch = record.epoch;
        went_on(world, stream, rs, record, where);
        switch (record.kind) {
            case KVG_ADMIT: admit(world, stream, rs, record); break;
            case KVG_ALLOC: alloc(world, stream, rs, record, where); break;
            case KVG_SHARE: share(world, stream, rs, record, where); break;
            case KVG_WRITE: write(world, stream, rs, record, where); break;
            case KVG_TRANSFER_BEGIN: begin(world, stream, rs, record, where); break;
            case KVG_TRANSFER_END:
                if (record.code == KVG_SEND) {
                    end_sent(world, record, where);
                } else {
                    end_received(world, stream, rs, record, where);
                }
                break;
            case KVG_READ:
                read(world, stream, rs, record, where);
                dead_or_rejected(world, rs->request);
                break;
            case KVG_REFUSE: refuse(world, stream, rs, record, where); break;
            case KVG_FREE:
            case KVG_CACHE: give_back(world, stream, rs, record, where); break;
            case KVG_REQUEST_END: request_end(world, stream, rs, record, where); break;
            case KVG_RESPOND: respond(world, stream, rs, record, where); break;
            default: break;
        }
    }

    void restore(const Restored& before);
    Where last_of(StreamName* name);

    void look_for_leaks(Stream& stream, std::uint64_t to) {
        ++stream.looks;
        stream.looked_to = to;
        find_leaks(stream, to);
    }

    void find_leaks(Stream& stream, std::uint64_t to) {
        while (!stream.leaks.empty() && stream.leaks.front().deadline < to) {
            const LeakWatch watch = stream.next_leak();
            if (world.request_streams.is_live(watch.rs) && watch.rs->serial == watch.serial) leaked(world, watch.rs, watch.where);
        }
    }
};

}  // namespace kvguard
