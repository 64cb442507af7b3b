// A ring whose every byte is the input's: the reader opens it or refuses it, takes what is well-formed out of it, and
// comes to an end, whatever the writers do meanwhile.
#include "ring.hpp"

#include "kvguard/ring.h"

#include <algorithm>
#include <stdexcept>
#include <string>
#include <vector>

#include "fuzz.hpp"

namespace {

constexpr std::uint32_t kLanes = 2, kRows = KVG_RING_MIN_ROWS;

// A ring's file, removed at the end of the process.
class File {
  public:
    File() : path_("/dev/shm/kvguard-fuzz-XXXXXX") {
        fd_ = mkstemp(path_.data());
        MUST(fd_ >= 0);
    }
    ~File() {
        close(fd_);
        unlink(path_.c_str());
    }
    File(const File&) = delete;
    File& operator=(const File&) = delete;

    const std::string& path() const { return path_; }
    void set(const std::vector<char>& bytes) {
        MUST(ftruncate(fd_, 0) == 0);
        write(bytes.data(), bytes.size(), 0);
    }
    void write(const char* bytes, std::size_t size, std::uint64_t at) {
        MUST(pwrite(fd_, bytes, size, static_cast<off_t>(at)) == static_cast<ssize_t>(size));
    }

  private:
    std::string path_;
    int fd_;
};

void draw_lane(fuzz::Draw& draw, kvg_lane& lane) {
    lane.tail = draw.one_in(4) ? draw.word() : draw.byte();
    lane.head = lane.tail + (draw.one_in(8) ? draw.word() : draw.below(kRows + 2));
    lane.stream_bytes = draw.one_in(8) ? static_cast<std::uint32_t>(draw.word()) : draw.below(8);
    lane.pid = static_cast<std::int32_t>(draw.byte());
    lane.stream[0] = static_cast<char>(draw.byte());
}

}  // namespace

int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
    static File file;
    fuzz::Draw draw(data, size);
    const std::uint64_t bytes = kvg_lane_offset(kRows, kLanes);
    std::vector<char> whole(bytes);
    auto* const header = reinterpret_cast<kvg_ring_header*>(whole.data());
    std::memcpy(header->magic, KVG_RING_MAGIC, sizeof header->magic);
    header->version = KVG_RING_VERSION;
    header->lanes = kLanes;
    header->rows = kRows;
    header->row_bytes = KVG_ROW_BYTES;
    header->bytes = bytes;
    if (draw.one_in(8)) whole[draw.below(48)] = static_cast<char>(draw.byte());
    if (draw.one_in(16)) whole.resize(draw.word() % bytes);
    std::uint32_t first_row = 0;
    if (whole.size() == bytes) {
        for (std::uint32_t i = 0; i < kLanes; ++i) {
            auto* const lane = reinterpret_cast<kvg_lane*>(whole.data() + kvg_lane_offset(kRows, i));
            draw_lane(draw, *lane);
            if (i == 0) first_row = lane->tail % kRows;
        }
    }
    const std::uint32_t later = draw.byte();
    // The rest stands in the first lane's rows from its tail on, and then in those of the second.
    const std::string_view rest = draw.rest();
    for (std::size_t i = 0; whole.size() == bytes && i < std::min<std::size_t>(rest.size(), 2 * kRows * KVG_ROW_BYTES); ++i) {
        const std::size_t row = i / KVG_ROW_BYTES, lane = row / kRows;
        whole[kvg_lane_offset(kRows, static_cast<std::uint32_t>(lane)) + KVG_RING_HEADER_BYTES +
              (first_row + row) % kRows * KVG_ROW_BYTES + i % KVG_ROW_BYTES] = rest[i];
    }
    file.set(whole);
    std::unique_ptr<kvguard::RingReader> reader;
    try {
        reader = kvguard::RingReader::open(file.path(), kLanes, kRows);
    } catch (const std::runtime_error&) {
        return 0;
    }
    for (int round = 0; round < 3; ++round) {
        for (;;) {
            kvguard::Rows rows;
            const std::size_t taken = reader->take(rows, 1 + later % 100);
            MUST(taken == rows.count && taken <= 1 + later % 100);
            fuzz::check(rows, [](const kvguard::Record&) {});
            if (taken == 0) break;
        }
        MUST(reader->lanes().size() <= kLanes);
        // A writer that has more to say, true or not.
        const std::uint64_t lane = kvg_lane_offset(kRows, later % kLanes);
        const std::string_view more = rest.substr(std::min<std::size_t>(rest.size(), std::size_t{round + 1u} * 8));
        file.write(more.data(), std::min<std::size_t>(more.size(), 256), lane + (later % 2 ? 64 : 60));
        reader->wait(0);
    }
    return 0;
}
