// The transfers that a record means, and how what arrived fits what was sent.
#pragma once

#include <string_view>

#include "ledger/world.hpp"

namespace kvguard {

using Transfers = SmallVec<Transfer*, 4>;

// The transfer of that id, or all its pieces begun so far; they stay while this does.
class Named {
  public:
    Named(World& world, std::string_view id, std::uint64_t hash) {
        if (Transfer* const exact = world.transfers.find(id, hash); exact != nullptr) {
            all.push_back(exact);
        } else if (const Pieces* const pieces = world.pieces.find(id, hash); pieces != nullptr) {
            all.assign(pieces->begun.begin(), pieces->begun.size());
        }
        for (Transfer* transfer : all) retain(transfer);
    }
    Named(const Named&) = delete;
    Named& operator=(const Named&) = delete;
    ~Named() {
        for (Transfer* transfer : all) release(transfer);
    }

    Transfers all;
};

bool is_piece(std::string_view transfer);  // of ID/0
// Whether these pages are those that the transfers go to, one transfer after the other.
bool are_those_of(const Transfers& transfers, const Pages& pages);
// Whether no page is gone to by two of them, as far as a short look tells.
bool disjoint(const Transfers& transfers);
// Whether these digests are those that the senders gave, one transfer after the other.
bool same_digests(const Transfers& transfers, std::string_view digests);

}  // namespace kvguard
