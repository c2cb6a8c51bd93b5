// The head dims that the CPU backend accepts; other backends accept some of them.
#pragma once

#include <cstdint>

namespace backlite {

inline constexpr int64_t kMinHeadDim = 8;
inline constexpr int64_t kMaxHeadDim = 256;
inline constexpr int64_t kHeadDimStep = 8;

}  // namespace backlite
