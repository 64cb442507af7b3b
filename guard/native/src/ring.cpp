#include "ring.hpp"

#include <sys/prctl.h>

#include <algorithm>
#include <cstring>
#include <stdexcept>

#include "kvguard/ring.h"

namespace kvguard {

namespace {

constexpr std::size_t kTurn = 64;                          // records of one lane before the next has its turn
constexpr std::size_t kTakeBytes = std::size_t{16} << 20;  // of one `take`, about
constexpr std::int64_t kNapNs = 50'000;
constexpr std::int64_t kAwakeNs = 2'000'000;  // how long after a record the next is looked for without sleeping

std::int64_t monotonic_ns() {
    timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return std::int64_t{now.tv_sec} * 1'000'000'000 + now.tv_nsec;
}

timespec timespec_of(std::int64_t ns) {
    timespec t;
    t.tv_sec = static_cast<time_t>(ns / 1'000'000'000);
    t.tv_nsec = static_cast<long>(ns % 1'000'000'000);
    return t;
}

void nap(std::int64_t ns) {
    // The kernel's own slack is as long as a nap.
    thread_local const int slack = prctl(PR_SET_TIMERSLACK, 1000, 0, 0, 0);
    static_cast<void>(slack);
    const timespec t = timespec_of(std::max<std::int64_t>(ns, 0));
    nanosleep(&t, nullptr);
}

}  // namespace

struct RingReader::Impl {
    // What the reader alone knows of a lane; the file is only told. `lanes` may look at it from another thread.
    struct Place {
        kvg_lane* lane;
        std::uint64_t tail;
        std::uint64_t taken;
        std::uint64_t broken;

        void tell(std::uint64_t new_tail, std::uint64_t more_taken, std::uint64_t more_broken) {
            __atomic_store_n(&tail, new_tail, __ATOMIC_RELAXED);
            __atomic_store_n(&taken, taken + more_taken, __ATOMIC_RELAXED);
            __atomic_store_n(&broken, broken + more_broken, __ATOMIC_RELAXED);
            __atomic_store_n(&lane->taken, taken, __ATOMIC_RELAXED);
            __atomic_store_n(&lane->broken, broken, __ATOMIC_RELAXED);
            __atomic_store_n(&lane->tail, tail, __ATOMIC_RELEASE);
        }
    };

    kvg_ring ring{};
    std::vector<Place> places;
    std::size_t first = 0;  // the lane whose turn is next
    std::int64_t last_traffic = 0;
    std::atomic<bool> woken{false};

    ~Impl() { kvg_ring_unmap(&ring); }

    bool waiting() const {
        for (const Place& place : places)
            if (__atomic_load_n(&place.lane->head, __ATOMIC_ACQUIRE) != place.tail) return true;
        return false;
    }

    std::size_t take(Place& place, Rows& out, std::size_t limit);
};

RingReader::RingReader() : impl_(std::make_unique<Impl>()) {}
RingReader::~RingReader() = default;

std::unique_ptr<RingReader> RingReader::open(const std::string& path, std::uint32_t lanes, std::uint32_t rows) {
    if (path.find('\0') != path.npos) throw std::runtime_error("ring: its path holds a NUL");
    std::unique_ptr<RingReader> reader(new RingReader);
    kvg_ring& ring = reader->impl_->ring;
    const char* wrong = kvg_ring_map(&ring, path.c_str(), lanes, rows);
    std::string why = wrong != nullptr && errno != 0 ? std::string(": ") + std::strerror(errno) : "";
    if (wrong == nullptr && kvg_ring_lock(ring.fd, 0) != 0) {
        wrong = "is read by another guard";
        why = " (process " + std::to_string(ring.header->reader_pid) + "): give each guard a ring of its own";
    }
    if (wrong != nullptr) throw std::runtime_error("ring " + path + ": " + wrong + why);
    ring.header->reader_pid = static_cast<std::uint64_t>(getpid());
    for (std::uint32_t i = 0; i < ring.lanes; ++i) {
        kvg_lane* lane = kvg_ring_lane(&ring, i);
        reader->impl_->places.push_back({lane, __atomic_load_n(&lane->tail, __ATOMIC_ACQUIRE),
                                         __atomic_load_n(&lane->taken, __ATOMIC_RELAXED),
                                         __atomic_load_n(&lane->broken, __ATOMIC_RELAXED)});
    }
    return reader;
}

std::size_t RingReader::Impl::take(Place& place, Rows& out, std::size_t limit) {
    const std::uint64_t head = __atomic_load_n(&place.lane->head, __ATOMIC_ACQUIRE);
    const std::uint64_t whole = std::uint64_t{ring.rows} * KVG_ROW_BYTES;
    const char* const base = kvg_lane_rows(place.lane);
    std::uint64_t tail = place.tail;
    if (head == tail) {
        // Nobody else writes it, but a writer that found it wrong would never write again.
        if (__atomic_load_n(&place.lane->tail, __ATOMIC_RELAXED) != tail)
            __atomic_store_n(&place.lane->tail, tail, __ATOMIC_RELEASE);
        return 0;
    }
    if (head - tail > ring.rows) {
        // No writer does that. How much was lost nobody knows; a lane full is the most that was ever there.
        place.tell(head, 0, whole);
        return 0;
    }
    std::size_t taken = 0;
    std::uint64_t broken = 0;
    while (tail != head && taken < limit) {
        const std::uint64_t at = (tail & (ring.rows - 1)) * KVG_ROW_BYTES;
        // The writer may still change its bytes: what is decided on is read once, or from the copy.
        const auto bytes = __atomic_load_n(reinterpret_cast<const std::uint32_t*>(base + at), __ATOMIC_RELAXED);
        const std::uint64_t need = (std::uint64_t{bytes} + KVG_ROW_BYTES - 1) / KVG_ROW_BYTES;
        if (bytes < KVG_ROW_BYTES || need > head - tail) {
            // Where the next record begins is not known.
            broken += (head - tail) * KVG_ROW_BYTES;
            tail = head;
            break;
        }
        const std::size_t before = out.bytes.size();
        char* const copy = out.append(bytes);
        const std::uint64_t straight = std::min<std::uint64_t>(bytes, whole - at);
        std::memcpy(copy, base + at, straight);
        std::memcpy(copy + straight, base, bytes - straight);
        Record record;
        if (parse(copy, bytes, record) == nullptr && record.bytes.size() == bytes) {
            ++taken;
        } else {
            out.bytes.resize(before);
            --out.count;
            broken += need * KVG_ROW_BYTES;
        }
        tail += need;
    }
    place.tell(tail, taken, broken);
    return taken;
}

std::size_t RingReader::take(Rows& out, std::size_t limit) {
    Impl& in = *impl_;
    const std::size_t before = out.bytes.size();
    std::size_t taken = 0;
    for (bool more = true; more;) {
        more = false;
        for (std::size_t i = 0; i < in.places.size(); ++i) {
            if (taken >= limit || out.bytes.size() - before >= kTakeBytes) break;
            Impl::Place& place = in.places[in.first];
            in.first = (in.first + 1) % in.places.size();
            const std::size_t n = in.take(place, out, std::min(kTurn, limit - taken));
            taken += n;
            more = more || n > 0;
        }
        if (taken >= limit || out.bytes.size() - before >= kTakeBytes) break;
    }
    if (taken > 0) in.last_traffic = monotonic_ns();
    return taken;
}

std::atomic<std::uint32_t>* RingReader::doorbell() {
    static_assert(sizeof(std::atomic<std::uint32_t>) == sizeof(std::uint32_t));
    return reinterpret_cast<std::atomic<std::uint32_t>*>(&impl_->ring.header->doorbell);
}

void RingReader::wait(std::int64_t timeout_ns) {
    Impl& in = *impl_;
    kvg_ring_header* const header = in.ring.header;
    const std::int64_t end = monotonic_ns() + timeout_ns;
    while (!in.woken.exchange(false) && !in.waiting()) {
        const std::int64_t now = monotonic_ns();
        if (now >= end) return;
        if (now - in.last_traffic < kAwakeNs) {
            nap(std::min(kNapNs, end - now));
            continue;
        }
        const std::uint32_t rung = __atomic_load_n(&header->doorbell, __ATOMIC_SEQ_CST);
        __atomic_store_n(&header->sleeps, 1, __ATOMIC_SEQ_CST);
        __atomic_thread_fence(__ATOMIC_SEQ_CST);
        if (in.woken.load() || in.waiting()) {
            __atomic_store_n(&header->sleeps, 0, __ATOMIC_SEQ_CST);
            continue;
        }
        const timespec left = timespec_of(end - now);
        const long rc = syscall(SYS_futex, &header->doorbell, FUTEX_WAIT, rung, &left, nullptr, 0);
        const bool bell = rc == 0 || errno == EAGAIN;
        __atomic_store_n(&header->sleeps, 0, __ATOMIC_SEQ_CST);
        if (!bell) continue;
        // A bell that rings for nothing must not cost a core.
        if (!in.woken.exchange(false) && !in.waiting()) nap(std::min(kNapNs, std::max<std::int64_t>(end - now, 0)));
        return;
    }
}

void RingReader::wake() {
    impl_->woken.store(true);
    kvg_ring_knock(impl_->ring.header);
}

std::vector<RingReader::Lane> RingReader::lanes() const {
    std::vector<Lane> all;
    for (std::uint32_t i = 0; i < impl_->ring.lanes; ++i) {
        const Impl::Place& place = impl_->places[i];
        const kvg_lane* lane = place.lane;
        Lane said{};
        said.index = i;
        if (kvg_ring_locked(impl_->ring.fd, kvg_lane_offset(impl_->ring.rows, i))) {
            const std::int32_t pid = __atomic_load_n(&lane->pid, __ATOMIC_RELAXED);
            said.pid = pid != 0 ? pid : -1;
        }
        said.written = __atomic_load_n(&lane->written, __ATOMIC_RELAXED);
        said.dropped = __atomic_load_n(&lane->dropped, __ATOMIC_RELAXED);
        said.broken = __atomic_load_n(&place.broken, __ATOMIC_RELAXED);
        const std::uint64_t tail = __atomic_load_n(&place.tail, __ATOMIC_RELAXED);
        const std::uint64_t head = __atomic_load_n(&lane->head, __ATOMIC_ACQUIRE);
        said.waiting = std::min<std::uint64_t>(head - tail, impl_->ring.rows);
        const std::uint32_t bytes = __atomic_load_n(&lane->stream_bytes, __ATOMIC_RELAXED);
        said.stream.assign(lane->stream, std::min<std::uint32_t>(bytes, sizeof lane->stream));
        all.push_back(std::move(said));
    }
    return all;
}

}  // namespace kvguard
