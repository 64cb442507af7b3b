#include "ledger/streams.hpp"

#include <algorithm>

namespace kvguard {

namespace {

bool after(const LeakWatch& a, const LeakWatch& b) {
    return std::pair{a.deadline, a.where.seq} > std::pair{b.deadline, b.where.seq};
}

}  // namespace

void Stream::watch_leak(std::uint64_t deadline, RequestStream* rs, const Where& where) {
    leaks.push_back({deadline, rs, rs->serial, where});
    std::push_heap(leaks.begin(), leaks.end(), after);
}

LeakWatch Stream::next_leak() {
    std::pop_heap(leaks.begin(), leaks.end(), after);
    const LeakWatch first = leaks.back();
    leaks.pop_back();
    return first;
}

bool Stream::push(const Record& record, std::int64_t deadline, const Hash& hash) {
    if (epoch < 0) epoch = static_cast<std::int64_t>(record.epoch);
    if (std::find(past.begin(), past.end(), record.epoch) != past.end()) {
        ++late;
        return true;
    }
    if (record.epoch != static_cast<std::uint64_t>(epoch)) {
        auto at = std::find_if(successors.begin(), successors.end(),
                               [&](const auto& successor) { return successor.first == record.epoch; });
        if (at == successors.end()) at = successors.insert(at, {record.epoch, {}});
        const auto [place, added] = at->second.insert_or_assign(record.seq, std::string(record.bytes));
        later += added;
        if (!has_successor_deadline) {
            has_successor_deadline = true;
            successor_deadline_ns = deadline;
        }
        return true;
    }
    return push(record.seq, record.bytes, deadline, hash);
}

bool Stream::push(std::uint64_t seq, std::string_view bytes, std::int64_t deadline, const Hash& hash) {
    if (seq < next_seq) {
        for (const Gap& gap : given_up)
            if (gap.first <= seq && static_cast<std::int64_t>(seq) <= gap.last) {
                ++late;
                return true;
            }
        ++duplicates;
        return static_cast<std::int64_t>(seq) < resumed || remembers(seq, hash(bytes));
    }
    const auto [place, added] = held.try_emplace(seq, Kept{std::string(bytes), deadline});
    if (!added) {
        ++duplicates;
        return place->second.bytes == bytes;
    }
    let_go(hash);
    if (!held.empty() && !has_deadline) {
        has_deadline = true;
        deadline_ns = deadline;
    }
    return true;
}

void Stream::let_go(const Hash& hash) {
    while (!held.empty() && held.begin()->first == next_seq) {
        auto node = held.extract(held.begin());
        remember(next_seq, hash(node.mapped().bytes));
        ready.push_back(std::move(node.mapped()));
        ++next_seq;
    }
    if (held.empty()) has_deadline = false;
}

bool Stream::skip_hole(const Hash& hash, Gap& gap) {
    if (held.empty()) return false;
    gap = {next_seq, static_cast<std::int64_t>(held.begin()->first) - 1};
    next_seq = held.begin()->first;
    given_up.push_back(gap);
    if (given_up.size() > kRemembered) given_up.pop_front();
    let_go(hash);
    if (!held.empty()) {
        has_deadline = true;
        deadline_ns = held.begin()->second.due;
    }
    return true;
}

void Stream::start_successor(std::int64_t deadline, const Hash& hash) {
    // Epochs rise, unless the emitter's clock was set back: then only the order of arrival is left.
    const auto before = static_cast<std::uint64_t>(epoch);
    past.push_back(before);
    if (past.size() > kRemembered) past.pop_front();
    auto next = successors.begin();
    bool rising = false;
    for (auto it = successors.begin(); it != successors.end(); ++it)
        if (it->first > before && (!rising || it->first < next->first)) {
            next = it;
            rising = true;
        }
    epoch = static_cast<std::int64_t>(next->first);
    auto records = std::move(next->second);
    successors.erase(next);
    later -= records.size();
    next_seq = 0;
    processed = resumed = -1;
    clock.reset();
    held.clear();
    has_deadline = false;
    recent.clear();
    given_up.clear();
    if (successors.empty()) has_successor_deadline = false;
    for (const auto& [seq, bytes] : records) push(seq, bytes, deadline, hash);
}

}  // namespace kvguard
