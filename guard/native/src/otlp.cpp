// The walk: request, resource spans, scope spans, span, attribute, value. One function a level, so the depth is fixed.
// Fields that no record needs are checked by otlp/shapes.cpp; which they are is in the .proto files of OpenTelemetry.
#include "otlp.hpp"

#include "otlp/attributes.hpp"
#include "otlp/shapes.hpp"
#include "otlp/wire.hpp"
#include "utf8.hpp"

namespace kvguard {

namespace {

using otlp::Attributes;
using otlp::Key;
using otlp::Shape;
using otlp::tag_of;
using otlp::Value;
using otlp::well_formed;
using otlp::Wire;

// How far down each level's own fields may go.
constexpr int kRequestDepth = otlp::kMaxDepth;
constexpr int kResourceDepth = kRequestDepth - 1;
constexpr int kScopeDepth = kResourceDepth - 1;
constexpr int kSpanDepth = kScopeDepth - 1;
constexpr int kPairDepth = kSpanDepth - 1;
constexpr int kValueDepth = kPairDepth - 1;

class Walk {
  public:
    explicit Walk(Decoded& out) : out_(out) {}

    // Each takes one message; false: it is broken.
    bool request(std::string_view bytes) {
        Wire wire(bytes);
        std::uint32_t tag;
        std::string_view inner;
        while (!wire.done()) {
            if (!wire.tag(tag)) return false;
            if (tag == tag_of(1, otlp::kDelimited)) {
                if (!wire.delimited(inner) || !resource_spans(inner)) return false;
            } else if (!wire.skip(tag, kRequestDepth)) {
                return false;
            }
        }
        return true;
    }

  private:
    bool resource_spans(std::string_view bytes) {
        return level(bytes, Shape::resource, kResourceDepth,
                     [this](std::string_view inner) { return scope_spans(inner); });
    }

    bool scope_spans(std::string_view bytes) {
        return level(bytes, Shape::scope, kScopeDepth, [this](std::string_view inner) { return span(inner); });
    }

    // ResourceSpans and ScopeSpans alike: 1 says whose they are, 2 is each of them, 3 a schema's URL.
    template <class Each>
    static bool level(std::string_view bytes, Shape whose, int depth, Each&& each) {
        Wire wire(bytes);
        std::uint32_t tag;
        std::string_view inner;
        while (!wire.done()) {
            if (!wire.tag(tag)) return false;
            switch (tag) {
                case tag_of(1, otlp::kDelimited):
                    if (!wire.delimited(inner) || !well_formed(whose, inner, depth)) return false;
                    break;
                case tag_of(2, otlp::kDelimited):
                    if (!wire.delimited(inner) || !each(inner)) return false;
                    break;
                case tag_of(3, otlp::kDelimited):
                    if (!wire.delimited(inner) || !is_utf8(inner)) return false;
                    break;
                default:
                    if (!wire.skip(tag, depth)) return false;
            }
        }
        return true;
    }

    bool span(std::string_view bytes) {
        Wire wire(bytes);
        std::uint32_t tag;
        std::string_view inner, name;
        std::uint64_t start_ns = 0;
        attributes_.clear();
        while (!wire.done()) {
            if (!wire.tag(tag)) return false;
            switch (tag) {
                case tag_of(9, otlp::kDelimited):
                    if (!wire.delimited(inner) || !attribute(inner)) return false;
                    break;
                case tag_of(5, otlp::kDelimited):
                    if (!wire.delimited(name) || !is_utf8(name)) return false;
                    break;
                case tag_of(7, otlp::kFixed64):
                    if (!wire.fixed64(start_ns)) return false;
                    break;
                case tag_of(3, otlp::kDelimited):  // trace_state
                    if (!wire.delimited(inner) || !is_utf8(inner)) return false;
                    break;
                case tag_of(11, otlp::kDelimited):
                    if (!wire.delimited(inner) || !well_formed(Shape::event, inner, kSpanDepth)) return false;
                    break;
                case tag_of(13, otlp::kDelimited):
                    if (!wire.delimited(inner) || !well_formed(Shape::link, inner, kSpanDepth)) return false;
                    break;
                case tag_of(15, otlp::kDelimited):
                    if (!wire.delimited(inner) || !well_formed(Shape::status, inner, kSpanDepth)) return false;
                    break;
                default:
                    if (!wire.skip(tag, kSpanDepth)) return false;
            }
        }
        take(name, start_ns);
        return true;
    }

    bool attribute(std::string_view bytes) {
        Wire wire(bytes);
        std::uint32_t tag;
        std::string_view inner, name;
        Value value;
        while (!wire.done()) {
            if (!wire.tag(tag)) return false;
            switch (tag) {
                case tag_of(1, otlp::kDelimited):
                    if (!wire.delimited(name) || !is_utf8(name)) return false;
                    break;
                case tag_of(2, otlp::kDelimited):  // a second one is merged into the first
                    if (!wire.delimited(inner) || !any_value(inner, value)) return false;
                    break;
                default:
                    if (!wire.skip(tag, kPairDepth)) return false;
            }
        }
        attributes_.add(name, value);
        return true;
    }

    // Of several values the last one counts, as in any oneof.
    bool any_value(std::string_view bytes, Value& value) {
        Wire wire(bytes);
        std::uint32_t tag;
        std::string_view inner;
        std::uint64_t number;
        while (!wire.done()) {
            if (!wire.tag(tag)) return false;
            switch (tag) {
                case tag_of(1, otlp::kDelimited):
                    if (!wire.delimited(value.text) || !is_utf8(value.text)) return false;
                    value.type = Value::Type::text;
                    break;
                case tag_of(2, otlp::kVarint):
                    if (!wire.varint(number)) return false;
                    value.type = Value::Type::boolean;
                    value.number = number != 0;
                    break;
                case tag_of(3, otlp::kVarint):
                    if (!wire.varint(number)) return false;
                    value.type = Value::Type::integer;
                    value.number = static_cast<std::int64_t>(number);
                    break;
                case tag_of(5, otlp::kDelimited):
                    if (!wire.delimited(inner) || !well_formed(Shape::array_value, inner, kValueDepth)) return false;
                    value.type = Value::Type::other;
                    break;
                case tag_of(6, otlp::kDelimited):
                    if (!wire.delimited(inner) || !well_formed(Shape::key_value_list, inner, kValueDepth)) return false;
                    value.type = Value::Type::other;
                    break;
                case tag_of(4, otlp::kFixed64):    // a double
                case tag_of(7, otlp::kDelimited):  // bytes
                case tag_of(8, otlp::kVarint):     // an index into a table of strings, which only profiles have
                    value.type = Value::Type::other;
                    [[fallthrough]];
                default:
                    if (!wire.skip(tag, kValueDepth)) return false;
            }
        }
        return true;
    }

    void take(std::string_view name, std::uint64_t start_ns) {
        ++out_.read;
        const kvg_kind kind = otlp::kind_of(name);
        if (kind == KVG_PLACE) {
            ++out_.ignored;
            return;
        }
        std::string why;
        const bool named = out_.errors.size() < kNamedErrors;
        if (!attributes_.append_record(out_.rows, kind, start_ns, named ? &why : nullptr)) {
            ++out_.invalid;
            if (named) out_.errors.push_back(std::move(why));
        }
    }

    Decoded& out_;
    Attributes attributes_;
};

}  // namespace

const char* decode_otlp(const void* data, std::size_t size, Decoded& out) {
    if (size > kMaxMessageBytes) return "it is too long";
    const std::size_t bytes = out.rows.bytes.size(), errors = out.errors.size();
    const std::uint32_t count = out.rows.count;
    const std::uint64_t read = out.read, ignored = out.ignored, invalid = out.invalid;
    if (Walk(out).request({static_cast<const char*>(data), size})) return nullptr;
    out.rows.bytes.resize(bytes);
    out.rows.count = count;
    out.errors.resize(errors);
    out.read = read;
    out.ignored = ignored;
    out.invalid = invalid;
    return "the wire format is broken or a string is not UTF-8";
}

}  // namespace kvguard
