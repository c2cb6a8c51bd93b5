// The one place that knows the Python world: typed functions on DLPack views (apache-tvm-ffi),
// turned into backlite::Problem and the arguments of the four stages. Nothing but conversion.
//
// backlite::InvalidArgument becomes ValueError and backlite::NotSupported NotImplementedError.
// tvm-ffi releases the interpreter lock around each of these functions.
#include <backlite/backlite.h>
#include <tvm/ffi/error.h>
#include <tvm/ffi/extra/c_env_api.h>
#include <tvm/ffi/function.h>
#include <tvm/ffi/string.h>

#include <cstdint>
#include <new>

#include "binding/conversions.h"
#include "binding/scratch.h"

namespace backlite_ffi {
namespace {

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

// With torch's current stream, which tvm-ffi has noted as the tensors came in.
backlite::Execution execution_on(const TensorView& like, Scratch& scratch, size_t workspace_bytes,
                                 int64_t num_threads) {
  const DLDevice device = like.device();
  return {.stream = device.device_type == kDLCPU
                        ? nullptr
                        : TVMFFIEnvGetStream(device.device_type, device.device_id),
          .num_threads = static_cast<int>(num_threads),
          .workspace = scratch.take(workspace_bytes),
          .workspace_bytes = workspace_bytes};
}

// What the forward and the selection take from scratch memory. Each size is a check of the problem,
// so they are asked for once.
struct ForwardBytes {
  size_t tile_stats = 0;  // those that only the selection needs
  size_t forward = 0;
  size_t select = 0;

  static ForwardBytes of(const backlite::Problem& p, bool selects, bool record, int num_threads) {
    ForwardBytes bytes{.forward =
                           backlite::forward_workspace_bytes(p, selects || record, num_threads)};
    if (!selects) return bytes;
    bytes.select = backlite::select_workspace_bytes(p, num_threads);
    const int64_t tiles = p.batch * p.num_query_heads * query_tiles(p) * key_tiles(p);
    if (!record) bytes.tile_stats = static_cast<size_t>(tiles) * sizeof(float);
    return bytes;
  }
  size_t total() const { return aligned(tile_stats) + aligned(forward) + aligned(select); }
};

struct BackwardBytes {
  size_t schedule;
  size_t backward;

  static BackwardBytes of(const backlite::Problem& p, int num_threads) {
    return {.schedule = backlite::schedule_bytes(p),
            .backward = backlite::backward_workspace_bytes(p, num_threads)};
  }
  size_t total() const { return aligned(schedule) + aligned(backward); }
};

void run_select(const backlite::Problem& problem, const float* tile_stats, const TensorView& like,
                const TensorView& negl_prob, int32_t* tile_bits,
                const backlite::Execution& execution) {
  const backlite::SelectArgs args{
      .tile_stats = tile_stats,
      .negl_prob = data_of<const int64_t>(negl_prob),
      .num_negl_prob = resolve_negl_prob(negl_prob, like, problem.num_query_heads),
      .tile_bits = tile_bits};
  backlite::select(problem, args, execution);
}

// ---- Exported functions -----------------------------------------------------------------------

// The forward and, where tile_bits is given, the selection.
void forward(TensorView query, TensorView key, TensorView value, TensorView out, OptionalView lse,
             OptionalView tile_stats, OptionalView negl_prob, OptionalView tile_bits,
             OptionalView scratch_tensor, ffi::Optional<double> scale, bool causal,
             int64_t window_left, int64_t window_right, int64_t num_threads) {
  translate([&] {
    using backlite::ConstTensor;
    const backlite::Problem p = problem_of(query, key, scale, {causal, window_left, window_right});
    require_dense(lse, "lse", query, lse_dtype(p), {p.batch, p.num_query_heads, p.query_length});
    require_tile_stats(tile_stats, query, p);
    const bool selects = tile_bits.has_value();
    if (selects) require_tile_bits(tile_bits.value(), query, p);
    if (selects != negl_prob.has_value()) refuse("tile_bits and negl_prob come together");

    const bool record = tile_stats.has_value();
    const ForwardBytes bytes = ForwardBytes::of(p, selects, record, static_cast<int>(num_threads));
    Scratch scratch(scratch_tensor, query, bytes.total());
    float* const stats = record ? data_of<float>(tile_stats.value())
                                : static_cast<float*>(scratch.take(bytes.tile_stats));
    const backlite::ForwardArgs args{
        .query = view_of<ConstTensor>(query, "query", query, p.query_length, p.num_query_heads),
        .key = view_of<ConstTensor>(key, "key", query, p.key_length, p.num_key_heads),
        .value = view_of<ConstTensor>(value, "value", query, p.key_length, p.num_key_heads),
        .out = view_of<backlite::Tensor>(out, "out", query, p.query_length, p.num_query_heads),
        .lse = data_or_null<void>(lse),
        .tile_stats = stats};
    backlite::forward(p, args, execution_on(query, scratch, bytes.forward, num_threads));
    if (selects) {
      run_select(p, stats, query, negl_prob.value(), data_of<int32_t>(tile_bits.value()),
                 execution_on(query, scratch, bytes.select, num_threads));
    }
  });
}

// How many bytes scratch_tensor must have on CUDA, where forward() is given one; selects and record
// tell whether it is given tile_bits and tile_stats.
int64_t forward_scratch_bytes(TensorView query, TensorView key, bool selects, bool record) {
  return translate([&] {
    const backlite::Problem p = problem_of(query, key, {}, {false, -1, -1});
    return static_cast<int64_t>(ForwardBytes::of(p, selects, record, 1).total());
  });
}

void select(TensorView tile_stats, TensorView negl_prob, TensorView tile_bits, int64_t query_length,
            int64_t key_length, bool causal, int64_t window_left, int64_t window_right,
            int64_t num_threads) {
  translate([&] {
    if (tile_stats.ndim() != 4) refuse("tile_stats must have four dimensions");
    // The selection reads neither dtype nor head_dim; a pair that every backend knows will do.
    const backlite::Problem p{.device = device_of(tile_stats, "tile_stats"),
                              .dtype = backlite::DType::kBFloat16,
                              .batch = tile_stats.size(0),
                              .num_query_heads = tile_stats.size(1),
                              .num_key_heads = tile_stats.size(1),
                              .query_length = query_length,
                              .key_length = key_length,
                              .head_dim = 64,
                              .causal = causal,
                              .window_left = window_left,
                              .window_right = window_right};
    require_tile_stats(tile_stats, tile_stats, p);
    require_tile_bits(tile_bits, tile_stats, p);
    const size_t bytes = backlite::select_workspace_bytes(p, static_cast<int>(num_threads));
    Scratch scratch({}, tile_stats, aligned(bytes));
    run_select(p, data_of<const float>(tile_stats), tile_stats, negl_prob,
               data_of<int32_t>(tile_bits), execution_on(tile_stats, scratch, bytes, num_threads));
  });
}

// Schedule and backward.
void backward(TensorView grad_out, TensorView query, TensorView key, TensorView value,
              TensorView out, TensorView lse, OptionalView grad_lse, OptionalView tile_bits,
              TensorView grad_query, TensorView grad_key, TensorView grad_value,
              OptionalView scratch_tensor, ffi::Optional<double> scale, bool causal,
              int64_t window_left, int64_t window_right, int64_t num_threads) {
  translate([&] {
    using backlite::ConstTensor;
    const backlite::Problem p = problem_of(query, key, scale, {causal, window_left, window_right});
    const int64_t sq = p.query_length, sk = p.key_length;
    const int64_t hq = p.num_query_heads, hk = p.num_key_heads;
    require_dense(lse, "lse", query, lse_dtype(p), {p.batch, hq, sq});
    require_dense(grad_lse, "grad_lse", query, lse_dtype(p), {p.batch, hq, sq});
    if (tile_bits.has_value()) require_tile_bits(tile_bits.value(), query, p);
    const BackwardBytes bytes = BackwardBytes::of(p, static_cast<int>(num_threads));
    Scratch scratch(scratch_tensor, query, bytes.total());
    void* const schedule = scratch.take(bytes.schedule);
    const backlite::BackwardArgs args{
        .query = view_of<ConstTensor>(query, "query", query, sq, hq),
        .key = view_of<ConstTensor>(key, "key", query, sk, hk),
        .value = view_of<ConstTensor>(value, "value", query, sk, hk),
        .out = view_of<ConstTensor>(out, "out", query, sq, hq),
        .grad_out = view_of<ConstTensor>(grad_out, "grad_out", query, sq, hq),
        .lse = data_of<const void>(lse),
        .grad_lse = data_or_null<const void>(grad_lse),
        .tile_bits = data_or_null<const int32_t>(tile_bits),
        .schedule = schedule,
        .grad_query = view_of<backlite::Tensor>(grad_query, "grad_query", query, sq, hq),
        .grad_key = view_of<backlite::Tensor>(grad_key, "grad_key", query, sk, hk),
        .grad_value = view_of<backlite::Tensor>(grad_value, "grad_value", query, sk, hk)};
    const backlite::Execution execution = execution_on(query, scratch, bytes.backward, num_threads);
    backlite::schedule(
        p, {.tile_bits = args.tile_bits, .schedule = schedule, .schedule_bytes = bytes.schedule},
        execution);
    backlite::backward(p, args, execution);
  });
}

// How many bytes scratch_tensor must have on CUDA, where backward() is given one.
int64_t backward_scratch_bytes(TensorView query, TensorView key) {
  return translate([&] {
    const backlite::Problem p = problem_of(query, key, {}, {false, -1, -1});
    return static_cast<int64_t>(BackwardBytes::of(p, 1).total());
  });
}

ffi::String version() { return backlite::version(); }
ffi::String cpu_isa() {
  return translate([] { return ffi::String(backlite::cpu_isa()); });
}
int64_t max_table_heads() { return kMaxTableHeads; }
bool has_cuda() { return backlite::has_cuda(); }

}  // namespace
}  // namespace backlite_ffi

TVM_FFI_DLL_EXPORT_TYPED_FUNC(forward, backlite_ffi::forward);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(forward_scratch_bytes, backlite_ffi::forward_scratch_bytes);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(select, backlite_ffi::select);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(backward, backlite_ffi::backward);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(backward_scratch_bytes, backlite_ffi::backward_scratch_bytes);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(version, backlite_ffi::version);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(cpu_isa, backlite_ffi::cpu_isa);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(max_table_heads, backlite_ffi::max_table_heads);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(has_cuda, backlite_ffi::has_cuda);
