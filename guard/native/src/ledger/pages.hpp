// Pages and pools: who owns a page, whether its bytes are its owner's, and whose data they come from.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "ledger/memory.hpp"
#include "ledger/taint.hpp"

namespace kvguard {

struct Late;
struct RequestStream;
struct Transfer;
struct Pool;

// A stream's or pool's owner as a name; kept for good (there are at most as many as streams and pools).
struct StreamName {
    std::string text;
    Pool* own_pool = nullptr;  // the pool of the same name
    std::uint64_t losses = 0;  // times that some of its records were missed
    bool blind = false;        // something of its present epoch was missed: what was made in it may not be known
    std::string_view key() const { return text; }
};

// What few pages have: transfers in flight that read from it, writers of earlier owners that may still come.
struct Links {
    SmallVec<Transfer*, 1> outgoing;
    std::vector<Ref<Late>> late;
};

// One page of a pool, in its present generation: 32 bytes.
struct Page {
    static constexpr std::uint32_t kExists = 1;
    static constexpr std::uint32_t kCached = 2;   // in the prefix cache: no owner, contents kept, may be shared
    static constexpr std::uint32_t kValid = 4;    // its owner's bytes are in it, this generation
    static constexpr std::uint32_t kTouched = 8;  // something was written or landed in it, this generation
    static constexpr std::uint32_t kShared = 16;  // some request may read it without owning it: see World::sharers
    static constexpr std::uint32_t kSeen = 32;    // its owner found nothing amiss when it read it last: see `RequestStream::look_again`

    RequestStream* owner = nullptr;  // counted
    Taint* label = nullptr;          // counted; null: nobody's data
    Links* links = nullptr;          // owned; null: none
    std::uint32_t share_epoch = 0;   // changes when all its sharers go at once
    std::uint32_t flags : 6 = 0;
    std::uint32_t incoming : 7 = 0;  // how often transfers in flight name it as destination; kMaxIncoming: or more
    std::uint32_t sight : 19 = 0;    // the pool's `sight` when it was handed out; another: the guard lost sight of it

    static constexpr std::uint32_t kMaxIncoming = 127;

    bool is(std::uint32_t flag) const { return (flags & flag) != 0; }
    void set(std::uint32_t flag, bool on) { flags = on ? flags | flag : flags & ~flag; }
    // Something else of it than its kShared and kCached is about to change.
    void change() {
        if (is(kSeen)) forget_seen();
    }
    void forget_seen();
    void set_label(Taint* taint) {
        if (taint == label) return;
        change();
        if (taint != nullptr) retain(taint);
        if (label != nullptr) release(label);
        label = taint;
    }
    void drop_sharers() {
        if (is(kShared)) {
            ++share_epoch;
            set(kShared, false);
        }
    }
};
static_assert(sizeof(Page) == 32);

inline constexpr std::uint64_t kBlockPages = 512;  // pages are made, and counted against a limit, in blocks

struct Pool {
    static constexpr std::uint32_t kMaxSight = (1u << 19) - 1;

    std::string id;
    Ref<Name> name;  // once asked for
    StreamName* stream = nullptr;
    std::uint64_t limit = 0;  // pages kept track of at most
    std::uint64_t size = 0;   // pages, once announced; the limit until then
    bool announced = false;
    std::uint64_t page_tokens = 0;  // once announced
    int role = -1;                  // kvg_role, once announced
    bool lost_sight = false;
    bool lost_count = false;  // transfers name pages of it that their `incoming` does not count
    std::uint64_t hash = 0;   // of its id
    std::uint32_t sight = 1;
    std::uint32_t changes = 0;  // times that something may have changed for all of its pages at once
    std::uint32_t incarnation = 1;  // changes with each clear
    std::uint64_t pages = 0;        // those touched
    std::uint64_t blocks_kept = 0;
    std::vector<std::unique_ptr<Page[]>> blocks;

    std::string_view key() const { return id; }
    // Whether every page that it can have has its memory.
    bool complete() const { return blocks_kept == blocks.size() && blocks_kept * kBlockPages >= end(); }
    std::uint64_t end() const { return size < limit ? size : limit; }
    // Capacity in tokens; meaningless before it is announced.
    unsigned __int128 tokens() const { return static_cast<unsigned __int128>(size) * page_tokens; }

    Page* find(std::uint64_t index) const {
        const std::uint64_t block = index / kBlockPages;
        if (block >= blocks.size() || !blocks[block]) return nullptr;
        Page* const page = &blocks[block][index % kBlockPages];
        return page->is(Page::kExists) ? page : nullptr;
    }
    // Its memory, if there is some, be it used or not.
    Page* slot(std::uint64_t index) const {
        const std::uint64_t block = index / kBlockPages;
        return block < blocks.size() && blocks[block] ? &blocks[block][index % kBlockPages] : nullptr;
    }
    void prefetch(std::uint64_t index) const {
        const std::uint64_t block = index / kBlockPages;
        if (block < blocks.size() && blocks[block]) __builtin_prefetch(&blocks[block][index % kBlockPages], 1);
    }
    // Makes room for a block of pages; whether there was none.
    bool keep_block(std::uint64_t block) {
        if (block >= blocks.size()) blocks.resize(block + 1);
        if (blocks[block]) return false;
        blocks[block] = std::make_unique<Page[]>(kBlockPages);
        ++blocks_kept;
        return true;
    }
    // The page, made if it was never touched.
    Page& page(std::uint64_t index) {
        const std::uint64_t block = index / kBlockPages;
        keep_block(block);
        Page& page = blocks[block][index % kBlockPages];
        if (!page.is(Page::kExists)) {
            page.flags = Page::kExists;
            page.sight = lost_sight ? 0 : sight;
            ++pages;
        }
        return page;
    }
    bool unvouched(const Page& page) const { return page.sight != sight; }
    // Something about the pool was missed: vouch for no page until it is handed out again.
    void lose_sight() {
        lost_sight = true;
        ++changes;
        if (sight < kMaxSight) {
            ++sight;
            return;
        }
        sight = 1;
        each([](std::uint64_t, Page& page) { page.sight = 0; });
    }
    template <class F>
    void each(F&& visit) {
        for (std::size_t b = 0; b < blocks.size(); ++b) {
            if (!blocks[b]) continue;
            for (std::uint64_t i = 0; i < kBlockPages; ++i)
                if (blocks[b][i].is(Page::kExists)) visit(b * kBlockPages + i, blocks[b][i]);
        }
    }
    // The pages of the set that the pool has (and the guard keeps track of), in order, made if need be.
    template <class F>
    void within(const Pages& set, F&& visit) {
        clip(set, [&](std::uint64_t index) { visit(index, page(index)); });
    }
    // Their indices alone.
    template <class F>
    void clip(const Pages& set, F&& visit) const {
        const std::uint64_t last = end();
        for (std::uint32_t i = 0; i < set.runs(); ++i) {
            const Pages::Run run = set.run(i);
            const std::uint64_t stop = run.stop() < last ? run.stop() : last;
            for (std::uint64_t index = run.first; index < stop; ++index) visit(index);
        }
    }
};

}  // namespace kvguard
