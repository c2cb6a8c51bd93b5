// The softmax of the Hopper forward: a tile of scores becomes a tile of probabilities, in place, in
// the registers of one warpgroup. A thread holds parts of two rows, four neighbouring lanes share
// one.
//
// P = exp2(c S - reference), and any reference cancels in the end. It only has to keep P within
// range, so it is set where a row begins, to a whole number just above its largest c S, and after
// that nobody looks for maxima: the row sums, which are needed anyway, tell when P grew too large
// (has_overflown). Then
//   * if all is finite, P is divided by a power of two (lower_probs), which is exact;
//   * else the scores are lost, and the warp computes them again (recompute_scores).
// This leaves one FMA, one exponential and one addition an element.
#pragma once

#include <cstdint>
#include <cuda/std/limits>

#include "forward/item_sm90.h"
#include "sm90/layout.h"
#include "sm90/math.cuh"
#include "sm90/mma.cuh"

namespace backlite::forward_sm90 {

inline constexpr uint32_t kAllLanes = 0xffffffff;
inline constexpr float kMinusInf = -cuda::std::numeric_limits<float>::infinity();

// What a thread's part of a row of P may add up to.
template <typename Element>
inline constexpr float kMaxMass =
    0x1p60f;  // of a float's 2^128: room for sums over keys, and times V
template <>
inline constexpr float kMaxMass<sm90::Float16> = 0x1p14f;  // of float16's 2^16

// Masses below it are sums of finite numbers, far enough from the largest float to be scaled.
inline constexpr float kFiniteMass = 0x1p120f;

// The two rows of a thread.
struct Rows {
  float reference[2] = {kMinusInf, kMinusInf};  // minus infinity: no key seen so far
  float sum[2] = {0.0f, 0.0f};                  // of P over the thread's own columns
  float alpha[2] = {1.0f, 1.0f};                // brings earlier sums to a reference that grew
  bool has_grown = false;                       // some reference of the warp did, in this tile
  bool has_begun = false;                       // all rows of the warp have a reference
};

// Entries that the mask hides become minus infinity. A thread's elements of a row are bits of a
// word, cut at the row's two bounds: one select an element is left, on predicates that are set by
// the eight, and only in those quarters of the tile where the warp needs it: none of the second
// half, if that half is not used. ptxas sets them by the eight (R2P) if selects are ordered by
// rows, but it then needs all predicates, and works out anew at every tile what it had kept there.
template <bool kByRow, int kSize>
__device__ __forceinline__ void mask_scores(float (&scores)[kSize], const RowKeys& keys,
                                            int key_begin, float sign, int thread, bool is_half) {
  constexpr int kKeys = 2 * kSize;
  static_assert(kKeys == 128, "A thread's elements of a row are the bits of a word");
  if (sign < 0.0f) {
#pragma unroll
    for (int i = 0; i < kSize; ++i) scores[i] = -scores[i];
  }
  const int first_column = key_begin + sm90::fragment_column(thread, 0);
  uint32_t visible[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const RowKeys row = keys.from(sm90::fragment_row(thread, 2 * half));
    // Bits of the elements before a key: of every eight columns the thread holds two.
    const auto before = [&](int key) {
      const int columns = min(max(key - first_column, 0), kKeys);
      return __funnelshift_lc(~0u, 0, columns / 8 * 2 + min(columns % 8, 2));
    };
    visible[half] = before(min(row.end, row.length)) & ~before(row.first);
  }
  const uint32_t seen_by_all = __reduce_and_sync(kAllLanes, visible[0] & visible[1]);
#pragma unroll
  for (int quarter = 0; quarter < 4; ++quarter) {
    if (quarter == 2 && is_half) return;
    const uint32_t bits = 0xffu << 8 * quarter;
    if ((seen_by_all & bits) == bits) continue;
#pragma unroll
    for (int k = 0; k < 16; ++k) {
      const int half = kByRow ? k / 8 : k % 2;
      const int i = 8 * quarter + (kByRow ? k % 8 : k / 2);
      if ((visible[half] & 1u << i) == 0) scores[4 * (i / 2) + 2 * half + i % 2] = kMinusInf;
    }
  }
}

// Raises the references to the maxima of this tile, or of its first half, where these are larger.
template <bool kFirst, int kSize>
__device__ __forceinline__ void raise_references(const float (&scores)[kSize], Rows& rows,
                                                 float scale_log2, bool is_half) {
  float top[2] = {scores[0], scores[2]};
#pragma unroll
  for (int i = 0; i < kSize / 2; ++i) top[i / 2 % 2] = fmaxf(top[i / 2 % 2], scores[i]);
  if (!is_half) {
#pragma unroll
    for (int i = kSize / 2; i < kSize; ++i) top[i / 2 % 2] = fmaxf(top[i / 2 % 2], scores[i]);
  }
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    top[half] = fmaxf(top[half], __shfl_xor_sync(kAllLanes, top[half], 1));
    top[half] = fmaxf(top[half], __shfl_xor_sync(kAllLanes, top[half], 2));
    float raised = ceilf(top[half] * scale_log2);
    if constexpr (!kFirst) {
      raised = fmaxf(rows.reference[half], raised);
      rows.alpha[half] =
          raised == rows.reference[half] ? 1.0f : exp2f(rows.reference[half] - raised);
      rows.sum[half] *= rows.alpha[half];
      rows.has_grown = true;
    }
    rows.reference[half] = raised;
  }
  rows.has_begun =
      __all_sync(kAllLanes, rows.reference[0] != kMinusInf && rows.reference[1] != kMinusInf);
}

// Scores [kBegin, kEnd) become P, not yet rounded; `mass` grows by what the thread's elements of
// each row add up to.
template <int kBegin, int kEnd, int kSize>
__device__ __forceinline__ void exponentiate(float (&scores)[kSize], const Rows& rows,
                                             float scale_log2, float (&mass)[2]) {
  // A row that has seen no key yet is measured against 0: exp2(-inf - 0) = 0.
  const float shift[2] = {rows.reference[0] == kMinusInf ? 0.0f : rows.reference[0],
                          rows.reference[1] == kMinusInf ? 0.0f : rows.reference[1]};
#pragma unroll
  for (int i = kBegin; i < kEnd; ++i) {
    scores[i] = sm90::exp2_approx(fmaf(scores[i], scale_log2, -shift[i / 2 % 2]));
    mass[i / 2 % 2] += scores[i];
  }
}

// True in the whole warp if in any of its rows. Not-a-number counts as too large.
__device__ __forceinline__ bool has_overflown(const float (&mass)[2], float limit) {
  return __any_sync(kAllLanes, !(mass[0] < limit && mass[1] < limit));
}

// Raises the references so that no row's P exceeds 1, and brings P and its mass there.
template <int kSize>
__device__ __forceinline__ void lower_probs(float (&probs)[kSize], Rows& rows, float (&mass)[2]) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float top = mass[half];
    top = fmaxf(top, __shfl_xor_sync(kAllLanes, top, 1));
    top = fmaxf(top, __shfl_xor_sync(kAllLanes, top, 2));
    const float step = top > 1.0f ? ceilf(log2f(top)) : 0.0f;
    rows.alpha[half] = exp2f(-step);
    rows.reference[half] += step;
    rows.sum[half] *= rows.alpha[half];
    mass[half] *= rows.alpha[half];
  }
#pragma unroll
  for (int i = 0; i < kSize; ++i) probs[i] *= rows.alpha[i / 2 % 2];
  rows.has_grown = true;
}

// What the rows add up to. Of the four lanes that share two rows, the even ones add up the first,
// the odd ones the second.
struct RowTotals {
  float inverse[2];  // 1 / l of both rows, 0 without keys
  float reference;   // of the lane's own row
  float sum;

  // Natural logarithm of the row's sum of exponentials.
  __device__ __forceinline__ float lse() const {
    constexpr float kLn2 = 0.693147180559945f;
    return reference != kMinusInf ? (reference + sm90::log2_approx(sum)) * kLn2 : kMinusInf;
  }
};

__device__ __forceinline__ RowTotals row_totals(const Rows& rows, int lane) {
  const int own = lane % 2;
  RowTotals totals;
  totals.reference = own ? rows.reference[1] : rows.reference[0];
  totals.sum = own ? rows.sum[1] : rows.sum[0];
  totals.sum += __shfl_xor_sync(kAllLanes, own ? rows.sum[0] : rows.sum[1], 1);
  totals.sum += __shfl_xor_sync(kAllLanes, totals.sum, 2);
  const float inverse = totals.reference != kMinusInf ? sm90::reciprocal_approx(totals.sum) : 0.0f;
  const float other = __shfl_xor_sync(kAllLanes, inverse, 1);
  totals.inverse[0] = own ? other : inverse;
  totals.inverse[1] = own ? inverse : other;
  return totals;
}

// Q K^T of one warp's 16 rows, from the same tiles in shared memory that the warpgroup used.
template <int kHeadDim, int kKeys, typename Element>
__device__ __forceinline__ void recompute_scores(float (&scores)[kKeys / 2], const Element* query,
                                                 const Element* key, int thread) {
  const auto load = [](const Element* tile, int num_rows, int row, int column) {
    return *reinterpret_cast<const uint32_t*>(reinterpret_cast<const char*>(tile) +
                                              sm90::swizzled_offset(num_rows, row, column));
  };
  const int lane = thread % sm90::kWarpSize;
#pragma unroll
  for (int i = 0; i < kKeys / 2; ++i) scores[i] = 0.0f;
#pragma unroll 1
  for (int column = 0; column < kHeadDim; column += sm90::kMmaDepth) {
    uint32_t a[4];
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      a[r] = load(query, sm90::kMmaRows, sm90::operand_row(thread, r),
                  column + sm90::operand_column(thread, r));
    }
#pragma unroll
    for (int j = 0; j < kKeys / 8; ++j) {
      const int row = 8 * j + lane / 4;
      sm90::mma_16x8x16<Element>(scores[4 * j], scores[4 * j + 1], scores[4 * j + 2],
                                 scores[4 * j + 3], a,
                                 load(key, kKeys, row, column + 2 * (lane % 4)),
                                 load(key, kKeys, row, column + 2 * (lane % 4) + 8));
    }
  }
}

}  // namespace backlite::forward_sm90
