// Rules for who owns a page: kv.alloc, kv.share, kv.free, kv.cache, kv.scrub. After guard/ledger/ownership.py.
#include <algorithm>

#include "ledger/world.hpp"

namespace kvguard {

namespace {

// Says that pages hold another tenant's bytes, now and whenever it becomes known: `foreign-share` of pages shared to a
// request, `unscrubbed-reuse` of pages handed to it.
class ForeignPages final : public Watcher {
  public:
    ForeignPages(World& world, Kind kind, RequestStream* rs, Name* tenant, Pool* pool, const Where& where,
                 std::uint64_t index, bool unvouched)
        : world_(world), kind_(kind), rs_(rs), tenant_(tenant), pool_(pool), where_(where), unvouched_(unvouched) {
        pages_.add(index);
    }

    void grown(Taint& label) override {
        if (!world_.taints.foreign(label.tenants, tenant_.get())) return;
        Report more;
        more.evidence = &pages_;
        world_.foreign_of(label, tenant_.get(), more);
        more.degraded = unvouched_;
        if (kind_ == Kind::foreign_share) {
            more.degraded |= !world_.taints.foreign(label.sure, tenant_.get());
            more.reason = "a prefix-cache hit on pages that another tenant's data went into";
        } else {
            more.reason = "the page still held another tenant's bytes when it was handed out";
        }
        world_.report(kind_, where_, pool_->id, true, rs_.get(), std::move(more));
    }

    bool merge(Watcher& other) override {
        auto* const same = dynamic_cast<ForeignPages*>(&other);
        if (same == nullptr || same->kind_ != kind_ || !(same->rs_ == rs_.get()) || !(same->tenant_ == tenant_.get()) ||
            same->pool_ != pool_ || same->unvouched_ != unvouched_)
            return false;
        add_runs(pages_.runs, same->pages_.runs);
        if (compare(same->where_, where_) < 0) where_ = same->where_;
        return true;
    }

  private:
    World& world_;
    Kind kind_;
    RsRef rs_;
    Ref<Name> tenant_;
    Pool* pool_;
    Where where_;
    Evidence pages_;
    bool unvouched_;
};

void watch_foreign(World& world, Kind kind, RequestStream* rs, Name* tenant, Pool* pool, const Where& where,
                   std::uint64_t index, Page& page) {
    if (page.label == nullptr) return;
    if (!page.label->open() && !world.taints.foreign(page.label->tenants, tenant)) return;
    auto watcher = std::make_unique<ForeignPages>(world, kind, rs, tenant, pool, where, index, pool->unvouched(page));
    watcher->grown(*page.label);
    world.taints.watch(page.label, std::move(watcher));
}

void double_owner(World& world, RequestStream* rs, RequestStream* owner, Pool* pool, std::uint64_t index, Page& page,
                  const Where& where) {
    Evidence evidence;
    evidence.add(index, pool->unvouched(page));
    const std::vector<Request*> subjects{rs->request, owner->request};
    Report more;
    more.evidence = &evidence;
    if (owner->tenant.get() != rs->tenant.get()) more.tenants.push_back(owner->tenant.get());
    more.requests.push_back(owner->request->id.get());
    more.subjects = &subjects;
    more.reason = "the page was handed out while another live request owned it";
    world.report(Kind::double_owner, where, pool->id, true, rs, std::move(more));
}

// The owner loses the page, by its own record or because another took it.
void disown(World& world, RequestStream* owner, Pool* pool, std::uint64_t index, Page& page, const Where& where) {
    gave_up(world, owner, pool, index, page, where);
    if (Holding* const held = owner->find(pool); held != nullptr && held->owned > 0 && --held->owned == 0)
        held->owned_runs.drop(world.memory);
    world.set_owner(page, nullptr);
}

void keep_released(World& world, RequestStream* rs, Pool* pool, const Pages& pages, const Where& where) {
    while (rs->released.size() > 1 && rs->released.full()) rs->released.pop_front();
    const bool own = where.stream == rs->stream && where.epoch == rs->epoch;
    rs->released.add(world.memory, where.time_ns, where.seq, world.pool_name(pool), pages, 0,
                     own ? Log::Place{} : Log::Place{where.stream, where.epoch});
}

// Forgets runs of pages that the request gave back long ago.
void tidy_owned(World& world, RequestStream* rs, Holding& held) {
    if (held.owned_runs.runs() < 64 || held.owned_runs.runs() < 2 * held.owned) return;
    std::vector<std::uint64_t> mine;
    each_page(held.owned_runs.view(), [&](std::uint64_t index) {
        const Page* page = held.pool->find(index);
        if (page != nullptr && page->owner == rs) mine.push_back(index);
    });
    std::sort(mine.begin(), mine.end());
    mine.erase(std::unique(mine.begin(), mine.end()), mine.end());
    held.owned_runs.drop(world.memory);
    for (const std::uint64_t index : mine) held.owned_runs.append(world.memory, index);
}

}  // namespace

void alloc(World& world, Stream& stream, RequestStream* rs, const Record& record, const Where& where) {
    Pool* const pool = world.pool_of(record, stream.name);
    Holding& held = rs->in(pool);
    world.within(pool, record.pages, [&](std::uint64_t index, Page& page) {
        settle(world, page, stream.clock.get());
        RequestStream* const owner = page.owner;
        if (owner != nullptr && owner != rs) {
            const RsRef keep(owner);
            if (!owner->ended) double_owner(world, rs, owner, pool, index, page, where);
            disown(world, owner, pool, index, page, where);
            const std::uint64_t one = kvg_run(index, 1);
            keep_released(world, owner, pool, {&one, 1}, where);
            world.note_over(owner->request);
        }
        if (world.policy.require_scrub)
            watch_foreign(world, Kind::unscrubbed_reuse, rs, rs->tenant.get(), pool, where, index, page);
        if (page.owner != rs) {
            world.set_owner(page, rs);
            ++held.owned;
            held.owned_runs.append(world.memory, index);
        }
        page.change();
        page.set(Page::kCached, false);
        page.set(Page::kValid, false);
        page.set(Page::kTouched, false);
        page.sight = pool->sight;
        page.drop_sharers();
        taken_again(world, rs, pool, index);
        new_owner(world, rs, page);
    });
    tidy_owned(world, rs, held);
    if (rs->ended_empty && !rs->owns_nothing()) {
        const auto watch = [&](const RequestStream::End& end) {
            if (!stream.looked_at(end.deadline, end.looks))
                stream.watch_leak(end.deadline, rs, rs->at(end.time_ns, end.seq));
        };
        watch(rs->first_end);
        rs->ended_empty = false;
        if (rs->rare) {
            for (const RequestStream::End& end : rs->rare->ends) watch(end);
            rs->rare->ends.clear();
        }
    }
}

void share(World& world, Stream& stream, RequestStream* rs, const Record& record, const Where& where) {
    Pool* const pool = world.pool_of(record, stream.name);
    std::uint64_t fresh = 0;
    const Ref<Name> keep = world.tenant_of(rs, record);
    Name* const tenant = keep.get();
    world.within(pool, record.pages, [&](std::uint64_t index, Page& page) {
        if (!world.shared_to(pool, index, page, rs->request) || !world.ever_shared(rs, pool, index)) ++fresh;
        world.share_to(rs, pool, index, page);
        if (world.policy.permit_sharing) {
            rs->more().permitted[pool].insert(index);
            return;
        }
        watch_foreign(world, Kind::foreign_share, rs, tenant, pool, where, index, page);
    });
    const std::uint64_t named = record.pages.size();
    if (named == 0) return;
    u128 tokens = record.tokens;
    if ((record.flags & KVG_HAS_TOKENS) == 0) tokens = u128{named} * (pool->announced ? pool->page_tokens : 0);
    Holding& held = rs->in(pool);
    held.shared = at_most(held.shared + tokens * fresh / named);
}

void give_back(World& world, Stream& stream, RequestStream* rs, const Record& record, const Where& where) {
    Pool* const pool = world.pool_of(record, stream.name);
    const bool caching = record.kind == KVG_CACHE;
    Evidence wrong;
    std::vector<RsRef> others;
    PageRuns given;
    world.within(pool, record.pages, [&](std::uint64_t index, Page& page) {
        if (page.links != nullptr)
            for (std::uint32_t i = 0; i < page.links->outgoing.size(); ++i) {
                Transfer* const transfer = page.links->outgoing[i];
                Evidence source;
                source.add(index, pool->unvouched(page));
                Report more;
                more.evidence = &source;
                more.transfer = transfer->id;
                more.reason = "page given up while transfer " + std::string(transfer->id) + " out of it had not ended on this side";
                world.report(Kind::free_in_flight, where, pool->id, true, transfer->sender.get(), std::move(more));
            }
        if (page.owner == rs) {
            disown(world, rs, pool, index, page, where);
            given.append(index);
            page.set(Page::kCached, caching);
            page.drop_sharers();
            // Whoever cached the pages may go on reading them: it wrote them in this generation.
            if (caching) world.share_to(rs, pool, index, page);
        } else if (page.owner == nullptr && page.is(Page::kCached)) {
            if (!caching) {
                page.set(Page::kCached, false);
                page.drop_sharers();
            }
        } else {
            wrong.add(index, pool->unvouched(page));
            if (page.owner != nullptr &&
                std::none_of(others.begin(), others.end(), [&](const RsRef& o) { return o == page.owner; }))
                others.emplace_back(page.owner);
        }
    });
    keep_released(world, rs, pool, given.view(), where);
    if (rs->owns_nothing()) {
        world.note_over(rs->request);
        if (!caching) {
            Holding& held = rs->in(pool);
            held.landed = held.written = 0;
        }
    }
    if (!wrong.empty()) {
        Report more;
        more.evidence = &wrong;
        for (const RsRef& other : others) {
            if (other->tenant.get() != rs->tenant.get()) more.tenants.push_back(other->tenant.get());
            more.requests.push_back(other->request->id.get());
        }
        more.reason = "the request gave back pages that it did not own";
        world.report(Kind::double_free, where, pool->id, true, rs, std::move(more));
    }
}

void scrub(World& world, Stream& stream, const Record& record) {
    Pool* const pool = world.pool_of(record, stream.name);
    world.within(pool, record.pages, [&](std::uint64_t, Page& page) {
        settle(world, page, stream.clock.get());
        page.change();
        page.set_label(nullptr);
        page.set(Page::kValid, false);
    });
}

}  // namespace kvguard
