#include "digest.hpp"

#include <algorithm>
#include <bit>
#include <cstring>

namespace kvguard {

static_assert(std::endian::native == std::endian::little, "words are loaded as they stand");

namespace {

using Wide = unsigned __int128;

constexpr std::uint64_t kPrime = KVG_DIGEST_PRIME;
constexpr std::size_t kBatch = 32;  // blocks whose NH is computed at a time: values stay in the first cache

// The same modulo p, and at most p + 2, of anything below 2^123.
std::uint64_t folded(Wide x) {
    const std::uint64_t once = static_cast<std::uint64_t>(x & kPrime) + static_cast<std::uint64_t>(x >> 61);
    return (once & kPrime) + (once >> 61);
}

std::uint64_t reduced(std::uint64_t x) { return x >= kPrime ? x - kPrime : x; }

std::uint64_t times(std::uint64_t a, std::uint64_t b) { return reduced(folded(static_cast<Wide>(a) * b)); }

std::uint64_t power(std::uint64_t base, std::uint64_t exponent) {
    std::uint64_t out = 1;
    for (; exponent != 0; exponent >>= 1, base = times(base, base))
        if (exponent & 1) out = times(out, base);
    return out;
}

std::uint64_t point(const unsigned char* bytes) {
    Wide x;
    std::memcpy(&x, bytes, sizeof x);
    return 1 + static_cast<std::uint64_t>(x % (kPrime - 1));
}

}  // namespace

HashKey::HashKey(const unsigned char* bytes, const Nh& nh) : nh_(nh.blocks) {
    auto table = std::make_unique<Table>();
    std::memcpy(table->words, bytes, sizeof table->words);
    table_ = std::move(table);
    for (std::size_t lane = 0; lane < kLanes; ++lane) {
        r_[lane] = point(bytes + sizeof table_->words + 16 * lane);
        r2_[lane] = times(r_[lane], r_[lane]);
    }
}

Hash HashKey::add(const Hash& hash, const unsigned char* piece, std::size_t bytes) const {
    Hash h = hash;
    // h r^2 + hi r + lo: but one product waits for the block before.
    const auto mix = [&](const Hash& values, std::uint64_t n) {
        for (std::size_t lane = 0; lane < kLanes; ++lane) {
            const std::uint64_t v = values[lane] + n;
            const Wide here = static_cast<Wide>(v >> 32) * r_[lane] + (v & 0xffffffff);
            h[lane] = folded(static_cast<Wide>(h[lane]) * r2_[lane] + here);
        }
    };
    Hash values[kBatch];
    while (bytes >= kBlockBytes) {
        const std::size_t blocks = std::min(bytes / kBlockBytes, kBatch);
        nh_(table_->words, piece, blocks, values);
        for (std::size_t i = 0; i < blocks; ++i) mix(values[i], kBlockBytes);
        piece += blocks * kBlockBytes;
        bytes -= blocks * kBlockBytes;
    }
    if (bytes != 0) {
        alignas(64) unsigned char last[kBlockBytes] = {};
        std::memcpy(last, piece, bytes);
        nh_(table_->words, last, 1, values);
        mix(values[0], bytes);
    }
    for (std::uint64_t& lane : h) lane = reduced(lane);
    return h;
}

Hash HashKey::merge(const Hash& left, const Hash& right, std::uint64_t right_blocks) const {
    Hash out;
    for (std::size_t lane = 0; lane < kLanes; ++lane) {
        const std::uint64_t moved = times(left[lane] + kPrime - 1, power(r2_[lane], right_blocks));
        out[lane] = reduced(moved + right[lane]);
    }
    return out;
}

}  // namespace kvguard
