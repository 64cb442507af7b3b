// The journal: what a restarted guard must know of the one before it, and incidents that the store may not hold yet.
//
// An append-only file of checked entries (journal_format.hpp says what its bytes are). Entries are gathered in memory and leave with one write() at `flush`; what
// was flushed outlives a kill -9 (not a power cut: nothing is synced). When the file has grown past its limit it is
// written anew from what is live, beside the old one, and renamed over it. Not for two threads at once.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "ledger/ledger.hpp"

namespace kvguard {

class Journal final : public Witness {
  public:
    // Opens or makes the journal. `before` gets what an earlier guard knew, `incidents` the texts that it had not
    // settled, oldest first. A torn or broken end is cut off. Throws std::runtime_error, with the path, when the file
    // cannot be had.
    static std::unique_ptr<Journal> open(const std::string& path, std::uint64_t limit_bytes, Restored& before,
                                         std::vector<std::string>& incidents);
    ~Journal() override;

    void pool(std::string_view id, std::string_view stream, std::uint64_t pages, std::uint64_t page_tokens,
              std::uint8_t role) override;
    void epoch(std::string_view stream, std::uint64_t epoch) override;
    void request(std::string_view request, std::string_view stream, std::string_view tenant) override;
    void ended(std::string_view request, std::string_view stream) override;
    void retired(std::string_view request) override;

    void watermark(std::string_view stream, std::uint64_t epoch, std::int64_t processed, std::uint64_t time_ns);
    // Keeps an incident's text (opaque here) under its id until it is settled: then the store has it.
    void incident(std::string_view id, std::string_view text);
    void settled(std::string_view id);
    // Writes out what was gathered. Returns false when the disk does not take it: then it is kept and tried again, and
    // where that would be too much, the file is written anew once the disk takes it.
    bool flush();

    std::uint64_t bytes() const;      // of the file
    std::uint64_t failures() const;   // writes that failed
    std::uint64_t rewrites() const;   // how often the file was written anew
    std::uint64_t cut_off() const;    // bytes at the file's end that were no whole frame when it was opened
    std::uint64_t dropped() const;    // what was beyond a limit and is not known to the next guard
    std::uint64_t requests() const;   // known, one for each stream that it is known on
    std::uint64_t unsettled() const;  // incidents that the store may not have

  private:
    Journal();
    struct Impl;
    std::unique_ptr<Impl> impl_;
};

}  // namespace kvguard
