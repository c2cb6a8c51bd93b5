// Dense blocks of a tile as Eigen maps, and loads that convert.
#pragma once

#include <Eigen/Core>
#include <cstdint>
#include <type_traits>

#include "backlite/backlite.h"

namespace backlite::cpu {

// float64 is computed in double, everything else in float.
template <typename Element>
using ComputeOf = std::conditional_t<std::is_same_v<Element, double>, double, float>;

template <typename T>
using RowMajor = Eigen::Matrix<T, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;
template <typename T>
using RowBlock = Eigen::Map<RowMajor<T>, Eigen::Unaligned, Eigen::OuterStride<>>;
template <typename T>
using ConstRowBlock = Eigen::Map<const RowMajor<T>, Eigen::Unaligned, Eigen::OuterStride<>>;
template <typename T>
using Vector = Eigen::Map<Eigen::Array<T, Eigen::Dynamic, 1>>;

// Rows [row, row + num_rows) of one (batch, head) of a (batch, length, heads, head_dim) tensor.
template <typename Element>
ConstRowBlock<Element> rows_of(const ConstTensor& tensor, int64_t batch, int64_t head, int64_t row,
                               int64_t num_rows, int64_t head_dim) {
  const auto* data = static_cast<const Element*>(tensor.data) + batch * tensor.batch_stride +
                     head * tensor.head_stride + row * tensor.length_stride;
  return {data, num_rows, head_dim, Eigen::OuterStride<>(tensor.length_stride)};
}

// Copies a block to `scratch`, converted to the compute type; rows are `stride` apart there.
template <typename Element>
void load(const ConstRowBlock<Element>& block, ComputeOf<Element>* scratch, int64_t stride) {
  RowBlock<ComputeOf<Element>>(scratch, block.rows(), block.cols(), Eigen::OuterStride<>(stride)) =
      block.template cast<ComputeOf<Element>>();
}

}  // namespace backlite::cpu
