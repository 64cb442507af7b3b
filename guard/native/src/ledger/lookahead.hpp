// Asks for the memory of records before they are judged, so that it is there by then.
#pragma once

#include <cstddef>
#include <cstdint>

#include "ledger/world.hpp"

namespace kvguard {

// Follows the way to each record's request, one miss of the cache a step, and to its pages and their labels. Keeps
// nothing that may be gone by the next step: each looks anew.
class Lookahead {
  public:
    Lookahead(const World& world, const Index<Stream>& streams) : world_(world), streams_(streams) {}

    void expect(Record& record);

  private:
    static constexpr std::size_t kSteps = 16;  // more than Ledger::kAhead
    static constexpr std::uint32_t kPages = 16;
    static constexpr std::uint64_t kFewRequests = 1000, kFewBlocks = 64;
    struct Hint {
        const Stream* stream = nullptr;
        std::uint64_t hash = 0;  // of the request's id
        bool named = false;
        std::uint32_t pages = 0;
        std::uint64_t page[kPages];
    };
    const Hint& before(std::size_t records) const { return hints_[(next_ + kSteps - records) % kSteps]; }
    const Request* request(const Hint& hint) const;

    const World& world_;
    const Index<Stream>& streams_;
    Hint hints_[kSteps];
    std::size_t next_ = 0;
};

}  // namespace kvguard
