#include "otlp/attributes.hpp"

#include <algorithm>
#include <cstring>
#include <span>

#include "utf8.hpp"

namespace kvguard::otlp {

namespace {

constexpr std::string_view kKeyNames[kKeys] = {
    "kv.stream.id",     "kv.stream.epoch", "kv.seq",         "kv.request.id", "kv.tenant.id",
    "kv.pool.id",       "kv.pages",        "kv.tokens",      "kv.pool.pages", "kv.page.tokens",
    "kv.page.bytes",    "kv.role",         "kv.context.limit", "kv.max_tokens", "kv.share.from",
    "kv.scope",         "kv.transfer.id",  "kv.peer.pool.id", "kv.peer.pages", "kv.digests",
    "kv.side",          "kv.status",       "kv.outcome",     "http.response.status_code", "kv.final",
};

constexpr std::string_view name_of_key(Key key) { return kKeyNames[static_cast<int>(key)]; }

// Whether `name`, which is as long, is `text`. Its length is a constant, so this is two or three words compared.
template <std::size_t size>
bool same(std::string_view name, const char* text) {
    return std::memcmp(name.data(), text, size) == 0;
}

// The one of these attributes, all as long as `name`, that is called so.
template <Key first, Key... others>
Key among(std::string_view name) {
    constexpr std::string_view text = kKeyNames[static_cast<int>(first)];
    if (same<text.size()>(name, text.data())) return first;
    if constexpr (sizeof...(others) > 0) return among<others...>(name);
    return Key::unknown;
}

template <kvg_kind first, kvg_kind... others>
kvg_kind among(std::string_view name) {
    constexpr std::string_view text = kKindNames[first];
    if (same<text.size()>(name, text.data())) return first;
    if constexpr (sizeof...(others) > 0) return among<others...>(name);
    return KVG_PLACE;
}

// What an attribute may say, in the order of the codes (kvguard/record.h).
constexpr std::string_view kRoles[] = {"prefill", "decode", "unified", "router"};
constexpr std::string_view kScopes[] = {"tenant", "public"};
constexpr std::string_view kSides[] = {"send", "recv"};
constexpr std::string_view kStatuses[] = {"ok", "failed", "aborted"};
constexpr std::string_view kOutcomes[] = {"finished", "rejected", "aborted", "failed"};

constexpr std::span<const std::string_view> choices_of(Key key) {
    switch (key) {
        case Key::role: return kRoles;
        case Key::scope: return kScopes;
        case Key::side: return kSides;
        case Key::status: return kStatuses;
        default: return kOutcomes;
    }
}

constexpr std::uint64_t kNumberEnd = std::uint64_t{1} << 63;
constexpr std::size_t kIdCharacters = 256;
constexpr std::size_t kMostDigits = 20;
// What a row may take besides its pages and digests: header, ids, counts.
constexpr std::size_t kRowRest = sizeof(kvg_record) + 7 * KVG_MAX_ID_BYTES + 64;

// As a reader of errors sees a text: its start, in ASCII.
std::string quoted(std::string_view text) {
    constexpr char kHex[] = "0123456789abcdef";
    std::string out = "'";
    for (const char c : text.substr(0, 60)) {
        const auto byte = static_cast<unsigned char>(c);
        if (byte >= 0x20 && byte < 0x7f && c != '\'' && c != '\\') {
            out += c;
        } else {
            out += {'\\', 'x', kHex[byte >> 4], kHex[byte & 15]};
        }
    }
    return out += '\'';
}

std::string shown(const Value& value) {
    switch (value.type) {
        case Value::Type::none: return "None";
        case Value::Type::text: return quoted(value.text);
        case Value::Type::boolean: return value.number != 0 ? "True" : "False";
        case Value::Type::integer: return std::to_string(value.number);
        default: return "of another type";
    }
}

// Reads decimal digits at `p`. Returns how many; the value grows up to `most` only.
template <std::uint64_t most>
std::size_t digits(const char*& p, const char* end, std::uint64_t& value) {
    const char* const start = p;
    value = 0;
    for (; p < end && *p >= '0' && *p <= '9'; ++p)
        value = value > most / 10 ? most : std::min(value * 10 + static_cast<std::uint64_t>(*p - '0'), most);
    return static_cast<std::size_t>(p - start);
}

// Reads "12-15,40,7" as runs of a row. Returns nullptr, or what is wrong with `part`.
const char* parse_pages(std::string_view text, std::vector<std::uint64_t>& runs, std::uint64_t& pages,
                        std::string_view& part) {
    runs.clear();
    pages = 0;
    if (text.empty()) return nullptr;
    const char* p = text.data();
    const char* const end = p + text.size();
    std::uint64_t run_first = 0, run_stop = 0;  // the run that the next may join; none yet if empty
    for (;;) {
        const char* const start = p;
        std::uint64_t first, last;
        std::size_t length = digits<KVG_MAX_PAGE_INDEX>(p, end, first);
        bool read = length > 0;
        last = first;
        if (read && p < end && *p == '-') {
            const std::size_t second = digits<KVG_MAX_PAGE_INDEX>(++p, end, last);
            read = second > 0;
            length = std::max(length, second);
        }
        if (!read || (p < end && *p != ',') || length > kMostDigits || std::max(first, last) >= KVG_MAX_PAGE_INDEX ||
            last < first) {
            part = {start, static_cast<std::size_t>(std::find(p, end, ',') - start)};
            if (!read || (p < end && *p != ',')) return "neither an index nor a run a-b";
            return last < first ? "a run that does not rise" : "beyond the largest page index, 2**40 - 1";
        }
        pages += last - first + 1;
        if (pages > KVG_MAX_PAGES) {
            part = {};
            return "more pages than one record may name, 2**24";
        }
        if (first == run_stop && run_stop != 0) {
            runs.back() = kvg_run(run_first, last + 1 - run_first);
        } else {
            runs.push_back(kvg_run(first, last + 1 - first));
            run_first = first;
        }
        run_stop = last + 1;
        if (p == end) return nullptr;
        ++p;
    }
}

}  // namespace

Key key_of(std::string_view name) {
    switch (name.size()) {
        case 6: return among<Key::seq>(name);
        case 7: return among<Key::role, Key::side>(name);
        case 8: return among<Key::pages, Key::final, Key::scope>(name);
        case 9: return among<Key::tokens, Key::status>(name);
        case 10: return among<Key::pool, Key::digests, Key::outcome>(name);
        case 12: return among<Key::stream, Key::tenant>(name);
        case 13:
            return among<Key::request, Key::pool_pages, Key::page_bytes, Key::max_tokens, Key::share_from,
                         Key::peer_pages>(name);
        case 14: return among<Key::transfer, Key::page_tokens>(name);
        case 15: return among<Key::epoch, Key::peer_pool>(name);
        case 16: return among<Key::context_limit>(name);
        case 25: return among<Key::response_status>(name);
        default: return Key::unknown;
    }
}

kvg_kind kind_of(std::string_view name) {
    switch (name.size()) {
        case 7: return among<KVG_POOL, KVG_READ, KVG_FREE>(name);
        case 8: return among<KVG_ADMIT, KVG_ALLOC, KVG_SHARE, KVG_WRITE, KVG_CACHE, KVG_SCRUB>(name);
        case 9: return among<KVG_REFUSE>(name);
        case 10: return among<KVG_RESPOND>(name);
        case 14: return among<KVG_REQUEST_END>(name);
        case 15: return among<KVG_TRANSFER_END>(name);
        case 17: return among<KVG_TRANSFER_BEGIN>(name);
        default: return KVG_PLACE;
    }
}

void Attributes::add_other(std::string_view name) {
    if (is_twice_) return;
    others_.push_back(name);
    if (others_.size() == next_check_) {  // so that a name given a million times is kept a few times only
        check_others();
        next_check_ *= 2;
    }
}

void Attributes::check_others() {
    if (is_twice_ || others_.size() < 2) return;
    std::sort(others_.begin(), others_.end());
    const auto twice = std::adjacent_find(others_.begin(), others_.end());
    if (twice != others_.end()) note_twice(*twice);
}

bool Attributes::append_record(Rows& rows, kvg_kind kind, std::uint64_t start_ns, std::string* why) {
    why_ = why;
    check_others();
    const bool timed = start_ns > 0 && start_ns < kNumberEnd;
    Record record;
    record.kind = kind;
    record.time_ns = timed ? start_ns : 0;
    if (!place(record)) {
        if (why != nullptr) *why = std::string(name_of(kind)) + ": " + *why;
        return false;
    }
    if (body(record)) {
        if (timed && !is_twice_) {
            append(rows, record);
            return true;
        }
        if (why != nullptr && !timed) {
            *why = "the span's start is " + std::to_string(start_ns) + ", not a time in nanoseconds";
        } else if (why != nullptr) {
            *why = "the attribute " + quoted(twice_) + " is given twice";
        }
    }
    if (why != nullptr) {
        *why = std::string(name_of(kind)) + " (stream " + std::string(record.stream) + ", seq " +
               std::to_string(record.seq) + "): " + *why;
    }
    if (!place_twice_) {
        Record only_place;
        only_place.stream = record.stream;
        only_place.epoch = record.epoch;
        only_place.seq = record.seq;
        only_place.time_ns = record.time_ns;
        append(rows, only_place);
    }
    return false;
}

bool Attributes::place(Record& record) {
    return id(Key::stream, record.stream) && integer(Key::epoch, record.epoch) && integer(Key::seq, record.seq);
}

// What each kind has besides its place, as its class in guard/records/kinds.py says.
bool Attributes::body(Record& record) {
    const kvg_kind kind = record.kind;
    if (kind != KVG_POOL && (kind != KVG_SCRUB || has(Key::request)))
        if (!id(Key::request, record.request) || !id(Key::tenant, record.tenant)) return false;
    if (has(Key::pool) && !id(Key::pool, record.pool)) return false;
    const bool is_transfer = kind == KVG_TRANSFER_BEGIN || kind == KVG_TRANSFER_END;
    if (is_transfer && !id(Key::transfer, record.transfer)) return false;
    if (kind == KVG_TRANSFER_END && !choice(Key::side, record.code)) return false;
    if (record.has_pages()) {
        if (!page_set(Key::pages, runs_, page_count_)) return false;
        record.pages = {runs_.data(), static_cast<std::uint32_t>(runs_.size())};
    }
    bool is_final = false;
    switch (kind) {
        case KVG_POOL:
            if (!integer(Key::pool_pages, record.tokens) || !integer(Key::page_tokens, record.extra) ||
                !integer(Key::page_bytes, record.page_bytes) || !choice(Key::role, record.code) ||
                !integer(Key::context_limit, record.context_limit))
                return false;
            return record.tokens <= KVG_MAX_PAGE_INDEX ||
                   refuse(Key::pool_pages, std::to_string(record.tokens), "more than 2**40");
        case KVG_ADMIT:
            if (has(Key::max_tokens)) record.flags |= KVG_HAS_MAX;
            return integer(Key::tokens, record.tokens) &&
                   (!has(Key::max_tokens) || integer(Key::max_tokens, record.extra));
        case KVG_SHARE:
            if (has(Key::tokens)) record.flags |= KVG_HAS_TOKENS;
            return (!has(Key::share_from) || id(Key::share_from, record.share_from)) &&
                   (!has(Key::tokens) || integer(Key::tokens, record.tokens));
        case KVG_WRITE:
            return integer(Key::tokens, record.tokens) && (!has(Key::scope) || choice(Key::scope, record.code));
        case KVG_READ: return integer(Key::tokens, record.tokens);
        case KVG_TRANSFER_BEGIN:
        case KVG_TRANSFER_END: return read_transfer(record);
        case KVG_REQUEST_END: return choice(Key::outcome, record.code);
        case KVG_RESPOND:
            if (!integer(Key::response_status, record.extra) ||
                (has(Key::tokens) && !integer(Key::tokens, record.tokens)) ||
                (has(Key::final) && !boolean(Key::final, is_final)))
                return false;
            if (is_final) record.flags |= KVG_FINAL;
            return true;
        default: return true;
    }
}

// The rest of a transfer, whose pages are read.
bool Attributes::read_transfer(Record& record) {
    std::uint64_t peers = page_count_;
    if (record.kind == KVG_TRANSFER_BEGIN) {
        if (!id(Key::peer_pool, record.peer_pool) || !page_set(Key::peer_pages, peer_runs_, peers)) return false;
        record.peer_pages = {peer_runs_.data(), static_cast<std::uint32_t>(peer_runs_.size())};
    }
    if (!integer(Key::tokens, record.tokens)) return false;
    if (record.kind == KVG_TRANSFER_END && !choice(Key::status, record.status)) return false;
    if (has(Key::digests) && !read_digests(record)) return false;
    const auto pages = [](std::uint64_t count) { return std::to_string(count) + " pages"; };
    if (peers != page_count_) return refuse(Key::pages, pages(page_count_), pages(peers) + " as kv.peer.pages is");
    if (has(Key::digests) && record.digest_count != page_count_)
        return refuse(Key::digests, std::to_string(record.digest_count), "one for each of " + pages(page_count_));
    return sizeof(std::uint64_t) * (runs_.size() + record.peer_pages.runs()) + record.digests.size() <=
               KVG_MAX_RECORD_BYTES - kRowRest ||
           refuse(Key::pages, "with all that goes with them more", "what one record may hold");
}

bool Attributes::id(Key key, std::string_view& out) {
    const Value& v = value(key);
    if (!has(key) || v.type != Value::Type::text) return refuse_value(key, "a string");
    out = v.text;
    if (out.empty()) return refuse(key, "''", "1 to 256 characters");
    if (out.size() > kIdCharacters && utf8_length(out) > static_cast<std::ptrdiff_t>(kIdCharacters))
        return refuse(key, std::to_string(utf8_length(out)) + " characters long", "1 to 256");
    return true;
}

bool Attributes::integer(Key key, std::uint64_t& out) {
    const Value& v = value(key);
    if (!has(key)) return refuse_value(key, "an integer");
    if (v.type == Value::Type::integer) {
        out = static_cast<std::uint64_t>(v.number);
    } else {
        const char* p = v.text.data();
        if (v.type != Value::Type::text || v.text.empty() || v.text.size() > kMostDigits ||
            digits<kNumberEnd>(p, p + v.text.size(), out) != v.text.size())
            return refuse_value(key, "an integer");
    }
    return out < kNumberEnd || refuse(key, shown(v), "within 0 to 2**63 - 1");
}

bool Attributes::boolean(Key key, bool& out) {
    const Value& v = value(key);
    out = v.number != 0;
    return v.type == Value::Type::boolean || refuse_value(key, "a boolean");
}

bool Attributes::choice(Key key, std::uint8_t& out) {
    const Value& v = value(key);
    const auto texts = choices_of(key);
    if (has(key) && v.type == Value::Type::text) {
        const auto found = std::find(texts.begin(), texts.end(), v.text);
        out = static_cast<std::uint8_t>(found - texts.begin());
        if (found != texts.end()) return true;
    }
    if (why_ == nullptr) return false;
    std::string wanted = "one of";
    for (const auto text : texts) wanted.append(text == texts.front() ? " " : ", ").append(text);
    return refuse_value(key, wanted);
}

bool Attributes::page_set(Key key, std::vector<std::uint64_t>& runs, std::uint64_t& pages) {
    const Value& v = value(key);
    if (!has(key) || v.type != Value::Type::text) return refuse_value(key, "a string");
    std::string_view part;
    const char* wrong = parse_pages(v.text, runs, pages, part);
    // A text of pages that are all apart takes a quarter of what its runs do.
    if (wrong == nullptr && sizeof(std::uint64_t) * runs.size() > KVG_MAX_RECORD_BYTES - kRowRest)
        wrong = "more runs than one record may hold";
    if (wrong != nullptr && why_ != nullptr) {
        *why_ = std::string(name_of_key(key)) + ": " + (part.data() != nullptr ? quoted(part) + " is " : "") + wrong;
    }
    return wrong == nullptr;
}

bool Attributes::read_digests(Record& record) {
    const Value& v = value(Key::digests);
    if (v.type != Value::Type::text) return refuse_value(Key::digests, "a string");
    record.flags |= KVG_HAS_DIGESTS;
    record.digests = v.text;
    if (v.text.empty()) return true;
    char before = ',';
    for (const char c : v.text) {
        const bool hex = (c >= '0' && c <= '9') || (c >= 'a' && c <= 'f');
        if (!hex && (c != ',' || before == ',')) return refuse_value(Key::digests, "lower-case hexadecimal");
        record.digest_count += c == ',';
        before = c;
    }
    ++record.digest_count;
    return before != ',' || refuse_value(Key::digests, "lower-case hexadecimal");
}

bool Attributes::refuse(Key key, std::string_view is, std::string_view but) {
    if (why_ != nullptr) why_->assign(name_of_key(key)).append(" is ").append(is).append(", not ").append(but);
    return false;
}

bool Attributes::refuse_value(Key key, std::string_view wanted) {
    if (why_ == nullptr) return false;
    if (has(key)) return refuse(key, shown(value(key)), wanted);
    why_->assign(name_of_key(key)).append(" is missing");
    return false;
}

}  // namespace kvguard::otlp
