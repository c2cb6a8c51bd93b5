// Stage 4 on the CPU. Arguments have been checked by the caller.
#pragma once

#include <cstddef>

#include "backlite/backlite.h"

namespace backlite::cpu {

size_t backward_workspace_bytes(const Problem& problem, int num_threads);
void backward(const Problem& problem, const BackwardArgs& args, const Execution& execution);

}  // namespace backlite::cpu
