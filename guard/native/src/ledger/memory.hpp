// Where the ledger's objects live: recycled slots, counted references, small vectors, hash indices.
#pragma once

#include <cstdint>
#include <cstring>
#include <memory>
#include <new>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

namespace kvguard {

// While a ledger is torn down its objects go all at once and references let go of nothing.
inline thread_local bool tearing_down = false;

// Slots for objects of one type. Memory goes back to the system only with the pool, so that a stale pointer can still
// be told from a live one by the object's serial number.
template <class T>
class ObjectPool {
  public:
    ObjectPool() = default;
    ObjectPool(const ObjectPool&) = delete;
    ObjectPool& operator=(const ObjectPool&) = delete;
    ~ObjectPool() {
        for (auto& chunk : chunks_)
            for (auto& slot : chunk->slots)
                if (slot.live) reinterpret_cast<T*>(slot.bytes)->~T();
    }

    template <class... Args>
    T* make(Args&&... args) {
        if (free_ == nullptr) grow();
        Slot* const slot = free_;
        free_ = slot->next;
        T* const object = new (slot->bytes) T(std::forward<Args>(args)...);
        slot->live = true;
        return object;
    }

    void destroy(T* object) {
        Slot* const slot = reinterpret_cast<Slot*>(object);
        object->~T();
        slot->live = false;
        slot->next = free_;
        free_ = slot;
    }

    // Whether the slot that this pointer (once one of the pool's) points to holds an object now.
    static bool is_live(const T* object) { return reinterpret_cast<const Slot*>(object)->live; }
    std::size_t bytes() const { return chunks_.size() * sizeof(Chunk); }

  private:
    struct Slot {
        alignas(T) unsigned char bytes[sizeof(T)];  // first: a slot is found by its object's address
        Slot* next;
        bool live;
    };
    static constexpr std::size_t kSlots = 128;
    struct Chunk {
        Slot slots[kSlots];
    };

    void grow() {
        chunks_.push_back(std::make_unique_for_overwrite<Chunk>());
        for (std::size_t i = kSlots; i-- > 0;) {
            Slot& slot = chunks_.back()->slots[i];
            slot.live = false;
            slot.next = free_;
            free_ = &slot;
        }
    }

    std::vector<std::unique_ptr<Chunk>> chunks_;
    Slot* free_ = nullptr;
};

// A counted reference: `retain(T*)` and `release(T*)` are found by the type.
template <class T>
class Ref {
  public:
    Ref() = default;
    Ref(T* p) : p_(p) {
        if (p_ != nullptr) retain(p_);
    }
    Ref(const Ref& other) : Ref(other.p_) {}
    Ref(Ref&& other) noexcept : p_(std::exchange(other.p_, nullptr)) {}
    Ref& operator=(Ref other) noexcept {
        std::swap(p_, other.p_);
        return *this;
    }
    ~Ref() {
        if (p_ != nullptr && !tearing_down) release(p_);
    }

    T* get() const { return p_; }
    T* operator->() const { return p_; }
    T& operator*() const { return *p_; }
    explicit operator bool() const { return p_ != nullptr; }
    bool operator==(const T* other) const { return p_ == other; }

  private:
    T* p_ = nullptr;
};

// A vector of plain values that keeps the first N within itself.
template <class T, std::uint32_t N>
class SmallVec {
    static_assert(std::is_trivially_copyable_v<T>);

  public:
    SmallVec() = default;
    SmallVec(const SmallVec& other) { assign(other.begin(), other.size()); }
    SmallVec(SmallVec&& other) noexcept { take(other); }
    SmallVec& operator=(const SmallVec& other) {
        if (this != &other) assign(other.begin(), other.size());
        return *this;
    }
    SmallVec& operator=(SmallVec&& other) noexcept {
        if (this != &other) {
            if (data_ != inline_data()) delete[] raw();
            take(other);
        }
        return *this;
    }
    ~SmallVec() {
        if (data_ != inline_data()) delete[] raw();
    }

    void assign(const T* from, std::uint32_t count) {
        size_ = 0;
        reserve(count);
        if (count != 0) std::memcpy(data_, from, sizeof(T) * count);
        size_ = count;
    }
    void push_back(T value) {
        if (size_ == capacity_) reserve(2 * capacity_);
        data_[size_++] = value;
    }
    void reserve(std::uint32_t count) {
        if (count <= capacity_) return;
        auto* const bigger = reinterpret_cast<T*>(new unsigned char[sizeof(T) * count]);
        if (size_ != 0) std::memcpy(bigger, data_, sizeof(T) * size_);
        if (data_ != inline_data()) delete[] raw();
        data_ = bigger;
        capacity_ = count;
    }
    // Takes one out and keeps the others' order.
    void erase(std::uint32_t at) {
        std::memmove(data_ + at, data_ + at + 1, sizeof(T) * (size_ - at - 1));
        --size_;
    }
    // Takes the first that is equal out; false when none is.
    bool remove(T value) {
        for (std::uint32_t i = 0; i < size_; ++i)
            if (data_[i] == value) {
                erase(i);
                return true;
            }
        return false;
    }
    bool contains(T value) const {
        for (const T& item : *this)
            if (item == value) return true;
        return false;
    }
    void clear() { size_ = 0; }
    void pop_back() { --size_; }

    T* begin() { return data_; }
    T* end() { return data_ + size_; }
    const T* begin() const { return data_; }
    const T* end() const { return data_ + size_; }
    T& operator[](std::uint32_t i) { return data_[i]; }
    const T& operator[](std::uint32_t i) const { return data_[i]; }
    T& back() { return data_[size_ - 1]; }
    std::uint32_t size() const { return size_; }
    bool empty() const { return size_ == 0; }

  private:
    T* inline_data() { return reinterpret_cast<T*>(inline_); }
    unsigned char* raw() { return reinterpret_cast<unsigned char*>(data_); }
    void take(SmallVec& other) {
        if (other.data_ == other.inline_data()) {
            data_ = inline_data();
            capacity_ = N;
            std::memcpy(inline_, other.inline_, sizeof inline_);
        } else {
            data_ = other.data_;
            capacity_ = other.capacity_;
            other.data_ = other.inline_data();
            other.capacity_ = N;
        }
        size_ = std::exchange(other.size_, 0);
    }

    alignas(T) unsigned char inline_[sizeof(T) * N];
    T* data_ = inline_data();
    std::uint32_t size_ = 0;
    std::uint32_t capacity_ = N;
};

// A seeded 64-bit hash of some bytes: fast, and not to be foreseen from outside the process.
class Hash {
  public:
    Hash();
    std::uint64_t operator()(std::string_view text) const {
        const char* p = text.data();
        std::size_t n = text.size();
        std::uint64_t h = seed_ ^ (n * 0x9e3779b97f4a7c15u);
        if (n > 48) {
            std::uint64_t g = h ^ key_[3];
            do {
                h = mix(word(p) ^ key_[0], word(p + 8) ^ h);
                g = mix(word(p + 16) ^ key_[1], word(p + 24) ^ g);
                p += 32;
                n -= 32;
            } while (n > 32);
            h ^= g;
        }
        while (n > 16) {
            h = mix(word(p) ^ key_[0], word(p + 8) ^ h);
            p += 16;
            n -= 16;
        }
        std::uint64_t a = 0, b = 0;
        if (n >= 8) {
            a = word(p);
            b = word(p + n - 8);
        } else if (n >= 4) {
            a = half(p);
            b = half(p + n - 4);
        } else if (n > 0) {
            a = std::uint64_t{static_cast<unsigned char>(p[0])} << 16 |
                std::uint64_t{static_cast<unsigned char>(p[n / 2])} << 8 | static_cast<unsigned char>(p[n - 1]);
        }
        return mix(mix(a ^ key_[1], b ^ h), h ^ key_[2]);
    }
    std::uint64_t operator()(std::uint64_t a, std::uint64_t b) const { return mix(a ^ key_[1], mix(b ^ key_[2], seed_)); }

  private:
    static std::uint64_t word(const char* p) {
        std::uint64_t w;
        std::memcpy(&w, p, 8);
        return w;
    }
    static std::uint64_t half(const char* p) {
        std::uint32_t w;
        std::memcpy(&w, p, 4);
        return w;
    }
    static std::uint64_t mix(std::uint64_t a, std::uint64_t b) {
        const auto product = static_cast<unsigned __int128>(a) * b;
        return static_cast<std::uint64_t>(product) ^ static_cast<std::uint64_t>(product >> 64);
    }
    std::uint64_t seed_, key_[4];
};

// Objects by a string of theirs: open addressing, linear probing, no tombstones. `T::key()` gives the string.
template <class T>
class Index {
  public:
    explicit Index(const Hash& hash) : hash_(hash), slots_(16) {}

    std::uint64_t hash(std::string_view key) const { return hash_(key); }
    T* find(std::string_view key) const { return find(key, hash_(key)); }
    T* find(std::string_view key, std::uint64_t hash) const {
        for (std::size_t i = hash & mask();; i = (i + 1) & mask()) {
            const Slot& slot = slots_[i];
            if (slot.object == nullptr) return nullptr;
            if (slot.hash == hash && slot.object->key() == key) return slot.object;
        }
    }
    // For those who look ahead: asks for the place of a hash, and says what stands right there (it may be another's).
    void prefetch(std::uint64_t hash) const { __builtin_prefetch(&slots_[hash & mask()]); }
    T* peek(std::uint64_t hash) const {
        const Slot& slot = slots_[hash & mask()];
        return slot.hash == hash ? slot.object : nullptr;
    }
    void insert(T* object) { insert(object, hash_(object->key())); }
    void insert(T* object, std::uint64_t hash) {
        if (4 * (size_ + 1) > 3 * slots_.size()) grow();
        put(object, hash);
        ++size_;
    }
    void erase(T* object) { erase(object, hash_(object->key())); }
    void erase(T* object, std::uint64_t hash) {
        std::size_t i = hash & mask();
        while (slots_[i].object != object) {
            if (slots_[i].object == nullptr) return;
            i = (i + 1) & mask();
        }
        // Move what would be cut off from its place back into the hole.
        for (std::size_t j = (i + 1) & mask(); slots_[j].object != nullptr; j = (j + 1) & mask()) {
            const std::size_t home = slots_[j].hash & mask();
            if (((j - home) & mask()) >= ((j - i) & mask())) {
                slots_[i] = slots_[j];
                i = j;
            }
        }
        slots_[i] = {};
        --size_;
    }
    std::size_t size() const { return size_; }
    std::size_t bytes() const { return slots_.size() * sizeof(Slot); }
    template <class F>
    void each(F&& visit) const {
        for (const Slot& slot : slots_)
            if (slot.object != nullptr) visit(slot.object);
    }

  private:
    struct Slot {
        std::uint64_t hash = 0;
        T* object = nullptr;
    };
    std::size_t mask() const { return slots_.size() - 1; }
    void put(T* object, std::uint64_t hash) {
        std::size_t i = hash & mask();
        while (slots_[i].object != nullptr) i = (i + 1) & mask();
        slots_[i] = {hash, object};
    }
    void grow() {
        std::vector<Slot> old(2 * slots_.size());
        old.swap(slots_);
        for (const Slot& slot : old)
            if (slot.object != nullptr) put(slot.object, slot.hash);
    }

    const Hash& hash_;
    std::vector<Slot> slots_;
    std::size_t size_ = 0;
};

// Plain keys, a set or a map of them: open addressing, linear probing, no tombstones. `hash_of(Key, Hash)` is found
// by the type; a default Key{} is never put in.
template <class Key, class Value>
class Table {
  public:
    struct Slot {
        Key key{};
        Value value{};
    };
    explicit Table(const Hash& hash) : hash_(hash), slots_(16) {}

    Value* find(const Key& key) {
        if (size_ == 0) return nullptr;
        for (std::size_t i = hash_of(key, hash_) & mask();; i = (i + 1) & mask()) {
            if (slots_[i].key == key) return &slots_[i].value;
            if (slots_[i].key == Key{}) return nullptr;
        }
    }
    // The key's value, made if there was none; and whether it was made.
    std::pair<Value*, bool> insert(const Key& key) {
        if (Value* known = find(key); known != nullptr) return {known, false};
        if (4 * (size_ + 1) > 3 * slots_.size()) grow();
        ++size_;
        return {&put(key)->value, true};
    }
    bool erase(const Key& key) {
        if (size_ == 0) return false;
        std::size_t i = hash_of(key, hash_) & mask();
        while (!(slots_[i].key == key)) {
            if (slots_[i].key == Key{}) return false;
            i = (i + 1) & mask();
        }
        for (std::size_t j = (i + 1) & mask(); !(slots_[j].key == Key{}); j = (j + 1) & mask()) {
            const std::size_t home = hash_of(slots_[j].key, hash_) & mask();
            if (((j - home) & mask()) >= ((j - i) & mask())) {
                slots_[i] = std::move(slots_[j]);
                i = j;
            }
        }
        slots_[i] = Slot{};
        --size_;
        if (slots_.size() > 1024 && 16 * size_ < slots_.size()) shrink();
        return true;
    }
    // For those who look ahead: asks for the place of a key.
    void prefetch(const Key& key) const { __builtin_prefetch(&slots_[hash_of(key, hash_) & mask()], 1); }
    std::size_t size() const { return size_; }
    std::size_t bytes() const { return slots_.size() * sizeof(Slot); }

  private:
    std::size_t mask() const { return slots_.size() - 1; }
    Slot* put(const Key& key) {
        std::size_t i = hash_of(key, hash_) & mask();
        while (!(slots_[i].key == Key{})) i = (i + 1) & mask();
        slots_[i].key = key;
        return &slots_[i];
    }
    void grow() { resize(2 * slots_.size()); }
    void shrink() { resize(slots_.size() / 4); }
    void resize(std::size_t count) {
        std::vector<Slot> old(count);
        old.swap(slots_);
        for (Slot& slot : old)
            if (!(slot.key == Key{})) put(slot.key)->value = std::move(slot.value);
    }

    const Hash& hash_;
    std::vector<Slot> slots_;
    std::size_t size_ = 0;
};

}  // namespace kvguard
