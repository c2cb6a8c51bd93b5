// Stage 3 on the CPU. Arguments have been checked by the caller.
#pragma once

#include <cstddef>

#include "backlite/backlite.h"

namespace backlite::cpu {

size_t schedule_bytes(const Problem& problem);
void schedule(const Problem& problem, const ScheduleArgs& args);

}  // namespace backlite::cpu
