// The Hopper backward over columns of tiles. One block a multiprocessor, resident for the whole
// grid; it takes work items (a run of live tiles of one column of 128 keys) from a counter.
//
//   consumers  two warpgroups, 64 keys each: consumer_sm90.cuh
//   producer   one warp finds the live tiles, one copies K, V, Q, dO and the row terms to shared
//              memory, one adds dQ to global memory, one of the first block lists heads without
//              a live tile: producer_sm90.cuh, heads_sm90.cuh
#pragma once

#include <cstdint>
#include <type_traits>

#include "backward/config_sm90.h"
#include "backward/consumer_sm90.cuh"
#include "backward/heads_sm90.cuh"
#include "backward/params_sm90.h"
#include "backward/producer_sm90.cuh"
#include "backward/shared_sm90.cuh"
#include "backward/tile_source_sm90.cuh"
#include "sm90/barrier.cuh"
#include "sm90/dependency.cuh"
#include "sm90/layout.h"
#include "sm90/tma.cuh"

namespace backlite::backward_sm90 {

template <typename Config, typename Element, typename TileSource>
__global__ void __launch_bounds__(kThreads, 1)
    backward_kernel(const __grid_constant__ BackwardParams params) {
  static constexpr BackwardConfig kConfig = Config::kConfig;
  using Shared = SharedMemory<Config, Element>;
  static_assert(sizeof(Shared) <= 232448, "A block's limit of shared memory");
  extern __shared__ __align__(sm90::kTileAlignment) unsigned char shared_bytes[];
  auto& shared = *reinterpret_cast<Shared*>(shared_bytes);

  const int warpgroup = sm90::warp_uniform(threadIdx.x / sm90::kWarpgroupThreads);
  const int warp = sm90::warp_uniform(threadIdx.x / sm90::kWarpSize) % 4;
  const int lane = threadIdx.x % sm90::kWarpSize;

  if (threadIdx.x == 0) {
    sm90::prefetch_tensor_map(params.key);
    sm90::prefetch_tensor_map(params.value);
    sm90::prefetch_tensor_map(params.query);
    sm90::prefetch_tensor_map(params.grad_out);
    constexpr int kConsumerWarps = 4 * kConsumers;
    for (int i = 0; i < kConfig.key_stages; ++i) {
      shared.key_full[i].init(1);
      shared.key_empty[i].init(kConsumerWarps);
    }
    shared.value_full.init(1);
    shared.value_empty.init(kConsumerWarps);
    for (int i = 0; i < kConfig.query_stages; ++i) {
      shared.tile_full[i].init(1);
      shared.tile_empty[i].init(kConsumerWarps);
    }
    for (int i = 0; i < kFoundSlots; ++i) {
      shared.found_full[i].init(1);
      shared.found_empty[i].init(1);
    }
    for (int i = 0; i < kConfig.grad_query_places; ++i) {
      shared.grad_query_full[i].init(kConsumerWarps / kConfig.tiles_at_once);
      shared.grad_query_empty[i].init(1);
    }
    for (int i = 0; i < Shared::kReduceSlots; ++i) shared.reduce_ready[i].init(1);
    sm90::fence_barrier_init();
  }
  for (int i = threadIdx.x; i < kCoreElements; i += kThreads) {
    const int column = i % sm90::kChunkColumns;
    const float first = std::is_same_v<Element, sm90::Float16> ? kFirstPartFactorFp16 : 1.0f;
    const auto factor = [&](int part) { return part == 0 ? first : 1.0f; };
    const bool is_lse = column < kParts;
    const bool is_delta = !is_lse && column < 2 * kParts;
    shared.lse_ones[i] = Element(is_lse ? factor(column) : 0.0f);
    shared.delta_ones[i] = Element(is_delta ? factor(column - kParts) : 0.0f);
    shared.zeros[i] = Element(0.0f);
  }
  sm90::fence_async_proxy();
  __syncthreads();
  sm90::wait_for_earlier_kernels();
  // Not before: the last pass begins when all blocks have come here, and reads what the first pass
  // wrote.
  sm90::let_next_kernel_launch();

  if (warpgroup == kConsumers) {
    sm90::give_registers<kConfig.producer_registers>();

    if (warp == kFinder) {
      find_tiles<Config, TileSource>(params, shared, lane);
    } else if (warp == kLoader) {
      if (sm90::elect_one()) load_tiles<Config>(params, shared);
    } else if (warp == kReducer) {
      if (sm90::elect_one()) add_grad_query<Config>(params, shared);
    } else if (blockIdx.x == 0) {
      list_empty_heads(params.heads, params.num_heads, lane);
    }
  } else {
    sm90::take_registers<kConfig.consumer_registers>();
    // Two copies of the loop: the code for a query tile's only live tile is not in the way of those
    // who never meet one.
    if (TileSource::kIsSparse &&
        schedule_sm90::first_stores(*params.schedule, params.num_tiles, kConfig.head_dim)) {
      consume<Config, true>(params, shared, warpgroup, warp, lane);
    } else {
      consume<Config, false>(params, shared, warpgroup, warp, lane);
    }
  }
}

}  // namespace backlite::backward_sm90
