#include "core.hpp"

#include <sys/prctl.h>

#include <algorithm>
#include <chrono>
#include <utility>

#include "clock.hpp"

namespace kvguard {

namespace {

constexpr std::size_t kChunk = 256;  // records judged between two publications
constexpr std::int64_t kTickNs = 10'000'000;
constexpr std::int64_t kMarkNs = 100'000'000;
constexpr std::int64_t kHousekeepingNs = 1'000'000'000;
constexpr std::int64_t kIdleNs = 20'000'000;  // longest pause between two rounds
constexpr unsigned long kTimerSlackNs = 1000;
// How long verdicts of the guard before this one stay in force.
constexpr std::uint64_t kCarriedOverForNs = 600'000'000'000;
// A ring that is still written to when the guard stops is read for so long.
constexpr std::int64_t kLastWordsNs = 1'000'000'000;

}  // namespace

Core::Core(const Policy& policy, const Settings& settings, bool enforce, Inbox& inbox, BoardWriter& board,
           std::unique_ptr<RingReader> ring, Journal* journal, std::size_t recent_bytes)
    : enforce_(enforce),
      inbox_(inbox),
      board_(board),
      ring_(std::move(ring)),
      journal_(journal),
      ledger_(policy, settings),
      recent_(recent_bytes),
      clock_offset_ns_(static_cast<std::int64_t>(wall_ns() - monotonic_ns())),
      started_ns_(wall_ns()),
      last_round_ns_(static_cast<std::int64_t>(monotonic_ns())) {
    ledger_.want_retired(Ledger::Retired::marked);
    ledger_.want_judged(true);
    if (journal_ != nullptr) ledger_.set_witness(journal_);
    if (ring_ != nullptr) inbox_.set_bell([reader = ring_] { reader->wake(); });
}

void Core::restore(const Restored& before) {
    const std::lock_guard lock(mutex_);
    received_ns_ = static_cast<std::int64_t>(wall_ns());
    ledger_.restore(before);
    act();
}

// Wall time that never jumps: what waits for a deadline must not be given up for a set clock.
std::int64_t Core::now_ns() const { return static_cast<std::int64_t>(monotonic_ns()) + clock_offset_ns_; }

void Core::run() {
    struct End {
        Core& core;
        ~End() { core.end(); }
    } const end_it{*this};
    // Pauses are meant as they are said.
    ::prctl(PR_SET_TIMERSLACK, kTimerSlackNs, 0, 0, 0);
    std::int64_t closed_ns = 0;
    for (;;) {
        bool worked = false, over = false;
        {
            const std::lock_guard lock(mutex_);
            const bool closed = inbox_.drained();  // before the last look: what came until then is judged
            const bool from_inbox = take_from_inbox(), from_ring = take_from_ring();
            worked = from_inbox || from_ring;
            const std::int64_t now = now_ns();
            if (now >= next_tick_ns_) tick();
            if (closed && closed_ns == 0) closed_ns = now;
            over = closed && !from_inbox && (!from_ring || now - closed_ns > kLastWordsNs);
            if (over && journal_ != nullptr) {
                mark_journal();
                journal_->flush();
            }
        }
        if (over || !wait_for_taker()) return;
        if (!worked) rest();
    }
}

void Core::end() {
    {
        const std::lock_guard lock(bell_);
        ended_ = true;
    }
    rung_.notify_all();
}

void Core::rest() {
    if (ring_ != nullptr)
        ring_->wait(kIdleNs);
    else
        inbox_.wait(kIdleNs);
}

bool Core::take_from_inbox() {
    if (message_at_ >= message_.rows.bytes.size()) {
        if (!inbox_.take(message_)) return false;
        message_at_ = 0;
    }
    if (!feed(message_.rows, message_at_, message_.received_ns)) message_ = {};  // it may be large
    return true;
}

bool Core::take_from_ring() {
    if (ring_ == nullptr) return false;
    rows_.bytes.clear();
    rows_.count = 0;
    if (ring_->take(rows_, kChunk) == 0) return false;
    const auto received_ns = static_cast<std::int64_t>(wall_ns());
    for (std::size_t at = 0; feed(rows_, at, received_ns);) continue;
    return true;
}

// Judges a chunk of them from `at` on; false when that was the last.
bool Core::feed(const Rows& rows, std::size_t& at, std::int64_t received_ns) {
    const std::int64_t now = now_ns();
    received_ns_ = received_ns;
    const bool whole = each_expected(ledger_, rows, at, kChunk, [&](const Record& record) {
        ++counts_.records[record.kind];
        if (record.kind != KVG_PLACE) recent_.add(record, received_ns);
        judging_ns_ = static_cast<std::int64_t>(record.time_ns);
        ledger_.feed(record, now);
        if (!ledger_.events().empty()) act();
    });
    if (!whole) {
        // Who put it there had to check it: where the next one begins is not known either.
        ++counts_.broken;
        at = rows.bytes.size();
    }
    publish();
    return at < rows.bytes.size();
}

void Core::tick() {
    const std::int64_t now = now_ns();
    next_tick_ns_ = now + kTickNs;
    judging_ns_ = 0;
    ledger_.advance(now);
    act();
    publish();
    if (journal_ != nullptr) {
        if (now >= next_mark_ns_) {
            next_mark_ns_ = now + kMarkNs;
            mark_journal();
        }
        journal_->flush();
    }
    if (now >= next_housekeeping_ns_) {
        next_housekeeping_ns_ = now + kHousekeepingNs;
        if (started_ns_ != 0 && wall_ns() > started_ns_ + kCarriedOverForNs) {
            board_.expire(started_ns_);
            started_ns_ = 0;
        }
    }
}

void Core::act() {
    for (const Event& event : ledger_.events()) act_on(event);
    ledger_.events().clear();
}

void Core::act_on(const Event& event) {
    if (event.what == Event::What::retired) {
        board_.clear(event.request.id);
        if (const std::shared_ptr<Incident> incident = incidents_.forget(event.request.id); incident != nullptr)
            waiting_.push_back({nullptr, false, 0, {incident}});
        return;
    }
    const Finding& finding = *event.finding;
    const auto [at, made] = waiting_at_.try_emplace(&finding, taken_count_ + waiting_.size());
    if (made) waiting_.push_back({event.finding, false, 0, {}});
    Waiting& waiting = waiting_[at->second - taken_count_];
    waiting.fresh |= event.what == Event::What::found;
    waiting.received_ns = received_ns_;
    if (finding.kills()) {
        for (const std::string& request : finding.subjects) {
            const std::shared_ptr<Incident> incident = note(waiting, &request);
            if (!incident->killed) kill(*incident, finding);
        }
        return;
    }
    const std::shared_ptr<Incident> incident = note(waiting, finding.has_request ? &finding.request : nullptr);
    if (static_cast<int>(finding.action) > incident->journaled)
        write_down(*incident, finding, static_cast<std::int64_t>(finding.time_ns), 0);
    if (finding.action == Action::quarantine && finding.has_request && enforce_)
        board_.set_verdict(finding.request, Verdict::quarantine, incident->id);
}

// The incident of a request, or of the finding itself where that names none.
std::shared_ptr<Incident> Core::note(Waiting& waiting, const std::string* request) {
    const Finding& finding = *waiting.finding;
    auto [incident, made] = request != nullptr ? incidents_.of_request(*request) : incidents_.of(finding);
    if (made && request != nullptr) {
        RequestSummary known;
        const bool live = ledger_.request(*request, known);
        incident->has_tenant = live ? known.has_tenant : finding.has_tenant;
        incident->tenant = live ? known.tenant : finding.tenant;
    }
    if (std::find(waiting.incidents.begin(), waiting.incidents.end(), incident) == waiting.incidents.end())
        waiting.incidents.push_back(incident);
    return incident;
}

void Core::kill(Incident& incident, const Finding& finding) {
    incident.killed = true;
    // What a finding names may have been innocent until a later record came: it is that one which counts.
    incident.record_ns = std::max(static_cast<std::int64_t>(finding.time_ns), judging_ns_);
    incident.received_ns = received_ns_;
    write_down(incident, finding, incident.record_ns, static_cast<std::int64_t>(wall_ns()));
    if (enforce_) {
        // Whoever is told of an incident must find it, even if the guard is gone in the next instant.
        if (journal_ != nullptr) journal_->flush();
        board_.set_verdict(incident.request, Verdict::kill, incident.id);
        ++counts_.kills;
    } else {
        ++counts_.kills_withheld;
    }
    incident.verdict_ns = static_cast<std::int64_t>(wall_ns());
}

void Core::write_down(Incident& incident, const Finding& finding, std::int64_t record_ns, std::int64_t verdict_ns) {
    incident.journaled = static_cast<int>(finding.action);
    if (journal_ == nullptr) return;
    journal_->incident(incident.id, incident_json(incident, finding, enforce_, record_ns, received_ns_, verdict_ns));
    unflushed_ = true;
}

// Verdicts are on the board; now the watermarks that vouch for them, then the heartbeat.
void Core::publish() {
    if (unflushed_ && journal_ != nullptr) {
        journal_->flush();
        unflushed_ = false;
    }
    for (const std::uint32_t index : ledger_.moved()) {
        const StreamState stream = ledger_.stream(index);
        if (stream.epoch < 0) continue;
        board_.advance(stream.name, static_cast<std::uint64_t>(stream.epoch), stream.processed);
        if (journal_ != nullptr) unmarked_.push_back(index);
    }
    ledger_.moved().clear();
    const std::uint64_t now = monotonic_ns();
    board_.heartbeat(now);
    last_round_ns_.store(static_cast<std::int64_t>(now), std::memory_order_relaxed);
    if (!ledger_.judged().empty()) {
        const auto done_ns = static_cast<std::int64_t>(wall_ns());
        for (const std::uint64_t time_ns : ledger_.judged()) {
            const double seconds = 1e-9 * static_cast<double>(
                                              std::max<std::int64_t>(done_ns - static_cast<std::int64_t>(time_ns), 0));
            std::size_t bucket = 0;
            while (bucket < kLatencyBounds.size() && seconds > kLatencyBounds[bucket]) ++bucket;
            ++counts_.latency[bucket];
            counts_.latency_sum += seconds;
        }
        ledger_.judged().clear();
    }
    if (waiting_.empty()) return;
    {
        const std::lock_guard lock(bell_);
        news_ = true;
    }
    rung_.notify_one();
}

// Where streams were judged up to, for a guard that takes over: a little behind is as good.
void Core::mark_journal() {
    std::sort(unmarked_.begin(), unmarked_.end());
    unmarked_.erase(std::unique(unmarked_.begin(), unmarked_.end()), unmarked_.end());
    for (const std::uint32_t index : unmarked_) {
        const StreamState stream = ledger_.stream(index);
        journal_->watermark(stream.name, static_cast<std::uint64_t>(stream.epoch), stream.processed, stream.time_ns);
    }
    unmarked_.clear();
}

// False: nobody takes what happens any more.
bool Core::wait_for_taker() {
    for (;;) {
        if (!crowded()) return true;
        std::unique_lock lock(bell_);
        if (abandoned_) return false;
        taken_.wait_for(lock, std::chrono::nanoseconds(kIdleNs), [this] { return room_ || abandoned_; });
        room_ = false;
    }
}

bool Core::crowded() {
    const std::lock_guard lock(mutex_);
    return waiting_.size() >= kMostWaiting;
}

bool Core::take(std::vector<Happened>& out, std::int64_t timeout_ns) {
    bool last = false;
    {
        std::unique_lock lock(bell_);
        rung_.wait_for(lock, std::chrono::nanoseconds(timeout_ns), [this] { return news_ || ended_; });
        news_ = false;
        last = ended_;
    }
    bool more = false;
    {
        const std::lock_guard lock(mutex_);
        for (; out.size() < kMostTaken && !waiting_.empty(); waiting_.pop_front(), ++taken_count_) {
            Waiting& waiting = waiting_.front();
            Happened& happened = out.emplace_back();
            for (const auto& incident : waiting.incidents) happened.incidents.push_back(*incident);
            happened.over = waiting.finding == nullptr;
            if (happened.over) continue;
            happened.finding = *waiting.finding;
            happened.fresh = waiting.fresh;
            happened.received_ns = waiting.received_ns;
            waiting_at_.erase(waiting.finding.get());
        }
        more = !waiting_.empty();
    }
    const std::lock_guard lock(bell_);
    news_ |= more;
    room_ = true;
    taken_.notify_one();
    return !out.empty() || !last;
}

void Core::abandon() {
    inbox_.close();
    {
        const std::lock_guard lock(bell_);
        abandoned_ = true;
    }
    taken_.notify_all();
}

std::vector<Recent::Kept> Core::evidence(const std::vector<std::string>& requests,
                                         const std::vector<std::string>& streams) {
    std::vector<Recent::Kept> found;
    const std::lock_guard lock(mutex_);
    for (const auto& request : requests) recent_.of_request(request, found);
    for (const auto& stream : streams) recent_.of_stream(stream, found);
    return found;
}

void Core::settled(const std::vector<std::string>& incidents) {
    if (journal_ == nullptr) return;
    const std::lock_guard lock(mutex_);
    for (const auto& incident : incidents) journal_->settled(incident);
}

CoreStats Core::stats() {
    std::vector<RingReader::Lane> lanes;
    if (ring_ != nullptr) lanes = ring_->lanes();
    const std::lock_guard lock(mutex_);
    CoreStats stats = counts_;
    stats.sizes = ledger_.sizes();
    stats.streams = ledger_.streams();
    for (std::size_t i = 0; i < stats.streams; ++i) {
        const StreamState stream = ledger_.stream(i);
        stats.duplicates += stream.duplicates;
        stats.late += stream.late;
    }
    stats.gaps = ledger_.gaps();
    for (int limit = 0; limit < kLimits; ++limit) stats.dropped[limit] = ledger_.dropped(static_cast<Limit>(limit));
    stats.ledger_bytes = ledger_.bytes();
    stats.waiting = waiting_.size();
    stats.lanes = std::move(lanes);
    if (journal_ != nullptr) {
        stats.journal_bytes = journal_->bytes();
        stats.journal_failures = journal_->failures();
    }
    return stats;
}

}  // namespace kvguard
