// Makes work items of columns. A block a group of heads:
//   (1) the limit of an item: a share of the mean work of a block of the backward
//   (2) columns longer than the limit are split into equal parts
//   (3) parts are ordered by length, longest first, in buckets
// A group's Q, dO and dQ fit in L2. Columns without a live tile get no item.
#pragma once

#include <cstdint>

#include "schedule/layout_sm90.h"
#include "sm90/dependency.cuh"

namespace backlite::schedule_sm90 {

inline constexpr int kPlanThreads = 1024;
inline constexpr int kBuckets = kPlanThreads;  // of lengths: a thread sums one

// Splitting costs a part the adds of its dK and dV, about as much as this many tiles.
inline constexpr int kMinLimit = 8;

struct PlanParams {
  ScheduleLayout layout;
  int num_columns;
  int columns_in_group;
  int num_key_tiles;
  int num_key_heads;
  int num_blocks;  // of the backward
};

struct Totals {
  unsigned long long live;
  int items;
  int slots;
};

__device__ __forceinline__ int num_parts(int live, int limit) { return (live + limit - 1) / limit; }

// Sum over the block's threads; `scratch` holds one value a warp.
template <typename T>
__device__ __forceinline__ T block_sum(T value, T* scratch) {
#pragma unroll
  for (int i = 16; i > 0; i /= 2) value += __shfl_xor_sync(~0u, value, i);
  __syncthreads();
  if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = value;
  __syncthreads();
  T sum = 0;
#pragma unroll
  for (int i = 0; i < kPlanThreads / 32; ++i) sum += scratch[i];
  return sum;
}

__global__ void __launch_bounds__(kPlanThreads)
    plan_kernel(const __grid_constant__ PlanParams params) {
  __shared__ unsigned long long scratch[kPlanThreads / 32];
  __shared__ int counts[kPlanThreads / 32];
  __shared__ int buckets[kBuckets];
  __shared__ int next_slot;
  const int32_t* const live = params.layout.live;
  const int begin = blockIdx.x * params.columns_in_group;
  const int end = min(begin + params.columns_in_group, params.num_columns);

  sm90::wait_for_earlier_kernels();

  // (1)
  unsigned long long my_live = 0;
  for (int c = threadIdx.x; c < params.num_columns; c += kPlanThreads) my_live += live[c];
  const unsigned long long total = block_sum(my_live, scratch);
  const auto shares = static_cast<unsigned long long>(params.num_blocks) * kSplitsPerBlock;
  const int limit = max(static_cast<int>((total + shares - 1) / shares), kMinLimit);

  // (2) What the groups before this one take.
  int my_items = 0;
  int my_slots = 0;
  for (int c = threadIdx.x; c < begin; c += kPlanThreads) {
    const int parts = num_parts(live[c], limit);
    my_items += parts;
    my_slots += parts > 1;
  }
  const int items_before = block_sum(my_items, counts);
  const int slots_before = block_sum(my_slots, counts);
  if (threadIdx.x == 0) next_slot = slots_before;

  // (3)
  const auto bucket_of = [&](int length) {
    return static_cast<int>(static_cast<int64_t>(limit - length) * kBuckets / limit);
  };
  buckets[threadIdx.x] = 0;
  __syncthreads();
  for (int c = begin + threadIdx.x; c < end; c += kPlanThreads) {
    const int parts = num_parts(live[c], limit);
    for (int i = 0; i < parts; ++i) {
      const int first = static_cast<int64_t>(live[c]) * i / parts;
      const int next = static_cast<int64_t>(live[c]) * (i + 1) / parts;
      atomicAdd(&buckets[bucket_of(next - first)], 1);
    }
  }
  __syncthreads();
  const int my_count = buckets[threadIdx.x];
  int inclusive = my_count;
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int i = 1; i < 32; i *= 2) {
    const int below = __shfl_up_sync(~0u, inclusive, i);
    if (lane >= i) inclusive += below;
  }
  if (lane == 31) counts[threadIdx.x / 32] = inclusive;
  __syncthreads();
  int first_of_bucket = items_before + inclusive - my_count;
  for (int i = 0; i < static_cast<int>(threadIdx.x) / 32; ++i) first_of_bucket += counts[i];
  buckets[threadIdx.x] = first_of_bucket;
  __syncthreads();
  for (int c = begin + threadIdx.x; c < end; c += kPlanThreads) {
    const int parts = num_parts(live[c], limit);
    int slot = -1;
    if (parts > 1) {
      slot = atomicAdd(&next_slot, 1);
      params.layout.slot_columns[slot] = c;
    }
    const int batch_key_head = c / params.num_key_tiles;
    for (int i = 0; i < parts; ++i) {
      const int first = static_cast<int64_t>(live[c]) * i / parts;
      const int next = static_cast<int64_t>(live[c]) * (i + 1) / parts;
      params.layout.items[atomicAdd(&buckets[bucket_of(next - first)], 1)] = {
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
        .num_items = buckets[kBuckets - 1], .num_slots = next_slot, .num_live = total};
  }
}

}  // namespace backlite::schedule_sm90
