#include "incidents.hpp"

#include <sys/random.h>

#include <cstdio>
#include <stdexcept>
#include <utility>

namespace kvguard {

namespace {

// By kind, as guard.findings.SEVERITY.
const char* severity_of(Kind kind) {
    return kind < Kind::short_transfer ? "critical" : kind < Kind::page_leak ? "high" : "warning";
}

// What an incident says was done.
const char* done(Action action, bool enforce) {
    switch (action) {
        case Action::kill: return enforce ? "killed" : "observed: would kill";
        case Action::quarantine: return enforce ? "quarantined" : "observed: would quarantine";
        case Action::alert: return "alerted";
        case Action::observe: break;
    }
    return "observed";
}

// Writes a JSON object, member by member. Strings are UTF-8 already.
class Json {
  public:
    std::string text = "{";

    Json& key(const char* name) {
        if (text.back() != '{') text += ',';
        text += '"';
        text += name;
        text += "\":";
        return *this;
    }
    void string(std::string_view value) {
        text += '"';
        for (const char c : value) {
            if (c == '"' || c == '\\') {
                text += '\\';
                text += c;
            } else if (static_cast<unsigned char>(c) < 0x20) {
                char escaped[8];
                std::snprintf(escaped, sizeof escaped, "\\u%04x", c);
                text += escaped;
            } else {
                text += c;
            }
        }
        text += '"';
    }
    void string_or_null(bool has, std::string_view value) {
        if (has)
            string(value);
        else
            text += "null";
    }
    template <typename Number>
    void number(Number value) {
        text += std::to_string(value);
    }
    template <typename Strings>
    void strings(const Strings& values) {
        text += '[';
        for (const auto& value : values) {
            if (text.back() != '[') text += ',';
            string(value);
        }
        text += ']';
    }
};

std::string pages_text(const Finding& finding) {
    std::string text;
    for (const auto& [first, stop] : finding.pages) {
        if (!text.empty()) text += ',';
        text += std::to_string(first);
        if (stop > first + 1) text.append("-").append(std::to_string(stop - 1));
    }
    return text;
}

// As guard.findings.Finding.as_json, and the reason, time and epoch.
std::string finding_json(const Finding& finding) {
    Json json;
    json.key("kind").string(name_of(finding.kind));
    json.key("severity").string(severity_of(finding.kind));
    json.key("action").string(name_of(finding.action));
    json.key("request").string_or_null(finding.has_request, finding.request);
    json.key("tenant").string_or_null(finding.has_tenant, finding.tenant);
    json.key("other_tenants").strings(finding.other_tenants);
    json.key("other_requests").strings(finding.other_requests);
    json.key("pool").string_or_null(finding.has_pool, finding.pool);
    json.key("pages").string(pages_text(finding));
    json.key("transfer").string_or_null(finding.has_transfer, finding.transfer);
    json.key("stream").string(finding.stream);
    json.key("seq").number(finding.seq);
    json.key("confidence").string(finding.degraded ? "degraded" : "full");
    json.key("reason").string(finding.reason);
    json.key("time_ns").number(finding.time_ns);
    json.key("epoch").number(finding.epoch);
    return json.text + '}';
}

}  // namespace

std::string Incidents::key_of(std::string_view request) { return std::string("r").append(request); }

std::pair<std::shared_ptr<Incident>, bool> Incidents::get(std::string key) {
    if (const auto known = by_key_.find(key); known != by_key_.end()) {
        order_.splice(order_.end(), order_, known->second);
        return {known->second->second, false};
    }
    order_.emplace_back(std::move(key), std::make_shared<Incident>());
    by_key_.emplace(order_.back().first, std::prev(order_.end()));
    if (order_.size() > kMost) {
        by_key_.erase(order_.front().first);
        order_.pop_front();
    }
    order_.back().second->id = new_incident_id();
    return {order_.back().second, true};
}

std::pair<std::shared_ptr<Incident>, bool> Incidents::of_request(std::string_view request) {
    auto found = get(key_of(request));
    if (found.second) {
        found.first->has_request = true;
        found.first->request = request;
    }
    return found;
}

std::pair<std::shared_ptr<Incident>, bool> Incidents::of(const Finding& finding) {
    std::string key("k");
    key.append(name_of(finding.kind)).append("\n").append(finding.has_pool ? finding.pool : finding.stream);
    return get(std::move(key));
}

std::shared_ptr<Incident> Incidents::forget(std::string_view request) {
    const auto known = by_key_.find(key_of(request));
    if (known == by_key_.end()) return nullptr;
    const auto entry = known->second;
    const std::shared_ptr<Incident> forgotten = entry->second;
    by_key_.erase(known);
    order_.erase(entry);
    return forgotten;
}

std::string new_incident_id() {
    unsigned char random[10];
    if (::getrandom(random, sizeof random, 0) != sizeof random) throw std::runtime_error("no random numbers");
    std::string id = "inc-";
    for (const unsigned char byte : random) id += "abcdefghijklmnopqrstuvwxyz234567"[byte % 32];
    return id;
}

std::string incident_json(const Incident& incident, const Finding& finding, bool enforce, std::int64_t record_ns,
                          std::int64_t received_ns, std::int64_t verdict_ns) {
    Json json;
    json.key("id").string(incident.id);
    json.key("request").string_or_null(incident.has_request, incident.request);
    json.key("tenant").string_or_null(incident.has_tenant, incident.tenant);
    json.key("kind").string(name_of(finding.kind));
    json.key("severity").string(severity_of(finding.kind));
    json.key("action").string(done(finding.action, enforce));
    json.key("pool").string_or_null(finding.has_pool, finding.pool);
    json.key("mode").string(enforce ? "enforce" : "monitor");
    json.key("finding").text += finding_json(finding);
    json.key("record_ns").number(record_ns);
    json.key("received_ns").number(received_ns);
    json.key("verdict_ns");
    if (verdict_ns != 0)
        json.number(verdict_ns);
    else
        json.text += "null";
    return json.text + '}';
}

}  // namespace kvguard
