// The last records, kept until an incident asks for those of a request.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "records.hpp"

namespace kvguard {

// A circular buffer of records, each linked to the one before of the same request (or, where it names none, of the
// same stream). The oldest make room for new ones, except that of one request no more than `kOfOne` are worth keeping:
// the room of those beyond goes to older records of other requests, which so outlive a burst of one.
//
// Costs `limit` bytes and 512 KiB, as they are used. One thread at a time.
class Recent {
  public:
    static constexpr std::uint32_t kOfOne = 32;

    struct Kept {
        std::string bytes;  // the record, as `parse` takes it
        std::int64_t received_ns;
    };

    explicit Recent(std::size_t limit_bytes);
    ~Recent();

    // One longer than an eighth of the limit is not kept.
    void add(const Record& record, std::int64_t received_ns);
    // Appends what is kept of this request, at most `kOfOne` records, the newest first.
    void of_request(std::string_view request, std::vector<Kept>& out) const;
    // The same of a stream's records that name no request.
    void of_stream(std::string_view stream, std::vector<Kept>& out) const;

  private:
    struct Head {
        std::uint64_t place = 0;    // of the newest entry, + 1; 0: none
        std::uint32_t entries = 0;  // added in all
        std::uint32_t kept = 0;     // in the buffer
    };
    struct Entry;

    Entry* entry(std::uint64_t place) const;
    void make_room(std::size_t bytes);
    Entry* extend(std::size_t bytes);
    void link(Entry* made);
    void collect(std::string_view request, std::string_view stream, std::vector<Kept>& out) const;

    std::size_t limit_;
    std::unique_ptr<char[]> bytes_;
    std::unique_ptr<Head[]> heads_;
    std::uint64_t begin_ = 0, end_ = 0;  // places only grow; modulo the limit they are in `bytes_`
    std::size_t spare_ = 0;              // bytes beyond their requests' shares that nobody was kept on for yet
    std::string again_;                  // entries on their way from the old end to the new one
};

}  // namespace kvguard
