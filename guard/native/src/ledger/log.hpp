// What a request did on a stream, kept small: reads, responses, pages given back.
#pragma once

#include <cstdint>
#include <vector>

#include "ledger/blocks.hpp"
#include "ledger/memory.hpp"
#include "ledger/names.hpp"

namespace kvguard {

struct StreamName;

// Entries in the order in which they came: when, of which pool, which pages. Pages are kept as what differs from the
// entry before: a sequence reads the pages that it has read before and a few more.
//
// Words: entries, where the last one begins, and whether any has another pool than the first; the first one's pool;
// then of each entry its time, its seq, its shape (how many runs it adds, what else it has, how many runs of the
// entry's before it keeps), its pool if that is another, the stream and epoch if it is no record of its request's, the
// runs that it adds.
class Log {
  public:
    struct Place {
        StreamName* stream = nullptr;
        std::uint64_t epoch = 0;
    };
    struct Entry {
        std::uint64_t time_ns, seq;
        Name* pool;
        Place place;   // of a record that is not of the request on its stream
        Pages pages;   // until the next entry is looked at
    };

    std::uint32_t size() const { return words_.empty() ? 0 : static_cast<std::uint32_t>(words_[0]); }
    bool empty() const { return size() == 0; }
    // Whether one more entry would be one too many; the second bound is of memory that no engine comes near.
    bool full() const { return size() >= kMostEntries || words_.size() > kMostWords; }

    // keeps: how many runs of the entry before the pages begin with.
    void add(Blocks& blocks, std::uint64_t time_ns, std::uint64_t seq, Name* pool, const Pages& pages,
             std::uint32_t keeps = 0) {
        add(blocks, time_ns, seq, pool, pages, keeps, Place());
    }
    void add(Blocks& blocks, std::uint64_t time_ns, std::uint64_t seq, Name* pool, const Pages& pages,
             std::uint32_t keeps, const Place& place) {
        if (words_.empty()) {
            std::uint64_t* const head = words_.extend(blocks, 2);
            head[0] = 0;
            head[1] = word(pool);
            retain(pool);
        }
        const bool other = words_[1] != word(pool), placed = place.stream != nullptr;
        const std::uint32_t at = words_.size(), fresh = pages.runs() - keeps;
        std::uint64_t* to = words_.extend(blocks, 3 + other + 2 * placed + fresh);
        *to++ = time_ns;
        *to++ = seq;
        *to++ = std::uint64_t{keeps} << 34 | (placed ? kPlaced : 0) | (other ? kOther : 0) | fresh;
        if (other) {
            *to++ = word(pool);
            retain(pool);
        }
        if (placed) {
            *to++ = word(place.stream);
            *to++ = place.epoch;
        }
        if (fresh != 0) std::memcpy(to, pages.data() + keeps, 8 * std::size_t{fresh});
        words_[0] = (words_[0] & kMixed) | (other ? kMixed : 0) | std::uint64_t{at} << 32 | (size() + 1);
    }

    // Visits the entries in order.
    template <class F>
    void each(F&& visit) const {
        std::vector<std::uint64_t> runs;
        for (std::uint32_t at = 2; at < words_.size();) {
            Entry entry = head(at);
            runs.resize(words_[at + 2] >> 34);
            runs.insert(runs.end(), entry.pages.data(), entry.pages.data() + entry.pages.runs());
            entry.pages = {runs.data(), static_cast<std::uint32_t>(runs.size())};
            visit(static_cast<const Entry&>(entry));
            at += words_at(at);
        }
    }
    Entry front() const { return head(2); }
    // Its pool and pages; the times are none of it.
    std::pair<Name*, std::vector<std::uint64_t>> back() const {
        std::pair<Name*, std::vector<std::uint64_t>> last{nullptr, {}};
        each([&](const Entry& entry) {
            last.first = entry.pool;
            last.second.assign(entry.pages.data(), entry.pages.data() + entry.pages.runs());
        });
        return last;
    }
    void pop_back() {
        const auto last = static_cast<std::uint32_t>((words_[0] & ~kMixed) >> 32);
        let_go(last);
        words_.shrink(last);
        --words_[0];  // where the last one begins is wrong until the next `add`
    }
    // Only where there are two at least, and none keeps runs of the one before.
    void pop_front() {
        let_go(2);
        const std::uint32_t gone = words_at(2);
        std::memmove(words_.begin() + 2, words_.begin() + 2 + gone, 8 * std::size_t{words_.size() - 2 - gone});
        words_.shrink(words_.size() - gone);
        words_[0] -= (std::uint64_t{gone} << 32) + 1;
    }
    void drop(Blocks& blocks) {
        if (words_.empty()) return;
        // Nearly always all have one pool: then no more than the first line need be looked at.
        for (std::uint32_t at = (words_[0] & kMixed) != 0 ? 2 : words_.size(); at < words_.size();) {
            let_go(at);
            at += words_at(at);
        }
        if (!tearing_down) release(name(words_[1]));
        words_.drop(blocks);
    }
    const void* block() const { return words_.block(); }

  private:
    static constexpr std::uint32_t kMostEntries = 1024, kMostWords = 1u << 29;
    static constexpr std::uint64_t kMixed = 1ull << 63;
    static constexpr std::uint64_t kOther = 1ull << 32, kPlaced = 1ull << 33;
    static std::uint64_t word(const void* object) { return reinterpret_cast<std::uintptr_t>(object); }
    static Name* name(std::uint64_t word) { return reinterpret_cast<Name*>(word); }
    std::uint32_t pages_at(std::uint32_t at) const {
        const std::uint64_t shape = words_[at + 2];
        return at + 3 + ((shape & kOther) != 0) + 2 * ((shape & kPlaced) != 0);
    }
    std::uint32_t words_at(std::uint32_t at) const {
        return pages_at(at) - at + static_cast<std::uint32_t>(words_[at + 2]);
    }
    // The entry, of its pages those that it adds.
    Entry head(std::uint32_t at) const {
        const std::uint64_t shape = words_[at + 2];
        const bool other = (shape & kOther) != 0;
        Entry entry{words_[at], words_[at + 1], name(words_[other ? at + 3 : 1]), {},
                    {words_.begin() + pages_at(at), static_cast<std::uint32_t>(shape)}};
        if ((shape & kPlaced) != 0)
            entry.place = {reinterpret_cast<StreamName*>(words_[at + 3 + other]), words_[at + 4 + other]};
        return entry;
    }
    void let_go(std::uint32_t at) {
        if ((words_[at + 2] & kOther) != 0 && !tearing_down) release(name(words_[at + 3]));
    }

    Words words_;
};

}  // namespace kvguard
