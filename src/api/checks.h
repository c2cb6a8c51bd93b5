// Argument checks of the public functions. Each throws InvalidArgument or NotSupported with a
// message of the form "name = value: what is accepted".
#pragma once

#include "backlite/backlite.h"

namespace backlite {

void check_problem(const Problem& problem);
void check(const Problem& problem, const ForwardArgs& args);
void check(const Problem& problem, const SelectArgs& args);
void check(const ScheduleArgs& args, size_t needed_bytes);
void check(const Problem& problem, const BackwardArgs& args);
void check_negl_prob(double negl_prob);
void check_num_threads(int num_threads);
void check_execution(const Execution& execution, size_t needed_bytes);

}  // namespace backlite
