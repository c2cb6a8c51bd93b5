#include "forward/launch_sm90.h"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "common/copy_engine.h"
#include "common/cuda_device.h"
#include "common/mask.h"
#include "common/workspace.h"
#include "forward/config_sm90.h"
#include "forward/instances_sm90.h"
#include "forward/item_sm90.h"

namespace backlite::forward_sm90 {
namespace {

int64_t num_items(const Problem& problem, const ForwardConfig& config) {
  return problem.batch * problem.num_query_heads *
         ceil_div(problem.query_length, config.block_rows());
}

// Items are about equally long and are worked off in rounds, so the time goes with rounds * rows. A
// row costs a fifth more in a shorter block (0.699 ms for 63 rounds, 0.650 for 47 longer ones).
bool shorter_blocks_pay(const Problem& problem, int num_multiprocessors) {
  const auto rows_in_turn = [&](const ForwardConfig& config) {
    return static_cast<double>(ceil_div(num_items(problem, config), num_multiprocessors)) *
           config.block_rows();
  };
  constexpr double kShorterCost = 1.25;
  return rows_in_turn(kD64Pair) * kShorterCost < rows_in_turn(kD64);
}

ForwardConfig config_of(const Problem& problem, int num_multiprocessors) {
  const bool shorter = problem.head_dim == 64 && shorter_blocks_pay(problem, num_multiprocessors);
  return problem.head_dim == 128 ? kD128 : shorter ? kD64Pair : kD64;
}

Launcher* launcher_of(const Problem& problem, bool record) {
  const bool bf16 = problem.dtype == DType::kBFloat16;
  if (problem.head_dim == 128) {
    if (bf16) return record ? launch_d128_bf16_stats : launch_d128_bf16;
    return record ? launch_d128_fp16_stats : launch_d128_fp16;
  }
  if (bf16) return record ? launch_d64_bf16_stats : launch_d64_bf16;
  return record ? launch_d64_fp16_stats : launch_d64_fp16;
}

struct Workspace {
  int* next_item;        // none where every block takes at most one item
  uint32_t* row_masses;  // [multiprocessors][2][consumers][Tn][32], see tile_stats_sm90.cuh

  Workspace(Carver& carver, const Problem& problem, const ForwardConfig& config, bool record,
            int num_multiprocessors) {
    next_item = carver.take<int>(num_items(problem, config) > num_multiprocessors ? 1 : 0);
    const int64_t tiles = int64_t{num_multiprocessors} * kQuerySlots * config.num_consumers *
                          num_key_tiles(problem.key_length);
    row_masses = carver.take<uint32_t>(record ? tiles * kMassWords : 0);
  }
};

// As many heads as keep what is in use of their K and V in L2 while their blocks of rows are worked
// on. The cache is two halves, and what both read is in both.
int heads_in_group(const Problem& problem, const ForwardConfig& config, int l2_bytes) {
  const int64_t keys = keys_in_use(Mask::of(problem), config.block_rows());
  const int64_t key_head_bytes =
      std::max<int64_t>(2 * keys * problem.head_dim * kCopiedElementBytes, 1);
  const int64_t heads_per_key_head = problem.num_query_heads / problem.num_key_heads;
  const int64_t key_heads = std::max<int64_t>(l2_bytes / 2 / key_head_bytes, 1);
  return static_cast<int>(
      std::min(key_heads * heads_per_key_head, problem.batch * problem.num_query_heads));
}

bool is_empty(const Problem& problem) { return problem.batch == 0 || problem.query_length == 0; }

}  // namespace

std::string why_not_supported(const Problem& problem) {
  constexpr int64_t kMaxLength = int64_t{1} << 30;
  if (problem.query_length > kMaxLength || problem.key_length > kMaxLength) {
    return "the Hopper forward takes lengths up to 2^30";
  }
  if (num_items(problem, problem.head_dim == 128 ? kD128 : kD64Pair) >
      std::numeric_limits<int>::max() / 2) {
    return "batch * num_query_heads * query_length is too large for the Hopper forward";
  }
  return {};
}

std::string why_not_supported(const Problem& problem, const ForwardArgs& args) {
  Mappable mappable(problem);
  mappable.require_query_side("query", args.query);
  if (problem.query_length > 0) {
    mappable.require_key_side("key", args.key);
    mappable.require_key_side("value", args.value);
  }
  mappable.require_query_side("out", args.out);
  return mappable.why_not();
}

size_t workspace_bytes(const Problem& problem, bool record_tile_stats) {
  Carver counter(nullptr);
  const int num_multiprocessors = current_gpu().num_multiprocessors;
  Workspace(counter, problem, config_of(problem, num_multiprocessors), record_tile_stats,
            num_multiprocessors);
  return counter.bytes();
}

void forward(const Problem& problem, const ForwardArgs& args, const Execution& execution) {
  if (is_empty(problem)) return;
  const bool record = args.tile_stats != nullptr;
  const GpuProperties& gpu = current_gpu();
  const ForwardConfig config = config_of(problem, gpu.num_multiprocessors);
  const auto stream = static_cast<cudaStream_t>(execution.stream);

  Carver carver(execution.workspace);
  const Workspace workspace(carver, problem, config, record, gpu.num_multiprocessors);

  ForwardParams params{};
  const auto query_layout =
      layout_of(args.query, problem, problem.num_query_heads, problem.query_length);
  const auto out_layout =
      layout_of(args.out, problem, problem.num_query_heads, problem.query_length);
  params.query = tensor_map(query_layout, problem, sm90::kMmaRows);
  params.out = tensor_map(out_layout, problem, sm90::kMmaRows);
  if (problem.key_length > 0) {
    const auto key_layout = layout_of(args.key, problem, problem.num_key_heads, problem.key_length);
    const auto value_layout =
        layout_of(args.value, problem, problem.num_key_heads, problem.key_length);
    params.key = tensor_map(key_layout, problem, config.block_keys);
    params.value = tensor_map(value_layout, problem, config.block_keys);
  } else {  // never read, but prefetched
    params.key = params.query;
    params.value = params.query;
  }

  params.mask = Mask::of(problem);
  params.order.num_items = static_cast<int>(num_items(problem, config));
  params.order.num_blocks = static_cast<int>(ceil_div(problem.query_length, config.block_rows()));
  params.order.short_blocks = num_short_blocks(params.mask, config.block_rows());
  params.order.num_heads = static_cast<int>(problem.num_query_heads);
  params.order.num_batch_heads = static_cast<int>(problem.batch * problem.num_query_heads);
  params.order.group_heads = heads_in_group(problem, config, gpu.l2_bytes);
  params.order.last_rows_first = params.mask.right < problem.query_length;
  params.next_item = workspace.next_item;
  params.heads_per_key_head = static_cast<int>(problem.num_query_heads / problem.num_key_heads);
  // A scale of 0 makes all scores equal; so does a tiny one, without the product 0 * infinity.
  constexpr double kLog2E = 1.4426950408889634;
  constexpr double kTiny = 1e-30;
  params.scale_log2 = static_cast<float>(std::max(std::abs(problem.scale) * kLog2E, kTiny));
  params.score_sign = problem.scale < 0.0 ? -1.0f : 1.0f;
  params.lse = static_cast<float*>(args.lse);
  params.tile_stats = args.tile_stats;
  params.row_masses = workspace.row_masses;
  params.block_rows = config.block_rows();
  params.num_query_tiles = static_cast<int>(num_query_tiles(problem.query_length));
  params.num_key_tiles = static_cast<int>(num_key_tiles(problem.key_length));

  const int num_blocks = std::min(gpu.num_multiprocessors, params.order.num_items);
  check_cuda(launcher_of(problem, record)(params, num_blocks, stream),
             "the Hopper forward's launch");
}

}  // namespace backlite::forward_sm90
