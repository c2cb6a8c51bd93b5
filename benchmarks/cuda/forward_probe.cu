// Checks and times the Hopper forward without a framework.
//
//   forward_probe check           O, LSE and tile statistics against float64, over odd shapes
//   forward_probe time            TFLOP/s over the shapes of docs/hopper-forward.md
//   forward_probe time D [S C]    only head dim D, or one shape: sequence length, causal (0 or 1)
//   forward_probe other [D]       windows, grouped heads, few items, odd lengths
//   forward_probe repeat          200 launches, bitwise equal
//   forward_probe once            a few small launches, for compute-sanitizer
//
// Build: see docs/hopper-forward.md. Inputs are random; outputs are poisoned before every check.
#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "backlite/backlite.h"
#include "common/mask.h"
#include "forward/launch_sm90.h"
#include "forward_data.cuh"
#include "probe.cuh"
#include "sm90/math.cuh"

namespace {

using backlite::ceil_div;
using backlite::DType;
using backlite::ForwardArgs;
using backlite::Mask;
using backlite::Problem;
using backlite::Range;
using backlite::sm90::BFloat16;
using backlite::sm90::Float16;

// One block per sampled (batch, head, row): softmax over its keys in float64.
struct Reference {
  double* out;     // [rows, D]
  double* lse;     // [rows]
  double* masses;  // [rows, Tn]
};

template <typename Element>
__global__ void reference_rows(const Problem p, const Mask mask, const Element* q, const Element* k,
                               const Element* v, const int64_t q_strides[3],
                               const int64_t k_strides[3], const int64_t* rows, double* scratch,
                               Reference ref) {
  __shared__ double partial[256];
  const int64_t id = rows[blockIdx.x];  // (b * H + h) * Sq + i
  const int64_t i = id % p.query_length;
  const int64_t h = id / p.query_length % p.num_query_heads;
  const int64_t b = id / p.query_length / p.num_query_heads;
  const int64_t hk = h / (p.num_query_heads / p.num_key_heads);
  const Element* query = q + b * q_strides[0] + i * q_strides[1] + h * q_strides[2];
  const Element* keys = k + b * k_strides[0] + hk * k_strides[2];
  const Element* values = v + b * k_strides[0] + hk * k_strides[2];
  const Range range = mask.keys_of_row(i);
  const int64_t tiles = backlite::num_key_tiles(p.key_length);
  double* probs = scratch + blockIdx.x * p.key_length;
  const auto all_reduce = [&](double x, bool maximum) {
    __syncthreads();
    partial[threadIdx.x] = x;
    __syncthreads();
    double result = partial[0];
    for (int t = 1; t < 256; ++t) {
      result = maximum ? fmax(result, partial[t]) : result + partial[t];
    }
    return result;
  };
  double top = -INFINITY;
  for (int64_t j = range.begin + threadIdx.x; j < range.end; j += 256) {
    double s = 0;
    for (int64_t c = 0; c < p.head_dim; ++c) {
      s += double(float(query[c])) * double(float(keys[j * k_strides[1] + c]));
    }
    probs[j] = s * p.scale;
    top = fmax(top, probs[j]);
  }
  top = all_reduce(top, true);
  double sum = 0;
  for (int64_t j = range.begin + threadIdx.x; j < range.end; j += 256) {
    probs[j] = exp(probs[j] - top);
    sum += probs[j];
  }
  sum = all_reduce(sum, false);
  for (int64_t n = threadIdx.x; n < tiles; n += 256) {
    double mass = 0;
    for (int64_t j = max(n * 128, range.begin); j < min((n + 1) * 128, range.end); ++j) {
      mass += probs[j];
    }
    ref.masses[blockIdx.x * tiles + n] = range.empty() ? 0 : mass / sum;
  }
  for (int64_t c = threadIdx.x; c < p.head_dim; c += 256) {
    double o = 0;
    for (int64_t j = range.begin; j < range.end; ++j) {
      o += probs[j] * double(float(values[j * k_strides[1] + c]));
    }
    ref.out[blockIdx.x * p.head_dim + c] = range.empty() ? 0 : o / sum;
  }
  if (threadIdx.x == 0) ref.lse[blockIdx.x] = range.empty() ? -INFINITY : top + log(sum);
}

template <typename Element>
struct Launched : Data<Element> {
  explicit Launched(const Case& c)
      : Data<Element>(c, backlite::forward_sm90::workspace_bytes(problem_of(c), true)) {}
  void launch(bool record) {
    backlite::forward_sm90::forward(this->problem, this->args_of(record), this->execution);
  }
};

bool is_poison(float x) { return std::isnan(x); }

template <typename Element>
bool check_case(const Case& c) {
  Launched<Element> data(c);
  const Problem& p = data.problem;
  const int64_t tiles = backlite::num_key_tiles(p.key_length);
  const int64_t query_tiles = backlite::num_query_tiles(p.query_length);
  const int64_t total = data.num_rows();

  // All rows, or whole query tiles from the start, the end and in between.
  std::vector<int64_t> rows;
  if (total <= c.max_rows) {
    for (int64_t r = 0; r < total; ++r) rows.push_back(r);
  } else {
    const int64_t heads = p.batch * p.num_query_heads;
    const int64_t picks = std::max<int64_t>(c.max_rows / 64, 1);
    for (int64_t t = 0; t < picks; ++t) {
      const int64_t head = t * (heads - 1) / std::max<int64_t>(picks - 1, 1);
      const int64_t m = t * 7919 % query_tiles;
      const int64_t tile = t == 0 ? 0 : t == picks - 1 ? query_tiles - 1 : m;
      for (int64_t i = tile * 64; i < std::min((tile + 1) * 64, p.query_length); ++i) {
        rows.push_back(head * p.query_length + i);
      }
    }
  }
  const int64_t count = rows.size();
  int64_t* device_rows = data.template own<int64_t>(count);
  int64_t* strides = data.template own<int64_t>(6);
  REQUIRE(cudaMemcpy(device_rows, rows.data(), count * 8, cudaMemcpyHostToDevice));
  REQUIRE(cudaMemcpy(strides, data.q_strides, 24, cudaMemcpyHostToDevice));
  REQUIRE(cudaMemcpy(strides + 3, data.k_strides, 24, cudaMemcpyHostToDevice));
  Reference ref{data.template own<double>(count * p.head_dim), data.template own<double>(count),
                data.template own<double>(count * tiles)};
  double* scratch = data.template own<double>(count * p.key_length);
  if (count > 0) {
    reference_rows<Element><<<count, 256>>>(p, Mask::of(p), data.q, data.k, data.v, strides,
                                            strides + 3, device_rows, scratch, ref);
  }
  REQUIRE(cudaDeviceSynchronize());
  const auto ref_out = to_host(ref.out, count * p.head_dim);
  const auto ref_lse = to_host(ref.lse, count);
  const auto ref_masses = to_host(ref.masses, count * tiles);

  bool right = true;
  for (const bool record : {false, true}) {
    data.poison();
    data.launch(record);
    REQUIRE(cudaDeviceSynchronize());
    const auto out = to_host(data.o, data.q_elements);
    const auto lse = to_host(data.lse, total);
    const auto stats = to_host(data.stats, data.num_stats());
    double error2 = 0, norm2 = 0, lse_error = 0, stats_error = 0;
    int64_t poisoned = 0;
    for (int64_t id = 0; id < total; ++id) {
      const int64_t i = id % p.query_length, bh = id / p.query_length;
      const int64_t at = bh / p.num_query_heads * data.q_strides[0] + i * data.q_strides[1] +
                         bh % p.num_query_heads * data.q_strides[2];
      for (int64_t d = 0; d < p.head_dim; ++d) poisoned += is_poison(float(out[at + d]));
      poisoned += is_poison(lse[id]);
    }
    for (int64_t r = 0; r < count; ++r) {
      const int64_t id = rows[r], i = id % p.query_length, bh = id / p.query_length;
      const int64_t at = bh / p.num_query_heads * data.q_strides[0] + i * data.q_strides[1] +
                         bh % p.num_query_heads * data.q_strides[2];
      for (int64_t d = 0; d < p.head_dim; ++d) {
        const double want = ref_out[r * p.head_dim + d];
        error2 += std::pow(float(out[at + d]) - want, 2);
        norm2 += want * want;
      }
      const double difference = lse[id] == ref_lse[r] ? 0 : std::abs(lse[id] - ref_lse[r]);
      lse_error = std::max(lse_error, difference / std::max(1.0, std::abs(ref_lse[r])));
      if (std::isnan(difference)) lse_error = INFINITY;
    }
    if (record) {
      for (const float x : stats) poisoned += is_poison(x);
      for (int64_t r = 0; r < count;) {  // rows of one query tile follow each other
        const int64_t id = rows[r], bh = id / p.query_length, m = id % p.query_length / 64;
        int64_t end = r;
        while (end < count && rows[end] / p.query_length == bh &&
               rows[end] % p.query_length / 64 == m) {
          ++end;
        }
        int64_t with_keys = 0;
        for (int64_t x = r; x < end; ++x) with_keys += std::isfinite(ref_lse[x]);
        for (int64_t n = 0; n < tiles; ++n) {
          double want = 0;
          for (int64_t x = r; x < end; ++x) want += ref_masses[x * tiles + n];
          want = with_keys ? want / with_keys : 0;
          const double got = stats[(bh * query_tiles + m) * tiles + n];
          if (want > 1e-6) stats_error = std::max(stats_error, std::abs(got - want) / want);
          if (want == 0 && got != 0) stats_error = INFINITY;
        }
        r = end;
      }
    }
    const double eps = c.dtype == DType::kBFloat16 ? 0x1p-8 : 0x1p-11;
    const double out_error = norm2 > 0 ? std::sqrt(error2 / norm2) : std::sqrt(error2);
    const bool ok = out_error < eps && lse_error < 1e-5 && stats_error < 1e-2 && poisoned == 0;
    right = right && ok;
    if (!ok || record) {
      std::printf("%-34s %s out %.1e lse %.1e stats %.1e poisoned %lld %s\n", c.name,
                  record ? "stats" : "plain", out_error, lse_error, stats_error,
                  (long long)poisoned, ok ? "RIGHT" : "WRONG");
      std::fflush(stdout);
    }
  }
  return right;
}

bool check(const Case& c) {
  return c.dtype == DType::kBFloat16 ? check_case<BFloat16>(c) : check_case<Float16>(c);
}

const Case kCases[] = {
    {"one tile", 1, 1, 1, 128, 128, 128},
    {"two tiles", 1, 1, 1, 128, 256, 128},
    {"many tiles", 2, 2, 2, 512, 1024, 128},
    {"causal", 2, 2, 2, 512, 512, 128, true},
    {"causal odd", 1, 3, 3, 1000, 1000, 128, true},
    {"ragged", 2, 2, 2, 77, 333, 128},
    {"one row", 3, 2, 2, 1, 17, 128},
    {"more queries, causal", 1, 2, 2, 256, 128, 128, true},
    {"more keys, causal", 1, 2, 2, 100, 300, 128, true},
    {"no keys", 1, 2, 2, 100, 0, 128},
    {"gqa causal", 2, 8, 2, 300, 300, 128, true},
    {"window 17,0", 1, 2, 2, 1000, 1000, 128, false, 17, 0},
    {"window 300,40", 1, 2, 2, 1000, 900, 128, false, 300, 40},
    {"window 256,-1", 1, 2, 2, 500, 900, 128, false, 256, -1},
    {"window 0,0", 1, 2, 2, 500, 300, 128, false, 0, 0},
    {"window 128,0 causal", 1, 2, 2, 700, 700, 128, true, 128, 0},
    {"strided", 2, 3, 3, 200, 200, 128, true, -1, -1, DType::kBFloat16, 1.0f, 1.0, 8},
    {"fp16 x10", 1, 2, 2, 512, 512, 128, true, -1, -1, DType::kFloat16, 10.0f},
    {"bf16 x10", 1, 2, 2, 512, 512, 128, false, -1, -1, DType::kBFloat16, 10.0f},
    {"bf16 x40, ratio 1", 2, 4, 4, 1024, 1024, 128, true, -1, -1, DType::kBFloat16, 40.0f},
    {"fp16 x4", 2, 4, 4, 1024, 1024, 128, true, -1, -1, DType::kFloat16, 4.0f},
    {"64 bf16 x40", 2, 4, 4, 1024, 1024, 64, false, -1, -1, DType::kBFloat16, 40.0f},
    {"64 fp16 x4", 2, 4, 4, 1024, 1024, 64, true, -1, -1, DType::kFloat16, 4.0f},
    {"negative scale", 1, 2, 2, 300, 300, 128, true, -1, -1, DType::kBFloat16, 3.0f, -1.0},
    {"scale 0", 1, 2, 2, 300, 300, 128, true, -1, -1, DType::kBFloat16, 1.0f, 0.0},
    {"many items", 4, 16, 16, 1024, 1024, 128, true, -1, -1, DType::kBFloat16, 1.0f, 1.0, 0, 4096},
    {"long", 1, 4, 4, 8192, 8192, 128, false, -1, -1, DType::kBFloat16, 1.0f, 1.0, 0, 2048},
    {"long causal", 1, 4, 4, 8192, 8192, 128, true, -1, -1, DType::kBFloat16, 2.0f, 1.0, 0, 2048},
    {"64 one tile", 1, 1, 1, 192, 128, 64},
    {"64 many tiles", 2, 2, 2, 512, 1024, 64},
    {"64 causal odd", 1, 3, 3, 1000, 1000, 64, true},
    {"64 one row", 3, 2, 2, 1, 17, 64},
    {"64 more queries, causal", 1, 2, 2, 400, 128, 64, true},
    {"64 gqa causal", 2, 8, 2, 300, 300, 64, true},
    {"64 window 300,40", 1, 2, 2, 1000, 900, 64, false, 300, 40},
    {"64 fp16 x10", 1, 2, 2, 512, 512, 64, true, -1, -1, DType::kFloat16, 10.0f},
    {"64 in blocks of 192", 1, 22, 11, 1150, 1150, 64, true},
    {"64 in blocks of 192, fp16", 1, 22, 22, 1150, 1150, 64, false, 300, 40, DType::kFloat16},
    {"64 in blocks of 192, ragged", 1, 100, 100, 190, 700, 64},
    {"64 long causal", 1, 4, 4, 8192, 8192, 64, true, -1, -1, DType::kBFloat16, 2.0f, 1.0, 0, 2048},
    {"empty batch", 0, 2, 2, 100, 100, 128},
    {"no queries", 1, 2, 2, 0, 100, 128},
};

constexpr Timing kTiming{.rounds = 6, .warm_ms = 150.0f, .max_launches = 1 << 30};

void time_case(int64_t head_dim, int64_t length, bool causal, int64_t left = -1, int64_t ratio = 1,
               int64_t tokens = 32768, int64_t heads = 0) {
  if (heads == 0) heads = 2048 / head_dim;
  const Case c{"", tokens / length, heads, heads / ratio, length, length, head_dim, causal, left};
  Launched<BFloat16> data(c);
  const double flops =
      4.0 * c.batch * heads * double(length) * length * head_dim * (causal ? 0.5 : 1.0);
  const auto ms = time_ms(kTiming, [&] { data.launch(false); }, [&] { data.launch(true); });
  std::printf(
      "OURS d%lld S%lld %s w%lld gqa%lld B%lld: %.4f ms %.1f TFLOP/s, with stats %.1f (%+.1f%%)\n",
      (long long)head_dim, (long long)length, causal ? "causal" : "full", (long long)left,
      (long long)ratio, (long long)c.batch, ms[0], flops / ms[0] * 1e-9, flops / ms[1] * 1e-9,
      100.0 * (ms[1] / ms[0] - 1));
  std::fflush(stdout);
}

}  // namespace

int main(int argc, char** argv) {
  const std::string mode = argc > 1 ? argv[1] : "check";
  if (mode == "check") {
    int wrong = 0;
    for (const Case& c : kCases) wrong += !check(c);
    std::printf("%d wrong\n", wrong);
    return wrong != 0;
  }
  if (mode == "repeat") {
    bool equal = true;
    for (const Case& c :
         {Case{"", 2, 8, 2, 1000, 1000, 128, true}, Case{"", 2, 8, 8, 1000, 3000, 64, false}}) {
      Launched<BFloat16> data(c);
      std::vector<BFloat16> out;
      std::vector<float> lse, stats;
      for (int i = 0; i < 200; ++i) {
        data.poison();
        data.launch(true);
        const auto same = [&](auto& first, const auto& now) {
          if (i == 0) first = now;
          equal =
              equal && std::memcmp(first.data(), now.data(), first.size() * sizeof(now[0])) == 0;
        };
        same(out, to_host(data.o, data.q_elements));
        same(lse, to_host(data.lse, data.num_rows()));
        same(stats, to_host(data.stats, data.num_stats()));
      }
    }
    std::printf("200 launches %s\n", equal ? "bitwise equal" : "DIFFER");
    return !equal;
  }
  if (mode == "once") {
    for (const Case& c :
         {Case{"", 1, 2, 1, 512, 512, 128, true}, Case{"", 1, 2, 1, 500, 300, 64}}) {
      Launched<BFloat16> data(c);
      data.launch(false);
      data.launch(true);
      REQUIRE(cudaDeviceSynchronize());
    }
    return 0;
  }
  if (mode == "other") {  // windows, grouped heads, few items, odd lengths
    for (const int64_t head_dim : {128, 64}) {
      if (argc == 3 && std::atoll(argv[2]) != head_dim) continue;
      for (const int64_t length : {8192, 32768}) {
        time_case(head_dim, length, true);
        time_case(head_dim, length, true, 1024);
      }
      time_case(head_dim, 8192, true, -1, 4);
      time_case(head_dim, 8192, true, -1, 1, 8192, 64);
      time_case(head_dim, 8192, true, -1, 8, 8192, 64);
      for (const int64_t length : {1024, 1000, 8192, 8191}) time_case(head_dim, length, false);
      time_case(head_dim, 4096, false, -1, 1, 4096, 8);
    }
    return 0;
  }
  if (argc >= 5) {  // time D S causal
    time_case(std::atoll(argv[2]), std::atoll(argv[3]), std::atoi(argv[4]) != 0);
    return 0;
  }
  for (const int64_t head_dim : {128, 64}) {
    if (argc == 3 && std::atoll(argv[2]) != head_dim) continue;
    for (const int64_t length : {2048, 8192, 16384, 32768}) {
      for (const bool causal : {false, true}) time_case(head_dim, length, causal);
    }
  }
  return 0;
}
