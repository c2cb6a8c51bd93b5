// Heads on their way to the last pass: while the columns of some are at work, dQ of others, whose
// columns are all done, becomes rows (finish_sm90.cuh) on multiprocessors that the columns leave.
#pragma once

#include <cstdint>

#include "backward/params_sm90.h"
#include "schedule/layout_sm90.h"
#include "sm90/progress.cuh"

namespace backlite::backward_sm90 {

// How many of the `num_blocks` blocks of the columns' kernel work. The others end at once, so that
// the last pass has their multiprocessors: as many as it keeps busy until the columns end, 6 of 132
// at 8k, 5% live, none in long dense problems. Half as many again are even with that.
__device__ __forceinline__ int num_working_blocks(const schedule_sm90::Header& schedule,
                                                  int64_t num_tiles, int num_blocks) {
  // Cycles of one multiprocessor: a live tile, what a column costs beyond its tiles
  // (docs/hopper-backward.md), and dQ of a query tile from the sums to rows.
  constexpr float kTile = 3600.0f;
  constexpr float kItem = 7500.0f;
  constexpr float kFinish = 720.0f;
  // With few items the schedule has all heads at work at once, and they are done at the end.
  constexpr int kFewItems = 8;
  if (schedule.num_items <= kFewItems * num_blocks) return num_blocks;
  const auto num_live = static_cast<float>(schedule.num_live);
  // A query tile with one live tile has no sums.
  const float finish = kFinish * fminf(static_cast<float>(num_tiles), 0.5f * num_live);
  const float columns = kTile * num_live + kItem * static_cast<float>(schedule.num_items);
  const float share = finish / (finish + columns);  // less than a tenth
  return num_blocks - __float2int_rn(share * static_cast<float>(num_blocks));
}

// Some of the head's tiles are done: this thread has waited for all of their dQ, and fenced. Who
// takes the last off lists the head.
__device__ __forceinline__ void count_off(const Heads& heads, int head, int num_tiles) {
  if (sm90::take_off(heads.left + head, num_tiles) != 0) return;
  const uint32_t place = sm90::fetch_add(heads.num_done, 1);
  sm90::set_bits(heads.done + place, kListed | static_cast<uint32_t>(head));
}

// Takes off what every head has beyond its live tiles, so that those without any are listed too. A
// whole warp.
__device__ __forceinline__ void list_empty_heads(const Heads& heads, int num_heads, int lane) {
#pragma unroll 1
  for (int head = lane; head < num_heads; head += sm90::kWarpSize) count_off(heads, head, 1);
}

}  // namespace backlite::backward_sm90
