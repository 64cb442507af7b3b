// Rules for what goes into a page and what comes out of it: kv.write, kv.read, kv.refuse,
// kv.respond. After guard/ledger/access.py.
#include <algorithm>

#include "ledger/world.hpp"

namespace kvguard {

namespace {

constexpr std::uint64_t kMaxBeyond = 1024;  // pages beyond a pool's end that a finding names

void tainted(World& world, RequestStream* rs, const Where& where, std::string_view pool, const Taint& label,
             const Name* tenant) {
    Report more;
    world.foreign_of(label, tenant, more);
    more.degraded = !world.taints.foreign(label.sure, tenant);
    more.reason = "output left for the client after the request had read other tenants' data";
    world.report(Kind::tainted_response, where, pool, true, rs, std::move(more));
}

class ForeignRead final : public Watcher {
  public:
    ForeignRead(World& world, RequestStream* rs, Name* tenant, Pool* pool, const Where& where, SortedRuns&& pages,
                const char* reason)
        : world_(world), rs_(rs), tenant_(tenant), pool_(pool), where_(where), reason_(reason) {
        pages_.runs = std::move(pages);
        pages_.vouched = true;
    }

    void grown(Taint& label) override {
        if (!world_.taints.foreign(label.tenants, tenant_.get())) return;
        Report more;
        more.evidence = &pages_;
        world_.foreign_of(label, tenant_.get(), more);
        more.degraded = !world_.taints.foreign(label.sure, tenant_.get());
        more.reason = reason_;
        world_.report(Kind::foreign_read, where_, pool_->id, true, rs_.get(), std::move(more));
        crossing(world_, rs_->request);
    }

    bool merge(Watcher& other) override {
        auto* const same = dynamic_cast<ForeignRead*>(&other);
        if (same == nullptr || !(same->rs_ == rs_.get()) || !(same->tenant_ == tenant_.get()) || same->pool_ != pool_)
            return false;
        add_runs(pages_.runs, same->pages_.runs);
        if (compare(same->where_, where_) < 0) where_ = same->where_, reason_ = same->reason_;
        return true;
    }

  private:
    World& world_;
    RsRef rs_;
    Ref<Name> tenant_;
    Pool* pool_;
    Where where_;
    const char* reason_;
    Evidence pages_;
};

class TaintedResponse final : public Watcher {
  public:
    TaintedResponse(World& world, RequestStream* rs, Name* tenant, std::string_view pool, const Where& where)
        : world_(world), rs_(rs), tenant_(tenant), pool_(pool), where_(where) {}

    void grown(Taint& label) override {
        if (world_.taints.foreign(label.tenants, tenant_.get()))
            tainted(world_, rs_.get(), where_, pool_, label, tenant_.get());
    }

    bool merge(Watcher& other) override {
        auto* const same = dynamic_cast<TaintedResponse*>(&other);
        if (same == nullptr || !(same->rs_ == rs_.get()) || !(same->tenant_ == tenant_.get()) || same->pool_ != pool_)
            return false;
        if (compare(same->where_, where_) < 0) where_ = same->where_;
        return true;
    }

  private:
    World& world_;
    RsRef rs_;
    Ref<Name> tenant_;
    std::string pool_;
    Where where_;
};

// Keeps a read or a response; when there are too many, as one with the last.
void keep_looked(World& world, RequestStream* rs, Log& kept, const Where& where, Name* pool, const Pages& pages,
                 std::uint64_t limit, std::uint32_t keeps = 0) {
    if (!kept.full()) {
        kept.add(world.memory, where.time_ns, where.seq, pool, pages, keeps);
        return;
    }
    PageRuns joined{pages};
    const auto [last_pool, last_pages] = kept.back();
    if (last_pool == pool) {
        SortedRuns all;
        for (const Pages& part : {Pages{last_pages.data(), static_cast<std::uint32_t>(last_pages.size())}, pages})
            for (std::uint32_t i = 0; i < part.runs(); ++i) {
                const Pages::Run run = part.run(i);
                if (run.first < limit) all.emplace_back(run.first, std::min(run.stop(), limit));
            }
        normalise(all);
        joined = PageRuns();
        for (const auto& [first, stop] : all)
            for (std::uint64_t at = first; at < stop; at += KVG_MAX_PAGES)
                joined.add_run(at, std::min<std::uint64_t>(stop - at, KVG_MAX_PAGES));
    }
    const Ref<Name> keep(pool);
    kept.pop_back();
    kept.add(world.memory, where.time_ns, where.seq, pool, joined.view());
}

// How a read begins as the one before it did: mostly it is of the same pages and a few more.
struct Begin {
    std::uint32_t keeps;  // runs of it, the last one of the one before not among them
    std::uint64_t hash;   // of them
};

std::uint64_t hash_runs(const World& world, const Pages& pages, std::uint32_t from, std::uint32_t to, std::uint64_t h) {
    for (std::uint32_t i = from; i < to; ++i) h = world.hash(pages.data()[i], h);
    return h;
}

Begin as_before(const World& world, const RequestStream* rs, const Pages& pages) {
    if (rs->read_runs < 2 || pages.runs() < rs->read_runs) return {0, 0};
    const std::uint32_t keeps = rs->read_runs - 1;
    const std::uint64_t h = hash_runs(world, pages, 0, keeps, 0);
    return h == rs->read_hash ? Begin{keeps, h} : Begin{0, 0};
}

void keep_read(World& world, RequestStream* rs, const Where& where, Name* pool, const Pages& pages, std::uint64_t limit,
               const Begin& begin) {
    keep_looked(world, rs, rs->reads, where, pool, pages, limit, begin.keeps);
    const std::uint32_t runs = pages.runs();
    rs->read_hash = runs == 0 ? 0 : hash_runs(world, pages, begin.keeps, runs - 1, begin.hash);
    rs->read_runs = rs->reads.full() ? 0 : runs;
}

// Which of the record's pages are not valid for the request; and, into `world.labels_read`, whose data is in those that
// must be its own. The first `skip` runs need no look. `clean`: the others are all its own and nothing is amiss, nor can
// be without `Page::change`; they bear kSeen.
Evidence look(World& world, RequestStream* rs, const Record& record, Pool* pool, const Name* tenant, std::uint32_t skip,
              bool& clean) {
    const std::unordered_set<std::uint64_t>* permitted = nullptr;
    if (rs->rare)
        if (const auto at = rs->rare->permitted.find(pool); at != rs->rare->permitted.end()) permitted = &at->second;
    Evidence stale;
    auto& labels = world.labels_read;
    labels.clear();
    const Taint* plain = nullptr;  // what the last vouched page bore, where nothing is to be watched
    const auto look_at = [&](Taint* label, std::uint64_t index, bool unvouched) {
        if (label == nullptr || label->nothing()) return;
        for (LabelRead& known : labels)
            if (known.label == label && known.unvouched == unvouched) {
                if (known.watched) append(known.pages, index);
                return;
            }
        labels.push_back({label, unvouched, false, unvouched ? world.taints.doubted(label) : Ref<Taint>(label), {}});
        LabelRead& fresh = labels.back();
        fresh.watched = fresh.taken->open() || world.taints.foreign(fresh.taken->tenants, tenant);
        if (fresh.watched) {
            append(fresh.pages, index);
        } else if (!unvouched) {
            plain = label;
        }
    };
    clean = tenant == rs->tenant.get() && permitted == nullptr;
    const Pages rest(record.pages.data() + skip, record.pages.runs() - skip);
    world.within(pool, rest, [&](std::uint64_t index, Page& page) {
        const bool unvouched = pool->unvouched(page);
        if (!world.readable_by(pool, index, page, rs)) stale.add(index, unvouched);
        clean = clean && page.owner == rs && !unvouched && page.links == nullptr;
        if (clean) page.set(Page::kSeen, true);
        if (permitted != nullptr && permitted->count(index) != 0 && world.shared_to(pool, index, page, rs->request))
            return;
        if (unvouched || page.label != plain) look_at(page.label, index, unvouched);
        if (page.links != nullptr)
            for (const Ref<Late>& late : page.links->late) look_at(late->taint.get(), index, unvouched);
    });
    std::uint64_t beyond = kMaxBeyond;
    for (std::uint32_t i = 0; i < rest.runs() && beyond > 0; ++i) {
        const Pages::Run run = rest.run(i);
        const std::uint64_t first = std::max(run.first, pool->size);
        if (first >= run.stop()) continue;
        const std::uint64_t pages = std::min(run.stop() - first, beyond);
        stale.add_run(first, first + pages);
        beyond -= pages;
    }
    clean = clean && stale.empty();
    for (const LabelRead& label : labels) clean = clean && !label.watched;
    return stale;
}

void stale_read(World& world, RequestStream* rs, const Record& record, Pool* pool, const Where& where,
                const Evidence& stale, const char* did) {
    if (stale.empty()) return;
    Report more;
    more.reason = did + std::to_string(record.pages.size()) + " pages, " + std::to_string(stale.size()) +
                  " of them not valid for the request";
    more.evidence = &stale;
    world.report(Kind::stale_read, where, pool->id, true, rs, std::move(more));
}

// Says which of `world.labels_read` are another tenant's, now and whenever one becomes so. Takes their pages.
void foreign_read(World& world, RequestStream* rs, Name* tenant, Pool* pool, const Where& where, const char* reason) {
    for (LabelRead& label : world.labels_read) {
        if (!label.watched) continue;
        normalise(label.pages);
        auto watcher = std::make_unique<ForeignRead>(world, rs, tenant, pool, where, std::move(label.pages), reason);
        watcher->grown(*label.taken);
        world.taints.watch(label.taken.get(), std::move(watcher));
    }
}

// More tokens are read than are valid.
void too_far(World& world, RequestStream* rs, const Record& record, Pool* pool, const Where& where) {
    const std::uint64_t valid = rs->in(pool).valid();
    if (record.tokens <= valid || !pool->announced) return;
    const std::uint64_t first = pool->page_tokens != 0 ? valid / pool->page_tokens : 0;
    Evidence beyond;
    std::uint64_t at = 0;
    world.within(pool, record.pages, [&](std::uint64_t index, Page& page) {
        if (at++ >= first) beyond.add(index, pool->unvouched(page));
    });
    Report more;
    more.evidence = &beyond;
    more.degraded = rs->degraded();
    more.reason = "read " + std::to_string(record.tokens) + " tokens, " + std::to_string(valid) + " are valid";
    world.report(Kind::stale_read, where, pool->id, true, rs, std::move(more));
}

}  // namespace

void write(World& world, Stream& stream, RequestStream* rs, const Record& record, const Where& where) {
    Pool* const pool = world.pool_of(record, stream.name);
    Ref<Taint> label = rs->label;
    const Ref<Name> keep = world.tenant_of(rs, record);
    Name* const tenant = keep.get();
    if (record.code == KVG_PUBLIC) {
        label = world.public_label;
    } else if (!world.taints.sets.contains(label->tenants, tenant)) {
        const Ref<Taint> own = world.own_label(rs->request, tenant);
        label = world.taints.join(label.get(), own.get());
    }
    world.within(pool, record.pages, [&](std::uint64_t index, Page& page) {
        settle(world, page, stream.clock.get());
        if (page.owner == rs) {
            page.set_label(label.get());
            page.set(Page::kValid, true);
            page.set(Page::kTouched, true);
        } else {
            into_foreign_page(world, rs, pool, index, page, where, label.get(), {});
        }
        if (page.links != nullptr)
            for (Transfer* transfer : page.links->outgoing) world.taints.absorb(transfer->taint.get(), page.label);
    });
    rs->in(pool).written = record.tokens;
}

void into_foreign_page(World& world, RequestStream* rs, Pool* pool, std::uint64_t index, Page& page, const Where& where,
                       Taint* label, std::string_view transfer) {
    Evidence evidence;
    evidence.add(index, pool->unvouched(page));
    std::vector<Request*> subjects;
    Report more;
    if (RequestStream* const owner = page.owner; owner != nullptr) {
        if (owner->tenant.get() != rs->tenant.get()) more.tenants.push_back(owner->tenant.get());
        more.requests.push_back(owner->request->id.get());
        subjects.push_back(owner->request);
    }
    more.evidence = &evidence;
    more.subjects = &subjects;
    more.transfer = transfer;
    more.reason = "bytes went into a page that their request did not own";
    world.report(Kind::foreign_write, where, pool->id, true, rs, std::move(more));
    page.set_label(world.taints.join(page.label, label).get());
}

void read(World& world, Stream& stream, RequestStream* rs, const Record& record, const Where& where) {
    Pool* const pool = world.pool_of(record, stream.name);
    const Ref<Name> keep = world.tenant_of(rs, record);
    Name* const tenant = keep.get();
    // Nothing has changed about pages that the last read found to be in order, or `look_again` says so.
    const Begin begin = as_before(world, rs, record.pages);
    const bool seen = rs->seen_pool == pool && rs->seen_changes == pool->changes && !rs->look_again &&
                      tenant == rs->tenant.get();
    bool clean = false;
    const Evidence stale = look(world, rs, record, pool, tenant, seen ? begin.keeps : 0, clean);
    rs->seen_pool = clean ? pool : nullptr;
    rs->seen_changes = pool->changes;
    rs->look_again = false;
    stale_read(world, rs, record, pool, where, stale, "read ");
    too_far(world, rs, record, pool, where);
    foreign_read(world, rs, tenant, pool, where, "read pages that hold other tenants' data");
    auto& tasted = world.labels_tasted;
    tasted.assign(1, rs->label.get());
    for (const LabelRead& label : world.labels_read)
        if (label.taken.get() != tasted[0]) tasted.push_back(label.taken.get());
    if (tasted.size() > 1) rs->label = world.taints.join(tasted.data(), tasted.size());
    if (!world.taints.sets.contains(rs->label->tenants, tenant)) {
        const Ref<Taint> own = world.own_label(rs->request, tenant);
        rs->label = world.taints.join(rs->label.get(), own.get());
    }
    world.labels_read.clear();
    keep_read(world, rs, where, world.pool_name(pool), record.pages, pool->limit, begin);
    crossing(world, rs->request);
}

void refuse(World& world, Stream& stream, RequestStream* rs, const Record& record, const Where& where) {
    Pool* const pool = world.pool_of(record, stream.name);
    Refusal refusal{rs, world.tenant_of(rs, record), pool, where, {}, {}};
    Name* const tenant = refusal.tenant.get();
    bool clean = false;
    const Evidence stale = look(world, rs, record, pool, tenant, 0, clean);
    stale_read(world, rs, record, pool, where, stale, "the worker refused ");
    world.within(pool, record.pages, [&](std::uint64_t index, Page& page) {
        if (world.readable_by(pool, index, page, rs)) append(refusal.own[pool->unvouched(page)], index);
    });
    bool open = false;
    for (const LabelRead& label : world.labels_read) {
        open |= label.taken->open();
        if (label.watched) refusal.labels.emplace_back(label.taken, label.pages);
    }
    foreign_read(world, rs, tenant, pool, where, "the worker refused pages that hold other tenants' data");
    world.labels_read.clear();
    if (open) {
        world.decide_later(std::move(refusal));
    } else {
        judge(world, refusal);
    }
}

void judge(World& world, Refusal& refusal) {
    SortedRuns foreign;
    for (const auto& [label, pages] : refusal.labels)
        if (world.taints.foreign(label->tenants, refusal.tenant.get()))
            foreign.insert(foreign.end(), pages.begin(), pages.end());
    normalise(foreign);
    for (const bool unvouched : {false, true}) {
        normalise(refusal.own[unvouched]);
        Evidence pages;
        for (const auto& [first, stop] : without(refusal.own[unvouched], foreign)) pages.add_run(first, stop);
        if (pages.empty()) continue;
        Report more;
        more.evidence = &pages;
        more.degraded = unvouched;
        more.reason = "the worker refused pages that the records say are the request's";
        world.report(Kind::hook_divergence, refusal.where, refusal.pool->id, true, refusal.rs.get(), std::move(more));
    }
}

void respond(World& world, Stream& stream, RequestStream* rs, const Record& record, const Where& where) {
    if (record.extra < 200 || record.extra >= 300) return;
    const Ref<Name> name(world.pool_name(record, stream.name));
    rs->request->responded = true;
    keep_looked(world, rs, rs->responses, where, name.get(), {}, 0);
    const Ref<Name> keep = world.tenant_of(rs, record);
    Name* const tenant = keep.get();
    if (rs->label->open() || world.taints.foreign(rs->label->tenants, tenant)) {
        auto watcher = std::make_unique<TaintedResponse>(world, rs, tenant, record.pool_id(), where);
        watcher->grown(*rs->label);
        world.taints.watch(rs->label.get(), std::move(watcher));
    }
    crossing(world, rs->request);
    dead_or_rejected(world, rs->request);
}

void crossing(World& world, Request* request) {
    if (!request->responded) return;
    const Taint* const own = request->own.get();
    const Name* const tenant = own != nullptr ? own->origins[0].tenant : nullptr;
    for (RequestStream* reader : request->streams) {
        if (reader->label.get() == own && reader->tenant.get() == tenant) continue;
        if (!world.taints.foreign(reader->label->tenants, reader->tenant.get())) continue;
        for (RequestStream* rs : request->streams) {
            if (rs == reader || rs->responses.empty()) continue;
            const Log::Entry first = rs->responses.front();
            tainted(world, rs, rs->where(first), first.pool->key(), *reader->label, reader->tenant.get());
        }
    }
}

void dead_or_rejected(World& world, Request* request) {
    if (!request->rare) return;
    if (!request->rare->rejections.empty())
        for (RequestStream* rs : request->streams) {
            if (rs->responses.empty()) continue;
            Report more;
            more.reason = "answered 2xx although a worker rejected the request";
            const Log::Entry first = rs->responses.front();
            world.report(Kind::wrong_status, rs->where(first), first.pool->key(), true, rs, std::move(more));
        }
    const auto zombie = [&](RequestStream* rs, const Death& death, const Log::Entry& looked) {
        Evidence pages;
        if (const Pool* const pool = world.find_pool(looked.pool->key()); pool != nullptr)
            for (std::uint32_t r = 0; r < looked.pages.runs(); ++r)
                pages.add_run(looked.pages.run(r).first, std::min(looked.pages.run(r).stop(), pool->end()));
        Report more;
        more.evidence = &pages;
        more.degraded = death.degraded;
        more.reason = "went on although " + death.stream->text + " had ended it as " + outcome_text(death.outcome);
        world.report(Kind::zombie_request, rs->where(looked), looked.pool->key(), true, rs, std::move(more));
    };
    for (const Death& death : request->rare->deaths)
        for (RequestStream* rs : request->streams) {
            if (rs->stream == death.stream) continue;
            const auto known = death.clock ? death.clock->of(rs->stream) : std::pair<std::int64_t, std::int64_t>{0, -1};
            for (const Log* log : {&rs->reads, &rs->responses})
                log->each([&](const Log::Entry& looked) {
                    if (std::pair{static_cast<std::int64_t>(rs->epoch), static_cast<std::int64_t>(looked.seq)} > known)
                        zombie(rs, death, looked);
                });
        }
}

}  // namespace kvguard
