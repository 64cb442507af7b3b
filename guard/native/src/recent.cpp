#include "recent.hpp"

#include <algorithm>
#include <cstring>
#include <functional>

namespace kvguard {

namespace {

constexpr std::uint32_t kChains = 1u << 15;
constexpr std::uint32_t kFiller = ~0u;  // in place of a chain: up to the buffer's end nothing is kept
constexpr int kLongestWalk = 4096;

std::uint32_t chain_of(std::string_view request, std::string_view stream) {
    const std::hash<std::string_view> hash;
    return static_cast<std::uint32_t>((request.empty() ? ~hash(stream) : hash(request)) % kChains);
}

}  // namespace

struct Recent::Entry {
    std::uint32_t bytes;  // with this header, a multiple of 8
    std::uint32_t chain;
    std::uint32_t number;  // of its chain's, as they were added
    std::uint32_t record_bytes;
    std::uint64_t before;  // place of the chain's entry before, + 1
    std::int64_t received_ns;

    char* record() { return reinterpret_cast<char*>(this + 1); }
    bool is_of(std::string_view request, std::string_view stream) {
        kvg_record header;
        std::memcpy(&header, record(), sizeof header);
        const char* const ids = record() + sizeof header;
        const std::string_view its(ids + header.stream_bytes, header.request_bytes);
        return its == request && (!request.empty() || std::string_view(ids, header.stream_bytes) == stream);
    }
};

Recent::Recent(std::size_t limit_bytes)
    : limit_(std::max<std::size_t>(limit_bytes, 4096) & ~std::size_t{7}),
      bytes_(new char[limit_]),  // not touched before it is used
      heads_(new Head[kChains]()) {}

Recent::~Recent() = default;

Recent::Entry* Recent::entry(std::uint64_t place) const {
    return reinterpret_cast<Entry*>(bytes_.get() + place % limit_);
}

void Recent::add(const Record& record, std::int64_t received_ns) {
    const std::size_t bytes = sizeof(Entry) + padded(record.bytes.size());
    if (bytes > limit_ / 8) return;
    make_room(bytes);
    Entry* const made = extend(bytes);
    made->bytes = static_cast<std::uint32_t>(bytes);
    made->chain = chain_of(record.request, record.stream);
    made->number = heads_[made->chain].entries++;
    made->record_bytes = static_cast<std::uint32_t>(record.bytes.size());
    made->received_ns = received_ns;
    std::memcpy(made->record(), record.bytes.data(), record.bytes.size());
    link(made);
    // About as long as the one that is now beyond its request's share.
    if (heads_[made->chain].kept > kOfOne) spare_ = std::min(spare_ + bytes, limit_ / 2);
}

// Lets go of the oldest until there is room, but keeps on those that are of their request's newest for as long as others
// are beyond their request's share: each byte of these pays for one.
void Recent::make_room(std::size_t bytes) {
    again_.clear();
    std::size_t wanted = bytes, longest = bytes;  // at the buffer's end up to the longest is lost
    while (end_ - begin_ + wanted + longest > limit_) {
        const std::size_t left = limit_ - begin_ % limit_;
        Entry* const oldest = entry(begin_);
        const std::size_t size = left < sizeof(Entry) ? left : oldest->bytes;
        begin_ += size;
        if (left < sizeof(Entry) || oldest->chain == kFiller) continue;
        Head& head = heads_[oldest->chain];
        --head.kept;
        if (head.entries - oldest->number <= kOfOne && spare_ >= size) {
            spare_ -= size;
            again_.append(reinterpret_cast<const char*>(oldest), size);
            wanted += size;
            longest = std::max(longest, size);
        }
    }
    for (std::size_t at = 0; at < again_.size();) {
        Entry header;
        std::memcpy(&header, again_.data() + at, sizeof header);
        Entry* const made = extend(header.bytes);
        std::memcpy(static_cast<void*>(made), again_.data() + at, header.bytes);
        link(made);
        at += header.bytes;
    }
}

// Where the next entry goes; there must be room.
Recent::Entry* Recent::extend(std::size_t bytes) {
    const std::size_t left = limit_ - end_ % limit_;
    if (left < bytes) {
        if (left >= sizeof(Entry)) {
            entry(end_)->bytes = static_cast<std::uint32_t>(left);
            entry(end_)->chain = kFiller;
        }
        end_ += left;
    }
    return entry(end_);
}

void Recent::link(Entry* made) {
    Head& head = heads_[made->chain];
    made->before = head.place;
    head.place = end_ + 1;
    ++head.kept;
    end_ += made->bytes;
}

void Recent::of_request(std::string_view request, std::vector<Kept>& out) const { collect(request, {}, out); }

void Recent::of_stream(std::string_view stream, std::vector<Kept>& out) const { collect({}, stream, out); }

void Recent::collect(std::string_view request, std::string_view stream, std::vector<Kept>& out) const {
    std::vector<Entry*> found;
    std::uint64_t place = heads_[chain_of(request, stream)].place;
    for (int steps = 0; place > begin_ && steps < kLongestWalk; ++steps) {
        Entry* const kept = entry(place - 1);
        if (kept->is_of(request, stream)) found.push_back(kept);
        place = kept->before;
    }
    // Those that were kept on stand behind newer ones.
    std::sort(found.begin(), found.end(), [](Entry* a, Entry* b) { return a->number > b->number; });
    if (found.size() > kOfOne) found.resize(kOfOne);
    for (Entry* const kept : found) out.push_back({{kept->record(), kept->record_bytes}, kept->received_ns});
}

}  // namespace kvguard
