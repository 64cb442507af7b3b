#include "journal_state.hpp"

#include <algorithm>

#include "journal_format.hpp"
#include "kvguard/record.h"

namespace kvguard::journal {

namespace {

constexpr std::size_t kFrameAim = 1u << 20;
constexpr std::uint64_t kMost = std::uint64_t{1} << 63;  // numbers of records are below it

}  // namespace

std::int64_t State::stream(std::string_view name, bool& made) {
    made = false;
    if (const auto known = stream_numbers_.find(name); known != stream_numbers_.end()) return known->second;
    if (streams_.size() >= kMaxStreams) {
        ++dropped_;
        return -1;
    }
    made = true;
    const auto number = static_cast<std::uint32_t>(streams_.size());
    streams_.emplace_back().name = name;
    stream_numbers_.emplace(name, number);
    return number;
}

bool State::pool(std::string_view id, std::uint32_t stream, std::uint64_t pages, std::uint64_t page_tokens,
                 std::uint8_t role) {
    auto known = pools_.find(id);
    if (known == pools_.end()) {
        if (pools_.size() >= kMaxPools) {
            ++dropped_;
            return false;
        }
        known = pools_.emplace(std::string(id), Pool{}).first;
    }
    known->second = {stream, pages, page_tokens, role};
    return true;
}

void State::epoch(std::uint32_t stream, std::uint64_t epoch) {
    StreamKnown& known = streams_[stream];
    if (known.has_epoch && known.epoch == epoch) return;
    if (known.has_epoch) {
        past(stream, known.epoch);
        forget_on(stream);
    }
    known.has_epoch = true;
    known.epoch = epoch;
    known.judged = 0;
}

void State::past(std::uint32_t stream, std::uint64_t epoch) {
    std::deque<std::uint64_t>& past = streams_[stream].past;
    past.push_back(epoch);
    if (past.size() > kMaxPast) past.pop_front();
}

void State::watermark(std::uint32_t stream, std::uint64_t epoch, std::uint64_t judged, std::uint64_t time_ns) {
    this->epoch(stream, epoch);
    StreamKnown& known = streams_[stream];
    known.judged = std::max(known.judged, judged);
    known.time_ns = std::max(known.time_ns, time_ns);
}

bool State::request(std::string_view request, std::uint32_t stream, std::string_view tenant, std::uint8_t age) {
    auto known = requests_.find(request);
    if (known != requests_.end()) {
        for (Live& live : known->second) {
            if (live.stream != stream) continue;
            live.ended = false;
            live.age = age;
            live.tenant = tenant;
            return true;
        }
    }
    if (live_count_ >= kMaxRequests) {
        ++dropped_;
        return false;
    }
    if (known == requests_.end()) known = requests_.emplace(std::string(request), std::vector<Live>{}).first;
    known->second.push_back({stream, false, age, std::string(tenant)});
    ++live_count_;
    return true;
}

bool State::ended(std::string_view request, std::uint32_t stream) {
    const auto known = requests_.find(request);
    if (known == requests_.end()) return false;
    for (Live& live : known->second) {
        if (live.stream != stream) continue;
        live.ended = true;
        return true;
    }
    return false;
}

bool State::retired(std::string_view request) {
    const auto known = requests_.find(request);
    if (known == requests_.end()) return false;
    live_count_ -= known->second.size();
    requests_.erase(known);
    return true;
}

void State::forget_on(std::uint32_t stream) {
    for (auto known = requests_.begin(); known != requests_.end();) {
        live_count_ -= std::erase_if(known->second, [stream](const Live& live) { return live.stream == stream; });
        known = known->second.empty() ? requests_.erase(known) : std::next(known);
    }
}

void State::grow_old() {
    for (auto known = requests_.begin(); known != requests_.end();) {
        for (Live& live : known->second) ++live.age;
        live_count_ -= std::erase_if(known->second, [](const Live& live) { return live.age > kMaxAge; });
        known = known->second.empty() ? requests_.erase(known) : std::next(known);
    }
}

void State::incident(std::string_view id, std::string_view text) {
    settled(id);
    incidents_.push_back({std::string(id), std::string(text)});
    incident_at_.emplace(id, std::prev(incidents_.end()));
    incident_bytes_ += id.size() + text.size();
    while (incidents_.size() > kMaxIncidents || incident_bytes_ > kMaxIncidentBytes) {
        settled(std::string(incidents_.front().id));
        ++dropped_;
    }
}

bool State::settled(std::string_view id) {
    const auto at = incident_at_.find(id);
    if (at == incident_at_.end()) return false;
    const auto incident = at->second;
    incident_bytes_ -= incident->id.size() + incident->text.size();
    incident_at_.erase(at);
    incidents_.erase(incident);
    return true;
}

bool State::apply(std::string_view payload) {
    Fields fields(payload);
    while (!fields.over()) {
        std::uint64_t type = 0, stream = 0, a = 0, b = 0, c = 0;
        std::string_view id, text;
        if (!fields.number(type)) return false;
        const auto on_stream = [&] { return fields.number(stream) && has_stream(stream); };
        const auto below = [](std::uint64_t number) { return number < kMost; };
        switch (static_cast<Entry>(type)) {
            case Entry::stream: {
                bool made = false;
                if (!fields.id(id) || this->stream(id, made) < 0 || !made) return false;
                break;
            }
            case Entry::pool:
                if (!fields.id(id) || !on_stream() || !fields.number(a) || !fields.number(b) || !fields.number(c) ||
                    !below(a) || !below(b) || c > KVG_ROUTER)
                    return false;
                pool(id, static_cast<std::uint32_t>(stream), a, b, static_cast<std::uint8_t>(c));
                break;
            case Entry::epoch:
            case Entry::past:
                if (!on_stream() || !fields.number(a) || !below(a)) return false;
                if (static_cast<Entry>(type) == Entry::past)
                    past(static_cast<std::uint32_t>(stream), a);
                else
                    epoch(static_cast<std::uint32_t>(stream), a);
                break;
            case Entry::watermark:
                if (!on_stream() || !fields.number(a) || !fields.number(b) || !fields.number(c) || !below(a) ||
                    b > kMost || !below(c))
                    return false;
                watermark(static_cast<std::uint32_t>(stream), a, b, c);
                break;
            case Entry::request:
                if (!on_stream() || !fields.number(a) || !fields.id(id) || !fields.id(text) || a > kMaxAge)
                    return false;
                request(id, static_cast<std::uint32_t>(stream), text, static_cast<std::uint8_t>(a));
                break;
            case Entry::ended:
                if (!on_stream() || !fields.id(id)) return false;
                ended(id, static_cast<std::uint32_t>(stream));
                break;
            case Entry::retired:
                if (!fields.id(id)) return false;
                retired(id);
                break;
            case Entry::incident:
                if (!fields.id(id) || !fields.text(text, kMaxIncidentBytes)) return false;
                incident(id, text);
                break;
            case Entry::settled:
                if (!fields.id(id)) return false;
                settled(id);
                break;
            default:
                return false;
        }
    }
    return true;
}

std::string State::frames() const {
    std::string out, payload;
    const auto cut = [&](std::size_t least) {
        if (payload.size() < least) return;
        put_frame(out, payload);
        payload.clear();
    };
    for (const StreamKnown& known : streams_) {
        put(payload, Entry::stream);
        put(payload, known.name);
    }
    for (std::uint32_t number = 0; number < streams_.size(); ++number) {
        const StreamKnown& known = streams_[number];
        for (const std::uint64_t epoch : known.past) {
            put(payload, Entry::past);
            put(payload, number);
            put(payload, epoch);
        }
        if (!known.has_epoch) continue;
        put(payload, Entry::watermark);
        put(payload, number);
        put(payload, known.epoch);
        put(payload, known.judged);
        put(payload, known.time_ns);
        cut(kFrameAim);
    }
    for (const auto& [id, pool] : pools_) {
        put(payload, Entry::pool);
        put(payload, id);
        put(payload, pool.stream);
        put(payload, pool.pages);
        put(payload, pool.page_tokens);
        put(payload, pool.role);
        cut(kFrameAim);
    }
    for (const auto& [id, lives] : requests_) {
        for (const Live& live : lives) {
            put(payload, Entry::request);
            put(payload, live.stream);
            put(payload, live.age);
            put(payload, id);
            put(payload, live.tenant);
            if (!live.ended) continue;
            put(payload, Entry::ended);
            put(payload, live.stream);
            put(payload, id);
        }
        cut(kFrameAim);
    }
    for (const Incident& incident : incidents_) {
        put(payload, Entry::incident);
        put(payload, incident.id);
        put(payload, incident.text);
        cut(kFrameAim);
    }
    cut(1);
    return out;
}

void State::tell(Restored& before, std::vector<std::string>& incidents) const {
    before = {};
    for (const StreamKnown& known : streams_)
        if (known.has_epoch)
            before.streams.push_back({known.name, known.epoch, static_cast<std::int64_t>(known.judged) - 1,
                                      known.time_ns, {known.past.begin(), known.past.end()}});
    for (const auto& [id, pool] : pools_)
        before.pools.push_back({id, streams_[pool.stream].name, pool.pages, pool.page_tokens, pool.role});
    for (const auto& [id, lives] : requests_)
        for (const Live& live : lives)
            before.requests.push_back({id, streams_[live.stream].name, live.tenant, live.ended});
    std::sort(before.pools.begin(), before.pools.end(), [](const auto& a, const auto& b) { return a.id < b.id; });
    std::sort(before.requests.begin(), before.requests.end(), [](const auto& a, const auto& b) {
        return std::tie(a.request, a.stream) < std::tie(b.request, b.stream);
    });
    incidents.clear();
    for (const Incident& incident : incidents_) incidents.push_back(incident.text);
}

}  // namespace kvguard::journal
