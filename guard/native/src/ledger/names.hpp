// Interned ids, and sets of tenants as small numbers.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "ledger/blocks.hpp"
#include "ledger/memory.hpp"

namespace kvguard {

struct Request;
class Names;

// One id, kept while something refers to it. Ids of one `Names` are equal when their addresses are.
struct Name {
    Names* home;
    std::uint32_t refs;
    std::uint32_t size;
    Request* request;          // of a request's id: the request known by it, if any
    std::uint32_t tenant_set;  // of a tenant's id: the set of it alone, once asked for
    std::uint64_t hash;
    bool resting;              // among those that are seldom asked for
    char text[];

    std::string_view key() const { return {text, size}; }
    std::string str() const { return {text, size}; }
};

void retain(Name* name);
void release(Name* name);

class Names {
  public:
    explicit Names(const Hash& hash) : index_(hash), resting_(hash) {}
    Names(const Names&) = delete;
    Names& operator=(const Names&) = delete;

    std::uint64_t hash(std::string_view text) const { return index_.hash(text); }
    Name* find(std::string_view text) const { return find(text, index_.hash(text)); }
    Name* find(std::string_view text, std::uint64_t hash) const {
        Name* const name = index_.find(text, hash);
        return name != nullptr || resting_.size() == 0 ? name : resting_.find(text, hash);
    }
    // A name that will seldom be asked for: it is put where it is not in the way of the others.
    void rest(Name* name) { move(name, true); }
    void wake(Name* name) { move(name, false); }
    // For those who look ahead; `fresh` when it is probably not known yet.
    void prefetch(std::uint64_t hash, bool fresh) const {
        index_.prefetch(hash);
        if (fresh) resting_.prefetch(hash);
    }
    void prefetch_resting(std::uint64_t hash) const { resting_.prefetch(hash); }
    Name* peek(std::uint64_t hash) const { return index_.peek(hash); }
    // The name, made with no reference to it if it is new: the caller takes one at once.
    Name* intern(std::string_view text) { return intern(text, index_.hash(text)); }
    Name* intern(std::string_view text, std::uint64_t hash) {
        if (Name* known = find(text, hash); known != nullptr) return known;
        Name* const name = new (memory_.take(size_of(text.size()))) Name{this, 0, static_cast<std::uint32_t>(text.size()), nullptr, 0,
                                                                        hash, false};
        std::memcpy(name->text, text.data(), text.size());
        index_.insert(name, hash);
        return name;
    }
    std::size_t bytes() const { return index_.bytes() + resting_.bytes() + memory_.bytes(); }

  private:
    friend void release(Name* name);
    void forget(Name* name) {
        (name->resting ? resting_ : index_).erase(name, name->hash);
        memory_.give(name, size_of(name->size));
    }
    static std::size_t size_of(std::size_t text) { return Blocks::size_for(sizeof(Name) + text); }
    void move(Name* name, bool resting) {
        if (name->resting == resting) return;
        (resting ? index_ : resting_).erase(name, name->hash);
        (resting ? resting_ : index_).insert(name, name->hash);
        name->resting = resting;
    }
    Blocks memory_;
    Index<Name> index_, resting_;
};

inline void retain(Name* name) { ++name->refs; }
inline void release(Name* name) {
    if (--name->refs == 0) name->home->forget(name);
}

// Sets of tenants, each once, by a small number; 0 is the empty set. Counted like everything else.
class TenantSets {
  public:
    using Id = std::uint32_t;
    explicit TenantSets(const Hash& hash);

    Id single(Name* tenant);
    // The set of both, for the caller to `retain`: it goes with the last who let go of it.
    Id unite(Id a, Id b);
    void retain(Id id) {
        if (id != 0) ++sets_[id].refs;
    }
    void release(Id id) {
        if (id != 0 && --sets_[id].refs == 0) forget(id);
    }
    const std::vector<Ref<Name>>& of(Id id) const { return sets_[id].tenants; }  // by address, rising
    bool contains(Id id, const Name* tenant) const;
    // Whether `sub` lies within `super`.
    bool within(Id sub, Id super);

  private:
    struct Set {
        std::vector<Ref<Name>> tenants;
        std::uint32_t refs = 0;
        std::uint32_t serial = 0;  // tells what stood in this place before
        std::uint64_t hash = 0;
    };
    struct Cached {
        Id a = 0, b = 0, sum = 0;
        std::uint32_t serial_a = 0, serial_b = 0, serial_sum = 0;
    };
    Id intern(std::vector<Ref<Name>>&& tenants);
    void forget(Id id);
    std::uint64_t hash_of(const std::vector<Ref<Name>>& tenants) const;

    const Hash& hash_;
    std::vector<Set> sets_;
    std::vector<Id> free_;
    std::vector<Id> buckets_;  // open addressing over sets_; 0 is empty
    std::size_t used_ = 0;
    std::vector<Cached> cache_;
};

}  // namespace kvguard
