// The ledger: the deterministic state machine of guard/ledger (the readable specification), at memory speed.
//
// Takes records in any order of arrival, applies the rules in each stream's order, and tells what it concludes as
// events. No I/O, no clock but its arguments, no thread of its own: one thread calls it.
#pragma once

#include <cstdint>
#include <memory>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "records.hpp"

namespace kvguard {

// The kinds of findings, in the order of guard.findings.Kind.
enum class Kind : std::uint8_t {
    foreign_read, stale_read, foreign_write, tainted_response, zombie_request, double_owner, digest_mismatch,
    canary_hit, short_transfer, free_in_flight, foreign_share, double_free, wrong_status, over_capacity,
    hook_divergence, page_leak, stream_gap, unverified_transfer, unscrubbed_reuse,
};
inline constexpr int kKinds = 19;
const char* name_of(Kind kind);

// From weakest to strongest, as guard.findings.Action.
enum class Action : std::uint8_t { observe, alert, quarantine, kill };
const char* name_of(Action action);

struct Policy {
    bool permit_sharing = false;
    bool require_digests = false;
    bool require_scrub = false;
    bool act_on_degraded = false;
    Action actions[kKinds];  // what is done about each kind; the caller fills in all of them

    Action action(Kind kind, bool degraded) const {
        const Action a = actions[static_cast<int>(kind)];
        return degraded && !act_on_degraded && a > Action::alert ? Action::alert : a;
    }
};

// guard.ledger.LedgerSettings, field by field; see there what each means.
struct Settings {
    std::int64_t window_ns = 200'000'000;  // < 0: wait for the end of the input (replay)
    std::uint64_t leak_grace_ns = 30'000'000'000;
    std::string leak_grace_text = "30";  // as a reason prints it (Python's :g)
    std::uint64_t max_held = 16'384;
    std::uint64_t restart_records = 256;
    std::uint64_t max_ended = 16'384;
    std::uint64_t max_streams = 4096;
    std::uint64_t max_pool_pages = 4'194'304;
    std::uint64_t max_pools = 4096;
    std::uint64_t max_pages = 16'777'216;
    std::uint64_t max_requests = 1'048'576;
    std::uint64_t max_request_streams = 64;
    std::uint64_t max_transfers = 65'536;
};

// Which limit a dropped record was beyond; names as in LedgerSettings.
enum class Limit : std::uint8_t { streams, pools, pages, requests, request_streams, transfers, page_transfers };
inline constexpr int kLimits = 7;
const char* name_of(Limit limit);

// One finding, as guard.findings.Finding: one for each (kind, request, pool), grown by further evidence.
struct Finding {
    Kind kind;
    Action action = Action::observe;
    bool has_request = false, has_tenant = false, has_pool = false, has_transfer = false;
    bool degraded = true;
    std::string request, tenant, pool, stream, transfer, reason;
    std::uint64_t epoch = 0, seq = 0, time_ns = 0;
    std::set<std::string> other_tenants, other_requests;
    std::set<std::string> subjects;  // the requests that a kill ends
    std::vector<std::pair<std::uint64_t, std::uint64_t>> pages;  // half-open runs, rising, joined
    bool kills() const { return action == Action::kill; }
};

// What is known of a request for replay's report and for whoever asks.
struct RequestSummary {
    std::string id;
    bool has_tenant = false;
    std::string tenant;
    std::vector<std::string> lineage;  // sorted
    bool killed = false, disclosed = false;
};

struct Event {
    enum class What : std::uint8_t { found, grown, retired } what;
    std::shared_ptr<const Finding> finding;  // found: new; grown: more was added. The live object: it may grow on.
    RequestSummary request;                  // retired: a request that is over is forgotten
};

struct StreamState {
    std::string name;
    std::int64_t epoch = -1;      // -1: none yet
    std::int64_t processed = -1;  // every record up to it is judged: the watermark
    std::uint64_t duplicates = 0, late = 0;
    std::uint64_t time_ns = 0;  // of its newest record judged
};

struct Sizes {
    std::uint64_t pages = 0, requests_live = 0, requests_ended = 0, transfers = 0, records_held = 0;
};

// What a restarted guard knew of before: from the journal, given to `Ledger::restore` before any record.
struct Restored {
    struct Stream {
        std::string name;
        std::uint64_t epoch;
        std::int64_t processed;
        std::uint64_t time_ns;
        std::vector<std::uint64_t> past;  // epochs that are over, oldest first, at most 64
    };
    struct Pool { std::string id, stream; std::uint64_t pages, page_tokens; std::uint8_t role; };
    struct Live { std::string request, stream, tenant; bool ended; };
    std::vector<Stream> streams;
    std::vector<Pool> pools;
    std::vector<Live> requests;
};

// Told what a restart must know, as it happens. Called from within feed/advance; must be quick.
class Witness {
  public:
    virtual ~Witness() = default;
    virtual void pool(std::string_view id, std::string_view stream, std::uint64_t pages, std::uint64_t page_tokens,
                      std::uint8_t role) = 0;
    virtual void epoch(std::string_view stream, std::uint64_t epoch) = 0;
    virtual void request(std::string_view request, std::string_view stream, std::string_view tenant) = 0;
    virtual void ended(std::string_view request, std::string_view stream) = 0;
    virtual void retired(std::string_view request) = 0;  // forgotten altogether
};

class Ledger {
  public:
    Ledger(const Policy& policy, const Settings& settings);
    ~Ledger();
    Ledger(const Ledger&) = delete;
    Ledger& operator=(const Ledger&) = delete;

    // Takes one parsed record in (its bytes may go as soon as this returns) and judges all that it makes ready.
    // A KVG_PLACE record only takes its place in the stream.
    void feed(const Record& record, std::int64_t now_ns);
    // A hint, for speed alone: the record will be fed some records from now.
    void expect(Record& record);
    static constexpr std::size_t kAhead = 10;  // as far ahead as it is worth while
    // Time passes: gives up what should have come by now, and looks for leaks.
    void advance(std::int64_t now_ns);
    // The input is over: whatever did not come will not.
    void finish();

    // Before any record: pools, epochs and live requests of the guard before this one. Vouches for none of their
    // pages, and says so in a degraded stream-gap for each pool.
    void restore(const Restored& before);

    // What happened since the caller last cleared it.
    std::vector<Event>& events();
    // Which `retired` events are wanted (none by default). `marked`: of requests that some finding names or hits,
    // with the id alone; `all`: of every request, with its summary.
    enum class Retired : std::uint8_t { none, marked, all };
    void want_retired(Retired wanted);
    void set_witness(Witness* witness);

    // Streams by index, in the order they were first heard of; an index stays for good.
    std::size_t streams() const;
    StreamState stream(std::size_t index) const;
    // Indices of the streams whose watermark moved since the caller last cleared it (each once).
    std::vector<std::uint32_t>& moved();
    // The times (time_ns) of the records judged since the caller last cleared it, for a latency histogram;
    // kept only when wanted (they are not by default).
    std::vector<std::uint64_t>& judged();
    void want_judged(bool wanted);
    // (epoch, seq) up to which a stream is judged; (-1, -1) for an unknown stream.
    std::pair<std::int64_t, std::int64_t> watermark(std::string_view stream) const;

    Sizes sizes() const;
    std::uint64_t gaps() const;     // holes given up, sequences that ran backwards, transfers that never began
    std::uint64_t dropped() const;  // records beyond a limit, in all
    std::uint64_t dropped(Limit limit) const;
    std::uint64_t bytes() const;  // memory kept for tables, roughly

    std::vector<std::string> request_ids() const;  // those known, live and lately ended, in the order they came
    bool request(std::string_view id, RequestSummary& out) const;

  private:
    struct Impl;
    std::unique_ptr<Impl> impl_;
};

// Calls `take(record)` for at most `most` records of `rows` from `at` on, each of them expected by the ledger some
// records before, and moves `at` behind them. False when what stands there is no record: nothing behind it is read.
template <class Take>
bool each_expected(Ledger& ledger, const Rows& rows, std::size_t& at, std::size_t most, Take&& take) {
    Record ahead[Ledger::kAhead];
    std::size_t parsed = 0, taken = 0;
    bool whole = true;
    for (;;) {
        while (whole && at < rows.bytes.size() && parsed < most && parsed - taken < Ledger::kAhead) {
            Record& record = ahead[parsed % Ledger::kAhead];
            // They come out of another core's cache, or out of none.
            for (std::size_t line = 0; line < 256; line += 64) __builtin_prefetch(rows.bytes.data() + at + 2048 + line);
            whole = parse(rows.bytes.data() + at, rows.bytes.size() - at, record) == nullptr;
            if (!whole) break;
            at += padded(record.bytes.size());
            ledger.expect(record);
            ++parsed;
        }
        if (taken == parsed) return whole;
        take(ahead[taken++ % Ledger::kAhead]);
    }
}

}  // namespace kvguard
