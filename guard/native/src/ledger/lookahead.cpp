#include "ledger/lookahead.hpp"

namespace kvguard {

namespace {

void fetch(const void* object, std::size_t bytes) {
    for (std::size_t at = 0; at < bytes; at += 64) __builtin_prefetch(static_cast<const char*>(object) + at, 1);
}

}  // namespace

const Request* Lookahead::request(const Hint& hint) const {
    if (!hint.named) return nullptr;
    const Name* const name = world_.request_names.peek(hint.hash);
    return name != nullptr ? name->request : nullptr;
}

void Lookahead::expect(Record& record) {
    if (!record.request.empty()) {
        record.request_hash = world_.hash(record.request);
        world_.request_names.prefetch(record.request_hash, record.kind == KVG_ADMIT);
    }
    if (!record.transfer.empty()) {
        record.transfer_hash = world_.hash(record.transfer);
        world_.transfers.prefetch(record.transfer_hash);
        if (record.kind == KVG_TRANSFER_END) world_.done.prefetch(record.transfer_hash);
    }
    // What is small is in the processor's cache anyway.
    const bool many = world_.requests_known - world_.requests_ended > kFewRequests;
    if (!many && world_.blocks <= kFewBlocks) return;
    Hint& now = hints_[next_ % kSteps];
    if (const Stream* const last = before(1).stream; last != nullptr && last->name->text == record.stream) {
        now.stream = last;
    } else {
        now.stream = streams_.find(record.stream);
    }
    now.named = many && !record.request.empty();
    now.hash = record.request_hash;
    now.pages = 0;
    if (now.stream != nullptr && record.pool.empty() && record.has_pages())
        if (const Pool* const pool = now.stream->name->own_pool; pool != nullptr)
            for (std::uint32_t i = 0; i < record.pages.runs() && now.pages < kPages; ++i) {
                const Pages::Run run = record.pages.run(i);
                for (std::uint64_t p = run.first; p < run.stop() && now.pages < kPages; ++p) {
                    pool->prefetch(p);
                    now.page[now.pages++] = p;
                }
            }
    const Hint& fourth = before(4);
    if (fourth.pages != 0)
        if (const Pool* const pool = fourth.stream->name->own_pool; pool != nullptr)
            for (std::uint32_t i = 0; i < fourth.pages; ++i)
                if (const Page* const page = pool->find(fourth.page[i]); page != nullptr && page->label != nullptr)
                    fetch(page->label, sizeof(Taint));
    ++next_;
    if (!many) return;
    if (const Hint& hint = before(3); hint.named)
        if (const Name* const name = world_.request_names.peek(hint.hash); name != nullptr)
            fetch(name, sizeof(Name) + 32);
    if (const Request* const known = request(before(5)); known != nullptr) fetch(known, 192);
    if (const Request* const known = request(before(7)); known != nullptr)
        for (const RequestStream* rs : known->streams) __builtin_prefetch(rs);
    const Hint& last = before(9);
    if (const Request* const known = request(last); known != nullptr && last.stream != nullptr)
        if (const RequestStream* const rs = known->on(last.stream->name); rs != nullptr)
            fetch(reinterpret_cast<const char*>(rs) + 64, sizeof(RequestStream) - 64);
}

}  // namespace kvguard
