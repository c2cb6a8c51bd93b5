// One compiled form of the Hopper forward kernel, behind a plain function.
#pragma once

#include <cuda_runtime_api.h>

#include <type_traits>

#include "forward/instances_sm90.h"
#include "forward/kernel_sm90.cuh"

namespace backlite::forward_sm90 {

template <typename Config, typename Element, bool kRecord>
cudaError_t launch_instance(const ForwardParams& params, int num_blocks, cudaStream_t stream) {
  constexpr size_t kSharedBytes = sizeof(SharedMemory<Config, Element>);
  const auto kernel = forward_kernel<Config, Element, kRecord>;
  const cudaError_t error = cudaFuncSetAttribute(
      kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(kSharedBytes));
  if (error != cudaSuccess) return error;
  kernel<<<num_blocks, Config::kConfig.num_threads(), kSharedBytes, stream>>>(params);
  return cudaGetLastError();
}

// Head dim 64: in blocks of 192 or 128 rows, as params.block_rows says.
template <typename Element, bool kRecord>
cudaError_t launch_d64(const ForwardParams& params, int num_blocks, cudaStream_t stream) {
  if (params.block_rows == kD64Pair.block_rows()) {
    using Pair = std::conditional_t<kRecord, D64PairStatistics, D64Pair>;
    return launch_instance<Pair, Element, kRecord>(params, num_blocks, stream);
  }
  using Three = std::conditional_t<kRecord, D64Statistics, D64>;
  return launch_instance<Three, Element, kRecord>(params, num_blocks, stream);
}

}  // namespace backlite::forward_sm90
