// Head dim 64, fp16, without statistics.
#include "forward/instance_sm90.cuh"

namespace backlite::forward_sm90 {

cudaError_t launch_d64_fp16(const ForwardParams& params, int num_blocks, cudaStream_t stream) {
  return launch_d64<sm90::Float16, false>(params, num_blocks, stream);
}

}  // namespace backlite::forward_sm90
