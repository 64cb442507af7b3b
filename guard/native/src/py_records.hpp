// Python's records (guard.records) as rows and back. Every function here wants the GIL.
#pragma once

#include <Python.h>

#include <cstdint>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include "records.hpp"

namespace kvguard {

// A Python record that cannot be a row; the text names the field.
class FieldError final : public std::invalid_argument {
    using std::invalid_argument::invalid_argument;
};

// A record's place in its stream, where it is not the Python record's own.
struct Origin {
    std::string_view stream;
    std::uint64_t epoch = 0;
    std::uint64_t seq = 0;
};

// A Python record read: `record`'s views point into it and into the Python record, which must outlive them. Made once
// and used again, so that the room for runs is not asked for each time.
struct Gathered {
    Record record;
    std::vector<std::uint64_t> runs;
    std::vector<std::uint64_t> peer_runs;
    std::string digests;
};

// Reads `object`; with an origin its own stream, epoch and seq are not looked at. Whatever `parse` would refuse is
// refused here. Throws FieldError.
void gather(PyObject* object, Gathered& out, const Origin* origin = nullptr);

// A new guard.records.Record; null with Python's error set when memory is gone. A KVG_PLACE is a bare Record.
PyObject* to_python(const Record& record);

// An id out of a Python string, viewed in place. Throws FieldError for what is no id; the empty one is allowed.
std::string_view id_of(PyObject* text, const char* field);

}  // namespace kvguard
