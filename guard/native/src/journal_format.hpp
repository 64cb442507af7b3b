// The journal's bytes, written and read.
//
//   file     magic "kvgjrnl1", then frames
//   frame    4 bytes: length of the payload; 4 bytes: CRC-32C of those four and the payload; the payload. What one
//            flush writes is one frame, so that what it says holds together: it counts whole or not at all
//   payload  entries behind each other
//   entry    1 byte: its type; then its fields: numbers as LEB128, strings as their length and their bytes
//
//   stream     name: from here on it is meant by its place among the stream entries of the file, 0, 1, ...
//   pool       id, stream, pages, page tokens, role
//   epoch      stream, epoch: it begins; the one before is over, and its requests with it
//   past       stream, epoch: one that is over
//   watermark  stream, epoch, records judged (the last one's seq + 1), time in ns
//   request    stream, age, request, tenant: it is known on the stream; age: guards that it has outlived
//   ended      stream, request: it is over on the stream
//   retired    request: it is forgotten
//   incident   id, text
//   settled    id: the store has it
//
// Numbers are in the machine's own byte order: the file never leaves it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

namespace kvguard::journal {

inline constexpr std::string_view kMagic = "kvgjrnl1";
inline constexpr std::size_t kFrameHeader = 8;
inline constexpr std::size_t kMaxFrame = 64u << 20;

enum class Entry : std::uint8_t {
    stream = 1, pool, epoch, past, watermark, request, ended, retired, incident, settled,
};

// CRC-32C, carried on from `crc` (0 at first).
std::uint32_t crc32c(std::uint32_t crc, const void* data, std::size_t size);
// What stands in a frame's header.
std::uint32_t check_of(std::uint32_t length, std::string_view payload);

inline void put(std::string& out, std::uint64_t number) {
    for (; number >= 0x80; number >>= 7) out.push_back(static_cast<char>(number | 0x80));
    out.push_back(static_cast<char>(number));
}
inline void put(std::string& out, std::string_view text) {
    put(out, text.size());
    out.append(text);
}
inline void put(std::string& out, Entry type) { out.push_back(static_cast<char>(type)); }
// A frame around the payload.
void put_frame(std::string& out, std::string_view payload);

// Reads fields one after the other; false once something is wrong, and nothing is read beyond the end.
class Fields {
  public:
    explicit Fields(std::string_view bytes) : bytes_(bytes) {}
    bool over() const { return bytes_.empty(); }
    bool number(std::uint64_t& out);
    bool text(std::string_view& out, std::size_t longest);
    // An id of the convention: not empty, UTF-8.
    bool id(std::string_view& out);

  private:
    std::string_view bytes_;
};

}  // namespace kvguard::journal
