#include "api/checks.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <concepts>
#include <string>

#include "api/cuda.h"
#include "common/limits.h"
#include "common/mask.h"
#include "common/workspace.h"

namespace backlite {
namespace {

// Tile numbers travel as int32 and, in selection, as 23 bits beside a probability.
constexpr int64_t kMaxLength = (int64_t{1} << 23) * kQueryTile;
constexpr int64_t kMaxCount = int64_t{1} << 31;
// Sizes in bytes stay far from 2^63: workspaces hold up to 16 parts of 8 bytes for every element.
constexpr double kMaxElements = 0x1p50;

std::string text_of(const char* value) { return value; }
std::string text_of(std::integral auto value) { return std::to_string(value); }

// The shortest text that reads back as the same number: the value must show why it is refused.
std::string text_of(double value) {
  std::array<char, 32> text;
  const auto end = std::to_chars(text.data(), text.data() + text.size(), value).ptr;
  return {text.data(), end};
}

template <typename Value>
[[noreturn]] void refuse(const std::string& name, Value value, const std::string& accepted) {
  throw InvalidArgument(name + " = " + text_of(value) + ": " + accepted);
}

void check_range(const std::string& name, int64_t value, int64_t low, int64_t high) {
  if (value < low || value > high) {
    refuse(name, value, "accepted are " + std::to_string(low) + " to " + std::to_string(high));
  }
}

void check_pointer(const std::string& name, const void* pointer, bool needed) {
  if (needed && pointer == nullptr) refuse(name, "nullptr", "a pointer is needed");
}

void check_aligned(const std::string& name, const void* pointer, bool needed) {
  check_pointer(name, pointer, needed);
  const auto address = reinterpret_cast<uintptr_t>(pointer);
  if (address % kWorkspaceAlignment != 0) {
    refuse(
        name, address,
        "an address that is a multiple of " + std::to_string(kWorkspaceAlignment) + " is needed");
  }
}

template <typename AnyTensor>
void check_tensor(const std::string& name, const AnyTensor& tensor, int64_t batch, int64_t length,
                  int64_t head_dim) {
  check_pointer(name + ".data", tensor.data, batch > 0 && length > 0);
  // Rows of one head must not overlap: a stride below head_dim would read, or write, other rows.
  if (length > 1 && tensor.length_stride != 0 && std::abs(tensor.length_stride) < head_dim) {
    refuse(name + ".length_stride", tensor.length_stride,
           "at least head_dim = " + std::to_string(head_dim) + " elements (or 0: one row for all)");
  }
}

void check_output(const std::string& name, const Tensor& tensor, int64_t batch, int64_t length,
                  int64_t heads, int64_t head_dim) {
  check_tensor(name, tensor, batch, length, head_dim);
  const auto check_apart = [&](const char* stride_name, int64_t stride, int64_t count) {
    if (count > 1 && stride == 0) {
      refuse(name + stride_name, stride, "an output needs its rows apart");
    }
  };
  if (batch == 0 || length == 0) return;
  check_apart(".batch_stride", tensor.batch_stride, batch);
  check_apart(".length_stride", tensor.length_stride, length);
  check_apart(".head_stride", tensor.head_stride, heads);
}

}  // namespace

void check_problem(const Problem& problem) {
  if (problem.device != Device::kCpu && problem.device != Device::kCuda) {
    refuse("device", static_cast<int>(problem.device), "accepted are Device::kCpu and kCuda");
  }
  if (problem.dtype != DType::kFloat16 && problem.dtype != DType::kBFloat16 &&
      problem.dtype != DType::kFloat32 && problem.dtype != DType::kFloat64) {
    refuse("dtype", static_cast<int>(problem.dtype),
           "accepted are DType::kFloat16, kBFloat16, kFloat32 and kFloat64");
  }
  check_range("batch", problem.batch, 0, kMaxCount);
  check_range("num_query_heads", problem.num_query_heads, 1, kMaxCount);
  check_range("num_key_heads", problem.num_key_heads, 1, kMaxCount);
  if (problem.num_query_heads % problem.num_key_heads != 0) {
    refuse("num_query_heads", problem.num_query_heads,
           "a multiple of num_key_heads = " + std::to_string(problem.num_key_heads) + " is needed");
  }
  check_range("query_length", problem.query_length, 0, kMaxLength);
  check_range("key_length", problem.key_length, 0, kMaxLength);
  if (problem.head_dim < kMinHeadDim || problem.head_dim > kMaxHeadDim ||
      problem.head_dim % kHeadDimStep != 0) {
    refuse("head_dim", problem.head_dim, "accepted are multiples of 8 from 8 to 256");
  }
  const double elements = static_cast<double>(problem.batch) *
                          static_cast<double>(problem.num_query_heads) *
                          static_cast<double>(std::max(problem.query_length, problem.key_length)) *
                          static_cast<double>(problem.head_dim);
  if (elements > kMaxElements) {
    refuse("batch * num_query_heads * length * head_dim", elements, "accepted are up to 2^50");
  }
  if (!std::isfinite(problem.scale)) {
    refuse("scale", problem.scale, "a finite number is needed");
  }
  if (problem.dtype != DType::kFloat64 && problem.scale != 0.0 &&
      !std::isnormal(static_cast<float>(problem.scale))) {
    refuse("scale", problem.scale,
           "accepted are 0 and what float32, in which it multiplies, holds as a normal number: "
           "1.2e-38 to 3.4e38 in size");
  }
  if (problem.window_left < -1) {
    refuse("window_left", problem.window_left, "accepted are -1 (unlimited) and larger");
  }
  if (problem.window_right < -1) {
    refuse("window_right", problem.window_right, "accepted are -1 (unlimited) and larger");
  }
  if (problem.device == Device::kCuda) cuda::check_problem(problem);
}

void check(const Problem& problem, const ForwardArgs& args) {
  const Problem& p = problem;
  check_tensor("query", args.query, p.batch, p.query_length, p.head_dim);
  check_tensor("key", args.key, p.batch, p.key_length, p.head_dim);
  check_tensor("value", args.value, p.batch, p.key_length, p.head_dim);
  check_output("out", args.out, p.batch, p.query_length, p.num_query_heads, p.head_dim);
}

void check(const Problem& problem, const SelectArgs& args) {
  const bool has_tiles = problem.batch > 0 && problem.query_length > 0 && problem.key_length > 0;
  check_pointer("tile_stats", args.tile_stats, has_tiles);
  check_pointer("tile_bits", args.tile_bits, has_tiles);
  check_pointer("negl_prob", args.negl_prob, true);
  if (args.num_negl_prob != 1 && args.num_negl_prob != problem.num_query_heads) {
    refuse("num_negl_prob", args.num_negl_prob,
           "accepted are 1 and num_query_heads = " + std::to_string(problem.num_query_heads));
  }
  if (problem.device == Device::kCuda) return;  // the values are on the device
  // Every call comes through here, so a name is put together for a wrong value alone.
  const int64_t* const end = args.negl_prob + args.num_negl_prob;
  const int64_t* const wrong = std::find_if(
      args.negl_prob, end, [](int64_t value) { return value < 0 || value >= kProbOne; });
  if (wrong != end) {
    check_range("negl_prob[" + std::to_string(wrong - args.negl_prob) + "]", *wrong, 0,
                kProbOne - 1);
  }
}

void check(const ScheduleArgs& args, size_t needed_bytes) {
  check_aligned("schedule", args.schedule, true);
  if (args.schedule_bytes < needed_bytes) {
    refuse("schedule_bytes", args.schedule_bytes,
           "at least " + std::to_string(needed_bytes) + " are needed");
  }
}

void check(const Problem& problem, const BackwardArgs& args) {
  const Problem& p = problem;
  check_tensor("query", args.query, p.batch, p.query_length, p.head_dim);
  check_tensor("key", args.key, p.batch, p.key_length, p.head_dim);
  check_tensor("value", args.value, p.batch, p.key_length, p.head_dim);
  check_tensor("out", args.out, p.batch, p.query_length, p.head_dim);
  check_tensor("grad_out", args.grad_out, p.batch, p.query_length, p.head_dim);
  check_pointer("lse", args.lse, p.batch > 0 && p.query_length > 0);
  check_aligned("schedule", args.schedule, true);
  check_output("grad_query", args.grad_query, p.batch, p.query_length, p.num_query_heads,
               p.head_dim);
  check_output("grad_key", args.grad_key, p.batch, p.key_length, p.num_key_heads, p.head_dim);
  check_output("grad_value", args.grad_value, p.batch, p.key_length, p.num_key_heads, p.head_dim);
}

void check_negl_prob(double negl_prob) {
  if (!(negl_prob >= 0.0 && negl_prob < 1.0)) {
    refuse("negl_prob", negl_prob, "accepted are numbers from 0 to below 1");
  }
}

void check_num_threads(int num_threads) {
  if (num_threads < 1) refuse("num_threads", num_threads, "at least 1 is needed");
}

void check_execution(const Execution& execution, size_t needed_bytes) {
  check_num_threads(execution.num_threads);
  if (execution.workspace_bytes < needed_bytes) {
    refuse("workspace_bytes", execution.workspace_bytes,
           "at least " + std::to_string(needed_bytes) + " are needed");
  }
  check_aligned("workspace", execution.workspace, needed_bytes > 0);
}

}  // namespace backlite
