#include "board.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <filesystem>
#include <utility>
#include <vector>

#include "blake2b.hpp"
#include "clock.hpp"

namespace kvguard {

namespace {

using board::kHeaderBytes;
using board::kLive;
using board::kRowBytes;
using board::kRowWords;
using board::word;

enum Header { kMagic, kVersion, kRequests, kStreams, kCreated, kPid, kHeartbeat, kClosed, kSaturated };
constexpr std::uint64_t kBoardVersion = 1;
constexpr std::uint64_t kMinRows = 8;
// Streams are counted as without a row up to this many: their names come from outside.
constexpr std::size_t kHomelessKnown = 4096;

std::uint64_t magic() {
    std::uint64_t value;
    std::memcpy(&value, "KVGBOARD", sizeof value);
    return value;
}

std::size_t bytes_of(std::uint64_t requests, std::uint64_t streams) {
    return kHeaderBytes + kRowBytes * (requests + streams);
}

bool are_rows(std::uint64_t rows) { return rows >= kMinRows && rows <= (1u << 30) && (rows & (rows - 1)) == 0; }

board::Key key_of(std::string_view id) { return blake2b_128(id); }

class Descriptor {
  public:
    explicit Descriptor(int number) : number_(number) {}
    ~Descriptor() {
        if (number_ >= 0) ::close(number_);
    }
    Descriptor(const Descriptor&) = delete;
    Descriptor& operator=(const Descriptor&) = delete;
    operator int() const { return number_; }

  private:
    int number_;
};

[[noreturn]] void cannot_be_made(const std::string& path, int error) {
    throw BoardError("board " + path + ": cannot be made: " + std::strerror(error));
}

// The directory of a path, made if it is missing, and seen to be one that others cannot write.
std::filesystem::path make_directory(const std::string& path) {
    namespace fs = std::filesystem;
    std::error_code error;
    const fs::path directory = fs::absolute(path, error).parent_path();
    fs::path made;
    for (const fs::path& part : directory) {
        made /= part;
        if (fs::is_directory(made, error)) continue;
        if (::mkdir(made.c_str(), 0755) != 0 && errno != EEXIST) cannot_be_made(path, errno);
    }
    struct stat info;
    if (::stat(directory.c_str(), &info) != 0) cannot_be_made(path, errno);
    if (!S_ISDIR(info.st_mode)) cannot_be_made(path, ENOTDIR);
    if ((info.st_mode & 022) != 0 && (info.st_mode & S_ISVTX) == 0)
        throw BoardError("board: others may write the directory " + directory.string() + "; make it mode 0755");
    return directory;
}

struct Mapping {
    std::uint64_t* words = nullptr;
    std::size_t bytes = 0;
};

// The board at the path, writable, so that its readers can be told; nothing if there is none.
Mapping map_old(const std::string& path) {
    const Descriptor file(::open(path.c_str(), O_RDWR | O_CLOEXEC | O_NONBLOCK));
    struct stat info;
    if (file < 0 || ::fstat(file, &info) != 0 || !S_ISREG(info.st_mode) || (info.st_mode & 022) != 0) return {};
    const auto bytes = static_cast<std::size_t>(info.st_size);
    if (bytes < kHeaderBytes) return {};
    void* const at = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    if (at == MAP_FAILED) return {};
    auto* const words = static_cast<std::uint64_t*>(at);
    const std::uint64_t requests = words[kRequests], streams = words[kStreams];
    if (words[kMagic] == magic() && words[kVersion] == kBoardVersion && are_rows(requests) && are_rows(streams) &&
        bytes >= bytes_of(requests, streams))
        return {words, bytes};
    ::munmap(at, bytes);
    return {};
}

}  // namespace

BoardWriter::BoardWriter(std::string path, std::uint64_t* words, std::size_t bytes, std::size_t requests,
                         std::size_t streams)
    : path_(std::move(path)),
      words_(words),
      bytes_(bytes),
      requests_(words + kHeaderBytes / 8, requests),
      streams_(words + kHeaderBytes / 8 + requests * kRowWords, streams) {}

BoardWriter::~BoardWriter() {
    // Not closed by who owns it: a process that dies leaves its board as it stands, and so does this.
    if (words_ != nullptr) ::munmap(words_, bytes_);
}

std::unique_ptr<BoardWriter> BoardWriter::create(const std::string& path, std::uint64_t requests,
                                                 std::uint64_t streams) {
    for (const auto& [name, rows] : {std::pair{"requests", requests}, std::pair{"streams", streams}})
        if (!are_rows(rows))
            throw std::invalid_argument(std::string(name) + " is " + std::to_string(rows) +
                                        ", not a power of two from 8 on");
    const std::filesystem::path directory = make_directory(path);
    const std::string name = std::filesystem::path(path).filename().string();
    const std::string fresh = (directory / ("." + name + "." + std::to_string(::getpid()) + ".new")).string();
    const std::size_t bytes = bytes_of(requests, streams);
    ::unlink(fresh.c_str());
    const Descriptor file(::open(fresh.c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0644));
    if (file < 0) cannot_be_made(path, errno);
    // Reserved now: a full memory file system is an error here, and a SIGBUS at a store later.
    int error = ::fchmod(file, 0644) != 0 ? errno : ::posix_fallocate(file, 0, static_cast<off_t>(bytes));
    void* at = MAP_FAILED;
    if (error == 0) {
        at = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
        if (at == MAP_FAILED) error = errno;
    }
    if (error != 0) {
        ::unlink(fresh.c_str());
        cannot_be_made(path, error);
    }
    auto* const words = static_cast<std::uint64_t*>(at);
    std::unique_ptr<BoardWriter> made(new BoardWriter(path, words, bytes, requests, streams));
    words[kVersion] = kBoardVersion;
    words[kRequests] = requests;
    words[kStreams] = streams;
    words[kCreated] = wall_ns();
    words[kPid] = static_cast<std::uint64_t>(::getpid());
    word(words + kMagic).store(magic(), std::memory_order_release);
    const Mapping old = map_old(path);
    if (old.words != nullptr) made->carry_over(old.words);
    made->heartbeat(monotonic_ns());
    if (::rename(fresh.c_str(), path.c_str()) != 0) {
        error = errno;
        ::unlink(fresh.c_str());
    }
    if (old.words != nullptr) {
        if (error == 0) word(old.words + kClosed).store(1, std::memory_order_release);
        ::munmap(old.words, old.bytes);
    }
    if (error != 0) cannot_be_made(path, error);
    return made;
}

void BoardWriter::carry_over(const std::uint64_t* old) {
    for (std::uint64_t i = 0; i < old[kRequests]; ++i) {
        const std::uint64_t* const row = old + kHeaderBytes / 8 + i * kRowWords;
        if (row[3] < kLive) continue;
        const board::Key key{row[1], row[2]};
        if (std::uint64_t* const place = requests_.place(key); place != nullptr)
            requests_.store(place, key, row[3], {row[4], row[5], row[6], row[7]});
    }
    count();
}

void BoardWriter::check_open() const {
    if (words_ == nullptr) throw BoardError("board " + path_ + ": is closed");
}

void BoardWriter::count() {
    verdicts_.store(requests_.rows().size(), std::memory_order_relaxed);
    saturated_.store(waiting_.size(), std::memory_order_relaxed);
    word(words_ + kSaturated).store(waiting_.size(), std::memory_order_release);
}

void BoardWriter::heartbeat(std::uint64_t now_ns) {
    check_open();
    word(words_ + kHeartbeat).store(now_ns, std::memory_order_release);
}

void BoardWriter::set_verdict(std::string_view request, Verdict verdict, std::string_view incident) {
    check_open();
    if (verdict == Verdict::allow) return;
    for (const char c : incident)
        if (static_cast<unsigned char>(c) >= 0x80) throw std::invalid_argument("an incident id is not ASCII");
    if (incident.size() > kMaxIncidentBytes)
        throw std::invalid_argument("incident id '" + std::string(incident) + "' is longer than 24 bytes");
    set(key_of(request), verdict, incident);
    count();
}

void BoardWriter::set(const board::Key& key, Verdict verdict, std::string_view incident) {
    std::uint64_t* const row = requests_.place(key);
    if (row == nullptr) {
        const auto known = waiting_for_.find(key);
        if (known == waiting_for_.end())
            waiting_for_[key] = waiting_.insert(waiting_.end(), {key, verdict, std::string(incident)});
        else if (verdict >= known->second->verdict)
            *known->second = {key, verdict, std::string(incident)};
        return;
    }
    const std::uint64_t state = kLive + static_cast<std::uint64_t>(verdict);
    if (requests_.find(key) != nullptr && word(row + 3).load(std::memory_order_relaxed) > state) return;
    char name[kMaxIncidentBytes] = {};
    std::memcpy(name, incident.data(), incident.size());
    board::Body body{wall_ns(), 0, 0, 0};
    std::memcpy(body.data() + 1, name, sizeof name);
    requests_.store(row, key, state, body);
}

void BoardWriter::clear(std::string_view request) {
    check_open();
    clear(key_of(request));
    count();
}

void BoardWriter::clear(const board::Key& key) {
    if (const auto known = waiting_for_.find(key); known != waiting_for_.end()) {
        waiting_.erase(known->second);
        waiting_for_.erase(known);
    }
    requests_.clear(key);
    while (!waiting_.empty() && requests_.place(waiting_.front().key) != nullptr) {
        const Waiting next = std::move(waiting_.front());
        waiting_.pop_front();
        waiting_for_.erase(next.key);
        set(next.key, next.verdict, next.incident);
    }
}

std::size_t BoardWriter::expire(std::uint64_t before_ns) {
    check_open();
    std::vector<board::Key> old;
    for (const auto& [key, row] : requests_.rows())
        if (word(row + 4).load(std::memory_order_relaxed) < before_ns) old.push_back(key);
    for (const board::Key& key : old) clear(key);
    count();
    return old.size();
}

void BoardWriter::advance(std::string_view stream, std::uint64_t epoch, std::int64_t seq) {
    check_open();
    auto known = stream_keys_.find(stream);
    if (known == stream_keys_.end()) {
        const board::Key key = key_of(stream);
        const bool has_row = streams_.place(key) != nullptr;
        if (has_row) {
            homeless_.erase(key);
            known = stream_keys_.emplace(stream, key).first;
        } else if (homeless_.size() < kHomelessKnown) {
            homeless_.insert(key);
        }
        without_row_.store(homeless_.size(), std::memory_order_relaxed);
        if (!has_row) return;
    }
    const board::Key& key = known->second;
    streams_.store(streams_.place(key), key, kLive, {epoch, static_cast<std::uint64_t>(seq), 0, 0});
}

void BoardWriter::forget_stream(std::string_view stream) {
    check_open();
    const auto known = stream_keys_.find(stream);
    if (known == stream_keys_.end()) return;
    streams_.clear(known->second);
    stream_keys_.erase(known);
}

void BoardWriter::close() {
    if (words_ == nullptr) return;
    word(words_ + kClosed).store(1, std::memory_order_release);
    ::munmap(words_, bytes_);
    words_ = nullptr;
}

}  // namespace kvguard
