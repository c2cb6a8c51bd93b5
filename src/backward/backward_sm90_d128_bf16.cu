// Head dim 128, bf16.
#include "backward/instance_sm90.cuh"

namespace backlite::backward_sm90 {

cudaError_t launch_d128_bf16(const Launch& launch, cudaStream_t stream) {
  return launch_instance<D128, sm90::BFloat16>(launch, stream);
}

}  // namespace backlite::backward_sm90
