// NH, the level of the page hash that sees every byte: plainly, and with the vectors that x86 has.
#include <array>
#include <cstring>

#include "digest.hpp"

#if defined(__x86_64__)
#include <immintrin.h>
// GCC's own header starts from a vector that it leaves uninitialised on purpose, and warns of it where it is inlined.
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"
#endif
#endif

namespace kvguard {

namespace {

constexpr std::size_t kLineWords = 16;

// Asks for the same line of both halves of the next block: out of memory that is about twice as fast, because a block is
// two streams that break off at each page of the machine, and its own looking ahead does not follow them. A prefetch
// behind the end of what there is does nothing.
inline void look_ahead(const unsigned char* half) {
    __builtin_prefetch(half + kBlockBytes);
    __builtin_prefetch(half + kBlockBytes + 4 * kHalfWords);
}

bool everywhere() { return true; }

void nh_plain(const std::uint32_t* table, const unsigned char* data, std::size_t blocks, Hash* out) {
    for (; blocks != 0; --blocks, data += kBlockBytes, ++out) {
        std::uint64_t sum0 = 0, sum1 = 0;
        for (std::size_t line = 0; line < kHalfWords; line += kLineWords) {
            look_ahead(data + 4 * line);
            for (std::size_t i = line; i < line + kLineWords; ++i) {
                std::uint32_t a, b;
                std::memcpy(&a, data + 4 * i, sizeof a);
                std::memcpy(&b, data + 4 * (kHalfWords + i), sizeof b);
                const std::uint32_t low = table[i], middle = table[kHalfWords + i], high = table[2 * kHalfWords + i];
                sum0 += static_cast<std::uint64_t>(a + low) * static_cast<std::uint32_t>(b + middle);
                sum1 += static_cast<std::uint64_t>(a + middle) * static_cast<std::uint32_t>(b + high);
            }
        }
        *out = {sum0, sum1};
    }
}

#if defined(__x86_64__)

// A vector has 32-bit words, and its products are of the even ones: once as they stand, once moved down.

__attribute__((target("avx2"))) inline __m256i load256(const void* p) {
    return _mm256_loadu_si256(static_cast<const __m256i*>(p));
}

__attribute__((target("avx2"))) inline __m256i products(__m256i a, __m256i b) {
    const __m256i odd = _mm256_mul_epu32(_mm256_srli_epi64(a, 32), _mm256_srli_epi64(b, 32));
    return _mm256_add_epi64(_mm256_mul_epu32(a, b), odd);
}

__attribute__((target("avx2"))) inline std::uint64_t sum_of(__m256i x) {
    const __m128i half = _mm_add_epi64(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1));
    return static_cast<std::uint64_t>(_mm_cvtsi128_si64(half)) + static_cast<std::uint64_t>(_mm_extract_epi64(half, 1));
}

__attribute__((target("avx2"))) void nh_avx2(const std::uint32_t* table, const unsigned char* data, std::size_t blocks,
                                              Hash* out) {
    for (; blocks != 0; --blocks, data += kBlockBytes, ++out) {
        __m256i sum0 = _mm256_setzero_si256(), sum1 = sum0;
        for (std::size_t i = 0; i < kHalfWords; i += 8) {
            if (i % kLineWords == 0) look_ahead(data + 4 * i);
            const __m256i a = load256(data + 4 * i), b = load256(data + 4 * (kHalfWords + i));
            const __m256i middle = load256(table + kHalfWords + i);
            sum0 = _mm256_add_epi64(sum0, products(_mm256_add_epi32(a, load256(table + i)), _mm256_add_epi32(b, middle)));
            sum1 = _mm256_add_epi64(sum1, products(_mm256_add_epi32(a, middle),
                                                   _mm256_add_epi32(b, load256(table + 2 * kHalfWords + i))));
        }
        *out = {sum_of(sum0), sum_of(sum1)};
    }
}

bool has_avx2() { return __builtin_cpu_supports("avx2"); }

__attribute__((target("avx512f"))) inline __m512i load512(const void* p) { return _mm512_loadu_si512(p); }

__attribute__((target("avx512f"))) inline __m512i products(__m512i a, __m512i b) {
    const __m512i odd = _mm512_mul_epu32(_mm512_srli_epi64(a, 32), _mm512_srli_epi64(b, 32));
    return _mm512_add_epi64(_mm512_mul_epu32(a, b), odd);
}

__attribute__((target("avx512f"))) void nh_avx512(const std::uint32_t* table, const unsigned char* data,
                                                   std::size_t blocks, Hash* out) {
    for (; blocks != 0; --blocks, data += kBlockBytes, ++out) {
        __m512i sum0 = _mm512_setzero_si512(), sum1 = sum0;
        for (std::size_t i = 0; i < kHalfWords; i += kLineWords) {
            look_ahead(data + 4 * i);
            const __m512i a = load512(data + 4 * i), b = load512(data + 4 * (kHalfWords + i));
            const __m512i middle = load512(table + kHalfWords + i);
            sum0 = _mm512_add_epi64(sum0, products(_mm512_add_epi32(a, load512(table + i)), _mm512_add_epi32(b, middle)));
            sum1 = _mm512_add_epi64(sum1, products(_mm512_add_epi32(a, middle),
                                                   _mm512_add_epi32(b, load512(table + 2 * kHalfWords + i))));
        }
        *out = {static_cast<std::uint64_t>(_mm512_reduce_add_epi64(sum0)),
                static_cast<std::uint64_t>(_mm512_reduce_add_epi64(sum1))};
    }
}

bool has_avx512() { return __builtin_cpu_supports("avx512f"); }

#endif

constexpr std::array kWays = {
#if defined(__x86_64__)
    Nh{"avx512", nh_avx512, has_avx512},
    Nh{"avx2", nh_avx2, has_avx2},
#endif
    Nh{"portable", nh_plain, everywhere},
};

}  // namespace

std::span<const Nh> nh_ways() { return kWays; }

const Nh& best_nh() {
    static const Nh& best = []() -> const Nh& {
        for (const Nh& way : kWays)
            if (way.runs()) return way;
        return kWays.back();
    }();
    return best;
}

}  // namespace kvguard
