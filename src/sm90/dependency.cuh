// Launches that begin while the kernel before them on the stream is still at work, and how much
// shared memory they may take.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>

namespace backlite::sm90 {

// Returns once the kernels before this one have finished and what they wrote is visible. Nothing of
// theirs may be read, nor anything that they read be written, before it.
__device__ __forceinline__ void wait_for_earlier_kernels() {
  asm volatile("griddepcontrol.wait;" ::: "memory");
}

// The next kernel on the stream may start to launch.
__device__ __forceinline__ void let_next_kernel_launch() {
  asm volatile("griddepcontrol.launch_dependents;");
}

// For a kernel that takes more than 48 KiB. The limit is the kernel's, not the launch's, and holds
// for all threads.
template <typename Params>
cudaError_t allow_shared_bytes(void (*kernel)(Params), size_t bytes) {
  return cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                              static_cast<int>(bytes));
}

// Launches a kernel that waits by itself, by wait_for_earlier_kernels: its blocks are sent to the
// multiprocessors beforehand, about a microsecond sooner. Some block of it must wait, or the kernel
// behind it would not know that those before it have finished.
template <typename Params>
cudaError_t launch_early(void (*kernel)(Params), dim3 grid, int num_threads, size_t shared_bytes,
                         cudaStream_t stream, const Params& params) {
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = dim3(static_cast<unsigned>(num_threads));
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = 1;
  return cudaLaunchKernelEx(&config, kernel, params);
}

}  // namespace backlite::sm90
