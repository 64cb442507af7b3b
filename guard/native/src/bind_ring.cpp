// The ring for Python: RingWriter, RingReader.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>

#include <memory>
#include <stdexcept>

#include "ring.hpp"
#include "ring_writer.hpp"

namespace nb = nanobind;
using namespace nb::literals;
using namespace kvguard;

namespace {

// A writer whose records take their places by themselves and never raise.
class Sender : public RingWriter {
  public:
    Sender(const std::string& path, nb::handle stream, std::uint64_t epoch, std::uint32_t lanes, std::uint32_t rows,
           nb::object tell)
        : RingWriter(path, std::string(id_of(stream.ptr(), "stream")), epoch, lanes, rows), tell_(std::move(tell)) {
        if (epoch >> 63) throw FieldError("epoch is not within 0 to 2**63 - 1");
    }

    // Sends a record as the next of the stream and returns its seq; -1 when off.
    std::int64_t send(nb::handle record, nb::handle) {
        const std::int64_t seq = next();
        if (seq < 0) return -1;
        try {
            put(record.ptr(), static_cast<std::uint64_t>(seq), 0);
        } catch (const std::exception& error) {
            if (++failed_ == 1 && !tell_.is_none()) tell(error.what());
        }
        return seq;
    }

    std::uint64_t failed() const { return failed_; }

  private:
    void tell(const char* text) {
        try {
            tell_(text);
        } catch (nb::python_error& error) {
            error.discard_as_unraisable("RingWriter.send");
        }
    }

    std::uint64_t failed_ = 0;
    nb::object tell_;  // told of the first that failed
};

// A reader that can be closed.
class Reader {
  public:
    Reader(const std::string& path, std::uint32_t lanes, std::uint32_t rows)
        : reader_(RingReader::open(path, lanes, rows)) {}

    std::unique_ptr<Rows> take(std::size_t limit) {
        auto rows = std::make_unique<Rows>();
        RingReader& reader = open();
        nb::gil_scoped_release others;
        reader.take(*rows, limit);
        return rows;
    }

    void wait(double timeout_s) {
        RingReader& reader = open();
        nb::gil_scoped_release others;
        reader.wait(static_cast<std::int64_t>(timeout_s * 1e9));
    }

    void wake() { open().wake(); }
    std::vector<RingReader::Lane> lanes() { return open().lanes(); }
    void close() { reader_.reset(); }

  private:
    RingReader& open() {
        if (reader_ == nullptr) throw std::runtime_error("the ring's reader is closed");
        return *reader_;
    }

    std::unique_ptr<RingReader> reader_;
};

}  // namespace

void bind_ring(nb::module_& m) {
    m.attr("RING_PATH") = KVG_RING_PATH;
    m.attr("RING_LANES") = KVG_RING_LANES;
    m.attr("RING_ROWS") = KVG_RING_ROWS;
    nb::class_<Sender>(m, "RingWriter", "A lane of a ring, for one stream of this process.")
        .def(nb::init<const std::string&, nb::handle, std::uint64_t, std::uint32_t, std::uint32_t, nb::object>(),
             "path"_a, "stream"_a, "epoch"_a, "lanes"_a = KVG_RING_LANES, "rows"_a = KVG_RING_ROWS,
             "tell"_a = nb::none())
        .def("send", &Sender::send, "record"_a.none(), "context"_a = nb::none())
        .def("skip", &Sender::next)
        .def(
            "emit",
            [](Sender& self, nb::handle record, std::uint64_t seq, std::uint64_t time_ns) {
                if ((seq | time_ns) >> 63) throw FieldError("seq or time_ns is not within 0 to 2**63 - 1");
                return self.put(record.ptr(), seq, time_ns);
            },
            "record"_a.none(), "seq"_a, "time_ns"_a = 0)
        .def("close", &Sender::close)
        .def_prop_ro("on", &Sender::on)
        .def_prop_ro("stream", &Sender::stream)
        .def_prop_ro("epoch", &Sender::epoch)
        .def_prop_ro("written", &Sender::written)
        .def_prop_ro("dropped", &Sender::dropped)
        .def_prop_ro("failed", &Sender::failed);
    nb::class_<RingReader::Lane>(m, "RingLane")
        .def_ro("index", &RingReader::Lane::index)
        .def_ro("pid", &RingReader::Lane::pid)
        .def_ro("written", &RingReader::Lane::written)
        .def_ro("dropped", &RingReader::Lane::dropped)
        .def_ro("broken", &RingReader::Lane::broken)
        .def_ro("waiting", &RingReader::Lane::waiting)
        .def_prop_ro("stream", [](const RingReader::Lane& lane) {
            return nb::steal(PyUnicode_DecodeUTF8(lane.stream.data(), static_cast<Py_ssize_t>(lane.stream.size()),
                                                  "replace"));
        });
    nb::class_<Reader>(m, "RingReader", "Takes what stands in a ring.")
        .def(nb::init<const std::string&, std::uint32_t, std::uint32_t>(), "path"_a, "lanes"_a = KVG_RING_LANES,
             "rows"_a = KVG_RING_ROWS)
        .def("take", &Reader::take, "limit"_a = std::size_t{65536})
        .def("wait", &Reader::wait, "timeout_s"_a)
        .def("wake", &Reader::wake)
        .def("lanes", &Reader::lanes)
        .def("close", &Reader::close);
}
