#include "ledger/transfers.hpp"

#include <algorithm>

namespace kvguard {

namespace {

SortedRuns sorted(const Pages& pages) {
    SortedRuns runs;
    for (std::uint32_t i = 0; i < pages.runs(); ++i) runs.emplace_back(pages.run(i).first, pages.run(i).stop());
    normalise(runs);
    return runs;
}

}  // namespace

std::string_view base_of(std::string_view transfer) {
    const std::size_t slash = transfer.rfind('/');
    return slash == std::string_view::npos ? std::string_view{} : transfer.substr(0, slash);
}

bool is_piece(std::string_view transfer) {
    const std::size_t slash = transfer.rfind('/');
    if (slash == std::string_view::npos || slash + 1 == transfer.size()) return false;
    return std::all_of(transfer.begin() + static_cast<std::ptrdiff_t>(slash) + 1, transfer.end(),
                       [](char c) { return c >= '0' && c <= '9'; });
}

bool are_those_of(const Transfers& transfers, const Pages& pages) {
    std::uint32_t run = 0;
    std::uint64_t taken = 0;  // pages of that run
    for (const Transfer* t : transfers)
        for (std::uint32_t i = 0; i < t->peer_pages.runs(); ++i) {
            const Pages::Run theirs = t->peer_pages.run(i);
            for (std::uint64_t at = 0; at < theirs.pages;) {
                if (run == pages.runs()) return false;
                const Pages::Run ours = pages.run(run);
                if (ours.first + taken != theirs.first + at) return false;
                const std::uint64_t both = std::min(theirs.pages - at, ours.pages - taken);
                at += both;
                taken += both;
                if (taken == ours.pages) {
                    ++run;
                    taken = 0;
                }
            }
        }
    return run == pages.runs();
}

bool disjoint(const Transfers& transfers) {
    std::uint64_t looks = 0;
    for (std::uint32_t a = 1; a < transfers.size(); ++a)
        for (std::uint32_t b = 0; b < a; ++b) {
            const Pages &one = transfers[a]->peer_pages, &other = transfers[b]->peer_pages;
            looks += std::uint64_t{one.runs()} * other.runs();
            if (looks > 4096) return false;
            for (std::uint32_t i = 0; i < one.runs(); ++i)
                for (std::uint32_t j = 0; j < other.runs(); ++j)
                    if (one.run(i).first < other.run(j).stop() && other.run(j).first < one.run(i).stop()) return false;
        }
    return true;
}

bool same_digests(const Transfers& transfers, std::string_view digests) {
    for (std::uint32_t i = 0; i < transfers.size(); ++i) {
        const std::string_view theirs = transfers[i]->digests;
        if (!transfers[i]->has_digests || digests.substr(0, theirs.size()) != theirs) return false;
        digests.remove_prefix(theirs.size());
        if (i + 1 == transfers.size()) break;
        if (digests.empty() || digests.front() != ',') return false;
        digests.remove_prefix(1);
    }
    return digests.empty();
}

bool missing_begin(World& world, const Record& record) {
    const std::uint64_t hash = world.transfer_hash(record);
    if (world.transfers.find(record.transfer, hash) != nullptr || world.done.has(hash)) return false;
    const Pieces* const pieces = world.pieces.find(record.transfer, hash);
    if (pieces == nullptr) return true;
    for (const Transfer* t : pieces->begun)
        // A sender begins no further piece after one that failed, or after its own restart.
        if ((t->sent && t->sent_status != KVG_OK) || t->sender->gone) return false;
    if (are_those_of(pieces->begun, record.pages)) return false;
    SortedRuns begun;
    for (const Transfer* t : pieces->begun) {
        const SortedRuns more = sorted(t->peer_pages);
        begun.insert(begun.end(), more.begin(), more.end());
    }
    normalise(begun);
    SortedRuns all = begun;
    add_runs(all, sorted(record.pages));
    return all != begun;
}

}  // namespace kvguard
