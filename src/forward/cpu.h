// Stage 1 on the CPU. Arguments have been checked by the caller.
#pragma once

#include <cstddef>

#include "backlite/backlite.h"

namespace backlite::cpu {

size_t forward_workspace_bytes(const Problem& problem, bool record_tile_stats, int num_threads);
void forward(const Problem& problem, const ForwardArgs& args, const Execution& execution);

}  // namespace backlite::cpu
