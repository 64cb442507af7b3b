#include "py_records.hpp"

#include <structmember.h>

#include <array>
#include <cstring>

namespace kvguard {

namespace {

// The fields of every record, then of some kinds.
enum Field {
    STREAM, EPOCH, SEQ, TIME, REQUEST, TENANT, POOL, HEADER_FIELDS,
    PAGES = HEADER_FIELDS, TOKENS, PAGE_TOKENS, PAGE_BYTES, ROLE, CONTEXT_LIMIT, MAX_TOKENS, SHARE_FROM, SCOPE,
    TRANSFER, PEER_POOL, PEER_PAGES, DIGESTS, SIDE, STATUS, OUTCOME, FINAL, FIELDS,
};
constexpr const char* kFields[FIELDS] = {
    "stream", "epoch", "seq", "time_ns", "request", "tenant", "pool",
    "pages", "tokens", "page_tokens", "page_bytes", "role", "context_limit", "max_tokens", "share_from", "scope",
    "transfer", "peer_pool", "peer_pages", "digests", "side", "status", "outcome", "final",
};

struct Kind {
    const char* type;
    std::vector<Field> body;
};
const std::array<Kind, KVG_KINDS> kKinds{{
    {"Record", {}},
    {"Pool", {PAGES, PAGE_TOKENS, PAGE_BYTES, ROLE, CONTEXT_LIMIT}},
    {"Admit", {TOKENS, MAX_TOKENS}},
    {"Alloc", {PAGES}},
    {"Share", {PAGES, SHARE_FROM, TOKENS}},
    {"Write", {PAGES, TOKENS, SCOPE}},
    {"TransferBegin", {TRANSFER, PAGES, PEER_POOL, PEER_PAGES, TOKENS, DIGESTS}},
    {"TransferEnd", {TRANSFER, SIDE, PAGES, TOKENS, STATUS, DIGESTS}},
    {"Read", {PAGES, TOKENS}},
    {"Free", {PAGES}},
    {"Cache", {PAGES}},
    {"Scrub", {PAGES}},
    {"RequestEnd", {OUTCOME}},
    {"Respond", {STATUS, TOKENS, FINAL}},
    {"Refuse", {PAGES}},
}};

// The members of an enumeration in the order of its codes in record.h, which is that of its definition.
struct Codes {
    std::vector<PyObject*> members;
};

// Where a field stands in the object, asked of the type once: a load instead of a look-up by name.
Py_ssize_t offset_of(PyObject* type, const char* field) {
    PyObject* descriptor = PyObject_GetAttrString(type, field);
    if (descriptor == nullptr) return -1;
    Py_ssize_t offset = -1;
    if (Py_TYPE(descriptor) == &PyMemberDescr_Type) {
        const PyMemberDef* member = reinterpret_cast<PyMemberDescrObject*>(descriptor)->d_member;
        if (member->type == T_OBJECT_EX || member->type == T_OBJECT) offset = member->offset;
    }
    Py_DECREF(descriptor);
    if (offset < 0) PyErr_Format(PyExc_RuntimeError, "%R does not keep its field %s in a slot", type, field);
    return offset;
}

// What is known of Python's types. Made at the first use, never given back.
struct Types {
    std::array<PyTypeObject*, KVG_KINDS> types{};
    std::array<std::array<Py_ssize_t, FIELDS>, KVG_KINDS> offsets{};
    std::array<PyObject*, KVG_KINDS> keywords{};  // names of the fields that `to_python` gives, as a tuple
    PyTypeObject* page_set = nullptr;
    Py_ssize_t runs = -1;
    Codes roles, scopes, sides, statuses, outcomes;

    // Returns null with Python's error set when guard.records is not as it should be.
    static const Types* get() {
        if (made_ == nullptr) made_ = make();
        return made_;
    }

  private:
    static inline const Types* made_ = nullptr;

    static const Types* make() {
        PyObject* module = PyImport_ImportModule("guard.records");
        if (module == nullptr) return nullptr;
        auto* t = new Types;
        const bool good = t->fill(module);
        Py_DECREF(module);
        if (good) return t;
        delete t;
        return nullptr;
    }

    bool fill(PyObject* module) {
        for (std::size_t k = 0; k < KVG_KINDS; ++k) {
            PyObject* type = PyObject_GetAttrString(module, kKinds[k].type);
            if (type == nullptr || !PyType_Check(type)) return false;
            types[k] = reinterpret_cast<PyTypeObject*>(type);
            std::vector<Field> fields;
            for (int f = 0; f < HEADER_FIELDS; ++f) fields.push_back(static_cast<Field>(f));
            fields.insert(fields.end(), kKinds[k].body.begin(), kKinds[k].body.end());
            keywords[k] = PyTuple_New(static_cast<Py_ssize_t>(fields.size()));
            if (keywords[k] == nullptr) return false;
            for (std::size_t i = 0; i < fields.size(); ++i) {
                if ((offsets[k][fields[i]] = offset_of(type, kFields[fields[i]])) < 0) return false;
                PyObject* name = PyUnicode_InternFromString(kFields[fields[i]]);
                if (name == nullptr) return false;
                PyTuple_SET_ITEM(keywords[k], static_cast<Py_ssize_t>(i), name);
            }
        }
        PyObject* pages = PyObject_GetAttrString(module, "PageSet");
        if (pages == nullptr) return false;
        page_set = reinterpret_cast<PyTypeObject*>(pages);
        if ((runs = offset_of(pages, "runs")) < 0) return false;
        return list(module, "Role", KVG_ROUTER, roles) && list(module, "Scope", KVG_PUBLIC, scopes) &&
               list(module, "Side", KVG_RECV, sides) && list(module, "TransferStatus", KVG_STATUS_ABORTED, statuses) &&
               list(module, "Outcome", KVG_FAILED, outcomes);
    }

    static bool list(PyObject* module, const char* name, std::size_t last, Codes& codes) {
        PyObject* type = PyObject_GetAttrString(module, name);
        if (type == nullptr) return false;
        PyObject* members = PySequence_List(type);
        Py_DECREF(type);
        if (members == nullptr) return false;
        for (Py_ssize_t i = 0; i < PyList_GET_SIZE(members); ++i) {
            Py_INCREF(PyList_GET_ITEM(members, i));
            codes.members.push_back(PyList_GET_ITEM(members, i));
        }
        Py_DECREF(members);
        if (codes.members.size() == last + 1) return true;
        PyErr_Format(PyExc_RuntimeError, "guard.records.%s and record.h differ", name);
        return false;
    }
};

[[noreturn]] void refuse(const char* field, const char* why) { throw FieldError(std::string(field) + why); }

std::uint64_t number(PyObject* value, const char* field) {
    if (!PyLong_Check(value) || PyBool_Check(value)) refuse(field, " is not an integer");
    int overflow = 0;
    const long long number = PyLong_AsLongLongAndOverflow(value, &overflow);
    if (overflow != 0 || number < 0) refuse(field, " is not within 0 to 2**63 - 1");
    return static_cast<std::uint64_t>(number);
}

std::string_view present(PyObject* text, const char* field) {
    const std::string_view id = id_of(text, field);
    if (id.empty()) refuse(field, " is empty");
    return id;
}

std::uint8_t code(PyObject* value, const Codes& codes, const char* field) {
    for (std::size_t i = 0; i < codes.members.size(); ++i)
        if (codes.members[i] == value) return static_cast<std::uint8_t>(i);
    if (PyUnicode_Check(value)) {
        for (std::size_t i = 0; i < codes.members.size(); ++i)
            if (PyUnicode_Compare(codes.members[i], value) == 0) return static_cast<std::uint8_t>(i);
    }
    refuse(field, " is none of the words that the convention has for it");
}

// Reads a PageSet's runs and returns how many pages they are.
std::uint64_t pages(const Types& types, PyObject* value, const char* field, std::vector<std::uint64_t>& out) {
    out.clear();
    if (Py_TYPE(value) != types.page_set) refuse(field, " is no PageSet");
    PyObject* runs = *reinterpret_cast<PyObject**>(reinterpret_cast<char*>(value) + types.runs);
    if (runs == nullptr || !PyTuple_Check(runs)) refuse(field, " is no PageSet");
    std::uint64_t total = 0;
    std::uint64_t last_stop = ~std::uint64_t{0};
    const Py_ssize_t count = PyTuple_GET_SIZE(runs);
    for (Py_ssize_t i = 0; i < count; ++i) {
        PyObject* run = PyTuple_GET_ITEM(runs, i);
        if (!PyTuple_Check(run) || PyTuple_GET_SIZE(run) != 2) refuse(field, " is no PageSet");
        const std::uint64_t start = number(PyTuple_GET_ITEM(run, 0), field);
        const std::uint64_t stop = number(PyTuple_GET_ITEM(run, 1), field);
        if (stop > KVG_MAX_PAGE_INDEX) refuse(field, " goes beyond the largest page index, 2**40 - 1");
        if (start >= stop || start == last_stop) refuse(field, " has runs that a PageSet never has");
        total += stop - start;
        if (total > KVG_MAX_PAGES) refuse(field, " names more pages than one record may, 2**24");
        out.push_back(kvg_run(start, stop - start));
        last_stop = stop;
    }
    return total;
}

std::uint32_t digests(PyObject* value, std::uint64_t wanted, std::string& out) {
    out.clear();
    if (!PyTuple_Check(value)) refuse("digests", " is no tuple");
    const Py_ssize_t count = PyTuple_GET_SIZE(value);
    if (static_cast<std::uint64_t>(count) != wanted) refuse("digests", " is not one a page");
    for (Py_ssize_t i = 0; i < count; ++i) {
        PyObject* text = PyTuple_GET_ITEM(value, i);
        if (!PyUnicode_Check(text) || !PyUnicode_IS_COMPACT_ASCII(text) || PyUnicode_GET_LENGTH(text) == 0)
            refuse("digests", " has one that is not lower-case hexadecimal");
        const std::string_view digest(static_cast<const char*>(PyUnicode_DATA(text)),
                                      static_cast<std::size_t>(PyUnicode_GET_LENGTH(text)));
        for (const char c : digest)
            if (!((c >= '0' && c <= '9') || (c >= 'a' && c <= 'f')))
                refuse("digests", " has one that is not lower-case hexadecimal");
        if (i > 0) out.push_back(',');
        out.append(digest);
    }
    return static_cast<std::uint32_t>(count);
}

}  // namespace

std::string_view id_of(PyObject* text, const char* field) {
    if (!PyUnicode_Check(text)) refuse(field, " is not a string");
    if (PyUnicode_GET_LENGTH(text) > 256) refuse(field, " has more than 256 characters");
    if (PyUnicode_IS_COMPACT_ASCII(text))
        return {static_cast<const char*>(PyUnicode_DATA(text)), static_cast<std::size_t>(PyUnicode_GET_LENGTH(text))};
    Py_ssize_t size = 0;
    const char* utf8 = PyUnicode_AsUTF8AndSize(text, &size);
    if (utf8 == nullptr) {
        PyErr_Clear();
        refuse(field, " is not Unicode text: it holds a lone surrogate");
    }
    return {utf8, static_cast<std::size_t>(size)};
}

void gather(PyObject* object, Gathered& out, const Origin* origin) {
    const Types* types = Types::get();
    if (types == nullptr) {
        PyErr_Clear();
        throw std::runtime_error("guard.records cannot be imported, or is not of this version");
    }
    std::size_t k = 0;
    while (k < KVG_KINDS && types->types[k] != Py_TYPE(object)) ++k;
    if (k == KVG_KINDS) throw FieldError(std::string("a ") + Py_TYPE(object)->tp_name + " is no record");
    const auto& offsets = types->offsets[k];
    const auto get = [&](Field field) -> PyObject* {
        PyObject* value = *reinterpret_cast<PyObject**>(reinterpret_cast<char*>(object) + offsets[field]);
        if (value == nullptr) refuse(kFields[field], " is missing");
        return value;
    };
    const auto integer = [&](Field field) { return number(get(field), kFields[field]); };
    const auto all_pages = [&] {
        const std::uint64_t total = pages(*types, get(PAGES), "pages", out.runs);
        out.record.pages = {out.runs.data(), static_cast<std::uint32_t>(out.runs.size())};
        return total;
    };

    Record& r = out.record;
    r = Record{};
    r.kind = static_cast<kvg_kind>(k);
    if (origin != nullptr) {
        r.stream = origin->stream;
        r.epoch = origin->epoch;
        r.seq = origin->seq;
    } else {
        r.stream = present(get(STREAM), "stream");
        r.epoch = integer(EPOCH);
        r.seq = integer(SEQ);
    }
    r.time_ns = integer(TIME);
    PyObject* request = get(REQUEST);
    PyObject* tenant = get(TENANT);
    if (request != Py_None) {
        if (r.kind == KVG_POOL || r.kind == KVG_PLACE) refuse("request", " has no place in this kind of record");
        r.request = present(request, "request");
    } else if (r.kind != KVG_POOL && r.kind != KVG_PLACE && r.kind != KVG_SCRUB) {
        refuse("request", " is missing");
    }
    if (tenant != Py_None) {
        if (request == Py_None) refuse("tenant", " has no place where no request is named");
        r.tenant = present(tenant, "tenant");
    } else if (request != Py_None) {
        refuse("tenant", " is missing");
    }
    r.pool = id_of(get(POOL), "pool");

    switch (r.kind) {
        case KVG_PLACE:
        case KVG_KINDS:
            break;
        case KVG_POOL:
            if ((r.tokens = integer(PAGES)) > KVG_MAX_PAGE_INDEX) refuse("pages", " is more than 2**40");
            r.extra = integer(PAGE_TOKENS);
            r.page_bytes = integer(PAGE_BYTES);
            r.context_limit = integer(CONTEXT_LIMIT);
            r.code = code(get(ROLE), types->roles, "role");
            break;
        case KVG_ADMIT:
            r.tokens = integer(TOKENS);
            if (get(MAX_TOKENS) != Py_None) {
                r.flags = KVG_HAS_MAX;
                r.extra = integer(MAX_TOKENS);
            }
            break;
        case KVG_SHARE:
            all_pages();
            if (get(SHARE_FROM) != Py_None) r.share_from = present(get(SHARE_FROM), "share_from");
            if (get(TOKENS) != Py_None) {
                r.flags = KVG_HAS_TOKENS;
                r.tokens = integer(TOKENS);
            }
            break;
        case KVG_WRITE:
            all_pages();
            r.tokens = integer(TOKENS);
            r.code = code(get(SCOPE), types->scopes, "scope");
            break;
        case KVG_TRANSFER_BEGIN:
        case KVG_TRANSFER_END: {
            r.transfer = present(get(TRANSFER), "transfer");
            const std::uint64_t total = all_pages();
            r.tokens = integer(TOKENS);
            if (r.kind == KVG_TRANSFER_BEGIN) {
                r.peer_pool = present(get(PEER_POOL), "peer_pool");
                if (pages(*types, get(PEER_PAGES), "peer_pages", out.peer_runs) != total)
                    refuse("peer_pages", " names not as many pages as pages does");
                r.peer_pages = {out.peer_runs.data(), static_cast<std::uint32_t>(out.peer_runs.size())};
            } else {
                r.code = code(get(SIDE), types->sides, "side");
                r.status = code(get(STATUS), types->statuses, "status");
            }
            if (get(DIGESTS) != Py_None) {
                r.flags = KVG_HAS_DIGESTS;
                r.digest_count = digests(get(DIGESTS), total, out.digests);
                r.digests = out.digests;
            }
            break;
        }
        case KVG_READ:
            all_pages();
            r.tokens = integer(TOKENS);
            break;
        case KVG_ALLOC:
        case KVG_FREE:
        case KVG_CACHE:
        case KVG_SCRUB:
        case KVG_REFUSE:
            all_pages();
            break;
        case KVG_REQUEST_END:
            r.code = code(get(OUTCOME), types->outcomes, "outcome");
            break;
        case KVG_RESPOND:
            r.extra = integer(STATUS);
            r.tokens = integer(TOKENS);
            if (!PyBool_Check(get(FINAL))) refuse("final", " is not a boolean");
            if (get(FINAL) == Py_True) r.flags = KVG_FINAL;
            break;
    }
    // The header, the ids and the counts need less than the 16 KiB.
    const std::size_t tail = 8 * (std::size_t{r.pages.runs()} + r.peer_pages.runs()) + r.digests.size();
    if (tail > KVG_MAX_RECORD_BYTES - 16384) refuse("pages", " and digests are more than a record holds, 64 MiB");
}

namespace {

PyObject* text_of(std::string_view text) {
    return PyUnicode_DecodeUTF8(text.data(), static_cast<Py_ssize_t>(text.size()), nullptr);
}

PyObject* none() { return Py_NewRef(Py_None); }

PyObject* text_or_none(std::string_view text) { return text.empty() ? none() : text_of(text); }

PyObject* integer_of(std::uint64_t value) { return PyLong_FromUnsignedLongLong(value); }

PyObject* pages_of(const Types& types, const Pages& pages) {
    PyObject* runs = PyTuple_New(pages.runs());
    for (std::uint32_t i = 0; runs != nullptr && i < pages.runs(); ++i) {
        const Pages::Run run = pages.run(i);
        PyObject* pair = Py_BuildValue("(KK)", static_cast<unsigned long long>(run.first),
                                       static_cast<unsigned long long>(run.stop()));
        if (pair == nullptr)
            Py_CLEAR(runs);
        else
            PyTuple_SET_ITEM(runs, i, pair);
    }
    if (runs == nullptr) return nullptr;
    PyObject* set = PyObject_CallOneArg(reinterpret_cast<PyObject*>(types.page_set), runs);
    Py_DECREF(runs);
    return set;
}

PyObject* digests_of(const Record& r) {
    if (!(r.flags & KVG_HAS_DIGESTS)) return none();
    PyObject* all = PyTuple_New(r.digest_count);
    std::string_view rest = r.digests;
    for (std::uint32_t i = 0; all != nullptr && i < r.digest_count; ++i) {
        const std::size_t comma = rest.find(',');
        PyObject* digest = text_of(rest.substr(0, comma));
        rest = comma == rest.npos ? std::string_view{} : rest.substr(comma + 1);
        if (digest == nullptr)
            Py_CLEAR(all);
        else
            PyTuple_SET_ITEM(all, i, digest);
    }
    return all;
}

PyObject* member(const Codes& codes, std::uint8_t code) { return Py_NewRef(codes.members[code]); }

PyObject* value_of(const Types& types, const Record& r, Field field) {
    switch (field) {
        case STREAM: return text_of(r.stream);
        case EPOCH: return integer_of(r.epoch);
        case SEQ: return integer_of(r.seq);
        case TIME: return integer_of(r.time_ns);
        case REQUEST: return text_or_none(r.request);
        case TENANT: return text_or_none(r.tenant);
        case POOL: return text_of(r.pool);
        case PAGES: return r.kind == KVG_POOL ? integer_of(r.tokens) : pages_of(types, r.pages);
        case TOKENS: return r.kind == KVG_SHARE && !(r.flags & KVG_HAS_TOKENS) ? none() : integer_of(r.tokens);
        case PAGE_TOKENS: return integer_of(r.extra);
        case PAGE_BYTES: return integer_of(r.page_bytes);
        case ROLE: return member(types.roles, r.code);
        case CONTEXT_LIMIT: return integer_of(r.context_limit);
        case MAX_TOKENS: return r.flags & KVG_HAS_MAX ? integer_of(r.extra) : none();
        case SHARE_FROM: return text_or_none(r.share_from);
        case SCOPE: return member(types.scopes, r.code);
        case TRANSFER: return text_of(r.transfer);
        case PEER_POOL: return text_of(r.peer_pool);
        case PEER_PAGES: return pages_of(types, r.peer_pages);
        case DIGESTS: return digests_of(r);
        case SIDE: return member(types.sides, r.code);
        case STATUS: return r.kind == KVG_RESPOND ? integer_of(r.extra) : member(types.statuses, r.status);
        case OUTCOME: return member(types.outcomes, r.code);
        case FINAL: return PyBool_FromLong(r.flags & KVG_FINAL);
        case FIELDS: break;
    }
    return none();
}

}  // namespace

PyObject* to_python(const Record& record) {
    const Types* types = Types::get();
    if (types == nullptr) return nullptr;
    const auto& body = kKinds[record.kind].body;
    std::array<PyObject*, FIELDS> values{};
    std::size_t n = 0;
    bool good = true;
    const auto give = [&](Field field) {
        if (good) good = (values[n++] = value_of(*types, record, field)) != nullptr;
    };
    for (int f = 0; f < HEADER_FIELDS; ++f) give(static_cast<Field>(f));
    for (const Field f : body) give(f);
    PyObject* made = good ? PyObject_Vectorcall(reinterpret_cast<PyObject*>(types->types[record.kind]), values.data(),
                                                0, types->keywords[record.kind])
                          : nullptr;
    for (std::size_t i = 0; i < n; ++i) Py_XDECREF(values[i]);
    return made;
}

}  // namespace kvguard
