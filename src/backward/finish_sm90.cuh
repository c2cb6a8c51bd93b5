// After the columns: dQ = scale * sum, and dK, dV of split columns, from the order of accumulator
// fragments in float32 to rows in the caller's type.
#pragma once

#include <cstdint>

#include "backward/config_sm90.h"
#include "backward/params_sm90.h"
#include "sm90/dependency.cuh"
#include "sm90/math.cuh"

namespace backlite::backward_sm90 {

inline constexpr int kFinishThreads = 256;

// 64 rows of D columns, stored as D / kColumns fragments of 64 x kColumns side by side, each as
// [kColumns / 8][128 threads][4]. A thread turns eight neighbouring columns of one row: they come
// from four threads' pairs. A warp takes 16 rows and 16 columns, so that both sides move whole
// sectors.
template <int kD, int kColumns, typename Element>
__device__ __forceinline__ void convert_rows(const float* from, Element* to, int64_t row_stride,
                                             int num_rows, float factor) {
  constexpr int kChunks = kD / 8;
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int i = threadIdx.x / 32; i < 4 * kChunks / 2; i += kFinishThreads / 32) {
    const int row_group = i / (kChunks / 2);
    const int row = 16 * row_group + lane % 16;
    const int chunk = i % (kChunks / 2) * 2 + lane / 16;
    const int fragment = chunk / (kColumns / 8);
    const int j = chunk % (kColumns / 8);
    const float* const pairs = from + fragment * kQueries * kColumns +
                               (j * 128 + 32 * row_group + lane % 8 * 4) * 4 + lane / 8 % 2 * 2;
    uint32_t packed[4];
#pragma unroll
    for (int q = 0; q < 4; ++q) {
      const float2 pair = *reinterpret_cast<const float2*>(pairs + 4 * q);
      packed[q] = sm90::pack<Element>(pair.x * factor, pair.y * factor);
    }
    if (row < num_rows) {
      __stcs(reinterpret_cast<uint4*>(to + row * row_stride + 8 * chunk),
             make_uint4(packed[0], packed[1], packed[2], packed[3]));
    }
  }
}

template <int kD, typename Element>
__global__ void __launch_bounds__(kFinishThreads)
    finish_kernel(const __grid_constant__ RowsParams params) {
  sm90::wait_for_earlier_kernels();
  if (blockIdx.x < params.num_tiles) {
    // From the last to the first: the sums of the last are still in L2.
    const int64_t block = params.num_tiles - 1 - blockIdx.x;
    const int64_t batch_head = block / params.num_query_tiles;
    const int query = static_cast<int>(block - batch_head * params.num_query_tiles) * kQueries;
    const int64_t batch = batch_head / params.num_query_heads;
    const int64_t head = batch_head - batch * params.num_query_heads;
    const Strides& strides = params.grad_query_strides;
    const uint32_t started = schedule_sm90::first_stores(*params.schedule, params.num_tiles)
                                 ? params.started[block]
                                 : kStored;
    if (started == kOnlyOne) return;  // dQ is there
    if (started == 0) {               // no live tile: nobody wrote the sums
      constexpr int kRowLanes = kD / 8;
      for (int i = threadIdx.x; i < kQueries * kRowLanes; i += kFinishThreads) {
        const int row = query + i / kRowLanes;
        if (row >= params.query_length) break;
        reinterpret_cast<uint4*>(static_cast<Element*>(params.grad_query) + batch * strides.batch +
                                 head * strides.head + row * strides.length)[i % kRowLanes] =
            make_uint4(0, 0, 0, 0);
      }
      return;
    }
    convert_rows<kD, kGradQueryColumns>(
        params.grad_query_sums + block * kQueries * kD,
        static_cast<Element*>(params.grad_query) + batch * strides.batch + head * strides.head +
            query * strides.length,
        strides.length, params.query_length - query, params.grad_scale);
    return;
  }

  // Part: [slot][dV, dK][consumer], 64 rows each.
  const int part = static_cast<int>(blockIdx.x - params.num_tiles);
  const int slot = part / (2 * kConsumers);
  if (slot >= params.schedule->num_slots) return;
  const bool is_key = part / kConsumers % 2 != 0;
  const int column = params.slot_columns[slot];
  const int64_t batch_head = column / params.num_key_tiles;
  const int key = (column % params.num_key_tiles) * kKeys + part % kConsumers * sm90::kMmaRows;
  const int64_t batch = batch_head / params.num_key_heads;
  const int64_t head = batch_head - batch * params.num_key_heads;
  const Strides& strides = is_key ? params.grad_key_strides : params.grad_value_strides;
  auto* const to = static_cast<Element*>(is_key ? params.grad_key : params.grad_value);
  convert_rows<kD, kD>(params.grad_parts + static_cast<int64_t>(part) * sm90::kMmaRows * kD,
                       to + batch * strides.batch + head * strides.head + key * strides.length,
                       strides.length, params.key_length - key, is_key ? params.grad_scale : 1.0f);
}

}  // namespace backlite::backward_sm90
