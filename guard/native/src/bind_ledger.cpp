// The ledger for Python: what guard/native/ledger.py is made of.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <optional>
#include <string>
#include <tuple>
#include <unordered_map>
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

// Takes what happened: (new, contents, None) of findings, each once, as it is now; (False, None, summary) of requests
// that were forgotten.
nb::list take_events(Ledger& ledger) {
    nb::list out;
    auto& events = ledger.events();
    if (events.empty()) return out;
    std::unordered_map<const Finding*, bool> seen;
    for (const Event& event : events) {
        if (event.what == Event::What::retired) {
            out.append(nb::make_tuple(false, nb::none(), summary(event.request)));
        } else if (seen.emplace(event.finding.get(), true).second) {
            out.append(nb::make_tuple(event.what == Event::What::found, contents(*event.finding), nb::none()));
        }
    }
    events.clear();
    return out;
}

void feed_rows(Ledger& ledger, const Rows& rows, std::int64_t now_ns) {
    nb::gil_scoped_release release;
    Record record;
    for (std::size_t at = 0; at < rows.bytes.size(); at += padded(record.bytes.size())) {
        if (parse(rows.bytes.data() + at, rows.bytes.size() - at, record) != nullptr) break;  // `Rows` holds no such
        ledger.feed(record, now_ns);
    }
    ledger.moved().clear();
}

// One record, by way of a row that is used again and again.
void feed(Ledger& ledger, nb::handle object, std::int64_t now_ns) {
    thread_local Gathered gathered;
    thread_local Rows rows;
    rows.bytes.clear();
    rows.count = 0;
    gather(object.ptr(), gathered);
    append(rows, gathered.record);
    feed_rows(ledger, rows, now_ns);
}

nb::list streams(const Ledger& ledger) {
    nb::list out;
    for (std::size_t i = 0; i < ledger.streams(); ++i) {
        const StreamState s = ledger.stream(i);
        out.append(nb::make_tuple(text(s.name), s.epoch, s.processed, s.duplicates, s.late));
    }
    return out;
}

nb::object sizes(const Ledger& ledger) {
    const Sizes s = ledger.sizes();
    nb::dict out;
    out["pages"] = s.pages;
    out["requests_live"] = s.requests_live;
    out["requests_ended"] = s.requests_ended;
    out["transfers"] = s.transfers;
    out["records_held"] = s.records_held;
    return out;
}

nb::object dropped_by(const Ledger& ledger) {
    nb::dict out;
    for (int i = 0; i < kLimits; ++i) out[name_of(static_cast<Limit>(i))] = ledger.dropped(static_cast<Limit>(i));
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
    nb::class_<Ledger>(m, "Ledger", "The ledger; guard.native.ledger makes it look like guard.ledger's.")
        .def("__init__",
             [](Ledger* self, const Policy& policy, const Settings& settings, bool summaries) {
                 new (self) Ledger(policy, settings);
                 self->want_retired(summaries ? Ledger::Retired::all : Ledger::Retired::marked);
             },
             nb::arg("policy"), nb::arg("settings"), nb::kw_only(), nb::arg("summaries"))
        .def("feed", &feed, nb::arg("record").none(), nb::arg("now_ns"))
        .def("feed_rows", &feed_rows, nb::arg("rows"), nb::arg("now_ns"))
        .def("advance", [](Ledger& self, std::int64_t now_ns) { self.advance(now_ns); self.moved().clear(); },
             nb::arg("now_ns"), nb::call_guard<nb::gil_scoped_release>())
        .def("restore", [](Ledger& self, const Restored& before) { self.restore(before); self.moved().clear(); },
             nb::arg("before"), nb::call_guard<nb::gil_scoped_release>())
        .def("finish", [](Ledger& self) { self.finish(); self.moved().clear(); },
             nb::call_guard<nb::gil_scoped_release>())
        .def("take_events", &take_events)
        .def("streams", &streams)
        .def("watermark", [](const Ledger& self, std::string_view stream) {
            const auto [epoch, seq] = self.watermark(stream);
            return nb::make_tuple(epoch, seq);
        }, nb::arg("stream"))
        .def("sizes", &sizes)
        .def("gaps", &Ledger::gaps)
        .def("dropped_by", &dropped_by)
        .def("bytes", &Ledger::bytes)
        .def("request_ids", &Ledger::request_ids)
        .def("request", [](const Ledger& self, std::string_view id) -> nb::object {
            RequestSummary out;
            return self.request(id, out) ? summary(out) : nb::none();
        }, nb::arg("id"));
}
