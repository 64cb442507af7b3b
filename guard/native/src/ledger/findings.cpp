// Findings: how the ledger says what it concludes.
#include <algorithm>

#include "ledger/world.hpp"

namespace kvguard {

namespace {

constexpr const char* kFindingNames[kKinds] = {
    "foreign-read",  "stale-read",     "foreign-write", "tainted-response", "zombie-request",
    "double-owner",  "digest-mismatch", "canary-hit",   "short-transfer",   "free-in-flight",
    "foreign-share", "double-free",    "wrong-status",  "over-capacity",    "hook-divergence",
    "page-leak",     "stream-gap",     "unverified-transfer", "unscrubbed-reuse",
};
constexpr const char* kActionNames[] = {"observe", "alert", "quarantine", "kill"};
constexpr const char* kLimitNames[kLimits] = {"streams",  "pools",     "pages",         "requests", "request_streams",
                                              "transfers", "page_transfers"};
constexpr const char* kOutcomes[] = {"finished", "rejected", "aborted", "failed"};

std::string finding_key(Kind kind, const RequestStream* rs, std::string_view pool, bool has_pool) {
    std::string key(1, static_cast<char>(kind));
    key += rs != nullptr ? '\1' : '\0';
    if (rs != nullptr) key += rs->request->id->key();
    key += '\0';
    key += has_pool ? '\1' : '\0';
    key += pool;
    return key;
}

std::string finding_key(const Finding& f) {
    std::string key(1, static_cast<char>(f.kind));
    key += f.has_request ? '\1' : '\0';
    key += f.request;
    key += '\0';
    key += f.has_pool ? '\1' : '\0';
    key += f.pool;
    return key;
}

// Adds to a set that keeps its smallest; whether it changed.
bool keep_smallest(std::set<std::string>& set, std::string_view text) {
    if (set.size() >= kMaxOthers && text >= *set.rbegin()) return false;
    if (!set.emplace(text).second) return false;
    if (set.size() > kMaxOthers) set.erase(std::prev(set.end()));
    return true;
}

}  // namespace

const char* name_of(Kind kind) { return kFindingNames[static_cast<int>(kind)]; }
const char* name_of(Action action) { return kActionNames[static_cast<int>(action)]; }
const char* name_of(Limit limit) { return kLimitNames[static_cast<int>(limit)]; }
const char* outcome_text(std::uint8_t outcome) { return kOutcomes[outcome & 3]; }

std::string to_text(unsigned __int128 number) {
    std::string digits;
    do {
        digits.insert(digits.begin(), static_cast<char>('0' + static_cast<int>(number % 10)));
        number /= 10;
    } while (number != 0);
    return digits;
}

void World::forget(const Finding& finding) { findings.erase(finding_key(finding)); }

Finding& World::report(Kind kind, const Where& where, std::string_view pool, bool has_pool, RequestStream* rs,
                       Report&& more) {
    static const Evidence kNoPages;
    const Evidence& evidence = more.evidence != nullptr ? *more.evidence : kNoPages;
    const bool unsure = more.degraded || (!evidence.empty() && !evidence.vouched);
    auto& known = findings[finding_key(kind, rs, pool, has_pool)];
    const bool fresh = known == nullptr;
    bool changed = fresh;
    if (fresh) {
        known = std::make_shared<Finding>();
        known->kind = kind;
        known->has_request = known->has_tenant = rs != nullptr;
        if (rs != nullptr) {
            known->request = rs->request->id->str();
            known->tenant = rs->tenant->str();
        }
        known->has_pool = has_pool;
        known->pool = pool;
    }
    const std::shared_ptr<Finding> keep = known;
    Finding& f = *keep;
    int order = -1;
    if (!fresh) {
        order = where.time_ns != f.time_ns ? (where.time_ns < f.time_ns ? -1 : 1)
                                           : where.stream->text.compare(f.stream);
        if (order == 0) order = where.epoch != f.epoch ? (where.epoch < f.epoch ? -1 : 1)
                              : where.seq != f.seq     ? (where.seq < f.seq ? -1 : 1)
                                                       : 0;
    }
    if (order < 0 || (order == 0 && more.transfer < f.transfer)) {
        f.time_ns = where.time_ns;
        f.stream = where.stream->text;
        f.epoch = where.epoch;
        f.seq = where.seq;
        f.has_transfer = !more.transfer.empty();
        f.transfer = more.transfer;
        f.reason = std::move(more.reason);
        changed = true;
    }
    if (!evidence.empty()) {
        SortedRuns before = f.pages;
        add_runs(f.pages, evidence.runs);
        changed |= before != f.pages;
    }
    for (const Name* tenant : more.tenants) changed |= keep_smallest(f.other_tenants, tenant->key());
    for (const Name* request : more.requests)
        if (!f.has_request || request->key() != f.request) changed |= keep_smallest(f.other_requests, request->key());
    if (!unsure && f.degraded) {
        f.degraded = false;
        changed = true;
    }
    const Action action = policy.action(kind, f.degraded);
    changed |= action != f.action;
    f.action = action;
    const auto name_in = [&](Request* request, bool hit) {
        auto& of_request = request->more().findings;
        if (std::find(of_request.begin(), of_request.end(), keep) == of_request.end()) of_request.push_back(keep);
        if (hit) changed |= f.subjects.insert(request->id->str()).second;
    };
    if (more.subjects != nullptr) {
        if (rs != nullptr) name_in(rs->request, false);
        for (Request* request : *more.subjects) name_in(request, true);
    } else if (rs != nullptr) {
        name_in(rs->request, true);
    }
    if (changed) events.push_back({fresh ? Event::What::found : Event::What::grown, keep, {}});
    return f;
}

void World::foreign_of(const Taint& taint, const Name* tenant, Report& into) const {
    for (std::size_t i = 0; i < taint.origins.size(); ++i) {
        const Origin& origin = taint.origins[i];
        if (origin.tenant == tenant || origin.tenant == taints.public_name.get()) continue;
        into.tenants.push_back(origin.tenant);
        into.requests.insert(into.requests.end(), origin.requests.begin(), origin.requests.end());
    }
}

}  // namespace kvguard
