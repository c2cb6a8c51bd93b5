#include "backward/launch_sm90.h"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cmath>

#include "backward/config_sm90.h"
#include "backward/instances_sm90.h"
#include "common/copy_engine.h"
#include "common/cuda_device.h"
#include "common/mask.h"
#include "common/workspace.h"
#include "schedule/layout_sm90.h"

namespace backlite::backward_sm90 {
namespace {

using schedule_sm90::ScheduleLayout;

Launcher* launcher_of(const Problem& problem) {
  const bool bf16 = problem.dtype == DType::kBFloat16;
  if (problem.head_dim == 128) return bf16 ? launch_d128_bf16 : launch_d128_fp16;
  return bf16 ? launch_d64_bf16 : launch_d64_fp16;
}

int64_t num_tiles(const Problem& problem) {
  return problem.batch * problem.num_query_heads * num_query_tiles(problem.query_length);
}

int64_t num_heads(const Problem& problem) { return problem.batch * problem.num_key_heads; }

// Tiles that a block of the last pass takes. Eight keep memory busy with the few blocks that have a
// multiprocessor beside the columns; but where there are fewer runs of eight than blocks at once,
// the pass comes after the columns and many short blocks are faster: 0.193 ms beside 0.198 with
// real masks at batch 1.
int tiles_in_run(const Problem& problem, int num_multiprocessors) {
  constexpr int kBlocksAtOnce = 2;  // of a multiprocessor: at D = 128 they fill its shared memory
  return num_tiles(problem) >= int64_t{kTilesInRun} * kBlocksAtOnce * num_multiprocessors
             ? kTilesInRun
             : 1;
}

struct Workspace {
  int* next_item;
  uint32_t* started;
  std::byte* row_terms;  // see BackwardParams for the shapes
  float* grad_query;
  float* grad_parts;
  Heads heads;

  Workspace(Carver& carver, const Problem& problem, const ScheduleLayout& schedule) {
    next_item = carver.take<int>(1);
    started = carver.take<uint32_t>(num_tiles(problem));
    row_terms =
        carver.take<std::byte>(num_tiles(problem) * kQueries * kRowTerms * kCopiedElementBytes);
    grad_query = carver.take<float>(num_tiles(problem) * kQueries * problem.head_dim);
    grad_parts = carver.take<float>(schedule.max_slots * 2 * kKeys * problem.head_dim);
    heads.left = carver.take<uint64_t>(num_heads(problem));
    heads.num_done = carver.take<uint32_t>(1);
    heads.done = carver.take<uint32_t>(num_heads(problem));
  }
};

template <typename AnyTensor>
Strides strides_of(const AnyTensor& tensor) {
  return {.batch = tensor.batch_stride, .length = tensor.length_stride, .head = tensor.head_stride};
}

// The scale inside the exponent, kept away from 0 because LSE is divided by it. What a scale below
// the limit would change is less than the type can hold.
double safe_scale(const Problem& problem) {
  const double tiny = problem.dtype == DType::kBFloat16 ? 1e-12 : 1e-7;
  return std::copysign(std::max(std::abs(problem.scale), tiny), problem.scale);
}

RowsParams rows_params(const Problem& problem, const BackwardArgs& args, const Workspace& workspace,
                       const ScheduleLayout& schedule, int num_multiprocessors) {
  return {.mask = Mask::of(problem),
          .tile_bits = reinterpret_cast<const uint32_t*>(args.tile_bits),
          .out = args.out.data,
          .grad_out = args.grad_out.data,
          .grad_query = args.grad_query.data,
          .grad_key = args.grad_key.data,
          .grad_value = args.grad_value.data,
          .out_strides = strides_of(args.out),
          .grad_out_strides = strides_of(args.grad_out),
          .grad_query_strides = strides_of(args.grad_query),
          .grad_key_strides = strides_of(args.grad_key),
          .grad_value_strides = strides_of(args.grad_value),
          .lse = static_cast<const float*>(args.lse),
          .grad_lse = static_cast<const float*>(args.grad_lse),
          .schedule = schedule.header,
          .live = schedule.live,
          .slot_columns = schedule.slot_columns,
          .next_item = workspace.next_item,
          .row_terms = workspace.row_terms,
          .started = workspace.started,
          .grad_query_sums = workspace.grad_query,
          .grad_parts = workspace.grad_parts,
          .heads = workspace.heads,
          .num_heads = static_cast<int>(num_heads(problem)),
          .tiles_of_head = static_cast<int>(problem.num_query_heads / problem.num_key_heads *
                                            num_query_tiles(problem.query_length)),
          .tiles_in_run = tiles_in_run(problem, num_multiprocessors),
          .query_length = static_cast<int>(problem.query_length),
          .key_length = static_cast<int>(problem.key_length),
          .num_query_heads = static_cast<int>(problem.num_query_heads),
          .num_key_heads = static_cast<int>(problem.num_key_heads),
          .num_query_tiles = static_cast<int>(num_query_tiles(problem.query_length)),
          .num_key_tiles = static_cast<int>(num_key_tiles(problem.key_length)),
          .num_columns = static_cast<int>(schedule.num_columns),
          .num_tiles = num_tiles(problem),
          .inverse_scale = static_cast<float>(1.0 / safe_scale(problem)),
          .grad_scale = static_cast<float>(problem.scale)};
}

BackwardParams columns_params(const Problem& problem, const BackwardArgs& args,
                              const Workspace& workspace, const ScheduleLayout& schedule) {
  BackwardParams params{};
  const auto query_side = [&](const auto& tensor) {
    return tensor_map(layout_of(tensor, problem, problem.num_query_heads, problem.query_length),
                      problem, kQueries);
  };
  const auto key_side = [&](const auto& tensor) {
    return tensor_map(layout_of(tensor, problem, problem.num_key_heads, problem.key_length),
                      problem, kKeys);
  };
  params.query = query_side(args.query);
  params.grad_out = query_side(args.grad_out);
  params.key = key_side(args.key);
  params.value = key_side(args.value);
  params.grad_query_rows = query_side(args.grad_query);
  params.mask = Mask::of(problem);
  params.schedule = schedule.header;
  params.items = schedule.items;
  params.next_item = workspace.next_item;
  params.grad_key = args.grad_key.data;
  params.grad_value = args.grad_value.data;
  params.grad_key_strides = strides_of(args.grad_key);
  params.grad_value_strides = strides_of(args.grad_value);
  params.tile_bits = reinterpret_cast<const uint32_t*>(args.tile_bits);
  params.row_terms = workspace.row_terms;
  params.started = workspace.started;
  params.grad_query = workspace.grad_query;
  params.grad_parts = workspace.grad_parts;
  params.heads = workspace.heads;
  params.num_heads = static_cast<int>(num_heads(problem));
  params.num_query_heads = static_cast<int>(problem.num_query_heads);
  params.heads_per_key_head = static_cast<int>(problem.num_query_heads / problem.num_key_heads);
  params.num_query_tiles = static_cast<int>(num_query_tiles(problem.query_length));
  params.num_key_tiles = static_cast<int>(num_key_tiles(problem.key_length));
  params.num_tiles = num_tiles(problem);
  constexpr double kLog2E = 1.4426950408889634;
  params.scale_log2 = static_cast<float>(safe_scale(problem) * kLog2E);
  params.grad_scale = static_cast<float>(problem.scale);
  constexpr int64_t kUnlimited = int64_t{1} << 30;  // lengths end at 2^29
  params.mask_left = static_cast<int>(std::min(params.mask.left, kUnlimited));
  params.mask_right = static_cast<int>(std::min(params.mask.right, kUnlimited));
  return params;
}

}  // namespace

std::string why_not_supported(const Problem& problem) {
  constexpr int64_t kMaxLength = int64_t{1} << 29;
  if (problem.query_length > kMaxLength || problem.key_length > kMaxLength) {
    return "the Hopper backward takes lengths up to 2^29";
  }
  constexpr int64_t kMaxCount = int64_t{1} << 30;
  if (num_tiles(problem) > kMaxCount ||
      problem.batch * problem.num_key_heads * num_key_tiles(problem.key_length) > kMaxCount) {
    return "batch * heads * length is too large for the Hopper backward";
  }
  return {};
}

std::string why_not_supported(const Problem& problem, const BackwardArgs& args) {
  Mappable mappable(problem);
  mappable.require_query_side("query", args.query);
  mappable.require_key_side("key", args.key);
  mappable.require_key_side("value", args.value);
  mappable.require_query_side("out", args.out);
  mappable.require_query_side("grad_out", args.grad_out);
  mappable.require_query_side("grad_query", args.grad_query);
  mappable.require_key_side("grad_key", args.grad_key);
  mappable.require_key_side("grad_value", args.grad_value);
  return mappable.why_not();
}

size_t workspace_bytes(const Problem& problem) {
  const ScheduleLayout schedule(problem, current_gpu().num_multiprocessors, nullptr);
  Carver counter(nullptr);
  Workspace(counter, problem, schedule);
  return counter.bytes();
}

void backward(const Problem& problem, const BackwardArgs& args, const Execution& execution) {
  const int num_multiprocessors = current_gpu().num_multiprocessors;
  const ScheduleLayout schedule(problem, num_multiprocessors, const_cast<void*>(args.schedule));
  if (schedule.num_columns == 0 && num_tiles(problem) == 0) return;
  Carver carver(execution.workspace);
  const Workspace workspace(carver, problem, schedule);

  Launch launch{};
  launch.rows = rows_params(problem, args, workspace, schedule, num_multiprocessors);
  launch.is_dense = args.tile_bits == nullptr;
  if (schedule.num_columns > 0 && problem.query_length > 0) {
    launch.columns = columns_params(problem, args, workspace, schedule);
    launch.num_blocks = num_multiprocessors;
    launch.num_parts = static_cast<int>(schedule.max_slots) * 2 * kConsumers;
  }
  check_cuda(launcher_of(problem)(launch, static_cast<cudaStream_t>(execution.stream)),
             "the Hopper backward's launch");
}

}  // namespace backlite::backward_sm90
