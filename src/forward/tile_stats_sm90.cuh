// Tile statistics in the Hopper forward.
//
// p[n] of a query tile is the mean over its rows of (row's mass in key tile n) / (row's total).
// The total is known only after the last tile, so every consumer thread keeps, for each tile, what
// its own elements added up to in its two rows: two bfloat16 in one word, relative to the reference
// that the row's exponentials used. Words of one tile are 512 bytes in a row, written once, in
// scratch that belongs to the resident block:
//
//     row_masses [block of the grid][slot of the query ring][consumer][Tn][128 threads]
//
// When a row's reference grows, its older words are brought to the new one. References are whole
// powers of two, so that this is exact. It happens a few times a row.
//
// At the end of an item the consumer leaves 1 / total of its 64 rows in shared memory, and a warp
// of the producer's warpgroup, idle until then, adds up the tiles while the consumers go on.
#pragma once

#include <cstdint>

#include "forward/softmax_sm90.cuh"
#include "forward/tile_score.h"
#include "sm90/barrier.cuh"
#include "sm90/layout.h"
#include "sm90/math.cuh"

namespace backlite::forward_sm90 {

// Brings this thread's words of `count` tiles to references that grew by 1 / alpha.
__device__ __forceinline__ void rescale_row_masses(uint32_t* words, int count, float alpha0,
                                                   float alpha1) {
  if (alpha0 == 1.0f && alpha1 == 1.0f) return;
#pragma unroll 1
  for (int n = 0; n < count; ++n) {
    uint32_t& word = words[n * sm90::kWarpgroupThreads];
    word = sm90::pack<sm90::BFloat16>(sm90::low_bfloat16(word) * alpha0,
                                      sm90::high_bfloat16(word) * alpha1);
  }
}

// One warp. Writes p of key tiles [0, num_tiles) of one query tile; those outside
// [tile_begin, tile_end) hold nothing. `words` are those of tile_end - 1, tile_end - 2, ...:
// the consumers walk the tiles from the last to the first.
__device__ __forceinline__ void reduce_tile_stats(const uint32_t* words, const float* inverse_sums,
                                                  float* stats, int tile_begin, int tile_end,
                                                  int num_tiles) {
  constexpr int kWarps = sm90::kWarpgroupThreads / sm90::kWarpSize;
  const int lane = threadIdx.x % sm90::kWarpSize;

  // Weights of the rows whose words this lane reads: of lane `lane` of each consumer warp.
  float weight[kWarps][2];
  int rows_with_keys = 0;
#pragma unroll
  for (int warp = 0; warp < kWarps; ++warp) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = sm90::fragment_row(warp * sm90::kWarpSize + lane, 2 * half);
      weight[warp][half] = inverse_sums[row];
      // Four lanes share a row.
      rows_with_keys += __popc(__ballot_sync(kAllLanes, weight[warp][half] > 0.0f)) / 4;
    }
  }

  for (int n = lane; n < tile_begin; n += sm90::kWarpSize) stats[n] = 0.0f;
  for (int n = tile_end + lane; n < num_tiles; n += sm90::kWarpSize) stats[n] = 0.0f;

  // Four tiles at a time: two exchanges leave every lane with one of the four, summed over four
  // lanes; three more finish it. Registers are scarce: the walk keeps two pointers and a count.
  constexpr int kBatch = 4;
  words += lane;
  stats += tile_end - 1 - lane;
#pragma unroll 1
  for (int left = tile_end - tile_begin; left > 0; left -= kBatch) {
    float sum[kBatch];
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      sum[i] = 0.0f;
      if (i < left) {
#pragma unroll
        for (int warp = 0; warp < kWarps; ++warp) {
          const uint32_t pair = words[i * sm90::kWarpgroupThreads + warp * sm90::kWarpSize];
          sum[i] += sm90::low_bfloat16(pair) * weight[warp][0] +
                    sm90::high_bfloat16(pair) * weight[warp][1];
        }
      }
    }
#pragma unroll
    for (int width = kBatch / 2; width > 0; width /= 2) {
      const bool upper = lane & width;
#pragma unroll
      for (int i = 0; i < width; ++i) {
        const float send = upper ? sum[i] : sum[i + width];
        const float keep = upper ? sum[i + width] : sum[i];
        sum[i] = keep + __shfl_xor_sync(kAllLanes, send, width);
      }
    }
#pragma unroll
    for (int width = kBatch; width < sm90::kWarpSize; width *= 2) {
      sum[0] += __shfl_xor_sync(kAllLanes, sum[0], width);
    }
    if (lane < kBatch && lane < left) *stats = tile_score_mean(sum[0], rows_with_keys);
    words += kBatch * sm90::kWarpgroupThreads;
    stats -= kBatch;
  }
}

}  // namespace backlite::forward_sm90
