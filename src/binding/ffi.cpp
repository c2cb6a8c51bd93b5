// The one place that knows the Python world: typed functions on DLPack views (apache-tvm-ffi),
// turned into backlite::Problem and the arguments of the four stages. Nothing but conversion, and
// the checks without which a conversion would read out of bounds; what a stage accepts is checked
// by the stage.
//
// backlite::InvalidArgument becomes ValueError and backlite::NotSupported NotImplementedError.
// tvm-ffi releases the interpreter lock around each of these functions.
#include <backlite/backlite.h>
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/error.h>
#include <tvm/ffi/function.h>
#include <tvm/ffi/optional.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <new>
#include <sstream>
#include <string>

namespace backlite_ffi {
namespace {

namespace ffi = tvm::ffi;
using ffi::TensorView;
using OptionalView = ffi::Optional<TensorView>;

// How many thresholds a table of them can hold; see resolve_negl_prob.
constexpr int64_t kMaxTableHeads = 1024;
constexpr size_t kAlignment = 64;

constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

template <typename... Parts>
[[noreturn]] void refuse(const Parts&... parts) {
  std::ostringstream message;
  (message << ... << parts);
  throw backlite::InvalidArgument(message.str());
}

// Runs a stage; the library's exceptions leave as Python's.
template <typename Stage>
auto translate(const Stage& stage) {
  try {
    return stage();
  } catch (const backlite::InvalidArgument& error) {
    TVM_FFI_THROW(ValueError) << error.what();
  } catch (const backlite::NotSupported& error) {
    TVM_FFI_THROW(NotImplementedError) << error.what();
  } catch (const std::bad_alloc&) {
    TVM_FFI_THROW(MemoryError) << "back_lite: out of memory for the workspace of a stage";
  }
  TVM_FFI_UNREACHABLE();
}

// Scratch memory of one call, aligned as the core asks.
class Workspace {
 public:
  explicit Workspace(size_t bytes)
      : bytes_(bytes), data_(bytes == 0 ? nullptr : ::operator new(bytes, kAlign)) {}
  void* data() const { return data_.get(); }
  size_t bytes() const { return bytes_; }

 private:
  static constexpr std::align_val_t kAlign{kAlignment};
  struct Free {
    void operator()(void* data) const { ::operator delete(data, kAlign); }
  };
  size_t bytes_;
  std::unique_ptr<void, Free> data_;
};

backlite::Execution execution_on(const Workspace& workspace, int64_t num_threads) {
  return {.stream = nullptr,
          .num_threads = static_cast<int>(num_threads),
          .workspace = workspace.data(),
          .workspace_bytes = workspace.bytes()};
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

backlite::DType dtype_of(const TensorView& tensor, const char* name) {
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

void require_cpu(const TensorView& tensor, const char* name) {
  if (tensor.device().device_type != kDLCPU) {
    throw backlite::NotSupported(std::string(name) +
                                 " is not on the CPU: this build of back_lite has no other backend");
  }
}

void require_dtype(const TensorView& tensor, const char* name, DLDataType dtype) {
  const DLDataType got = tensor.dtype();
  if (got.code != dtype.code || got.bits != dtype.bits || got.lanes != dtype.lanes) {
    refuse(name, " has DLPack type (", int{got.code}, ", ", int{got.bits}, " bits); it must be (",
           int{dtype.code}, ", ", int{dtype.bits}, " bits)");
  }
}

std::string shape_text(ffi::ShapeView shape) {
  std::ostringstream text;
  text << '(';
  for (size_t i = 0; i < shape.size(); ++i) text << (i == 0 ? "" : ", ") << shape[i];
  text << ')';
  return text.str();
}

void require_shape(const TensorView& tensor, const char* name,
                   std::initializer_list<int64_t> shape) {
  const ffi::ShapeView got = tensor.shape();
  if (!std::equal(got.begin(), got.end(), shape.begin(), shape.end())) {
    refuse(name, " has shape ", shape_text(got), "; it must be ",
           shape_text(ffi::ShapeView(shape.begin(), shape.size())));
  }
}

// Everything but the four large tensors: contiguous, of one exact shape and type.
void require_dense(const TensorView& tensor, const char* name, DLDataType dtype,
                   std::initializer_list<int64_t> shape) {
  require_cpu(tensor, name);
  require_dtype(tensor, name, dtype);
  require_shape(tensor, name, shape);
  if (!tensor.IsContiguous()) refuse(name, " must be contiguous");
}

void require_dense(const OptionalView& tensor, const char* name, DLDataType dtype,
                   std::initializer_list<int64_t> shape) {
  if (tensor.has_value()) require_dense(tensor.value(), name, dtype, shape);
}

// A (batch, length, heads, head_dim) tensor with a unit last stride.
template <typename View>
View view_of(const TensorView& tensor, const char* name, const TensorView& like,
             int64_t length, int64_t num_heads) {
  require_cpu(tensor, name);
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

constexpr DLDataType kFloat32{kDLFloat, 32, 1};
constexpr DLDataType kFloat64{kDLFloat, 64, 1};
constexpr DLDataType kInt32{kDLInt, 32, 1};
constexpr DLDataType kInt64{kDLInt, 64, 1};

struct Mask {
  bool causal;
  int64_t window_left;
  int64_t window_right;
};

backlite::Problem problem_of(const TensorView& query, const TensorView& key, double scale,
                             const Mask& mask) {
  if (query.ndim() != 4 || key.ndim() != 4) refuse("query and key must have four dimensions");
  return {.device = backlite::Device::kCpu,
          .dtype = dtype_of(query, "query"),
          .batch = query.size(0),
          .num_query_heads = query.size(2),
          .num_key_heads = key.size(2),
          .query_length = query.size(1),
          .key_length = key.size(1),
          .head_dim = query.size(3),
          .scale = scale,
          .causal = mask.causal,
          .window_left = mask.window_left,
          .window_right = mask.window_right};
}

int64_t query_tiles(const backlite::Problem& p) {
  return ceil_div(p.query_length, backlite::kQueryTile);
}

int64_t key_tiles(const backlite::Problem& p) {
  return ceil_div(p.key_length, backlite::kKeyTile);
}

DLDataType lse_dtype(const backlite::Problem& p) {
  return p.dtype == backlite::DType::kFloat64 ? kFloat64 : kFloat32;
}

template <typename TensorOrOptional>
void require_tile_stats(const TensorOrOptional& tile_stats, const backlite::Problem& p) {
  require_dense(tile_stats, "tile_stats", kFloat32,
                {p.batch, p.num_query_heads, query_tiles(p), key_tiles(p)});
}

// Any shape with the elements of [B, H, Tn, W] in that order.
void require_tile_bits(const TensorView& tile_bits, const backlite::Problem& p) {
  const int64_t words = p.batch * p.num_query_heads * key_tiles(p) *
                        ceil_div(query_tiles(p), backlite::kTilesPerWord);
  if (tile_bits.numel() != words) {
    refuse("tile_bits has ", tile_bits.numel(), " words; it must have ", words);
  }
  require_cpu(tile_bits, "tile_bits");
  require_dtype(tile_bits, "tile_bits", kInt32);
  if (!tile_bits.IsContiguous()) refuse("tile_bits must be contiguous");
}

// How many entries of negl_prob the heads read. It comes with 1 entry (all heads alike), with one
// per head, or as a table of fixed size, so that compiled code sees one shape whatever it holds:
// all kMaxTableHeads + 1 entries alike, or one per head and -1 from there on.
int64_t resolve_negl_prob(const TensorView& negl_prob, int64_t num_heads) {
  require_cpu(negl_prob, "negl_prob");
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
  const int64_t* table = data_of<const int64_t>(negl_prob);
  if (table[kMaxTableHeads] >= 0) return 1;
  const int64_t given = std::find(table, table + kMaxTableHeads, -1) - table;
  if (given == num_heads) return given;
  refuse("negl_prob has ", given, " entries; accepted: 1, or one for each of the ", num_heads,
         " query heads");
}

void run_select(const backlite::Problem& problem, const float* tile_stats,
                const TensorView& negl_prob, int32_t* tile_bits, int64_t num_threads) {
  const backlite::SelectArgs args{
      .tile_stats = tile_stats,
      .negl_prob = data_of<const int64_t>(negl_prob),
      .num_negl_prob = resolve_negl_prob(negl_prob, problem.num_query_heads),
      .tile_bits = tile_bits};
  const Workspace workspace(
      backlite::select_workspace_bytes(problem, static_cast<int>(num_threads)));
  backlite::select(problem, args, execution_on(workspace, num_threads));
}

// ---- Exported functions -----------------------------------------------------------------------

// The forward and, where tile_bits is given, the selection. The statistics that only the selection
// needs live in a workspace.
void forward(TensorView query, TensorView key, TensorView value, TensorView out, TensorView lse,
             OptionalView tile_stats, OptionalView negl_prob, OptionalView tile_bits, double scale,
             bool causal, int64_t window_left, int64_t window_right, int64_t num_threads) {
  translate([&] {
    using backlite::ConstTensor;
    const backlite::Problem p =
        problem_of(query, key, scale, {causal, window_left, window_right});
    require_dense(lse, "lse", lse_dtype(p), {p.batch, p.num_query_heads, p.query_length});
    require_tile_stats(tile_stats, p);
    const bool selects = tile_bits.has_value();
    if (selects) require_tile_bits(tile_bits.value(), p);
    if (selects != negl_prob.has_value()) refuse("tile_bits and negl_prob come together");

    const int64_t num_stats = p.batch * p.num_query_heads * query_tiles(p) * key_tiles(p);
    const bool own_stats = selects && !tile_stats.has_value();
    const Workspace stats(own_stats ? static_cast<size_t>(num_stats) * sizeof(float) : 0);
    const backlite::ForwardArgs args{
        .query = view_of<ConstTensor>(query, "query", query, p.query_length, p.num_query_heads),
        .key = view_of<ConstTensor>(key, "key", query, p.key_length, p.num_key_heads),
        .value = view_of<ConstTensor>(value, "value", query, p.key_length, p.num_key_heads),
        .out = view_of<backlite::Tensor>(out, "out", query, p.query_length, p.num_query_heads),
        .lse = data_of<void>(lse),
        .tile_stats = own_stats ? static_cast<float*>(stats.data())
                                : data_or_null<float>(tile_stats)};
    const Workspace workspace(backlite::forward_workspace_bytes(
        p, args.tile_stats != nullptr, static_cast<int>(num_threads)));
    backlite::forward(p, args, execution_on(workspace, num_threads));
    if (selects) {
      run_select(p, args.tile_stats, negl_prob.value(), data_of<int32_t>(tile_bits.value()),
                 num_threads);
    }
  });
}

void select(TensorView tile_stats, TensorView negl_prob, TensorView tile_bits,
            int64_t query_length, int64_t key_length, bool causal, int64_t window_left,
            int64_t window_right, int64_t num_threads) {
  translate([&] {
    if (tile_stats.ndim() != 4) refuse("tile_stats must have four dimensions");
    // The selection reads neither dtype nor head_dim; any pair that is sound will do.
    const backlite::Problem p{.batch = tile_stats.size(0),
                              .num_query_heads = tile_stats.size(1),
                              .num_key_heads = tile_stats.size(1),
                              .query_length = query_length,
                              .key_length = key_length,
                              .head_dim = 8,
                              .causal = causal,
                              .window_left = window_left,
                              .window_right = window_right};
    require_tile_stats(tile_stats, p);
    require_tile_bits(tile_bits, p);
    run_select(p, data_of<const float>(tile_stats), negl_prob, data_of<int32_t>(tile_bits),
               num_threads);
  });
}

// Schedule and backward.
void backward(TensorView grad_out, TensorView query, TensorView key, TensorView value,
              TensorView out, TensorView lse, OptionalView grad_lse, OptionalView tile_bits,
              TensorView grad_query, TensorView grad_key, TensorView grad_value, double scale,
              bool causal, int64_t window_left, int64_t window_right, int64_t num_threads) {
  translate([&] {
    using backlite::ConstTensor;
    const backlite::Problem p =
        problem_of(query, key, scale, {causal, window_left, window_right});
    const int64_t sq = p.query_length, sk = p.key_length;
    const int64_t hq = p.num_query_heads, hk = p.num_key_heads;
    require_dense(lse, "lse", lse_dtype(p), {p.batch, hq, sq});
    require_dense(grad_lse, "grad_lse", lse_dtype(p), {p.batch, hq, sq});
    if (tile_bits.has_value()) require_tile_bits(tile_bits.value(), p);
    const Workspace schedule(backlite::schedule_bytes(p));
    const backlite::BackwardArgs args{
        .query = view_of<ConstTensor>(query, "query", query, sq, hq),
        .key = view_of<ConstTensor>(key, "key", query, sk, hk),
        .value = view_of<ConstTensor>(value, "value", query, sk, hk),
        .out = view_of<ConstTensor>(out, "out", query, sq, hq),
        .grad_out = view_of<ConstTensor>(grad_out, "grad_out", query, sq, hq),
        .lse = data_of<const void>(lse),
        .grad_lse = data_or_null<const void>(grad_lse),
        .tile_bits = data_or_null<const int32_t>(tile_bits),
        .schedule = schedule.data(),
        .grad_query = view_of<backlite::Tensor>(grad_query, "grad_query", query, sq, hq),
        .grad_key = view_of<backlite::Tensor>(grad_key, "grad_key", query, sk, hk),
        .grad_value = view_of<backlite::Tensor>(grad_value, "grad_value", query, sk, hk)};
    const Workspace workspace(
        backlite::backward_workspace_bytes(p, static_cast<int>(num_threads)));
    const backlite::Execution execution = execution_on(workspace, num_threads);
    backlite::schedule(p, {.tile_bits = args.tile_bits, .schedule = schedule.data()}, execution);
    backlite::backward(p, args, execution);
  });
}

ffi::String version() { return backlite::version(); }
ffi::String cpu_isa() { return translate([] { return ffi::String(backlite::cpu_isa()); }); }
int64_t max_table_heads() { return kMaxTableHeads; }

}  // namespace
}  // namespace backlite_ffi

TVM_FFI_DLL_EXPORT_TYPED_FUNC(forward, backlite_ffi::forward);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(select, backlite_ffi::select);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(backward, backlite_ffi::backward);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(version, backlite_ffi::version);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(cpu_isa, backlite_ffi::cpu_isa);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(max_table_heads, backlite_ffi::max_table_heads);
