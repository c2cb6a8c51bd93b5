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

// Of the current device.
inline int device_attribute(cudaDeviceAttr which) {
  int device = 0;
  int value = 0;
  check_cuda(cudaGetDevice(&device), "cudaGetDevice");
  check_cuda(cudaDeviceGetAttribute(&value, which, device), "cudaDeviceGetAttribute");
  return value;
}

}  // namespace backlite
