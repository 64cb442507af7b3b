#include "otlp/wire.hpp"

namespace kvguard::otlp {

// Bits beyond the 64th are dropped, as protobuf does.
bool Wire::long_varint(std::uint64_t& out, int most) {
    out = 0;
    for (int i = 0; i < most && p_ < end_; ++i) {
        const std::uint64_t byte = *p_++;
        out |= (byte & 0x7f) << (7 * i);
        if (byte < 0x80) return true;
    }
    return false;
}

bool Wire::skip_group(std::uint32_t tag, int depth) {
    std::uint32_t ends[kMaxDepth];  // the tags that end the groups that are open
    int level = 0;
    do {
        if ((tag & 7) == kGroup) {
            if (level >= depth) return false;
            ends[level++] = tag + (kGroupEnd - kGroup);
        } else if ((tag & 7) != kGroupEnd) {
            if (!skip_single(tag)) return false;
        } else if (tag == ends[level - 1]) {
            if (--level == 0) return true;
        } else {
            return false;
        }
    } while (this->tag(tag));
    return false;
}

}  // namespace kvguard::otlp
