// The binary record read (include/kvguard/record.h says what its bytes are) and written.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

#include "kvguard/record.h"

namespace kvguard {

// Page indices in a stated order, as runs: a view of a record's own bytes.
class Pages {
  public:
    Pages() = default;
    Pages(const std::uint64_t* runs, std::uint32_t count) : runs_(runs), count_(count) {}

    struct Run {
        std::uint64_t first;
        std::uint64_t pages;
        std::uint64_t stop() const { return first + pages; }
    };

    std::uint32_t runs() const { return count_; }
    Run run(std::uint32_t i) const { return {kvg_run_first(runs_[i]), kvg_run_pages(runs_[i])}; }
    const std::uint64_t* data() const { return runs_; }
    // Pages in all.
    std::uint64_t size() const {
        std::uint64_t n = 0;
        for (std::uint32_t i = 0; i < count_; ++i) n += kvg_run_pages(runs_[i]);
        return n;
    }
    bool empty() const { return count_ == 0; }

  private:
    const std::uint64_t* runs_ = nullptr;  // 8-byte aligned within its record
    std::uint32_t count_ = 0;
};

// A record taken apart; the strings and pages are views of its bytes and live as long as these.
struct Record {
    kvg_kind kind = KVG_PLACE;
    std::uint8_t code = 0;
    std::uint8_t status = 0;
    std::uint16_t flags = 0;
    std::uint64_t time_ns = 0, epoch = 0, seq = 0, tokens = 0, extra = 0;
    std::uint64_t page_bytes = 0, context_limit = 0;  // kv.pool only
    std::string_view stream, request, tenant, pool, transfer, peer_pool, share_from;
    Pages pages, peer_pages;
    std::string_view digests;
    std::uint32_t digest_count = 0;
    std::string_view bytes;  // the whole of it
    // A ledger's own hashes of the request's and the transfer's id, once it has looked ahead; 0 until then.
    std::uint64_t request_hash = 0, transfer_hash = 0;

    // The pool meant, the default resolved.
    std::string_view pool_id() const { return pool.empty() ? stream : pool; }
    bool has_pages() const { return (kind >= KVG_ALLOC && kind <= KVG_SCRUB) || kind == KVG_REFUSE; }
};

// Takes a record apart and checks everything that the convention says of it, so that who follows need not.
//
// data must be 8-byte aligned and hold `size` readable bytes. Returns nullptr, or what is wrong with it (then
// `out` is not to be used). Never reads beyond `size`.
const char* parse(const void* data, std::size_t size, Record& out);

inline constexpr const char* kKindNames[KVG_KINDS] = {
    "", "kv.pool", "kv.admit", "kv.alloc", "kv.share", "kv.write", "kv.transfer.begin", "kv.transfer.end",
    "kv.read", "kv.free", "kv.cache", "kv.scrub", "kv.request.end", "kv.respond", "kv.refuse",
};

// The span's name of a kind ("kv.alloc"); "" for KVG_PLACE.
constexpr const char* name_of(kvg_kind kind) { return kKindNames[kind]; }

// Bytes of a record padded to whole 8-byte words, as records stand behind each other in a `Rows`.
inline std::size_t padded(std::size_t bytes) { return (bytes + 7) & ~std::size_t{7}; }

// Many records behind each other, each at a multiple of 8 bytes, in the order they came.
//
// Filled by a decoder, handed to the ledger's thread, emptied there. The storage is 8-byte aligned.
struct Rows {
    std::string bytes;
    std::uint32_t count = 0;

    // Makes room for a record of `size` bytes (zeroed) and returns where it goes; valid until the next call.
    char* append(std::size_t size) {
        const std::size_t at = bytes.size();
        bytes.resize(at + padded(size));
        ++count;
        return bytes.data() + at;
    }
};

// Puts a record (whose views may point anywhere) behind the others. `out.bytes` of the record is not looked at.
// The caller vouches for what `parse` would check.
void append(Rows& rows, const Record& record);

}  // namespace kvguard
