#include "records.hpp"

#include <algorithm>
#include <cstring>

#include "utf8.hpp"

namespace kvguard {

static_assert(sizeof(kvg_record) == KVG_ROW_BYTES);

namespace {

// Largest code of each kind.
constexpr std::uint8_t kCodes[KVG_KINDS] = {0, KVG_ROUTER, 0, 0, 0, KVG_PUBLIC, 0, KVG_RECV, 0, 0, 0, 0, KVG_FAILED, 0, 0};

// What of the flags and numbers each kind has; the rest of them is 0.
constexpr std::uint16_t kFlags[KVG_KINDS] = {0, 0, KVG_HAS_MAX, 0, KVG_HAS_TOKENS, 0, KVG_HAS_DIGESTS, KVG_HAS_DIGESTS,
                                             0, 0, 0, 0, 0, KVG_FINAL, 0};

bool has_tokens(const kvg_record& h) {
    constexpr std::uint32_t kKinds = 1u << KVG_POOL | 1u << KVG_ADMIT | 1u << KVG_WRITE | 1u << KVG_TRANSFER_BEGIN |
                                     1u << KVG_TRANSFER_END | 1u << KVG_READ | 1u << KVG_RESPOND;
    return (kKinds >> h.kind & 1) != 0 || (h.flags & KVG_HAS_TOKENS) != 0;
}

bool has_extra(const kvg_record& h) {
    return h.kind == KVG_POOL || h.kind == KVG_RESPOND || (h.flags & KVG_HAS_MAX) != 0;
}

constexpr std::uint64_t kHigh = std::uint64_t{1} << 63;

const char* check_id(std::string_view id) {
    if (id.size() <= 256 && is_ascii(id)) return nullptr;
    const std::ptrdiff_t length = utf8_length(id);
    if (length < 0) return "an id is not UTF-8";
    return length > 256 ? "an id has more than 256 characters" : nullptr;
}

// What is wrong with them; `total`: how many they are.
const char* check_pages(const Pages& pages, std::uint64_t& total) {
    std::uint64_t last_stop = ~std::uint64_t{0};
    total = 0;
    for (std::uint32_t i = 0; i < pages.runs(); ++i) {
        const Pages::Run run = pages.run(i);
        if (run.stop() > KVG_MAX_PAGE_INDEX) return "a page index is beyond 2**40 - 1";
        if (run.first == last_stop) return "neighbouring runs of pages are not joined";
        last_stop = run.stop();
        total += run.pages;
    }
    return total > KVG_MAX_PAGES ? "more pages than one record may name" : nullptr;
}

bool is_hex(unsigned char c) {
    return static_cast<unsigned char>(c - '0') < 10 || static_cast<unsigned char>(c - 'a') < 6;
}

// Comma-separated lower-case hexadecimal, `count` of them, none empty.
bool is_digests(std::string_view text, std::uint32_t count) {
    if (text.empty()) return count == 0;
    if (text.front() == ',' || text.back() == ',') return false;
    // Sixteen characters at once.
    typedef unsigned char Characters __attribute__((vector_size(16)));
    typedef signed char Masks __attribute__((vector_size(16)));
    const auto load = [&](std::size_t at) {
        Characters c;
        std::memcpy(&c, text.data() + at, sizeof c);
        return c;
    };
    Masks wrong{};
    std::size_t commas = 0, i = 0;
    while (i + sizeof(Characters) < text.size()) {
        Masks found{};  // minus the commas in each place: flushed before it overflows
        for (int round = 0; round < 127 && i + sizeof(Characters) < text.size(); ++round, i += sizeof(Characters)) {
            const Characters c = load(i);
            const Masks comma = c == ',';
            wrong |= ~(comma | (c - '0' < 10) | (c - 'a' < 6)) | (comma & (load(i + 1) == ','));
            found += comma;
        }
        for (std::size_t place = 0; place < sizeof found; ++place) commas -= static_cast<std::size_t>(found[place]);
    }
    std::uint64_t halves[2];
    std::memcpy(halves, &wrong, sizeof halves);
    if ((halves[0] | halves[1]) != 0) return false;
    for (; i < text.size(); ++i) {
        const auto c = static_cast<unsigned char>(text[i]);
        if (c == ',' ? text[i + 1] == ',' : !is_hex(c)) return false;
        commas += c == ',';
    }
    return commas + 1 == count;
}

// Whether the last `count` bytes, fewer than eight, before `end` are zeros.
bool ends_in_zeros(const char* end, std::size_t count) {
    char last[8] = {};
    std::memcpy(last, end - count, count);
    std::uint64_t word;
    std::memcpy(&word, last, sizeof word);
    return word == 0;
}

bool needs_transfer(kvg_kind kind) { return kind == KVG_TRANSFER_BEGIN || kind == KVG_TRANSFER_END; }

}  // namespace

const char* parse(const void* data, std::size_t size, Record& out) {
    if (size < sizeof(kvg_record)) return "shorter than a record's header";
    const auto* p = static_cast<const char*>(data);
    kvg_record h;
    std::memcpy(&h, p, sizeof h);
    if (h.version != KVG_RECORD_VERSION) return "not a record of version 1";
    if (h.kind >= KVG_KINDS) return "no such kind";
    if (h.bytes < sizeof h || h.bytes > size || h.bytes > KVG_MAX_RECORD_BYTES) return "its length is not its own";
    if ((h.time_ns | h.epoch | h.seq | h.tokens | h.extra) & kHigh) return "a number is 2**63 or more";
    const auto kind = static_cast<kvg_kind>(h.kind);
    const std::uint16_t lengths[7] = {h.stream_bytes,   h.request_bytes,   h.tenant_bytes,    h.pool_bytes,
                                      h.transfer_bytes, h.peer_pool_bytes, h.share_from_bytes};
    std::string_view* const strings[7] = {&out.stream,   &out.request,   &out.tenant,    &out.pool,
                                          &out.transfer, &out.peer_pool, &out.share_from};
    std::size_t at = sizeof h;
    for (int i = 0; i < 7; ++i) {
        if (lengths[i] > KVG_MAX_ID_BYTES) return "an id is too long";
        if (at + lengths[i] > h.bytes) return "it ends within its ids";
        *strings[i] = {p + at, lengths[i]};
        at += lengths[i];
    }
    if (const std::string_view all{p + sizeof h, at - sizeof h}; all.size() > 256 || !is_ascii(all)) {
        // Well-formed together is not enough: a character may be cut in two.
        for (const auto* id : strings)
            if (const char* bad = check_id(*id); bad != nullptr) return bad;
    }
    const std::size_t ids_end = at;
    at = padded(at);
    if (out.stream.empty()) return "it has no stream";
    if (h.code > kCodes[kind]) return "no such role, scope, side or outcome";
    if (h.status > (kind == KVG_TRANSFER_END ? KVG_STATUS_ABORTED : 0)) return "no such status";
    const bool named = !out.request.empty();
    if (kind != KVG_PLACE && kind != KVG_POOL && kind != KVG_SCRUB && !named) return "it has no request";
    if ((kind == KVG_POOL || kind == KVG_PLACE) && named) return "a request has no place in this kind";
    if (named != !out.tenant.empty()) return "a request and its tenant go together";
    if (needs_transfer(kind) != !out.transfer.empty()) return "a transfer id is missing or out of place";
    if ((kind == KVG_TRANSFER_BEGIN) != !out.peer_pool.empty()) return "a peer pool is missing or out of place";
    if (kind != KVG_SHARE && !out.share_from.empty()) return "kv.share.from is out of place";
    if (h.flags & ~kFlags[kind]) return "a flag is out of place";
    if ((h.tokens != 0 && !has_tokens(h)) || (h.extra != 0 && !has_extra(h))) return "a number is out of place";
    out.kind = kind;
    out.code = h.code;
    out.status = h.status;
    out.flags = h.flags;
    out.time_ns = h.time_ns;
    out.epoch = h.epoch;
    out.seq = h.seq;
    out.tokens = h.tokens;
    out.extra = h.extra;
    out.page_bytes = out.context_limit = 0;
    out.pages = out.peer_pages = {};
    out.digests = {};
    out.digest_count = 0;
    out.bytes = {p, h.bytes};
    out.request_hash = out.transfer_hash = 0;
    if (kind == KVG_POOL) {
        if (at + 16 != h.bytes) return "its length is not its own";
        std::memcpy(&out.page_bytes, p + at, 8);
        std::memcpy(&out.context_limit, p + at + 8, 8);
        if ((out.page_bytes | out.context_limit) & kHigh) return "a number is 2**63 or more";
        if (out.tokens > KVG_MAX_PAGE_INDEX) return "a pool of more than 2**40 pages";
        if (!ends_in_zeros(p + at, at - ids_end)) return "its padding is not zeros";
    } else if (out.has_pages()) {
        if (at + 16 > h.bytes) return "it ends before its pages";
        if (!ends_in_zeros(p + at, at - ids_end)) return "its padding is not zeros";
        std::uint32_t counts[4];
        std::memcpy(counts, p + at, sizeof counts);
        at += sizeof counts;
        const std::uint64_t runs = std::uint64_t{counts[0]} + counts[1];
        if (at + 8 * runs + counts[2] != h.bytes) return "its length is not its own";
        const auto* words = reinterpret_cast<const std::uint64_t*>(p + at);
        out.pages = {words, counts[0]};
        out.peer_pages = {words + counts[0], counts[1]};
        out.digests = {p + at + 8 * runs, counts[2]};
        out.digest_count = counts[3];
        std::uint64_t named_pages = 0;
        if (const char* wrong = check_pages(out.pages, named_pages); wrong != nullptr) return wrong;
        if (kind == KVG_TRANSFER_BEGIN) {
            std::uint64_t peers = 0;
            if (const char* wrong = check_pages(out.peer_pages, peers); wrong != nullptr) return wrong;
            if (named_pages != peers) return "kv.pages and kv.peer.pages differ in length";
        } else if (counts[1] != 0) {
            return "kv.peer.pages is out of place";
        }
        if (h.flags & KVG_HAS_DIGESTS) {
            if (!needs_transfer(kind)) return "kv.digests is out of place";
            if (!is_digests(out.digests, out.digest_count)) return "kv.digests is not lower-case hexadecimal";
            if (out.digest_count != named_pages) return "kv.digests is not one a page";
        } else if (counts[2] != 0 || counts[3] != 0) {
            return "kv.digests is out of place";
        }
    } else if (ids_end != h.bytes) {
        return "its length is not its own";
    }
    return nullptr;
}

void append(Rows& rows, const Record& r) {
    const std::string_view strings[7] = {r.stream, r.request, r.tenant, r.pool, r.transfer, r.peer_pool, r.share_from};
    std::size_t text = 0;
    for (const auto s : strings) text += s.size();
    std::size_t size = sizeof(kvg_record) + text;
    if (r.kind == KVG_POOL) {
        size = padded(size) + 16;
    } else if (r.has_pages()) {
        size = padded(size) + 16 + 8 * (std::size_t{r.pages.runs()} + r.peer_pages.runs()) + r.digests.size();
    }
    char* const p = rows.append(size);
    kvg_record h{};
    h.bytes = static_cast<std::uint32_t>(size);
    h.version = KVG_RECORD_VERSION;
    h.kind = r.kind;
    h.flags = r.flags;
    h.time_ns = r.time_ns;
    h.epoch = r.epoch;
    h.seq = r.seq;
    h.tokens = r.tokens;
    h.extra = r.extra;
    h.stream_bytes = static_cast<std::uint16_t>(r.stream.size());
    h.request_bytes = static_cast<std::uint16_t>(r.request.size());
    h.tenant_bytes = static_cast<std::uint16_t>(r.tenant.size());
    h.pool_bytes = static_cast<std::uint16_t>(r.pool.size());
    h.transfer_bytes = static_cast<std::uint16_t>(r.transfer.size());
    h.peer_pool_bytes = static_cast<std::uint16_t>(r.peer_pool.size());
    h.share_from_bytes = static_cast<std::uint16_t>(r.share_from.size());
    h.code = r.code;
    h.status = r.status;
    std::memcpy(p, &h, sizeof h);
    std::size_t at = sizeof h;
    for (const auto s : strings) {
        if (!s.empty()) std::memcpy(p + at, s.data(), s.size());
        at += s.size();
    }
    at = padded(at);
    if (r.kind == KVG_POOL) {
        std::memcpy(p + at, &r.page_bytes, 8);
        std::memcpy(p + at + 8, &r.context_limit, 8);
    } else if (r.has_pages()) {
        const std::uint32_t counts[4] = {r.pages.runs(), r.peer_pages.runs(),
                                         static_cast<std::uint32_t>(r.digests.size()), r.digest_count};
        std::memcpy(p + at, counts, sizeof counts);
        at += sizeof counts;
        if (counts[0] != 0) std::memcpy(p + at, r.pages.data(), std::size_t{8} * counts[0]);
        at += std::size_t{8} * counts[0];
        if (counts[1] != 0) std::memcpy(p + at, r.peer_pages.data(), std::size_t{8} * counts[1]);
        at += std::size_t{8} * counts[1];
        if (counts[2] != 0) std::memcpy(p + at, r.digests.data(), counts[2]);
    }
}

}  // namespace kvguard
