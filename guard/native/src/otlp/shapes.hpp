// The messages of an OTLP trace whose contents no record needs. They are still checked, as protobuf's own parser checks
// them: a message that it would refuse is refused as a whole, wherever the fault is.
#pragma once

#include <cstdint>
#include <string_view>

namespace kvguard::otlp {

enum class Shape : std::uint8_t {
    array_value, key_value_list, any_value, key_value, resource, entity, scope, event, link, status
};

// Whether `bytes` is a well-formed message of that shape that goes down no more than `depth` levels, itself the first
// of them; strings must be UTF-8.
bool well_formed(Shape shape, std::string_view bytes, int depth);

}  // namespace kvguard::otlp
