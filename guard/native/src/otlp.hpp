// OTLP traces in protobuf -> record rows: a bounds-checked walk over the wire format that looks only at what the
// convention needs.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "records.hpp"

namespace kvguard {

struct Decoded {
    Rows rows;  // the records in order; one that breaks the convention is a KVG_PLACE where its place could be read
    std::uint64_t read = 0, ignored = 0, invalid = 0;  // spans
    std::vector<std::string> errors;                   // texts of the first `kNamedErrors` invalid ones
};
inline constexpr std::size_t kNamedErrors = 3;

inline constexpr std::size_t kMaxMessageBytes = 64u << 20;  // a longer message is refused unread

// Decodes one ExportTraceServiceRequest (or TracesData). Appends to `out`. Returns nullptr, or what is wrong with the
// message as a whole (then nothing of it counts). Never reads beyond `size`; needs no recursion.
const char* decode_otlp(const void* data, std::size_t size, Decoded& out);

}  // namespace kvguard
