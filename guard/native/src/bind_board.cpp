// The verdict board's writer for Python.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/unique_ptr.h>

#include <optional>
#include <string>

#include "board.hpp"
#include "clock.hpp"

namespace nb = nanobind;
using namespace nb::literals;
using namespace kvguard;

namespace {

std::string path_of(nb::handle path) {
    PyObject* bytes = nullptr;
    if (PyUnicode_FSConverter(path.ptr(), &bytes) == 0) throw nb::python_error();
    const nb::object owned = nb::steal(bytes);
    return PyBytes_AS_STRING(bytes);
}

// Verdicts are an IntEnum of Python's.
Verdict verdict_of(int number) {
    if (number < 0 || number > static_cast<int>(Verdict::kill)) throw nb::value_error("no such verdict");
    return static_cast<Verdict>(number);
}

}  // namespace

void bind_board(nb::module_& m) {
    nb::register_exception_translator([](const std::exception_ptr& error, void*) {
        try {
            std::rethrow_exception(error);
        } catch (const BoardError& wrong) {
            const nb::object type = nb::module_::import_("guard.act.board").attr("BoardError");
            PyErr_SetString(type.ptr(), wrong.what());
        }
    });
    nb::class_<BoardWriter>(m, "BoardWriter", "The guard's side of the verdict board.")
        .def_static(
            "create",
            [](nb::handle path, std::uint64_t requests, std::uint64_t streams) {
                return BoardWriter::create(path_of(path), requests, streams);
            },
            "path"_a, nb::kw_only(), "requests"_a = 65536, "streams"_a = 1024)
        .def_prop_ro("path", &BoardWriter::path)
        .def_prop_ro("verdicts", &BoardWriter::verdicts)
        .def_prop_ro("saturated", &BoardWriter::saturated)
        .def_prop_ro("streams_without_row", &BoardWriter::streams_without_row)
        .def(
            "heartbeat",
            [](BoardWriter& board, std::optional<std::uint64_t> now_ns) { board.heartbeat(now_ns.value_or(monotonic_ns())); },
            "now_ns"_a = nb::none())
        .def(
            "set_verdict",
            [](BoardWriter& board, std::string_view request, int verdict, std::string_view incident) {
                board.set_verdict(request, verdict_of(verdict), incident);
            },
            "request"_a, "verdict"_a, "incident"_a = "")
        .def("clear", nb::overload_cast<std::string_view>(&BoardWriter::clear), "request"_a)
        .def("expire", &BoardWriter::expire, "before_ns"_a)
        .def("advance", &BoardWriter::advance, "stream"_a, "epoch"_a, "seq"_a)
        .def("forget_stream", &BoardWriter::forget_stream, "stream"_a)
        .def("close", &BoardWriter::close);
}
