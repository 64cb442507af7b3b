#include "utf8.hpp"

namespace kvguard {

std::ptrdiff_t utf8_length(std::string_view text) {
    std::ptrdiff_t characters = 0;
    const auto* p = reinterpret_cast<const unsigned char*>(text.data());
    const unsigned char* end = p + text.size();
    while (p < end) {
        const unsigned c = *p;
        const std::ptrdiff_t more = c < 0x80                ? 0
                                    : c >= 0xc2 && c < 0xe0 ? 1
                                    : c >= 0xe0 && c < 0xf0 ? 2
                                    : c >= 0xf0 && c < 0xf5 ? 3
                                                            : -1;
        if (more < 0 || end - p <= more) return -1;
        if (more >= 2) {
            const unsigned low = c == 0xe0 ? 0xa0 : c == 0xf0 ? 0x90 : 0x80;
            const unsigned high = c == 0xed ? 0x9f : c == 0xf4 ? 0x8f : 0xbf;
            if (p[1] < low || p[1] > high) return -1;
        }
        for (std::ptrdiff_t i = 1; i <= more; ++i)
            if ((p[i] & 0xc0) != 0x80) return -1;
        p += more + 1;
        ++characters;
    }
    return characters;
}

}  // namespace kvguard
