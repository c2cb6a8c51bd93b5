// The compiled forms of the Hopper backward's kernels. Each is an explicit launcher in a file of
// its own, so that they compile side by side.
#pragma once

#include <cuda_runtime_api.h>

#include "backward/params_sm90.h"

namespace backlite::backward_sm90 {

// What one call launches: the first pass over `rows`, the columns, the last pass over `rows`.
struct Launch {
  BackwardParams columns;
  RowsParams rows;
  int num_blocks;  // of the columns' kernel; 0 if there can be no live tile
  int num_parts;   // 64-row parts of split columns, at most
  bool is_dense;
};

using Launcher = cudaError_t(const Launch& launch, cudaStream_t stream);

Launcher launch_d128_bf16, launch_d128_fp16, launch_d64_bf16, launch_d64_fp16;

}  // namespace backlite::backward_sm90
