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
  const cudaError_t error = cudaFuncSetAttribute(
      kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(kSharedBytes));
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
  const unsigned num_blocks = num_tiles + launch.num_parts;
  if (num_blocks == 0) return cudaSuccess;
  return sm90::launch_early(finish_kernel<kD, Element>, num_blocks, kFinishThreads, 0, stream,
                            launch.rows);
}

}  // namespace backlite::backward_sm90
