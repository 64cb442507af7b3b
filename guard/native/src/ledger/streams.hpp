// Order within a stream: holes, repeats, restarts, and how long to wait for what is missing.
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "ledger/requests.hpp"

namespace kvguard {

// Records first to last (inclusive) that did not come.
struct Gap {
    std::uint64_t first;
    std::int64_t last;
};

// An end of a request on the stream; at its deadline it may own no page. A weak reference: who is gone owns nothing.
struct LeakWatch {
    std::uint64_t deadline;
    RequestStream* rs;
    std::uint64_t serial;
    Where where;
};

// One emitter's stream: takes records in any order, gives them back in the order of kv.seq. What waits is kept as
// bytes; what need not wait never is.
struct Stream {
    static constexpr std::size_t kRecent = 1024;
    static constexpr std::size_t kRemembered = 64;
    static constexpr std::int64_t kNone = -1;  // no deadline

    StreamName* name = nullptr;
    std::uint32_t index = 0;
    std::int64_t epoch = -1;
    std::uint64_t next_seq = 0;
    std::int64_t processed = -1;
    ClockRef clock;
    std::uint64_t time_ns = 0;
    std::int64_t resumed = -1;  // records below it were judged before the guard's restart; -1: there was none in this epoch
    std::size_t moved_at = 0;  // its place among those whose watermark moved, if it is there
    // A record that waits, and the arrival time until which it may, from when it came itself.
    struct Kept {
        std::string bytes;
        std::int64_t due;
    };
    std::map<std::uint64_t, Kept> held;
    std::deque<Kept> ready;
    bool has_deadline = false, has_wait_deadline = false, has_successor_deadline = false;
    std::int64_t deadline_ns = 0, wait_deadline_ns = 0, successor_deadline_ns = 0;
    bool waiting = false;
    std::string waiting_for;
    std::vector<std::pair<std::uint64_t, std::map<std::uint64_t, std::string>>> successors;  // as they came
    std::size_t later = 0;                                                                  // records in them
    // One given out lately, at the place of its seq modulo kRecent.
    struct Recent {
        std::uint64_t hash = 0;
        std::uint32_t seq = 0;    // its low half
        std::uint32_t given = 0;  // how many had been given out with it, modulo 2^32; 0: none here
    };
    std::vector<Recent> recent;
    std::uint32_t given = 0;
    std::deque<Gap> given_up;
    std::deque<std::uint64_t> past;
    std::uint64_t duplicates = 0, late = 0;
    std::vector<LeakWatch> leaks;  // a heap, the earliest deadline first
    std::uint64_t looks = 0;       // how often leaks were looked for although no record came,
    std::uint64_t looked_to = 0;   // the last time for deadlines before this

    void watch_leak(std::uint64_t deadline, RequestStream* rs, const Where& where);
    LeakWatch next_leak();
    // Whether leaks of that deadline were looked for since `looks` was that.
    bool looked_at(std::uint64_t deadline, std::uint64_t looks_then) const {
        return deadline < time_ns || (looks > looks_then && deadline < looked_to);
    }
    std::string_view key() const { return name->text; }
    std::size_t holding() const { return held.size() + ready.size() + later; }
    bool idle() const { return held.empty() && ready.empty() && !waiting; }

    void remember(std::uint64_t seq, std::uint64_t hash) {
        if (recent.empty()) recent.resize(kRecent);
        given += given == UINT32_MAX ? 2 : 1;
        recent[seq % kRecent] = {hash, static_cast<std::uint32_t>(seq), given};
    }
    // Whether it was given out lately with this hash.
    bool remembers(std::uint64_t seq, std::uint64_t hash) const {
        if (recent.empty()) return false;
        const Recent& known = recent[seq % kRecent];
        return known.given != 0 && known.seq == static_cast<std::uint32_t>(seq) && known.hash == hash &&
               given - known.given < kRecent;
    }
    // Takes in a record that is not simply the next one; false when the sequence runs backwards with it.
    bool push(const Record& record, std::int64_t deadline, const Hash& hash);
    // Gives up the hole before what is held; false when there is none.
    bool skip_hole(const Hash& hash, Gap& gap);
    // Goes on to the next epoch that is held. What was ready of the old one must be done first.
    void start_successor(std::int64_t deadline, const Hash& hash);

  private:
    bool push(std::uint64_t seq, std::string_view bytes, std::int64_t deadline, const Hash& hash);
    void let_go(const Hash& hash);
};

}  // namespace kvguard
