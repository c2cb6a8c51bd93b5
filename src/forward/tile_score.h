// How a tile's row masses become one number: the only place that knows.
#pragma once

#include <cstdint>

#include "common/mask.h"

namespace backlite {

// The score "mean": the mean over the rows that see at least one key. Rows without a key bring mass
// 0 and are not counted.
template <typename Real>
BACKLITE_HOST_DEVICE constexpr float tile_score_mean(Real sum_of_row_masses,
                                                     int64_t num_rows_with_keys) {
  if (num_rows_with_keys == 0) return 0.0f;
  return static_cast<float>(sum_of_row_masses / static_cast<Real>(num_rows_with_keys));
}

}  // namespace backlite
