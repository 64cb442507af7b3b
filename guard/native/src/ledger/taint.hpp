// Labels: whose data some bytes come from, as far as is known now and as it becomes known.
//
// The graph of guard/ledger/taint.py: what is added to an open label flows on to the labels made from it; a closed one
// keeps no edges. Labels are counted. Open labels that feed each other in a circle, which counting would keep for
// good, are found by `TaintGraph::collect`.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "ledger/memory.hpp"
#include "ledger/names.hpp"

namespace kvguard {

class TaintGraph;
struct Taint;

// Called back when a label grows, until it is closed.
class Watcher {
  public:
    virtual ~Watcher() = default;
    virtual void grown(Taint& taint) = 0;
    // Takes over what `other` watches for, if it is for the same; false when it is not.
    virtual bool merge(Watcher& other) = 0;
};

// Some requests that wrote one tenant's bytes: the `kMaxOrigins` smallest ids.
struct Origin {
    Name* tenant = nullptr;
    SmallVec<Name*, 1> requests;  // sorted by text
};
inline constexpr std::uint32_t kMaxOrigins = 8;

// Origins by their tenants' addresses. Nearly always there is one.
class Origins {
  public:
    std::size_t size() const { return first_.tenant == nullptr ? 0 : 1 + (rest_ ? rest_->size() : 0); }
    Origin& operator[](std::size_t i) { return i == 0 ? first_ : (*rest_)[i - 1]; }
    const Origin& operator[](std::size_t i) const { return i == 0 ? first_ : (*rest_)[i - 1]; }
    // Where the tenant's is, or would be.
    std::size_t place_of(const Name* tenant) const {
        if (first_.tenant == nullptr || first_.tenant >= tenant) return 0;
        if (!rest_) return 1;
        const auto at = std::lower_bound(rest_->begin(), rest_->end(), tenant,
                                         [](const Origin& o, const Name* t) { return o.tenant < t; });
        return 1 + static_cast<std::size_t>(at - rest_->begin());
    }
    // The tenant's; null when there is none.
    const Origin* find(const Name* tenant) const {
        const std::size_t at = place_of(tenant);
        return at < size() && (*this)[at].tenant == tenant ? &(*this)[at] : nullptr;
    }
    void insert(std::size_t at, const Origin& origin) {
        if (first_.tenant == nullptr) {
            first_ = origin;
            return;
        }
        if (!rest_) rest_ = std::make_unique<std::vector<Origin>>();
        rest_->insert(rest_->begin() + static_cast<std::ptrdiff_t>(at == 0 ? 0 : at - 1), at == 0 ? first_ : origin);
        if (at == 0) first_ = origin;
    }

  private:
    Origin first_;
    std::unique_ptr<std::vector<Origin>> rest_;
};

struct Taint {
    explicit Taint(TaintGraph* graph) : graph(graph) {}
    ~Taint();

    TaintGraph* graph;
    std::uint32_t refs = 0;
    std::uint32_t pending = 0;      // how many sources may still add
    TenantSets::Id tenants = 0;     // all of them
    TenantSets::Id sure = 0;        // those that are there beyond doubt
    Origins origins;                // holds references to the names

    struct Edge {
        Taint* to;
        bool doubtful;
    };
    struct Open {
        SmallVec<Edge, 2> outs;  // holds references
        std::vector<std::unique_ptr<Watcher>> watchers;
        Taint *previous = nullptr, *next = nullptr;  // among the open ones
        std::uint32_t edges_in = 0;
        bool marked = false;
    };
    Open* more = nullptr;  // owned

    bool open() const { return pending > 0; }
    bool nothing() const { return tenants == 0 && pending == 0; }
};

void retain(Taint* taint);
void release(Taint* taint);

class TaintGraph {
  public:
    explicit TaintGraph(const Hash& hash, Names& tenants) : sets(hash), public_name(tenants.intern("public")) {}
    Ref<Taint> single(Name* tenant, Name* request);  // closed; no origin when request is null
    Ref<Taint> pending();                            // empty, open until its one source closes
    // What a copy of the bytes has for a label when it is not certain that this is theirs.
    Ref<Taint> doubted(Taint* taint);
    // Takes in all that `from` holds and will hold. Only while open, or before anything was made from it.
    void absorb(Taint* into, Taint* from, bool doubtful = false);
    void close_one(Taint* taint);
    // The label of bytes made from all of these (null ones are empty); one of them itself when it says it all.
    Ref<Taint> join(Taint* const* taints, std::size_t count);
    Ref<Taint> join(Taint* a, Taint* b) {
        Taint* const both[] = {a, b};
        return join(both, 2);
    }
    void watch(Taint* taint, std::unique_ptr<Watcher> watcher);

    // The tenants in it that `tenant` must not see.
    bool foreign(TenantSets::Id set, const Name* tenant) const {
        if (set == 0 || set == tenant->tenant_set) return false;
        for (const auto& t : sets.of(set))
            if (t.get() != tenant && t.get() != public_name.get()) return true;
        return false;
    }

    TenantSets sets;
    Ref<Name> public_name;
    std::size_t bytes() const { return pool_.bytes() + open_pool_.bytes(); }

  private:
    friend struct Taint;
    friend void release(Taint* taint);
    void add(Taint* into, const Origins& origins, TenantSets::Id tenants, TenantSets::Id sure);
    bool merge(Taint* into, const Origins& more);
    bool covers(const Taint* first, const Taint* other) const;
    static bool feeds(const Taint* from, const Taint* to);
    void make_open(Taint* taint);
    void unlink(Taint* taint);
    void close(Taint* taint);
    void close_soon(Taint* taint);
    void bury(Taint* taint);
    void collect();

    ObjectPool<Taint> pool_;
    ObjectPool<Taint::Open> open_pool_;
    Taint* first_open_ = nullptr;
    std::size_t open_ = 0, collect_at_ = 1024;
    std::vector<Ref<Taint>> closing_;  // their last source has closed
    std::vector<Taint*> dead_;         // nobody refers to them
    bool closing_now_ = false, burying_ = false;
};

}  // namespace kvguard
