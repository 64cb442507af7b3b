#include "inbox.hpp"

#include <chrono>
#include <utility>

namespace kvguard {

bool Inbox::put(Rows& rows, std::int64_t received_ns) {
    const std::uint64_t records = rows.count, bytes = rows.bytes.size();
    {
        const std::lock_guard lock(mutex_);
        if (closed_) return false;
        if (records == 0) return true;
        if (!messages_.empty() && (depth() + records > limit_records_ || this->bytes() + bytes > limit_bytes_))
            return false;
        messages_.push_back({std::exchange(rows, Rows{}), received_ns});
        records_.fetch_add(records, std::memory_order_relaxed);
        bytes_.fetch_add(bytes, std::memory_order_relaxed);
    }
    if (bell_)
        bell_();
    else
        changed_.notify_one();
    return true;
}

bool Inbox::full() const { return depth() >= limit_records_ || bytes() >= limit_bytes_; }

void Inbox::close() {
    {
        const std::lock_guard lock(mutex_);
        closed_ = true;
    }
    if (bell_)
        bell_();
    else
        changed_.notify_one();
}

bool Inbox::take(Message& out) {
    if (depth() == 0) return false;  // without the lock: asked in every round
    const std::lock_guard lock(mutex_);
    if (messages_.empty()) return false;
    out = std::move(messages_.front());
    messages_.pop_front();
    records_.fetch_sub(out.rows.count, std::memory_order_relaxed);
    bytes_.fetch_sub(out.rows.bytes.size(), std::memory_order_relaxed);
    return true;
}

void Inbox::wait(std::int64_t timeout_ns) {
    std::unique_lock lock(mutex_);
    changed_.wait_for(lock, std::chrono::nanoseconds(timeout_ns), [this] { return closed_ || !messages_.empty(); });
}

bool Inbox::drained() const {
    const std::lock_guard lock(mutex_);
    return closed_ && messages_.empty();
}

void Inbox::set_bell(std::function<void()> bell) { bell_ = std::move(bell); }

}  // namespace kvguard
