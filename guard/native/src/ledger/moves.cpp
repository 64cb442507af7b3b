// Rules for transfers: kv.transfer.begin and kv.transfer.end on either side. After guard/ledger/moves.py.
#include <algorithm>
#include <cstring>
#include <unordered_map>
#include <unordered_set>

#include "ledger/transfers.hpp"

namespace kvguard {

namespace {

// The digests' texts, one a page.
std::vector<std::string_view> split(std::string_view digests) {
    std::vector<std::string_view> out;
    while (!digests.empty()) {
        const std::size_t comma = std::min(digests.find(','), digests.size());
        out.push_back(digests.substr(0, comma));
        digests.remove_prefix(std::min(comma + 1, digests.size()));
    }
    return out;
}

void take_source(World& world, Stream& stream, RequestStream* rs, const Record& record, Transfer* transfer,
                 const Where& where) {
    Pool* const pool = transfer->source_pool;
    Evidence gone;
    std::uint64_t last = UINT64_MAX;
    for (std::uint32_t i = 0; i < record.pages.runs(); ++i) {
        const Pages::Run run = record.pages.run(i);
        if (run.stop() <= pool->size) continue;
        const std::uint64_t first = std::max(run.first, pool->size);
        if (last != first) gone.add(first);  // else it goes on where the last one beyond the end stopped
        last = run.stop();
    }
    const Taint* absorbed = nullptr;  // of the page before, where nothing of it is in doubt
    world.within(pool, record.pages, [&](std::uint64_t index, Page& page) {
        Links& links = world.links(page);
        if (!links.outgoing.empty() && links.outgoing.back() == transfer) return;  // named twice
        const bool unvouched = pool->unvouched(page);
        if (page.owner != rs && !world.shared_to(pool, index, page, rs->request)) gone.add(index, unvouched);
        if (unvouched || page.label != absorbed) {
            world.taints.absorb(transfer->taint.get(), page.label, unvouched);
            absorbed = unvouched ? nullptr : page.label;
        }
        for (const Ref<Late>& late : links.late)
            world.taints.absorb(transfer->taint.get(), late->taint.get(), unvouched);
        links.outgoing.push_back(transfer);
    });
    if (gone.empty()) return;
    Report more;
    more.evidence = &gone;
    more.transfer = transfer->id;
    more.reason = "transfer " + std::string(transfer->id) + " began from pages that its request did not own any more";
    world.report(Kind::free_in_flight, where, pool->id, true, rs, std::move(more));
}

// Keeps what of the begin is needed until both sides have ended the transfer, in one piece.
void keep_begin(World& world, Transfer* transfer, const Record& record) {
    const std::string_view bytes = record.bytes;
    transfer->copy_size = Blocks::size_for(bytes.size());
    transfer->copy = world.memory.take(transfer->copy_size);
    char* const copy = static_cast<char*>(transfer->copy);
    std::memcpy(copy, bytes.data(), bytes.size());
    const auto text = [&](std::string_view view) {
        return view.empty() ? view : std::string_view(copy + (view.data() - bytes.data()), view.size());
    };
    const auto pages = [&](const Pages& view) {
        if (view.empty()) return view;
        const auto at = reinterpret_cast<const char*>(view.data()) - bytes.data();
        return Pages(reinterpret_cast<const std::uint64_t*>(copy + at), view.runs());
    };
    transfer->id = text(record.transfer);
    transfer->digests = text(record.digests);
    transfer->pages = pages(record.pages);
    transfer->peer_pages = pages(record.peer_pages);
}

// The receiver's stream may be ahead: has the request let go of the page already?
void begun_late(World& world, RequestStream* receiver, Pool* pool, std::uint64_t index, Transfer* transfer) {
    Page* const page = receiver->gone ? nullptr : &world.page(pool, index);
    if (receiver->has_lates()) {
        if (const auto at = receiver->rare->late.find({pool, index}); at != receiver->rare->late.end()) {
            const auto& lates = at->second;
            for (std::size_t i = lates.size(); i-- > 0;)
                if (!lates[i]->transfer) {
                    const Ref<Late> unbound = lates[i];
                    bind(world, unbound.get(), transfer);
                    return;
                }
        }
    }
    if (page != nullptr && page->owner == receiver) return;
    Where last;
    receiver->released.each([&](const Log::Entry& given) {
        if (given.pool == world.pool_name(pool) && contains(given.pages, index)) last = receiver->where(given);
    });
    if (last.stream != nullptr) return suspect(world, receiver, pool, index, page, &last, transfer);
    if (receiver->ended && !receiver->gone)
        suspect(world, receiver, pool, index, page, nullptr, transfer);
}

// Whether what ends here may have begun before the guard's restart.
bool begun_before(World& world, const RequestStream* rs) {
    return world.restored && std::all_of(rs->request->streams.begin(), rs->request->streams.end(), [&](const auto& other) {
               return other == rs || world.unseen(other) || world.own_pool(other->stream, false)->role == KVG_ROUTER;
           });
}

// A transfer, or pieces of one, ended here and did not begin.
void unknown(World& world, Stream& stream, RequestStream* rs, const Record& record, const Where& where,
             const Pages& never_sent) {
    world.given_up.put(world.transfer_hash(record), world.hash(record.pool_id()), world.settings.max_ended);
    // A receiver whose sender died cannot know whether it had begun; nothing is said to have arrived.
    if (record.status != KVG_OK) return;
    ++world.gaps;
    Pool* const pool = world.pool_of(record, stream.name);
    const bool before = begun_before(world, rs);
    rs->marked_degraded = true;
    Evidence pages;
    world.within(pool, never_sent, [&](std::uint64_t index, Page& page) {
        page.change();
        page.sight = 0;
        // What was sent before the guard's restart has replaced what the guard saw since.
        if (before && page.owner == rs) page.set_label(nullptr);
        pages.add(index);
    });
    Report more;
    more.evidence = &pages;
    more.degraded = before;
    more.transfer = record.transfer;
    more.reason = "transfer " + std::string(record.transfer) + " ended here and no begin of it ever came";
    world.report(Kind::stream_gap, where, pool->id, true, rs, std::move(more));
}

// Pages whose digests differ from the sender's.
std::unordered_set<std::uint64_t> mismatched(World& world, RequestStream* rs, const Record& record, const Where& where,
                                             Pool* pool, const Transfers& transfers, bool in_order) {
    const bool given = (record.flags & KVG_HAS_DIGESTS) != 0;
    bool unverified = !given;
    for (const Transfer* t : transfers) unverified |= !t->has_digests;
    if (unverified && record.status == KVG_OK && world.policy.require_digests) {
        Report more;
        more.transfer = record.transfer;
        more.reason = "one side gave no digest";
        world.report(Kind::unverified_transfer, where, pool->id, true, rs, std::move(more));
    }
    std::unordered_set<std::uint64_t> wrong;
    if (!given) return wrong;
    if (in_order && same_digests(transfers, record.digests)) return wrong;
    std::unordered_map<std::uint64_t, std::string_view> sent;
    for (const Transfer* t : transfers) {
        if (!t->has_digests) continue;
        const auto digests = split(t->digests);
        std::size_t at = 0;
        each_page(t->peer_pages, [&](std::uint64_t index) { sent[index] = digests[at++]; });
    }
    const auto digests = split(record.digests);
    std::size_t at = 0;
    each_page(record.pages, [&](std::uint64_t index) {
        const std::string_view digest = digests[at++];
        if (const auto known = sent.find(index); known != sent.end() && known->second != digest) wrong.insert(index);
    });
    if (!wrong.empty()) {
        Evidence pages;
        for (const std::uint64_t index : wrong) pages.add(index);
        Report more;
        more.evidence = &pages;
        more.transfer = record.transfer;
        more.reason = std::to_string(wrong.size()) + " of " + std::to_string(record.pages.size()) +
                      " pages differ from what was sent";
        world.report(Kind::digest_mismatch, where, pool->id, true, rs, std::move(more));
    }
    return wrong;
}

void landed(World& world, Stream& stream, RequestStream* rs, const Record& record, const Where& where, Pool* pool,
            const Transfers& transfers, bool in_order) {
    const auto wrong = mismatched(world, rs, record, where, pool, transfers, in_order);
    std::unordered_set<std::uint64_t> given_up;
    for (const Transfer* t : transfers)
        for (const Ref<Late>& late : t->late) given_up.insert(late->index);
    const auto land = [&](std::uint64_t index, Page& page, Transfer* transfer) {
        settle(world, page, stream.clock.get());
        if (page.owner == rs) {
            // Bytes that differ from what was sent may be the ones that were there before.
            Taint* const before = !wrong.empty() && wrong.count(index) != 0 ? page.label : nullptr;
            page.set_label(before == nullptr && !transfer->taint->nothing()
                               ? transfer->taint.get()
                               : world.taints.join(transfer->taint.get(), before).get());
            page.set(Page::kValid, true);
            page.set(Page::kTouched, true);
        } else if (given_up.empty() || given_up.count(index) == 0) {
            into_foreign_page(world, rs, pool, index, page, where, transfer->taint.get(), transfer->id);
        }
        if (page.links != nullptr)
            for (Transfer* onward : page.links->outgoing) world.taints.absorb(onward->taint.get(), page.label);
    };
    std::unordered_map<std::uint64_t, Transfer*> sent_to;
    const auto look_up = [&] {
        for (Transfer* t : transfers) pool->clip(t->peer_pages, [&](std::uint64_t index) { sent_to[index] = t; });
    };
    if (in_order) {
        for (Transfer* t : transfers)
            world.within(pool, t->peer_pages, [&](std::uint64_t index, Page& page) { land(index, page, t); });
    } else {
        look_up();
        world.within(pool, record.pages, [&](std::uint64_t index, Page& page) {
            if (const auto at = sent_to.find(index); at != sent_to.end()) land(index, page, at->second);
        });
    }
    u128 begun = 0;
    for (const Transfer* t : transfers) begun += t->tokens;
    Holding& held = rs->in(pool);
    held.landed = at_most(held.landed + std::min<u128>(record.tokens, begun));
    Evidence missing;
    if (!in_order) {
        std::unordered_set<std::uint64_t> here;
        pool->clip(record.pages, [&](std::uint64_t index) { here.insert(index); });
        for (const auto& [index, transfer] : sent_to)
            if (here.count(index) == 0) missing.add(index);
    }
    if (missing.empty() && record.tokens >= begun) return;
    if (in_order) look_up();
    Report more;
    more.evidence = &missing;
    more.transfer = record.transfer;
    more.reason = std::to_string(record.tokens) + " of " + to_text(begun) + " tokens and " +
                  std::to_string(record.pages.size()) + " of " + std::to_string(sent_to.size()) + " pages arrived";
    world.report(Kind::short_transfer, where, pool->id, true, rs, std::move(more));
}

// The receiver's stream has seen what the senders had seen, and the senders up to these begins.
void merge_clocks(Stream& stream, const Transfers& transfers) {
    const auto wants = [&](StreamName* name, std::int64_t epoch, std::int64_t seq) {
        if (stream.clock)
            for (const Clock::Seen& s : stream.clock->seen)
                if (s.stream == name) return std::pair{s.epoch, s.seq} < std::pair{epoch, seq};
        return true;
    };
    const auto see = [&](StreamName* name, std::int64_t epoch, std::int64_t seq) {
        if (!wants(name, epoch, seq)) return;
        if (!stream.clock) {
            stream.clock = std::make_shared<Clock>();
        } else if (stream.clock.use_count() > 1) {
            stream.clock = std::make_shared<Clock>(*stream.clock);
        }
        for (Clock::Seen& s : stream.clock->seen)
            if (s.stream == name) {
                s.epoch = epoch;
                s.seq = seq;
                return;
            }
        stream.clock->seen.push_back({name, epoch, seq});
    };
    for (const Transfer* t : transfers) {
        const ClockRef seen = t->clock;
        if (seen)
            for (const Clock::Seen& s : seen->seen)
                if (s.stream != t->where.stream) see(s.stream, s.epoch, s.seq);
        see(t->where.stream, static_cast<std::int64_t>(t->where.epoch), static_cast<std::int64_t>(t->where.seq));
    }
}

}  // namespace

void begin(World& world, Stream& stream, RequestStream* rs, const Record& record, const Where& where) {
    const std::uint64_t hash = world.transfer_hash(record);
    if (Transfer* const earlier = world.transfers.find(record.transfer, hash); earlier != nullptr)
        world.drop_transfer(earlier);
    Transfer* const transfer = world.transfer_pool.make(&world);
    retain(transfer);  // the tables' own
    transfer->hash = hash;
    keep_begin(world, transfer, record);
    transfer->sender = rs;
    transfer->where = where;
    transfer->clock = stream.clock;
    transfer->source_pool = record.pool.empty() ? world.own_pool(stream.name, false) : world.pool(record.pool);
    transfer->pool = world.pool(record.peer_pool);
    transfer->tokens = record.tokens;
    transfer->has_digests = (record.flags & KVG_HAS_DIGESTS) != 0;
    transfer->taint = world.taints.pending();
    transfer->in_flight = true;
    transfer->previous = world.last_transfer;
    (world.last_transfer != nullptr ? world.last_transfer->next : world.first_transfer) = transfer;
    world.last_transfer = transfer;
    world.transfers.insert(transfer, hash);
    rs->request->transfers.push_back(transfer);
    retain(transfer);
    const std::string_view base = base_of(transfer->id);
    if (is_piece(transfer->id)) {
        const std::uint64_t bare = world.hash(base);
        Pieces* all = world.pieces.find(base, bare);
        if (all == nullptr) {
            all = world.pieces_pool.make();
            all->base = base;
            world.pieces.insert(all, bare);
        }
        all->begun.push_back(transfer);
    }
    take_source(world, stream, rs, record, transfer, where);
    // The receiver ended it when its begin had not come in time: it is over there.
    if (!world.given_up.empty()) {
        const std::uint64_t peer = world.hash(record.peer_pool);
        if (world.given_up.went_to(hash, peer) || (!base.empty() && world.given_up.went_to(world.hash(base), peer))) {
            transfer->received = true;
            return;
        }
    }
    Pool* const pool = transfer->pool;
    world.list_incoming(transfer);
    RequestStream* const receiver = rs->request->on(pool->stream);
    if (receiver == nullptr) return;
    const bool suspected = receiver->gone || receiver->has_lates();
    std::unordered_set<std::uint64_t> seen;
    pool->clip(record.peer_pages, [&](std::uint64_t index) {
        if (!suspected && world.page(pool, index).owner == receiver) return;
        if (seen.insert(index).second) begun_late(world, receiver, pool, index, transfer);
    });
}

void end_sent(World& world, const Record& record, const Where& where) {
    const Named named(world, record.transfer, world.transfer_hash(record));
    for (Transfer* transfer : named.all) {
        if (transfer->sent || transfer->where.stream != where.stream) continue;
        transfer->sent = transfer->sent_at_known = true;
        transfer->sent_status = record.status;
        transfer->sent_at = where;
        world.unlist_outgoing(transfer);
        world.taints.close_one(transfer->taint.get());
        const auto lates = transfer->late;
        for (const Ref<Late>& late : lates) judge(world, late.get());
        if (transfer->received) world.drop_transfer(transfer);
    }
}

void end_received(World& world, Stream& stream, RequestStream* rs, const Record& record, const Where& where) {
    // Only the pool that a transfer goes to can say that it arrived: what another stream says of it is about no
    // transfer that is known.
    const Pool* const mine = record.pool.empty() ? stream.name->own_pool : world.find_pool(record.pool);
    const std::uint64_t hash = world.transfer_hash(record);
    bool begun = false;
    Transfers transfers;
    const Named named(world, record.transfer, hash);
    for (Transfer* t : named.all) {
        if (t->pool != mine) continue;
        begun = true;
        if (!t->received) transfers.push_back(t);
    }
    if (begun && ((record.status == KVG_OK && begun_before(world, rs)) || missing_begin(world, record))) {
        std::unordered_set<std::uint64_t> covered;
        for (const Transfer* t : named.all)
            if (t->pool == mine) each_page(t->peer_pages, [&](std::uint64_t index) { covered.insert(index); });
        PageRuns rest;
        each_page(record.pages, [&](std::uint64_t index) {
            if (covered.count(index) == 0) rest.append(index);
        });
        if (!rest.view().empty()) unknown(world, stream, rs, record, where, rest.view());
    } else if (!begun && !world.done.went_to(hash, world.hash(record.pool_id()))) {
        unknown(world, stream, rs, record, where, record.pages);
    }
    if (transfers.empty()) return;
    merge_clocks(stream, transfers);
    Pool* const pool = world.pool_of(record, stream.name);
    const bool ok = record.status == KVG_OK;
    const bool in_order = disjoint(transfers) && are_those_of(transfers, record.pages);
    if (ok) {
        landed(world, stream, rs, record, where, pool, transfers, in_order);
    } else if ((record.flags & KVG_HAS_DIGESTS) != 0) {
        // A receiver that refused what arrived because its bytes differ says so in its digests.
        mismatched(world, rs, record, where, pool, transfers, in_order);
    }
    for (Transfer* transfer : transfers) {
        const auto lates = transfer->late;
        if (ok)
            for (const Ref<Late>& late : lates) arrived(world, late.get(), where);
        transfer->received = true;
        world.unlist_incoming(transfer);
        for (const Ref<Late>& late : lates) {
            late->confirmed = true;
            judge(world, late.get());
        }
        if (transfer->sent) world.drop_transfer(transfer);
    }
}

}  // namespace kvguard
