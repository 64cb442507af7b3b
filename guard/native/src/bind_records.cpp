// Records for Python: encode, decode, Rows.
#include <nanobind/nanobind.h>

#include <cstring>
#include <memory>
#include <string>

#include "py_records.hpp"

namespace nb = nanobind;
using namespace kvguard;

namespace {

// A buffer of Python's that is looked at.
class Buffer {
  public:
    explicit Buffer(nb::handle object) {
        if (PyObject_GetBuffer(object.ptr(), &view_, PyBUF_SIMPLE) != 0) throw nb::python_error();
    }
    ~Buffer() { PyBuffer_Release(&view_); }
    Buffer(const Buffer&) = delete;
    Buffer& operator=(const Buffer&) = delete;
    const char* data() const { return static_cast<const char*>(view_.buf); }
    std::size_t size() const { return static_cast<std::size_t>(view_.len); }

  private:
    Py_buffer view_{};
};

nb::object python(const Record& record) {
    PyObject* object = to_python(record);
    if (object == nullptr) throw nb::python_error();
    return nb::steal(object);
}

nb::bytes encode(nb::handle object) {
    Gathered gathered;
    gather(object.ptr(), gathered);
    Rows rows;
    append(rows, gathered.record);
    kvg_record header;
    std::memcpy(&header, rows.bytes.data(), sizeof header);
    return nb::bytes(rows.bytes.data(), header.bytes);
}

nb::object decode(nb::handle data) {
    const Buffer buffer(data);
    const std::string bytes(buffer.data(), buffer.size());  // aligned, and nobody else's
    Record record;
    if (const char* wrong = parse(bytes.data(), bytes.size(), record); wrong != nullptr) throw nb::value_error(wrong);
    if (record.bytes.size() != bytes.size()) throw nb::value_error("there are bytes behind the record");
    return python(record);
}

void append_python(Rows& rows, nb::handle object) {
    Gathered gathered;
    gather(object.ptr(), gathered);
    append(rows, gathered.record);
}

void place(Rows& rows, nb::handle stream, std::uint64_t epoch, std::uint64_t seq, std::uint64_t time_ns) {
    Record record;
    record.stream = id_of(stream.ptr(), "stream");
    if (record.stream.empty()) throw FieldError("stream is empty");
    if ((epoch | seq | time_ns) >> 63) throw FieldError("epoch, seq or time_ns is not within 0 to 2**63 - 1");
    record.epoch = epoch;
    record.seq = seq;
    record.time_ns = time_ns;
    append(rows, record);
}

Rows* from_bytes(nb::handle data) {
    const Buffer buffer(data);
    auto rows = std::make_unique<Rows>();
    rows->bytes.assign(buffer.data(), buffer.size());
    for (std::size_t at = 0; at < rows->bytes.size(); ++rows->count) {
        Record record;
        const char* wrong = parse(rows->bytes.data() + at, rows->bytes.size() - at, record);
        if (wrong == nullptr && at + padded(record.bytes.size()) > rows->bytes.size())
            wrong = "the last record is not padded to 8 bytes";
        if (wrong != nullptr)
            throw nb::value_error(("record " + std::to_string(rows->count) + ": " + wrong).c_str());
        at += padded(record.bytes.size());
    }
    return rows.release();
}

// Goes through rows, which may grow or be emptied meanwhile.
struct RowsIterator {
    const Rows* rows;
    std::size_t at = 0;

    nb::object next() {
        if (at >= rows->bytes.size()) throw nb::stop_iteration();
        Record record;
        if (const char* wrong = parse(rows->bytes.data() + at, rows->bytes.size() - at, record); wrong != nullptr)
            throw nb::value_error(wrong);
        at += padded(record.bytes.size());
        return python(record);
    }
};

}  // namespace

void bind_records(nb::module_& m) {
    nb::register_exception_translator([](const std::exception_ptr& error, void*) {
        try {
            std::rethrow_exception(error);
        } catch (const FieldError& wrong) {
            PyErr_SetString(PyExc_ValueError, wrong.what());
        }
    });
    m.def("encode", &encode, nb::arg("record").none(), "A record's bytes, see record.h.");
    m.def("decode", &decode, nb::arg("data"), "The record that these bytes are.");
    nb::class_<RowsIterator>(m, "RowsIterator")
        .def("__iter__", [](nb::handle self) { return nb::borrow(self); })
        .def("__next__", &RowsIterator::next);
    nb::class_<Rows>(m, "Rows", "Records in binary, in the order they came.")
        .def(nb::init<>())
        .def("__len__", [](const Rows& rows) { return rows.count; })
        .def("__iter__", [](const Rows& rows) { return RowsIterator{&rows}; }, nb::keep_alive<0, 1>())
        .def("append", &append_python, nb::arg("record").none())
        .def("place", &place, nb::arg("stream"), nb::arg("epoch"), nb::arg("seq"), nb::arg("time_ns"))
        .def("tobytes", [](const Rows& rows) { return nb::bytes(rows.bytes.data(), rows.bytes.size()); })
        .def_static("frombytes", &from_bytes, nb::arg("data"));
}
