// Makes work items of columns. A block a group of heads:
//   (1) the limit of an item: a share of the mean work of a block of the backward
//   (2) longer columns are split into equal parts; if there are none, the last columns are, so that
//       blocks end together
//   (3) parts that are long for what is left when their group begins come before all groups
//   (4) otherwise group by group, longest first, in buckets
// A group's Q, dO and dQ fit in L2. Columns without a live tile get no item.
#pragma once

#include <cstdint>

#include "schedule/layout_sm90.h"
#include "sm90/dependency.cuh"

namespace backlite::schedule_sm90 {

inline constexpr int kPlanThreads = 1024;
// Of lengths, for early parts and for those in turn: a thread sums one.
inline constexpr int kBuckets = kPlanThreads / 2;

// Splitting costs a part the adds of its dK and dV, about as much as this many tiles.
inline constexpr int kMinLimit = 8;

// 4096 full columns are 31.03 for each of 132 blocks; the 32nd round would be four blocks' alone.
// So many columns at the end are split into so many parts, if these are not too short.
inline constexpr int kTailColumns = 32;
inline constexpr int kTailParts = 8;
inline constexpr int kMinTailPart = 16;
inline constexpr int kTailItems = kTailColumns * (kTailParts - 1);  // more than without

// A part comes early if this many times its length is more than what is left for each block.
inline constexpr float kEarlyFactor = 3.0f;

struct PlanParams {
  ScheduleLayout layout;
  int num_columns;
  int columns_in_group;
  int num_key_tiles;
  int num_key_heads;
  int num_blocks;  // of the backward
};

// How columns become parts.
struct Cut {
  int limit;
  int first_of_tail;  // from this column on
  float mean;         // live tiles for each block

  __device__ __forceinline__ int num_parts(int column, int live) const {
    if (column < first_of_tail) return (live + limit - 1) / limit;
    return live == 0 ? 0 : min(max(live / kMinTailPart, 1), kTailParts);
  }
  // Most columns are one part, and a 64-bit division is a chain of some 70 instructions.
  __device__ __forceinline__ static int part_begin(int live, int i, int parts) {
    if (i == 0) return 0;
    return i == parts ? live : static_cast<int>(static_cast<int64_t>(live) * i / parts);
  }
  // `behind`: the share of the columns that is behind the group's first one, itself included.
  __device__ __forceinline__ bool is_early(int live, int parts, float behind) const {
    return kEarlyFactor * static_cast<float>(live) > mean * behind * static_cast<float>(parts);
  }
};

// Sums over the block's threads; `scratch` holds kCount values a warp.
template <int kCount, typename T>
__device__ __forceinline__ void block_sums(T (&values)[kCount], T* scratch) {
#pragma unroll
  for (int v = 0; v < kCount; ++v) {
#pragma unroll
    for (int i = 16; i > 0; i /= 2) values[v] += __shfl_xor_sync(~0u, values[v], i);
    if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32 * kCount + v] = values[v];
  }
  __syncthreads();
#pragma unroll
  for (int v = 0; v < kCount; ++v) {
    values[v] = scratch[threadIdx.x % 32 * kCount + v];
#pragma unroll
    for (int i = 16; i > 0; i /= 2) values[v] += __shfl_xor_sync(~0u, values[v], i);
  }
}

__global__ void __launch_bounds__(kPlanThreads)
    plan_kernel(const __grid_constant__ PlanParams params) {
  static_assert(kPlanThreads == 32 * 32, "A warp adds what the warps have");
  __shared__ unsigned long long total_scratch[32];
  __shared__ int longest_scratch[32];
  __shared__ int count_scratch[32 * 4];
  __shared__ int warp_counts[32];
  __shared__ int buckets[kPlanThreads];
  __shared__ int next_slot;
  const int32_t* const live = params.layout.live;
  const int begin = blockIdx.x * params.columns_in_group;
  const int end = min(begin + params.columns_in_group, params.num_columns);
  const int lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32;

  sm90::let_next_kernel_launch();
  sm90::wait_for_earlier_kernels();

  // (1)
  unsigned long long total[1] = {0};
  int longest = 0;
  for (int c = threadIdx.x; c < params.num_columns; c += kPlanThreads) {
    total[0] += live[c];
    longest = max(longest, live[c]);
  }
  longest = __reduce_max_sync(~0u, longest);
  if (lane == 0) longest_scratch[warp] = longest;
  block_sums(total, total_scratch);
  longest = __reduce_max_sync(~0u, longest_scratch[lane]);
  const auto shares = static_cast<unsigned long long>(params.num_blocks) * kSplitsPerBlock;
  Cut cut;
  cut.limit = max(static_cast<int>((total[0] + shares - 1) / shares), kMinLimit);
  const bool has_room = shares >= kTailItems;  // in ScheduleLayout
  cut.first_of_tail = params.num_columns - (longest <= cut.limit && has_room ? kTailColumns : 0);
  cut.mean = static_cast<float>(total[0]) / static_cast<float>(params.num_blocks);
  const float per_column = 1.0f / static_cast<float>(params.num_columns);

  // (2), (3) What all groups have early, and what the groups before this one take.
  enum { kEarly, kEarlyBefore, kBefore, kSlotsBefore, kNumCounts };
  int counts[kNumCounts] = {};
  for (int c = threadIdx.x; c < params.num_columns; c += kPlanThreads) {
    const int group_begin = c / params.columns_in_group * params.columns_in_group;
    const float behind = static_cast<float>(params.num_columns - group_begin) * per_column;
    const int parts = cut.num_parts(c, live[c]);
    const bool is_before = c < begin;
    if (cut.is_early(live[c], parts, behind)) {
      counts[kEarly] += parts;
      if (is_before) counts[kEarlyBefore] += parts;
    } else if (is_before) {
      counts[kBefore] += parts;
    }
    if (is_before) counts[kSlotsBefore] += parts > 1;
  }
  buckets[threadIdx.x] = 0;
  block_sums(counts, count_scratch);
  if (threadIdx.x == 0) next_slot = counts[kSlotsBefore];

  // (4)
  const float behind = static_cast<float>(params.num_columns - begin) * per_column;
  const float per_tile = static_cast<float>(kBuckets) / static_cast<float>(cut.limit);
  const auto bucket_of = [&](int length, bool is_early) {
    const auto longest_first = static_cast<int>(static_cast<float>(cut.limit - length) * per_tile);
    return min(longest_first, kBuckets - 1) + (is_early ? 0 : kBuckets);
  };
  for (int c = begin + threadIdx.x; c < end; c += kPlanThreads) {
    const int parts = cut.num_parts(c, live[c]);
    const bool is_early = cut.is_early(live[c], parts, behind);
    for (int i = 0; i < parts; ++i) {
      const int first = cut.part_begin(live[c], i, parts);
      const int next = cut.part_begin(live[c], i + 1, parts);
      atomicAdd(&buckets[bucket_of(next - first, is_early)], 1);
    }
  }
  __syncthreads();
  const int my_count = buckets[threadIdx.x];
  int inclusive = my_count;
#pragma unroll
  for (int i = 1; i < 32; i *= 2) {
    const int below = __shfl_up_sync(~0u, inclusive, i);
    if (lane >= i) inclusive += below;
  }
  if (lane == 31) warp_counts[warp] = inclusive;
  __syncthreads();
  // Of the warps before this one among those of the same half of the buckets.
  constexpr int kHalf = kBuckets / 32;
  const bool is_in_turn = warp >= kHalf;
  const bool counts_here = lane < warp && (lane >= kHalf) == is_in_turn;
  const int below = __reduce_add_sync(~0u, counts_here ? warp_counts[lane] : 0);
  const int base = is_in_turn ? counts[kEarly] + counts[kBefore] : counts[kEarlyBefore];
  buckets[threadIdx.x] = base + below + inclusive - my_count;
  __syncthreads();
  for (int c = begin + threadIdx.x; c < end; c += kPlanThreads) {
    const int parts = cut.num_parts(c, live[c]);
    const bool is_early = cut.is_early(live[c], parts, behind);
    int slot = -1;
    if (parts > 1) {
      slot = atomicAdd(&next_slot, 1);
      params.layout.slot_columns[slot] = c;
    }
    const int batch_key_head = c / params.num_key_tiles;
    for (int i = 0; i < parts; ++i) {
      const int first = cut.part_begin(live[c], i, parts);
      const int next = cut.part_begin(live[c], i + 1, parts);
      params.layout.items[atomicAdd(&buckets[bucket_of(next - first, is_early)], 1)] = {
          .batch = batch_key_head / params.num_key_heads,
          .key_head = batch_key_head % params.num_key_heads,
          .key_tile = c % params.num_key_tiles,
          .first_live = first,
          .num_live = next - first,
          .part_slot = slot,
          .reserved = {}};
    }
  }
  __syncthreads();
  if (blockIdx.x == gridDim.x - 1 && threadIdx.x == 0) {
    // The last bucket's end is the end of the last group.
    *params.layout.header = {
        .num_items = buckets[kPlanThreads - 1], .num_slots = next_slot, .num_live = total[0]};
  }
}

}  // namespace backlite::schedule_sm90
