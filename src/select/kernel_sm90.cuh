// Select on a Hopper GPU: the rule of select/cpu.cpp, without sorting. For every row of tiles:
//   (1) p in fixed point, for the key tiles that the mask allows
//   (2) the cut: the largest value x such that all tiles lighter than x add up to < negl_prob,
//       found bit by bit, until a single tile is left that it can be
//   (3) lighter tiles are skipped; of those at x, by key tile, as many as still fit
//   (4) at least the last in the order (p, key tile) stays
//
// Sums are integers: the bits are those of any other way to apply the rule.
#pragma once

#include <cstdint>

#include "common/mask.h"
#include "sm90/dependency.cuh"

namespace backlite::select_sm90 {

inline constexpr int kThreads = 256;
inline constexpr int kWarps = kThreads / 32;
inline constexpr int kRowsOfBlock = 8;  // query tiles: one byte of the tile bits

// Rows of up to so many tiles a thread are searched until one tile is left that the cut can be: at
// 64 key tiles 17.6 us instead of 21.5 (8k, 64 heads). With eight a thread counting them takes
// longer than the bits that it spares: 59 us instead of 52 at 256 (32k, 16 heads).
inline constexpr int kCountedPerThread = 2;

struct SelectParams {
  Mask mask;
  const float* tile_stats;   // [B, H, Tm, Tn]
  const int64_t* negl_prob;  // [num_negl_prob], fixed point
  uint8_t* tile_bits;        // [B, H, Tn, W] little-endian words, by byte
  int num_negl_prob;
  int num_heads;        // H
  int num_query_tiles;  // Tm
  int num_key_tiles;    // Tn
  int num_words;        // W
};

// As prob_to_fixed (common/fixed_point.h), which takes a double: 2^40 p is exact in float32 too.
__device__ __forceinline__ int64_t to_fixed(float p) {
  if (p <= 0.0f) return 0;
  if (p < 1.0f) return __float2ll_rz(p * static_cast<float>(kProbOne));
  return kProbOne;
}

// Sums over the threads that share a row: a warp, or the whole block.
template <int kThreadsPerRow>
class RowSum {
 public:
  __device__ explicit RowSum(int64_t* scratch) : scratch_(scratch) {}

  // `value` < 2^47: the two halves are added by the warp's 32-bit reduction.
  __device__ __forceinline__ int64_t operator()(int64_t value) {
    const auto low = static_cast<uint32_t>(value) & 0xffffff;
    const auto high = static_cast<uint32_t>(value >> 24);
    const int64_t sum =
        (static_cast<int64_t>(__reduce_add_sync(~0u, high)) << 24) + __reduce_add_sync(~0u, low);
    if constexpr (kThreadsPerRow == 32) {
      return sum;
    } else {
      // Two buffers: a fast warp may write the next sum while a slow one reads this one.
      int64_t* const sums = scratch_ + turn_ * kWarps;
      turn_ ^= 1;
      if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = sum;
      __syncthreads();
      int64_t total = 0;
#pragma unroll
      for (int i = 0; i < kWarps; ++i) total += sums[i];
      return total;
    }
  }

 private:
  int64_t* scratch_;
  int turn_ = 0;
};

// A row has at most kThreadsPerRow * kPerThread key tiles. Thread t holds a run of neighbours, so
// that its rank among equals is a sum over the threads before it.
template <int kThreadsPerRow, int kPerThread>
__global__ void __launch_bounds__(kThreads)
    select_kernel(const __grid_constant__ SelectParams params) {
  static_assert(kThreadsPerRow == 32 || kThreadsPerRow == kThreads, "A warp or the block a row");
  constexpr int kRowsAtOnce = kThreads / kThreadsPerRow;
  sm90::let_next_kernel_launch();
  sm90::wait_for_earlier_kernels();

  extern __shared__ uint32_t column_bits[];  // [Tn] bytes: bit i of byte n is row i, column n
  __shared__ int64_t scratch[2 * kWarps];
  __shared__ int ranks[kWarps];

  const int blocks_of_head = params.num_words * (kTilesPerWord / kRowsOfBlock);
  const int64_t batch_head = static_cast<int>(blockIdx.x) / blocks_of_head;
  const int byte_of_column = static_cast<int>(blockIdx.x) % blocks_of_head;
  const int thread = threadIdx.x % kThreadsPerRow;
  const int64_t negl_prob =
      params.negl_prob[params.num_negl_prob == 1 ? 0 : batch_head % params.num_heads];
  RowSum<kThreadsPerRow> sum_of_row(scratch);

  for (int i = threadIdx.x; i < (params.num_key_tiles + 3) / 4; i += kThreads) column_bits[i] = 0;
  __syncthreads();

#pragma unroll 1
  for (int pass = 0; pass < kRowsOfBlock / kRowsAtOnce; ++pass) {
    const int row = pass * kRowsAtOnce + static_cast<int>(threadIdx.x) / kThreadsPerRow;
    const int m = byte_of_column * kRowsOfBlock + row;
    const bool exists = m < params.num_query_tiles;
    const Range allowed = exists ? params.mask.key_tiles(m) : Range{};
    const float* const stats =
        params.tile_stats + (batch_head * params.num_query_tiles + m) * params.num_key_tiles;

    // (1) -1 where there is no tile.
    int64_t probs[kPerThread];
    const int first = static_cast<int>(allowed.begin) + thread * kPerThread;
    int64_t my_sum = 0;
#pragma unroll
    for (int i = 0; i < kPerThread; ++i) {
      const bool is_tile = first + i < allowed.end;
      probs[i] = is_tile ? to_fixed(stats[first + i]) : -1;
      if (is_tile) my_sum += probs[i];
    }
    const int64_t total = sum_of_row(my_sum);
    const auto sum_below = [&](int64_t x) {
      int64_t sum = 0;
#pragma unroll
      for (int i = 0; i < kPerThread; ++i) sum += probs[i] >= 0 && probs[i] < x ? probs[i] : 0;
      return sum_of_row(sum);
    };

    // (2) Capped just above the row's total: there the sum is the total, and the cut is found from
    // the other side, as the heaviest tile. The cut is the value of some tile in
    // [cut, cut + 2^bit), unless the budget is 0, when it is 0: so one tile there ends the search.
    int64_t cut = 0;
    const bool all_fit = total < negl_prob;
    const int64_t budget = all_fit ? total : negl_prob;
#pragma unroll 1
    for (int bit = kProbFractionBits; bit >= 0; --bit) {
      const int64_t half = int64_t{1} << bit;
      if constexpr (kPerThread > kCountedPerThread) {
        if (sum_below(cut | half) < budget) cut |= half;
      } else {
        const int64_t x = cut + half;
        int num_below = 0;  // of the tiles in [cut, x)
        int num_above = 0;  // in [x, x + half)
#pragma unroll
        for (int i = 0; i < kPerThread; ++i) {
          num_below += probs[i] >= cut && probs[i] < x;
          num_above += probs[i] >= x && probs[i] < x + half;
        }
        const int64_t counts = sum_of_row(static_cast<int64_t>(num_above) << 24 | num_below);
        const bool is_above = sum_below(x) < budget;
        if (is_above) cut = x;
        const auto num_left = static_cast<int>(is_above ? counts >> 24 : counts & 0xffffff);
        if (num_left > 1) continue;
        if (num_left == 1) {
          int64_t mine = 0;
#pragma unroll
          for (int i = 0; i < kPerThread; ++i) {
            if (probs[i] >= cut && probs[i] < cut + half) mine = probs[i];
          }
          cut = sum_of_row(mine);
        }
        break;
      }
    }

    // (3)
    int my_equals = 0;
#pragma unroll
    for (int i = 0; i < kPerThread; ++i) my_equals += probs[i] == cut;
    const auto num_equals = static_cast<int>(sum_of_row(my_equals));
    int rank = my_equals;
#pragma unroll
    for (int i = 1; i < 32; i *= 2) {
      const int before = __shfl_up_sync(~0u, rank, i);
      if (static_cast<int>(threadIdx.x) % 32 >= i) rank += before;
    }
    if constexpr (kThreadsPerRow != 32) {
      if (threadIdx.x % 32 == 31) ranks[threadIdx.x / 32] = rank;
      __syncthreads();
      for (int i = 0; i < static_cast<int>(threadIdx.x) / 32; ++i) rank += ranks[i];
      __syncthreads();
    }
    rank -= my_equals;
    int num_skipped = 0;
    if (all_fit) {
      num_skipped = num_equals - 1;  // (4)
    } else if (cut > 0) {
      const int64_t room = negl_prob - 1 - sum_below(cut);
      num_skipped = static_cast<int>(min(room / cut, static_cast<int64_t>(num_equals - 1)));
    }

#pragma unroll
    for (int i = 0; i < kPerThread; ++i) {
      const bool is_equal = probs[i] == cut;
      const bool is_live = probs[i] > cut || (is_equal && rank >= num_skipped);
      rank += is_equal;
      if (is_live) {
        const int n = first + i;
        atomicOr(&column_bits[n / 4], 1u << (n % 4 * 8 + row));
      }
    }
  }
  __syncthreads();

  for (int n = threadIdx.x; n < params.num_key_tiles; n += kThreads) {
    const int64_t column = batch_head * params.num_key_tiles + n;
    params.tile_bits[column * params.num_words * 4 + byte_of_column] =
        static_cast<uint8_t>(column_bits[n / 4] >> (n % 4 * 8));
  }
}

}  // namespace backlite::select_sm90
