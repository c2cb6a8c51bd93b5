#include "api/cuda.h"

#include <cuda_runtime_api.h>

#include <string>

#include "backward/launch_sm90.h"
#include "common/cuda_device.h"
#include "forward/launch_sm90.h"
#include "schedule/launch_sm90.h"
#include "select/launch_sm90.h"

namespace backlite::cuda {
namespace {

void refuse_unless_empty(const std::string& why_not) {
  if (!why_not.empty()) throw NotSupported("device = cuda: " + why_not);
}

void refuse_tensor_unless_empty(const std::string& why_not) {
  if (!why_not.empty()) throw InvalidArgument(why_not + "; a contiguous copy is accepted");
}

void check_gpu() {
  int device = 0;
  const cudaError_t error = cudaGetDevice(&device);
  if (error != cudaSuccess) {
    throw NotSupported(std::string("device = cuda: no GPU can be used (") +
                       cudaGetErrorString(error) + "); accepted is cpu");
  }
  const GpuProperties& gpu = gpu_properties(device);
  if (gpu.major != 9) {
    throw NotSupported("device = cuda: compute capability " + std::to_string(gpu.major) + "." +
                       std::to_string(gpu.minor) + "; accepted are 9.0 (H100, H200), and cpu");
  }
}

}  // namespace

bool is_built() { return true; }

void check_problem(const Problem& problem) {
  check_gpu();
  if (problem.dtype == DType::kFloat32 || problem.dtype == DType::kFloat64) {
    throw NotSupported(
        std::string("dtype = ") + (problem.dtype == DType::kFloat32 ? "float32" : "float64") +
        ": accepted on cuda are bfloat16 and float16 (on cpu also float32 and float64)");
  }
  if (problem.head_dim != 64 && problem.head_dim != 128) {
    throw NotSupported("head_dim = " + std::to_string(problem.head_dim) +
                       ": accepted on cuda are 64 and 128 (on cpu multiples of 8 up to 256)");
  }
}

size_t forward_workspace_bytes(const Problem& problem, bool record_tile_stats) {
  refuse_unless_empty(forward_sm90::why_not_supported(problem));
  return forward_sm90::workspace_bytes(problem, record_tile_stats);
}

void forward(const Problem& problem, const ForwardArgs& args, const Execution& execution) {
  refuse_tensor_unless_empty(forward_sm90::why_not_supported(problem, args));
  forward_sm90::forward(problem, args, execution);
}

void check_select(const Problem& problem) {
  refuse_unless_empty(select_sm90::why_not_supported(problem));
}

void select(const Problem& problem, const SelectArgs& args, const Execution& execution) {
  select_sm90::select(problem, args, execution);
}

size_t schedule_bytes(const Problem& problem) {
  refuse_unless_empty(backward_sm90::why_not_supported(problem));
  return schedule_sm90::schedule_bytes(problem);
}

void schedule(const Problem& problem, const ScheduleArgs& args, const Execution& execution) {
  refuse_unless_empty(backward_sm90::why_not_supported(problem));
  schedule_sm90::schedule(problem, args, execution);
}

size_t backward_workspace_bytes(const Problem& problem) {
  refuse_unless_empty(backward_sm90::why_not_supported(problem));
  return backward_sm90::workspace_bytes(problem);
}

void backward(const Problem& problem, const BackwardArgs& args, const Execution& execution) {
  refuse_tensor_unless_empty(backward_sm90::why_not_supported(problem, args));
  backward_sm90::backward(problem, args, execution);
}

}  // namespace backlite::cuda
