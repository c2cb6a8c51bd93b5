// Head dim 128, bf16, with tile statistics.
#include "forward/instance_sm90.cuh"

namespace backlite::forward_sm90 {

cudaError_t launch_d128_bf16_stats(const ForwardParams& params, int num_blocks,
                                   cudaStream_t stream) {
  return launch_instance<D128, sm90::BFloat16, true>(params, num_blocks, stream);
}

}  // namespace backlite::forward_sm90
