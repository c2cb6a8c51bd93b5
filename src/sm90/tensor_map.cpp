#include "sm90/tensor_map.h"

#include <cuda_runtime_api.h>

#include "sm90/layout.h"

namespace backlite::sm90 {
namespace {

using EncodeTiled = decltype(&cuTensorMapEncodeTiled);

// nullptr without a driver of CUDA 12 or newer.
EncodeTiled find_encode_tiled() {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult found{};
  constexpr unsigned kSinceCuda12 = 12000;
  const cudaError_t error = cudaGetDriverEntryPointByVersion(
      "cuTensorMapEncodeTiled", &function, kSinceCuda12, cudaEnableDefault, &found);
  const bool usable = error == cudaSuccess && found == cudaDriverEntryPointSuccess;
  return usable ? reinterpret_cast<EncodeTiled>(function) : nullptr;
}

// The stride of a dimension of size 1 means nothing: any legal value does.
constexpr int64_t kAnyStride = kChunkBytes;

int64_t effective_stride(int64_t stride, int64_t size) { return size > 1 ? stride : kAnyStride; }

bool is_legal_stride(int64_t stride, int64_t size) {
  constexpr int64_t kLimit = int64_t{1} << 40;
  const int64_t value = effective_stride(stride, size);
  return value % kChunkBytes == 0 && value >= 0 && value < kLimit;
}

}  // namespace

const char* why_not_mappable(const TensorLayout& layout) {
  if (reinterpret_cast<uintptr_t>(layout.data) % kChunkBytes != 0) {
    return "its address is not a multiple of 16 bytes";
  }
  if (!is_legal_stride(layout.row_stride, layout.num_rows) ||
      !is_legal_stride(layout.head_stride, layout.num_heads) ||
      !is_legal_stride(layout.batch_stride, layout.num_batches)) {
    return "a stride is not a multiple of 16 bytes, or is negative, or is 2^40 bytes or more";
  }
  return nullptr;
}

bool make_tensor_map(const TensorLayout& layout, bool is_bfloat16, int box_rows, CUtensorMap* map) {
  static const EncodeTiled encode = find_encode_tiled();
  if (encode == nullptr) return false;
  constexpr int kRank = 4;
  const cuuint64_t sizes[kRank] = {
      static_cast<cuuint64_t>(layout.num_columns), static_cast<cuuint64_t>(layout.num_rows),
      static_cast<cuuint64_t>(layout.num_heads), static_cast<cuuint64_t>(layout.num_batches)};
  const auto stride = [](int64_t bytes, int64_t size) {
    return static_cast<cuuint64_t>(effective_stride(bytes, size));
  };
  const cuuint64_t strides[kRank - 1] = {stride(layout.row_stride, layout.num_rows),
                                         stride(layout.head_stride, layout.num_heads),
                                         stride(layout.batch_stride, layout.num_batches)};
  const cuuint32_t box[kRank] = {kBlockColumns, static_cast<cuuint32_t>(box_rows), 1, 1};
  const cuuint32_t element_strides[kRank] = {1, 1, 1, 1};
  return encode(
             map, is_bfloat16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
             kRank, const_cast<void*>(layout.data), sizes, strides, box, element_strides,
             CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
             CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

}  // namespace backlite::sm90
