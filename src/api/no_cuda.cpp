// Where nvcc was not found. check_problem() throws before anything else is called.
#include "api/cuda.h"

namespace backlite::cuda {

bool is_built() { return false; }

void check_problem(const Problem&) {
  throw NotSupported(
      "device = cuda: this build has no CUDA backend (there was no nvcc when it was built); "
      "accepted is cpu");
}

size_t forward_workspace_bytes(const Problem&, bool) { return 0; }
void forward(const Problem&, const ForwardArgs&, const Execution&) {}
void check_select(const Problem&) {}
void select(const Problem&, const SelectArgs&, const Execution&) {}
size_t schedule_bytes(const Problem&) { return 0; }
void schedule(const Problem&, const ScheduleArgs&, const Execution&) {}
size_t backward_workspace_bytes(const Problem&) { return 0; }
void backward(const Problem&, const BackwardArgs&, const Execution&) {}

}  // namespace backlite::cuda
