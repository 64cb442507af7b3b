// The protobuf wire format: tags, varints, lengths, and what is skipped. Refuses what protobuf's own parser (upb)
// refuses: a tag or a length of more than five bytes, a varint of more than ten, field number 0, wire types 6 and 7,
// an end of a group that was not begun, more than `kMaxDepth` levels.
#pragma once

#include <cstdint>
#include <cstring>
#include <string_view>

namespace kvguard::otlp {

inline constexpr int kMaxDepth = 100;  // messages and groups within the outermost message

enum WireType : std::uint32_t { kVarint = 0, kFixed64 = 1, kDelimited = 2, kGroup = 3, kGroupEnd = 4, kFixed32 = 5 };

constexpr std::uint32_t tag_of(std::uint32_t number, WireType type) { return number << 3 | type; }

// What is left of one message. Each function moves on, or returns false: then the message is broken.
class Wire {
  public:
    Wire() = default;
    Wire(const void* data, std::size_t size) : p_(static_cast<const unsigned char*>(data)), end_(p_ + size) {}
    explicit Wire(std::string_view bytes) : Wire(bytes.data(), bytes.size()) {}

    bool done() const { return p_ == end_; }

    bool tag(std::uint32_t& out) {
        if (p_ < end_ && *p_ < 0x80) {
            out = *p_++;
        } else {
            std::uint64_t value;
            if (!long_varint(value, 5) || value > UINT32_MAX) return false;
            out = static_cast<std::uint32_t>(value);
        }
        return out >= 8;
    }

    bool varint(std::uint64_t& out) {
        if (p_ < end_ && *p_ < 0x80) {
            out = *p_++;
            return true;
        }
        return long_varint(out, 10);
    }

    // The bytes of a delimited field; they are within this message.
    bool delimited(std::string_view& out) {
        std::uint64_t size;
        if (p_ < end_ && *p_ < 0x80) {
            size = *p_++;
        } else if (!long_varint(size, 5)) {
            return false;
        }
        if (size > static_cast<std::uint64_t>(end_ - p_)) return false;
        out = {reinterpret_cast<const char*>(p_), static_cast<std::size_t>(size)};
        p_ += size;
        return true;
    }

    bool fixed64(std::uint64_t& out) {
        if (end_ - p_ < 8) return false;
        std::memcpy(&out, p_, 8);
        p_ += 8;
        return true;
    }

    // Skips the value behind `tag`. A group may go `depth` levels down, itself included.
    bool skip(std::uint32_t tag, int depth) {
        return (tag & 7) == kGroup ? skip_group(tag, depth) : skip_single(tag);
    }

  private:
    bool skip_single(std::uint32_t tag) {
        std::uint64_t number;
        std::string_view bytes;
        switch (tag & 7) {
            case kVarint: return varint(number);
            case kFixed64: return fixed64(number);
            case kDelimited: return delimited(bytes);
            case kFixed32:
                if (end_ - p_ < 4) return false;
                p_ += 4;
                return true;
            default: return false;
        }
    }

    bool long_varint(std::uint64_t& out, int most);
    bool skip_group(std::uint32_t tag, int depth);

    const unsigned char* p_;
    const unsigned char* end_;
};

}  // namespace kvguard::otlp
