// The core loop for Python: Inbox, Core, Recent and what they tell.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/vector.h>

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "core.hpp"
#include "kvguard/ring.h"
#include "py_ledger.hpp"
#include "py_records.hpp"

namespace nb = nanobind;
using namespace nb::literals;
using namespace kvguard;

namespace {

std::optional<std::string> given(bool has, const std::string& text) {
    return has ? std::optional<std::string>(text) : std::nullopt;
}

nb::list python(const std::vector<Recent::Kept>& records) {
    nb::list out;
    for (const Recent::Kept& kept : records) {
        Record record;
        if (parse(kept.bytes.data(), kept.bytes.size(), record) != nullptr) continue;  // `add` was given no such
        PyObject* const object = to_python(record);
        if (object == nullptr) throw nb::python_error();
        out.append(nb::make_tuple(nb::steal(object), kept.received_ns));
    }
    return out;
}

std::unique_ptr<RingReader> ring_at(const std::optional<std::string>& path, std::uint32_t lanes, std::uint32_t rows) {
    return path ? RingReader::open(*path, lanes, rows) : nullptr;
}

void bind_stats(nb::module_& m) {
    nb::class_<CoreStats>(m, "CoreStats")
        .def_prop_ro("pages", [](const CoreStats& s) { return s.sizes.pages; })
        .def_prop_ro("requests_live", [](const CoreStats& s) { return s.sizes.requests_live; })
        .def_prop_ro("requests_ended", [](const CoreStats& s) { return s.sizes.requests_ended; })
        .def_prop_ro("transfers", [](const CoreStats& s) { return s.sizes.transfers; })
        .def_prop_ro("records_held", [](const CoreStats& s) { return s.sizes.records_held; })
        .def_ro("streams", &CoreStats::streams)
        .def_ro("duplicates", &CoreStats::duplicates)
        .def_ro("late", &CoreStats::late)
        .def_ro("gaps", &CoreStats::gaps)
        .def_ro("broken", &CoreStats::broken)
        .def_ro("kills", &CoreStats::kills)
        .def_ro("kills_withheld", &CoreStats::kills_withheld)
        .def_ro("latency_sum", &CoreStats::latency_sum)
        .def_ro("ledger_bytes", &CoreStats::ledger_bytes)
        .def_ro("waiting", &CoreStats::waiting)
        .def_ro("journal_bytes", &CoreStats::journal_bytes)
        .def_ro("journal_failures", &CoreStats::journal_failures)
        .def_ro("lanes", &CoreStats::lanes)
        .def_prop_ro("dropped", [](const CoreStats& s) {
            nb::dict out;
            for (int limit = 0; limit < kLimits; ++limit) out[name_of(static_cast<Limit>(limit))] = s.dropped[limit];
            return out;
        })
        .def_prop_ro("records", [](const CoreStats& s) {
            nb::dict out;
            for (int kind = KVG_PLACE + 1; kind < KVG_KINDS; ++kind)
                out[name_of(static_cast<kvg_kind>(kind))] = s.records[kind];
            return out;
        })
        .def_prop_ro("latency", [](const CoreStats& s) {
            return std::vector<std::uint64_t>(std::begin(s.latency), std::end(s.latency));
        });
    m.attr("LATENCY_BOUNDS") = nb::tuple(nb::cast(std::vector<double>(kLatencyBounds.begin(), kLatencyBounds.end())));
}

void bind_happened(nb::module_& m) {
    nb::class_<Incident>(m, "IncidentState")
        .def_ro("id", &Incident::id)
        .def_prop_ro("request", [](const Incident& i) { return given(i.has_request, i.request); })
        .def_prop_ro("tenant", [](const Incident& i) { return given(i.has_tenant, i.tenant); })
        .def_ro("killed", &Incident::killed)
        .def_ro("record_ns", &Incident::record_ns)
        .def_ro("received_ns", &Incident::received_ns)
        .def_ro("verdict_ns", &Incident::verdict_ns);
    nb::class_<Happened>(m, "Happened")
        .def_ro("over", &Happened::over)
        .def_prop_ro("finding", [](const Happened& h) { return contents(h.finding); })
        .def_ro("fresh", &Happened::fresh)
        .def_ro("received_ns", &Happened::received_ns)
        .def_ro("incidents", &Happened::incidents);
}

}  // namespace

void bind_core(nb::module_& m) {
    nb::class_<Inbox>(m, "Inbox", "The bounded queue in front of the ledger.")
        .def(nb::init<std::uint64_t, std::uint64_t>(), "limit_records"_a, "limit_bytes"_a = std::uint64_t{256} << 20)
        .def("put", &Inbox::put, "rows"_a, "received_ns"_a, nb::call_guard<nb::gil_scoped_release>())
        .def("full", &Inbox::full)
        .def("close", &Inbox::close, nb::call_guard<nb::gil_scoped_release>())
        .def_prop_ro("depth", &Inbox::depth)
        .def_prop_ro("bytes", &Inbox::bytes)
        .def_prop_ro("limit_records", &Inbox::limit_records)
        .def_prop_ro("limit_bytes", &Inbox::limit_bytes);

    nb::class_<Recent>(m, "Recent", "The last records, by request.")
        .def(nb::init<std::size_t>(), "limit_bytes"_a)
        .def(
            "add",
            [](Recent& recent, const Rows& rows, std::int64_t received_ns) {
                Record record;
                for (std::size_t at = 0; at < rows.bytes.size(); at += padded(record.bytes.size())) {
                    if (parse(rows.bytes.data() + at, rows.bytes.size() - at, record) != nullptr) break;
                    recent.add(record, received_ns);
                }
            },
            "rows"_a, "received_ns"_a)
        .def(
            "evidence",
            [](const Recent& recent, const std::vector<std::string>& requests, const std::vector<std::string>& streams) {
                std::vector<Recent::Kept> found;
                for (const auto& request : requests) recent.of_request(request, found);
                for (const auto& stream : streams) recent.of_stream(stream, found);
                return python(found);
            },
            "requests"_a, "streams"_a);

    bind_stats(m);
    bind_happened(m);
    nb::class_<Core>(m, "Core", "Judges what comes in, and publishes what came of it.")
        .def(
            "__init__",
            [](Core* self, const Policy& policy, const Settings& settings, bool enforce, Inbox& inbox,
               BoardWriter& board, const std::optional<std::string>& ring, std::uint32_t ring_lanes,
               std::uint32_t ring_rows, Journal* journal, std::size_t recent_bytes) {
                new (self) Core(policy, settings, enforce, inbox, board, ring_at(ring, ring_lanes, ring_rows), journal,
                                recent_bytes);
            },
            "policy"_a, "settings"_a, nb::kw_only(), "enforce"_a, "inbox"_a, "board"_a, "ring"_a = nb::none(),
            "ring_lanes"_a = KVG_RING_LANES, "ring_rows"_a = KVG_RING_ROWS, "journal"_a = nb::none(),
            "recent_bytes"_a = std::size_t{8} << 20, nb::keep_alive<1, 5>(), nb::keep_alive<1, 6>(),
            nb::keep_alive<1, 10>())
        .def("restore", &Core::restore, "before"_a, nb::call_guard<nb::gil_scoped_release>())
        .def("run", &Core::run, nb::call_guard<nb::gil_scoped_release>())
        .def(
            "take",
            [](Core& core, double timeout_s) -> std::optional<std::vector<Happened>> {
                nb::gil_scoped_release others;
                std::vector<Happened> out;
                if (!core.take(out, static_cast<std::int64_t>(timeout_s * 1e9))) return std::nullopt;
                return out;
            },
            "timeout_s"_a)
        .def("abandon", &Core::abandon, nb::call_guard<nb::gil_scoped_release>())
        .def(
            "evidence",
            [](Core& core, const std::vector<std::string>& requests, const std::vector<std::string>& streams) {
                std::vector<Recent::Kept> found;
                {
                    nb::gil_scoped_release others;
                    found = core.evidence(requests, streams);
                }
                return python(found);
            },
            "requests"_a, "streams"_a)
        .def("settled", &Core::settled, "incidents"_a, nb::call_guard<nb::gil_scoped_release>())
        .def("stats", &Core::stats, nb::call_guard<nb::gil_scoped_release>())
        .def_prop_ro("last_round_ns", &Core::last_round_ns);
}
