// Before the columns: delta = rowsum(dO * O) - dLSE and the row terms (params_sm90.h), zeros in the
// sums of dQ (or, if first_stores, the words that say who comes first to each: add_grad_query) and
// in the parts of split columns, dK = dV = 0 for columns without a live tile, how many live tiles
// each head has, and zeros in all counters of the kernels that follow.
#pragma once

#include <cmath>
#include <cstdint>
#include <type_traits>

#include "backward/config_sm90.h"
#include "backward/params_sm90.h"
#include "sm90/dependency.cuh"
#include "sm90/math.cuh"

namespace backlite::backward_sm90 {

inline constexpr int kPrepareThreads = 256;

// Blocks past the query tiles, for all that goes by columns or heads: one a multiprocessor.
inline constexpr int kColumnBlocks = 132;

template <typename Element>
__device__ __forceinline__ float2 unpack(uint32_t packed) {
  if constexpr (std::is_same_v<Element, sm90::BFloat16>) {
    return {sm90::low_bfloat16(packed), sm90::high_bfloat16(packed)};
  } else {
    return __half22float2(*reinterpret_cast<const __half2*>(&packed));
  }
}

// A float as three 16-bit numbers, the first one to be multiplied by its factor.
template <typename Element>
__device__ __forceinline__ void split(float x, Element* parts) {
  constexpr float kFactor = std::is_same_v<Element, sm90::Float16> ? kFirstPartFactorFp16 : 1.0f;
  parts[0] = Element(x * (1.0f / kFactor));
  x -= static_cast<float>(parts[0]) * kFactor;
  parts[1] = Element(x);
  x -= static_cast<float>(parts[1]);
  parts[2] = Element(x);
}

// The live tiles of a query tile: none, one, or a number of at least two. The whole block.
__device__ __forceinline__ int count_live(const RowsParams& params, int64_t batch_head,
                                          int query_tile) {
  const Range allowed = params.mask.key_tiles(query_tile);
  if (params.tile_bits == nullptr) return static_cast<int>(allowed.size());
  const int64_t num_words = num_bit_words(params.query_length);
  const uint32_t* const words =
      params.tile_bits + batch_head * params.num_key_tiles * num_words + query_tile / kTilesPerWord;
  int live = 0;
  for (int64_t first = allowed.begin; first < allowed.end && live < 2; first += kPrepareThreads) {
    const int64_t n = first + threadIdx.x;
    live += __syncthreads_count(n < allowed.end &&
                                (words[n * num_words] >> query_tile % kTilesPerWord & 1) != 0);
  }
  return live;
}

template <int kD, typename Element>
__device__ __forceinline__ void prepare_query_tile(const RowsParams& params) {
  constexpr int kRowLanes = kD / 8;  // of 16 bytes each
  constexpr int kRowsAtOnce = kPrepareThreads / kRowLanes;
  // From the last to the first: what comes last is still in L2 when the columns begin.
  const int64_t tile = params.num_tiles - 1 - blockIdx.x;
  const int64_t batch_head = tile / params.num_query_tiles;
  const int query_tile = static_cast<int>(tile - batch_head * params.num_query_tiles);
  const int64_t batch = batch_head / params.num_query_heads;
  const int64_t head = batch_head - batch * params.num_query_heads;
  const int lane = threadIdx.x % kRowLanes;
  const bool first_stores = schedule_sm90::first_stores(*params.schedule, params.num_tiles, kD);
  if (first_stores) {
    const int live = count_live(params, batch_head, query_tile);
    if (threadIdx.x == 0)
      params.started[tile] = live == 1 && params.tile_bits != nullptr ? kOnlyOne : 0;
    if (live == 0) return;  // nobody asks for its row terms
  }

  const auto at = [&](const void* base, const Strides& strides, int row) {
    return reinterpret_cast<const uint4*>(static_cast<const Element*>(base) +
                                          batch * strides.batch + head * strides.head +
                                          row * strides.length) +
           lane;
  };
#pragma unroll
  for (int pass = 0; pass < kQueries / kRowsAtOnce; ++pass) {
    const int row_in_tile = pass * kRowsAtOnce + threadIdx.x / kRowLanes;
    const int row = query_tile * kQueries + row_in_tile;
    const bool exists = row < params.query_length;
    float dot = 0.0f;
    if (exists) {
      const uint4 out = __ldcs(at(params.out, params.out_strides, row));  // for the last time
      const uint4 grad_out = *at(params.grad_out, params.grad_out_strides, row);
      const auto add = [&](uint32_t a, uint32_t b) {
        const float2 x = unpack<Element>(a);
        const float2 y = unpack<Element>(b);
        dot = fmaf(x.x, y.x, fmaf(x.y, y.y, dot));
      };
      add(out.x, grad_out.x);
      add(out.y, grad_out.y);
      add(out.z, grad_out.z);
      add(out.w, grad_out.w);
    }
#pragma unroll
    for (int i = 1; i < kRowLanes; i *= 2) dot += __shfl_xor_sync(~0u, dot, i);
    if (lane == 0) {
      float lse_term = 0.0f;
      float delta_term = 0.0f;
      if (exists) {
        const int64_t index = batch_head * params.query_length + row;
        const float lse = params.lse[index];
        // A row without keys is masked everywhere; zeros keep the products finite.
        if (lse != -INFINITY) {
          lse_term = -lse * params.inverse_scale;
          delta_term = (params.grad_lse == nullptr ? 0.0f : params.grad_lse[index]) - dot;
        }
      }
      alignas(16) Element terms[kRowTerms] = {};
      split(lse_term, terms);
      split(delta_term, terms + kParts);
      static_cast<uint4*>(params.row_terms)[tile * kQueries + row_in_tile] =
          *reinterpret_cast<const uint4*>(terms);
    }
  }

  if (first_stores) return;
  auto* const sums = reinterpret_cast<float4*>(params.grad_query_sums) + tile * kQueries * kD / 4;
#pragma unroll
  for (int i = 0; i < kQueries * kD / 4 / kPrepareThreads; ++i) {
    sums[i * kPrepareThreads + threadIdx.x] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
  }
}

template <int kD, typename Element>
__device__ __forceinline__ void prepare_columns(const RowsParams& params, int block) {
  if (block == 0 && threadIdx.x == 0) {
    *params.next_item = 0;
    *params.heads.num_done = 0;
  }
  constexpr int kWarps = kPrepareThreads / sm90::kWarpSize;
  for (int head = block * kWarps + threadIdx.x / sm90::kWarpSize; head < params.num_heads;
       head += kColumnBlocks * kWarps) {
    const int lane = threadIdx.x % sm90::kWarpSize;
    const int32_t* const live = params.live + static_cast<int64_t>(head) * params.num_key_tiles;
    unsigned long long left = lane == 0;  // the one more
    for (int i = lane; i < params.num_key_tiles; i += sm90::kWarpSize) left += live[i];
#pragma unroll
    for (int i = 1; i < sm90::kWarpSize; i *= 2) left += __shfl_xor_sync(~0u, left, i);
    if (lane == 0) {
      params.heads.left[head] = left;
      params.heads.done[head] = 0;
    }
  }

  constexpr int64_t kSlotFloats = 2 * kKeys * kD;
  auto* const parts = reinterpret_cast<float4*>(params.grad_parts);
  const int64_t num_words = params.schedule->num_slots * kSlotFloats / 4;
  for (int64_t i = block * kPrepareThreads + threadIdx.x; i < num_words;
       i += kColumnBlocks * kPrepareThreads) {
    parts[i] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
  }

  constexpr int kRowLanes = kD / 8;
  for (int column = block; column < params.num_columns; column += kColumnBlocks) {
    if (params.live[column] != 0) continue;
    const int key_tile = column % params.num_key_tiles;
    const int64_t batch_head = column / params.num_key_tiles;
    const int64_t batch = batch_head / params.num_key_heads;
    const int64_t head = batch_head - batch * params.num_key_heads;
    for (int i = threadIdx.x; i < kKeys * kRowLanes; i += kPrepareThreads) {
      const int row = key_tile * kKeys + i / kRowLanes;
      if (row >= params.key_length) break;
      const auto clear = [&](void* base, const Strides& strides) {
        reinterpret_cast<uint4*>(static_cast<Element*>(base) + batch * strides.batch +
                                 head * strides.head + row * strides.length)[i % kRowLanes] =
            make_uint4(0, 0, 0, 0);
      };
      clear(params.grad_key, params.grad_key_strides);
      clear(params.grad_value, params.grad_value_strides);
    }
  }
}

template <int kD, typename Element>
__global__ void __launch_bounds__(kPrepareThreads)
    prepare_kernel(const __grid_constant__ RowsParams params) {
  sm90::let_next_kernel_launch();
  sm90::wait_for_earlier_kernels();
  if (blockIdx.x < params.num_tiles) {
    prepare_query_tile<kD, Element>(params);
  } else {
    prepare_columns<kD, Element>(params, static_cast<int>(blockIdx.x - params.num_tiles));
  }
}

}  // namespace backlite::backward_sm90
