// Tile statistics in the Hopper forward: (6).
//
// p[n] of a query tile is the mean over its rows of (row's mass in key tile n) / (row's total).
// The total is known only after the last tile, so consumers keep, for each tile, what each row
// added up to in it, relative to the reference that its exponentials used. Two rows that the same
// four lanes hold make a word, as bfloat16; a tile's words are 128 bytes in a row, written once, in
// scratch that belongs to the resident block:
//
//     row_masses [block of the grid][slot of the query ring][consumer][Tn][32]
//
// It stays in L2 beside the K and V in use (with a word for every thread, four times as much, it
// did not). When a row's reference grows, its older words are brought to the new one: references
// are whole powers of two, so that this is exact, and it almost never happens.
//
// At the end of an item the consumer leaves 1 / total of its 64 rows in shared memory, and a warp
// of the producer's warpgroup, idle until then, adds up the tiles while the consumers go on.
#pragma once

#include <cstdint>

#include "forward/config_sm90.h"
#include "forward/params_sm90.h"
#include "forward/softmax_sm90.cuh"
#include "forward/tile_score.h"
#include "sm90/barrier.cuh"
#include "sm90/layout.h"
#include "sm90/math.cuh"

namespace backlite::forward_sm90 {

// Where a consumer's words of the item in a slot begin: those of the first tile that it visits.
template <int kConsumers>
__device__ __forceinline__ uint32_t* item_row_masses(const ForwardParams& params, int slot,
                                                     int consumer) {
  return params.row_masses +
         (static_cast<int64_t>(blockIdx.x * kQuerySlots + slot) * kConsumers + consumer) *
             params.num_key_tiles * kMassWords;
}

// The first word of a thread of the warpgroup, with kTiles tiles in an exchange (RowMasses).
template <int kTiles>
__device__ __forceinline__ int first_mass_word(int thread) {
  return thread / 4 + thread % kTiles * kMassWords;
}

// Of a tile's masses of two rows: the sums over the four lanes that share the rows.
__device__ __forceinline__ uint32_t add_up_masses(uint32_t pair) {
  pair = sm90::add_bfloat16_pairs(pair, __shfl_xor_sync(kAllLanes, pair, 1));
  return sm90::add_bfloat16_pairs(pair, __shfl_xor_sync(kAllLanes, pair, 2));
}

// The same sums, bit for bit, of two tiles with no more exchanges: even lanes send their part of
// the second tile and return the first's sums, odd lanes the other way round.
__device__ __forceinline__ uint32_t add_up_masses(uint32_t first, uint32_t second, int lane) {
  const bool is_odd = lane % 2;
  const uint32_t received = __shfl_xor_sync(kAllLanes, is_odd ? first : second, 1);
  const uint32_t pair = sm90::add_bfloat16_pairs(is_odd ? second : first, received);
  return sm90::add_bfloat16_pairs(pair, __shfl_xor_sync(kAllLanes, pair, 2));
}

__device__ __forceinline__ uint32_t rescale_masses(uint32_t pair, const float (&alpha)[2]) {
  return sm90::pack<sm90::BFloat16>(sm90::low_bfloat16(pair) * alpha[0],
                                    sm90::high_bfloat16(pair) * alpha[1]);
}

// The masses of an item that a thread has not stored yet. kTiles tiles share an exchange; of the
// four lanes that share two rows, lane i < kTiles stores the words of tiles i, i + kTiles, ... in
// the order of the visit.
template <int kTiles>
struct RowMasses {
  static_assert(kTiles == 1 || kTiles == 2);
  static constexpr int kStride = kTiles * kMassWords;  // from one word of a thread to its next

  uint32_t last = 0;     // this lane's part of the last tile
  uint32_t pending = 0;  // of the tile before, waiting for its partner
  // Told by a flag: the parity of the number of tiles took three instructions a tile more.
  bool has_pending = false;

  // Puts `last` away; `next` is this thread's next word. Called where the warp waits for products
  // anyway: the exchanges take their time.
  __device__ __forceinline__ void store(uint32_t*& next, int lane) {
    if constexpr (kTiles == 2) {
      has_pending = !has_pending;
      if (has_pending) {
        pending = last;
        return;
      }
    }
    const uint32_t sums = kTiles == 2 ? add_up_masses(pending, last, lane) : add_up_masses(last);
    if (lane % 4 < kTiles) *next = sums;
    next += kStride;
  }

  // The same of an item's last tile, which may be left without a partner.
  __device__ __forceinline__ void finish(uint32_t* next, int lane) {
    store(next, lane);
    if (kTiles == 2 && has_pending) {
      const uint32_t sums = add_up_masses(pending);
      if (lane % 4 == 0) *next = sums;
    }
  }

  // Brings the `count` tiles that were put away to references that grew by 1 / alpha. A lane
  // rescales what it stored itself, so that nobody waits.
  __device__ __forceinline__ void rescale(uint32_t* first_word, int count, const float (&alpha)[2],
                                          int lane) {
    if (kTiles == 2) pending = rescale_masses(pending, alpha);
    if (lane % 4 >= kTiles || (alpha[0] == 1.0f && alpha[1] == 1.0f)) return;
#pragma unroll 1
    for (int n = 0; n < count / kTiles; ++n) {
      uint32_t& word = first_word[n * kStride];
      word = rescale_masses(word, alpha);
    }
  }
};

// One warp. Writes p of key tiles [0, num_tiles) of one query tile; those outside
// [tile_begin, tile_end) hold nothing. `words` are those of tile_end - 1, tile_end - 2, ...:
// the consumers walk the tiles from the last to the first.
__device__ __forceinline__ void reduce_tile_stats(const uint32_t* words, const float* inverse_sums,
                                                  float* stats, int tile_begin, int tile_end,
                                                  int num_tiles) {
  static_assert(kMassWords == sm90::kWarpSize, "A lane takes one word of each tile");
  const int lane = threadIdx.x % sm90::kWarpSize;

  float weight[2];
  int rows_with_keys = 0;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    weight[half] = inverse_sums[sm90::fragment_row(4 * lane, 2 * half)];
    rows_with_keys += __popc(__ballot_sync(kAllLanes, weight[half] > 0.0f));
  }

  for (int n = lane; n < tile_begin; n += sm90::kWarpSize) stats[n] = 0.0f;
  for (int n = tile_end + lane; n < num_tiles; n += sm90::kWarpSize) stats[n] = 0.0f;

  // Eight tiles at a time: three exchanges leave every lane with one of the eight, summed over
  // eight lanes; two more finish it.
  constexpr int kBatch = 8;
  words += lane;
  stats += tile_end - 1 - lane;
#pragma unroll 1
  for (int left = tile_end - tile_begin; left > 0; left -= kBatch) {
    float sum[kBatch];
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const uint32_t pair = i < left ? words[i * kMassWords] : 0;
      sum[i] = sm90::low_bfloat16(pair) * weight[0] + sm90::high_bfloat16(pair) * weight[1];
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
    words += kBatch * kMassWords;
    stats -= kBatch;
  }
}

}  // namespace backlite::forward_sm90
