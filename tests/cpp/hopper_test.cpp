// The four stages on a Hopper GPU, through the public header, against the CPU backend: in float64
// it gives the truth, in the same dtype the yardstick.
#include <cuda_runtime_api.h>

#include <boost/test/data/test_case.hpp>
#include <boost/test/unit_test.hpp>
#include <cstdio>

#include "cases.h"
#include "compare.h"
#include "stages.h"

using namespace backlite;
using namespace backlite::test;

namespace {

boost::test_tools::assertion_result has_hopper(boost::unit_test::test_unit_id) {
  int num_devices = 0, major = 0;
  if (cudaGetDeviceCount(&num_devices) == cudaSuccess && num_devices > 0) {
    cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, 0);
  }
  if (major != 9) std::fprintf(stderr, "skipped: no Hopper GPU\n");  // CTest looks for it
  return major == 9;
}

void check_cuda(cudaError_t error) {
  require(error == cudaSuccess, std::string("CUDA: ") + cudaGetErrorString(error));
}

// Memory of the GPU that starts with the contents of host memory, and goes back there on demand.
class OnGpu {
 public:
  OnGpu(const void* host, size_t bytes) : host_(const_cast<void*>(host)), bytes_(bytes) {
    check_cuda(cudaMalloc(&data_, std::max<size_t>(bytes, 1)));
    check_cuda(cudaMemcpy(data_, host, bytes, cudaMemcpyHostToDevice));
  }
  template <typename T>
  explicit OnGpu(const std::vector<T>& host) : OnGpu(host.data(), host.size() * sizeof(T)) {}
  explicit OnGpu(const Strided& host) : OnGpu(host.bytes().data(), host.bytes().size()) {}
  explicit OnGpu(const Bytes& host) : OnGpu(host.data(), host.size()) {}
  OnGpu(const OnGpu&) = delete;
  OnGpu& operator=(const OnGpu&) = delete;
  ~OnGpu() { cudaFree(data_); }

  void fetch() { check_cuda(cudaMemcpy(host_, data_, bytes_, cudaMemcpyDeviceToHost)); }
  template <typename T = void>
  T* data() const {
    return static_cast<T*>(data_);
  }
  // `tensor` of the host, here.
  template <typename AnyTensor>
  AnyTensor here(AnyTensor tensor) const {
    tensor.data = data_;
    return tensor;
  }

 private:
  void* host_;
  void* data_ = nullptr;
  size_t bytes_;
};

// Poisoned memory of the GPU for one stage.
struct GpuWorkspace {
  Bytes poison;
  OnGpu memory;
  explicit GpuWorkspace(size_t bytes) : poison(bytes), memory(poison) {}
  Execution execution() const {
    return {.workspace = memory.data(), .workspace_bytes = poison.size()};
  }
};

// The stages on the GPU; every result is in the memory of `s` afterwards.
void run_on_gpu(Stages& s, int64_t negl_prob) {
  Problem problem = s.problem;
  problem.device = Device::kCuda;
  const OnGpu query(s.query), key(s.key), value(s.value), grad_out(s.grad_out),
      grad_lse(s.grad_lse), threshold(std::vector{negl_prob});
  OnGpu out(s.out), lse(s.lse), stats(s.tile_stats), bits(s.tile_bits);
  OnGpu grad_query(s.grad_query), grad_key(s.grad_key), grad_value(s.grad_value);

  const bool records = !s.tile_stats.empty();
  const GpuWorkspace forward_space(forward_workspace_bytes(problem, records, 1));
  forward(problem,
          {.query = query.here(s.query.input()),
           .key = key.here(s.key.input()),
           .value = value.here(s.value.input()),
           .out = out.here(s.out.output()),
           .lse = lse.data(),
           .tile_stats = records ? stats.data<float>() : nullptr},
          forward_space.execution());

  const GpuWorkspace select_space(select_workspace_bytes(problem, 1));
  select(problem,
         {.tile_stats = stats.data<float>(),
          .negl_prob = threshold.data<int64_t>(),
          .num_negl_prob = 1,
          .tile_bits = bits.data<int32_t>()},
         select_space.execution());

  const int32_t* const live = s.tile_bits.empty() ? nullptr : bits.data<int32_t>();
  const GpuWorkspace plan(schedule_bytes(problem));
  schedule(
      problem,
      {.tile_bits = live, .schedule = plan.memory.data(), .schedule_bytes = plan.poison.size()},
      {});

  const GpuWorkspace backward_space(backward_workspace_bytes(problem, 1));
  backward(problem,
           {.query = query.here(s.query.input()),
            .key = key.here(s.key.input()),
            .value = value.here(s.value.input()),
            .out = out.here(s.out.input()),
            .grad_out = grad_out.here(s.grad_out.input()),
            .lse = lse.data(),
            .grad_lse = grad_lse.data(),
            .tile_bits = live,
            .schedule = plan.memory.data(),
            .grad_query = grad_query.here(s.grad_query.output()),
            .grad_key = grad_key.here(s.grad_key.output()),
            .grad_value = grad_value.here(s.grad_value.output())},
           backward_space.execution());

  for (OnGpu* result : {&out, &lse, &stats, &bits, &grad_query, &grad_key, &grad_value}) {
    result->fetch();
  }
}

std::vector<Case> gpu_cases() {
  constexpr DType f16 = DType::kFloat16, bf16 = DType::kBFloat16;
  return {
      {.id = "groups",
       .dtype = bf16,
       .batch = 2,
       .heads = 4,
       .key_heads = 2,
       .query_length = 300,
       .key_length = 500,
       .head_dim = 128,
       .causal = true,
       .magnitude = 1.5},
      {.id = "windows",
       .dtype = f16,
       .query_length = 450,
       .key_length = 450,
       .head_dim = 64,
       .window_left = 100,
       .window_right = 20},
      {.id = "full", .dtype = bf16, .query_length = 200, .key_length = 333, .head_dim = 64},
      {.id = "rows_without_keys",
       .dtype = f16,
       .query_length = 300,
       .key_length = 130,
       .head_dim = 128,
       .causal = true},
      {.id = "no_key", .dtype = bf16, .query_length = 100, .key_length = 0, .head_dim = 128},
      {.id = "no_query", .dtype = bf16, .query_length = 0, .key_length = 100, .head_dim = 64},
  };
}

}  // namespace

BOOST_AUTO_TEST_SUITE(hopper, *boost::unit_test::precondition(has_hopper))

BOOST_DATA_TEST_CASE(all_stages_match_the_cpu, boost::unit_test::data::make(gpu_cases()),
                     test_case) {
  const int64_t negl_prob = negl_prob_to_fixed(0.1);
  Stages gpu(test_case);
  run_on_gpu(gpu, negl_prob);

  Case in_double = test_case;
  in_double.dtype = DType::kFloat64;
  Stages truth(in_double), plain(test_case);
  for (const auto tensor :
       {&Stages::query, &Stages::key, &Stages::value, &Stages::grad_out, &Stages::grad_lse}) {
    (truth.*tensor).fill((gpu.*tensor).read());
  }
  for (Stages* cpu : {&truth, &plain}) {
    cpu->run_forward();
    // The GPU's own live tiles.
    cpu->tile_bits = gpu.tile_bits;
    cpu->run_backward(true, true);
  }
  const auto check = [&](const char* name, DType dtype, Strided Stages::* tensor) {
    const std::string fault =
        compare(name, dtype, (gpu.*tensor).read(), (truth.*tensor).read(), (plain.*tensor).read());
    BOOST_CHECK_MESSAGE(fault.empty(), fault);
  };
  check("out", test_case.dtype, &Stages::out);
  check("lse", DType::kFloat32, &Stages::lse);
  check("grad_query", test_case.dtype, &Stages::grad_query);
  check("grad_key", test_case.dtype, &Stages::grad_key);
  check("grad_value", test_case.dtype, &Stages::grad_value);

  for (size_t i = 0; i < truth.tile_stats.size(); ++i) {
    const double p = gpu.tile_stats[i], expected = truth.tile_stats[i];
    BOOST_CHECK_MESSAGE(std::abs(p - expected) <= 1e-2 * expected + 1e-8,
                        "tile_stats[" << i << "] = " << p << ", the truth is " << expected);
  }
  // From the same statistics the CPU selects the same tiles, bit by bit.
  plain.tile_stats = gpu.tile_stats;
  plain.run_select({negl_prob});
  BOOST_TEST(plain.tile_bits == gpu.tile_bits, boost::test_tools::per_element());
}

BOOST_AUTO_TEST_SUITE_END()
