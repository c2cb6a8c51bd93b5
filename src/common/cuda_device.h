// What host code of the CUDA stages asks the runtime, with errors of the library's family.
#pragma once

#include <cuda_runtime_api.h>

#include <string>

#include "backlite/backlite.h"

namespace backlite {

inline void check_cuda(cudaError_t error, const char* what) {
  if (error != cudaSuccess) {
    throw Error(std::string(what) + ": " + cudaGetErrorString(error));
  }
}

// What the stages want to know of a GPU.
struct GpuProperties {
  int device = -1;
  int major = 0;  // compute capability
  int minor = 0;
  int num_multiprocessors = 0;
  int l2_bytes = 0;

  static GpuProperties of(int device) {
    const auto attribute = [&](cudaDeviceAttr which) {
      int value = 0;
      check_cuda(cudaDeviceGetAttribute(&value, which, device), "cudaDeviceGetAttribute");
      return value;
    };
    return {.device = device,
            .major = attribute(cudaDevAttrComputeCapabilityMajor),
            .minor = attribute(cudaDevAttrComputeCapabilityMinor),
            .num_multiprocessors = attribute(cudaDevAttrMultiProcessorCount),
            .l2_bytes = attribute(cudaDevAttrL2CacheSize)};
  }
};

// A call asks several times, and a thread that stays on one GPU asks the runtime once.
inline const GpuProperties& gpu_properties(int device) {
  thread_local GpuProperties known;
  if (known.device != device) known = GpuProperties::of(device);
  return known;
}

inline const GpuProperties& current_gpu() {
  int device = 0;
  check_cuda(cudaGetDevice(&device), "cudaGetDevice");
  return gpu_properties(device);
}

}  // namespace backlite
