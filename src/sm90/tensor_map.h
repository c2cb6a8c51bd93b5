// Tensor maps: what the copy engine needs to know about a tensor. Made on the host through the
// driver's entry point, found at run time: nothing here links to libcuda.
#pragma once

#include <cuda.h>

#include <cstdint>

namespace backlite::sm90 {

// A (batch, head, row, column) tensor of 16-bit elements; strides count bytes, columns touch.
struct TensorLayout {
  const void* data = nullptr;  // 16-byte aligned
  int64_t num_batches = 0;
  int64_t num_heads = 0;
  int64_t num_rows = 0;
  int64_t num_columns = 0;
  int64_t batch_stride = 0;  // multiples of 16, below 2^40; of a dimension of size 1: anything
  int64_t head_stride = 0;
  int64_t row_stride = 0;
};

// Can the copy engine take it? If not, the reason in words; nullptr if it can.
const char* why_not_mappable(const TensorLayout& layout);

// A map whose boxes are 64 columns x `box_rows` rows of one head, stored as layout.h says. False if
// the driver is too old or refuses.
bool make_tensor_map(const TensorLayout& layout, bool is_bfloat16, int box_rows, CUtensorMap* map);

}  // namespace backlite::sm90
