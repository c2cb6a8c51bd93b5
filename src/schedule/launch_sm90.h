// Stage 3 on a Hopper GPU. Arguments have been checked by the caller.
#pragma once

#include <cstddef>

#include "backlite/backlite.h"

namespace backlite::schedule_sm90 {

// With C = B * Hk * Tn columns and M multiprocessors: 16 + 36 C + 64 M + 4 min(C, 2 M) bytes, and
// what rounding four arrays up to 64 bytes adds.
size_t schedule_bytes(const Problem& problem);

// Launches two kernels on the stream of `execution`; without columns it only clears the header.
void schedule(const Problem& problem, const ScheduleArgs& args, const Execution& execution);

}  // namespace backlite::schedule_sm90
