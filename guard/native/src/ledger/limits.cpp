// What the ledger keeps at most. After guard/ledger/limits.py.
#include <algorithm>

#include "ledger/world.hpp"

namespace kvguard {

namespace {

// Blocks of the pool that these pages are in and that are not kept yet.
void touch(const World& world, const Pool* pool, const Pages& pages, std::vector<std::uint64_t>& fresh) {
    if (pool != nullptr && pool->complete()) return;
    const std::uint64_t end = pool != nullptr ? pool->end() : world.settings.max_pool_pages;
    for (std::uint32_t i = 0; i < pages.runs(); ++i) {
        const Pages::Run run = pages.run(i);
        const std::uint64_t stop = std::min(run.stop(), end);
        if (run.first >= stop) continue;
        for (std::uint64_t b = run.first / kBlockPages; b <= (stop - 1) / kBlockPages; ++b)
            if (pool == nullptr || b >= pool->blocks.size() || !pool->blocks[b]) fresh.push_back(b);
    }
    if (fresh.size() < 2) return;
    std::sort(fresh.begin(), fresh.end());
    fresh.erase(std::unique(fresh.begin(), fresh.end()), fresh.end());
}

void keep(World& world, Pool* pool, const std::vector<std::uint64_t>& blocks) {
    for (const std::uint64_t block : blocks) world.blocks += pool->keep_block(block);
}

bool crowded(World& world, const Pool* source, const Pool* destination, const Record& record) {
    if (world.transfers.size() < kMaxPageTransfers) return false;
    bool full = false;
    if (source != nullptr)
        source->clip(record.pages, [&](std::uint64_t index) {
            const Page* const page = source->find(index);
            full |= page != nullptr && page->links != nullptr && page->links->outgoing.size() >= kMaxPageTransfers;
        });
    if (destination != nullptr)
        destination->clip(record.peer_pages, [&](std::uint64_t index) {
            full = full || world.count_incoming(destination, index) >= kMaxPageTransfers;
        });
    return full;
}

std::optional<Limit> exceeded_by_begin(World& world, const Record& record, Pool* pool) {
    const Settings& settings = world.settings;
    Pool* const peer = world.find_pool(record.peer_pool);
    const bool same = record.peer_pool == record.pool_id();
    const std::size_t fresh = (pool == nullptr) + (peer == nullptr && !same);
    if (fresh > 0 && world.all_pools.size() + fresh > settings.max_pools) return Limit::pools;
    std::vector<std::uint64_t> here, there;
    touch(world, pool, record.pages, here);
    touch(world, peer, record.peer_pages, same ? here : there);
    const std::size_t blocks = here.size() + there.size();
    if (blocks != 0 && (world.blocks + blocks) * kBlockPages > settings.max_pages) return Limit::pages;
    if (world.transfers.size() >= settings.max_transfers && world.transfers.find(record.transfer) == nullptr)
        return Limit::transfers;
    if (crowded(world, pool, peer, record)) return Limit::page_transfers;
    if (!here.empty()) keep(world, pool != nullptr ? pool : world.pool(record.pool_id()), here);
    if (!there.empty()) keep(world, peer != nullptr ? peer : world.pool(record.peer_pool), there);
    return {};
}

}  // namespace

std::optional<Limit> exceeded(World& world, Stream& stream, const Record& record, Request* request) {
    if (record.kind == KVG_PLACE) return {};
    const Settings& settings = world.settings;
    if (!record.request.empty() && record.kind != KVG_SCRUB) {
        if (request == nullptr) {
            if (world.requests_known - world.requests_ended >= settings.max_requests) return Limit::requests;
        } else if (request->streams.size() >= settings.max_request_streams) {
            const RequestStream* const rs = request->on(stream.name);
            if (rs == nullptr || rs->gone) return Limit::request_streams;
        }
    }
    Pool* const pool = record.pool.empty() ? stream.name->own_pool : world.find_pool(record.pool);
    if (record.kind == KVG_TRANSFER_BEGIN) return exceeded_by_begin(world, record, pool);
    if (pool == nullptr && world.all_pools.size() + 1 > settings.max_pools) return Limit::pools;
    if (!record.has_pages() || (pool != nullptr && pool->complete())) return {};
    std::vector<std::uint64_t> blocks;
    touch(world, pool, record.pages, blocks);
    if (blocks.empty()) return {};
    if ((world.blocks + blocks.size()) * kBlockPages > settings.max_pages) return Limit::pages;
    keep(world, pool != nullptr ? pool : world.pool(record.pool_id()), blocks);
    return {};
}

void tell(World& world, Limit limit, const Where& where) {
    const Settings& s = world.settings;
    struct Text {
        std::uint64_t most;
        const char* what;
    };
    const Text texts[kLimits] = {
        {s.max_streams, "streams"},        {s.max_pools, "pools"},
        {s.max_pages, "pages"},            {s.max_requests, "live requests"},
        {s.max_request_streams, "streams of one request"}, {s.max_transfers, "transfers in flight"},
        {kMaxPageTransfers, "transfers of one page"},
    };
    const Text& text = texts[static_cast<int>(limit)];
    Report more;
    more.reason = "more than " + std::to_string(text.most) + " " + text.what + " (" +
                  (limit == Limit::page_transfers ? std::string("a constant") : "ledger.max_" + std::string(name_of(limit))) +
                  "): records of others are dropped";
    world.report(Kind::stream_gap, where, "", false, nullptr, std::move(more));
}

}  // namespace kvguard
