// The compiled forms of the Hopper forward kernel. Each is an explicit launcher in a file of its
// own, so that they compile side by side.
#pragma once

#include <cuda_runtime_api.h>

#include "forward/params_sm90.h"

namespace backlite::forward_sm90 {

using Launcher = cudaError_t(const ForwardParams& params, int num_blocks, cudaStream_t stream);

Launcher launch_d128_bf16, launch_d128_bf16_stats, launch_d128_fp16, launch_d128_fp16_stats;
Launcher launch_d64_bf16, launch_d64_bf16_stats, launch_d64_fp16, launch_d64_fp16_stats;

}  // namespace backlite::forward_sm90
