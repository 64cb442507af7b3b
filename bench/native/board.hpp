// The verdict board's watermarks, read from outside (guard/act/board/layout.py says what its bytes are).
#pragma once

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string>

namespace kvguard::bench {

class Board {
  public:
    explicit Board(const std::string& path) {
        const int fd = open(path.c_str(), O_RDONLY | O_CLOEXEC);
        struct stat info;
        if (fd < 0 || fstat(fd, &info) != 0) {
            std::perror(path.c_str());
            std::exit(2);
        }
        void* base = mmap(nullptr, static_cast<std::size_t>(info.st_size), PROT_READ, MAP_SHARED, fd, 0);
        close(fd);
        if (base == MAP_FAILED) {
            std::perror(path.c_str());
            std::exit(2);
        }
        const auto* words = static_cast<const std::uint64_t*>(base);
        rows_ = words + kHeaderWords + words[2] * kRowWords;
        mask_ = words[3] - 1;
    }

    // The seq up to which every record of the stream's epoch is judged; -1 if none is. `low` and `high` are the two
    // words of the digest of its id.
    std::int64_t watermark(std::uint64_t low, std::uint64_t high, std::uint64_t epoch) const {
        for (std::uint64_t i = low & mask_, left = mask_ + 1; left != 0; i = (i + 1) & mask_, --left) {
            const std::uint64_t* row = rows_ + i * kRowWords;
            if (get(row + 3) == 0) return -1;
            if (get(row + 1) != low || get(row + 2) != high) continue;
            for (;;) {
                const std::uint64_t version = get(row);
                const std::uint64_t of = get(row + 4), seq = get(row + 5);
                if (version % 2 == 0 && get(row) == version) return of == epoch ? static_cast<std::int64_t>(seq) : -1;
            }
        }
        return -1;
    }

  private:
    static constexpr std::uint64_t kHeaderWords = 512, kRowWords = 8;
    static std::uint64_t get(const std::uint64_t* word) { return __atomic_load_n(word, __ATOMIC_ACQUIRE); }

    const std::uint64_t* rows_;
    std::uint64_t mask_;
};

}  // namespace kvguard::bench
