// Checks and times the Hopper select, schedule and backward without a framework.
//
//   backward_probe check [NAME]     dQ, dK and dV against float64, over odd shapes and random tiles
//   backward_probe select           tile bits against the rule applied on the host
//   backward_probe dense [D [S C]]  time and TFLOP/s over the shapes of docs/hopper-backward.md
//   backward_probe sparse [D [S DENSITY...]]  time of schedule and backward over densities
//   backward_probe masks FILE       the same with given tile bits: int32 [2 layers][8][64][4]
//   backward_probe once             a few small launches, for compute-sanitizer
//
// Build: see docs/hopper-backward.md. Inputs are random; outputs and workspaces are poisoned before
// every check.
#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "backlite/backlite.h"
#include "backward/launch_sm90.h"
#include "common/mask.h"
#include "forward/launch_sm90.h"
#include "probe.cuh"
#include "schedule/launch_sm90.h"
#include "schedule/layout_sm90.h"
#include "select/launch_sm90.h"
#include "sm90/math.cuh"

namespace {

using namespace backlite;
using sm90::BFloat16;
using sm90::Float16;

// ---- Reference: float64, a block of 128 threads a row ------------------------------------------

struct View {  // (batch, length, heads, head_dim)
  int64_t batch, length, head;
};

template <typename T>
struct Reference {
  Problem p;
  Mask mask;
  const T *q, *k, *v, *grad_out;
  View q_view, k_view;
  const float* grad_lse;      // [B, H, Sq] or nullptr
  const uint32_t* tile_bits;  // nullptr if dense
  T* out;                     // strides of q
  float* lse;                 // [B, H, Sq]
  double* exact_lse;
  double* delta;
  double *grad_q, *grad_k, *grad_v;  // contiguous, [B, H, Sq, D] and [B, Hk, Sk, D]

  __device__ const T* q_row(const T* x, int64_t b, int64_t h, int64_t i) const {
    return x + b * q_view.batch + i * q_view.length + h * q_view.head;
  }
  __device__ const T* k_row(const T* x, int64_t b, int64_t h, int64_t j) const {
    return x + b * k_view.batch + j * k_view.length + h * k_view.head;
  }
  __device__ double dot(const T* x, const T* y) const {
    double sum = 0;
    for (int64_t c = 0; c < p.head_dim; ++c) sum += double(float(x[c])) * double(float(y[c]));
    return sum;
  }
  __device__ bool sees(int64_t i, int64_t j) const {
    const Range r = mask.keys_of_row(i);
    return j >= r.begin && j < r.end;
  }
  __device__ bool is_live(int64_t b, int64_t h, int64_t i, int64_t j) const {
    if (tile_bits == nullptr) return true;
    const int64_t words = num_bit_words(p.query_length);
    const int64_t column = (b * p.num_query_heads + h) * num_key_tiles(p.key_length) + j / kKeyTile;
    return tile_bits[column * words + i / kQueryTile / 32] >> (i / kQueryTile % 32) & 1;
  }
};

constexpr int kRowThreads = 128;

template <typename T>
__global__ void reference_forward(Reference<T> r) {
  __shared__ double probs[kRowThreads];
  const Problem& p = r.p;
  const int64_t id = blockIdx.x, i = id % p.query_length, bh = id / p.query_length;
  const int64_t b = bh / p.num_query_heads, h = bh % p.num_query_heads;
  const int64_t hk = h / (p.num_query_heads / p.num_key_heads);
  const Range range = r.mask.keys_of_row(i);
  const T* query = r.q_row(r.q, b, h, i);
  const int t = threadIdx.x;
  double top = -INFINITY, sum = 0, out = 0;
  for (int pass = 0; pass < 2; ++pass) {
    for (int64_t begin = range.begin; begin < range.end; begin += kRowThreads) {
      const int64_t j = begin + t;
      const double s = j < range.end ? r.dot(query, r.k_row(r.k, b, hk, j)) * p.scale : -INFINITY;
      __syncthreads();
      probs[t] = pass == 0 ? s : exp(s - top);
      __syncthreads();
      for (int x = 0; x < kRowThreads && begin + x < range.end; ++x) {
        if (pass == 0) {
          top = fmax(top, probs[x]);
        } else {
          sum += probs[x];
          if (t < p.head_dim) out += probs[x] * double(float(r.k_row(r.v, b, hk, begin + x)[t]));
        }
      }
    }
  }
  out = range.empty() ? 0 : out / sum;
  __syncthreads();
  const T* grad = r.q_row(r.grad_out, b, h, i);
  probs[t] = t < p.head_dim ? out * double(float(grad[t])) : 0;
  if (t < p.head_dim) const_cast<T*>(r.q_row(r.out, b, h, i))[t] = T(float(out));
  __syncthreads();
  if (t == 0) {
    double delta = 0;
    for (int x = 0; x < kRowThreads; ++x) delta += probs[x];
    if (r.grad_lse != nullptr) delta -= r.grad_lse[id];
    const double lse = range.empty() ? -INFINITY : top + log(sum);
    r.delta[id] = delta;
    r.exact_lse[id] = lse;
    r.lse[id] = float(lse);
  }
}

template <typename T>
__global__ void reference_grad_query(Reference<T> r) {
  __shared__ double grads[kRowThreads];
  const Problem& p = r.p;
  const int64_t id = blockIdx.x, i = id % p.query_length, bh = id / p.query_length;
  const int64_t b = bh / p.num_query_heads, h = bh % p.num_query_heads;
  const int64_t hk = h / (p.num_query_heads / p.num_key_heads);
  const Range range = r.mask.keys_of_row(i);
  const int t = threadIdx.x;
  double sum = 0;
  for (int64_t begin = range.begin; begin < range.end; begin += kRowThreads) {
    const int64_t j = begin + t;
    double ds = 0;
    if (j < range.end && r.is_live(b, h, i, j)) {
      const double s = r.dot(r.q_row(r.q, b, h, i), r.k_row(r.k, b, hk, j)) * p.scale;
      const double dp = r.dot(r.q_row(r.grad_out, b, h, i), r.k_row(r.v, b, hk, j));
      ds = exp(s - r.exact_lse[id]) * (dp - r.delta[id]);
    }
    __syncthreads();
    grads[t] = ds;
    __syncthreads();
    for (int x = 0; x < kRowThreads && begin + x < range.end; ++x) {
      if (t < p.head_dim) sum += grads[x] * double(float(r.k_row(r.k, b, hk, begin + x)[t]));
    }
  }
  if (t < p.head_dim) r.grad_q[id * p.head_dim + t] = sum * p.scale;
}

template <typename T>
__global__ void reference_grad_key(Reference<T> r) {
  __shared__ double probs[kRowThreads];
  __shared__ double grads[kRowThreads];
  const Problem& p = r.p;
  const int64_t id = blockIdx.x, j = id % p.key_length, bh = id / p.key_length;
  const int64_t b = bh / p.num_key_heads, hk = bh % p.num_key_heads;
  const int64_t group = p.num_query_heads / p.num_key_heads;
  const int t = threadIdx.x;
  double key_sum = 0, value_sum = 0;
  for (int64_t h = hk * group; h < (hk + 1) * group; ++h) {
    for (int64_t begin = 0; begin < p.query_length; begin += kRowThreads) {
      const int64_t i = begin + t;
      double prob = 0, ds = 0;
      if (i < p.query_length && r.sees(i, j) && r.is_live(b, h, i, j)) {
        const int64_t row = (b * p.num_query_heads + h) * p.query_length + i;
        const double s = r.dot(r.q_row(r.q, b, h, i), r.k_row(r.k, b, hk, j)) * p.scale;
        const double dp = r.dot(r.q_row(r.grad_out, b, h, i), r.k_row(r.v, b, hk, j));
        prob = exp(s - r.exact_lse[row]);
        ds = prob * (dp - r.delta[row]);
      }
      __syncthreads();
      probs[t] = prob;
      grads[t] = ds;
      __syncthreads();
      for (int x = 0; x < kRowThreads && begin + x < p.query_length; ++x) {
        if (t >= p.head_dim) continue;
        value_sum += probs[x] * double(float(r.q_row(r.grad_out, b, h, begin + x)[t]));
        key_sum += grads[x] * double(float(r.q_row(r.q, b, h, begin + x)[t]));
      }
    }
  }
  if (t < p.head_dim) {
    r.grad_k[id * p.head_dim + t] = key_sum * p.scale;
    r.grad_v[id * p.head_dim + t] = value_sum;
  }
}

// ---- Cases -------------------------------------------------------------------------------------

struct Case {
  const char* name;
  int64_t batch, query_heads, key_heads, query_length, key_length, head_dim;
  bool causal = false;
  int64_t left = -1, right = -1;
  double density = -1.0;  // of random tile bits; negative: dense
  DType dtype = DType::kBFloat16;
  float factor = 1.0f;        // of Q and K
  double scale_factor = 1.0;  // of 1 / sqrt(D)
  int64_t padding = 0;        // extra elements between heads
  bool grad_lse = false;
};

template <typename T>
struct Data : DeviceArrays {
  Problem p;
  View q_view, k_view;
  BackwardArgs args;
  Execution execution;
  T *q, *k, *v, *o, *grad_o, *grad_q, *grad_k, *grad_v;
  int64_t q_count, k_count;
  float *lse, *grad_lse = nullptr;
  int32_t* bits = nullptr;
  void* schedule;

  explicit Data(const Case& c) : p(problem_of(c)) {
    const int64_t row = c.head_dim + c.padding;
    q_view = {row * c.query_heads * c.query_length, row * c.query_heads, row};
    k_view = {row * c.key_heads * c.key_length, row * c.key_heads, row};
    q_count = q_view.batch * c.batch;
    k_count = k_view.batch * c.batch;
    q = normal(q_count, 1, c.factor);
    k = normal(k_count, 2, c.factor);
    v = normal(k_count, 3, 1.0f);
    grad_o = normal(q_count, 4, 1.0f);
    o = own<T>(q_count);
    grad_q = own<T>(q_count);
    grad_k = own<T>(k_count);
    grad_v = own<T>(k_count);
    lse = own<float>(num_rows());
    if (c.grad_lse) {
      grad_lse = own<float>(num_rows());
      fill_normal<<<1024, 256>>>(grad_lse, num_rows(), 5, 1.0f);
    }
    REQUIRE(cudaGetLastError());
    if (c.density >= 0) set_random_bits(c.density);
    schedule = own<char>(schedule_sm90::schedule_bytes(p));
    execution.workspace_bytes = backward_sm90::workspace_bytes(p);
    execution.workspace = own<char>(execution.workspace_bytes);
    const auto query_side = [&](T* x) {
      return Tensor{x, q_view.batch, q_view.length, q_view.head};
    };
    const auto key_side = [&](T* x) { return Tensor{x, k_view.batch, k_view.length, k_view.head}; };
    const auto constant = [](const Tensor& x) {
      return ConstTensor{x.data, x.batch_stride, x.length_stride, x.head_stride};
    };
    args = {.query = constant(query_side(q)),
            .key = constant(key_side(k)),
            .value = constant(key_side(v)),
            .out = constant(query_side(o)),
            .grad_out = constant(query_side(grad_o)),
            .lse = lse,
            .grad_lse = grad_lse,
            .tile_bits = bits,
            .schedule = schedule,
            .grad_query = query_side(grad_q),
            .grad_key = key_side(grad_k),
            .grad_value = key_side(grad_v)};
  }
  int64_t num_rows() const { return p.batch * p.num_query_heads * p.query_length; }
  int64_t num_words() const {
    return p.batch * p.num_query_heads * num_key_tiles(p.key_length) *
           num_bit_words(p.query_length);
  }
  T* normal(int64_t count, int seed, float factor) {
    T* x = own<T>(count);
    fill_normal<<<1024, 256>>>(x, count, seed + 10 * p.query_length, factor);
    return x;
  }
  void set_bits(const std::vector<uint32_t>& words) {
    bits = own<int32_t>(num_words());
    REQUIRE(cudaMemcpy(bits, words.data(), num_words() * 4, cudaMemcpyHostToDevice));
    args.tile_bits = bits;
  }
  // Also outside the mask and past the last tile, which must not matter.
  void set_random_bits(double density) {
    std::mt19937_64 random(p.query_length);
    std::bernoulli_distribution live(density);
    std::vector<uint32_t> words(num_words());
    for (auto& word : words) {
      for (int bit = 0; bit < 32; ++bit) word |= uint32_t{live(random)} << bit;
    }
    set_bits(words);
  }
  void launch_schedule() {
    schedule_sm90::schedule(p, {.tile_bits = bits, .schedule = schedule}, execution);
  }
  void launch() { backward_sm90::backward(p, args, execution); }
  void forward() {
    ForwardArgs forward{.query = args.query,
                        .key = args.key,
                        .value = args.value,
                        .out = {o, q_view.batch, q_view.length, q_view.head},
                        .lse = lse};
    Execution e;
    e.workspace_bytes = forward_sm90::workspace_bytes(p, false);
    e.workspace = own<char>(e.workspace_bytes);
    forward_sm90::forward(p, forward, e);
  }
  void poison() {
    REQUIRE(cudaMemset(grad_q, 0xff, q_count * sizeof(T)));
    REQUIRE(cudaMemset(grad_k, 0xff, k_count * sizeof(T)));
    REQUIRE(cudaMemset(grad_v, 0xff, k_count * sizeof(T)));
    REQUIRE(cudaMemset(execution.workspace, 0xff, execution.workspace_bytes));
    REQUIRE(cudaMemset(schedule, 0xff, schedule_sm90::schedule_bytes(p)));
  }
};

// Relative L2 error; infinite if anything is not a number.
template <typename T>
double error_of(const T* device, int64_t count, const View& view, const double* reference,
                int64_t batch, int64_t heads, int64_t length, int64_t head_dim) {
  const auto got = to_host(device, count);
  const auto want = to_host(reference, batch * heads * length * head_dim);
  double error2 = 0, norm2 = 0;
  for (int64_t r = 0; r < batch * heads * length; ++r) {
    const int64_t at =
        r / length / heads * view.batch + r % length * view.length + r / length % heads * view.head;
    for (int64_t d = 0; d < head_dim; ++d) {
      const double x = want[r * head_dim + d];
      error2 += std::pow(float(got[at + d]) - x, 2);
      norm2 += x * x;
    }
  }
  const double error = norm2 > 0 ? std::sqrt(error2 / norm2) : std::sqrt(error2);
  return std::isfinite(error) ? error : INFINITY;
}

template <typename T>
bool check_case(const Case& c) {
  Data<T> data(c);
  const Problem& p = data.p;
  const int64_t q_rows = data.num_rows(), k_rows = p.batch * p.num_key_heads * p.key_length;
  Reference<T> r{.p = p,
                 .mask = Mask::of(p),
                 .q = data.q,
                 .k = data.k,
                 .v = data.v,
                 .grad_out = data.grad_o,
                 .q_view = data.q_view,
                 .k_view = data.k_view,
                 .grad_lse = data.grad_lse,
                 .tile_bits = reinterpret_cast<uint32_t*>(data.bits),
                 .out = data.o,
                 .lse = data.lse,
                 .exact_lse = data.template own<double>(q_rows),
                 .delta = data.template own<double>(q_rows),
                 .grad_q = data.template own<double>(q_rows * p.head_dim),
                 .grad_k = data.template own<double>(k_rows * p.head_dim),
                 .grad_v = data.template own<double>(k_rows * p.head_dim)};
  if (q_rows > 0) {
    reference_forward<<<q_rows, kRowThreads>>>(r);
    reference_grad_query<<<q_rows, kRowThreads>>>(r);
  }
  if (k_rows > 0) reference_grad_key<<<k_rows, kRowThreads>>>(r);
  REQUIRE(cudaDeviceSynchronize());
  data.poison();
  data.launch_schedule();
  data.launch();
  REQUIRE(cudaDeviceSynchronize());
  const double dq = error_of(data.grad_q, data.q_count, data.q_view, r.grad_q, p.batch,
                             p.num_query_heads, p.query_length, p.head_dim);
  const double dk = error_of(data.grad_k, data.k_count, data.k_view, r.grad_k, p.batch,
                             p.num_key_heads, p.key_length, p.head_dim);
  const double dv = error_of(data.grad_v, data.k_count, data.k_view, r.grad_v, p.batch,
                             p.num_key_heads, p.key_length, p.head_dim);
  const double bound = 2 * (c.dtype == DType::kBFloat16 ? 0x1p-8 : 0x1p-11);
  const bool ok = dq < bound && dk < bound && dv < bound;
  std::printf("%-30s dQ %.1e dK %.1e dV %.1e %s\n", c.name, dq, dk, dv, ok ? "RIGHT" : "WRONG");
  std::fflush(stdout);
  return ok;
}

bool check(const Case& c) {
  return c.dtype == DType::kBFloat16 ? check_case<BFloat16>(c) : check_case<Float16>(c);
}

const Case kCases[] = {
    {"one tile", 1, 1, 1, 64, 128, 128},
    {"two query tiles", 1, 1, 1, 128, 128, 128},
    {"many tiles", 2, 2, 2, 512, 1024, 128},
    {"causal", 2, 2, 2, 512, 512, 128, true},
    {"causal odd", 1, 3, 3, 1000, 1000, 128, true},
    {"ragged", 2, 2, 2, 77, 333, 128},
    {"one row", 3, 2, 2, 1, 17, 128},
    {"more queries, causal", 1, 2, 2, 256, 128, 128, true},
    {"more keys, causal", 1, 2, 2, 100, 300, 128, true},
    {"no keys", 1, 2, 2, 100, 0, 128},
    {"no queries", 1, 2, 2, 0, 300, 128},
    {"gqa causal", 2, 8, 2, 300, 300, 128, true},
    {"gqa full", 1, 6, 2, 200, 500, 128},
    {"window 17,0", 1, 2, 2, 1000, 1000, 128, false, 17, 0},
    {"window 300,40", 1, 2, 2, 1000, 900, 128, false, 300, 40},
    {"window 256,-1", 1, 2, 2, 500, 900, 128, false, 256, -1},
    {"window 0,0", 1, 2, 2, 500, 300, 128, false, 0, 0},
    {"window 128,0 causal", 1, 2, 2, 700, 700, 128, true, 128, 0},
    {"strided, dLSE", 2, 3, 3, 200, 200, 128, true, -1, -1, -1, DType::kBFloat16, 1, 1, 8, true},
    {"fp16", 1, 2, 2, 512, 512, 128, true, -1, -1, -1, DType::kFloat16, 1, 1, 0, true},
    {"fp16 x4", 1, 2, 2, 512, 512, 128, true, -1, -1, -1, DType::kFloat16, 4},
    {"bf16 x3", 1, 2, 2, 512, 512, 128, false, -1, -1, -1, DType::kBFloat16, 3},
    {"negative scale", 1, 2, 2, 300, 300, 128, true, -1, -1, -1, DType::kBFloat16, 1, -1},
    {"scale 0", 1, 2, 2, 300, 300, 128, true, -1, -1, -1, DType::kBFloat16, 1, 0},
    {"50% live", 2, 2, 2, 1024, 1024, 128, false, -1, -1, 0.5},
    {"20% live causal", 2, 2, 2, 1500, 1500, 128, true, -1, -1, 0.2},
    {"10% live gqa", 1, 8, 2, 2500, 1000, 128, false, -1, -1, 0.1},
    {"2% live", 1, 2, 2, 2000, 2000, 128, false, -1, -1, 0.02},
    {"none live", 1, 2, 2, 300, 300, 128, false, -1, -1, 0.0},
    {"all live", 1, 2, 2, 700, 700, 128, true, -1, -1, 1.0},
    {"30% live window", 1, 2, 2, 1500, 1300, 128, false, 400, 100, 0.3},
    {"gqa 30% live, split", 1, 8, 1, 4096, 512, 128, false, -1, -1, 0.3},
    {"many items", 4, 16, 16, 1024, 1024, 128, true},
    {"long causal", 1, 2, 2, 4096, 4096, 128, true},
    {"64 one tile", 1, 1, 1, 64, 128, 64},
    {"64 many tiles", 2, 2, 2, 512, 1024, 64},
    {"64 causal odd", 1, 3, 3, 1000, 1000, 64, true},
    {"64 ragged", 2, 2, 2, 77, 333, 64},
    {"64 gqa causal", 2, 8, 2, 300, 300, 64, true},
    {"64 window 300,40", 1, 2, 2, 1000, 900, 64, false, 300, 40},
    {"64 fp16", 1, 2, 2, 512, 512, 64, true, -1, -1, -1, DType::kFloat16, 2},
    {"64 20% live causal", 2, 2, 2, 1500, 1500, 64, true, -1, -1, 0.2},
    {"64 10% live gqa", 1, 8, 2, 2500, 1000, 64, false, -1, -1, 0.1},
    // Enough heads that the last pass begins beside the columns, eight tiles a block.
    {"beside, dense", 16, 16, 16, 600, 640, 128, true},
    {"beside, 20% live", 16, 16, 16, 600, 640, 128, false, -1, -1, 0.2},
    {"beside, 50% live", 8, 16, 16, 1300, 1300, 128, false, -1, -1, 0.5},
    {"beside, heads with none live", 16, 16, 16, 600, 640, 128, false, -1, -1, 0.01},
    {"beside, gqa 50% live", 16, 32, 16, 300, 640, 128, false, -1, -1, 0.5},
    {"64 beside, 30% live", 16, 16, 16, 600, 640, 64, false, -1, -1, 0.3},
    {"empty batch", 0, 2, 2, 100, 100, 128},
};

// ---- Select ------------------------------------------------------------------------------------

struct SelectCase {
  const char* name;
  int64_t heads, query_length, key_length;
  bool causal;
  int levels;  // how many different probabilities: few make ties
};

bool check_select(const SelectCase& c) {
  Problem p{.device = Device::kCuda,
            .dtype = DType::kBFloat16,
            .batch = 1,
            .num_query_heads = c.heads,
            .num_key_heads = c.heads,
            .query_length = c.query_length,
            .key_length = c.key_length,
            .head_dim = 128,
            .causal = c.causal};
  const int64_t rows = num_query_tiles(c.query_length), columns = num_key_tiles(c.key_length);
  const int64_t words = num_bit_words(c.query_length);
  const Mask mask = Mask::of(p);
  std::mt19937_64 random(c.query_length + c.key_length);
  std::vector<float> stats(c.heads * rows * columns, 0.0f);
  for (int64_t r = 0; r < c.heads * rows; ++r) {
    const Range allowed = mask.key_tiles(r % rows);
    double sum = 0;
    std::vector<double> x(columns);
    for (int64_t n = allowed.begin; n < allowed.end; ++n) {
      const double u = double(random() % c.levels + 1) / c.levels;
      x[n] = std::pow(u, 6);
      sum += x[n];
    }
    for (int64_t n = allowed.begin; n < allowed.end; ++n) {
      stats[r * columns + n] = float(x[n] / sum);
    }
  }
  std::vector<int64_t> negl(c.heads);
  const double probs[] = {0.05, 0.0, 0.2, 0.999999, 0.5, 1e-9};
  for (int64_t h = 0; h < c.heads; ++h) negl[h] = int64_t(probs[h % 6] * double(kProbOne));

  std::vector<uint32_t> want(c.heads * columns * words, 0);
  for (int64_t r = 0; r < c.heads * rows; ++r) {
    const Range allowed = mask.key_tiles(r % rows);
    if (allowed.empty()) continue;
    std::vector<std::pair<int64_t, int64_t>> order;
    for (int64_t n = allowed.begin; n < allowed.end; ++n) {
      order.emplace_back(int64_t(double(stats[r * columns + n]) * double(kProbOne)), n);
    }
    std::sort(order.begin(), order.end());
    size_t live = 0;
    int64_t skipped = 0;
    while (live + 1 < order.size()) {
      skipped += order[live].first;
      if (skipped >= negl[r / rows]) break;
      ++live;
    }
    for (; live < order.size(); ++live) {
      const int64_t m = r % rows;
      want[(r / rows * columns + order[live].second) * words + m / 32] |= 1u << (m % 32);
    }
  }

  float* device_stats;
  int64_t* device_negl;
  int32_t* bits;
  REQUIRE(cudaMalloc(&device_stats, stats.size() * 4));
  REQUIRE(cudaMalloc(&device_negl, negl.size() * 8));
  REQUIRE(cudaMalloc(&bits, want.size() * 4));
  REQUIRE(cudaMemcpy(device_stats, stats.data(), stats.size() * 4, cudaMemcpyHostToDevice));
  REQUIRE(cudaMemcpy(device_negl, negl.data(), negl.size() * 8, cudaMemcpyHostToDevice));
  REQUIRE(cudaMemset(bits, 0xff, want.size() * 4));
  select_sm90::select(p,
                      {.tile_stats = device_stats,
                       .negl_prob = device_negl,
                       .num_negl_prob = c.heads,
                       .tile_bits = bits},
                      {});
  REQUIRE(cudaDeviceSynchronize());
  const auto got = to_host(bits, want.size());
  int64_t wrong = 0;
  for (size_t i = 0; i < want.size(); ++i) wrong += uint32_t(got[i]) != want[i];
  std::printf("select %-24s %lld of %zu words differ %s\n", c.name, (long long)wrong, want.size(),
              wrong == 0 ? "RIGHT" : "WRONG");
  std::fflush(stdout);
  for (void* x : {(void*)device_stats, (void*)device_negl, (void*)bits}) REQUIRE(cudaFree(x));
  return wrong == 0;
}

const SelectCase kSelectCases[] = {
    {"one tile", 6, 64, 128, false, 1000},    {"8k causal", 6, 8192, 8192, true, 1 << 30},
    {"8k ties", 6, 8192, 8192, false, 3},     {"all equal", 6, 1000, 5000, false, 1},
    {"32k", 6, 4096, 32768, false, 1 << 30},  {"odd", 7, 3001, 20001, true, 50},
    {"200k", 6, 640, 200000, false, 1 << 20}, {"2M", 6, 128, 2097152, false, 1 << 20},
};

// ---- Times -------------------------------------------------------------------------------------

constexpr Timing kTiming{.rounds = 4, .warm_ms = 100.0f, .max_launches = 400};

double dense_flops(const Problem& p) {
  return 10.0 * p.batch * p.num_query_heads * double(p.query_length) * p.key_length * p.head_dim *
         (p.causal ? 0.5 : 1.0);
}

void time_dense(int64_t head_dim, int64_t length, bool causal) {
  const int64_t heads = 2048 / head_dim;
  Data<BFloat16> data({"", 32768 / length, heads, heads, length, length, head_dim, causal});
  data.forward();
  data.launch_schedule();
  const auto ms = time_ms(kTiming, [&] { data.launch(); }, [&] { data.launch_schedule(); });
  std::printf("DENSE d%lld S%lld %s: %.4f ms %.1f TFLOP/s, schedule %.4f ms\n", (long long)head_dim,
              (long long)length, causal ? "causal" : "full", ms[0],
              dense_flops(data.p) / ms[0] * 1e-9, ms[1]);
  std::fflush(stdout);
}

void time_sparse(int64_t head_dim, int64_t length, const std::vector<double>& densities) {
  const int64_t heads = 2048 / head_dim;
  Data<BFloat16> data({"", 32768 / length, heads, heads, length, length, head_dim});
  data.forward();
  data.launch_schedule();
  const double dense = time_ms(kTiming, [&] { data.launch(); })[0];
  for (const double density : densities) {
    data.set_random_bits(density);
    data.launch_schedule();
    const auto ms = time_ms(kTiming, [&] { data.launch(); }, [&] { data.launch_schedule(); });
    std::printf(
        "SPARSE d%lld S%lld %.2f: %.4f ms, of own dense (%.4f) %.4f, over density %.3f, "
        "schedule %.4f ms\n",
        (long long)head_dim, (long long)length, density, ms[0], dense, ms[0] / dense,
        ms[0] / dense / density, ms[1]);
    std::fflush(stdout);
  }
}

// Milliseconds a launch, of many in one graph: without what the host costs.
template <typename Launch>
double time_in_graph(const Launch& launch) {
  constexpr int kLaunches = 50;
  cudaStream_t stream;
  REQUIRE(cudaStreamCreate(&stream));
  Execution execution;
  execution.stream = stream;
  REQUIRE(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
  for (int i = 0; i < kLaunches; ++i) launch(execution);
  cudaGraph_t graph;
  REQUIRE(cudaStreamEndCapture(stream, &graph));
  cudaGraphExec_t executable;
  REQUIRE(cudaGraphInstantiate(&executable, graph, 0));
  REQUIRE(cudaDeviceSynchronize());
  const double ms = time_ms(kTiming, [&] { REQUIRE(cudaGraphLaunch(executable, nullptr)); })[0];
  REQUIRE(cudaGraphExecDestroy(executable));
  REQUIRE(cudaGraphDestroy(graph));
  REQUIRE(cudaStreamDestroy(stream));
  return ms / kLaunches;
}

void time_select(int64_t batch, int64_t heads, int64_t length) {
  Problem p{.device = Device::kCuda,
            .dtype = DType::kBFloat16,
            .batch = batch,
            .num_query_heads = heads,
            .num_key_heads = heads,
            .query_length = length,
            .key_length = length,
            .head_dim = 128};
  const int64_t count = batch * heads * num_query_tiles(length) * num_key_tiles(length);
  float* stats;
  int64_t* negl;
  int32_t* bits;
  REQUIRE(cudaMalloc(&stats, count * 4));
  REQUIRE(cudaMalloc(&negl, 8));
  REQUIRE(cudaMalloc(&bits, count));
  fill_normal<<<1024, 256>>>(stats, count, 9, 0.5f / float(num_key_tiles(length)));
  const int64_t value = int64_t(0.05 * double(kProbOne));
  REQUIRE(cudaMemcpy(negl, &value, 8, cudaMemcpyHostToDevice));
  const SelectArgs args{
      .tile_stats = stats, .negl_prob = negl, .num_negl_prob = 1, .tile_bits = bits};
  void* schedule;
  REQUIRE(cudaMalloc(&schedule, schedule_sm90::schedule_bytes(p)));
  const auto select = [&](const Execution& e) { select_sm90::select(p, args, e); };
  const auto plan = [&](const Execution& e) {
    schedule_sm90::schedule(p, {.tile_bits = bits, .schedule = schedule}, e);
  };
  const auto both = [&](const Execution& e) {
    select(e);
    plan(e);
  };
  const auto ms = time_ms(kTiming, [&] { select({}); }, [&] { plan({}); }, [&] { both({}); });
  std::printf("SELECT B%lld H%lld S%lld: alone %.4f ms, schedule %.4f, both %.4f; in a graph",
              (long long)batch, (long long)heads, (long long)length, ms[0], ms[1], ms[2]);
  std::printf(" %.4f, %.4f, %.4f\n", time_in_graph(select), time_in_graph(plan),
              time_in_graph(both));
  for (void* x : {(void*)stats, (void*)negl, (void*)bits, schedule}) REQUIRE(cudaFree(x));
}

void time_masks(const char* file) {
  constexpr int64_t kHeads = 8, kColumns = 64, kWords = 4, kLength = 8192, kAllowed = 4160;
  std::vector<uint32_t> all(2 * kHeads * kColumns * kWords);
  std::ifstream(file, std::ios::binary)
      .read(reinterpret_cast<char*>(all.data()), std::streamsize(all.size() * 4));
  for (const int64_t batch : {4, 1}) {
    Data<BFloat16> data({"", batch, kHeads, kHeads, kLength, kLength, 128, true});
    data.forward();
    data.launch_schedule();
    const double dense = time_ms(kTiming, [&] { data.launch(); })[0];
    for (int layer = 0; layer < 2; ++layer) {
      std::vector<uint32_t> words;
      int64_t live = 0;
      for (int64_t b = 0; b < batch; ++b) {
        const auto begin = all.begin() + layer * kHeads * kColumns * kWords;
        words.insert(words.end(), begin, begin + kHeads * kColumns * kWords);
      }
      for (const uint32_t word : words) live += __builtin_popcount(word);
      data.set_bits(words);
      data.launch_schedule();
      const auto ms = time_ms(kTiming, [&] { data.launch(); }, [&] { data.launch_schedule(); });
      const double density = double(live) / double(kAllowed * kHeads * batch);
      std::printf(
          "MASK layer %d batch %lld density %.4f: %.4f ms, own dense %.4f, over density "
          "%.3f, schedule %.4f ms\n",
          layer, (long long)batch, density, ms[0], dense, ms[0] / dense / density, ms[1]);
      std::fflush(stdout);
    }
  }
}

}  // namespace

int main(int argc, char** argv) {
  const std::string mode = argc > 1 ? argv[1] : "check";
  const auto number = [&](int i, int64_t otherwise) {
    return argc > i ? std::atoll(argv[i]) : otherwise;
  };
  int wrong = 0;
  if (mode == "check") {
    for (const Case& c : kCases) {
      if (argc > 2 && std::string(c.name).find(argv[2]) == std::string::npos) continue;
      wrong += !check(c);
    }
    std::printf("%d wrong\n", wrong);
  } else if (mode == "select") {
    for (const SelectCase& c : kSelectCases) wrong += !check_select(c);
    std::printf("%d wrong\n", wrong);
    time_select(1, 8, 8192);
    time_select(4, 16, 8192);
    time_select(1, 16, 32768);
  } else if (mode == "once") {
    wrong += !check({"", 1, 2, 1, 500, 300, 128, true});
    wrong += !check({"", 1, 2, 1, 500, 300, 64, false, -1, -1, 0.3});
  } else if (mode == "masks") {
    time_masks(argv[2]);
  } else if (mode == "sparse") {
    std::vector<double> densities;
    for (int i = 4; i < argc; ++i) densities.push_back(std::atof(argv[i]));
    if (densities.empty()) densities = {1.0, 0.5, 0.25, 0.1, 0.05};
    for (const int64_t length : {2048, 8192, 32768}) {
      if (argc > 3 && length != number(3, 0)) continue;
      time_sparse(number(2, 128), length, densities);
    }
  } else if (argc > 4) {
    time_dense(number(2, 128), number(3, 8192), number(4, 0) != 0);
  } else {
    for (const int64_t length : {2048, 8192, 16384, 32768}) {
      for (const bool causal : {false, true}) time_dense(number(2, 128), length, causal);
    }
  }
  return wrong != 0;
}
