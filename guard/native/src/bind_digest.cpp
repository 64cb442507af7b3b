// The keyed hash of pages for Python: HashKey.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cstring>
#include <optional>
#include <string>
#include <vector>

#include "digest.hpp"

namespace nb = nanobind;
using namespace nb::literals;
using namespace kvguard;

namespace {

// A buffer [pages, ...] whose pages are each in one run.
class Pool {
  public:
    explicit Pool(nb::handle object) {
        if (PyObject_GetBuffer(object.ptr(), &view_, PyBUF_STRIDED_RO) != 0) throw nb::python_error();
        if (view_.ndim < 2) refuse("must be [pages, page bytes], not of one dimension");
        bytes_ = static_cast<std::size_t>(view_.itemsize);
        for (int axis = view_.ndim - 1; axis > 0; --axis) {
            if (view_.shape[axis] > 1 && view_.strides[axis] != static_cast<Py_ssize_t>(bytes_))
                refuse("must have the bytes of each page behind each other");
            bytes_ *= static_cast<std::size_t>(view_.shape[axis]);
        }
    }
    Pool(Pool&& other) noexcept : view_(other.view_), bytes_(other.bytes_) { other.view_.obj = nullptr; }
    Pool(const Pool&) = delete;
    Pool& operator=(const Pool&) = delete;
    ~Pool() { PyBuffer_Release(&view_); }

    std::int64_t pages() const { return view_.shape[0]; }
    std::size_t page_bytes() const { return bytes_; }
    const unsigned char* page(std::int64_t index) const {
        return static_cast<const unsigned char*>(view_.buf) + index * view_.strides[0];
    }

  private:
    // The destructor of what is not made does not run.
    [[noreturn]] void refuse(const char* why) {
        PyBuffer_Release(&view_);
        throw nb::value_error((std::string("pools: each ") + why).c_str());
    }

    Py_buffer view_{};
    std::size_t bytes_ = 0;
};

const Nh& way_called(const std::optional<std::string>& name) {
    if (!name) return best_nh();
    for (const Nh& way : nh_ways())
        if (*name == way.name && way.runs()) return way;
    throw nb::value_error(("way: this processor has no " + *name).c_str());
}

HashKey key_of(nb::bytes material, const std::optional<std::string>& way) {
    if (material.size() != KVG_HASH_KEY_BYTES) throw nb::value_error("key: 6176 bytes are needed, see kvguard/digest.h");
    return HashKey(static_cast<const unsigned char*>(material.data()), way_called(way));
}

nb::bytes bytes_of(const Hash& hash) { return nb::bytes(hash.data(), sizeof hash); }

Hash hash_of(nb::bytes bytes, const char* name) {
    Hash out;
    if (bytes.size() != sizeof out) throw nb::value_error((std::string(name) + ": a hash has 16 bytes").c_str());
    std::memcpy(out.data(), bytes.data(), sizeof out);
    for (const std::uint64_t lane : out)
        if (lane >= KVG_DIGEST_PRIME) throw nb::value_error((std::string(name) + ": is no hash").c_str());
    return out;
}

nb::list pages_of(const HashKey& key, nb::sequence buffers, const std::vector<std::int64_t>& pages,
                  std::size_t layers) {
    std::vector<Pool> pools;
    for (nb::handle buffer : buffers) pools.emplace_back(buffer);
    if (layers == 0) throw nb::value_error("layers: at least 1");
    for (const Pool& pool : pools) {
        if (pool.page_bytes() % layers != 0)
            throw nb::value_error(("layers: " + std::to_string(pool.page_bytes()) + " bytes a page do not divide into " +
                                   std::to_string(layers) + " pieces")
                                      .c_str());
        for (const std::int64_t page : pages)
            if (page < 0 || page >= pool.pages())
                throw nb::value_error(("pages: there is no page " + std::to_string(page) + " among " +
                                       std::to_string(pool.pages()))
                                          .c_str());
    }
    std::vector<Hash> hashes(pages.size(), kNoBlocks);
    {
        nb::gil_scoped_release others;
        for (std::size_t i = 0; i < pages.size(); ++i)
            for (const Pool& pool : pools) {
                const std::size_t bytes = pool.page_bytes() / layers;
                for (std::size_t layer = 0; layer < layers; ++layer)
                    hashes[i] = key.add(hashes[i], pool.page(pages[i]) + layer * bytes, bytes);
            }
    }
    nb::list out;
    for (const Hash& hash : hashes) out.append(bytes_of(hash));
    return out;
}

}  // namespace

void bind_digest(nb::module_& m) {
    nb::list ways;
    for (const Nh& way : nh_ways())
        if (way.runs()) ways.append(way.name);
    m.attr("HASH_WAYS") = nb::tuple(ways);
    nb::class_<HashKey>(m, "HashKey", "A tenant's key of the page hash, see include/kvguard/digest.h.")
        .def("__init__",
             [](HashKey* self, nb::bytes key, const std::optional<std::string>& way) {
                 new (self) HashKey(key_of(key, way));
             },
             "key"_a, "way"_a = nb::none())
        .def("pages", &pages_of, "pools"_a, "pages"_a, "layers"_a = std::size_t{1})
        .def("merge",
             [](const HashKey& self, nb::bytes left, nb::bytes right, std::uint64_t right_blocks) {
                 return bytes_of(self.merge(hash_of(left, "left"), hash_of(right, "right"), right_blocks));
             },
             "left"_a, "right"_a, "right_blocks"_a);
}
