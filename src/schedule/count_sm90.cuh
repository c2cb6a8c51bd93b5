// Counts the live tiles of every column (batch, key head, key tile), over the query heads of the
// group. A warp a column.
#pragma once

#include <cstdint>

#include "common/mask.h"
#include "schedule/layout_sm90.h"
#include "sm90/dependency.cuh"

namespace backlite::schedule_sm90 {

inline constexpr int kCountThreads = 256;

struct CountParams {
  Mask mask;
  const uint32_t* tile_bits;  // [B, H, Tn, W], nullptr: every tile that the mask allows
  int32_t* live;              // [num_columns]
  int num_columns;            // B * Hk * Tn
  int num_key_tiles;
  int num_words;  // W
  int heads_per_key_head;
};

__global__ void __launch_bounds__(kCountThreads)
    count_kernel(const __grid_constant__ CountParams params) {
  const int column = blockIdx.x * (kCountThreads / 32) + threadIdx.x / 32;
  const int lane = threadIdx.x % 32;
  sm90::let_next_kernel_launch();
  sm90::wait_for_earlier_kernels();
  if (column >= params.num_columns) return;
  const int batch_key_head = column / params.num_key_tiles;
  const int key_tile = column - batch_key_head * params.num_key_tiles;
  const Range allowed = params.mask.query_tiles(key_tile);
  int live = 0;
  if (params.tile_bits == nullptr) {
    live = params.heads_per_key_head * static_cast<int>(allowed.size());
  } else {
    const int num_words = params.heads_per_key_head * params.num_words;
    for (int i = lane; i < num_words; i += 32) {
      const int head = i / params.num_words;
      const int word = i - head * params.num_words;
      const int64_t row =
          (static_cast<int64_t>(batch_key_head) * params.heads_per_key_head + head) *
              params.num_key_tiles +
          key_tile;
      live += __popc(live_word(params.tile_bits[row * params.num_words + word], word, allowed));
    }
    live = __reduce_add_sync(~0u, live);
  }
  if (lane == 0) params.live[column] = live;
}

}  // namespace backlite::schedule_sm90
