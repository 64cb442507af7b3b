// Sets of pages that the ledger keeps: runs, in the order of a record or sorted.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "memory.hpp"
#include "records.hpp"

namespace kvguard {

// A record's pages, copied.
class PageRuns {
  public:
    PageRuns() = default;
    explicit PageRuns(const Pages& pages) { runs_.assign(pages.data(), pages.runs()); }

    Pages view() const { return {runs_.begin(), runs_.size()}; }
    void append(std::uint64_t index) {
        if (!runs_.empty()) {
            const std::uint64_t last = runs_.back();
            if (kvg_run_first(last) + kvg_run_pages(last) == index && kvg_run_pages(last) < KVG_MAX_PAGES) {
                runs_.back() = last + 1;
                return;
            }
        }
        runs_.push_back(kvg_run(index, 1));
    }
    void add_run(std::uint64_t first, std::uint64_t pages) { runs_.push_back(kvg_run(first, pages)); }

  private:
    SmallVec<std::uint64_t, 32> runs_;
};

inline bool contains(const Pages& pages, std::uint64_t index) {
    for (std::uint32_t i = 0; i < pages.runs(); ++i)
        if (index - pages.run(i).first < pages.run(i).pages) return true;
    return false;
}

template <class F>
void each_page(const Pages& pages, F&& visit) {
    for (std::uint32_t i = 0; i < pages.runs(); ++i)
        for (std::uint64_t index = pages.run(i).first; index < pages.run(i).stop(); ++index) visit(index);
}

// Half-open runs, rising and joined.
using SortedRuns = std::vector<std::pair<std::uint64_t, std::uint64_t>>;

// Puts a page behind the others, in the last run if it follows on it.
inline void append(SortedRuns& runs, std::uint64_t index) {
    if (!runs.empty() && runs.back().second == index) {
        ++runs.back().second;
    } else {
        runs.emplace_back(index, index + 1);
    }
}

// Puts runs (in any order) in order and joins them.
void normalise(SortedRuns& runs);
// Adds `more` (in any order) to sorted runs.
void add_runs(SortedRuns& into, const SortedRuns& more);
// What of sorted runs is not in others, sorted too.
SortedRuns without(const SortedRuns& runs, const SortedRuns& others);
std::uint64_t count(const SortedRuns& runs);
// As a record writes them: 0-3,7.
std::string text(const SortedRuns& runs);

// Pages that show a finding, and whether the guard had lost sight of all of them.
struct Evidence {
    SortedRuns runs;  // in the order they were added
    bool vouched = false;

    bool empty() const { return runs.empty(); }
    // One page whose state does not matter (or is judged elsewhere).
    void add(std::uint64_t index) {
        append(runs, index);
        vouched = true;
    }
    void add(std::uint64_t index, bool unvouched) {
        append(runs, index);
        vouched |= !unvouched;
    }
    void add_run(std::uint64_t first, std::uint64_t stop) {
        if (first >= stop) return;
        runs.emplace_back(first, stop);
        vouched = true;
    }
    std::uint64_t size() const { return count(runs); }
};

}  // namespace kvguard
