#include "blake2b.hpp"

#include <bit>
#include <cstddef>
#include <cstring>

namespace kvguard {

static_assert(std::endian::native == std::endian::little, "words are loaded as they stand");

namespace {

constexpr std::uint64_t kIv[8] = {
    0x6a09e667f3bcc908, 0xbb67ae8584caa73b, 0x3c6ef372fe94f82b, 0xa54ff53a5f1d36f1,
    0x510e527fade682d1, 0x9b05688c2b3e6c1f, 0x1f83d9abfb41bd6b, 0x5be0cd19137e2179,
};

constexpr std::uint8_t kSigma[10][16] = {
    {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}, {14, 10, 4, 8, 9, 15, 13, 6, 1, 12, 0, 2, 11, 7, 5, 3},
    {11, 8, 12, 0, 5, 2, 15, 13, 10, 14, 3, 6, 7, 1, 9, 4}, {7, 9, 3, 1, 13, 12, 11, 14, 2, 6, 5, 10, 4, 0, 15, 8},
    {9, 0, 5, 7, 2, 4, 10, 15, 14, 1, 11, 12, 6, 8, 3, 13}, {2, 12, 6, 10, 0, 11, 8, 3, 4, 13, 7, 5, 15, 14, 1, 9},
    {12, 5, 1, 15, 14, 13, 4, 10, 0, 7, 6, 3, 9, 2, 8, 11}, {13, 11, 7, 14, 12, 1, 3, 9, 5, 0, 15, 4, 8, 6, 2, 10},
    {6, 15, 14, 9, 11, 3, 0, 8, 12, 2, 13, 7, 1, 4, 10, 5}, {10, 2, 8, 4, 7, 6, 1, 5, 15, 11, 9, 14, 3, 12, 13, 0},
};

constexpr std::size_t kBlock = 128;

// `taken`: bytes of the input up to the end of this block.
void compress(std::uint64_t (&h)[8], const char* block, std::uint64_t taken, bool last) {
    std::uint64_t m[16], v[16];
    std::memcpy(m, block, sizeof m);
    std::memcpy(v, h, sizeof h);
    std::memcpy(v + 8, kIv, sizeof kIv);
    v[12] ^= taken;
    if (last) v[14] = ~v[14];
    const auto mix = [&v](int a, int b, int c, int d, std::uint64_t x, std::uint64_t y) {
        v[a] += v[b] + x;
        v[d] = std::rotr(v[d] ^ v[a], 32);
        v[c] += v[d];
        v[b] = std::rotr(v[b] ^ v[c], 24);
        v[a] += v[b] + y;
        v[d] = std::rotr(v[d] ^ v[a], 16);
        v[c] += v[d];
        v[b] = std::rotr(v[b] ^ v[c], 63);
    };
    for (int round = 0; round < 12; ++round) {
        const std::uint8_t(&s)[16] = kSigma[round % 10];
        for (int i = 0; i < 4; ++i) mix(i, 4 + i, 8 + i, 12 + i, m[s[2 * i]], m[s[2 * i + 1]]);
        for (int i = 0; i < 4; ++i)
            mix(i, 4 + (i + 1) % 4, 8 + (i + 2) % 4, 12 + (i + 3) % 4, m[s[8 + 2 * i]], m[s[9 + 2 * i]]);
    }
    for (int i = 0; i < 8; ++i) h[i] ^= v[i] ^ v[8 + i];
}

}  // namespace

std::array<std::uint64_t, 2> blake2b_128(std::string_view data) {
    std::uint64_t h[8];
    std::memcpy(h, kIv, sizeof h);
    h[0] ^= 0x01010000 ^ 16;  // fan-out 1, depth 1, no key, 16 bytes
    std::uint64_t taken = 0;
    for (; data.size() > kBlock; data.remove_prefix(kBlock)) {
        taken += kBlock;
        compress(h, data.data(), taken, false);
    }
    char block[kBlock] = {};
    if (!data.empty()) std::memcpy(block, data.data(), data.size());
    compress(h, block, taken + data.size(), true);
    return {h[0], h[1]};
}

}  // namespace kvguard
