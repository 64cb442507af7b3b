// The keyed hash of pages: kvguard/digest.h says what it is.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

#include "kvguard/digest.h"

namespace kvguard {

constexpr std::size_t kBlockBytes = KVG_DIGEST_BLOCK_BYTES;
constexpr std::size_t kHalfWords = KVG_DIGEST_HALF_WORDS;
constexpr std::size_t kLanes = KVG_DIGEST_LANES;

using Hash = std::array<std::uint64_t, kLanes>;

// Puts the NH values of `blocks` whole blocks, without the n, into out[0], out[1], ….
using NhBlocks = void (*)(const std::uint32_t* table, const unsigned char* data, std::size_t blocks, Hash* out);

// One way to compute NH, and the processors that have it.
struct Nh {
    const char* name;
    NhBlocks blocks;
    bool (*runs)();  // on this processor
};

// All of them, the fastest first; the last runs everywhere.
std::span<const Nh> nh_ways();

// The fastest that this processor has.
const Nh& best_nh();

// A tenant's key of the hash.
class HashKey {
  public:
    // The first KVG_HASH_KEY_BYTES of the tenant's key.
    explicit HashKey(const unsigned char* bytes, const Nh& nh = best_nh());

    // The hash behind `hash` of one more piece.
    Hash add(const Hash& hash, const unsigned char* piece, std::size_t bytes) const;

    // Of the pieces of `left` and then those of `right`, which have so many blocks together.
    Hash merge(const Hash& left, const Hash& right, std::uint64_t right_blocks) const;

  private:
    struct Table {
        alignas(64) std::uint32_t words[3 * kHalfWords];
    };

    std::unique_ptr<const Table> table_;
    Hash r_, r2_;  // each lane's point, and its square
    NhBlocks nh_;
};

constexpr Hash kNoBlocks = {1, 1};

}  // namespace kvguard
