#include "journal.hpp"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <stdexcept>

#include "journal_format.hpp"
#include "journal_state.hpp"

namespace kvguard {

using journal::Entry;
using journal::put;

namespace {

// What may wait for a disk that takes nothing; beyond it the file is written anew from what is live.
constexpr std::size_t kMaxGathered = 8u << 20;
constexpr std::chrono::seconds kRewriteEvery{1};  // while that fails

[[noreturn]] void fail(const std::string& path, const std::string& what) {
    throw std::runtime_error("journal " + path + ": " + what);
}

void make_parents(const std::string& path) {
    for (std::size_t slash = path.find('/', 1); slash != std::string::npos; slash = path.find('/', slash + 1))
        if (::mkdir(path.substr(0, slash).c_str(), 0700) != 0 && errno != EEXIST)
            fail(path, "its directory cannot be made: " + std::string(std::strerror(errno)));
}

// False when not all of it could be written.
bool write_all(int file, std::string_view bytes) {
    while (!bytes.empty()) {
        const ssize_t written = ::write(file, bytes.data(), bytes.size());
        if (written < 0 && errno == EINTR) continue;
        if (written <= 0) return false;
        bytes.remove_prefix(static_cast<std::size_t>(written));
    }
    return true;
}

// False at the end of the file, or when it cannot be read.
bool read_all(int file, char* out, std::size_t size) {
    while (size > 0) {
        const ssize_t got = ::read(file, out, size);
        if (got < 0 && errno == EINTR) continue;
        if (got <= 0) return false;
        out += got;
        size -= static_cast<std::size_t>(got);
    }
    return true;
}

}  // namespace

struct Journal::Impl {
    std::string path;
    std::uint64_t limit = 0;
    int file = -1;
    std::uint64_t size = 0;  // of the file, up to the last whole frame
    std::uint64_t threshold = 0;  // beyond it the file is written anew
    journal::State state;
    std::string gathered;  // entries that the file does not have
    std::string frame;
    bool stale = false;  // what was gathered was too much: the file has to be written anew
    std::chrono::steady_clock::time_point next_rewrite{};
    std::uint64_t failures = 0, rewrites = 0, cut_off = 0;

    ~Impl() {
        if (file >= 0) ::close(file);
    }

    // The stream's number, its entry written first; -1: there are too many.
    std::int64_t on(std::string_view stream) {
        bool made = false;
        const std::int64_t number = state.stream(stream, made);
        if (made) {
            put(gathered, Entry::stream);
            put(gathered, stream);
        }
        return number;
    }

    void lock(int descriptor) const {
        if (::flock(descriptor, LOCK_EX | LOCK_NB) != 0)
            fail(path, "another guard has it; stop that one or give journal.path");
    }

    void open() {
        make_parents(path);
        for (;;) {
            file = ::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600);
            if (file < 0) fail(path, "cannot be opened: " + std::string(std::strerror(errno)));
            lock(file);
            // One that had it may have put a new file in its place before this lock was had.
            struct stat mine {}, there {};
            if (::fstat(file, &mine) != 0) fail(path, std::strerror(errno));
            if (!S_ISREG(mine.st_mode)) fail(path, "is not a file");
            if (::stat(path.c_str(), &there) == 0 && mine.st_ino == there.st_ino && mine.st_dev == there.st_dev) break;
            ::close(file);
        }
        read();
    }

    void read() {
        const off_t end = ::lseek(file, 0, SEEK_END);
        ::lseek(file, 0, SEEK_SET);
        char magic[journal::kMagic.size()];
        const std::size_t some = std::min<std::size_t>(static_cast<std::size_t>(std::max<off_t>(end, 0)), sizeof magic);
        if (!read_all(file, magic, some)) fail(path, "cannot be read: " + std::string(std::strerror(errno)));
        if (std::string_view(magic, some) != journal::kMagic.substr(0, some))
            fail(path, "is not this guard's journal: move it away, or give another journal.path");
        if (some < sizeof magic) {
            size = 0;
            return;
        }
        size = sizeof magic;
        std::string payload;
        char header[journal::kFrameHeader];
        while (read_all(file, header, sizeof header)) {
            std::uint32_t length = 0, check = 0;
            std::memcpy(&length, header, 4);
            std::memcpy(&check, header + 4, 4);
            // A length beyond the file's end must not cost memory.
            if (length > journal::kMaxFrame || length > static_cast<std::uint64_t>(end) - size) break;
            payload.resize(length);
            if (!read_all(file, payload.data(), length) || journal::check_of(length, payload) != check) break;
            if (!state.apply(payload)) break;
            size += sizeof header + length;
        }
        cut_off = static_cast<std::uint64_t>(end) - size;
    }

    // Goes on in the file as it is, without what stands behind the last whole frame.
    bool carry_on() {
        if (::ftruncate(file, static_cast<off_t>(size)) != 0) return false;
        if (::lseek(file, static_cast<off_t>(size), SEEK_SET) < 0) return false;
        if (size == 0) {
            if (!write_all(file, journal::kMagic)) return false;
            size = journal::kMagic.size();
        }
        return true;
    }

    // Writes the file anew from what is live, beside the old one, and puts it in its place.
    bool rewrite() {
        const std::string beside = path + ".new";
        const int fresh = ::open(beside.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC | O_NOFOLLOW, 0600);
        if (fresh < 0) return false;
        std::string bytes(journal::kMagic);
        bytes += state.frames();
        if (::fchmod(fresh, 0600) != 0 || ::flock(fresh, LOCK_EX | LOCK_NB) != 0 || !write_all(fresh, bytes) ||
            ::rename(beside.c_str(), path.c_str()) != 0) {
            ::close(fresh);
            ::unlink(beside.c_str());
            return false;
        }
        ::close(file);
        file = fresh;
        size = bytes.size();
        threshold = std::max(limit, 2 * size);
        gathered.clear();
        stale = false;
        ++rewrites;
        return true;
    }

    bool flush() {
        if (gathered.size() > kMaxGathered) {
            gathered.clear();
            gathered.shrink_to_fit();
            stale = true;
        }
        if (stale || size + gathered.size() > threshold) {
            const auto now = std::chrono::steady_clock::now();
            if (now >= next_rewrite) {
                if (rewrite()) return true;
                ++failures;
                next_rewrite = now + kRewriteEvery;
            }
            if (stale) return false;
        }
        if (gathered.empty()) return true;
        frame.clear();
        journal::put_frame(frame, gathered);
        if (!write_all(file, frame)) {
            // Half a frame would hide all that comes after it.
            if (!carry_on()) stale = true;
            ++failures;
            return false;
        }
        size += frame.size();
        gathered.clear();
        return true;
    }
};

Journal::Journal() : impl_(std::make_unique<Impl>()) {}
Journal::~Journal() = default;

std::unique_ptr<Journal> Journal::open(const std::string& path, std::uint64_t limit_bytes, Restored& before,
                                       std::vector<std::string>& incidents) {
    std::unique_ptr<Journal> opened(new Journal);
    Impl& impl = *opened->impl_;
    impl.path = path;
    impl.limit = impl.threshold = limit_bytes;
    impl.open();
    impl.state.grow_old();
    impl.state.tell(before, incidents);
    if (!impl.rewrite()) {
        ++impl.failures;
        if (!impl.carry_on()) fail(path, "cannot be written: " + std::string(std::strerror(errno)));
    }
    return opened;
}

void Journal::pool(std::string_view id, std::string_view stream, std::uint64_t pages, std::uint64_t page_tokens,
                   std::uint8_t role) {
    const std::int64_t number = impl_->on(stream);
    if (number < 0 || !impl_->state.pool(id, static_cast<std::uint32_t>(number), pages, page_tokens, role)) return;
    std::string& out = impl_->gathered;
    put(out, Entry::pool);
    put(out, id);
    put(out, static_cast<std::uint64_t>(number));
    put(out, pages);
    put(out, page_tokens);
    put(out, role);
}

void Journal::epoch(std::string_view stream, std::uint64_t epoch) {
    const std::int64_t number = impl_->on(stream);
    if (number < 0) return;
    impl_->state.epoch(static_cast<std::uint32_t>(number), epoch);
    put(impl_->gathered, Entry::epoch);
    put(impl_->gathered, static_cast<std::uint64_t>(number));
    put(impl_->gathered, epoch);
}

void Journal::request(std::string_view request, std::string_view stream, std::string_view tenant) {
    const std::int64_t number = impl_->on(stream);
    if (number < 0 || !impl_->state.request(request, static_cast<std::uint32_t>(number), tenant)) return;
    std::string& out = impl_->gathered;
    put(out, Entry::request);
    put(out, static_cast<std::uint64_t>(number));
    put(out, std::uint64_t{0});
    put(out, request);
    put(out, tenant);
}

void Journal::ended(std::string_view request, std::string_view stream) {
    const std::int64_t number = impl_->on(stream);
    if (number < 0 || !impl_->state.ended(request, static_cast<std::uint32_t>(number))) return;
    put(impl_->gathered, Entry::ended);
    put(impl_->gathered, static_cast<std::uint64_t>(number));
    put(impl_->gathered, request);
}

void Journal::retired(std::string_view request) {
    if (!impl_->state.retired(request)) return;
    put(impl_->gathered, Entry::retired);
    put(impl_->gathered, request);
}

void Journal::watermark(std::string_view stream, std::uint64_t epoch, std::int64_t processed, std::uint64_t time_ns) {
    const std::int64_t number = impl_->on(stream);
    if (number < 0) return;
    const std::uint64_t judged = static_cast<std::uint64_t>(processed + 1);
    impl_->state.watermark(static_cast<std::uint32_t>(number), epoch, judged, time_ns);
    std::string& out = impl_->gathered;
    put(out, Entry::watermark);
    put(out, static_cast<std::uint64_t>(number));
    put(out, epoch);
    put(out, judged);
    put(out, time_ns);
}

void Journal::incident(std::string_view id, std::string_view text) {
    impl_->state.incident(id, text);
    put(impl_->gathered, Entry::incident);
    put(impl_->gathered, id);
    put(impl_->gathered, text);
}

void Journal::settled(std::string_view id) {
    if (!impl_->state.settled(id)) return;
    put(impl_->gathered, Entry::settled);
    put(impl_->gathered, id);
}

bool Journal::flush() { return impl_->flush(); }

std::uint64_t Journal::bytes() const { return impl_->size; }
std::uint64_t Journal::failures() const { return impl_->failures; }
std::uint64_t Journal::rewrites() const { return impl_->rewrites; }
std::uint64_t Journal::cut_off() const { return impl_->cut_off; }
std::uint64_t Journal::dropped() const { return impl_->state.dropped(); }
std::uint64_t Journal::requests() const { return impl_->state.requests(); }
std::uint64_t Journal::unsettled() const { return impl_->state.incidents(); }

}  // namespace kvguard
