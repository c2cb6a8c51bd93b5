// Why the CPU backend has a matrix product of its own: the five products of a 64 x 128 tile, by
// src/common/product.h and by Eigen, on one core. Prints JSON.
//
//   cmake --preset release -DBACKLITE_BUILD_BENCHMARKS=ON && cmake --build --preset release
//   build/release/benchmarks/cpp/product_bench
#include <Eigen/Core>
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <random>
#include <vector>

#include "backlite/backlite.h"
#include "common/product.h"

namespace {

using backlite::kKeyTile;
using backlite::kQueryTile;
using RowMajor = Eigen::Matrix<float, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;
using Block = Eigen::Map<RowMajor>;
using Values = std::vector<float, Eigen::aligned_allocator<float>>;

// Median over 21 rounds of 200 calls, in GFLOP/s.
template <typename Call>
double gflops(int64_t head_dim, const Call& call) {
  constexpr int kRounds = 21;
  constexpr int kCalls = 200;
  std::vector<double> seconds;
  for (int round = 0; round < kRounds; ++round) {
    const auto start = std::chrono::steady_clock::now();
    for (int i = 0; i < kCalls; ++i) call();
    seconds.push_back(
        std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());
  }
  std::nth_element(seconds.begin(), seconds.begin() + kRounds / 2, seconds.end());
  const double flops = 2.0 * kQueryTile * kKeyTile * static_cast<double>(head_dim);
  return flops * kCalls / seconds[kRounds / 2] / 1e9;
}

void compare(int64_t head_dim, bool last) {
  std::mt19937 generator(0);
  std::normal_distribution<float> normal;
  const auto random = [&](int64_t size) {
    Values values(static_cast<size_t>(size));
    std::generate(values.begin(), values.end(), [&] { return normal(generator); });
    return values;
  };
  Values query = random(kQueryTile * head_dim);
  Values key = random(kKeyTile * head_dim);
  Values key_transposed = random(kKeyTile * head_dim);
  Values probs = random(kQueryTile * kKeyTile);
  Values grad_key = random(kKeyTile * head_dim);
  Values grad_query = random(kQueryTile * head_dim);
  Block q(query.data(), kQueryTile, head_dim), k(key.data(), kKeyTile, head_dim),
      p(probs.data(), kQueryTile, kKeyTile), dk(grad_key.data(), kKeyTile, head_dim),
      dq(grad_query.data(), kQueryTile, head_dim);

  using backlite::cpu::Into;
  using backlite::cpu::product;
  const double ours_scores = gflops(head_dim, [&] {
    product<float>({key_transposed.data(), kKeyTile}, {query.data(), 1, head_dim},
                   {probs.data(), kKeyTile}, kKeyTile, kQueryTile, head_dim, Into::kStore);
  });
  const double ours_grad_key = gflops(head_dim, [&] {
    product<float>({query.data(), head_dim}, {probs.data(), kKeyTile, 1},
                   {grad_key.data(), head_dim}, head_dim, kKeyTile, kQueryTile, Into::kStore);
  });
  const double ours_grad_query = gflops(head_dim, [&] {
    product<float>({key.data(), head_dim}, {probs.data(), 1, kKeyTile},
                   {grad_query.data(), head_dim}, head_dim, kQueryTile, kKeyTile, Into::kStore);
  });
  const double eigen_scores = gflops(head_dim, [&] { p.noalias() = q * k.transpose(); });
  const double eigen_grad_key = gflops(head_dim, [&] { dk.noalias() = p.transpose() * q; });
  const double eigen_grad_query = gflops(head_dim, [&] { dq.noalias() = p * k; });
  std::printf(
      "  {\"head_dim\": %d, \"unit\": \"GFLOP/s\",\n"
      "   \"ours\": {\"S, dP\": %.0f, \"dV, dK\": %.0f, \"dQ\": %.0f},\n"
      "   \"eigen\": {\"S, dP\": %.0f, \"dV, dK\": %.0f, \"dQ\": %.0f}}%s\n",
      static_cast<int>(head_dim), ours_scores, ours_grad_key, ours_grad_query, eigen_scores,
      eigen_grad_key, eigen_grad_query, last ? "" : ",");
}

}  // namespace

int main() {
  std::printf("[\n");
  compare(64, false);
  compare(128, true);
  std::printf("]\n");
}
