// One compiled form of the Hopper forward kernel, behind a plain function.
#pragma once

#include <cuda_runtime_api.h>

#include "forward/instances_sm90.h"
#include "forward/kernel_sm90.cuh"
#include "sm90/dependency.cuh"

namespace backlite::forward_sm90 {

// A kernel and not a memset, because blocks of the next kernel can be sent out beside it (B = 1,
// H = 8, 4k: 2 to 6% of the time). They wait for its end, which comes after all earlier kernels'.
static __global__ void clear_counter(int* next_item) {
  sm90::let_next_kernel_launch();
  sm90::wait_for_earlier_kernels();
  *next_item = 0;
}

template <typename Config, typename Element, bool kRecord>
cudaError_t launch_instance(const ForwardParams& params, int num_blocks, cudaStream_t stream) {
  constexpr size_t kSharedBytes = sizeof(SharedMemory<Config, Element>);
  const auto kernel = forward_kernel<Config, Element, kRecord>;
  cudaError_t error = sm90::allow_shared_bytes(kernel, kSharedBytes);
  if (error != cudaSuccess) return error;
  if (params.order.num_items > num_blocks) {  // else nobody counts
    error = sm90::launch_early(clear_counter, 1, 1, 0, stream, params.next_item);
    if (error != cudaSuccess) return error;
  }
  return sm90::launch_early(kernel, static_cast<unsigned>(num_blocks),
                            Config::kConfig.num_threads(), kSharedBytes, stream, params);
}

// Head dim 64: in blocks of 192 or 128 rows, as params.block_rows says.
template <typename Element, bool kRecord>
cudaError_t launch_d64(const ForwardParams& params, int num_blocks, cudaStream_t stream) {
  if (params.block_rows == kD64Pair.block_rows()) {
    return launch_instance<D64Pair, Element, kRecord>(params, num_blocks, stream);
  }
  return launch_instance<D64, Element, kRecord>(params, num_blocks, stream);
}

}  // namespace backlite::forward_sm90
