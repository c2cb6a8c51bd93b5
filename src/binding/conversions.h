// Tensor views of tvm-ffi as the core wants to see them, and the checks without which a conversion
// would read out of bounds. What a stage accepts is checked by the stage.
#pragma once

#include <backlite/backlite.h>
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/error.h>
#include <tvm/ffi/optional.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <initializer_list>
#include <sstream>
#include <string>

namespace backlite_ffi {

namespace ffi = tvm::ffi;
using ffi::TensorView;
using OptionalView = ffi::Optional<TensorView>;

// How many thresholds a table of them can hold; see resolve_negl_prob.
inline constexpr int64_t kMaxTableHeads = 1024;

constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

template <typename... Parts>
[[noreturn]] void refuse(const Parts&... parts) {
  std::ostringstream message;
  (message << ... << parts);
  throw backlite::InvalidArgument(message.str());
}

// ---- Tensors ----------------------------------------------------------------------------------

template <typename T>
T* data_of(const TensorView& tensor) {
  return reinterpret_cast<T*>(static_cast<char*>(tensor.data_ptr()) + tensor.byte_offset());
}

template <typename T>
T* data_or_null(const OptionalView& tensor) {
  return tensor.has_value() ? data_of<T>(tensor.value()) : nullptr;
}

inline backlite::DType dtype_of(const TensorView& tensor, const char* name) {
  const DLDataType dtype = tensor.dtype();
  if (dtype.lanes == 1 && dtype.code == kDLFloat) {
    if (dtype.bits == 16) return backlite::DType::kFloat16;
    if (dtype.bits == 32) return backlite::DType::kFloat32;
    if (dtype.bits == 64) return backlite::DType::kFloat64;
  }
  if (dtype.lanes == 1 && dtype.code == kDLBfloat && dtype.bits == 16) {
    return backlite::DType::kBFloat16;
  }
  TVM_FFI_THROW(TypeError) << name << " must be float16, bfloat16, float32 or float64";
  TVM_FFI_UNREACHABLE();
}

inline backlite::Device device_of(const TensorView& tensor, const char* name) {
  const DLDeviceType type = tensor.device().device_type;
  if (type == kDLCPU) return backlite::Device::kCpu;
  if (type == kDLCUDA) return backlite::Device::kCuda;
  throw backlite::NotSupported(std::string(name) + ": accepted are tensors on the CPU and on CUDA");
}

inline void require_device(const TensorView& tensor, const char* name, const DLDevice& device) {
  const DLDevice got = tensor.device();
  if (got.device_type != device.device_type || got.device_id != device.device_id) {
    refuse(name, " has DLPack device (", int{got.device_type}, ", ", got.device_id,
           "); it must be the first tensor's, (", int{device.device_type}, ", ", device.device_id,
           ")");
  }
}

inline void require_dtype(const TensorView& tensor, const char* name, DLDataType dtype) {
  const DLDataType got = tensor.dtype();
  if (got.code != dtype.code || got.bits != dtype.bits || got.lanes != dtype.lanes) {
    refuse(name, " has DLPack type (", int{got.code}, ", ", int{got.bits}, " bits); it must be (",
           int{dtype.code}, ", ", int{dtype.bits}, " bits)");
  }
}

inline std::string shape_text(ffi::ShapeView shape) {
  std::ostringstream text;
  text << '(';
  for (size_t i = 0; i < shape.size(); ++i) text << (i == 0 ? "" : ", ") << shape[i];
  text << ')';
  return text.str();
}

inline void require_shape(const TensorView& tensor, const char* name,
                          std::initializer_list<int64_t> shape) {
  const ffi::ShapeView got = tensor.shape();
  if (!std::equal(got.begin(), got.end(), shape.begin(), shape.end())) {
    refuse(name, " has shape ", shape_text(got), "; it must be ",
           shape_text(ffi::ShapeView(shape.begin(), shape.size())));
  }
}

// Everything that view_of() does not take: contiguous, of one exact shape and type, on the device
// of `like`.
inline void require_dense(const TensorView& tensor, const char* name, const TensorView& like,
                          DLDataType dtype, std::initializer_list<int64_t> shape) {
  require_device(tensor, name, like.device());
  require_dtype(tensor, name, dtype);
  require_shape(tensor, name, shape);
  if (!tensor.IsContiguous()) refuse(name, " must be contiguous");
}

inline void require_dense(const OptionalView& tensor, const char* name, const TensorView& like,
                          DLDataType dtype, std::initializer_list<int64_t> shape) {
  if (tensor.has_value()) require_dense(tensor.value(), name, like, dtype, shape);
}

// A (batch, length, heads, head_dim) tensor with a unit last stride.
template <typename View>
View view_of(const TensorView& tensor, const char* name, const TensorView& like, int64_t length,
             int64_t num_heads) {
  require_device(tensor, name, like.device());
  require_dtype(tensor, name, like.dtype());
  require_shape(tensor, name, {like.size(0), length, num_heads, like.size(3)});
  const int64_t row = tensor.size(3);
  // Strides without elements mean nothing; any sound ones will do.
  if (tensor.numel() == 0) return {.data = data_of<void>(tensor), .length_stride = row};
  if (tensor.stride(3) != 1) refuse(name, " has last stride ", tensor.stride(3), "; it must be 1");
  return {.data = data_of<void>(tensor),
          .batch_stride = tensor.stride(0),
          .length_stride = tensor.stride(1),
          .head_stride = tensor.stride(2)};
}

// ---- Problems ---------------------------------------------------------------------------------

inline constexpr DLDataType kFloat32{kDLFloat, 32, 1};
inline constexpr DLDataType kFloat64{kDLFloat, 64, 1};
inline constexpr DLDataType kInt32{kDLInt, 32, 1};
inline constexpr DLDataType kInt64{kDLInt, 64, 1};
inline constexpr DLDataType kUInt8{kDLUInt, 8, 1};

struct Mask {
  bool causal;
  int64_t window_left;
  int64_t window_right;
};

// Without a scale it is 1 / sqrt(head_dim).
inline backlite::Problem problem_of(const TensorView& query, const TensorView& key,
                                    ffi::Optional<double> scale, const Mask& mask) {
  if (query.ndim() != 4 || key.ndim() != 4) refuse("query and key must have four dimensions");
  return {.device = device_of(query, "query"),
          .dtype = dtype_of(query, "query"),
          .batch = query.size(0),
          .num_query_heads = query.size(2),
          .num_key_heads = key.size(2),
          .query_length = query.size(1),
          .key_length = key.size(1),
          .head_dim = query.size(3),
          .scale = scale.has_value() ? scale.value()
                                     : 1.0 / std::sqrt(static_cast<double>(query.size(3))),
          .causal = mask.causal,
          .window_left = mask.window_left,
          .window_right = mask.window_right};
}

inline int64_t query_tiles(const backlite::Problem& p) {
  return ceil_div(p.query_length, backlite::kQueryTile);
}

inline int64_t key_tiles(const backlite::Problem& p) {
  return ceil_div(p.key_length, backlite::kKeyTile);
}

inline DLDataType lse_dtype(const backlite::Problem& p) {
  return p.dtype == backlite::DType::kFloat64 ? kFloat64 : kFloat32;
}

template <typename TensorOrOptional>
void require_tile_stats(const TensorOrOptional& tile_stats, const TensorView& like,
                        const backlite::Problem& p) {
  require_dense(tile_stats, "tile_stats", like, kFloat32,
                {p.batch, p.num_query_heads, query_tiles(p), key_tiles(p)});
}

// Any shape with the elements of [B, H, Tn, W] in that order.
inline void require_tile_bits(const TensorView& tile_bits, const TensorView& like,
                              const backlite::Problem& p) {
  const int64_t words = p.batch * p.num_query_heads * key_tiles(p) *
                        ceil_div(query_tiles(p), backlite::kTilesPerWord);
  if (tile_bits.numel() != words) {
    refuse("tile_bits has ", tile_bits.numel(), " words; it must have ", words);
  }
  require_device(tile_bits, "tile_bits", like.device());
  require_dtype(tile_bits, "tile_bits", kInt32);
  if (!tile_bits.IsContiguous()) refuse("tile_bits must be contiguous");
}

// How many entries of negl_prob the heads read. It comes with 1 entry (all heads alike), with one
// per head, or as a table of fixed size, so that compiled code sees one shape whatever it holds:
// all kMaxTableHeads + 1 entries alike, or one per head and -1 from there on. On CUDA the entries
// are not for the host to read; every head then has its own in the table, alike or not.
inline int64_t resolve_negl_prob(const TensorView& negl_prob, const TensorView& like,
                                 int64_t num_heads) {
  require_device(negl_prob, "negl_prob", like.device());
  require_dtype(negl_prob, "negl_prob", kInt64);
  if (negl_prob.ndim() != 1 || !negl_prob.IsContiguous()) {
    refuse("negl_prob must be contiguous and have one dimension");
  }
  const int64_t size = negl_prob.size(0);
  if (size != kMaxTableHeads + 1) {
    if (size == 1 || size == num_heads) return size;
    refuse("negl_prob has ", size, " entries; accepted: 1, or one for each of the ", num_heads,
           " query heads");
  }
  if (negl_prob.device().device_type == kDLCUDA) return num_heads <= size ? num_heads : 1;
  const int64_t* table = data_of<const int64_t>(negl_prob);
  if (table[kMaxTableHeads] >= 0) return 1;
  const int64_t given = std::find(table, table + kMaxTableHeads, -1) - table;
  if (given == num_heads) return given;
  refuse("negl_prob has ", given, " entries; accepted: 1, or one for each of the ", num_heads,
         " query heads");
}

}  // namespace backlite_ffi
