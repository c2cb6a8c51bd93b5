// The public functions: check, then hand over to the backend of the problem's device.
#include "backlite/backlite.h"

#include "api/checks.h"
#include "api/isa.h"
#include "common/fixed_point.h"
#include "schedule/cpu.h"
#include "select/cpu.h"

namespace backlite {

size_t forward_workspace_bytes(const Problem& problem, bool record_tile_stats, int num_threads) {
  check_problem(problem);
  check_num_threads(num_threads);
  return cpu_backend().forward_workspace_bytes(problem, record_tile_stats, num_threads);
}

void forward(const Problem& problem, const ForwardArgs& args, const Execution& execution) {
  check_execution(execution, forward_workspace_bytes(problem, args.tile_stats != nullptr,
                                                     execution.num_threads));
  check(problem, args);
  cpu_backend().forward(problem, args, execution);
}

int64_t negl_prob_to_fixed(double negl_prob) {
  check_negl_prob(negl_prob);
  return prob_to_fixed(negl_prob);
}

size_t select_workspace_bytes(const Problem& problem, int num_threads) {
  check_problem(problem);
  check_num_threads(num_threads);
  return cpu::select_workspace_bytes(problem, num_threads);
}

void select(const Problem& problem, const SelectArgs& args, const Execution& execution) {
  check_execution(execution, select_workspace_bytes(problem, execution.num_threads));
  check(problem, args);
  cpu::select(problem, args, execution);
}

size_t schedule_bytes(const Problem& problem) {
  check_problem(problem);
  return cpu::schedule_bytes(problem);
}

void schedule(const Problem& problem, const ScheduleArgs& args, const Execution& execution) {
  check_problem(problem);
  check_num_threads(execution.num_threads);
  check(args);
  cpu::schedule(problem, args);
}

size_t backward_workspace_bytes(const Problem& problem, int num_threads) {
  check_problem(problem);
  check_num_threads(num_threads);
  return cpu_backend().backward_workspace_bytes(problem, num_threads);
}

void backward(const Problem& problem, const BackwardArgs& args, const Execution& execution) {
  check_execution(execution, backward_workspace_bytes(problem, execution.num_threads));
  check(problem, args);
  cpu_backend().backward(problem, args, execution);
}

const char* version() { return BACKLITE_VERSION; }

const char* cpu_isa() { return cpu_backend().isa; }

}  // namespace backlite
