// Stage 2 on the CPU. Arguments have been checked by the caller.
#pragma once

#include <cstddef>

#include "backlite/backlite.h"

namespace backlite::cpu {

size_t select_workspace_bytes(const Problem& problem, int num_threads);
void select(const Problem& problem, const SelectArgs& args, const Execution& execution);

}  // namespace backlite::cpu
