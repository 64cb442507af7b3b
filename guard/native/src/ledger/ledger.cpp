#include "ledger/ledger.hpp"

#include "ledger/driver.hpp"

namespace kvguard {

Ledger::Ledger(const Policy& policy, const Settings& settings) : impl_(std::make_unique<Impl>(policy, settings)) {}

Ledger::~Ledger() {
    impl_.reset();
    tearing_down = false;
}

void Ledger::expect(Record& record) { impl_->lookahead.expect(record); }
void Ledger::feed(const Record& record, std::int64_t now_ns) { impl_->feed(record, now_ns); }
void Ledger::advance(std::int64_t now_ns) { impl_->advance(now_ns); }
void Ledger::finish() { impl_->finish(); }
std::vector<Event>& Ledger::events() { return impl_->world.events; }
void Ledger::want_retired(Retired wanted) { impl_->world.want_retired = wanted; }
void Ledger::set_witness(Witness* witness) { impl_->world.witness = witness; }
std::size_t Ledger::streams() const { return impl_->streams.size(); }

StreamState Ledger::stream(std::size_t index) const {
    const Stream& stream = *impl_->streams[index];
    return {stream.name->text, stream.epoch, stream.processed, stream.duplicates, stream.late, stream.time_ns};
}

std::vector<std::uint32_t>& Ledger::moved() { return impl_->moved; }
std::vector<std::uint64_t>& Ledger::judged() { return impl_->judged; }
void Ledger::want_judged(bool wanted) { impl_->want_judged = wanted; }

std::pair<std::int64_t, std::int64_t> Ledger::watermark(std::string_view name) const {
    const Stream* const stream = impl_->by_name.find(name);
    return stream == nullptr ? std::pair<std::int64_t, std::int64_t>{-1, -1}
                             : std::pair{stream->epoch, stream->processed};
}

Sizes Ledger::sizes() const {
    const World& world = impl_->world;
    Sizes sizes;
    for (const auto& pool : world.all_pools) sizes.pages += pool->pages;
    for (const auto& stream : impl_->streams) sizes.records_held += stream->holding();
    sizes.requests_live = world.requests_known - world.requests_ended;
    sizes.requests_ended = world.requests_ended;
    sizes.transfers = world.transfers.size();
    return sizes;
}

std::uint64_t Ledger::gaps() const { return impl_->world.gaps; }

std::uint64_t Ledger::dropped() const {
    std::uint64_t all = 0;
    for (const std::uint64_t n : impl_->world.dropped) all += n;
    return all;
}

std::uint64_t Ledger::dropped(Limit limit) const { return impl_->world.dropped[static_cast<int>(limit)]; }

std::uint64_t Ledger::bytes() const {
    const World& w = impl_->world;
    std::uint64_t bytes = w.blocks * kBlockPages * sizeof(Page) + w.taints.bytes() + w.request_pool.bytes() +
                          w.request_streams.bytes() + w.transfer_pool.bytes() + w.late_pool.bytes() +
                          w.request_names.bytes() + w.tenant_names.bytes() + w.sharers.bytes() + w.memory.bytes();
    for (const auto& stream : impl_->streams) {
        bytes += stream->recent.size() * sizeof(Stream::Recent);
        for (const auto& [seq, held] : stream->held) bytes += held.bytes.size() + 64;
        for (const auto& ready : stream->ready) bytes += ready.bytes.size() + 32;
    }
    return bytes;
}

std::vector<std::string> Ledger::request_ids() const {
    std::vector<std::string> ids;
    for (const Request* r = impl_->world.first_request; r != nullptr; r = r->next) ids.push_back(r->id->str());
    return ids;
}

bool Ledger::request(std::string_view id, RequestSummary& out) const {
    const Request* const request = impl_->world.find_request(id);
    if (request == nullptr) return false;
    out = request->summary();
    return true;
}

void Ledger::restore(const Restored& before) { impl_->restore(before); }

}  // namespace kvguard
