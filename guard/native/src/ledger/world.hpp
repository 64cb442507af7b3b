// All that the ledger knows, and how it says what it concludes. The rules are in lifecycle, ownership, access, moves
// and late, each after its namesake in guard/ledger.
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "ledger/ledger.hpp"
#include "ledger/memory.hpp"
#include "ledger/names.hpp"
#include "ledger/pages.hpp"
#include "ledger/requests.hpp"
#include "ledger/streams.hpp"
#include "ledger/taint.hpp"

namespace kvguard {

inline constexpr std::size_t kMaxPageTransfers = 64;
inline constexpr std::size_t kMaxOthers = 64;  // other tenants, other requests that a finding names

// A request that may read a page without owning it (`who` its id's name), or a page that was once shared to a request
// on a stream (`who` the RequestStream, the epochs 0).
struct ShareKey {
    const void* who = nullptr;
    const Pool* pool = nullptr;
    std::uint64_t index = 0;
    std::uint32_t incarnation = 0, share_epoch = 0;
    bool operator==(const ShareKey& o) const {
        return who == o.who && pool == o.pool && index == o.index && incarnation == o.incarnation &&
               share_epoch == o.share_epoch;
    }
};
inline std::uint64_t hash_of(const ShareKey& k, const Hash& hash) {
    return hash(reinterpret_cast<std::uintptr_t>(k.who) ^ k.index << 20,
                reinterpret_cast<std::uintptr_t>(k.pool) ^ (std::uint64_t{k.incarnation} << 40) ^ k.share_epoch ^
                    k.index << 1);
}

// The pieces of a transfer that have begun, as they came; gone when all are over.
struct Pieces {
    std::string base;
    SmallVec<Transfer*, 4> begun;
    std::string_view key() const { return base; }
};

struct Nothing {};

struct IdHash {
    std::uint64_t value = 0;
    bool operator==(const IdHash& o) const { return value == o.value; }
};
inline std::uint64_t hash_of(const IdHash& id, const Hash&) { return id.value; }

// Ids that are over, lately, and the pool each went to: the oldest goes when there are too many. By hash: two ids of
// one 64-bit hash are taken for one.
class Remembered {
  public:
    explicit Remembered(const Hash& hash) : pools_(hash) {}
    // All by the hashes of the ids.
    void put(std::uint64_t id, std::uint64_t pool, std::size_t limit);
    bool has(std::uint64_t id) { return pools_.find({id | 1}) != nullptr; }
    bool went_to(std::uint64_t id, std::uint64_t pool) {
        const IdHash* const known = pools_.find({id | 1});
        return known != nullptr && known->value == pool;
    }
    bool empty() const { return pools_.size() == 0; }
    void prefetch(std::uint64_t id) const { pools_.prefetch({id | 1}); }

  private:
    Table<IdHash, IdHash> pools_;
    std::vector<IdHash> order_;  // a circle once it is full
    std::size_t oldest_ = 0;
};

struct Report {
    const Evidence* evidence = nullptr;
    std::vector<Name*> tenants;      // other tenants concerned
    std::vector<Name*> requests;     // other requests concerned
    const std::vector<Request*>* subjects = nullptr;  // whom a kill hits; the request itself when not given
    std::string_view transfer;
    bool degraded = false;
    std::string reason;
};

// A label that a record read, and the pages that carry it.
struct LabelRead {
    Taint* label;
    bool unvouched;
    bool watched;      // foreign, or it may become so
    Ref<Taint> taken;  // what the reader takes of it
    SortedRuns pages;
};

// A worker's refusal of pages that the records call the request's own: a contradiction, unless a label of theirs is
// another tenant's, or becomes one.
struct Refusal {
    RsRef rs;
    Ref<Name> tenant;
    Pool* pool;
    Where where;
    SortedRuns own[2];  // the pages; by whether the guard had lost sight of them
    std::vector<std::pair<Ref<Taint>, SortedRuns>> labels;
};

struct World {
    World(const Policy& policy, const Settings& settings);

    Hash hash;
    Policy policy;
    Settings settings;
    std::int64_t now_ns = 0;

    Names request_names{hash}, tenant_names{hash}, pool_names{hash};
    Blocks memory;  // of requests' lists, and of copies of begins
    TaintGraph taints{hash, tenant_names};
    Ref<Taint> public_label;

    // Objects by what they are; freed all at once at the end.
    ObjectPool<Request> request_pool;
    ObjectPool<RequestStream> request_streams;  // goes before those that they name
    ObjectPool<Transfer> transfer_pool;
    ObjectPool<Late> late_pool;
    ObjectPool<Links> links_pool;
    std::vector<LabelRead> labels_read;  // of one record; kept for its memory
    std::vector<Taint*> labels_tasted;
    std::uint64_t serial = 0;

    Index<StreamName> stream_names{hash};
    Index<Pool> pools{hash};
    Index<Transfer> transfers{hash};
    Table<ShareKey, Nothing> sharers{hash};
    std::vector<std::unique_ptr<StreamName>> all_stream_names;
    std::vector<std::unique_ptr<Pool>> all_pools;  // as they came
    Index<Pieces> pieces{hash};  // by the bare id
    ObjectPool<Pieces> pieces_pool;
    Remembered done{hash}, given_up{hash};
    std::vector<std::pair<std::int64_t, Ref<Late>>> suspects;
    std::deque<std::pair<std::int64_t, Ref<Request>>> undecided;  // when the next refusal of which request is judged
    std::unordered_map<const Request*, std::deque<Refusal>> refusals;  // those to be judged, as they came
    std::unordered_map<std::string, std::shared_ptr<Finding>> findings;

    Request *first_request = nullptr, *last_request = nullptr;
    Request *first_ended = nullptr, *last_ended = nullptr;
    Transfer *first_transfer = nullptr, *last_transfer = nullptr;
    std::uint64_t requests_known = 0, requests_ended = 0, blocks = 0;

    bool restored = false;  // the guard was restarted, and knows some of what the one before it knew
    std::uint64_t gaps = 0;
    std::uint64_t dropped[kLimits] = {};
    std::vector<Event> events;
    Ledger::Retired want_retired = Ledger::Retired::none;
    Witness* witness = nullptr;

    StreamName* stream_name(std::string_view text);
    Pool* pool(std::string_view id, StreamName* stream = nullptr);
    Pool* own_pool(StreamName* stream, bool of_stream);
    // The pool that a record means, as `pool` gives it.
    Pool* pool_of(const Record& record, StreamName* stream) {
        return record.pool.empty() ? own_pool(stream, true) : pool(record.pool, stream);
    }
    Pool* find_pool(std::string_view id) const { return pools.find(id); }
    // The id of a pool, known or not, as responses name one.
    Name* pool_name(Pool* pool) {
        if (!pool->name) pool->name = pool_names.intern(pool->id);
        return pool->name.get();
    }
    Name* pool_name(const Record& record, StreamName* stream) {
        if (Pool* const pool = record.pool.empty() ? stream->own_pool : find_pool(record.pool); pool != nullptr)
            return pool_name(pool);
        return pool_names.intern(record.pool_id());
    }
    Page& page(Pool* pool, std::uint64_t index) {
        if (Page* const known = pool->find(index); known != nullptr) return *known;
        return new_page(pool, index);
    }
    Page& new_page(Pool* pool, std::uint64_t index);
    template <class F>
    void within(Pool* pool, const Pages& set, F&& visit) {
        pool->clip(set, [&](std::uint64_t index) { visit(index, page(pool, index)); });
    }
    void give(Pool* pool, StreamName* stream);
    // Whether the request may have done things there before the guard's restart.
    bool unseen(const RequestStream* rs) const { return restored && rs->degraded(); }
    void clear(Pool* pool);
    Links& links(Page& page) {
        if (page.links == nullptr) page.links = links_pool.make();
        return *page.links;
    }
    void tidy(Page& page) {
        if (page.links != nullptr && page.links->outgoing.empty() && page.links->late.empty()) {
            links_pool.destroy(page.links);
            page.links = nullptr;
        }
    }
    void set_owner(Page& page, RequestStream* rs) {
        if (page.owner == rs) return;
        page.change();
        if (rs != nullptr) retain(rs);
        RequestStream* const before = std::exchange(page.owner, rs);
        if (before != nullptr) release(before);
    }

    // The record's request on the record's stream, made if need be.
    RequestStream* request(const Record& record, Stream& stream, Request* known);
    std::uint64_t request_hash(const Record& record) const {
        return record.request_hash != 0 ? record.request_hash : hash(record.request);
    }
    std::uint64_t transfer_hash(const Record& record) const {
        return record.transfer_hash != 0 ? record.transfer_hash : hash(record.transfer);
    }
    Request* find_request(std::string_view id) const { return find_request(id, hash(id)); }
    Request* find_request(std::string_view id, std::uint64_t hash) const {
        const Name* name = request_names.find(id, hash);
        return name != nullptr ? name->request : nullptr;
    }
    Ref<Taint> own_label(Request* request, Name* tenant);
    Request* make_request(std::string_view id, std::uint64_t hash);
    RequestStream* follow(Request* request, StreamName* stream, std::string_view tenant);
    void note_over(Request* request);
    void fetch_retiring() const;
    void unend(Request* request);
    void unlink_ended(Request* request);
    // The record's tenant: its request's on that stream, nearly always.
    Ref<Name> tenant_of(const RequestStream* rs, const Record& record) {
        return rs->tenant->key() == record.tenant ? rs->tenant : Ref<Name>(tenant_names.intern(record.tenant));
    }
    // Judges once the reorder window is over: what other streams tell until then counts, in whichever order.
    void decide_later(Refusal&& refusal);
    // Judges what has waited for long enough.
    void decide(std::int64_t now_ns);
    void retire(Request* request);
    void destroy(Request* request);

    bool shared_to(const Pool* pool, std::uint64_t index, const Page& page, const Request* request);
    void share_to(RequestStream* rs, Pool* pool, std::uint64_t index, Page& page);
    bool ever_shared(const RequestStream* rs, const Pool* pool, std::uint64_t index);
    void unshare(RequestStream* rs);
    bool readable_by(const Pool* pool, std::uint64_t index, const Page& page, const RequestStream* rs) {
        return page.is(Page::kValid) && (page.owner == rs || shared_to(pool, index, page, rs->request));
    }

    void drop_transfer(Transfer* transfer);
    void list_incoming(Transfer* transfer);
    void unlist_incoming(Transfer* transfer);
    // How many transfers in flight that have not ended there name the page as destination.
    std::size_t count_incoming(const Pool* pool, std::uint64_t index) const;
    void unlist_outgoing(Transfer* transfer);
    void drop_late(Late* late);

    Finding& report(Kind kind, const Where& where, std::string_view pool, bool has_pool, RequestStream* rs, Report&& more);
    void forget(const Finding& finding);
    // The requests that those tenants' bytes in it come from.
    void foreign_of(const Taint& taint, const Name* tenant, Report& into) const;
};

// limits
// The first limit that the record would exceed; nothing when there is room, which is then taken. `request` is the
// record's, if it is known.
std::optional<Limit> exceeded(World&, Stream&, const Record&, Request* request);
void tell(World&, Limit, const Where&);
// ownership
void alloc(World&, Stream&, RequestStream*, const Record&, const Where&);
void share(World&, Stream&, RequestStream*, const Record&, const Where&);
void give_back(World&, Stream&, RequestStream*, const Record&, const Where&);
void scrub(World&, Stream&, const Record&);
// access
void write(World&, Stream&, RequestStream*, const Record&, const Where&);
void read(World&, Stream&, RequestStream*, const Record&, const Where&);
void refuse(World&, Stream&, RequestStream*, const Record&, const Where&);
void judge(World&, Refusal&);
void respond(World&, Stream&, RequestStream*, const Record&, const Where&);
void crossing(World&, Request*);
void dead_or_rejected(World&, Request*);
void into_foreign_page(World&, RequestStream*, Pool*, std::uint64_t index, Page&, const Where&, Taint* label,
                       std::string_view transfer);
// moves
void begin(World&, Stream&, RequestStream*, const Record&, const Where&);
void end_sent(World&, const Record&, const Where&);
void end_received(World&, Stream&, RequestStream*, const Record&, const Where&);
// Whether a receiver's end must wait: for the transfer of its own id.
bool missing_begin(World&, const Record&);
std::string_view base_of(std::string_view transfer);  // of ID/0: ID; "" of what is no piece
// late
void settle_late(World&, Page&, const Clock*);
inline void settle(World& world, Page& page, const Clock* clock) {
    if (page.links != nullptr && !page.links->late.empty()) settle_late(world, page, clock);
}
void gave_up_unwritten(World&, RequestStream*, Pool*, std::uint64_t index, Page&, const Where&);
// The request lets go of a page, into which something may still be on its way.
inline void gave_up(World& world, RequestStream* rs, Pool* pool, std::uint64_t index, Page& page, const Where& where) {
    if (!rs->request->transfers.empty() || !page.is(Page::kTouched)) gave_up_unwritten(world, rs, pool, index, page, where);
}
void suspect(World&, RequestStream*, Pool*, std::uint64_t index, Page*, const Where* released, Transfer*);
void bind(World&, Late*, Transfer*);
void take_late_again(World&, RequestStream*, Pool*, std::uint64_t index);
inline void taken_again(World& world, RequestStream* rs, Pool* pool, std::uint64_t index) {
    if (rs->has_lates()) take_late_again(world, rs, pool, index);
}
void confirm(World&, Late*);
void judge(World&, Late*);
void arrived(World&, Late*, const Where&);
void new_owner_of_late(World&, RequestStream*, Page&);
inline void new_owner(World& world, RequestStream* rs, Page& page) {
    if (page.links != nullptr && !page.links->late.empty()) new_owner_of_late(world, rs, page);
}
void over_elsewhere(World&, Request*);
// lifecycle
inline constexpr const char* kCannotVouch =
    "the guard was restarted: it cannot vouch for this pool's pages until they are handed out again";
void announce(World&, Stream&, const Record&, const Where&);
void admit(World&, Stream&, RequestStream*, const Record&);
void went_on_after_all(World&, Stream&, RequestStream*, const Record&, const Where&);
inline void went_on(World& world, Stream& stream, RequestStream* rs, const Record& record, const Where& where) {
    if (rs->ended || rs->over_capacity) went_on_after_all(world, stream, rs, record, where);
}
void request_end(World&, Stream&, RequestStream*, const Record&, const Where&);
void leaked(World&, RequestStream*, const Where&);
void restart(World&, Stream&);
void reborn(World&, RequestStream*);
void lost(World&, Stream&, const Gap&, const char* why);

std::string to_text(unsigned __int128 number);
const char* outcome_text(std::uint8_t outcome);

}  // namespace kvguard
