// Records that a broken or hostile fleet might send, drawn out of the input, fed to a ledger with small limits: it never
// fails, keeps to its limits, and what it finds is well-formed.
#include "ledger/ledger.hpp"

#include <memory>
#include <string>

#include "fuzz.hpp"

namespace {

using kvguard::Ledger;
using kvguard::Record;

constexpr int kStreams = 5;
constexpr std::uint64_t kMs = 1'000'000;

// Small, so that their ends are reached.
kvguard::Settings draw_settings(fuzz::Draw& draw) {
    kvguard::Settings s;
    const std::uint8_t odd = draw.byte();
    s.window_ns = odd & 1 ? -1 : static_cast<std::int64_t>(draw.below(8) * kMs);
    s.leak_grace_ns = draw.below(4) * 8 * kMs;
    s.max_held = 1 + draw.below(24);
    s.restart_records = 1 + draw.below(4);
    s.max_ended = odd & 2 ? 2 : 64;
    s.max_streams = odd & 4 ? 2 : 64;
    s.max_pool_pages = odd & 8 ? 16 : 2048;
    s.max_pools = odd & 16 ? 2 : 64;
    s.max_pages = odd & 32 ? 1024 : 16384;
    s.max_requests = odd & 64 ? 3 : 64;
    s.max_request_streams = odd & 128 ? 1 : 8;
    s.max_transfers = odd & 64 ? 2 : 64;
    return s;
}

kvguard::Policy draw_policy(fuzz::Draw& draw) {
    kvguard::Policy p;
    const std::uint8_t odd = draw.byte();
    p.permit_sharing = odd & 1;
    p.require_digests = odd & 2;
    p.require_scrub = odd & 4;
    p.act_on_degraded = odd & 8;
    for (auto& action : p.actions) action = odd & 16 ? kvguard::Action::kill : kvguard::Action::alert;
    return p;
}

class Fleet {
  public:
    Fleet(fuzz::Draw& draw) : draw_(draw) {}

    // The next record of some stream; `rows` gets it alone.
    void next(kvguard::Rows& rows) {
        Record r;
        const auto kind = static_cast<kvg_kind>(draw_.below(KVG_KINDS));
        const std::uint32_t s = draw_.below(kStreams);
        r.kind = kind;
        r.stream = kNames[s];
        place(r, s);
        if (kind != KVG_PLACE && kind != KVG_POOL && (kind != KVG_SCRUB || draw_.one_in(2))) {
            r.request = kRequests[draw_.below(8)];
            r.tenant = kTenants[draw_.one_in(4) ? draw_.below(3) : r.request[1] % 3];
        }
        if (kind != KVG_PLACE && draw_.one_in(4)) r.pool = kNames[draw_.below(kStreams)];
        if (r.has_pages()) r.pages = draw_pages(runs_);
        switch (kind) {
            case KVG_POOL:
                r.tokens = draw_.one_in(8) ? draw_.number() % (KVG_MAX_PAGE_INDEX + 1) : 8 + draw_.below(24);
                r.extra = draw_.one_in(8) ? draw_.number() : 4;
                r.page_bytes = 4096;
                r.context_limit = draw_.number();
                r.code = static_cast<std::uint8_t>(draw_.below(4));
                break;
            case KVG_ADMIT:
                r.tokens = draw_.number();
                if (draw_.one_in(2)) r.flags = KVG_HAS_MAX, r.extra = draw_.number();
                break;
            case KVG_SHARE:
                if (draw_.one_in(2)) r.share_from = kRequests[draw_.below(8)];
                if (draw_.one_in(2)) r.flags = KVG_HAS_TOKENS, r.tokens = draw_.number();
                break;
            case KVG_WRITE:
                r.code = draw_.one_in(6);
                [[fallthrough]];
            case KVG_READ: r.tokens = draw_.number(); break;
            case KVG_TRANSFER_BEGIN:
            case KVG_TRANSFER_END: transfer(r); break;
            case KVG_REQUEST_END: r.code = static_cast<std::uint8_t>(draw_.below(4)); break;
            case KVG_RESPOND:
                r.extra = draw_.one_in(4) ? draw_.number() : 200;
                r.tokens = draw_.byte();
                if (draw_.one_in(2)) r.flags = KVG_FINAL;
                break;
            default: break;
        }
        append(rows, r);
    }

  private:
    static constexpr const char* kNames[kStreams] = {"p", "d", "q", "e", "router"};
    static constexpr const char* kRequests[8] = {"r0", "r1", "r2", "r3", "r4", "r5", "r6", "r7"};
    static constexpr const char* kTenants[3] = {"a", "b", "c"};
    static constexpr const char* kTransfers[4] = {"t0", "t1", "t2", "t3"};

    // Mostly the next of the stream; else again, ahead, far ahead, or of another life.
    void place(Record& r, std::uint32_t s) {
        const std::uint32_t how = draw_.below(16);
        if (how == 15) {
            epoch_[s] = draw_.one_in(4) ? draw_.number() : epoch_[s] + 1;
            if (draw_.one_in(2)) seq_[s] = 0;
        } else if (how == 14) {
            seq_[s] = draw_.number();
        } else if (how == 13) {
            seq_[s] += draw_.below(4);
        }
        r.epoch = how == 12 ? epoch_[s] / 2 : epoch_[s];
        r.seq = how == 11 && seq_[s] > 0 ? seq_[s] - 1 : seq_[s]++;
        time_ += draw_.below(4) * kMs;
        r.time_ns = draw_.one_in(16) ? draw_.number() : time_;
        r.epoch &= ~(std::uint64_t{1} << 63);
        r.seq &= ~(std::uint64_t{1} << 63);
    }

    kvguard::Pages draw_pages(std::uint64_t (&runs)[4]) {
        std::uint32_t count = 0;
        std::uint64_t last_stop = ~std::uint64_t{0};
        for (std::uint32_t n = 1 + draw_.below(draw_.one_in(4) ? 4 : 1); n > 0; --n) {
            std::uint64_t first = draw_.one_in(12) ? draw_.number() % KVG_MAX_PAGE_INDEX : draw_.below(20);
            if (first == last_stop) ++first;
            const std::uint64_t pages = 1 + (draw_.one_in(24) ? draw_.number() % (1u << 21) : draw_.below(6));
            if (first + pages > KVG_MAX_PAGE_INDEX) continue;
            last_stop = first + pages;
            runs[count++] = kvg_run(first, pages);
        }
        return {runs, count};
    }

    void transfer(Record& r) {
        r.transfer = kTransfers[draw_.below(4)];
        r.tokens = draw_.number();
        if (r.kind == KVG_TRANSFER_BEGIN) {
            r.peer_pool = kNames[draw_.below(kStreams)];
            // As many pages elsewhere, the runs cut as those of the source are.
            const std::uint64_t by = draw_.below(8);
            for (std::uint32_t i = 0; i < r.pages.runs(); ++i) {
                const auto run = r.pages.run(i);
                peers_[i] = kvg_run(run.stop() + by > KVG_MAX_PAGE_INDEX ? run.first : run.first + by, run.pages);
            }
            r.peer_pages = {peers_, r.pages.runs()};
        } else {
            r.code = draw_.one_in(2);
            r.status = static_cast<std::uint8_t>(draw_.below(3));
        }
        const std::uint64_t pages = r.pages.size();
        if (pages > 0 && pages <= 24 && draw_.one_in(2)) {
            r.flags = KVG_HAS_DIGESTS;
            const char digit = draw_.one_in(4) ? 'b' : 'a';
            digests_.clear();
            for (std::uint64_t i = 0; i < pages; ++i) (digests_ += i == 0 ? "" : ",") += digit;
            r.digests = digests_;
            r.digest_count = static_cast<std::uint32_t>(pages);
        }
    }

    fuzz::Draw& draw_;
    std::uint64_t epoch_[kStreams] = {1, 1, 1, 1, 1};
    std::uint64_t seq_[kStreams] = {};
    std::uint64_t time_ = kMs;
    std::uint64_t runs_[4], peers_[4];
    std::string digests_;
};

// Copies what it is told, as a journal does.
class Witness final : public kvguard::Witness {
  public:
    void pool(std::string_view id, std::string_view stream, std::uint64_t pages, std::uint64_t, std::uint8_t) override {
        before.pools.push_back({std::string(id), std::string(stream), pages, 4, 0});
    }
    void epoch(std::string_view stream, std::uint64_t epoch) override {
        before.streams.push_back({std::string(stream), epoch, 3, kMs, {}});
    }
    void request(std::string_view request, std::string_view stream, std::string_view tenant) override {
        before.requests.push_back({std::string(request), std::string(stream), std::string(tenant), false});
    }
    void ended(std::string_view request, std::string_view stream) override {
        MUST(!request.empty() && !stream.empty());
    }
    void retired(std::string_view request) override { MUST(!request.empty()); }

    kvguard::Restored before;
};

void look(Ledger& ledger, const kvguard::Settings& settings) {
    for (const kvguard::Event& event : ledger.events()) {
        if (event.what == kvguard::Event::What::retired) {
            MUST(!event.request.id.empty());
            continue;
        }
        MUST(event.finding != nullptr && !event.finding->reason.empty());
        std::uint64_t stop = 0;
        for (const auto& [first, last] : event.finding->pages) {
            MUST(first < last && (first > stop || stop == 0));
            stop = last;
        }
        MUST(event.finding->other_requests.size() <= 64 && event.finding->other_tenants.size() <= 64);
    }
    ledger.events().clear();
    for (const std::uint32_t moved : ledger.moved()) MUST(moved < ledger.streams());
    ledger.moved().clear();
    ledger.judged().clear();
    const kvguard::Sizes sizes = ledger.sizes();
    MUST(sizes.pages <= settings.max_pages);
    MUST(sizes.transfers <= settings.max_transfers);
    MUST(sizes.requests_live <= settings.max_requests);
    MUST(sizes.requests_ended <= settings.max_ended);
    MUST(ledger.streams() <= settings.max_streams);
}

void run(fuzz::Draw& draw, const kvguard::Restored* before, Witness& witness) {
    const kvguard::Settings settings = draw_settings(draw);
    const kvguard::Policy policy = draw_policy(draw);
    Ledger ledger(policy, settings);
    ledger.set_witness(&witness);
    ledger.want_retired(static_cast<Ledger::Retired>(draw.below(3)));
    ledger.want_judged(draw.one_in(2));
    if (before != nullptr) ledger.restore(*before);
    Fleet fleet(draw);
    std::int64_t now_ns = kMs;
    const bool again = draw.one_in(4);
    for (int i = 0; i < 400 && !draw.done(); ++i) {
        if (draw.one_in(8)) {
            now_ns += static_cast<std::int64_t>(draw.below(64) * kMs);
            ledger.advance(now_ns);
        }
        if (again && i == 100) break;
        kvguard::Rows rows;
        fleet.next(rows);
        Record record;
        const char* const wrong = kvguard::parse(rows.bytes.data(), rows.bytes.size(), record);
        MUST(wrong == nullptr);
        ledger.feed(record, now_ns);
        if (draw.one_in(4)) look(ledger, settings);
    }
    if (!again) ledger.finish();
    look(ledger, settings);
    kvguard::RequestSummary summary;
    for (const std::string& id : ledger.request_ids()) MUST(ledger.request(id, summary) && summary.id == id);
    for (std::size_t i = 0; i < ledger.streams(); ++i) {
        const auto state = ledger.stream(i);
        MUST(ledger.watermark(state.name) == std::make_pair(state.epoch, state.processed));
    }
}

}  // namespace

int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
    fuzz::Draw draw(data, size);
    Witness first, second;
    run(draw, nullptr, first);
    if (!draw.done()) run(draw, &first.before, second);  // a guard that starts again
    return 0;
}
