#include "ledger/runs.hpp"

#include <algorithm>

namespace kvguard {

void normalise(SortedRuns& runs) {
    if (runs.size() < 2) return;
    std::sort(runs.begin(), runs.end());
    std::size_t kept = 0;
    for (std::size_t i = 1; i < runs.size(); ++i) {
        if (runs[i].first <= runs[kept].second) {
            runs[kept].second = std::max(runs[kept].second, runs[i].second);
        } else {
            runs[++kept] = runs[i];
        }
    }
    runs.resize(kept + 1);
}

void add_runs(SortedRuns& into, const SortedRuns& more) {
    into.insert(into.end(), more.begin(), more.end());
    normalise(into);
}

SortedRuns without(const SortedRuns& runs, const SortedRuns& others) {
    SortedRuns rest;
    std::size_t at = 0;
    for (auto [first, stop] : runs) {
        while (at < others.size() && others[at].second <= first) ++at;
        for (std::size_t i = at; i < others.size() && others[i].first < stop; ++i) {
            if (first < others[i].first) rest.emplace_back(first, others[i].first);
            first = std::min(others[i].second, stop);
        }
        if (first < stop) rest.emplace_back(first, stop);
    }
    return rest;
}

std::uint64_t count(const SortedRuns& runs) {
    std::uint64_t n = 0;
    for (const auto& [first, stop] : runs) n += stop - first;
    return n;
}

std::string text(const SortedRuns& runs) {
    std::string out;
    for (const auto& [first, stop] : runs) {
        if (!out.empty()) out += ',';
        out += std::to_string(first);
        if (stop - first > 1) out += '-' + std::to_string(stop - 1);
    }
    return out;
}

}  // namespace kvguard
