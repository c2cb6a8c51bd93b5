// Head dim 128, fp16.
#include "backward/instance_sm90.cuh"

namespace backlite::backward_sm90 {

cudaError_t launch_d128_fp16(const Launch& launch, cudaStream_t stream) {
  return launch_instance<D128, sm90::Float16>(launch, stream);
}

}  // namespace backlite::backward_sm90
