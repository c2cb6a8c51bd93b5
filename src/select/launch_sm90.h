// Stage 2 on a Hopper GPU. Arguments have been checked by the caller.
#pragma once

#include <string>

#include "backlite/backlite.h"

namespace backlite::select_sm90 {

// Why the problem is too large for this backend, in words; empty if it is not.
std::string why_not_supported(const Problem& problem);

// Launches one kernel on the stream of `execution`; needs no workspace.
void select(const Problem& problem, const SelectArgs& args, const Execution& execution);

}  // namespace backlite::select_sm90
