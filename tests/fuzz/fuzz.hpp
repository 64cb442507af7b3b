// What the fuzz targets share: a record must hold what is said of it, and numbers are drawn out of the input.
#pragma once

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string_view>

#include "records.hpp"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size);

// Stops the run if `holds` is false; unlike assert(), in every build.
#define MUST(holds)                                                            \
    do {                                                                       \
        if (!(holds)) {                                                        \
            std::fprintf(stderr, "%s:%d: not so: %s\n", __FILE__, __LINE__, #holds); \
            std::abort();                                                      \
        }                                                                      \
    } while (false)

namespace fuzz {

// The records of `rows`: each is one, is written the only way it can be, and there are as many as it says.
template <typename See>
void check(const kvguard::Rows& rows, See see) {
    std::size_t at = 0;
    std::uint32_t count = 0;
    while (at < rows.bytes.size()) {
        kvguard::Record record;
        MUST(kvguard::parse(rows.bytes.data() + at, rows.bytes.size() - at, record) == nullptr);
        kvguard::Rows again;
        kvguard::append(again, record);
        MUST(again.bytes.size() == kvguard::padded(record.bytes.size()));
        MUST(std::string_view(again.bytes).substr(0, record.bytes.size()) == record.bytes);
        see(record);
        at += kvguard::padded(record.bytes.size());
        ++count;
    }
    MUST(at == rows.bytes.size());
    MUST(count == rows.count);
}

// The input as a source of choices; zeros when it is used up.
class Draw {
  public:
    Draw(const std::uint8_t* data, std::size_t size) : p_(data), end_(data + size) {}

    bool done() const { return p_ == end_; }
    std::uint8_t byte() { return p_ < end_ ? *p_++ : 0; }
    std::uint32_t below(std::uint32_t n) { return byte() % n; }
    bool one_in(std::uint32_t n) { return below(n) == n - 1; }
    std::uint64_t word() {
        std::uint64_t out = 0;
        for (int i = 0; i < 8; ++i) out = out << 8 | byte();
        return out;
    }
    // Small as a rule; now and then anything below 2^63.
    std::uint64_t number() {
        const std::uint8_t b = byte();
        return b < 240 ? b : b < 250 ? std::uint64_t{b} << (b - 236) * 3 : word() >> 1;
    }
    std::string_view rest() {
        const std::string_view out(reinterpret_cast<const char*>(p_), static_cast<std::size_t>(end_ - p_));
        p_ = end_;
        return out;
    }

  private:
    const std::uint8_t* p_;
    const std::uint8_t* end_;
};

}  // namespace fuzz
