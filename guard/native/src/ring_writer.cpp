#include "ring_writer.hpp"

#include <pthread.h>

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <vector>

namespace kvguard {

namespace {

std::vector<kvg_ring_writer*>& taken_lanes() {
    static auto* const lanes = new std::vector<kvg_ring_writer*>;  // writers may outlive static objects
    return *lanes;
}

}  // namespace

void RingWriter::after_fork_in_child() {
    ++forks_so_far;
    for (kvg_ring_writer* lane : taken_lanes()) kvg_ring_leave_to_parent(lane);
    taken_lanes().clear();
}

RingWriter::RingWriter(const std::string& path, const std::string& stream, std::uint64_t epoch, std::uint32_t lanes,
                       std::uint32_t rows)
    : stream_(stream), epoch_(epoch) {
    if (path.find('\0') != path.npos) throw std::runtime_error("ring: its path holds a NUL");
    static const int watched = pthread_atfork(nullptr, nullptr, &RingWriter::after_fork_in_child);
    if (watched != 0) throw std::runtime_error("ring " + path + ": cannot watch for forks");
    if (const char* wrong = kvg_ring_enter(&lane_, path.c_str(), lanes, rows, stream.data(), stream.size());
        wrong != nullptr) {
        const std::string why = errno != 0 ? std::string(": ") + std::strerror(errno) : "";
        throw std::runtime_error("ring " + path + ": " + wrong + why);
    }
    taken_lanes().push_back(&lane_);
    forks_ = forks_so_far;
}

bool RingWriter::put(PyObject* object, std::uint64_t seq, std::uint64_t time_ns) {
    if (!on()) return false;
    const Origin origin{stream_, epoch_, seq};
    gather(object, gathered_, &origin);
    Record& record = gathered_.record;
    if (time_ns != 0) record.time_ns = time_ns;
    if (record.time_ns == 0) record.time_ns = kvg_now_ns();
    row_.bytes.clear();
    row_.count = 0;
    append(row_, record);
    std::uint32_t bytes;
    std::memcpy(&bytes, row_.bytes.data(), sizeof bytes);
    const bool written = kvg_ring_put(&lane_, row_.bytes.data(), bytes) != 0;
    ++(written ? written_ : dropped_);
    // One record of many runs must not hold its memory for good.
    if (row_.bytes.capacity() > (std::size_t{1} << 20)) row_ = Rows{};
    return written;
}

void RingWriter::close() {
    if (!on()) return;
    forks_ = -1;
    std::erase(taken_lanes(), &lane_);
    kvg_ring_leave(&lane_);
}

}  // namespace kvguard
