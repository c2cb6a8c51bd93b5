// The CUDA backend behind the public functions: cuda.cpp where nvcc was found, else no_cuda.cpp.
// Arguments have been checked as far as all backends agree; each function adds what Hopper's
// kernels ask for. It throws NotSupported, or InvalidArgument for a tensor that the copy engine
// cannot take.
#pragma once

#include "backlite/backlite.h"

namespace backlite::cuda {

bool is_built();

// Throws NotSupported unless this build, the current GPU, the dtype and the head_dim will do.
void check_problem(const Problem& problem);

size_t forward_workspace_bytes(const Problem& problem, bool record_tile_stats);
void forward(const Problem& problem, const ForwardArgs& args, const Execution& execution);

void check_select(const Problem& problem);
void select(const Problem& problem, const SelectArgs& args, const Execution& execution);

size_t schedule_bytes(const Problem& problem);
void schedule(const Problem& problem, const ScheduleArgs& args, const Execution& execution);

size_t backward_workspace_bytes(const Problem& problem);
void backward(const Problem& problem, const BackwardArgs& args, const Execution& execution);

}  // namespace backlite::cuda
