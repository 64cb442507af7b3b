// Rules for pools, requests and streams as a whole: what begins, ends, restarts, leaks or goes missing. After
// guard/ledger/lifecycle.py.
#include <algorithm>

#include "ledger/world.hpp"

namespace kvguard {

namespace {

bool needs_life(kvg_kind kind) {
    return kind == KVG_ALLOC || kind == KVG_SHARE || kind == KVG_WRITE || kind == KVG_READ ||
           kind == KVG_TRANSFER_BEGIN || kind == KVG_RESPOND;
}

std::vector<Ref<Late>> lates_of(const RequestStream* rs) {
    std::vector<Ref<Late>> all;
    if (rs->has_lates())
        for (const auto& [place, list] : rs->rare->late) all.insert(all.end(), list.begin(), list.end());
    return all;
}

// Transfers in flight to pages that the request never had here: wherever they land, it is not its page.
void never_owned(World& world, RequestStream* rs) {
    std::vector<Ref<Transfer>> transfers;
    for (Transfer* transfer : rs->request->transfers) transfers.emplace_back(transfer);
    for (const Ref<Transfer>& transfer : transfers) {
        Pool* const pool = transfer->pool;
        if (transfer->received || pool->stream != rs->stream) continue;
        std::vector<std::uint64_t> known;
        for (const Ref<Late>& late : transfer->late) known.push_back(late->index);
        std::sort(known.begin(), known.end());
        transfer->each_into([&](std::uint64_t index) {
            if (index >= pool->end()) return;
            Page& page = world.page(pool, index);
            if (page.owner != rs && !std::binary_search(known.begin(), known.end(), index))
                suspect(world, rs, pool, index, &page, nullptr, transfer.get());
        });
    }
}

// What follows from the end of a request on a stream.
void close(World& world, RequestStream* rs) {
    world.unshare(rs);
    for (const Ref<Late>& late : lates_of(rs)) confirm(world, late.get());
    never_owned(world, rs);
    over_elsewhere(world, rs->request);
    world.note_over(rs->request);
}

}  // namespace

void announce(World& world, Stream& stream, const Record& record, const Where& where) {
    Pool* const pool = record.pool.empty() ? world.own_pool(stream.name, false) : world.pool(record.pool);
    world.give(pool, stream.name);
    pool->size = record.tokens;
    ++pool->changes;
    pool->announced = true;
    pool->page_tokens = record.extra;
    pool->role = record.code;
    if (world.witness != nullptr)
        world.witness->pool(pool->id, stream.name->text, pool->size, pool->page_tokens, record.code);
    if (pool->role == KVG_ROUTER || pool->tokens() >= record.context_limit) return;
    Report more;
    more.reason = "the pool holds " + to_text(pool->tokens()) + " tokens, the worker advertises " +
                  std::to_string(record.context_limit);
    world.report(Kind::over_capacity, where, pool->id, true, nullptr, std::move(more));
}

void admit(World& world, Stream& stream, RequestStream* rs, const Record& record) {
    const Pool* const pool = world.pool_of(record, stream.name);
    if (!pool->announced || record.tokens <= pool->tokens() || pool->role == KVG_ROUTER) return;
    rs->over_capacity = true;
    rs->more().prompt_tokens = record.tokens;
}

void went_on_after_all(World& world, Stream& stream, RequestStream* rs, const Record& record, const Where& where) {
    if (rs->ended && needs_life(record.kind)) {
        Pool* const pool = world.pool_of(record, stream.name);
        Evidence pages;
        for (std::uint32_t i = 0; i < record.pages.runs(); ++i)
            pages.add_run(record.pages.run(i).first, std::min(record.pages.run(i).stop(), pool->end()));
        Report more;
        more.evidence = &pages;
        more.degraded = rs->ended_unseen;
        more.reason = std::string(name_of(record.kind)) + " after its end on " + stream.name->text;
        world.report(Kind::zombie_request, where, pool->id, true, rs, std::move(more));
    }
    if (!rs->over_capacity) return;
    const bool finished = record.kind == KVG_REQUEST_END && record.code == KVG_FINISHED;
    if (!finished && record.kind != KVG_TRANSFER_BEGIN && record.kind != KVG_READ && record.kind != KVG_RESPOND) return;
    const Pool* const pool = world.pool_of(record, stream.name);
    const std::vector<Request*> nobody;
    Report more;
    more.subjects = &nobody;
    more.reason = "a prompt of " + std::to_string(rs->more().prompt_tokens) + " tokens was not rejected by a pool that holds " +
                  (pool->announced ? to_text(pool->tokens()) : "None");
    world.report(Kind::over_capacity, where, record.pool_id(), true, rs, std::move(more));
    rs->over_capacity = false;
}

void request_end(World& world, Stream& stream, RequestStream* rs, const Record& record, const Where& where) {
    if (!rs->ended || rs->ended_unseen) {
        if (world.witness != nullptr && !rs->ended)
            world.witness->ended(rs->request->id->key(), stream.name->text);
        rs->set_ended();
        rs->ended_unseen = false;
    }
    Request* const request = rs->request;
    if (record.code == KVG_REJECTED || record.code == KVG_FAILED) {
        auto& deaths = request->more().deaths;
        if (std::none_of(deaths.begin(), deaths.end(), [&](const Death& d) { return d.stream == stream.name; }))
            deaths.push_back({stream.name, where, record.code, stream.clock, rs->degraded()});
    }
    if (record.code == KVG_REJECTED && world.own_pool(stream.name, false)->role != KVG_ROUTER) {
        auto& rejections = request->more().rejections;
        if (std::find(rejections.begin(), rejections.end(), stream.name) == rejections.end())
            rejections.push_back(stream.name);
    }
    close(world, rs);
    dead_or_rejected(world, request);
    const std::uint64_t grace = world.settings.leak_grace_ns;
    const std::uint64_t deadline = where.time_ns > ~grace ? ~std::uint64_t{0} : where.time_ns + grace;
    if (!rs->owns_nothing()) {
        stream.watch_leak(deadline, rs, where);
    } else if (!rs->ended_empty) {
        rs->ended_empty = true;
        rs->first_end = {deadline, stream.looks, where.time_ns, where.seq};
    } else if (auto& ends = rs->more().ends; ends.size() + 1 < kMaxPending) {
        ends.push_back({deadline, stream.looks, where.time_ns, where.seq});
    }
}

void leaked(World& world, RequestStream* rs, const Where& where) {
    rs->each_holding([&](const Holding& held) {
        if (held.owned == 0) return;
        Evidence pages;
        each_page(held.owned_runs.view(), [&](std::uint64_t index) {
            if (const Page* page = held.pool->find(index); page != nullptr && page->owner == rs)
                pages.add(index, held.pool->unvouched(*page));
        });
        Report more;
        more.evidence = &pages;
        more.reason = std::to_string(held.owned) + " pages still owned " + world.settings.leak_grace_text +
                      " s after the request ended";
        world.report(Kind::page_leak, where, held.pool->id, true, rs, std::move(more));
    });
}

void restart(World& world, Stream& stream) {
    std::vector<Ref<Transfer>> transfers;
    for (Transfer* t = world.first_transfer; t != nullptr; t = t->next) transfers.emplace_back(t);
    for (const Ref<Transfer>& transfer : transfers) {
        if (transfer->where.stream == stream.name && !transfer->sent) {
            // The sender's process is gone and its source pages with it: nothing more can be added or written.
            transfer->sent = true;
            transfer->sent_status = KVG_STATUS_FAILED;
            world.unlist_outgoing(transfer.get());
            world.taints.close_one(transfer->taint.get());
            const auto lates = transfer->late;
            for (const Ref<Late>& late : lates) judge(world, late.get());
        }
        if (transfer->request()->on(stream.name) != nullptr && transfer->pool->stream == stream.name) {
            transfer->received = true;
            world.unlist_incoming(transfer.get());
        }
        if (transfer->received && transfer->sent) world.drop_transfer(transfer.get());
    }
    std::vector<Ref<Request>> requests;
    for (Request* r = world.first_request; r != nullptr; r = r->next) requests.emplace_back(r);
    for (const Ref<Request>& request : requests) {
        RequestStream* const rs = request->on(stream.name);
        if (rs == nullptr || rs->gone) continue;
        rs->gone = true;
        for (const Ref<Late>& late : lates_of(rs)) {
            late->incarnation = 0;
            confirm(world, late.get());
        }
        rs->each_holding([&](Holding& held) {
            held.owned = 0;
            held.owned_runs.drop(world.memory);
        });
        world.unshare(rs);
        if (!rs->ended) {
            rs->set_ended();
            if (world.witness != nullptr) world.witness->ended(request->id->key(), stream.name->text);
        }
        world.note_over(request.get());
    }
    for (std::size_t i = 0; i < world.all_pools.size(); ++i)
        if (world.all_pools[i]->stream == stream.name) world.clear(world.all_pools[i].get());
    stream.name->blind = false;
}

void reborn(World& world, RequestStream* rs) {
    Request* const request = rs->request;
    rs->leave();
    request->names.remove(rs->stream);
    request->streams.remove(rs);
    request->more().former.push_back(rs);
    world.unend(request);
}

void lost(World& world, Stream& stream, const Gap& gap, const char* why) {
    ++world.gaps;
    ++stream.name->losses;
    stream.name->blind = true;
    const Where where{stream.time_ns, stream.name, static_cast<std::uint64_t>(stream.epoch), gap.first};
    const bool resumed = static_cast<std::int64_t>(gap.first) == stream.resumed;
    const std::string reason = std::string(why) + ": records " + std::to_string(gap.first) + " to " +
                               std::to_string(gap.last) + " of epoch " + std::to_string(stream.epoch) + " are missing" +
                               (resumed ? std::string("; ") + kCannotVouch : "");
    std::vector<Pool*> pools;
    for (const auto& pool : world.all_pools)
        if (pool->stream == stream.name) pools.push_back(pool.get());
    if (pools.empty()) pools.push_back(world.own_pool(stream.name, false));
    for (Pool* pool : pools) {
        Evidence owned;
        std::vector<Request*> subjects;
        pool->each([&](std::uint64_t index, Page& page) {
            if (page.owner == nullptr) return;
            owned.add(index);
            Request* const request = page.owner->request;
            if (subjects.empty() || subjects.back() != request) subjects.push_back(request);
        });
        std::sort(subjects.begin(), subjects.end());
        subjects.erase(std::unique(subjects.begin(), subjects.end()), subjects.end());
        Report more;
        more.evidence = &owned;
        more.subjects = &subjects;
        more.degraded = resumed;
        more.reason = reason;
        world.report(Kind::stream_gap, where, pool->id, true, nullptr, std::move(more));
        pool->lose_sight();
    }
}

}  // namespace kvguard
