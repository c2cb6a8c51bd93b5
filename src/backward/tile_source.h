// Where the backward's next query tile of a column comes from. Dense and sparse differ in this
// alone.
#pragma once

#include <bit>
#include <cstdint>

#include "common/mask.h"

namespace backlite {

// Every query tile that the mask allows.
struct DenseTiles {
  Range allowed;

  template <typename Visit>
  void for_each(const Visit& visit) const {
    for (int64_t m = allowed.begin; m < allowed.end; ++m) visit(m);
  }
};

// The set bits of one column of tile bits, within what the mask allows.
struct LiveTiles {
  Range allowed;
  const int32_t* column;  // [W]

  template <typename Visit>
  void for_each(const Visit& visit) const {
    if (allowed.empty()) return;
    for (int64_t word = allowed.begin / kTilesPerWord; word * kTilesPerWord < allowed.end; ++word) {
      for (auto bits = static_cast<uint32_t>(column[word]); bits != 0; bits &= bits - 1) {
        const int64_t m = word * kTilesPerWord + std::countr_zero(bits);
        if (m >= allowed.begin && m < allowed.end) visit(m);
      }
    }
  }
};

}  // namespace backlite
