// Head dim 128, fp16, with tile statistics.
#include "forward/instance_sm90.cuh"

namespace backlite::forward_sm90 {

cudaError_t launch_d128_fp16_stats(const ForwardParams& params, int num_blocks,
                                   cudaStream_t stream) {
  return launch_instance<D128, sm90::Float16, true>(params, num_blocks, stream);
}

}  // namespace backlite::forward_sm90
