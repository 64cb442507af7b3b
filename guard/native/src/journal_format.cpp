#include "journal_format.hpp"

#include <array>
#include <cstring>

#include "kvguard/record.h"
#include "utf8.hpp"

namespace kvguard::journal {

namespace {

// CRC-32C (Castagnoli, reflected polynomial 0x82f63b78), a byte at a time.
constexpr std::array<std::uint32_t, 256> kTable = [] {
    std::array<std::uint32_t, 256> table{};
    for (std::uint32_t byte = 0; byte < 256; ++byte) {
        std::uint32_t crc = byte;
        for (int bit = 0; bit < 8; ++bit) crc = crc & 1 ? crc >> 1 ^ 0x82f63b78u : crc >> 1;
        table[byte] = crc;
    }
    return table;
}();

}  // namespace

std::uint32_t crc32c(std::uint32_t crc, const void* data, std::size_t size) {
    const auto* bytes = static_cast<const unsigned char*>(data);
    crc = ~crc;
    for (std::size_t i = 0; i < size; ++i) crc = crc >> 8 ^ kTable[(crc ^ bytes[i]) & 0xff];
    return ~crc;
}

std::uint32_t check_of(std::uint32_t length, std::string_view payload) {
    return crc32c(crc32c(0, &length, sizeof length), payload.data(), payload.size());
}

void put_frame(std::string& out, std::string_view payload) {
    const auto length = static_cast<std::uint32_t>(payload.size());
    const std::uint32_t check = check_of(length, payload);
    char header[kFrameHeader];
    std::memcpy(header, &length, 4);
    std::memcpy(header + 4, &check, 4);
    out.append(header, sizeof header).append(payload);
}

bool Fields::number(std::uint64_t& out) {
    out = 0;
    for (unsigned shift = 0; shift < 64 && !bytes_.empty(); shift += 7) {
        const auto byte = static_cast<unsigned char>(bytes_.front());
        bytes_.remove_prefix(1);
        if (shift == 63 && byte > 1) return false;
        out |= static_cast<std::uint64_t>(byte & 0x7f) << shift;
        if (byte < 0x80) return true;
    }
    return false;
}

bool Fields::text(std::string_view& out, std::size_t longest) {
    std::uint64_t size = 0;
    if (!number(size) || size > longest || size > bytes_.size()) return false;
    out = bytes_.substr(0, size);
    bytes_.remove_prefix(size);
    return true;
}

bool Fields::id(std::string_view& out) { return text(out, KVG_MAX_ID_BYTES) && !out.empty() && is_utf8(out); }

}  // namespace kvguard::journal
