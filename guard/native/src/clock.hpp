// The two clocks, in nanoseconds.
#pragma once

#include <ctime>

#include <cstdint>

namespace kvguard {

inline std::uint64_t clock_ns(clockid_t clock) {
    timespec now;
    clock_gettime(clock, &now);
    return static_cast<std::uint64_t>(now.tv_sec) * 1'000'000'000 + static_cast<std::uint64_t>(now.tv_nsec);
}

inline std::uint64_t wall_ns() { return clock_ns(CLOCK_REALTIME); }
inline std::uint64_t monotonic_ns() { return clock_ns(CLOCK_MONOTONIC); }

}  // namespace kvguard
