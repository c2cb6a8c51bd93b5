// Forward, one query tile at a time: online softmax over the key tiles that its rows see.
//
// For every key tile, with running row maximum m, running row sum l and running output O:
//   (1) S = scale * Q K^T                      masked entries become -inf
//   (2) m' = max(m, rowmax S)                  alpha = exp(m - m')
//   (3) P = exp(S - m')                        r = rowsum P      l = alpha * l + r
//   (4) O = alpha * O + P V
// and after the last one
//   (5) O = O / l     LSE = m + log l
//   (6) p[n] = mean over rows of r[n] * exp(m'[n] - LSE)        the tile statistics
//
// (6) needs the final LSE, so r and m' of every tile are kept until the row of tiles ends: two
// numbers a row and tile, in scratch that belongs to the thread. One exponential a row and tile is
// 1/128 of the work of (3).
#include "forward/cpu.h"

#include <cmath>
#include <limits>

#include "common/mask.h"
#include "common/matrix.h"
#include "common/parallel.h"
#include "common/workspace.h"
#include "forward/tile_score.h"

namespace backlite::cpu {
namespace {

template <typename Compute>
struct Scratch {  // of one thread
  Compute* query;      // [64, D], scaled
  Compute* key;        // [128, D], unused where no conversion is needed
  Compute* value;      // [128, D], likewise
  Compute* scores;     // [128, 64]: S, then P; a key's 64 queries are contiguous
  Compute* out;        // [64, D]
  Compute* row_max;    // [64]
  Compute* row_sum;    // [64]
  Compute* alpha;      // [64]
  Compute* reference;  // [Tn, 64]: m' of (2) by tile, if statistics are recorded
  Compute* tile_mass;  // [Tn, 64]: r of (3) by tile, likewise; else [1, 64]

  Scratch(Carver& carver, const Problem& problem, bool record) {
    const int64_t tiles = record ? num_key_tiles(problem.key_length) : 1;
    query = carver.take<Compute>(kQueryTile * problem.head_dim);
    key = carver.take<Compute>(kKeyTile * problem.head_dim);
    value = carver.take<Compute>(kKeyTile * problem.head_dim);
    scores = carver.take<Compute>(kKeyTile * kQueryTile);
    out = carver.take<Compute>(kQueryTile * problem.head_dim);
    row_max = carver.take<Compute>(kQueryTile);
    row_sum = carver.take<Compute>(kQueryTile);
    alpha = carver.take<Compute>(kQueryTile);
    reference = carver.take<Compute>(tiles * kQueryTile);
    tile_mass = carver.take<Compute>(tiles * kQueryTile);
  }
};

template <typename Compute>
size_t scratch_bytes(const Problem& problem, bool record) {
  Carver counter(nullptr);
  Scratch<Compute>(counter, problem, record);
  return counter.bytes();
}

template <typename Element>
void forward_query_tile(const Problem& problem, const ForwardArgs& args, const Mask& mask,
                        int64_t batch, int64_t head, int64_t query_tile,
                        const Scratch<ComputeOf<Element>>& scratch) {
  using Compute = ComputeOf<Element>;
  constexpr Compute kMinusInf = -std::numeric_limits<Compute>::infinity();
  const int64_t key_head = head / (problem.num_query_heads / problem.num_key_heads);
  const int64_t head_dim = problem.head_dim;
  const Range rows = mask.rows_of_tile(query_tile);
  const Range tiles = mask.key_tiles(query_tile);
  const bool record = args.tile_stats != nullptr;

  RowBlock<Compute> query(scratch.query, rows.size(), head_dim, Eigen::OuterStride<>(head_dim));
  query = rows_of<Element>(args.query, batch, head, rows.begin, rows.size(), head_dim)
              .template cast<Compute>() *
          static_cast<Compute>(problem.scale);
  RowBlock<Compute> out(scratch.out, rows.size(), head_dim, Eigen::OuterStride<>(head_dim));
  Vector<Compute> row_max(scratch.row_max, rows.size());
  Vector<Compute> row_sum(scratch.row_sum, rows.size());
  Vector<Compute> alpha(scratch.alpha, rows.size());
  out.setZero();
  row_max.setConstant(kMinusInf);
  row_sum.setZero();

  for (int64_t n = tiles.begin; n < tiles.end; ++n) {
    const Range keys = mask.keys_of_tile(n);
    const auto key = in_compute_type<Element>(
        rows_of<Element>(args.key, batch, key_head, keys.begin, keys.size(), head_dim),
        scratch.key);
    const auto value = in_compute_type<Element>(
        rows_of<Element>(args.value, batch, key_head, keys.begin, keys.size(), head_dim),
        scratch.value);

    // (1)
    ColBlock<Compute> scores(scratch.scores, rows.size(), keys.size());
    scores.noalias() = query * key.transpose();
    if (!mask.is_full(query_tile, n)) {
      for (int64_t j = 0; j < keys.size(); ++j) {
        const Range seen_by = mask.rows_of_key(keys.begin + j);
        for (int64_t i = 0; i < rows.size(); ++i) {
          const int64_t row = rows.begin + i;
          if (row < seen_by.begin || row >= seen_by.end) scores(i, j) = kMinusInf;
        }
      }
    }

    // (2) A row that has seen no key yet has m' = -inf; it is measured against 0 instead, so that
    // exp(-inf - 0) = 0 and never exp(-inf + inf).
    alpha = row_max;
    for (int64_t j = 0; j < keys.size(); ++j) row_max = row_max.max(scores.col(j).array());
    Vector<Compute> reference(scratch.reference + (record ? n * kQueryTile : 0), rows.size());
    reference = (row_max == kMinusInf).select(Compute{0}, row_max);
    const bool max_has_grown = (row_max > alpha).any();
    alpha = (alpha - reference).exp();

    // (3)
    Vector<Compute> tile_mass(scratch.tile_mass + (record ? n * kQueryTile : 0), rows.size());
    tile_mass.setZero();
    for (int64_t j = 0; j < keys.size(); ++j) {
      scores.col(j).array() = (scores.col(j).array() - reference).exp();
      tile_mass += scores.col(j).array();
    }
    row_sum = alpha * row_sum + tile_mass;

    // (4) After the first few tiles the maximum seldom grows, and alpha is 1 in every row.
    if (max_has_grown) out.array().colwise() *= alpha;
    out.noalias() += scores * value;
  }

  // (5)
  const auto has_keys = row_max > kMinusInf;
  Eigen::Map<Eigen::Array<Compute, Eigen::Dynamic, 1>> lse(
      static_cast<Compute*>(args.lse) +
          (batch * problem.num_query_heads + head) * problem.query_length + rows.begin,
      rows.size());
  lse = has_keys.select(row_max + row_sum.log(), kMinusInf);
  alpha = has_keys.select(row_sum.inverse(), Compute{0});
  rows_of<Element>(args.out, batch, head, rows.begin, rows.size(), head_dim) =
      (out.array().colwise() * alpha).template cast<Element>().matrix();

  // (6)
  if (record) {
    const int64_t num_tiles = num_key_tiles(problem.key_length);
    float* stats = args.tile_stats +
                   ((batch * problem.num_query_heads + head) * num_query_tiles(problem.query_length) +
                    query_tile) *
                       num_tiles;
    std::fill(stats, stats + num_tiles, 0.0f);
    const int64_t num_rows_with_keys = has_keys.count();
    for (int64_t n = tiles.begin; n < tiles.end; ++n) {
      const Vector<Compute> reference(scratch.reference + n * kQueryTile, rows.size());
      const Vector<Compute> tile_mass(scratch.tile_mass + n * kQueryTile, rows.size());
      const Compute sum =
          has_keys.select(tile_mass * (reference - lse).exp(), Compute{0}).sum();
      stats[n] = tile_score_mean(sum, num_rows_with_keys);
    }
  }
}

template <typename Element>
void forward_all(const Problem& problem, const ForwardArgs& args, const Execution& execution) {
  using Compute = ComputeOf<Element>;
  const Mask mask = Mask::of(problem);
  const int64_t tiles = num_query_tiles(problem.query_length);
  const bool record = args.tile_stats != nullptr;
  const size_t bytes = scratch_bytes<Compute>(problem, record);
  const int64_t heads = problem.batch * problem.num_query_heads;

  // The last query tiles see the most keys under a causal mask: start with them.
  parallel_for(heads * tiles, execution.num_threads, [&](int64_t index, int thread) {
    Carver carver(static_cast<std::byte*>(execution.workspace) + bytes * thread);
    const Scratch<Compute> scratch(carver, problem, record);
    const int64_t head_idx = index % heads;
    const int64_t query_tile = tiles - 1 - index / heads;
    forward_query_tile<Element>(problem, args, mask, head_idx / problem.num_query_heads,
                                head_idx % problem.num_query_heads, query_tile, scratch);
  });
}

}  // namespace

size_t forward_workspace_bytes(const Problem& problem, bool record_tile_stats, int num_threads) {
  const size_t per_thread = problem.dtype == DType::kFloat64
                                ? scratch_bytes<double>(problem, record_tile_stats)
                                : scratch_bytes<float>(problem, record_tile_stats);
  return per_thread * static_cast<size_t>(num_threads);
}

void forward(const Problem& problem, const ForwardArgs& args, const Execution& execution) {
  switch (problem.dtype) {
    case DType::kFloat16: return forward_all<Eigen::half>(problem, args, execution);
    case DType::kBFloat16: return forward_all<Eigen::bfloat16>(problem, args, execution);
    case DType::kFloat32: return forward_all<float>(problem, args, execution);
    case DType::kFloat64: return forward_all<double>(problem, args, execution);
  }
}

}  // namespace backlite::cpu
