// The ledger for Python: what guard/native/ledger.py is made of.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/vector.h>

#include <memory>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "ledger/ledger.hpp"
#include "py_ledger.hpp"
#include "py_records.hpp"

namespace nb = nanobind;
using namespace kvguard;

namespace {

nb::object text(std::string_view s) { return nb::str(s.data(), s.size()); }
nb::object text(bool given, std::string_view s) { return given ? text(s) : nb::none(); }

template <class Texts>
nb::object set_of(const Texts& texts) {
    nb::object set = nb::steal(PySet_New(nullptr));
    for (const auto& one : texts) PySet_Add(set.ptr(), text(one).ptr());
    return set;
}

}  // namespace

nb::object kvguard::contents(const Finding& f) {
    nb::list runs;
    for (const auto& [start, stop] : f.pages) runs.append(nb::make_tuple(start, stop));
    return nb::make_tuple(static_cast<int>(f.kind), text(f.has_request, f.request), text(f.has_pool, f.pool),
                          text(f.has_tenant, f.tenant), static_cast<int>(f.action), f.degraded, text(f.stream), f.epoch,
                          f.seq, f.time_ns, text(f.has_transfer, f.transfer), text(f.reason),
                          set_of(f.other_tenants), set_of(f.other_requests), set_of(f.subjects), runs);
}

namespace {

nb::object summary(const RequestSummary& r) {
    return nb::make_tuple(text(r.id), text(r.has_tenant, r.tenant), set_of(r.lineage), r.killed, r.disclosed);
}

// The ledger, and the Python findings that stand for its own.
struct PyLedger {
    PyLedger(const Policy& policy, const Settings& settings, bool summaries) : ledger(policy, settings) {
        ledger.want_retired(summaries ? Ledger::Retired::all : Ledger::Retired::marked);
    }

    struct Known {
        std::weak_ptr<const Finding> finding;
        nb::object object;
    };
    Ledger ledger;
    std::unordered_map<const Finding*, Known> known;
    std::size_t tidy_at = 64;

    // Forgets those that the ledger has forgotten.
    void tidy() {
        if (known.size() < tidy_at) return;
        std::erase_if(known, [](const auto& entry) { return entry.second.finding.expired(); });
        tidy_at = std::max<std::size_t>(64, 2 * known.size());
    }
};

// Takes what happened, in order: (new, finding, None), each finding once and as it is now; (False, None, summary) of
// requests that were forgotten. `update` fills in a finding, or makes one of nothing.
nb::list take_events(PyLedger& self, const nb::callable& update) {
    nb::list out;
    std::vector<Event> events;
    events.swap(self.ledger.events());
    std::unordered_set<const Finding*> seen;
    for (const Event& event : events) {
        if (event.what == Event::What::retired) {
            out.append(nb::make_tuple(false, nb::none(), summary(event.request)));
            continue;
        }
        const Finding* const finding = event.finding.get();
        if (!seen.insert(finding).second) continue;
        const bool fresh = event.what == Event::What::found;
        nb::object& object = self.known[finding].object;
        object = update(contents(*finding), fresh ? nb::none() : object);
        self.known[finding].finding = event.finding;
        out.append(nb::make_tuple(fresh, object, nb::none()));
    }
    events.clear();
    self.tidy();
    return out;
}

void feed_rows(PyLedger& self, const Rows& rows, std::int64_t now_ns) {
    nb::gil_scoped_release release;
    std::size_t at = 0;
    each_expected(self.ledger, rows, at, rows.count, [&](const Record& record) { self.ledger.feed(record, now_ns); });
    self.ledger.moved().clear();
}

// One record, by way of a row that is used again and again.
void feed(PyLedger& self, nb::handle object, std::int64_t now_ns) {
    thread_local Gathered gathered;
    thread_local Rows rows;
    rows.bytes.clear();
    rows.count = 0;
    gather(object.ptr(), gathered);
    append(rows, gathered.record);
    feed_rows(self, rows, now_ns);
}

nb::list streams(const PyLedger& self) {
    nb::list out;
    for (std::size_t i = 0; i < self.ledger.streams(); ++i) {
        const StreamState s = self.ledger.stream(i);
        out.append(nb::make_tuple(text(s.name), s.epoch, s.processed, s.duplicates, s.late));
    }
    return out;
}

nb::object sizes(const PyLedger& self) {
    const Sizes s = self.ledger.sizes();
    nb::dict out;
    out["pages"] = s.pages;
    out["requests_live"] = s.requests_live;
    out["requests_ended"] = s.requests_ended;
    out["transfers"] = s.transfers;
    out["records_held"] = s.records_held;
    return out;
}

nb::object dropped_by(const PyLedger& self) {
    nb::dict out;
    for (int i = 0; i < kLimits; ++i) out[name_of(static_cast<Limit>(i))] = self.ledger.dropped(static_cast<Limit>(i));
    return out;
}

Policy policy_of(bool permit_sharing, bool require_digests, bool require_scrub, bool act_on_degraded,
                 const std::vector<int>& actions) {
    if (actions.size() != kKinds) throw nb::value_error("actions is not one for each kind");
    Policy policy;
    policy.permit_sharing = permit_sharing;
    policy.require_digests = require_digests;
    policy.require_scrub = require_scrub;
    policy.act_on_degraded = act_on_degraded;
    for (int kind = 0; kind < kKinds; ++kind) {
        if (actions[kind] < 0 || actions[kind] > static_cast<int>(Action::kill))
            throw nb::value_error("actions holds what is no action's rank");
        policy.actions[kind] = static_cast<Action>(actions[kind]);
    }
    return policy;
}

}  // namespace

void bind_ledger(nb::module_& m) {
    nb::class_<Policy>(m, "LedgerPolicy", "guard.policy.Policy, for the ledger.")
        .def("__init__",
             [](Policy* self, bool permit_sharing, bool require_digests, bool require_scrub, bool act_on_degraded,
                const std::vector<int>& actions) {
                 new (self) Policy(
                     policy_of(permit_sharing, require_digests, require_scrub, act_on_degraded, actions));
             },
             nb::kw_only(), nb::arg("permit_sharing"), nb::arg("require_digests"), nb::arg("require_scrub"),
             nb::arg("act_on_degraded"), nb::arg("actions"));
    nb::class_<Settings>(m, "LedgerSettings", "guard.ledger.LedgerSettings, for the ledger.")
        .def(nb::init<>())
        .def_rw("window_ns", &Settings::window_ns)
        .def_rw("leak_grace_ns", &Settings::leak_grace_ns)
        .def_rw("leak_grace_text", &Settings::leak_grace_text)
        .def_rw("max_held", &Settings::max_held)
        .def_rw("restart_records", &Settings::restart_records)
        .def_rw("max_ended", &Settings::max_ended)
        .def_rw("max_streams", &Settings::max_streams)
        .def_rw("max_pool_pages", &Settings::max_pool_pages)
        .def_rw("max_pools", &Settings::max_pools)
        .def_rw("max_pages", &Settings::max_pages)
        .def_rw("max_requests", &Settings::max_requests)
        .def_rw("max_request_streams", &Settings::max_request_streams)
        .def_rw("max_transfers", &Settings::max_transfers);
    nb::class_<PyLedger>(m, "Ledger", "The ledger; guard.native.ledger makes it look like guard.ledger's.")
        .def(nb::init<const Policy&, const Settings&, bool>(), nb::arg("policy"), nb::arg("settings"), nb::kw_only(),
             nb::arg("summaries"))
        .def("feed", &feed, nb::arg("record").none(), nb::arg("now_ns"))
        .def("feed_rows", &feed_rows, nb::arg("rows"), nb::arg("now_ns"))
        .def("advance",
             [](PyLedger& self, std::int64_t now_ns) {
                 self.ledger.advance(now_ns);
                 self.ledger.moved().clear();
             },
             nb::arg("now_ns"), nb::call_guard<nb::gil_scoped_release>())
        .def("restore",
             [](PyLedger& self, const Restored& before) {
                 self.ledger.restore(before);
                 self.ledger.moved().clear();
             },
             nb::arg("before"), nb::call_guard<nb::gil_scoped_release>())
        .def("finish",
             [](PyLedger& self) {
                 self.ledger.finish();
                 self.ledger.moved().clear();
             },
             nb::call_guard<nb::gil_scoped_release>())
        .def("take_events", &take_events, nb::arg("update"))
        .def("streams", &streams)
        .def("watermark",
             [](const PyLedger& self, std::string_view stream) {
                 const auto [epoch, seq] = self.ledger.watermark(stream);
                 return nb::make_tuple(epoch, seq);
             },
             nb::arg("stream"))
        .def("sizes", &sizes)
        .def("gaps", [](const PyLedger& self) { return self.ledger.gaps(); })
        .def("dropped_by", &dropped_by)
        .def("bytes", [](const PyLedger& self) { return self.ledger.bytes(); })
        .def("request_ids", [](const PyLedger& self) { return self.ledger.request_ids(); })
        .def("request",
             [](const PyLedger& self, std::string_view id) -> nb::object {
                 RequestSummary out;
                 return self.ledger.request(id, out) ? summary(out) : nb::none();
             },
             nb::arg("id"));
}
