// One compiled form of the Hopper backward, behind a plain function.
#pragma once

#include <cuda_runtime_api.h>

#include "backward/finish_sm90.cuh"
#include "backward/instances_sm90.h"
#include "backward/kernel_sm90.cuh"
#include "backward/prepare_sm90.cuh"
#include "sm90/dependency.cuh"

namespace backlite::backward_sm90 {

template <typename Config, typename Element, typename TileSource>
cudaError_t launch_columns(const Launch& launch, cudaStream_t stream) {
  constexpr size_t kSharedBytes = sizeof(SharedMemory<Config, Element>);
  const auto kernel = backward_kernel<Config, Element, TileSource>;
  const cudaError_t error = sm90::allow_shared_bytes(kernel, kSharedBytes);
  if (error != cudaSuccess) return error;
  return sm90::launch_early(kernel, static_cast<unsigned>(launch.num_blocks), kThreads,
                            kSharedBytes, stream, launch.columns);
}

template <typename Config, typename Element>
cudaError_t launch_instance(const Launch& launch, cudaStream_t stream) {
  constexpr int kD = Config::kConfig.head_dim;
  const auto num_tiles = static_cast<unsigned>(launch.rows.num_tiles);
  cudaError_t error = sm90::launch_early(prepare_kernel<kD, Element>, num_tiles + kColumnBlocks,
                                         kPrepareThreads, 0, stream, launch.rows);
  if (error != cudaSuccess) return error;
  if (launch.num_blocks > 0) {
    error = launch.is_dense ? launch_columns<Config, Element, DenseTiles>(launch, stream)
                            : launch_columns<Config, Element, LiveTiles>(launch, stream);
    if (error != cudaSuccess) return error;
  }
  const RowsParams& rows = launch.rows;
  const int64_t num_blocks = rows.num_heads * ceil_div(rows.tiles_of_head, rows.tiles_in_run) +
                             ceil_div(launch.num_parts, rows.tiles_in_run);
  if (num_blocks == 0) return cudaSuccess;
  const auto finish = finish_kernel<kD, Element>;
  // Always the largest, or a smaller problem in another thread could lower it before this launch.
  error = sm90::allow_shared_bytes(finish, finish_shared_bytes<kD>(kTilesInRun));
  if (error != cudaSuccess) return error;
  return sm90::launch_early(finish, static_cast<unsigned>(num_blocks), kFinishThreads,
                            finish_shared_bytes<kD>(rows.tiles_in_run), stream, rows);
}

}  // namespace backlite::backward_sm90
