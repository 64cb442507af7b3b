#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "otlp.hpp"

namespace nb = nanobind;
using kvguard::Decoded;

namespace {

// The bytes of an object with a buffer. One that can be written to while the walk is on is copied first.
class Bytes {
  public:
    explicit Bytes(nb::handle object) {
        if (PyObject_GetBuffer(object.ptr(), &view_, PyBUF_SIMPLE) != 0) throw nb::python_error();
        if (!view_.readonly && size() <= kvguard::kMaxMessageBytes)
            copy_.assign(static_cast<const char*>(view_.buf), size());
    }
    ~Bytes() { PyBuffer_Release(&view_); }
    Bytes(const Bytes&) = delete;
    Bytes& operator=(const Bytes&) = delete;

    const void* data() const { return copy_.empty() ? view_.buf : copy_.data(); }
    std::size_t size() const { return static_cast<std::size_t>(view_.len); }

  private:
    Py_buffer view_;
    std::string copy_;
};

Decoded decode(nb::handle data) {
    const Bytes bytes(data);
    Decoded out;
    const char* wrong;
    {
        nb::gil_scoped_release release;
        wrong = kvguard::decode_otlp(bytes.data(), bytes.size(), out);
    }
    if (wrong == nullptr) return out;
    const std::string size = std::to_string(bytes.size());
    if (bytes.size() > kvguard::kMaxMessageBytes) {
        const std::string most = std::to_string(kvguard::kMaxMessageBytes);
        throw nb::value_error(("a message of " + size + " bytes is more than " + most).c_str());
    }
    throw nb::value_error((size + " bytes are not an OTLP ExportTraceServiceRequest: " + wrong).c_str());
}

}  // namespace

void bind_otlp(nb::module_& m) {
    nb::class_<Decoded>(m, "Decoded", "The records of one message, and counts of its spans.")
        .def_ro("rows", &Decoded::rows, "The records in order; an invalid one only takes its place, where it has one.")
        .def_ro("read", &Decoded::read, "Spans.")
        .def_ro("ignored", &Decoded::ignored, "Spans that are not named like a record.")
        .def_ro("invalid", &Decoded::invalid, "Spans that are, and are not what the convention says.")
        .def_ro("errors", &Decoded::errors, "What is wrong with the first few of those.");
    m.def("decode_otlp", &decode, nb::arg("data"),
          "Reads one ExportTraceServiceRequest in protobuf. ValueError: it is broken as a whole, or too long.");
}
