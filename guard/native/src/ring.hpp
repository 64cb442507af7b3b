// The reader of the shared-memory ring (include/kvguard/ring.h says what its bytes are and how they are written).
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "records.hpp"

namespace kvguard {

// Takes records out of every lane of a ring. One reader a ring (held by a lock on the file), one thread.
class RingReader {
  public:
    // Opens the ring at `path`, or makes it with `lanes` lanes of `rows` 64-byte rows. Throws std::runtime_error, with
    // the path and the remedy, when it cannot be had or another reader holds it.
    static std::unique_ptr<RingReader> open(const std::string& path, std::uint32_t lanes, std::uint32_t rows);
    ~RingReader();

    // Appends up to `limit` records to `out`, some of each lane in turn; returns how many. Each was checked by `parse`
    // (a row that does not pass is counted and skipped: its place in the stream stays empty). What was taken leaves
    // the ring at once.
    std::size_t take(Rows& out, std::size_t limit);

    // The word that writers ring when the reader said it sleeps; others in this process may ring it too.
    std::atomic<std::uint32_t>* doorbell();
    // Sleeps until the doorbell rings, a lane has something, or the time is over.
    void wait(std::int64_t timeout_ns);
    // Wakes `wait`, from any thread.
    void wake();

    struct Lane {
        std::uint32_t index;
        std::int32_t pid;          // of the writer, in its namespace; 0: free; -1: taken and not said by whom
        std::uint64_t written;     // records
        std::uint64_t dropped;     // records that found the lane full
        std::uint64_t broken;      // bytes that were no record, skipped
        std::uint64_t waiting;     // rows not taken yet
        std::string stream;
    };
    std::vector<Lane> lanes() const;

  private:
    RingReader();
    struct Impl;
    std::unique_ptr<Impl> impl_;
};

}  // namespace kvguard
