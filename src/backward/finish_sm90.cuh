// dQ = scale * sum, and dK, dV of split columns, from the order of accumulator fragments in float32
// to rows in the caller's type. dQ of a head beside the columns of others, on the multiprocessors
// that the columns' kernel has left (heads_sm90.cuh); what is left, when it has ended.
//
// Nobody waits for ever. The first of these blocks starts when every block of the columns' kernel
// has let it, or ended: all of those are on a multiprocessor then, and leave it only when they are
// done; none of them waits for anything that these blocks do or hold. A block here waits for the
// place in the list of heads that is its own, and whatever it keeps a multiprocessor from, the
// columns have theirs. (Where kernels do not overlap, the list is full when these begin.)
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "backward/config_sm90.h"
#include "backward/heads_sm90.cuh"
#include "backward/params_sm90.h"
#include "sm90/barrier.cuh"
#include "sm90/bulk.cuh"
#include "sm90/dependency.cuh"
#include "sm90/math.cuh"
#include "sm90/progress.cuh"

namespace backlite::backward_sm90 {

inline constexpr int kFinishThreads = 256;

template <int kD>
constexpr size_t finish_shared_bytes(int tiles_in_run) {
  return sizeof(float) * kQueries * kD * std::min(tiles_in_run, kFinishStages);
}

template <typename Element>
struct Rows {
  Element* to;
  int64_t stride;
  int size;  // of 64, how many exist
  float factor;
};

// 64 rows of D columns, stored as D / kColumns fragments of 64 x kColumns side by side, each as
// [kColumns / 8][128 threads][4]. A thread turns eight neighbouring columns of one row: they come
// from four threads' pairs. A warp takes 16 rows and 16 columns, so that it writes whole sectors.
// Lanes begin with different pairs: in turn from the first, four of them would meet in each bank.
template <int kD, int kColumns, typename Element>
__device__ __forceinline__ void convert_rows(const float* from, const Rows<Element>& rows) {
  constexpr int kChunks = kD / 8;
  const int lane = threadIdx.x % 32;
  const int first_pair = lane / 2 % 4;
#pragma unroll
  for (int i = threadIdx.x / 32; i < 4 * kChunks / 2; i += kFinishThreads / 32) {
    const int row_group = i / (kChunks / 2);
    const int row = 16 * row_group + lane % 16;
    const int chunk = i % (kChunks / 2) * 2 + lane / 16;
    const int fragment = chunk / (kColumns / 8);
    const int j = chunk % (kColumns / 8);
    const float* const pairs = from + fragment * kQueries * kColumns +
                               (j * 128 + 32 * row_group + lane % 8 * 4) * 4 + lane / 8 % 2 * 2;
    uint32_t turned[4];  // pair (first_pair + q) % 4
#pragma unroll
    for (int q = 0; q < 4; ++q) {
      const float2 pair = *reinterpret_cast<const float2*>(pairs + 4 * ((first_pair + q) % 4));
      turned[q] = sm90::pack<Element>(pair.x * rows.factor, pair.y * rows.factor);
    }
    // Back by one if the first was odd, then by two if it was 2 or 3.
    const bool by_one = first_pair % 2 != 0;
    const bool by_two = first_pair / 2 != 0;
    uint32_t half[4];
#pragma unroll
    for (int q = 0; q < 4; ++q) half[q] = by_one ? turned[(q + 3) % 4] : turned[q];
    const auto packed = [&](int q) { return by_two ? half[(q + 2) % 4] : half[q]; };
    if (row < rows.size) {
      __stcs(reinterpret_cast<uint4*>(rows.to + row * rows.stride + 8 * chunk),
             make_uint4(packed(0), packed(1), packed(2), packed(3)));
    }
  }
}

template <int kD, typename Element>
__device__ __forceinline__ void clear_rows(const Rows<Element>& rows) {
  constexpr int kRowLanes = kD / 8;
  for (int i = threadIdx.x; i < min(rows.size, kQueries) * kRowLanes; i += kFinishThreads) {
    reinterpret_cast<uint4*>(rows.to + i / kRowLanes * rows.stride)[i % kRowLanes] =
        make_uint4(0, 0, 0, 0);
  }
}

// Of the tiles that lie behind each other from `from` on, those whose bit is set in `wanted`. The
// whole block; thread 0 has made sure that what it sees has been written.
template <int kD, int kColumns, typename RowsOf>
__device__ __forceinline__ void convert_tiles(const float* from, uint32_t wanted, float* stages,
                                              sm90::Barrier* full, const RowsOf& rows_of) {
  constexpr int kFloats = kQueries * kD;
  constexpr int kBytes = kFloats * sizeof(float);
  uint32_t to_load = wanted;
  const auto load_next = [&](int stage) {
    if (to_load == 0) return;
    const int tile = __ffs(to_load) - 1;
    to_load &= to_load - 1;
    full[stage].arrive_and_expect(kBytes);
    sm90::bulk_load(stages + stage * kFloats, from + static_cast<int64_t>(tile) * kFloats, kBytes,
                    full[stage]);
  };
  if (threadIdx.x == 0) {
    sm90::fence_async_proxy_global();
    for (int i = 0; i < kFinishStages; ++i) load_next(i);
  }
  sm90::Ring<kFinishStages> stage;
  for (; wanted != 0; wanted &= wanted - 1, stage.advance()) {
    full[stage.stage].wait(stage.parity);
    convert_rows<kD, kColumns>(stages + stage.stage * kFloats, rows_of(__ffs(wanted) - 1));
    __syncthreads();
    if (threadIdx.x == 0) load_next(stage.stage);
  }
}

// A run of query tiles of the head at this place of the list.
template <int kD, typename Element>
__device__ __forceinline__ void finish_query_tiles(const RowsParams& params, int place,
                                                   int run_in_head, float* stages,
                                                   sm90::Barrier* full) {
  __shared__ int shared_first;  // query tile of all
  __shared__ uint32_t shared_summed, shared_untouched;
  const int begin = run_in_head * params.tiles_in_run;
  if (threadIdx.x < 32) {
    const int lane = threadIdx.x;
    int head = place;
    if (params.num_columns == 0) {
      // No kernel of columns that lists heads: all are done when the first pass is.
      sm90::wait_for_earlier_kernels();
    } else {
      if (lane == 0) head = sm90::wait_for_bits(params.heads.done + place, kListed) & ~kListed;
      head = sm90::warp_uniform(head);
      __syncwarp();  // what lane 0 has acquired, all have: an exchange alone orders no memory
    }
    const int first = head * params.tiles_of_head + begin;
    const bool exists = lane < min(params.tiles_in_run, params.tiles_of_head - begin);
    uint32_t started = kStored;
    if (exists && schedule_sm90::first_stores(*params.schedule, params.num_tiles, kD)) {
      started = params.started[first + lane];
    }
    // dQ of an only one is there; without a live tile nobody wrote the sums.
    const uint32_t summed = __ballot_sync(~0u, exists && (started & kStored) != 0);
    const uint32_t untouched = __ballot_sync(~0u, exists && started == 0);
    if (lane == 0) {
      shared_first = first;
      shared_summed = summed;
      shared_untouched = untouched;
    }
  }
  __syncthreads();

  const int first = shared_first;
  const auto rows_of = [&](int i) -> Rows<Element> {
    const int batch_head = (first + i) / params.num_query_tiles;
    const int query = (first + i - batch_head * params.num_query_tiles) * kQueries;
    const int64_t batch = batch_head / params.num_query_heads;
    const int64_t head = batch_head - batch * params.num_query_heads;
    const Strides& strides = params.grad_query_strides;
    return {.to = static_cast<Element*>(params.grad_query) + batch * strides.batch +
                  head * strides.head + query * strides.length,
            .stride = strides.length,
            .size = params.query_length - query,
            .factor = params.grad_scale};
  };
  convert_tiles<kD, kGradQueryColumns>(
      params.grad_query_sums + static_cast<int64_t>(first) * kQueries * kD, shared_summed, stages,
      full, rows_of);
  for (uint32_t left = shared_untouched; left != 0; left &= left - 1) {
    clear_rows<kD>(rows_of(__ffs(left) - 1));
  }
}

// A run of parts: [slot][dV, dK][consumer], 64 rows each.
template <int kD, typename Element>
__device__ __forceinline__ void finish_parts(const RowsParams& params, int first, float* stages,
                                             sm90::Barrier* full) {
  constexpr int kPartsOfSlot = 2 * kConsumers;
  const int num_parts = min(params.tiles_in_run, params.schedule->num_slots * kPartsOfSlot - first);
  if (num_parts <= 0) return;
  const auto rows_of = [&](int i) -> Rows<Element> {
    const int part = first + i;
    const bool is_key = part / kConsumers % 2 != 0;
    const int column = params.slot_columns[part / kPartsOfSlot];
    const int64_t batch_head = column / params.num_key_tiles;
    const int key = (column % params.num_key_tiles) * kKeys + part % kConsumers * sm90::kMmaRows;
    const int64_t batch = batch_head / params.num_key_heads;
    const int64_t head = batch_head - batch * params.num_key_heads;
    const Strides& strides = is_key ? params.grad_key_strides : params.grad_value_strides;
    return {.to = static_cast<Element*>(is_key ? params.grad_key : params.grad_value) +
                  batch * strides.batch + head * strides.head + key * strides.length,
            .stride = strides.length,
            .size = params.key_length - key,
            .factor = is_key ? params.grad_scale : 1.0f};
  };
  convert_tiles<kD, kD>(params.grad_parts + static_cast<int64_t>(first) * sm90::kMmaRows * kD,
                        (1u << num_parts) - 1, stages, full, rows_of);
}

template <int kD, typename Element>
__global__ void __launch_bounds__(kFinishThreads)
    finish_kernel(const __grid_constant__ RowsParams params) {
  static_assert(kTilesInRun < 32, "A bit of a word for each");
  extern __shared__ __align__(16) float stages[];
  __shared__ sm90::Barrier full[kFinishStages];
  if (threadIdx.x == 0) {
    for (sm90::Barrier& barrier : full) barrier.init(1);
    sm90::fence_barrier_init();
  }
  __syncthreads();

  const auto runs_of_head = static_cast<int>(ceil_div(params.tiles_of_head, params.tiles_in_run));
  const int num_runs = params.num_heads * runs_of_head;
  const auto block = static_cast<int>(blockIdx.x);
  if (block < num_runs) {
    const int place = block / runs_of_head;
    finish_query_tiles<kD, Element>(params, place, block - place * runs_of_head, stages, full);
    return;
  }
  // There is such a block whenever there are columns: this kernel ends after theirs.
  sm90::wait_for_earlier_kernels();
  finish_parts<kD, Element>(params, (block - num_runs) * params.tiles_in_run, stages, full);
}

}  // namespace backlite::backward_sm90
