// The journal for Python: Restored, Journal.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <memory>
#include <tuple>
#include <utility>
#include <vector>

#include "journal.hpp"

namespace nb = nanobind;
using namespace nb::literals;
using namespace kvguard;

namespace {

using StreamFields = std::tuple<std::string, std::uint64_t, std::int64_t, std::uint64_t, std::vector<std::uint64_t>>;
using PoolFields = std::tuple<std::string, std::string, std::uint64_t, std::uint64_t, std::uint8_t>;
using RequestFields = std::tuple<std::string, std::string, std::string, bool>;

Restored restored(const std::vector<StreamFields>& streams, const std::vector<PoolFields>& pools,
                  const std::vector<RequestFields>& requests) {
    Restored out;
    for (const auto& [name, epoch, processed, time_ns, past] : streams)
        out.streams.push_back({name, epoch, processed, time_ns, past});
    for (const auto& [id, stream, pages, page_tokens, role] : pools)
        out.pools.push_back({id, stream, pages, page_tokens, role});
    for (const auto& [request, stream, tenant, ended] : requests)
        out.requests.push_back({request, stream, tenant, ended});
    return out;
}

nb::object opened(const std::string& path, std::uint64_t limit_bytes) {
    Restored before;
    std::vector<std::string> incidents;
    std::unique_ptr<Journal> journal;
    {
        nb::gil_scoped_release release;
        journal = Journal::open(path, limit_bytes, before, incidents);
    }
    nb::list texts;
    for (const std::string& text : incidents) texts.append(nb::bytes(text.data(), text.size()));
    return nb::make_tuple(nb::cast(journal.release(), nb::rv_policy::take_ownership), nb::cast(std::move(before)), texts);
}

bool flush(Journal& journal) {
    nb::gil_scoped_release release;
    return journal.flush();
}

}  // namespace

void bind_journal(nb::module_& m) {
    nb::class_<Restored>(m, "Restored")
        .def("__init__",
             [](Restored* self, const std::vector<StreamFields>& streams, const std::vector<PoolFields>& pools,
                const std::vector<RequestFields>& requests) { new (self) Restored(restored(streams, pools, requests)); },
             "streams"_a, "pools"_a, "requests"_a)
        .def_prop_ro("streams",
                     [](const Restored& before) {
                         std::vector<StreamFields> out;
                         for (const auto& s : before.streams)
                             out.emplace_back(s.name, s.epoch, s.processed, s.time_ns, s.past);
                         return out;
                     })
        .def_prop_ro("pools",
                     [](const Restored& before) {
                         std::vector<PoolFields> out;
                         for (const auto& p : before.pools)
                             out.emplace_back(p.id, p.stream, p.pages, p.page_tokens, p.role);
                         return out;
                     })
        .def_prop_ro("requests", [](const Restored& before) {
            std::vector<RequestFields> out;
            for (const auto& r : before.requests) out.emplace_back(r.request, r.stream, r.tenant, r.ended);
            return out;
        });
    nb::class_<Journal>(m, "Journal")
        .def_static("open", &opened, "path"_a, "limit_bytes"_a)
        .def("pool", &Journal::pool, "id"_a, "stream"_a, "pages"_a, "page_tokens"_a, "role"_a)
        .def("epoch", &Journal::epoch, "stream"_a, "epoch"_a)
        .def("request", &Journal::request, "request"_a, "stream"_a, "tenant"_a)
        .def("ended", &Journal::ended, "request"_a, "stream"_a)
        .def("retired", &Journal::retired, "request"_a)
        .def("watermark", &Journal::watermark, "stream"_a, "epoch"_a, "processed"_a, "time_ns"_a)
        .def("incident",
             [](Journal& journal, std::string_view id, nb::bytes text) {
                 journal.incident(id, std::string_view(text.c_str(), text.size()));
             },
             "id"_a, "text"_a)
        .def("settled", &Journal::settled, "id"_a)
        .def("flush", &flush)
        .def_prop_ro("bytes", &Journal::bytes)
        .def_prop_ro("failures", &Journal::failures)
        .def_prop_ro("rewrites", &Journal::rewrites)
        .def_prop_ro("cut_off", &Journal::cut_off)
        .def_prop_ro("dropped", &Journal::dropped)
        .def_prop_ro("requests", &Journal::requests)
        .def_prop_ro("unsettled", &Journal::unsettled);
}
