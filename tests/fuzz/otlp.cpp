// Any bytes as an OTLP message: refused as a whole, and then nothing is left of it; or read, and then what came out is
// well-formed and the counts agree.
#include "otlp.hpp"

#include <algorithm>
#include <string>

#include "fuzz.hpp"

int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
    kvguard::Decoded out;
    out.read = 7;
    out.rows.append(8);
    const std::string before = out.rows.bytes;
    if (kvguard::decode_otlp(data, size, out) != nullptr) {
        MUST(out.read == 7 && out.ignored == 0 && out.invalid == 0 && out.errors.empty());
        MUST(out.rows.count == 1 && out.rows.bytes == before);
        return 0;
    }
    out.rows.bytes.erase(0, before.size());
    --out.rows.count;
    std::uint64_t places = 0;
    fuzz::check(out.rows, [&](const kvguard::Record& record) { places += record.kind == KVG_PLACE; });
    MUST(out.read - 7 == out.ignored + out.invalid + out.rows.count - places);
    MUST(places <= out.invalid);
    MUST(out.errors.size() == std::min<std::uint64_t>(out.invalid, kvguard::kNamedErrors));
    for (const std::string& error : out.errors) MUST(!error.empty());
    return 0;
}
