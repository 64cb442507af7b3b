#include "ledger/taint.hpp"

#include <algorithm>
#include <random>
#include <utility>

namespace kvguard {

Hash::Hash() {
    std::random_device random;
    const auto draw = [&] { return (std::uint64_t{random()} << 32 | random()) | 1; };
    seed_ = draw();
    for (auto& key : key_) key = draw();
}

// --- sets of tenants

TenantSets::TenantSets(const Hash& hash) : hash_(hash), sets_(1), buckets_(64), cache_(1024) {}

std::uint64_t TenantSets::hash_of(const std::vector<Ref<Name>>& tenants) const {
    std::uint64_t h = tenants.size();
    for (const auto& t : tenants) h = hash_(h, reinterpret_cast<std::uintptr_t>(t.get()));
    return h;
}

TenantSets::Id TenantSets::intern(std::vector<Ref<Name>>&& tenants) {
    const std::uint64_t hash = hash_of(tenants);
    std::size_t i = hash & (buckets_.size() - 1);
    for (; buckets_[i] != 0; i = (i + 1) & (buckets_.size() - 1)) {
        const Set& set = sets_[buckets_[i]];
        if (set.hash == hash && set.tenants.size() == tenants.size() &&
            std::equal(set.tenants.begin(), set.tenants.end(), tenants.begin(),
                       [](const Ref<Name>& a, const Ref<Name>& b) { return a.get() == b.get(); }))
            return buckets_[i];
    }
    Id id;
    if (free_.empty()) {
        id = static_cast<Id>(sets_.size());
        sets_.emplace_back();
    } else {
        id = free_.back();
        free_.pop_back();
    }
    Set& set = sets_[id];
    set.tenants = std::move(tenants);
    set.hash = hash;
    set.refs = 0;
    ++set.serial;
    buckets_[i] = id;
    if (2 * ++used_ > buckets_.size()) {
        std::vector<Id> old(2 * buckets_.size());
        old.swap(buckets_);
        for (const Id known : old) {
            if (known == 0) continue;
            std::size_t at = sets_[known].hash & (buckets_.size() - 1);
            while (buckets_[at] != 0) at = (at + 1) & (buckets_.size() - 1);
            buckets_[at] = known;
        }
    }
    return id;
}

void TenantSets::forget(Id id) {
    Set& set = sets_[id];
    const std::size_t mask = buckets_.size() - 1;
    std::size_t i = set.hash & mask;
    while (buckets_[i] != id) i = (i + 1) & mask;
    for (std::size_t j = (i + 1) & mask; buckets_[j] != 0; j = (j + 1) & mask) {
        const std::size_t home = sets_[buckets_[j]].hash & mask;
        if (((j - home) & mask) >= ((j - i) & mask)) {
            buckets_[i] = buckets_[j];
            i = j;
        }
    }
    buckets_[i] = 0;
    --used_;
    if (set.tenants.size() == 1) set.tenants[0]->tenant_set = 0;
    ++set.serial;
    std::vector<Ref<Name>> gone;
    gone.swap(set.tenants);
    free_.push_back(id);
}

TenantSets::Id TenantSets::single(Name* tenant) {
    if (tenant->tenant_set == 0) {
        std::vector<Ref<Name>> one;
        one.emplace_back(tenant);
        tenant->tenant_set = intern(std::move(one));
    }
    return tenant->tenant_set;
}

bool TenantSets::contains(Id id, const Name* tenant) const {
    if (id != 0 && id == tenant->tenant_set) return true;
    for (const auto& t : sets_[id].tenants)
        if (t.get() == tenant) return true;
    return false;
}

bool TenantSets::within(Id sub, Id super) {
    if (sub == 0 || sub == super) return true;
    if (super == 0) return false;
    return std::includes(sets_[super].tenants.begin(), sets_[super].tenants.end(), sets_[sub].tenants.begin(),
                         sets_[sub].tenants.end(),
                         [](const Ref<Name>& a, const Ref<Name>& b) { return a.get() < b.get(); });
}

TenantSets::Id TenantSets::unite(Id a, Id b) {
    if (a == b || b == 0) return a;
    if (a == 0) return b;
    if (a > b) std::swap(a, b);
    Cached& cached = cache_[hash_(a, b) & (cache_.size() - 1)];
    if (cached.a == a && cached.b == b && cached.serial_a == sets_[a].serial && cached.serial_b == sets_[b].serial &&
        cached.serial_sum == sets_[cached.sum].serial)
        return cached.sum;
    std::vector<Ref<Name>> both;
    both.reserve(sets_[a].tenants.size() + sets_[b].tenants.size());
    std::set_union(sets_[a].tenants.begin(), sets_[a].tenants.end(), sets_[b].tenants.begin(), sets_[b].tenants.end(),
                   std::back_inserter(both),
                   [](const Ref<Name>& x, const Ref<Name>& y) { return x.get() < y.get(); });
    const Id sum = intern(std::move(both));
    cached = {a, b, sum, sets_[a].serial, sets_[b].serial, sets_[sum].serial};
    return sum;
}

// --- labels

void retain(Taint* taint) { ++taint->refs; }
void release(Taint* taint) {
    if (--taint->refs == 0) taint->graph->bury(taint);
}

// One at a time: the end of one may be the end of a long chain.
void TaintGraph::bury(Taint* taint) {
    dead_.push_back(taint);
    if (burying_) return;
    burying_ = true;
    while (!dead_.empty()) {
        Taint* const gone = dead_.back();
        dead_.pop_back();
        pool_.destroy(gone);
    }
    burying_ = false;
}

Taint::~Taint() {
    if (tearing_down) return;
    if (more != nullptr) graph->close(this);
    for (std::size_t i = 0; i < origins.size(); ++i) {
        for (Name* request : origins[i].requests) release(request);
        release(origins[i].tenant);
    }
    graph->sets.release(tenants);
    graph->sets.release(sure);
}

Ref<Taint> TaintGraph::single(Name* tenant, Name* request) {
    Taint* const taint = pool_.make(this);
    Origin origin{tenant, {}};
    retain(tenant);
    if (request != nullptr) {
        retain(request);
        origin.requests.push_back(request);
    }
    taint->origins.insert(0, origin);
    taint->tenants = taint->sure = sets.single(tenant);
    sets.retain(taint->tenants);
    sets.retain(taint->sure);
    return taint;
}

Ref<Taint> TaintGraph::pending() {
    Taint* const taint = pool_.make(this);
    Ref<Taint> keep(taint);
    make_open(taint);
    taint->pending = 1;
    return keep;
}

Ref<Taint> TaintGraph::doubted(Taint* taint) {
    Ref<Taint> copy(pool_.make(this));
    absorb(copy.get(), taint, true);
    return copy;
}

void TaintGraph::make_open(Taint* taint) {
    taint->more = open_pool_.make();
    taint->more->next = first_open_;
    if (first_open_ != nullptr) first_open_->more->previous = taint;
    first_open_ = taint;
    if (++open_ > collect_at_) collect();
}

void TaintGraph::unlink(Taint* taint) {
    Taint::Open& open = *taint->more;
    if (open.previous != nullptr) {
        open.previous->more->next = open.next;
    } else {
        first_open_ = open.next;
    }
    if (open.next != nullptr) open.next->more->previous = open.previous;
    --open_;
}

// Lets go of its edges and watchers: nothing more can be added to it.
void TaintGraph::close(Taint* taint) {
    unlink(taint);
    taint->pending = 0;
    Taint::Open* const gone = std::exchange(taint->more, nullptr);
    for (const Taint::Edge& edge : gone->outs) {
        if (edge.to->more) --edge.to->more->edges_in;
        if (edge.to->pending > 0 && --edge.to->pending == 0) close_soon(edge.to);
        release(edge.to);
    }
    open_pool_.destroy(gone);
}

void TaintGraph::close_soon(Taint* taint) {
    closing_.emplace_back(taint);
    if (closing_now_) return;
    closing_now_ = true;
    while (!closing_.empty()) {
        const Ref<Taint> node = std::move(closing_.back());
        closing_.pop_back();
        if (node->more) close(node.get());
    }
    closing_now_ = false;
}

void TaintGraph::absorb(Taint* into, Taint* from, bool doubtful) {
    if (from == nullptr || from == into) return;
    add(into, from->origins, from->tenants, doubtful ? 0 : from->sure);
    if (from->open()) {
        Ref<Taint> keep(into);
        if (!into->more) make_open(into);
        ++into->pending;
        ++into->more->edges_in;
        retain(into);
        from->more->outs.push_back({into, doubtful});
    }
}

void TaintGraph::close_one(Taint* taint) {
    if (taint->pending > 0 && --taint->pending == 0) close_soon(taint);
}

void TaintGraph::watch(Taint* taint, std::unique_ptr<Watcher> watcher) {
    if (taint == nullptr || !taint->open()) return;
    auto& watchers = taint->more->watchers;
    for (std::size_t i = watchers.size(); i-- > 0;)
        if (watchers[i]->merge(*watcher)) return;
    watchers.push_back(std::move(watcher));
}

void TaintGraph::add(Taint* into, const Origins& origins, TenantSets::Id tenants, TenantSets::Id sure) {
    if (!merge(into, origins) && sets.within(sure, into->sure)) return;
    const auto widen = [&](TenantSets::Id& set, TenantSets::Id more) {
        const TenantSets::Id wider = sets.unite(set, more);
        sets.retain(wider);
        sets.release(set);
        set = wider;
    };
    widen(into->tenants, tenants);
    widen(into->sure, sure);
    if (!into->more) return;
    std::vector<Taint*> grown{into};
    std::vector<Taint*> from{into};
    // Whatever flows on is kept by the edges it flows along.
    while (!from.empty()) {
        Taint* const node = from.back();
        from.pop_back();
        for (const Taint::Edge& edge : node->more->outs) {
            Taint* const out = edge.to;
            const TenantSets::Id surely = edge.doubtful ? 0 : node->sure;
            if (!merge(out, node->origins) && sets.within(surely, out->sure)) continue;
            widen(out->tenants, node->tenants);
            widen(out->sure, surely);
            if (!out->more) continue;
            grown.push_back(out);
            from.push_back(out);
        }
    }
    for (Taint* node : grown)
        for (std::size_t i = 0; node->more && i < node->more->watchers.size(); ++i)
            node->more->watchers[i]->grown(*node);
}

// Adds origins; whether any was new. (The sets of tenants are the caller's to widen.)
bool TaintGraph::merge(Taint* into, const Origins& more) {
    bool changed = false;
    for (std::size_t i = 0; i < more.size(); ++i) {
        const Origin& origin = more[i];
        const std::size_t at = into->origins.place_of(origin.tenant);
        if (at == into->origins.size() || into->origins[at].tenant != origin.tenant) {
            retain(origin.tenant);
            for (Name* request : origin.requests) retain(request);
            into->origins.insert(at, origin);
            changed = true;
            continue;
        }
        for (Name* request : origin.requests) {
            auto& known = into->origins[at].requests;
            if (known.contains(request)) continue;
            std::uint32_t place = 0;
            while (place < known.size() && known[place]->key() < request->key()) ++place;
            if (place >= kMaxOrigins) continue;
            retain(request);
            known.push_back(request);
            for (std::uint32_t i = known.size() - 1; i > place; --i) std::swap(known[i], known[i - 1]);
            if (known.size() > kMaxOrigins) {
                release(known.back());
                known.pop_back();
            }
            changed = true;
        }
    }
    return changed;
}

// Whether `first` would not grow by `other`.
bool TaintGraph::covers(const Taint* first, const Taint* other) const {
    for (std::size_t i = 0; i < other->origins.size(); ++i) {
        const Origin& origin = other->origins[i];
        const Origin* const at = first->origins.find(origin.tenant);
        if (at == nullptr) return false;
        for (const Name* request : origin.requests) {
            bool known = false;
            for (const Name* r : at->requests) known |= r == request;
            if (known) continue;
            if (at->requests.size() < kMaxOrigins || request->key() < at->requests[kMaxOrigins - 1]->key())
                return false;
        }
    }
    return true;
}

// Whether all that an open label takes on flows on to another already (as far as a short look tells).
bool TaintGraph::feeds(const Taint* from, const Taint* to) {
    const auto& outs = from->more->outs;
    for (std::uint32_t i = outs.size(), looks = 0; i > 0 && looks < 8; ++looks)
        if (const Taint::Edge& edge = outs[--i]; edge.to == to && !edge.doubtful) return true;
    return false;
}

Ref<Taint> TaintGraph::join(Taint* const* taints, std::size_t count) {
    SmallVec<Taint*, 8> distinct;
    for (std::size_t i = 0; i < count; ++i) {
        Taint* const taint = taints[i];
        if (taint == nullptr || taint->nothing() || distinct.contains(taint)) continue;
        distinct.push_back(taint);
    }
    if (distinct.empty()) return {};
    Taint* const first = distinct[0];
    bool enough = true;
    for (std::uint32_t i = 1; i < distinct.size() && enough; ++i)
        enough = (!distinct[i]->open() || feeds(distinct[i], first)) && covers(first, distinct[i]) &&
                 sets.within(distinct[i]->sure, first->sure);
    if (enough) return first;
    Ref<Taint> both(pool_.make(this));
    for (Taint* taint : distinct) absorb(both.get(), taint);
    return both;
}

// Finds open labels that only a circle of edges keeps, and breaks it.
void TaintGraph::collect() {
    std::vector<Taint*> reached;
    for (Taint* t = first_open_; t != nullptr; t = t->more->next) {
        t->more->marked = t->refs > t->more->edges_in;
        if (t->more->marked) reached.push_back(t);
    }
    while (!reached.empty()) {
        Taint* const node = reached.back();
        reached.pop_back();
        for (const Taint::Edge& edge : node->more->outs)
            if (edge.to->more && !edge.to->more->marked) {
                edge.to->more->marked = true;
                reached.push_back(edge.to);
            }
    }
    std::vector<Ref<Taint>> lost;
    for (Taint* t = first_open_; t != nullptr; t = t->more->next)
        if (!t->more->marked) lost.emplace_back(t);
    for (const Ref<Taint>& taint : lost)
        if (taint->more) close(taint.get());
    lost.clear();
    collect_at_ = std::max<std::size_t>(1024, 2 * open_);
}

}  // namespace kvguard
