// Stage 2 on a Hopper GPU. Arguments have been checked by the caller.
#pragma once

#include <string>

#include "backlite/backlite.h"

namespace backlite::select_sm90 {

// Why this backend cannot serve the problem, in words; empty if it can.
std::string why_not_supported(const Problem& problem);

// Launches one kernel on the stream of `execution`; needs no workspace.
void select(const Problem& problem, const SelectArgs& args, const Execution& execution);

}  // namespace backlite::select_sm90
