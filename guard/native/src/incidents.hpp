// Which incident a finding belongs to, from the first word on: its id, and what was done.
#pragma once

#include <cstdint>
#include <list>
#include <memory>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>

#include "ledger/ledger.hpp"

namespace kvguard {

// One incident: what was found about one request, or about one pool or stream where no request is named.
struct Incident {
    std::string id;
    bool has_request = false, has_tenant = false;
    std::string request, tenant;
    bool killed = false;  // or would have been, in monitor mode
    // When a kill was due: the time of the record that was judged, when that was received, and when the verdict stood
    // on the board; 0 before.
    std::int64_t record_ns = 0, received_ns = 0, verdict_ns = 0;
    int journaled = -1;  // the strongest action that the journal was told of; -1: none
};

// The incidents that can still grow, at most `kMost`: those longest quiet are forgotten first.
class Incidents {
  public:
    static constexpr std::size_t kMost = 65'536;

    // The incident of this request, made anew (second: true) if there is none.
    std::pair<std::shared_ptr<Incident>, bool> of_request(std::string_view request);
    // That of a finding that names no request: one for each kind and pool, or stream where it names no pool.
    std::pair<std::shared_ptr<Incident>, bool> of(const Finding& finding);
    // The request is over and forgotten: a later one of the same id gets an incident of its own. Returns this one's,
    // if it has one.
    std::shared_ptr<Incident> forget(std::string_view request);

    std::size_t size() const { return by_key_.size(); }

  private:
    using Order = std::list<std::pair<std::string, std::shared_ptr<Incident>>>;  // longest quiet first
    static std::string key_of(std::string_view request);
    std::pair<std::shared_ptr<Incident>, bool> get(std::string key);

    Order order_;
    std::unordered_map<std::string_view, Order::iterator> by_key_;  // keys are views of those in `order_`
};

// A new incident id: "inc-" and ten characters, short enough to read out and not to be guessed from another.
std::string new_incident_id();

// The incident in JSON, with this finding: what the journal keeps until the store has it. `verdict_ns`: when the
// verdict is put on the board; 0 if there is none.
std::string incident_json(const Incident& incident, const Finding& finding, bool enforce, std::int64_t record_ns,
                          std::int64_t received_ns, std::int64_t verdict_ns);

}  // namespace kvguard
