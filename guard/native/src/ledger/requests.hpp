// Requests: what each has read, on each stream, and what became of it.
#pragma once

#include <algorithm>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <unordered_set>
#include <vector>

#include "ledger/blocks.hpp"
#include "ledger/ledger.hpp"
#include "ledger/log.hpp"
#include "ledger/memory.hpp"
#include "ledger/pages.hpp"
#include "ledger/runs.hpp"
#include "ledger/taint.hpp"

namespace kvguard {

struct World;
struct Request;
struct Transfer;
using u128 = unsigned __int128;

// A record's place: enough to name it in a finding and to order it.
struct Where {
    std::uint64_t time_ns = 0;
    StreamName* stream = nullptr;
    std::uint64_t epoch = 0, seq = 0;
};
int compare(const Where& a, const Where& b);

// What a stream has seen of others through transfers: (epoch, seq) of each. Shared, never changed while it is.
struct Clock {
    struct Seen {
        StreamName* stream;
        std::int64_t epoch, seq;
    };
    std::vector<Seen> seen;
    // (0, -1) for a stream never seen.
    std::pair<std::int64_t, std::int64_t> of(const StreamName* stream) const {
        for (const Seen& s : seen)
            if (s.stream == stream) return {s.epoch, s.seq};
        return {0, -1};
    }
};
using ClockRef = std::shared_ptr<Clock>;  // null: nothing seen

// A `rejected` or `failed` on a stream, and what that stream had seen of the others by then.
struct Death {
    StreamName* stream;
    Where where;
    std::uint8_t outcome;
    ClockRef clock;
    bool degraded;  // it may have seen more of them, in records that the guard missed
};

// Counts of tokens do not go beyond this; it is the convention's largest number.
inline constexpr std::uint64_t kMostTokens = INT64_MAX;
inline std::uint64_t at_most(u128 tokens) {
    return tokens < kMostTokens ? static_cast<std::uint64_t>(tokens) : kMostTokens;
}

// What a request has of one pool, on one stream.
struct Holding {
    Pool* pool = nullptr;
    std::uint64_t owned = 0;  // pages
    RunList owned_runs;       // where they may be: pages handed to it, given back or not; none when it owns none
    std::uint64_t shared = 0, landed = 0, written = 0;  // valid tokens
    std::uint64_t valid() const { return std::max(at_most(u128{shared} + landed), written); }
};

inline constexpr std::size_t kMaxPending = 16;    // ends that wait for a later alloc

// One request on one stream (and epoch): the unit that owns pages, reads and writes.
struct RequestStream {
    RequestStream(Request* request, StreamName* stream, Name* tenant, std::uint64_t serial)
        : request(request), stream(stream), tenant(tenant), serial(serial) {}
    ~RequestStream();

    struct Share {
        Pool* pool;
        std::uint64_t index;
        std::uint32_t incarnation, share_epoch;
    };
    // An end at which it owned nothing.
    struct End {
        std::uint64_t deadline = 0;
        std::uint64_t looks = 0;  // of its stream, when it came
        std::uint64_t time_ns = 0, seq = 0;
    };
    // What few have.
    struct Rare {
        std::vector<Holding> holdings;  // of further pools
        std::vector<Share> shared;
        std::vector<End> ends;          // after the first, until it owns pages again
        std::map<std::pair<Pool*, std::uint64_t>, std::vector<Ref<Late>>> late;
        std::map<Pool*, std::unordered_set<std::uint64_t>> permitted;
        std::uint64_t prompt_tokens = 0;  // when over_capacity
    };

    Request* request;
    StreamName* stream;
    Ref<Name> tenant;
    Ref<Taint> label;      // what its next write is made of
    std::uint64_t serial;  // tells a slot's lives apart
    std::uint64_t epoch = 0;  // its records'
    bool ended = false;
    bool gone = false;  // the stream has restarted since: the pages that it had are no more
    bool ended_unseen = false;  // its end was seen by the guard before this one only
    bool marked_degraded = false;
    bool followed = true;  // until another life takes its place, or the request is forgotten
    bool over_capacity = false;
    bool ended_empty = false;           // `first_end` is one
    bool look_again = false;            // a page with kSeen of it has changed
    Pool* seen_pool = nullptr;          // where it read only pages of its own last, and found nothing amiss
    std::uint32_t seen_changes = 0;     // that pool's `changes`
    std::uint32_t read_runs = 0;        // of the read kept last
    std::uint64_t losses_before = 0;    // of its stream, when it began
    Holding holding;                    // of the first pool
    Log reads, responses;               // kept for rules that compare streams
    Log released;                       // pages given back
    std::uint64_t read_hash = 0;        // of all runs but the last of the read kept last
    std::unique_ptr<Rare> rare;
    End first_end;

    Where at(std::uint64_t time_ns, std::uint64_t seq) const { return {time_ns, stream, epoch, seq}; }
    Where where(const Log::Entry& entry) const {
        if (entry.place.stream == nullptr) return at(entry.time_ns, entry.seq);
        return {entry.time_ns, entry.place.stream, entry.place.epoch, entry.seq};
    }
    Rare& more() {
        if (!rare) rare = std::make_unique<Rare>();
        return *rare;
    }
    void set_ended();
    bool has_lates() const { return rare && !rare->late.empty(); }
    // The guard missed some of its records.
    bool degraded() const { return marked_degraded || (followed && losses_before != stream->losses); }
    // It is no request's any more: what is missed of its stream from now on is not of it.
    void leave() {
        marked_degraded = degraded();
        followed = false;
    }
    // Good until that of another pool is asked for.
    Holding& in(Pool* pool) {
        if (Holding* const known = find(pool); known != nullptr) return *known;
        if (holding.pool == nullptr) {
            holding.pool = pool;
            return holding;
        }
        more().holdings.emplace_back().pool = pool;
        return rare->holdings.back();
    }
    Holding* find(const Pool* pool) {
        if (holding.pool == pool) return &holding;
        if (rare)
            for (Holding& further : rare->holdings)
                if (further.pool == pool) return &further;
        return nullptr;
    }
    template <class F>
    void each_holding(F&& visit) {
        if (holding.pool != nullptr) visit(holding);
        if (rare)
            for (Holding& further : rare->holdings) visit(further);
    }
    bool owns_nothing() const {
        if (holding.owned != 0) return false;
        if (rare)
            for (const Holding& further : rare->holdings)
                if (further.owned != 0) return false;
        return true;
    }
};
static_assert(sizeof(RequestStream) <= 256);

// One request over all streams. Its streams live and go with it.
struct Request {
    Request(World* world, Name* id) : world(world), id(id), hash(id->hash) {}
    ~Request();

    World* world;
    Ref<Name> id;
    std::uint64_t hash;  // of its id
    Ref<Taint> own;      // the label of its own bytes, as its first stream's tenant
    std::uint32_t refs = 0;
    bool known = false;           // in the tables
    bool ended = false;           // in the list of those that are over
    bool suspected = false;       // a stream of it had a late writer at some time
    bool responded = false;       // a stream of it has answered 2xx
    std::uint32_t open = 0;       // streams of it that it has not ended on
    SmallVec<StreamName*, 3> names;       // of its streams
    SmallVec<RequestStream*, 3> streams;  // in the same order
    SmallVec<Transfer*, 1> transfers;  // begun for it and not yet ended on both sides; counted
    // What few have.
    struct Rare {
        std::vector<RequestStream*> former;  // lives on streams that have restarted since
        std::vector<Death> deaths;
        std::vector<StreamName*> rejections;
        std::vector<std::shared_ptr<Finding>> findings;
    };
    std::unique_ptr<Rare> rare;
    Request *previous = nullptr, *next = nullptr;          // among those known, as they came
    Request *ended_previous = nullptr, *ended_next = nullptr;  // among those over

    RequestStream* on(const StreamName* stream) const {
        for (std::uint32_t i = 0; i < names.size(); ++i)
            if (names[i] == stream) return streams[i];
        return nullptr;
    }
    bool over() const { return open == 0; }
    bool owns_nothing() const {
        for (const RequestStream* rs : streams)
            if (!rs->owns_nothing()) return false;
        return true;
    }
    Rare& more() {
        if (!rare) rare = std::make_unique<Rare>();
        return *rare;
    }
    bool killed() const;
    RequestSummary summary() const;
};

inline void Page::forget_seen() {
    set(kSeen, false);
    owner->look_again = true;
}

inline void RequestStream::set_ended() {
    if (!ended) --request->open;
    ended = true;
}

void retain(Request* request);
void release(Request* request);
inline void retain(RequestStream* rs) { retain(rs->request); }
inline void release(RequestStream* rs) { release(rs->request); }
using RsRef = Ref<RequestStream>;

// One transfer (or one piece of one), from its begin until both sides have ended it.
struct Transfer {
    explicit Transfer(World* world) : world(world) {}

    World* world;
    std::uint32_t refs = 0;
    bool in_flight = false;  // in the tables
    RsRef sender;
    Where where;
    ClockRef clock;  // what the sender's stream had seen before this begin
    Pool* source_pool = nullptr;
    Pool* pool = nullptr;  // the destination
    // Views of a copy of its begin.
    std::string_view id, digests;
    Pages pages, peer_pages;
    void* copy = nullptr;
    std::size_t copy_size = 0;
    std::uint64_t into_end = 0;  // it is listed for its destination pages below this one; 0: for none
    std::uint64_t tokens = 0;
    bool has_digests = false;
    std::uint64_t hash = 0;  // of its id
    Ref<Taint> taint;  // every label that its source pages carry while it is in flight
    bool sent = false, received = false;
    std::uint8_t sent_status = 0;
    Where sent_at;
    bool sent_at_known = false;  // false: the sender's process went
    std::vector<Ref<Late>> late;  // pages that it may still write to although they were given up
    Transfer *previous = nullptr, *next = nullptr;  // among those in flight, as they began

    ~Transfer();
    std::string_view key() const { return id; }
    Request* request() const { return sender->request; }
    // Visits the destination pages that it is listed for.
    template <class F>
    void each_into(F&& visit) const {
        for (std::uint32_t i = 0; i < peer_pages.runs(); ++i) {
            const Pages::Run run = peer_pages.run(i);
            for (std::uint64_t p = run.first; p < std::min(run.stop(), into_end); ++p) visit(p);
        }
    }
    bool goes_into(const Pool* to, std::uint64_t index) const {
        return to == pool && index < into_end && contains(peer_pages, index);
    }
    // Whether the sender's end is known to come before a point whose stream has seen `clock`.
    bool done_before(const Clock* clock) const;
};
void retain(Transfer* transfer);
void release(Transfer* transfer);

// A writer that may still come to a page that its request gave up (or never had): guard/ledger/transfers.py `Late`.
struct Late {
    explicit Late(World* world) : world(world) {}

    World* world;
    std::uint32_t refs = 0;
    RsRef rs;
    Pool* pool = nullptr;
    std::uint64_t index = 0;
    std::uint32_t incarnation = 0;  // the pool's, when the page was one of it; 0: it is none any more
    bool unvouched = false;
    bool has_released = false;
    Where released;
    Ref<Transfer> transfer;
    bool confirmed = false, written = false;
    Ref<Taint> taint;  // empty until the sender's `ok`
    std::vector<RsRef> victims;

    // Null when the pool has restarted since.
    Page* page() const { return incarnation == pool->incarnation ? pool->slot(index) : nullptr; }
};
void retain(Late* late);
void release(Late* late);

inline constexpr std::size_t kMaxVictims = 64;

}  // namespace kvguard
