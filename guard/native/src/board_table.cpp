#include "board_table.hpp"

#include <algorithm>

namespace kvguard::board {

namespace {

// A run of used rows longer than this is left as it is: it takes a table that is nearly full.
constexpr std::int64_t kLongestRun = 4096;

constexpr std::memory_order kRelaxed = std::memory_order_relaxed;

// Makes a row odd, writes it, and makes it even. Whoever finds the same even version before and after reading a row
// has read it whole: what is written is seen after the odd version, and before the even one.
template <typename Write>
void rewrite(std::uint64_t* row, Write write) {
    const std::uint64_t version = word(row).load(kRelaxed) | 1;
    word(row).store(version, kRelaxed);
    std::atomic_thread_fence(std::memory_order_release);
    write();
    word(row).store(version + 1, std::memory_order_release);
}

}  // namespace

std::uint64_t* Table::find(const Key& key) const {
    const auto known = rows_.find(key);
    return known == rows_.end() ? nullptr : known->second;
}

std::uint64_t* Table::place(const Key& key) const {
    if (std::uint64_t* row = find(key); row != nullptr) return row;
    if (rows_.size() >= room_) return nullptr;
    for (auto index = static_cast<std::int64_t>(key[0] & mask_);; ++index)
        if (word(at(index) + 3).load(kRelaxed) < kLive) return at(index);
}

void Table::store(std::uint64_t* row, const Key& key, std::uint64_t state, const Body& body) {
    rows_[key] = row;
    rewrite(row, [&] {
        word(row + 1).store(key[0], kRelaxed);
        word(row + 2).store(key[1], kRelaxed);
        for (std::size_t i = 0; i < body.size(); ++i) word(row + 4 + i).store(body[i], kRelaxed);
        word(row + 3).store(state, kRelaxed);
    });
}

void Table::clear(const Key& key) {
    const auto known = rows_.find(key);
    if (known == rows_.end()) return;
    std::uint64_t* const row = known->second;
    rows_.erase(known);
    rewrite(row, [&] {
        word(row + 3).store(kCleared, kRelaxed);
        for (const int i : {1, 2, 4, 5, 6, 7}) word(row + i).store(0, kRelaxed);
    });
    tidy((row - first_) / static_cast<std::ptrdiff_t>(kRowWords));
}

// Makes cleared rows round this one never-used again where no live row's search passes.
void Table::tidy(std::int64_t cleared) {
    const auto mask = static_cast<std::int64_t>(mask_);
    std::int64_t end = cleared;
    while (end - cleared <= mask && word(at(end) + 3).load(kRelaxed) != kEmpty) {
        ++end;
        if (end - cleared > kLongestRun) return;
    }
    // Backwards, with the earliest row at which a search for one of the rows behind begins. Where no row is
    // never-used, the rows behind are all the others: one more round to know them.
    const std::int64_t certain = end - cleared > mask ? end - mask - 1 : end;
    std::int64_t earliest = end;
    for (std::int64_t position = end - 1; position > certain - mask - 2; --position) {
        std::uint64_t* const row = at(position);
        const std::uint64_t state = word(row + 3).load(kRelaxed);
        if (state == kEmpty) return;
        if (state == kCleared) {
            if (earliest > position && position < certain) word(row + 3).store(kEmpty, kRelaxed);
        } else {
            const std::uint64_t home = word(row + 1).load(kRelaxed);
            const std::uint64_t searched = (static_cast<std::uint64_t>(position) - home) & mask_;
            earliest = std::min(earliest, position - static_cast<std::int64_t>(searched));
        }
    }
}

}  // namespace kvguard::board
