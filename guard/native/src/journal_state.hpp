// What a journal says is so: the state that its entries add up to, and that it is written anew from.
#pragma once

#include <cstdint>
#include <deque>
#include <list>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "ledger/ledger.hpp"

namespace kvguard::journal {

struct TextHash {
    using is_transparent = void;
    std::size_t operator()(std::string_view text) const { return std::hash<std::string_view>{}(text); }
};
template <class Value>
using ByText = std::unordered_map<std::string, Value, TextHash, std::equal_to<>>;

// Bounded: what is beyond a limit is not taken in.
class State {
  public:
    static constexpr std::size_t kMaxStreams = 1u << 16, kMaxPools = 1u << 16, kMaxRequests = 1u << 22;
    static constexpr std::size_t kMaxPast = 64;
    static constexpr std::size_t kMaxIncidents = 1u << 16, kMaxIncidentBytes = 32u << 20;
    // Guards that a request can outlive: one whose end was missed must not be carried along for ever.
    static constexpr std::uint8_t kMaxAge = 8;

    // The stream's number; `made` says whether it is new. -1: there are too many.
    std::int64_t stream(std::string_view name, bool& made);
    // A stream's number in the file's order, for entries that are read.
    bool has_stream(std::uint64_t number) const { return number < streams_.size(); }

    bool pool(std::string_view id, std::uint32_t stream, std::uint64_t pages, std::uint64_t page_tokens,
              std::uint8_t role);
    void epoch(std::uint32_t stream, std::uint64_t epoch);
    void past(std::uint32_t stream, std::uint64_t epoch);
    void watermark(std::uint32_t stream, std::uint64_t epoch, std::uint64_t judged, std::uint64_t time_ns);
    bool request(std::string_view request, std::uint32_t stream, std::string_view tenant, std::uint8_t age = 0);
    bool ended(std::string_view request, std::uint32_t stream);
    bool retired(std::string_view request);
    void incident(std::string_view id, std::string_view text);
    bool settled(std::string_view id);

    // One entry after the other; false at the first that is none.
    bool apply(std::string_view payload);
    // All of it as frames.
    std::string frames() const;
    // Every request has outlived one more guard.
    void grow_old();

    void tell(Restored& before, std::vector<std::string>& incidents) const;

    std::size_t requests() const { return live_count_; }
    std::size_t incidents() const { return incidents_.size(); }
    std::uint64_t dropped() const { return dropped_; }

  private:
    struct StreamKnown {
        std::string name;
        bool has_epoch = false;
        std::uint64_t epoch = 0, judged = 0, time_ns = 0;
        std::deque<std::uint64_t> past;
    };
    struct Pool {
        std::uint32_t stream;
        std::uint64_t pages, page_tokens;
        std::uint8_t role;
    };
    struct Live {
        std::uint32_t stream;
        bool ended;
        std::uint8_t age;
        std::string tenant;
    };
    struct Incident {
        std::string id, text;
    };

    void forget_on(std::uint32_t stream);

    std::vector<StreamKnown> streams_;
    ByText<std::uint32_t> stream_numbers_;
    ByText<Pool> pools_;
    ByText<std::vector<Live>> requests_;
    std::size_t live_count_ = 0;  // over all streams
    std::list<Incident> incidents_;  // oldest first
    ByText<std::list<Incident>::iterator> incident_at_;
    std::size_t incident_bytes_ = 0;
    std::uint64_t dropped_ = 0;
};

}  // namespace kvguard::journal
