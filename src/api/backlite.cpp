// The public functions: check, then hand over to the backend of the problem's device.
#include "backlite/backlite.h"

#include "api/checks.h"
#include "api/cuda.h"
#include "api/isa.h"
#include "common/fixed_point.h"
#include "schedule/cpu.h"
#include "select/cpu.h"

namespace backlite {
namespace {

bool is_on_cuda(const Problem& problem) { return problem.device == Device::kCuda; }

}  // namespace

size_t forward_workspace_bytes(const Problem& problem, bool record_tile_stats, int num_threads) {
  check_problem(problem);
  check_num_threads(num_threads);
  if (is_on_cuda(problem)) return cuda::forward_workspace_bytes(problem, record_tile_stats);
  return cpu_backend().forward_workspace_bytes(problem, record_tile_stats, num_threads);
}

void forward(const Problem& problem, const ForwardArgs& args, const Execution& execution) {
  check_execution(execution, forward_workspace_bytes(problem, args.tile_stats != nullptr,
                                                     execution.num_threads));
  check(problem, args);
  if (is_on_cuda(problem)) return cuda::forward(problem, args, execution);
  cpu_backend().forward(problem, args, execution);
}

int64_t negl_prob_to_fixed(double negl_prob) {
  check_negl_prob(negl_prob);
  return prob_to_fixed(negl_prob);
}

size_t select_workspace_bytes(const Problem& problem, int num_threads) {
  check_problem(problem);
  check_num_threads(num_threads);
  if (is_on_cuda(problem)) {
    cuda::check_select(problem);
    return 0;
  }
  return cpu::select_workspace_bytes(problem, num_threads);
}

void select(const Problem& problem, const SelectArgs& args, const Execution& execution) {
  check_execution(execution, select_workspace_bytes(problem, execution.num_threads));
  check(problem, args);
  if (is_on_cuda(problem)) return cuda::select(problem, args, execution);
  cpu::select(problem, args, execution);
}

size_t schedule_bytes(const Problem& problem) {
  check_problem(problem);
  return is_on_cuda(problem) ? cuda::schedule_bytes(problem) : cpu::schedule_bytes(problem);
}

void schedule(const Problem& problem, const ScheduleArgs& args, const Execution& execution) {
  check_num_threads(execution.num_threads);
  check(args, schedule_bytes(problem));
  if (is_on_cuda(problem)) return cuda::schedule(problem, args, execution);
  cpu::schedule(problem, args);
}

size_t backward_workspace_bytes(const Problem& problem, int num_threads) {
  check_problem(problem);
  check_num_threads(num_threads);
  if (is_on_cuda(problem)) return cuda::backward_workspace_bytes(problem);
  return cpu_backend().backward_workspace_bytes(problem, num_threads);
}

void backward(const Problem& problem, const BackwardArgs& args, const Execution& execution) {
  check_execution(execution, backward_workspace_bytes(problem, execution.num_threads));
  check(problem, args);
  if (is_on_cuda(problem)) return cuda::backward(problem, args, execution);
  cpu_backend().backward(problem, args, execution);
}

const char* version() { return BACKLITE_VERSION; }

const char* cpu_isa() { return cpu_backend().isa; }

bool has_cuda() { return cuda::is_built(); }

}  // namespace backlite
