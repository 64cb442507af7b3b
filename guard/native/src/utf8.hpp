// UTF-8 looked at: ids and names are mostly ASCII and short, so that is what is quick.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string_view>

namespace kvguard {

inline bool is_ascii(std::string_view text) {
    const char* p = text.data();
    std::size_t n = text.size();
    std::uint64_t bits = 0;
    const auto word = [](const char* at) {
        std::uint64_t w;
        std::memcpy(&w, at, 8);
        return w;
    };
    if (n >= 8) {
        const char* const last = p + n - 8;
        for (; p < last; p += 8) bits |= word(p);
        bits |= word(last);
    } else {
        for (; n > 0; ++p, --n) bits |= static_cast<unsigned char>(*p);
    }
    return (bits & 0x8080808080808080u) == 0;
}

// Characters of well-formed UTF-8 (no surrogates, nothing overlong, up to U+10FFFF), or -1.
std::ptrdiff_t utf8_length(std::string_view text);

inline bool is_utf8(std::string_view text) { return is_ascii(text) || utf8_length(text) >= 0; }

}  // namespace kvguard
