// A Python process's lane of the ring: records straight from Python objects, places in the stream given in order.
#pragma once

#include <Python.h>

#include <cstdint>
#include <string>

#include "kvguard/ring.h"
#include "py_records.hpp"

namespace kvguard {

// Every function wants the GIL, which is what keeps the order of the lane that of kv.seq.
class RingWriter {
  public:
    // Throws std::runtime_error, with the path and the remedy, when no lane can be had.
    RingWriter(const std::string& path, const std::string& stream, std::uint64_t epoch, std::uint32_t lanes,
               std::uint32_t rows);
    ~RingWriter() { close(); }
    RingWriter(const RingWriter&) = delete;
    RingWriter& operator=(const RingWriter&) = delete;

    // Whether records go anywhere: not once closed, and not in a child made by fork.
    bool on() const { return forks_ == forks_so_far; }

    // The next place in the stream; -1 when off.
    std::int64_t next() { return on() ? static_cast<std::int64_t>(next_++) : -1; }

    // Writes a record at a place in the stream, the time being `time_ns`, or the record's own where that is 0, or now.
    // Returns false when it was lost for want of room. Throws FieldError for what cannot be a row.
    bool put(PyObject* object, std::uint64_t seq, std::uint64_t time_ns);

    // Gives the lane back; what waits in it is still read.
    void close();

    const std::string& stream() const { return stream_; }
    std::uint64_t epoch() const { return epoch_; }
    std::uint64_t written() const { return written_; }
    std::uint64_t dropped() const { return dropped_; }

  private:
    // Forks seen in the process: a writer knows by it that it is another process's.
    static inline int forks_so_far = 0;
    static void after_fork_in_child();

    std::string stream_;
    std::uint64_t epoch_;
    std::uint64_t next_ = 0;
    std::uint64_t written_ = 0;
    std::uint64_t dropped_ = 0;
    int forks_ = -1;
    kvg_ring_writer lane_{};
    Gathered gathered_;
    Rows row_;
};

}  // namespace kvguard
