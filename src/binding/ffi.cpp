// The one place that knows the Python world: typed functions on DLPack views (apache-tvm-ffi),
// turned into backlite::Problem and the arguments of the four stages. Nothing but conversion.
//
// backlite::InvalidArgument becomes ValueError and backlite::NotSupported NotImplementedError.
// tvm-ffi releases the interpreter lock around each of these functions.
#include <backlite/backlite.h>
#include <sys/mman.h>
#include <tvm/ffi/error.h>
#include <tvm/ffi/function.h>
#include <tvm/ffi/string.h>

#include <cstdint>
#include <new>

#include "binding/conversions.h"

namespace backlite_ffi {
namespace {

constexpr size_t kAlignment = 64;

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

// Scratch memory of one call, aligned as the core asks. The allocator maps large blocks anew at
// each call, and a fresh page costs 1.7 us: 14 ms for 32 MiB, more than a sparse backward at 2k. In
// huge pages, where Linux has them, it is 3.5 ms.
class Workspace {
 public:
  explicit Workspace(size_t bytes)
      : bytes_(bytes),
        alignment_(bytes >= kHugePage ? kHugePage : kAlignment),
        data_(bytes == 0 ? nullptr : ::operator new(bytes, std::align_val_t{alignment_})) {
#if defined(MADV_HUGEPAGE)
    // Advice: where it is refused, ordinary pages serve.
    if (bytes >= kHugePage) madvise(data_, bytes, MADV_HUGEPAGE);
#endif
  }
  ~Workspace() { ::operator delete(data_, std::align_val_t{alignment_}); }
  Workspace(const Workspace&) = delete;
  Workspace& operator=(const Workspace&) = delete;

  void* data() const { return data_; }
  size_t bytes() const { return bytes_; }

 private:
  static constexpr size_t kHugePage = size_t{2} << 20;
  size_t bytes_;
  size_t alignment_;
  void* data_;
};

backlite::Execution execution_on(const Workspace& workspace, int64_t num_threads) {
  return {.stream = nullptr,
          .num_threads = static_cast<int>(num_threads),
          .workspace = workspace.data(),
          .workspace_bytes = workspace.bytes()};
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
    const backlite::Problem p = problem_of(query, key, scale, {causal, window_left, window_right});
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
        .tile_stats =
            own_stats ? static_cast<float*>(stats.data()) : data_or_null<float>(tile_stats)};
    const Workspace workspace(backlite::forward_workspace_bytes(p, args.tile_stats != nullptr,
                                                                static_cast<int>(num_threads)));
    backlite::forward(p, args, execution_on(workspace, num_threads));
    if (selects) {
      run_select(p, args.tile_stats, negl_prob.value(), data_of<int32_t>(tile_bits.value()),
                 num_threads);
    }
  });
}

void select(TensorView tile_stats, TensorView negl_prob, TensorView tile_bits, int64_t query_length,
            int64_t key_length, bool causal, int64_t window_left, int64_t window_right,
            int64_t num_threads) {
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
    const backlite::Problem p = problem_of(query, key, scale, {causal, window_left, window_right});
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
    const Workspace workspace(backlite::backward_workspace_bytes(p, static_cast<int>(num_threads)));
    const backlite::Execution execution = execution_on(workspace, num_threads);
    backlite::schedule(p, {.tile_bits = args.tile_bits, .schedule = schedule.data()}, execution);
    backlite::backward(p, args, execution);
  });
}

ffi::String version() { return backlite::version(); }
ffi::String cpu_isa() {
  return translate([] { return ffi::String(backlite::cpu_isa()); });
}
int64_t max_table_heads() { return kMaxTableHeads; }

}  // namespace
}  // namespace backlite_ffi

TVM_FFI_DLL_EXPORT_TYPED_FUNC(forward, backlite_ffi::forward);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(select, backlite_ffi::select);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(backward, backlite_ffi::backward);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(version, backlite_ffi::version);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(cpu_isa, backlite_ffi::cpu_isa);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(max_table_heads, backlite_ffi::max_table_heads);
