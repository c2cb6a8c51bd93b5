// The transpose of a block in scratch memory, a register-sized square at a time.
#pragma once

#include <cstdint>
#include <utility>

#include "common/product.h"

namespace backlite::cpu {

namespace transpose_detail {

// Swaps the off-diagonal quarters of every 2 kStep x 2 kStep square whose rows are kStep apart.
template <int kStep, typename Vector, int... kLane>
inline void swap_quarters(Vector& upper, Vector& lower, std::integer_sequence<int, kLane...>) {
  constexpr int kLanes = sizeof...(kLane);
  const Vector above = upper;
  upper =
      __builtin_shufflevector(above, lower, (kLane & kStep ? kLanes + kLane - kStep : kLane)...);
  lower =
      __builtin_shufflevector(above, lower, (kLane & kStep ? kLanes + kLane : kLane + kStep)...);
}

// log2(kLanes) rounds of swaps, each of two shuffles per pair of rows: 64 for 16 x 16 numbers.
template <int kStep, int kLanes, typename Vector>
inline void transpose_square(Vector (&rows)[kLanes]) {
  if constexpr (kStep < kLanes) {
#pragma GCC unroll 16
    for (int i = 0; i < kLanes; ++i) {
      if ((i & kStep) == 0) {
        swap_quarters<kStep>(rows[i], rows[i + kStep], std::make_integer_sequence<int, kLanes>());
      }
    }
    transpose_square<2 * kStep>(rows);
  }
}

}  // namespace transpose_detail

// to[j][i] = from[i][j]. Both sizes are rounded up to kProductRowStep, and both blocks have room
// for it; data and strides are aligned as product() wants them. One number at a time, K^T and V^T
// of a column took as long as one of its tiles.
template <typename T>
void transpose(const T* from, int64_t from_stride, T* to, int64_t to_stride, int64_t num_rows,
               int64_t num_columns) {
  using Vector = typename product_detail::VectorOf<T>::Type;
  constexpr int kLanes = kVectorBytes / sizeof(T);
  static_assert(kProductRowStep % kLanes == 0);
  for (int64_t i = 0; i < pad_rows(num_rows); i += kLanes) {
    for (int64_t j = 0; j < pad_rows(num_columns); j += kLanes) {
      Vector rows[kLanes];
#pragma GCC unroll 16
      for (int k = 0; k < kLanes; ++k) {
        rows[k] = *reinterpret_cast<const Vector*>(from + (i + k) * from_stride + j);
      }
      transpose_detail::transpose_square<1>(rows);
#pragma GCC unroll 16
      for (int k = 0; k < kLanes; ++k) {
        *reinterpret_cast<Vector*>(to + (j + k) * to_stride + i) = rows[k];
      }
    }
  }
}

}  // namespace backlite::cpu
