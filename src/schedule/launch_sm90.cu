#include "schedule/launch_sm90.h"

#include <cuda_runtime_api.h>

#include <algorithm>

#include "common/cuda_device.h"
#include "schedule/count_sm90.cuh"
#include "schedule/layout_sm90.h"
#include "schedule/plan_sm90.cuh"
#include "sm90/dependency.cuh"

namespace backlite::schedule_sm90 {
namespace {

// Columns are worked off in groups of as many key heads as keep Q, dO and the sums of dQ in a
// quarter of L2: it is two halves, what both read is in both, and K, V, dK and dV pass through.
// With few columns a block one group: then balance is worth more than L2.
int64_t key_heads_in_group(const Problem& problem, int num_blocks) {
  constexpr int64_t kFewColumns = 8;
  constexpr int64_t kPartOfL2 = 4;
  constexpr int64_t kBytes = 2 + 2 + 4;
  const int64_t key_heads = problem.batch * problem.num_key_heads;
  if (key_heads * num_key_tiles(problem.key_length) <= kFewColumns * num_blocks) return key_heads;
  const int64_t group = problem.num_query_heads / problem.num_key_heads;
  const int64_t head_bytes =
      std::max<int64_t>(group * problem.query_length * problem.head_dim * kBytes, 1);
  return std::clamp<int64_t>(current_gpu().l2_bytes / kPartOfL2 / head_bytes, 1, key_heads);
}

}  // namespace

size_t schedule_bytes(const Problem& problem) {
  return ScheduleLayout(problem, current_gpu().num_multiprocessors, nullptr).bytes;
}

void schedule(const Problem& problem, const ScheduleArgs& args, const Execution& execution) {
  const int num_blocks = current_gpu().num_multiprocessors;
  const ScheduleLayout layout(problem, num_blocks, args.schedule);
  const auto stream = static_cast<cudaStream_t>(execution.stream);
  if (layout.num_columns == 0) {
    check_cuda(cudaMemsetAsync(layout.header, 0, sizeof(Header), stream), "cudaMemsetAsync");
    return;
  }
  const auto num_columns = static_cast<int>(layout.num_columns);
  const auto key_tiles = static_cast<int>(num_key_tiles(problem.key_length));

  const CountParams count{
      .mask = Mask::of(problem),
      .tile_bits = reinterpret_cast<const uint32_t*>(args.tile_bits),
      .live = layout.live,
      .num_columns = num_columns,
      .num_key_tiles = key_tiles,
      .num_words = static_cast<int>(num_bit_words(problem.query_length)),
      .heads_per_key_head = static_cast<int>(problem.num_query_heads / problem.num_key_heads)};
  constexpr int kColumnsInBlock = kCountThreads / 32;
  check_cuda(sm90::launch_early(count_kernel,
                                static_cast<unsigned>(ceil_div(num_columns, kColumnsInBlock)),
                                kCountThreads, 0, stream, count),
             "the schedule's count");

  const auto columns_in_group =
      static_cast<int>(key_heads_in_group(problem, num_blocks)) * key_tiles;
  const PlanParams plan{.layout = layout,
                        .num_columns = num_columns,
                        .columns_in_group = columns_in_group,
                        .num_key_tiles = key_tiles,
                        .num_key_heads = static_cast<int>(problem.num_key_heads),
                        .num_blocks = num_blocks};
  check_cuda(sm90::launch_early(plan_kernel,
                                static_cast<unsigned>(ceil_div(num_columns, columns_in_group)),
                                kPlanThreads, 0, stream, plan),
             "the schedule's plan");
}

}  // namespace backlite::schedule_sm90
