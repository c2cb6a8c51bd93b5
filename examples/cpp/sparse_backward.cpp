// The four stages of BackLite on plain memory: an exact forward, then a backward that skips every
// tile of negligible probability. The gradient that comes out is checked against the forward
// itself: a small step of the queries must change the loss by gradient . step.
#include <backlite/backlite.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdio>
#include <numeric>
#include <random>
#include <vector>

using Numbers = std::vector<double>;  // a contiguous (1, kLength, 1, kHeadDim) tensor

constexpr int64_t kLength = 1024, kHeadDim = 64;
constexpr backlite::Problem kProblem = {.dtype = backlite::DType::kFloat64,
                                        .batch = 1,
                                        .query_length = kLength,
                                        .key_length = kLength,
                                        .head_dim = kHeadDim,
                                        .scale = 0.125,
                                        .causal = true};
constexpr size_t kNumTiles = kLength / backlite::kQueryTile * (kLength / backlite::kKeyTile);

backlite::ConstTensor in(const Numbers& x) { return {.data = x.data(), .length_stride = kHeadDim}; }
backlite::Tensor out_to(Numbers& x) { return {.data = x.data(), .length_stride = kHeadDim}; }

Numbers random_numbers(unsigned seed) {
  std::mt19937 generator(seed);
  std::normal_distribution<double> normal;
  Numbers x(kLength * kHeadDim);
  std::generate(x.begin(), x.end(), [&] { return normal(generator); });
  return x;
}

double dot(const Numbers& a, const Numbers& b) {
  return std::inner_product(a.begin(), a.end(), b.begin(), 0.0);
}

int main() {
  Numbers query = random_numbers(1), key = random_numbers(2);
  const Numbers value = random_numbers(3), grad_out = random_numbers(4), step = random_numbers(5);
  // Attention that stays near: every stretch of 128 positions has a direction of its own.
  for (int64_t i = 0; i < kLength; ++i) {
    query[i * kHeadDim + i / 128] += 16.0;
    key[i * kHeadDim + i / 128] += 16.0;
  }

  // One workspace serves all stages. Like the schedule, it starts at a 64-byte boundary.
  struct alignas(64) Line {
    std::byte bytes[64];
  };
  const size_t bytes = std::max({backlite::forward_workspace_bytes(kProblem, true, 2),
                                 backlite::select_workspace_bytes(kProblem, 2),
                                 backlite::backward_workspace_bytes(kProblem, 2)});
  std::vector<Line> workspace(bytes / 64 + 1);
  std::vector<Line> schedule(backlite::schedule_bytes(kProblem) / 64 + 1);
  const backlite::Execution execution = {
      .num_threads = 2, .workspace = workspace.data(), .workspace_bytes = bytes};

  Numbers out(query.size()), lse(kLength);
  std::vector<float> stats(kNumTiles);
  const auto loss = [&] {  // a weighted sum of the output
    backlite::forward(kProblem,
                      {in(query), in(key), in(value), out_to(out), lse.data(), stats.data()},
                      execution);
    return dot(out, grad_out);
  };
  loss();

  const int64_t negl_prob = backlite::negl_prob_to_fixed(1e-3);
  std::vector<int32_t> bits(kLength / backlite::kKeyTile);  // 16 query tiles fit into one word
  backlite::select(kProblem, {stats.data(), &negl_prob, 1, bits.data()}, execution);
  backlite::schedule(kProblem, {bits.data(), schedule.data(), schedule.size() * sizeof(Line)},
                     execution);
  Numbers grad_query(query.size()), grad_key(key.size()), grad_value(value.size());
  constexpr const void* kNoGradLse = nullptr;
  backlite::backward(
      kProblem,
      {in(query), in(key), in(value), in(out), in(grad_out), lse.data(), kNoGradLse, bits.data(),
       schedule.data(), out_to(grad_query), out_to(grad_key), out_to(grad_value)},
      execution);

  constexpr double kEpsilon = 1e-5;
  for (size_t i = 0; i < query.size(); ++i) query[i] += kEpsilon * step[i];
  const double above = loss();
  for (size_t i = 0; i < query.size(); ++i) query[i] -= 2 * kEpsilon * step[i];
  const double change = (above - loss()) / (2 * kEpsilon), expected = dot(grad_query, step);

  int num_live = 0;
  for (const int32_t word : bits) num_live += std::popcount(static_cast<uint32_t>(word));
  std::printf("%d of %zu tiles visited; loss change a step: %.6f, by the gradient: %.6f\n",
              num_live, kNumTiles, change, expected);
  return std::abs(expected - change) < 1e-3 * std::abs(change) ? 0 : 1;
}
