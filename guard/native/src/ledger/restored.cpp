// Goes on where the guard before this one stopped. After guard/ledger/restored.py.
#include <algorithm>
#include <utility>

#include "ledger/driver.hpp"

namespace kvguard {

Where Ledger::Impl::last_of(StreamName* name) {
    const Stream* const stream = by_name.find(name->text);
    if (stream == nullptr) return {0, name, 0, 0};
    return {stream->time_ns, name, static_cast<std::uint64_t>(stream->epoch),
            static_cast<std::uint64_t>(std::max<std::int64_t>(stream->processed, 0))};
}

// After guard/ledger/restored.py.
void Ledger::Impl::restore(const Restored& before) {
    Witness* const witness = std::exchange(world.witness, nullptr);
    world.restored = true;
    for (const Restored::Stream& known : before.streams) {
        Stream* const stream = make(known.name);
        stream->epoch = static_cast<std::int64_t>(known.epoch);
        stream->processed = known.processed;
        stream->next_seq = static_cast<std::uint64_t>(known.processed) + 1;
        stream->resumed = known.processed == INT64_MAX ? INT64_MAX : known.processed + 1;
        stream->time_ns = known.time_ns;
        stream->past.assign(known.past.begin(), known.past.end());
        note_moved(*stream);
    }
    for (const auto& stream : streams) stream->name->blind = true;
    for (const Restored::Pool& pool : before.pools) world.stream_name(pool.stream)->blind = true;
    std::vector<Pool*> pools;
    for (const Restored::Pool& announced : before.pools) {
        Pool* const pool = world.pool(announced.id);
        world.give(pool, world.stream_name(announced.stream));
        pool->size = announced.pages;
        pool->announced = true;
        pool->page_tokens = announced.page_tokens;
        pool->role = announced.role;
        pools.push_back(pool);
    }
    for (const auto& stream : streams)
        if (std::none_of(before.pools.begin(), before.pools.end(),
                         [&](const Restored::Pool& p) { return p.stream == stream->name->text; }))
            pools.push_back(world.own_pool(stream->name, false));
    for (const Restored::Live& live : before.requests) {
        Request* request = world.find_request(live.request);
        if (request == nullptr) request = world.make_request(live.request, world.hash(live.request));
        StreamName* const name = world.stream_name(live.stream);
        if (request->on(name) != nullptr) continue;
        RequestStream* const rs = world.follow(request, name, live.tenant);
        rs->marked_degraded = true;
        if (!live.ended) continue;
        rs->set_ended();
        rs->ended_unseen = true;
    }
    for (const Restored::Live& live : before.requests)
        if (Request* const request = world.find_request(live.request); request != nullptr) world.note_over(request);
    for (Pool* pool : pools) {
        ++world.gaps;
        Where where = last_of(pool->stream);
        // Just after the last record: a hole that is found right there says more, and takes this finding over.
        ++where.time_ns;
        Report more;
        more.degraded = true;
        more.reason = kCannotVouch;
        world.report(Kind::stream_gap, where, pool->id, true, nullptr, std::move(more));
        pool->lose_sight();
    }
    world.witness = witness;
}

}  // namespace kvguard
