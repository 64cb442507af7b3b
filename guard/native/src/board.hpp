// The guard's side of the verdict board. guard/act/board/layout.py says what its bytes are, and who reads them.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <list>
#include <memory>
#include <stdexcept>
#include <string>
#include <string_view>
#include <unordered_map>
#include <unordered_set>

#include "board_table.hpp"

namespace kvguard {

// A board that cannot be made or written; the text names the path and what is wrong.
struct BoardError final : std::runtime_error {
    using std::runtime_error::runtime_error;
};

// Lets a map of strings be asked with a view.
struct StringHash {
    using is_transparent = void;
    std::size_t operator()(std::string_view text) const { return std::hash<std::string_view>{}(text); }
};

// As guard.act.board.Verdict.
enum class Verdict : std::uint8_t { allow, quarantine, kill };

// Belongs to one thread; the counts may be read from any.
//
// Every store is seen by readers after those before it: verdicts first, then the watermark that vouches for them.
class BoardWriter {
  public:
    static constexpr std::size_t kMaxIncidentBytes = 24;

    // Makes a new board at `path`, with the verdicts of the one there, which is then closed. The directory is made if
    // it is missing. `requests`, `streams`: rows, powers of two from 8 on, or std::invalid_argument.
    static std::unique_ptr<BoardWriter> create(const std::string& path, std::uint64_t requests, std::uint64_t streams);
    ~BoardWriter();
    BoardWriter(const BoardWriter&) = delete;
    BoardWriter& operator=(const BoardWriter&) = delete;

    const std::string& path() const { return path_; }

    // Says that the ledger's round is done; CLOCK_MONOTONIC.
    void heartbeat(std::uint64_t now_ns);
    // Puts the verdict on the board, with the incident that explains it (ASCII, at most kMaxIncidentBytes, or
    // std::invalid_argument). A verdict is never weakened. One that finds no row waits for one, and meanwhile readers
    // see a guard that is not alive: what then happens is the engine's `on_timeout`.
    void set_verdict(std::string_view request, Verdict verdict, std::string_view incident);
    // Takes a request's row away: it is over, or an operator let it go.
    void clear(std::string_view request);
    // Clears the rows set before this time (CLOCK_REALTIME); they may be an earlier guard's. Returns how many.
    std::size_t expire(std::uint64_t before_ns);
    // Says that every record of the stream up to `seq` is judged; to be called after `set_verdict`.
    void advance(std::string_view stream, std::uint64_t epoch, std::int64_t seq);
    // Gives the stream's row back.
    void forget_stream(std::string_view stream);
    // Marks the board closed and lets go of it. The file stays, so that what is killed stays killed.
    void close();

    // Requests that have a row.
    std::uint64_t verdicts() const { return verdicts_.load(std::memory_order_relaxed); }
    // Verdicts that wait for a row; while there are any, readers do not count the guard as alive.
    std::uint64_t saturated() const { return saturated_.load(std::memory_order_relaxed); }
    // Streams whose watermark cannot be shown because every stream row is taken; who waits for one waits in vain and
    // follows its `on_timeout`.
    std::uint64_t streams_without_row() const { return without_row_.load(std::memory_order_relaxed); }

  private:
    struct Waiting {
        board::Key key;
        Verdict verdict;
        std::string incident;
    };

    BoardWriter(std::string path, std::uint64_t* words, std::size_t bytes, std::size_t requests, std::size_t streams);
    void carry_over(const std::uint64_t* old);
    void set(const board::Key& key, Verdict verdict, std::string_view incident);
    void clear(const board::Key& key);
    void count();
    void check_open() const;

    std::string path_;
    std::uint64_t* words_;  // null once closed
    std::size_t bytes_;
    board::Table requests_, streams_;
    std::list<Waiting> waiting_;  // longest waiting first
    std::unordered_map<board::Key, std::list<Waiting>::iterator, board::KeyHash> waiting_for_;
    std::unordered_map<std::string, board::Key, StringHash, std::equal_to<>> stream_keys_;  // of those with a row
    std::unordered_set<board::Key, board::KeyHash> homeless_;
    std::atomic<std::uint64_t> verdicts_{0}, saturated_{0}, without_row_{0};
};

}  // namespace kvguard
