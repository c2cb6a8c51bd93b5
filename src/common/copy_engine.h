// Tensors of the public API as Hopper's copy engine wants to see them.
#pragma once

#include <string>

#include "backlite/backlite.h"
#include "sm90/tensor_map.h"

namespace backlite {

// The kernels that use the copy engine take 16-bit types alone.
inline constexpr int64_t kCopiedElementBytes = 2;

template <typename AnyTensor>
sm90::TensorLayout layout_of(const AnyTensor& tensor, const Problem& problem, int64_t num_heads,
                             int64_t length) {
  return {.data = tensor.data,
          .num_batches = problem.batch,
          .num_heads = num_heads,
          .num_rows = length,
          .num_columns = problem.head_dim,
          .batch_stride = tensor.batch_stride * kCopiedElementBytes,
          .head_stride = tensor.head_stride * kCopiedElementBytes,
          .row_stride = tensor.length_stride * kCopiedElementBytes};
}

inline CUtensorMap tensor_map(const sm90::TensorLayout& layout, const Problem& problem,
                              int box_rows) {
  CUtensorMap map{};
  if (!sm90::make_tensor_map(layout, problem.dtype == DType::kBFloat16, box_rows, &map)) {
    throw Error("the CUDA driver could not make a tensor map (it must be of CUDA 12 or newer)");
  }
  return map;
}

// Collects why the copy engine cannot take some tensors: the name and the fault of the first one.
class Mappable {
 public:
  explicit Mappable(const Problem& problem) : problem_(problem) {}

  template <typename AnyTensor>
  void require_query_side(const char* name, const AnyTensor& tensor) {
    require(name, tensor, problem_.num_query_heads, problem_.query_length);
  }

  template <typename AnyTensor>
  void require_key_side(const char* name, const AnyTensor& tensor) {
    require(name, tensor, problem_.num_key_heads, problem_.key_length);
  }

  // Empty if all can be taken.
  const std::string& why_not() const { return why_not_; }

 private:
  template <typename AnyTensor>
  void require(const char* name, const AnyTensor& tensor, int64_t num_heads, int64_t length) {
    if (!why_not_.empty() || problem_.batch == 0 || length == 0) return;
    const char* const reason =
        sm90::why_not_mappable(layout_of(tensor, problem_, num_heads, length));
    if (reason != nullptr) why_not_ = std::string(name) + ": " + reason;
  }

  const Problem& problem_;
  std::string why_not_;
};

}  // namespace backlite
