// The guard at work: the one loop that takes records in, has them judged, and publishes what came of it.
#pragma once

#include <array>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "board.hpp"
#include "inbox.hpp"
#include "incidents.hpp"
#include "journal.hpp"
#include "ledger/ledger.hpp"
#include "recent.hpp"
#include "ring.hpp"

namespace kvguard {

// A mutex that is had in the order it was asked for: the loop, which lets go of it only to take it again, must not
// keep it from others.
class FairMutex {
  public:
    void lock() {
        const std::lock_guard turn(next_);
        mutex_.lock();
    }
    void unlock() { mutex_.unlock(); }

  private:
    std::mutex next_, mutex_;
};

// Something for the slow part of the guard to know of.
struct Happened {
    bool over = false;                // the incident's request is forgotten: it grows no more
    std::vector<Incident> incidents;  // that one, or those that the finding belongs to
    Finding finding;
    bool fresh = false;            // the finding is new, not grown
    std::int64_t received_ns = 0;  // when the record was received that showed it last
};

inline constexpr std::array<double, 14> kLatencyBounds = {0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01,
                                                          0.02,   0.05,   0.1,    0.25,  0.5,   1.0,   5.0};

struct CoreStats {
    Sizes sizes;
    std::uint64_t streams = 0, duplicates = 0, late = 0, gaps = 0;
    std::uint64_t dropped[kLimits] = {};
    std::uint64_t records[KVG_KINDS] = {};
    std::uint64_t broken = 0;  // bytes in the inbox that were no records
    std::uint64_t kills = 0, kills_withheld = 0;
    // Seconds from a record's time to its verdict: within each bound and above the one before; the last above them all.
    std::uint64_t latency[kLatencyBounds.size() + 1] = {};
    double latency_sum = 0;
    std::uint64_t ledger_bytes = 0;
    std::uint64_t waiting = 0;  // what happened and was not taken yet
    std::uint64_t journal_bytes = 0, journal_failures = 0;
    std::vector<RingReader::Lane> lanes;
};

// One thread calls `run`, another `take`; the rest is for any thread. Nothing here waits for the slow part, but where
// `kMostWaiting` of its events wait: a sender that makes findings faster than they can be written is held back.
class Core {
  public:
    static constexpr std::size_t kMostWaiting = 8192;

    // The ring and the journal are optional. Inbox, board and journal must outlive it, and board and journal are its
    // own while it runs.
    Core(const Policy& policy, const Settings& settings, bool enforce, Inbox& inbox, BoardWriter& board,
         std::unique_ptr<RingReader> ring, Journal* journal, std::size_t recent_bytes);

    // Before `run`: what the guard before this one knew.
    void restore(const Restored& before);

    // Judges until the inbox is closed and everything is judged. Throws what the ledger or the board does.
    void run();
    // What happened, at most `kMostTaken` of it; waits until there is something or the time is over. False once `run`
    // is over and everything was taken.
    bool take(std::vector<Happened>& out, std::int64_t timeout_ns);
    static constexpr std::size_t kMostTaken = 64;
    // Nobody will take what happens any more: `run` need not wait for it.
    void abandon();

    // What is kept of these requests, and of these streams' records that name no request.
    std::vector<Recent::Kept> evidence(const std::vector<std::string>& requests,
                                       const std::vector<std::string>& streams);
    // The store has these incidents.
    void settled(const std::vector<std::string>& incidents);
    CoreStats stats();
    // When the last round was done; CLOCK_MONOTONIC.
    std::int64_t last_round_ns() const { return last_round_ns_.load(std::memory_order_relaxed); }

  private:
    struct Waiting {
        std::shared_ptr<const Finding> finding;  // null: of a request that is over
        bool fresh = false;
        std::int64_t received_ns = 0;
        std::vector<std::shared_ptr<Incident>> incidents;
    };

    std::int64_t now_ns() const;
    bool take_from_inbox();
    bool take_from_ring();
    bool feed(const Rows& rows, std::size_t& at, std::int64_t received_ns);
    void tick();
    void act();
    void act_on(const Event& event);
    std::shared_ptr<Incident> note(Waiting& waiting, const std::string* request);
    void kill(Incident& incident, const Finding& finding);
    void write_down(Incident& incident, const Finding& finding, std::int64_t record_ns, std::int64_t verdict_ns);
    void publish();
    void mark_journal();
    void rest();
    bool wait_for_taker();
    bool crowded();
    void end();

    const bool enforce_;
    Inbox& inbox_;
    BoardWriter& board_;
    const std::shared_ptr<RingReader> ring_;  // the inbox's bell has it too
    Journal* const journal_;

    FairMutex mutex_;  // over everything from here on; `run` holds it while it judges
    Ledger ledger_;
    Recent recent_;
    Incidents incidents_;
    std::deque<Waiting> waiting_;  // for `take`
    std::uint64_t taken_count_ = 0;
    std::unordered_map<const Finding*, std::uint64_t> waiting_at_;  // finding -> its number, those taken counted too
    Inbox::Message message_;  // that is being judged
    std::size_t message_at_ = 0;
    Rows rows_;  // out of the ring
    CoreStats counts_;
    bool unflushed_ = false;
    std::vector<std::uint32_t> unmarked_;  // streams whose watermark the journal does not have
    std::int64_t judging_ns_ = 0;          // the time of the record that is judged; 0 when it is time that passes
    std::int64_t received_ns_ = 0;
    std::int64_t clock_offset_ns_;
    std::uint64_t started_ns_;  // 0 once the verdicts of the guard before this one were let go of
    std::int64_t next_tick_ns_ = 0, next_mark_ns_ = 0, next_housekeeping_ns_ = 0;

    std::atomic<std::int64_t> last_round_ns_;
    std::mutex bell_;
    std::condition_variable rung_;   // there is something to take
    std::condition_variable taken_;  // there is room again
    bool news_ = false, room_ = false, ended_ = false, abandoned_ = false;  // under bell_
};

}  // namespace kvguard
