#include "ledger/world.hpp"

#include <algorithm>

namespace kvguard {

int compare(const Where& a, const Where& b) {
    if (a.time_ns != b.time_ns) return a.time_ns < b.time_ns ? -1 : 1;
    if (a.stream != b.stream) {
        const int order = a.stream->text.compare(b.stream->text);
        if (order != 0) return order;
    }
    if (a.epoch != b.epoch) return a.epoch < b.epoch ? -1 : 1;
    if (a.seq != b.seq) return a.seq < b.seq ? -1 : 1;
    return 0;
}

// --- counted objects

void retain(Request* request) { ++request->refs; }
void release(Request* request) {
    if (--request->refs == 0) request->world->destroy(request);
}
void retain(Transfer* transfer) { ++transfer->refs; }
void release(Transfer* transfer) {
    if (--transfer->refs == 0) transfer->world->transfer_pool.destroy(transfer);
}
void retain(Late* late) { ++late->refs; }
void release(Late* late) {
    if (--late->refs == 0) late->world->late_pool.destroy(late);
}

Transfer::~Transfer() {
    if (copy != nullptr) world->memory.give(copy, copy_size);
}
RequestStream::~RequestStream() {
    Blocks& memory = request->world->memory;
    each_holding([&](Holding& held) { held.owned_runs.drop(memory); });
    for (Log* log : {&reads, &responses, &released}) log->drop(memory);
}
Request::~Request() = default;

bool Request::killed() const {
    if (!rare) return false;
    for (const auto& finding : rare->findings)
        if (finding->kills() && finding->subjects.count(id->str()) != 0) return true;
    return false;
}

RequestSummary Request::summary() const {
    RequestSummary s;
    s.id = id->str();
    std::set<std::string> lineage;
    for (const RequestStream* rs : streams) {
        if (!s.has_tenant || rs->tenant->key() < s.tenant) s.tenant = rs->tenant->str();
        s.has_tenant = true;
        const Origins& origins = rs->label->origins;
        for (std::size_t i = 0; i < origins.size(); ++i) lineage.insert(origins[i].tenant->str());
    }
    s.lineage.assign(lineage.begin(), lineage.end());
    s.killed = killed();
    if (rare)
        for (const auto& finding : rare->findings)
            s.disclosed |= finding->kind == Kind::tainted_response && finding->request == s.id;
    return s;
}

bool Transfer::done_before(const Clock* seen) const {
    if (!sent_at_known) return false;
    const auto known = seen != nullptr ? seen->of(where.stream) : std::pair<std::int64_t, std::int64_t>{0, -1};
    return known >= std::pair{static_cast<std::int64_t>(sent_at.epoch), static_cast<std::int64_t>(sent_at.seq)};
}

// --- remembered ids

void Remembered::put(std::uint64_t id, std::uint64_t pool, std::size_t limit) {
    const IdHash key{id | 1};
    const auto [value, fresh] = pools_.insert(key);
    value->value = pool;
    if (!fresh) return;
    if (order_.size() < limit) {
        order_.push_back(key);
        return;
    }
    pools_.erase(order_[oldest_]);
    order_[oldest_] = key;
    oldest_ = oldest_ + 1 == order_.size() ? 0 : oldest_ + 1;
    pools_.prefetch(order_[oldest_]);
}

// --- the tables

World::World(const Policy& policy, const Settings& settings) : policy(policy), settings(settings) {
    public_label = taints.single(taints.public_name.get(), nullptr);
}

StreamName* World::stream_name(std::string_view text) {
    const std::uint64_t h = stream_names.hash(text);
    if (StreamName* known = stream_names.find(text, h); known != nullptr) return known;
    all_stream_names.push_back(std::make_unique<StreamName>());
    StreamName* const name = all_stream_names.back().get();
    name->text = text;
    name->own_pool = pools.find(text);
    stream_names.insert(name, h);
    return name;
}

Pool* World::pool(std::string_view id, StreamName* stream) {
    const std::uint64_t h = pools.hash(id);
    if (Pool* known = pools.find(id, h); known != nullptr) {
        if (stream != nullptr && !known->announced) give(known, stream);
        return known;
    }
    all_pools.push_back(std::make_unique<Pool>());
    Pool* const made = all_pools.back().get();
    made->id = id;
    made->hash = h;
    made->limit = made->size = settings.max_pool_pages;
    pools.insert(made, h);
    StreamName* const same = stream_name(id);
    same->own_pool = made;
    made->stream = stream != nullptr ? stream : same;
    made->lost_sight = made->stream->blind;
    return made;
}

Pool* World::own_pool(StreamName* stream, bool of_stream) {
    Pool* const known = stream->own_pool;
    if (known == nullptr) return pool(stream->text, of_stream ? stream : nullptr);
    if (of_stream && !known->announced) give(known, stream);
    return known;
}

// The pool is this stream's.
void World::give(Pool* pool, StreamName* stream) {
    if (pool->stream == stream) return;
    pool->stream = stream;
    if (stream->blind) pool->lose_sight();
}

Page& World::new_page(Pool* pool, std::uint64_t index) {
    const std::uint64_t before = pool->blocks_kept;
    Page& page = pool->page(index);
    blocks += pool->blocks_kept - before;
    return page;
}

// The label of the request's own bytes: closed, so that one serves all its streams.
Ref<Taint> World::own_label(Request* request, Name* tenant) {
    if (!request->own) request->own = taints.single(tenant, request->id.get());
    if (request->own->origins[0].tenant == tenant) return request->own;
    return taints.single(tenant, request->id.get());
}

// A new epoch of its stream: every label empty, every page unowned. Transfers that write to it stay listed.
void World::clear(Pool* pool) {
    std::vector<RsRef> owners;
    pool->each([&](std::uint64_t, Page& page) {
        if (page.owner != nullptr) {
            if (Holding* h = page.owner->find(pool); h != nullptr && h->owned > 0) --h->owned;
            if (owners.empty() || owners.back().get() != page.owner) owners.emplace_back(page.owner);
            set_owner(page, nullptr);
        }
        page.set_label(nullptr);
        if (page.links != nullptr) {
            links_pool.destroy(page.links);
            page.links = nullptr;
        }
    });
    for (const Transfer* t = first_transfer; t != nullptr; t = t->next) pool->lost_count |= t->pool == pool && t->into_end != 0;
    blocks -= pool->blocks_kept;
    pool->blocks.clear();
    pool->blocks_kept = pool->pages = 0;
    pool->lost_sight = false;
    ++pool->changes;
    ++pool->incarnation;
    std::vector<const RequestStream*> seen;
    for (const RsRef& owner : owners) {
        if (std::find(seen.begin(), seen.end(), owner.get()) != seen.end()) continue;
        seen.push_back(owner.get());
        note_over(owner->request);
    }
}

// --- who may read a page without owning it

bool World::shared_to(const Pool* pool, std::uint64_t index, const Page& page, const Request* request) {
    return page.is(Page::kShared) &&
           sharers.find({request->id.get(), pool, index, pool->incarnation, page.share_epoch}) != nullptr;
}

bool World::ever_shared(const RequestStream* rs, const Pool* pool, std::uint64_t index) {
    return sharers.find({rs, pool, index, 0, 0}) != nullptr;
}

void World::share_to(RequestStream* rs, Pool* pool, std::uint64_t index, Page& page) {
    page.set(Page::kShared, true);
    const bool fresh = sharers.insert({rs->request->id.get(), pool, index, pool->incarnation, page.share_epoch}).second;
    const bool first = sharers.insert({rs, pool, index, 0, 0}).second;
    if (!fresh && !first) return;
    auto& shared = rs->more().shared;
    if (shared.size() >= 64 && shared.size() == shared.capacity()) {
        // Pages that were handed out anew since leave nothing behind but their index.
        std::erase_if(shared, [&](const RequestStream::Share& s) {
            const Page* now = s.pool->find(s.index);
            if (now != nullptr && s.incarnation == s.pool->incarnation && s.share_epoch == now->share_epoch) return false;
            sharers.erase({rs->request->id.get(), s.pool, s.index, s.incarnation, s.share_epoch});
            sharers.erase({rs, s.pool, s.index, 0, 0});
            return true;
        });
        sharers.insert({rs, pool, index, 0, 0});
    }
    shared.push_back({pool, index, pool->incarnation, page.share_epoch});
}

void World::unshare(RequestStream* rs) {
    if (!rs->rare) return;
    const Name* const id = rs->request->id.get();
    for (const RequestStream::Share& s : rs->rare->shared) {
        sharers.erase({id, s.pool, s.index, s.incarnation, s.share_epoch});
        sharers.erase({rs, s.pool, s.index, 0, 0});
        if (const Page* page = s.pool->find(s.index); page != nullptr && page->is(Page::kShared))
            sharers.erase({id, s.pool, s.index, s.pool->incarnation, page->share_epoch});
    }
    rs->rare->shared.clear();
}

// --- transfers and late writers that are over

void World::drop_transfer(Transfer* transfer) {
    const Ref<Transfer> keep(transfer);
    if (transfer->request()->transfers.remove(transfer)) release(transfer);
    unlist_incoming(transfer);
    if (!transfer->sent) {
        unlist_outgoing(transfer);
        taints.close_one(transfer->taint.get());
    }
    if (!transfer->in_flight) return;
    transfer->in_flight = false;
    transfers.erase(transfer, transfer->hash);
    (transfer->previous != nullptr ? transfer->previous->next : first_transfer) = transfer->next;
    (transfer->next != nullptr ? transfer->next->previous : last_transfer) = transfer->previous;
    transfer->previous = transfer->next = nullptr;
    const std::string_view base = base_of(transfer->id);
    if (!base.empty()) {
        const std::uint64_t bare = hash(base);
        if (Pieces* const all = pieces.find(base, bare); all != nullptr && all->begun.remove(transfer) && all->begun.empty()) {
            pieces.erase(all, bare);
            pieces_pool.destroy(all);
            done.put(bare, transfer->pool->hash, settings.max_ended);
        }
    }
    done.put(transfer->hash, transfer->pool->hash, settings.max_ended);
    release(transfer);  // the tables' own
}

// A page's own count is of every time that it is named, so it is at least that of the transfers: enough to tell that
// there are few.
void World::list_incoming(Transfer* transfer) {
    transfer->into_end = transfer->pool->end();
    transfer->each_into([&](std::uint64_t index) {
        if (Page* const page = transfer->pool->slot(index); page != nullptr && page->incoming < Page::kMaxIncoming)
            ++page->incoming;
    });
}

void World::unlist_incoming(Transfer* transfer) {
    transfer->each_into([&](std::uint64_t index) {
        Page* const page = transfer->pool->slot(index);
        if (page != nullptr && page->incoming != 0 && page->incoming < Page::kMaxIncoming) --page->incoming;
    });
    transfer->into_end = 0;
}

std::size_t World::count_incoming(const Pool* pool, std::uint64_t index) const {
    if (const Page* const page = pool->slot(index); !pool->lost_count && (page == nullptr || page->incoming < kMaxPageTransfers))
        return page == nullptr ? 0 : page->incoming;
    std::size_t count = 0;
    for (const Transfer* t = first_transfer; t != nullptr; t = t->next) count += t->goes_into(pool, index);
    return count;
}

void World::unlist_outgoing(Transfer* transfer) {
    Pool* const from = transfer->source_pool;
    const Pages& pages = transfer->pages;
    for (std::uint32_t i = 0; i < pages.runs(); ++i) {
        // All that it can be listed at, whatever size was announced meanwhile.
        const Pages::Run run = pages.run(i);
        for (std::uint64_t index = run.first; index < std::min(run.stop(), from->limit); ++index) {
            Page* const page = from->find(index);
            if (page == nullptr || page->links == nullptr) continue;
            page->links->outgoing.remove(transfer);
            tidy(*page);
        }
    }
}

void World::drop_late(Late* late) {
    const Ref<Late> keep(late);
    const auto same = [&](const Ref<Late>& other) { return other == late; };
    if (late->rs->has_lates()) {
        auto& lates = late->rs->rare->late;
        if (const auto at = lates.find({late->pool, late->index}); at != lates.end()) {
            std::erase_if(at->second, same);
            if (at->second.empty()) lates.erase(at);
        }
    }
    if (Page* const page = late->page(); page != nullptr && page->links != nullptr) {
        std::erase_if(page->links->late, same);
        tidy(*page);
    }
    if (late->transfer) std::erase_if(late->transfer->late, same);
    if (!late->written) {
        late->written = true;
        taints.close_one(late->taint.get());
    }
}

}  // namespace kvguard
