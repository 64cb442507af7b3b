// Memory in blocks of a few sizes, recycled, and the lists of a request that lie in them.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>
#include <vector>

#include "records.hpp"

namespace kvguard {

// Blocks of 64, 96, 128, … 512, 1024, 2048, 4096 bytes out of chunks that are kept; what is larger comes from the
// system. A block given back is the next one taken of its size.
class Blocks {
  public:
    Blocks() = default;
    Blocks(const Blocks&) = delete;
    Blocks& operator=(const Blocks&) = delete;

    // The size of the block that so many bytes get.
    static std::size_t size_for(std::size_t bytes) {
        if (bytes <= kSmallest) return kSmallest;
        if (bytes <= kFine) return (bytes + kStep - 1) & ~(kStep - 1);
        return std::size_t{1} << (64 - __builtin_clzll(bytes - 1));
    }
    // size: one of `size_for`.
    void* take(std::size_t size) {
        if (size > kLargest) {
            void* const block = std::malloc(size);
            if (block == nullptr) throw std::bad_alloc();
            return block;
        }
        Free*& first = free_[class_of(size)];
        if (first == nullptr) carve(size);
        Free* const block = first;
        first = block->next;
        return block;
    }
    void give(void* block, std::size_t size) {
        if (size > kLargest) return std::free(block);
        Free*& first = free_[class_of(size)];
        first = new (block) Free{first};
    }
    std::size_t bytes() const { return chunks_.size() * kChunk; }

  private:
    struct Free {
        Free* next;
    };
    static constexpr std::size_t kSmallest = 64, kStep = 32, kFine = 512, kLargest = 4096, kChunk = 65536;
    static constexpr std::size_t kClasses = kFine / kStep + 4;
    static std::size_t class_of(std::size_t size) {
        return size <= kFine ? size / kStep : kFine / kStep - 9 + static_cast<std::size_t>(__builtin_ctzll(size));
    }
    void carve(std::size_t size) {
        chunks_.push_back(std::make_unique_for_overwrite<unsigned char[]>(kChunk));
        for (std::size_t at = kChunk / size; at-- > 0;) give(chunks_.back().get() + at * size, size);
    }

    std::vector<std::unique_ptr<unsigned char[]>> chunks_;
    Free* free_[kClasses] = {};
};

// A growing array of words in a block; who has it must `drop` it.
class Words {
  public:
    std::uint32_t size() const { return data_ == nullptr ? 0 : data_->size; }
    bool empty() const { return size() == 0; }
    std::uint64_t* begin() { return data_->word; }
    const std::uint64_t* begin() const { return data_->word; }
    std::uint64_t& operator[](std::uint32_t i) { return data_->word[i]; }
    const std::uint64_t& operator[](std::uint32_t i) const { return data_->word[i]; }
    // Makes room for `count` more words and returns where they go.
    std::uint64_t* extend(Blocks& blocks, std::uint32_t count) {
        if (data_ == nullptr || data_->size + count > data_->capacity) grow(blocks, size() + count);
        std::uint64_t* const at = data_->word + data_->size;
        data_->size += count;
        return at;
    }
    void push_back(Blocks& blocks, std::uint64_t word) { *extend(blocks, 1) = word; }
    void shrink(std::uint32_t size) { data_->size = size; }
    void drop(Blocks& blocks) {
        if (data_ != nullptr) blocks.give(data_, bytes_of(data_->capacity));
        data_ = nullptr;
    }
    const void* block() const { return data_; }

  private:
    struct Data {
        std::uint32_t size, capacity;
        std::uint64_t word[];
    };
    static std::size_t bytes_of(std::uint32_t capacity) { return sizeof(Data) + 8 * std::size_t{capacity}; }
    void grow(Blocks& blocks, std::uint32_t count) {
        const std::size_t twice = data_ == nullptr ? 0 : 2 * bytes_of(data_->capacity);
        const std::size_t bytes = Blocks::size_for(std::max(bytes_of(count), twice));
        auto* const bigger = static_cast<Data*>(blocks.take(bytes));
        bigger->size = size();
        bigger->capacity = static_cast<std::uint32_t>((bytes - sizeof(Data)) / 8);
        if (data_ != nullptr) std::memcpy(bigger->word, data_->word, 8 * std::size_t{data_->size});
        drop(blocks);
        data_ = bigger;
    }

    Data* data_ = nullptr;
};

// Pages as runs in a block, in the order in which they were added.
class RunList {
  public:
    Pages view() const { return words_.empty() ? Pages{} : Pages{words_.begin(), words_.size()}; }
    std::uint32_t runs() const { return words_.size(); }
    void append(Blocks& blocks, std::uint64_t index) {
        if (!words_.empty()) {
            std::uint64_t& last = words_[words_.size() - 1];
            if (kvg_run_first(last) + kvg_run_pages(last) == index && kvg_run_pages(last) < KVG_MAX_PAGES) {
                ++last;
                return;
            }
        }
        words_.push_back(blocks, kvg_run(index, 1));
    }
    void drop(Blocks& blocks) { words_.drop(blocks); }

  private:
    Words words_;
};

}  // namespace kvguard
