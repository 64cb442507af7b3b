// Rows in shared memory that one process writes and others look up while it does (guard/act/board/layout.py).
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <unordered_map>

namespace kvguard::board {

inline constexpr std::size_t kHeaderBytes = 4096, kRowBytes = 64, kRowWords = kRowBytes / 8;
inline constexpr std::uint64_t kEmpty = 0, kCleared = 1, kLive = 2;  // a row's state; a request's has its verdict added

using Key = std::array<std::uint64_t, 2>;
struct KeyHash {
    std::size_t operator()(const Key& key) const { return key[0]; }
};
using Body = std::array<std::uint64_t, 4>;  // words 4 to 7 of a row

// A word that readers in other processes look at meanwhile.
inline std::atomic_ref<std::uint64_t> word(std::uint64_t* at) { return std::atomic_ref<std::uint64_t>(*at); }

// An open-addressed table of rows inside the mapping, for the one thread that writes it.
class Table {
  public:
    // `rows`, a power of two, rows from `first` on, all zero.
    Table(std::uint64_t* first, std::size_t rows) : first_(first), mask_(rows - 1), room_(rows - rows / 8) {}

    // The row of this key, or a free one for it; null if the table is full. Searches stay short below 7/8.
    std::uint64_t* place(const Key& key) const;
    // The row of this key; null if it has none.
    std::uint64_t* find(const Key& key) const;
    // Writes a row, at a place that `place` gave for the key.
    void store(std::uint64_t* row, const Key& key, std::uint64_t state, const Body& body);
    // Takes the key's row away, if it has one.
    void clear(const Key& key);

    const std::unordered_map<Key, std::uint64_t*, KeyHash>& rows() const { return rows_; }

  private:
    std::uint64_t* at(std::int64_t position) const {
        return first_ + (static_cast<std::uint64_t>(position) & mask_) * kRowWords;
    }
    void tidy(std::int64_t cleared);

    std::uint64_t* first_;
    std::uint64_t mask_;
    std::size_t room_;
    std::unordered_map<Key, std::uint64_t*, KeyHash> rows_;  // the live ones
};

}  // namespace kvguard::board
