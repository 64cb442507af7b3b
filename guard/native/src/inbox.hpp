// The bounded queue between the receivers' threads and the one that feeds the ledger.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <mutex>

#include "records.hpp"

namespace kvguard {

// Messages in order of arrival, bounded by records and by bytes: that is what costs memory. A message larger than the
// whole is taken when nothing else waits: it could never be taken otherwise.
class Inbox {
  public:
    struct Message {
        Rows rows;
        std::int64_t received_ns = 0;
    };

    Inbox(std::uint64_t limit_records, std::uint64_t limit_bytes)
        : limit_records_(limit_records), limit_bytes_(limit_bytes) {}

    // Any thread: queues the records, all or none, and leaves `rows` empty; false, and `rows` as it is, if there is no
    // room or the inbox is closed.
    bool put(Rows& rows, std::int64_t received_ns);
    // Any thread: whether not even one more record would be taken.
    bool full() const;
    // Any thread: takes nothing more; what is queued can still be taken.
    void close();

    // The reading thread: the next message; false if there is none now.
    bool take(Message& out);
    // The reading thread: sleeps until there is a message, or none will come, or the time is over.
    void wait(std::int64_t timeout_ns);
    bool drained() const;
    // Whom to wake when there is news, in place of `wait`; to be set before the reading thread starts.
    void set_bell(std::function<void()> bell);

    std::uint64_t depth() const { return records_.load(std::memory_order_relaxed); }  // records that wait
    std::uint64_t bytes() const { return bytes_.load(std::memory_order_relaxed); }    // their bytes
    std::uint64_t limit_records() const { return limit_records_; }
    std::uint64_t limit_bytes() const { return limit_bytes_; }

  private:
    const std::uint64_t limit_records_, limit_bytes_;
    mutable std::mutex mutex_;
    std::condition_variable changed_;
    std::deque<Message> messages_;
    std::function<void()> bell_;
    std::atomic<std::uint64_t> records_{0}, bytes_{0};
    bool closed_ = false;
};

}  // namespace kvguard
