// Probabilities as 64-bit integers, so that sums and comparisons are exact in any order.
#pragma once

#include <cstdint>

#include "backlite/backlite.h"

namespace backlite {

// floor(p * 2^40). A negative p counts as 0. One or more counts as 1, and so does NaN: such a tile
// is never negligible, so a NaN in the forward reaches the gradients instead of being skipped.
constexpr int64_t prob_to_fixed(double p) {
  if (p <= 0.0) return 0;
  if (p < 1.0) return static_cast<int64_t>(p * static_cast<double>(kProbOne));
  return kProbOne;
}

}  // namespace backlite
