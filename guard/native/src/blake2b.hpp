// BLAKE2b (RFC 7693) with a digest of 16 bytes and no key: what the verdict board's rows are found by.
#pragma once

#include <array>
#include <cstdint>
#include <string_view>

namespace kvguard {

// The digest, as its two little-endian words.
std::array<std::uint64_t, 2> blake2b_128(std::string_view data);

}  // namespace kvguard
