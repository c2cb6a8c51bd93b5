// Head dim 64, fp16.
#include "backward/instance_sm90.cuh"

namespace backlite::backward_sm90 {

cudaError_t launch_d64_fp16(const Launch& launch, cudaStream_t stream) {
  return launch_instance<D64, sm90::Float16>(launch, stream);
}

}  // namespace backlite::backward_sm90
