// The attributes of one span that a record may have, and the record that they make.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "records.hpp"

namespace kvguard::otlp {

// What the convention calls its attributes; `kKeyNames` has their spelling.
enum class Key : std::uint8_t {
    stream, epoch, seq, request, tenant, pool, pages, tokens, pool_pages, page_tokens, page_bytes, role, context_limit,
    max_tokens, share_from, scope, transfer, peer_pool, peer_pages, digests, side, status, outcome, response_status,
    final, unknown,
};
inline constexpr std::size_t kKeys = static_cast<std::size_t>(Key::unknown);

Key key_of(std::string_view name);

// KVG_PLACE: a span of this name is no record.
kvg_kind kind_of(std::string_view name);

struct Value {
    enum class Type : std::uint8_t { none, text, boolean, integer, other } type = Type::none;
    std::int64_t number = 0;  // of a boolean (0 or 1) or an integer
    std::string_view text;
};

// Filled with a span, attribute by attribute, and asked for the record. Used for many spans, so that none of them
// costs an allocation.
class Attributes {
  public:
    void clear() {
        seen_ = 0;
        twice_ = {};
        is_twice_ = place_twice_ = false;
        others_.clear();
        next_check_ = 8;
    }

    void add(std::string_view name, const Value& value) {
        const Key key = key_of(name);
        if (key == Key::unknown) {
            add_other(name);
            return;
        }
        const std::uint32_t bit = 1u << static_cast<int>(key);
        if (seen_ & bit) {
            note_twice(name);
            place_twice_ = place_twice_ || key <= Key::seq;
        }
        seen_ |= bit;
        values_[static_cast<int>(key)] = value;
    }

    // Appends the record that a span of this kind, start and these attributes is. False: it is none; then its place in
    // the stream is appended instead where that is sure, and `why`, unless null, gets what is wrong.
    bool append_record(Rows& rows, kvg_kind kind, std::uint64_t start_ns, std::string* why);

  private:
    bool has(Key key) const { return seen_ >> static_cast<int>(key) & 1; }
    const Value& value(Key key) const { return values_[static_cast<int>(key)]; }

    void add_other(std::string_view name);
    void check_others();
    void note_twice(std::string_view name) {
        if (!is_twice_) twice_ = name;
        is_twice_ = true;
    }

    // Each reads one attribute; false: it is missing or not what it should be.
    bool id(Key key, std::string_view& out);
    bool integer(Key key, std::uint64_t& out);
    bool choice(Key key, std::uint8_t& out);
    bool boolean(Key key, bool& out);
    bool page_set(Key key, std::vector<std::uint64_t>& runs, std::uint64_t& pages);
    bool read_digests(Record& record);
    bool place(Record& record);
    bool body(Record& record);
    bool read_transfer(Record& record);

    bool refuse(Key key, std::string_view is, std::string_view but = {});
    bool refuse_value(Key key, std::string_view wanted);

    std::uint32_t seen_ = 0;
    bool is_twice_ = false;
    bool place_twice_ = false;  // an attribute that says the place in the stream
    std::string_view twice_;
    std::vector<std::string_view> others_;  // names that are not the convention's, to find those given twice
    std::size_t next_check_ = 8;
    Value values_[kKeys];
    std::vector<std::uint64_t> runs_, peer_runs_;
    std::uint64_t page_count_ = 0;
    std::string* why_ = nullptr;
};

}  // namespace kvguard::otlp
