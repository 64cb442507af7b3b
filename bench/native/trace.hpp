// Records of a prefill/decode engine at work, made fast enough to measure a ledger with: what tests/engine_model.py
// is for the tests. The engine is correct, so a ledger that finds anything in them is wrong.
//
// One router, prefill and decode workers, each a stream with a pool. `live` requests are under way at any time; each
// turn takes one of them one step further, whichever it is, so the streams' records mix as in life. Now and then a
// stream is held up for some records, so that a receiver's end may arrive before the sender's begin.
#pragma once

#include <cstdint>
#include <deque>
#include <string>
#include <string_view>
#include <vector>

#include "records.hpp"

namespace kvguard::bench {

// How an engine hands out its pages.
enum class HandOut : std::uint8_t {
    lifo,      // the page freed last goes first: a stack
    fifo,      // round robin over the whole pool: a queue, in the pool's order to begin with
    shuffled,  // a queue in random order: no two pages of a request are neighbours
};

struct Shape {
    std::uint64_t pages = 10'000;  // of all pools together
    std::uint32_t tenants = 2;     // a few are popular: the k-th has 1/k of the first one's requests
    std::uint32_t live = 100;
    std::uint32_t workers = 4;  // half of them prefill, half decode
    HandOut policy = HandOut::fifo;
    std::uint32_t prompt_pages = 8;     // mean
    std::uint64_t step_ns = 1000;       // between two records
    std::uint32_t held_up_one_in = 256;  // records after which a stream is held up; 0: never
    std::uint64_t seed = 1;
};

// What the records were, to tell one mix from another.
struct Mix {
    std::uint64_t records = 0, pages = 0, runs = 0, bytes = 0, kinds[KVG_KINDS] = {};
    std::uint64_t requests = 0, shared = 0, aborted = 0, held_up = 0;
};

class Trace {
  public:
    explicit Trace(const Shape& shape);

    // Appends at least `records` records to `out`, in the order in which they arrive. The first are the pools.
    void fill(Rows& out, std::uint64_t records);
    // Appends records that hand out, write and free every page of every pool once.
    void touch(Rows& out);
    // The time of the record made last.
    std::uint64_t time_ns() const { return time_ns_; }
    const Mix& mix() const { return mix_; }
    const std::vector<std::string>& streams() const { return names_; }

  private:
    struct Cached {
        std::vector<std::uint32_t> pages;
        std::uint32_t users = 0;
    };
    struct Worker {
        std::uint32_t stream = 0;
        std::uint32_t pages = 0;
        std::deque<std::uint32_t> free;
        std::vector<Cached> cache;            // of each tenant, the prefix that its prompts begin with; prefill only
        std::deque<std::uint32_t> cached;     // tenants that have one, the longest kept first
        std::uint32_t cached_pages = 0;
        std::deque<std::uint32_t> in_flight;  // requests whose transfer has begun, in order
    };
    enum class Step : std::uint8_t { arrive, prefill, chunk, reserve, begin, flight, settle, first, grow, end };
    struct Request {
        Step step = Step::arrive;
        std::uint32_t tenant = 0, prefill = 0, decode = 0;
        std::uint32_t tokens = 0, written = 0, growths = 0;
        std::uint32_t piece = 0, pieces = 1, shared = 0;
        bool digests = false, aborts = false, released = false;
        std::string id;
        std::vector<std::uint32_t> source, target;
        std::uint32_t cut() const { return static_cast<std::uint32_t>(source.size() + 1) / 2; }
    };
    struct Held {
        Rows rows;
        std::uint64_t until = 0;  // a count of records; 0: the stream is not held up
    };

    void step(std::uint32_t index);
    void arrive(Request& r);
    bool start_prefill(Request& r);
    void chunk(Request& r);
    void abort(Request& r);
    void begin(std::uint32_t index);
    void begin_piece(Request& r);
    void land(std::uint32_t index);
    void settle(Request& r);
    void first(Request& r);
    bool grow(Request& r);
    void end(Request& r);

    bool take(Worker& w, std::size_t count, std::vector<std::uint32_t>& pages);
    bool evict(Worker& w, const Request& r);
    void give(Worker& w, const Request& r, const std::uint32_t* pages, std::size_t count);
    void leave(Request& r);
    void end_request(std::uint32_t stream, const Request& r, kvg_outcome outcome);
    void respond(const Request& r, std::uint32_t status, std::uint32_t tokens, bool final);
    std::uint32_t prefix_pages(std::uint32_t tenant) const { return 1 + tenant % 4; }

    Record of(kvg_kind kind, std::uint32_t stream, const Request* r);
    void name(Record& record, const std::uint32_t* pages, std::size_t count);
    void name_peer(Record& record, const std::uint32_t* pages, std::size_t count);
    void digest(Record& record, const Request& r, std::size_t first, std::size_t count);
    void emit(Record& record, std::uint32_t stream);
    void release(std::uint32_t stream);

    std::uint64_t random();
    std::uint32_t pick(std::uint32_t n) { return static_cast<std::uint32_t>((random() >> 32) * n >> 32); }

    Shape shape_;
    std::uint64_t random_;
    std::uint64_t time_ns_ = 1'790'000'000'000'000'000;
    Mix mix_;
    Rows* out_ = nullptr;
    std::vector<std::string> names_;
    std::vector<std::string> tenants_;
    std::vector<double> popularity_;  // running sums
    std::vector<std::uint64_t> seqs_;
    std::vector<Held> held_;
    std::uint32_t holding_ = 0;
    std::vector<Worker> workers_;
    std::vector<Request> requests_;
    // What the record that is being made points to.
    std::vector<std::uint64_t> runs_, peer_runs_;
    std::string digests_, transfer_;
};

}  // namespace kvguard::bench
