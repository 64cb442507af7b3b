// Requests as they come, are over, and are forgotten: the oldest of those that are over go first.
#include "ledger/world.hpp"

namespace kvguard {

RequestStream* World::follow(Request* request, StreamName* stream, std::string_view tenant) {
    Name* const name = tenant_names.intern(tenant);
    RequestStream* const rs = request_streams.make(request, stream, name, ++serial);
    rs->losses_before = stream->losses;
    rs->label = own_label(request, name);
    request->names.push_back(stream);
    request->streams.push_back(rs);
    ++request->open;
    unend(request);
    if (witness != nullptr) witness->request(request->id->key(), stream->text, tenant);
    return rs;
}

Request* World::make_request(std::string_view text, std::uint64_t hash) {
    Name* const id = request_names.intern(text, hash);
    request_names.wake(id);  // a label may have kept it from an earlier life
    Request* const request = id->request = request_pool.make(this, id);
    retain(request);
    request->known = true;
    request->previous = last_request;
    (last_request != nullptr ? last_request->next : first_request) = request;
    last_request = request;
    ++requests_known;
    return request;
}

RequestStream* World::request(const Record& record, Stream& stream, Request* known) {
    Request* const request = known != nullptr ? known : make_request(record.request, request_hash(record));
    if (RequestStream* const rs = request->on(stream.name); rs != nullptr) return rs;
    RequestStream* const rs = follow(request, stream.name, record.tenant);
    // It may have begun in what was missed, unless this is where it begins.
    rs->marked_degraded = stream.name->blind && record.kind != KVG_ADMIT;
    return rs;
}

void World::unend(Request* request) {
    if (!request->ended) return;
    unlink_ended(request);
    request_names.wake(request->id.get());
}

void World::unlink_ended(Request* request) {
    request->ended = false;
    (request->ended_previous != nullptr ? request->ended_previous->ended_next : first_ended) = request->ended_next;
    (request->ended_next != nullptr ? request->ended_next->ended_previous : last_ended) = request->ended_previous;
    request->ended_previous = request->ended_next = nullptr;
    --requests_ended;
}

void World::note_over(Request* request) {
    if (request->known && !request->ended && request->over() && request->owns_nothing()) {
        request->ended = true;
        request->ended_previous = last_ended;
        (last_ended != nullptr ? last_ended->ended_next : first_ended) = request;
        last_ended = request;
        ++requests_ended;
        request_names.rest(request->id.get());
    }
    while (requests_ended > settings.max_ended) {
        retire(first_ended);
        fetch_retiring();
    }
}

// Those that are to go next have not been looked at for long: asks for their memory step by step, so that it is there.
void World::fetch_retiring() const {
    const auto fetch = [](const void* object, std::size_t bytes) {
        for (std::size_t at = 0; at < bytes; at += 64) __builtin_prefetch(static_cast<const char*>(object) + at, 1);
    };
    const Request* const first = first_ended;
    if (first == nullptr) return;
    for (const RequestStream* rs : first->streams) {
        fetch(rs->label.get(), sizeof(Taint));
        for (const void* block : {rs->reads.block(), rs->responses.block(), rs->released.block()})
            __builtin_prefetch(block, 1);
    }
    fetch(first->id.get(), sizeof(Name));
    const Request* const second = first->ended_next;
    if (second == nullptr) return;
    request_names.prefetch_resting(second->hash);
    for (const RequestStream* rs : second->streams) fetch(rs, sizeof(RequestStream));
    if (const Request* const third = second->ended_next; third != nullptr) fetch(third, sizeof(Request));
}

void World::decide_later(Refusal&& refusal) {
    Request* const request = refusal.rs->request;
    undecided.emplace_back(settings.window_ns < 0 ? INT64_MAX : now_ns + settings.window_ns, request);
    refusals[request].push_back(std::move(refusal));
}

void World::decide(std::int64_t now_ns) {
    for (; !undecided.empty() && undecided.front().first <= now_ns; undecided.pop_front()) {
        const auto waiting = refusals.find(undecided.front().second.get());
        if (waiting == refusals.end()) continue;  // the request is forgotten
        judge(*this, waiting->second.front());
        waiting->second.pop_front();
        if (waiting->second.empty()) refusals.erase(waiting);
    }
}

void World::retire(Request* request) {
    const Ref<Request> keep(request);
    if (!refusals.empty())
        if (const auto waiting = refusals.find(request); waiting != refusals.end()) {
            for (Refusal& refusal : waiting->second) judge(*this, refusal);
            refusals.erase(waiting);
        }
    if (request->ended) unlink_ended(request);
    if (!request->known) return;
    request->known = false;
    request->id->request = nullptr;
    (request->previous != nullptr ? request->previous->next : first_request) = request->next;
    (request->next != nullptr ? request->next->previous : last_request) = request->previous;
    request->previous = request->next = nullptr;
    --requests_known;
    const auto transfers_of = request->transfers;
    for (Transfer* transfer : transfers_of) drop_transfer(transfer);
    const auto let_go = [&](RequestStream* rs, bool drop) {
        if (!rs->has_lates()) return;
        std::vector<Ref<Late>> lates;
        for (const auto& [place, list] : rs->rare->late) lates.insert(lates.end(), list.begin(), list.end());
        for (const Ref<Late>& late : lates) {
            if (drop) {
                drop_late(late.get());
            } else if (late->transfer) {
                std::erase_if(late->transfer->late, [&](const Ref<Late>& other) { return other == late.get(); });
            }
        }
        rs->rare->late.clear();
    };
    for (RequestStream* rs : request->streams) {
        rs->leave();
        let_go(rs, true);
    }
    if (request->rare) {
        for (RequestStream* rs : request->rare->former) let_go(rs, false);
        for (const auto& finding : request->rare->findings) forget(*finding);
    }
    if (want_retired == Ledger::Retired::all) {
        events.push_back({Event::What::retired, nullptr, request->summary()});
    } else if (want_retired == Ledger::Retired::marked && request->rare && !request->rare->findings.empty()) {
        events.push_back({Event::What::retired, nullptr, {}});
        events.back().request.id = request->id->str();
    }
    if (witness != nullptr) witness->retired(request->id->key());
    for (RequestStream* rs : request->streams) unshare(rs);
    release(request);  // the tables' own
}

void World::destroy(Request* request) {
    ++request->refs;  // what follows may let go of the last references once more
    for (RequestStream* rs : request->streams) request_streams.destroy(rs);
    if (request->rare)
        for (RequestStream* rs : request->rare->former) request_streams.destroy(rs);
    request_pool.destroy(request);
}

}  // namespace kvguard
