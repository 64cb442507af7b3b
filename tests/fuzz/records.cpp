// Any bytes as a record: refused, or one that is written the only way it can be.
#include "fuzz.hpp"

#include <memory>

int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
    // As long as the input and not a byte longer, and aligned as rows are.
    const std::unique_ptr<char[]> bytes(new char[size]);
    if (size != 0) std::memcpy(bytes.get(), data, size);
    kvguard::Record record;
    if (kvguard::parse(bytes.get(), size, record) != nullptr) return 0;
    MUST(record.bytes.data() == bytes.get() && record.bytes.size() <= size);
    kvguard::Rows rows;
    std::memcpy(rows.append(record.bytes.size()), bytes.get(), record.bytes.size());
    fuzz::check(rows, [](const kvguard::Record& again) { MUST(!again.stream.empty()); });
    return 0;
}
