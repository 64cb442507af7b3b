// Requests: what each has read, on each stream, and what became of it.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <unordered_set>
#include <vector>

#include "ledger/ledger.hpp"
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

// A read, or a 2xx response, kept for rules that compare streams.
struct Looked {
    Where where;
    Ref<Name> pool;
    PageRuns pages;
};

struct Released {
    Pool* pool = nullptr;
    PageRuns pages;
    Where where;
};

// A `rejected` or `failed` on a stream, and what that stream had seen of the others by then.
struct Death {
    StreamName* stream;
    Where where;
    std::uint8_t outcome;
    ClockRef clock;
    bool degraded;  // it may have seen more of them, in records that the guard missed
};

// What a request has of one pool, on one stream.
struct Holding {
    Pool* pool = nullptr;
    std::uint64_t owned = 0;                // pages
    PageRuns owned_runs;                    // where they may be: pages handed to it, given back or not
    u128 shared = 0, landed = 0, written = 0;  // valid tokens
    u128 valid() const { return shared + landed > written ? shared + landed : written; }
};

inline constexpr std::size_t kMaxLooked = 1024;   // reads, and responses, kept of a request on a stream
inline constexpr std::size_t kMaxPending = 16;    // ends that wait for a later alloc

// One request on one stream (and epoch): the unit that owns pages, reads and writes.
struct RequestStream {
    RequestStream(Request* request, StreamName* stream, Name* tenant, std::uint64_t serial)
        : request(request), stream(stream), tenant(tenant), serial(serial) {}

    Request* request;
    StreamName* stream;
    Ref<Name> tenant;
    std::uint64_t serial;  // tells a slot's lives apart
    bool ended = false;
    bool gone = false;  // the stream has restarted since: the pages that it had are no more
    bool ended_unseen = false;  // its end was seen by the guard before this one only
    bool marked_degraded = false;
    bool followed = true;  // until another life takes its place, or the request is forgotten
    bool over_capacity = false;
    Where end;
    std::uint64_t losses_before = 0;    // of its stream, when it began
    std::uint64_t prompt_tokens = 0;    // when over_capacity
    Ref<Taint> label;                   // what its next write is made of
    FewOf<Holding> holdings;
    FewOf<Looked> reads, responses;
    FewOf<Released> released;
    struct Share {
        Pool* pool;
        std::uint64_t index;
        std::uint32_t incarnation, share_epoch;
    };
    std::vector<Share> shared;
    std::unique_ptr<std::map<std::pair<Pool*, std::uint64_t>, std::vector<Ref<Late>>>> late;
    std::unique_ptr<std::map<Pool*, std::unordered_set<std::uint64_t>>> permitted;
    struct End {
        std::uint64_t deadline = 0;
        std::uint64_t looks = 0;  // of its stream, when it came
        Where where;
    };
    FewOf<End> pending_leaks;  // ends at which it owned nothing

    // The guard missed some of its records.
    bool degraded() const { return marked_degraded || (followed && losses_before != stream->losses); }
    // It is no request's any more: what is missed of its stream from now on is not of it.
    void leave() {
        marked_degraded = degraded();
        followed = false;
    }
    Holding& in(Pool* pool) {
        if (Holding* const known = find(pool); known != nullptr) return *known;
        return holdings.push_back(Holding{pool, 0, {}, 0, 0, 0});
    }
    Holding* find(const Pool* pool) {
        for (std::size_t i = 0; i < holdings.size(); ++i)
            if (holdings[i].pool == pool) return &holdings[i];
        return nullptr;
    }
    bool owns_nothing() const {
        for (std::size_t i = 0; i < holdings.size(); ++i)
            if (holdings[i].owned != 0) return false;
        return true;
    }
};

// One request over all streams. Its streams live and go with it.
struct Request {
    explicit Request(World* world, Name* id) : world(world), id(id) {}
    ~Request();

    World* world;
    Ref<Name> id;
    Ref<Taint> own;  // the label of its own bytes, as its first stream's tenant
    std::uint32_t refs = 0;
    bool known = false;           // in the tables
    bool ended = false;           // in the list of those that are over
    SmallVec<RequestStream*, 3> streams;
    std::vector<RequestStream*> former;  // lives on streams that have restarted since
    std::vector<Death> deaths;
    std::vector<StreamName*> rejections;
    std::vector<Ref<Transfer>> transfers;  // begun for it and not yet ended on both sides
    std::vector<std::shared_ptr<Finding>> findings;
    Request *previous = nullptr, *next = nullptr;          // among those known, as they came
    Request *ended_previous = nullptr, *ended_next = nullptr;  // among those over

    RequestStream* on(const StreamName* stream) const {
        for (RequestStream* rs : streams)
            if (rs->stream == stream) return rs;
        return nullptr;
    }
    bool over() const {
        for (const RequestStream* rs : streams)
            if (!rs->ended) return false;
        return true;
    }
    bool owns_nothing() const {
        for (const RequestStream* rs : streams)
            if (!rs->owns_nothing()) return false;
        return true;
    }
    bool killed() const;
    RequestSummary summary() const;
};

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
    std::string id;
    RsRef sender;
    Where where;
    ClockRef clock;  // what the sender's stream had seen before this begin
    Pool* source_pool = nullptr;
    Pool* pool = nullptr;  // the destination
    PageRuns pages, peer_pages;
    SmallVec<std::uint64_t, 2> into;  // destination pages that it is listed for, as runs
    std::uint64_t tokens = 0;
    bool has_digests = false;
    std::string digests;
    Ref<Taint> taint;  // every label that its source pages carry while it is in flight
    bool sent = false, received = false;
    std::uint8_t sent_status = 0;
    Where sent_at;
    bool sent_at_known = false;  // false: the sender's process went
    std::vector<Ref<Late>> late;  // pages that it may still write to although they were given up
    Transfer *previous = nullptr, *next = nullptr;  // among those in flight, as they began

    std::string_view key() const { return id; }
    Request* request() const { return sender->request; }
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
    Page* page = nullptr;  // null when the pool has restarted since
    bool unvouched = false;
    bool has_released = false;
    Where released;
    Ref<Transfer> transfer;
    bool confirmed = false, written = false;
    Ref<Taint> taint;  // empty until the sender's `ok`
    std::vector<RsRef> victims;
};
void retain(Late* late);
void release(Late* late);

inline constexpr std::size_t kMaxVictims = 64;

}  // namespace kvguard
