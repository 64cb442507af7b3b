// Writers that may come too late: guard/ledger/late.py.
#include <algorithm>

#include "ledger/world.hpp"

namespace kvguard {

namespace {

constexpr std::size_t kMaxUnbound = 4;  // suspicions without a transfer that one page keeps

void foreign_write(World& world, Late* late, const Where& where) {
    Evidence page;
    page.add(late->index);
    Report more;
    more.evidence = &page;
    std::vector<Request*> subjects;
    for (const RsRef& victim : late->victims) {
        if (victim->tenant.get() != late->rs->tenant.get()) more.tenants.push_back(victim->tenant.get());
        more.requests.push_back(victim->request->id.get());
        subjects.push_back(victim->request);
    }
    more.subjects = &subjects;
    more.transfer = late->transfer->id;
    more.degraded = late->unvouched;
    more.reason = "transfer " + std::string(late->transfer->id) + " wrote into a page that its request had given up";
    world.report(Kind::foreign_write, where, late->pool->id, true, late->rs.get(), std::move(more));
}

// One side says that the bytes are in the page; the earlier of the two is what the finding names.
void wrote(World& world, Late* late, Transfer* transfer, const Where& where) {
    if (!late->written) {
        late->written = true;
        world.taints.absorb(late->taint.get(), transfer->taint.get(), late->unvouched);
        world.taints.close_one(late->taint.get());
    }
    foreign_write(world, late, where);
}

void add_victim(Late* late, RequestStream* rs) {
    if (late->victims.size() >= kMaxVictims) return;
    for (const RsRef& victim : late->victims)
        if (victim == rs) return;
    late->victims.emplace_back(rs);
}

}  // namespace

void settle_late(World& world, Page& page, const Clock* clock) {
    const auto lates = page.links->late;
    for (const Ref<Late>& late : lates) {
        Transfer* const transfer = late->transfer.get();
        if (transfer == nullptr || !late->confirmed || !transfer->done_before(clock)) continue;
        if (transfer->sent && transfer->sent_status == KVG_OK)
            page.set_label(world.taints.join(page.label, late->taint.get()).get());
        std::erase_if(page.links->late, [&](const Ref<Late>& other) { return other == late.get(); });
    }
    world.tidy(page);
}

void gave_up_unwritten(World& world, RequestStream* rs, Pool* pool, std::uint64_t index, Page& page, const Where& where) {
    SmallVec<Transfer*, 4> writers;
    for (Transfer* transfer : rs->request->transfers)
        if (transfer->goes_into(pool, index)) writers.push_back(transfer);
    if (!writers.empty()) {
        for (Transfer* writer : writers) suspect(world, rs, pool, index, &page, &where, writer);
    } else if (!page.is(Page::kTouched) && pool->role != KVG_PREFILL && pool->role != KVG_UNIFIED) {
        suspect(world, rs, pool, index, &page, &where, nullptr);
    }
}

void suspect(World& world, RequestStream* rs, Pool* pool, std::uint64_t index, Page* page, const Where* released,
             Transfer* writer) {
    if (world.unseen(rs)) return;  // what it had, and what had arrived for it, before the guard's restart is not known
    if (page != nullptr && writer != nullptr && page->links != nullptr)
        for (const Ref<Late>& known : page->links->late)
            if (known->rs == rs && known->transfer == writer && known->confirmed) return;
    const Ref<Late> late(world.late_pool.make(&world));
    late->rs = rs;
    late->pool = pool;
    late->index = index;
    late->incarnation = page != nullptr ? pool->incarnation : 0;
    late->unvouched = rs->degraded() || (page != nullptr && pool->unvouched(*page));
    if (released != nullptr) {
        late->has_released = true;
        late->released = *released;
    }
    late->taint = world.taints.pending();
    rs->more().late[{pool, index}].push_back(late);
    rs->request->suspected = true;
    if (page != nullptr) {
        page->change();
        auto& lates = world.links(*page).late;
        lates.push_back(late);
        std::size_t unbound = 0;
        Late* oldest = nullptr;
        for (const Ref<Late>& other : lates)
            if (!other->transfer) {
                if (oldest == nullptr) oldest = other.get();
                ++unbound;
            }
        if (unbound > kMaxUnbound) world.drop_late(oldest);
        if (page->owner != nullptr && page->owner != rs) add_victim(late.get(), page->owner);
    }
    late->confirmed = rs->ended;
    if (writer != nullptr) bind(world, late.get(), writer);
}

void bind(World& world, Late* late, Transfer* writer) {
    late->transfer = writer;
    writer->late.emplace_back(late);
    if (late->confirmed) {
        judge(world, late);
    } else {
        const std::int64_t window = world.settings.window_ns;
        world.suspects.emplace_back(window < 0 ? INT64_MAX : world.now_ns + window, late);
    }
}

void take_late_again(World& world, RequestStream* rs, Pool* pool, std::uint64_t index) {
    const auto at = rs->rare->late.find({pool, index});
    if (at == rs->rare->late.end()) return;
    const auto lates = at->second;
    for (const Ref<Late>& late : lates)
        if (!late->confirmed) world.drop_late(late.get());
}

void confirm(World& world, Late* late) {
    if (late->confirmed) return;
    late->confirmed = true;
    judge(world, late);
}

void judge(World& world, Late* late) {
    Transfer* const transfer = late->transfer.get();
    if (transfer == nullptr || !late->confirmed) return;
    if (late->has_released) {
        Evidence page;
        page.add(late->index);
        Report more;
        more.evidence = &page;
        more.transfer = transfer->id;
        more.degraded = late->unvouched;
        more.reason = "page given up while transfer " + std::string(transfer->id) + " into it had not ended on this side";
        world.report(Kind::free_in_flight, late->released, late->pool->id, true, late->rs.get(), std::move(more));
    }
    if (transfer->sent && transfer->sent_status == KVG_OK) {
        wrote(world, late, transfer, transfer->sent_at);
    } else if (transfer->sent && transfer->received && !late->written) {
        // Not before both sides said so: `ok` on either means that the bytes are there.
        world.drop_late(late);
    }
}

void arrived(World& world, Late* late, const Where& where) {
    late->confirmed = true;
    judge(world, late);
    wrote(world, late, late->transfer.get(), where);
    Page* const page = late->page();
    if (page == nullptr || page->links == nullptr) return;
    auto& lates = page->links->late;
    const auto gone = std::erase_if(lates, [&](const Ref<Late>& other) { return other == late; });
    if (gone != 0) page->set_label(world.taints.join(page->label, late->taint.get()).get());
    world.tidy(*page);
}

void new_owner_of_late(World& world, RequestStream* rs, Page& page) {
    const auto lates = page.links->late;
    for (const Ref<Late>& late : lates) {
        if (late->rs == rs) continue;
        add_victim(late.get(), rs);
        if (late->written && late->transfer) {
            const Transfer& transfer = *late->transfer;
            foreign_write(world, late.get(), transfer.sent_at_known ? transfer.sent_at : transfer.where);
        }
    }
}

void over_elsewhere(World& world, Request* request) {
    if (!request->suspected) {
        // What follows has a pool for each of several streams.
        if (request->names.size() > 1)
            for (StreamName* name : request->names) world.own_pool(name, false);
        return;
    }
    for (RequestStream* rs : request->streams) {
        bool any = false, all = true;
        for (const RequestStream* other : request->streams) {
            if (other == rs || world.own_pool(other->stream, false)->role == KVG_ROUTER) continue;
            any = true;
            all &= other->ended;
        }
        if (!any || !all || !rs->has_lates()) continue;
        std::vector<Ref<Late>> unbound;
        for (const auto& [place, list] : rs->rare->late)
            for (const Ref<Late>& late : list)
                if (!late->transfer) unbound.push_back(late);
        for (const Ref<Late>& late : unbound) world.drop_late(late.get());
    }
}

}  // namespace kvguard
