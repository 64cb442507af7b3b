#include "trace.hpp"

#include <algorithm>
#include <cmath>
#include <cstdio>

namespace kvguard::bench {

namespace {

constexpr std::uint32_t kPageTokens = 16;
constexpr std::uint32_t kChunkPages = 8;
constexpr std::uint32_t kMaxPromptPages = 256;
constexpr std::uint32_t kMaxGrowths = 64;
constexpr std::uint32_t kMeanGrowths = 4;
constexpr std::uint32_t kMaxInFlight = 32;  // of a prefill worker
constexpr std::uint32_t kMaxHeldUp = 64;    // records
constexpr std::size_t kTouchedAtOnce = 4096;
constexpr std::uint32_t kRouter = 0;  // its stream

void to_runs(std::vector<std::uint64_t>& runs, const std::uint32_t* pages, std::size_t count) {
    runs.clear();
    for (std::size_t i = 0; i < count;) {
        std::size_t j = i + 1;
        while (j < count && pages[j] == pages[i] + (j - i)) ++j;
        runs.push_back(kvg_run(pages[i], j - i));
        i = j;
    }
}

}  // namespace

Trace::Trace(const Shape& shape) : shape_(shape), random_(shape.seed * 0x9e3779b97f4a7c15) {
    names_.emplace_back("router");
    const std::uint32_t half = std::max(1u, shape.workers / 2);
    const auto pages = static_cast<std::uint32_t>(shape.pages / (2 * half));
    workers_.resize(std::size_t{2} * half);
    for (std::uint32_t i = 0; i < workers_.size(); ++i) {
        Worker& w = workers_[i];
        w.stream = i + 1;
        w.pages = pages;
        names_.push_back((i < half ? "prefill-" : "decode-") + std::to_string(i % half));
        std::vector<std::uint32_t> order(pages);
        for (std::uint32_t p = 0; p < pages; ++p) order[p] = shape.policy == HandOut::lifo ? pages - 1 - p : p;
        if (shape.policy == HandOut::shuffled)
            for (std::uint32_t p = pages; p > 1; --p) std::swap(order[p - 1], order[pick(p)]);
        w.free.assign(order.begin(), order.end());
        if (i < half) w.cache.resize(shape.tenants);
    }
    seqs_.resize(names_.size());
    held_.resize(names_.size());
    double sum = 0;
    for (std::uint32_t t = 0; t < shape.tenants; ++t) {
        tenants_.push_back("tenant-" + std::to_string(t));
        popularity_.push_back(sum += 1.0 / (t + 1));
    }
    requests_.resize(shape.live);
}

std::uint64_t Trace::random() {
    std::uint64_t z = random_ += 0x9e3779b97f4a7c15;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9;
    z = (z ^ z >> 27) * 0x94d049bb133111eb;
    return z ^ z >> 31;
}

void Trace::fill(Rows& out, std::uint64_t records) {
    out_ = &out;
    if (seqs_[kRouter] == 0) {
        for (std::uint32_t stream = 0; stream < names_.size(); ++stream) {
            Record pool = of(KVG_POOL, stream, nullptr);
            const bool router = stream == kRouter;
            const std::uint32_t pages = router ? 0 : workers_[stream - 1].pages;
            pool.code = router ? KVG_ROUTER : stream <= workers_.size() / 2 ? KVG_PREFILL : KVG_DECODE;
            pool.tokens = pages;
            pool.extra = kPageTokens;
            pool.page_bytes = router ? 0 : 65536;
            pool.context_limit = std::uint64_t{workers_[0].pages} * kPageTokens;
            emit(pool, stream);
        }
    }
    const std::uint64_t enough = mix_.records + records;
    while (mix_.records < enough) step(pick(shape_.live));
}

void Trace::touch(Rows& out) {
    out_ = &out;
    Request warm;
    warm.tenant = 0;
    for (Worker& w : workers_) {
        warm.id = "touch-" + names_[w.stream];
        std::vector<std::uint32_t> pages(w.free.begin(), w.free.end());
        std::sort(pages.begin(), pages.end());
        for (std::size_t at = 0; at < pages.size(); at += kTouchedAtOnce) {
            const std::size_t count = std::min(kTouchedAtOnce, pages.size() - at);
            for (const kvg_kind kind : {KVG_ALLOC, KVG_WRITE, KVG_FREE}) {
                Record record = of(kind, w.stream, &warm);
                name(record, pages.data() + at, count);
                if (kind == KVG_WRITE) record.tokens = count * kPageTokens;
                emit(record, w.stream);
            }
        }
        end_request(w.stream, warm, KVG_FINISHED);
    }
}

void Trace::step(std::uint32_t index) {
    Request& r = requests_[index];
    switch (r.step) {
        case Step::arrive:
            arrive(r);
            r.step = Step::prefill;
            break;
        case Step::prefill:
            if (start_prefill(r)) r.step = Step::chunk;
            break;
        case Step::chunk:
            if (r.aborts) return abort(r);
            chunk(r);
            if (r.written == r.tokens) r.step = Step::reserve;
            break;
        case Step::reserve: {
            Worker& w = workers_[r.decode];
            if (!take(w, r.tokens / kPageTokens + 1, r.target)) return;
            Record alloc = of(KVG_ALLOC, w.stream, &r);
            name(alloc, r.target.data(), r.target.size());
            emit(alloc, w.stream);
            r.step = Step::begin;
            break;
        }
        case Step::begin: return begin(index);
        case Step::flight: return land(index);
        case Step::settle:
            settle(r);
            r.step = Step::first;
            break;
        case Step::first:
            first(r);
            r.step = r.growths != 0 ? Step::grow : Step::end;
            break;
        case Step::grow:
            if (!grow(r) || --r.growths == 0) r.step = Step::end;
            break;
        case Step::end:
            end(r);
            r.step = Step::arrive;
            break;
    }
}

void Trace::arrive(Request& r) {
    char id[40];
    std::snprintf(id, sizeof id, "cmpl-%016llx%08llx", static_cast<unsigned long long>(random()),
                  static_cast<unsigned long long>(mix_.requests));
    ++mix_.requests;
    const auto exponential = [this](double mean) { return -mean * std::log((random() >> 11) * 0x1p-53 + 0x1p-54); };
    const double place = (random() >> 11) * 0x1p-53 * popularity_.back();
    const auto tenant = std::upper_bound(popularity_.begin(), popularity_.end(), place) - popularity_.begin();
    const std::uint32_t half = static_cast<std::uint32_t>(workers_.size()) / 2;
    const std::uint32_t limit = std::min(kMaxPromptPages, workers_[0].pages / 4) * kPageTokens;
    r.id = id;
    r.tenant = std::min(static_cast<std::uint32_t>(tenant), shape_.tenants - 1);
    r.prefill = pick(half);
    r.decode = half + pick(half);
    r.tokens = std::min(limit, 1 + static_cast<std::uint32_t>(exponential(shape_.prompt_pages * kPageTokens)));
    r.growths = std::min(kMaxGrowths, static_cast<std::uint32_t>(exponential(kMeanGrowths)));
    r.written = r.shared = r.piece = 0;
    r.digests = pick(2) == 0;
    r.aborts = pick(64) == 0;
    r.released = false;
    r.source.clear();
    r.target.clear();
    r.pieces = pick(4) == 0 && r.tokens > kPageTokens ? 2 : 1;
    for (const std::uint32_t stream : {kRouter, workers_[r.prefill].stream, workers_[r.decode].stream}) {
        Record admit = of(KVG_ADMIT, stream, &r);
        admit.tokens = r.tokens;
        admit.extra = (r.growths + 1) * kPageTokens;
        admit.flags = KVG_HAS_MAX;
        emit(admit, stream);
    }
}

bool Trace::start_prefill(Request& r) {
    Worker& w = workers_[r.prefill];
    Cached& prefix = w.cache[r.tenant];
    const auto length = static_cast<std::uint32_t>(prefix.pages.size());
    // A hit leaves at least the last token to be computed. One request in four shares, however many could: the mix
    // must not change with the number of tenants.
    const bool hit = length != 0 && length * kPageTokens < r.tokens && mix_.shared * 4 < mix_.requests;
    const std::uint32_t need = (r.tokens + kPageTokens - 1) / kPageTokens - (hit ? length : 0);
    while (w.free.size() < need) {
        if (!evict(w, r)) return false;
        if (hit && prefix.pages.empty()) return false;  // it was its own that went
    }
    if (hit) {
        ++prefix.users;
        ++mix_.shared;
        r.shared = length;
        r.source = prefix.pages;
        r.written = length * kPageTokens;
        Record share = of(KVG_SHARE, w.stream, &r);
        name(share, r.source.data(), length);
        emit(share, w.stream);
    }
    take(w, need, r.source);
    Record alloc = of(KVG_ALLOC, w.stream, &r);
    name(alloc, r.source.data() + r.shared, need);
    emit(alloc, w.stream);
    return true;
}

void Trace::chunk(Request& r) {
    const std::uint32_t stream = workers_[r.prefill].stream;
    const std::uint32_t done = r.written / kPageTokens;  // whole pages: only the last chunk ends within one
    if (r.written != 0) {
        Record read = of(KVG_READ, stream, &r);
        read.tokens = r.written;
        name(read, r.source.data(), done);
        emit(read, stream);
    }
    r.written = std::min(r.tokens, r.written + kChunkPages * kPageTokens);
    Record write = of(KVG_WRITE, stream, &r);
    write.tokens = r.written;
    name(write, r.source.data() + done, (r.written + kPageTokens - 1) / kPageTokens - done);
    emit(write, stream);
}

void Trace::abort(Request& r) {
    Worker& w = workers_[r.prefill];
    ++mix_.aborted;
    end_request(w.stream, r, KVG_ABORTED);
    give(w, r, r.source.data() + r.shared, r.source.size() - r.shared);
    leave(r);
    end_request(workers_[r.decode].stream, r, KVG_ABORTED);
    respond(r, 499, 0, true);
    end_request(kRouter, r, KVG_ABORTED);
    r.step = Step::arrive;
}

void Trace::begin(std::uint32_t index) {
    Request& r = requests_[index];
    Worker& w = workers_[r.prefill];
    if (w.in_flight.size() >= kMaxInFlight) land(w.in_flight.front());
    w.in_flight.push_back(index);
    r.step = Step::flight;
    begin_piece(r);
}

void Trace::begin_piece(Request& r) {
    const std::uint32_t stream = workers_[r.prefill].stream;
    const std::size_t from = r.piece == 0 ? 0 : r.cut();
    const std::size_t to = r.pieces == 1 || r.piece == 1 ? r.source.size() : r.cut();
    Record begin = of(KVG_TRANSFER_BEGIN, stream, &r);
    begin.peer_pool = names_[workers_[r.decode].stream];
    begin.tokens = (to == r.source.size() ? r.tokens : to * kPageTokens) - from * kPageTokens;
    name(begin, r.source.data() + from, to - from);
    name_peer(begin, r.target.data() + from, to - from);
    if (r.digests) digest(begin, r, from, to - from);
    emit(begin, stream);
}

// The bytes are there: the sender's end, the next piece if there is one, or the receiver's end, in either order.
void Trace::land(std::uint32_t index) {
    Request& r = requests_[index];
    Worker& w = workers_[r.prefill];
    const auto sent = [&] {
        const std::size_t from = r.piece == 0 ? 0 : r.cut();
        const std::size_t to = r.pieces == 1 || r.piece == 1 ? r.source.size() : r.cut();
        Record end = of(KVG_TRANSFER_END, w.stream, &r);
        end.code = KVG_SEND;
        end.tokens = (to == r.source.size() ? r.tokens : to * kPageTokens) - from * kPageTokens;
        name(end, r.source.data() + from, to - from);
        emit(end, w.stream);
    };
    if (r.pieces == 2 && r.piece == 0) {
        sent();
        r.piece = 1;
        return begin_piece(r);
    }
    const bool receiver_first = pick(4) == 0;
    if (!receiver_first) sent();
    const std::uint32_t piece = r.piece, pieces = r.pieces;
    r.piece = 0, r.pieces = 1;  // the receiver ends all pieces at once, by the bare id
    const std::uint32_t receiver = workers_[r.decode].stream;
    Record end = of(KVG_TRANSFER_END, receiver, &r);
    end.code = KVG_RECV;
    end.tokens = r.tokens;
    name(end, r.target.data(), r.source.size());
    if (r.digests) digest(end, r, 0, r.source.size());
    emit(end, receiver);
    r.piece = piece, r.pieces = pieces;
    if (receiver_first) sent();
    w.in_flight.erase(std::find(w.in_flight.begin(), w.in_flight.end(), index));
    r.step = Step::settle;
}

// Prefill is done with the request: its prefix may go to the cache, the rest goes back.
void Trace::settle(Request& r) {
    Worker& w = workers_[r.prefill];
    const bool ends_first = pick(2) == 0;
    if (ends_first) end_request(w.stream, r, KVG_FINISHED);
    std::uint32_t* own = r.source.data() + r.shared;
    std::size_t count = r.source.size() - r.shared;
    Cached& prefix = w.cache[r.tenant];
    const std::uint32_t length = prefix_pages(r.tenant);
    // One request in eight caches its prefix, in place of what its tenant had there, for the same reason as above.
    if (r.shared == 0 && length * kPageTokens < r.tokens && prefix.users == 0 && pick(8) == 0) {
        if (!prefix.pages.empty()) {
            give(w, r, prefix.pages.data(), prefix.pages.size());
            w.cached_pages -= static_cast<std::uint32_t>(prefix.pages.size());
            w.cached.erase(std::find(w.cached.begin(), w.cached.end(), r.tenant));
            prefix.pages.clear();
        }
        while (w.cached_pages + length > w.pages / 4 && evict(w, r)) continue;
        if (w.cached_pages + length <= w.pages / 4) {
            prefix.pages.assign(own, own + length);
            w.cached.push_back(r.tenant);
            w.cached_pages += length;
            Record cache = of(KVG_CACHE, w.stream, &r);
            name(cache, own, length);
            emit(cache, w.stream);
            own += length;
            count -= length;
        }
    }
    give(w, r, own, count);
    leave(r);
    if (!ends_first) end_request(w.stream, r, KVG_FINISHED);
}

void Trace::first(Request& r) {
    const std::uint32_t stream = workers_[r.decode].stream;
    Record write = of(KVG_WRITE, stream, &r);
    write.tokens = r.tokens + 1;
    name(write, &r.target.back(), 1);
    emit(write, stream);
    Record read = of(KVG_READ, stream, &r);
    read.tokens = r.tokens + 1;
    name(read, r.target.data(), r.target.size());
    emit(read, stream);
    respond(r, 200, 1, false);
}

// The sequence has filled its last page: one more. False when there is none.
bool Trace::grow(Request& r) {
    Worker& w = workers_[r.decode];
    const auto length = static_cast<std::uint32_t>(r.target.size()) * kPageTokens;
    if (!take(w, 1, r.target)) return false;
    Record alloc = of(KVG_ALLOC, w.stream, &r);
    name(alloc, &r.target.back(), 1);
    emit(alloc, w.stream);
    Record write = of(KVG_WRITE, w.stream, &r);
    write.tokens = length + 1;
    name(write, &r.target.back(), 1);
    emit(write, w.stream);
    Record read = of(KVG_READ, w.stream, &r);
    read.tokens = length + 1;
    name(read, r.target.data(), r.target.size());
    emit(read, w.stream);
    return true;
}

void Trace::end(Request& r) {
    Worker& w = workers_[r.decode];
    respond(r, 200, static_cast<std::uint32_t>(r.target.size()) * kPageTokens - r.tokens, true);
    end_request(w.stream, r, KVG_FINISHED);
    give(w, r, r.target.data(), r.target.size());
    end_request(kRouter, r, KVG_FINISHED);
}

bool Trace::take(Worker& w, std::size_t count, std::vector<std::uint32_t>& pages) {
    if (w.free.size() < count) return false;
    for (; count != 0; --count) {
        if (shape_.policy == HandOut::lifo) {
            pages.push_back(w.free.back());
            w.free.pop_back();
        } else {
            pages.push_back(w.free.front());
            w.free.pop_front();
        }
    }
    return true;
}

// Frees the prefix that was cached longest and that nobody uses, on behalf of the request that needs the room.
bool Trace::evict(Worker& w, const Request& r) {
    for (std::size_t i = 0; i < w.cached.size(); ++i) {
        Cached& entry = w.cache[w.cached[i]];
        if (entry.users != 0) continue;
        give(w, r, entry.pages.data(), entry.pages.size());
        w.cached_pages -= static_cast<std::uint32_t>(entry.pages.size());
        entry.pages.clear();
        w.cached.erase(w.cached.begin() + static_cast<std::ptrdiff_t>(i));
        return true;
    }
    return false;
}

void Trace::give(Worker& w, const Request& r, const std::uint32_t* pages, std::size_t count) {
    if (count == 0) return;
    Record free = of(KVG_FREE, w.stream, &r);
    name(free, pages, count);
    emit(free, w.stream);
    if (pick(8) == 0) {
        Record scrub = of(KVG_SCRUB, w.stream, nullptr);
        name(scrub, pages, count);
        emit(scrub, w.stream);
    }
    if (shape_.policy == HandOut::lifo) {
        for (std::size_t i = count; i != 0; --i) w.free.push_back(pages[i - 1]);
    } else {
        w.free.insert(w.free.end(), pages, pages + count);
    }
}

void Trace::leave(Request& r) {
    if (r.shared != 0) --workers_[r.prefill].cache[r.tenant].users;
    r.shared = 0;
}

void Trace::end_request(std::uint32_t stream, const Request& r, kvg_outcome outcome) {
    Record end = of(KVG_REQUEST_END, stream, &r);
    end.code = outcome;
    emit(end, stream);
}

void Trace::respond(const Request& r, std::uint32_t status, std::uint32_t tokens, bool final) {
    Record answer = of(KVG_RESPOND, kRouter, &r);
    answer.extra = status;
    answer.tokens = tokens;
    if (final) answer.flags = KVG_FINAL;
    emit(answer, kRouter);
}

Record Trace::of(kvg_kind kind, std::uint32_t stream, const Request* r) {
    Record record;
    record.kind = kind;
    record.stream = names_[stream];
    record.epoch = 1;
    if (r != nullptr) {
        record.request = r->id;
        record.tenant = tenants_[r->tenant];
        if (kind == KVG_TRANSFER_BEGIN || kind == KVG_TRANSFER_END) {
            transfer_.assign("x-").append(r->id);
            if (r->pieces > 1) transfer_.append(r->piece == 0 ? "/0" : "/1");
            record.transfer = transfer_;
        }
    }
    return record;
}

void Trace::name(Record& record, const std::uint32_t* pages, std::size_t count) {
    to_runs(runs_, pages, count);
    record.pages = {runs_.data(), static_cast<std::uint32_t>(runs_.size())};
    mix_.pages += count;
    mix_.runs += runs_.size();
}

void Trace::name_peer(Record& record, const std::uint32_t* pages, std::size_t count) {
    to_runs(peer_runs_, pages, count);
    record.peer_pages = {peer_runs_.data(), static_cast<std::uint32_t>(peer_runs_.size())};
    mix_.pages += count;
    mix_.runs += peer_runs_.size();
}

// One digest of 16 bytes a page, the same on both sides.
void Trace::digest(Record& record, const Request& r, std::size_t first, std::size_t count) {
    constexpr char kHex[] = "0123456789abcdef";
    digests_.clear();
    for (std::size_t i = 0; i < count; ++i) {
        if (i != 0) digests_ += ',';
        std::uint64_t z = (first + i + 1) * 0x9e3779b97f4a7c15;
        for (const char c : r.id) z = (z ^ static_cast<unsigned char>(c)) * 0x100000001b3;
        for (int digit = 0; digit < 32; ++digit) digests_ += kHex[z >> (digit * 2) & 15];
    }
    record.digests = digests_;
    record.digest_count = static_cast<std::uint32_t>(count);
    record.flags |= KVG_HAS_DIGESTS;
}

void Trace::emit(Record& record, std::uint32_t stream) {
    time_ns_ += shape_.step_ns;
    record.time_ns = time_ns_;
    record.seq = seqs_[stream]++;
    ++mix_.records;
    ++mix_.kinds[record.kind];
    if (holding_ != 0)
        for (std::uint32_t s = 0; s < held_.size(); ++s)
            if (held_[s].until != 0 && held_[s].until <= mix_.records) release(s);
    Held& held = held_[stream];
    if (held.until == 0 && shape_.held_up_one_in != 0 && pick(shape_.held_up_one_in) == 0) {
        held.until = mix_.records + 1 + pick(kMaxHeldUp);
        ++holding_;
        ++mix_.held_up;
    }
    Rows& to = held.until != 0 ? held.rows : *out_;
    const std::size_t before = to.bytes.size();
    append(to, record);
    mix_.bytes += to.bytes.size() - before;
}

void Trace::release(std::uint32_t stream) {
    Held& held = held_[stream];
    out_->bytes += held.rows.bytes;
    out_->count += held.rows.count;
    held.rows.bytes.clear();
    held.rows.count = 0;
    held.until = 0;
    --holding_;
}

}  // namespace kvguard::bench
