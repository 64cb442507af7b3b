#include "otlp/shapes.hpp"

#include "otlp/wire.hpp"
#include "utf8.hpp"

namespace kvguard::otlp {

namespace {

constexpr std::uint8_t kOpaque = 0, kText = 1;  // anything else is a message: 2 + its shape
constexpr std::uint8_t in(Shape shape) { return static_cast<std::uint8_t>(2 + static_cast<int>(shape)); }

constexpr std::uint32_t kFields = 9;

// What the delimited fields 0 to 8 of each shape are. For all others it is enough that the wire format is kept.
constexpr std::uint8_t kShapes[][kFields] = {
    {0, in(Shape::any_value)},                                                           // array_value: values
    {0, in(Shape::key_value)},                                                           // key_value_list: values
    {0, kText, 0, 0, 0, in(Shape::array_value), in(Shape::key_value_list)},              // any_value
    {0, kText, in(Shape::any_value)},                                                    // key_value: key, value
    {0, in(Shape::key_value), 0, in(Shape::entity)},                                     // resource: attributes, entities
    {0, kText, kText, kText, kText},                                                     // entity: all of it
    {0, kText, kText, in(Shape::key_value)},                                             // scope: name, version, attributes
    {0, 0, kText, in(Shape::key_value)},                                                 // event: name, attributes
    {0, 0, 0, kText, in(Shape::key_value)},                                              // link: state, attributes
    {0, 0, kText},                                                                       // status: message
};

}  // namespace

bool well_formed(Shape shape, std::string_view bytes, int depth) {
    struct Outer {
        Wire rest;
        const std::uint8_t* fields;
    };
    Outer outer[kMaxDepth];
    int level = 0;
    if (depth < 1) return false;
    Wire wire(bytes);
    const std::uint8_t* fields = kShapes[static_cast<int>(shape)];
    for (;;) {
        if (wire.done()) {
            if (level == 0) return true;
            --level;
            wire = outer[level].rest;
            fields = outer[level].fields;
            continue;
        }
        std::uint32_t tag;
        if (!wire.tag(tag)) return false;
        if ((tag & 7) != kDelimited) {
            if (!wire.skip(tag, depth - 1 - level)) return false;
            continue;
        }
        std::string_view inner;
        if (!wire.delimited(inner)) return false;
        const std::uint32_t number = tag >> 3;
        const std::uint8_t is = number < kFields ? fields[number] : kOpaque;
        if (is == kText) {
            if (!is_utf8(inner)) return false;
        } else if (is != kOpaque) {
            if (level + 2 > depth) return false;
            outer[level++] = {wire, fields};
            wire = Wire(inner);
            fields = kShapes[is - 2];
        }
    }
}

}  // namespace kvguard::otlp
