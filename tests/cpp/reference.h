// Attention as the public header writes it, one number at a time: what every test compares with.
// The numbers of the steps are those of the backward in docs/1-maths.md.
//
// `Real` is the type that sums are made in. `round` is applied wherever plain code would store an
// intermediate tensor. With double and no rounding this is the truth; with float and rounding to
// the dtype it is the yardstick: how well plain code does in that dtype.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <vector>

#include "backlite/backlite.h"
#include "tensors.h"

namespace backlite::test {

inline int64_t tiles_of(int64_t length, int64_t tile) { return (length + tile - 1) / tile; }

// Does query i see key j?
inline bool sees(const Problem& p, int64_t i, int64_t j) {
  const int64_t ahead = j - (i + p.key_length - p.query_length);
  if (p.causal && ahead > 0) return false;
  if (p.window_left >= 0 && -ahead > p.window_left) return false;
  if (p.window_right >= 0 && ahead > p.window_right) return false;
  return true;
}

// bool [B, H, Tm, Tn]: may the backward visit this tile?
struct TileMap {
  int64_t heads, query_tiles, key_tiles;
  std::vector<bool> live;

  TileMap(const Problem& p, bool value)
      : heads(p.num_query_heads),
        query_tiles(tiles_of(p.query_length, kQueryTile)),
        key_tiles(tiles_of(p.key_length, kKeyTile)),
        live(static_cast<size_t>(p.batch * heads * query_tiles * key_tiles), value) {}

  size_t index(int64_t b, int64_t h, int64_t m, int64_t n) const {
    return static_cast<size_t>(((b * heads + h) * query_tiles + m) * key_tiles + n);
  }
  std::vector<bool>::reference at(int64_t b, int64_t h, int64_t m, int64_t n) {
    return live[index(b, h, m, n)];
  }
  bool at(int64_t b, int64_t h, int64_t m, int64_t n) const { return live[index(b, h, m, n)]; }
};

// bool [Tm, Tn]: does any row of the query tile see any key of the key tile?
inline std::vector<std::vector<bool>> tiles_in_mask(const Problem& p) {
  std::vector<std::vector<bool>> allowed(
      static_cast<size_t>(tiles_of(p.query_length, kQueryTile)),
      std::vector<bool>(static_cast<size_t>(tiles_of(p.key_length, kKeyTile))));
  for (int64_t i = 0; i < p.query_length; ++i) {
    for (int64_t j = 0; j < p.key_length; ++j) {
      if (sees(p, i, j)) allowed[i / kQueryTile][j / kKeyTile] = true;
    }
  }
  return allowed;
}

struct ReferenceForward {
  Array out;                       // [B, Sq, H, D]
  Array lse;                       // [B, H, Sq, 1]
  std::vector<double> tile_stats;  // [B, H, Tm, Tn]
  double largest_score = 0.0;      // max |S|
};

struct ReferenceGradients {
  Array query, key, value;
};

template <typename Real>
class Reference {
 public:
  using Round = std::function<Real(Real)>;

  Reference(
      const Problem& problem, const Array& query, const Array& key, const Array& value,
      Round round = [](Real x) { return x; })
      : p_(problem), query_(query), key_(key), value_(value), round_(std::move(round)) {}

  ReferenceForward forward() const {
    ReferenceForward result{
        Array(query_shape(p_)), Array({p_.batch, p_.num_query_heads, p_.query_length, 1}), {}};
    const TileMap tiles(p_, false);
    result.tile_stats.assign(tiles.live.size(), 0.0);
    for_each_head([&](int64_t b, int64_t h, int64_t hk) {
      std::vector<int64_t> rows_with_keys(static_cast<size_t>(tiles.query_tiles));
      for (int64_t i = 0; i < p_.query_length; ++i) {
        const Row row = softmax_row(b, h, hk, i);
        *result.lse.row(b, h, i) = row.lse;
        if (row.lse == -INFINITY) continue;
        rows_with_keys[i / kQueryTile] += 1;
        for (int64_t j = 0; j < p_.key_length; ++j) {
          if (!sees(p_, i, j)) continue;
          // O = P V
          for (int64_t d = 0; d < p_.head_dim; ++d) {
            result.out.row(b, i, h)[d] =
                add(result.out.row(b, i, h)[d], row.probs[j] * real(value_.row(b, j, hk)[d]));
          }
          result.tile_stats[tiles.index(b, h, i / kQueryTile, j / kKeyTile)] += row.probs[j];
          result.largest_score =
              std::max(result.largest_score, std::abs(static_cast<double>(row.scores[j])));
        }
      }
      // The mean over the tile's rows that see a key.
      for (int64_t m = 0; m < tiles.query_tiles; ++m) {
        for (int64_t n = 0; n < tiles.key_tiles; ++n) {
          if (rows_with_keys[m] > 0) {
            result.tile_stats[tiles.index(b, h, m, n)] /= static_cast<double>(rows_with_keys[m]);
          }
        }
      }
    });
    round_all(result.out);
    return result;
  }

  // The gradient that only live tiles contribute to; `out` is the exact output. `grad_lse` may be
  // nullptr.
  ReferenceGradients backward(const Array& out, const Array& grad_out, const Array* grad_lse,
                              const TileMap& tiles) const {
    ReferenceGradients grad{Array(query_shape(p_)), Array(key_shape(p_)), Array(key_shape(p_))};
    for_each_head([&](int64_t b, int64_t h, int64_t hk) {
      for (int64_t i = 0; i < p_.query_length; ++i) {
        const Row row = softmax_row(b, h, hk, i);
        if (row.lse == -INFINITY) continue;
        const double* const q = query_.row(b, i, h);
        const double* const grad_o = grad_out.row(b, i, h);
        // delta = dO . O - dLSE, summed in another order than dP: plain code makes a reduction of
        // one and a matrix product of the other, and they do not cancel to the last bit.
        Real delta = round_(dot_backwards(grad_o, out.row(b, i, h)));
        if (grad_lse != nullptr) delta -= real(*grad_lse->row(b, h, i));
        for (int64_t j = 0; j < p_.key_length; ++j) {
          if (!sees(p_, i, j) || !tiles.at(b, h, i / kQueryTile, j / kKeyTile)) continue;
          const double* const k = key_.row(b, j, hk);
          const Real prob = row.probs[j];
          const Real grad_prob = round_(dot(grad_o, value_.row(b, j, hk)));  // (4) dP = dO V^T
          const Real grad_score = round_(prob * (grad_prob - delta));  // (5) dS = P * (dP - delta)
          const Real scaled = real(p_.scale) * grad_score;
          double* const dq = grad.query.row(b, i, h);
          double* const dk = grad.key.row(b, j, hk);
          double* const dv = grad.value.row(b, j, hk);
          for (int64_t d = 0; d < p_.head_dim; ++d) {
            dv[d] = add(dv[d], prob * real(grad_o[d]));  // (3) dV = P^T dO
            dk[d] = add(dk[d], scaled * real(q[d]));     // (6) dK = scale * dS^T Q
            dq[d] = add(dq[d], scaled * real(k[d]));     // (7) dQ = scale * dS K
          }
        }
      }
    });
    for (Array* array : {&grad.query, &grad.key, &grad.value}) round_all(*array);
    return grad;
  }

 private:
  struct Row {
    std::vector<Real> scores, probs;  // [Sk]
    Real lse;
  };

  static Real real(double x) { return static_cast<Real>(x); }
  static double add(double sum, Real term) { return real(sum) + term; }

  Real dot(const double* a, const double* b) const {
    Real sum = 0;
    for (int64_t d = 0; d < p_.head_dim; ++d) sum += real(a[d]) * real(b[d]);
    return sum;
  }

  Real dot_backwards(const double* a, const double* b) const {
    Real sum = 0;
    for (int64_t d = p_.head_dim - 1; d >= 0; --d) sum += real(a[d]) * real(b[d]);
    return sum;
  }

  Row softmax_row(int64_t b, int64_t h, int64_t hk, int64_t i) const {
    Row row{std::vector<Real>(static_cast<size_t>(p_.key_length)),
            std::vector<Real>(static_cast<size_t>(p_.key_length)), -INFINITY};
    // (1) S = scale * Q K^T
    Real largest = -INFINITY;
    for (int64_t j = 0; j < p_.key_length; ++j) {
      if (!sees(p_, i, j)) continue;
      row.scores[j] = round_(real(p_.scale) * dot(query_.row(b, i, h), key_.row(b, j, hk)));
      largest = std::max(largest, row.scores[j]);
    }
    if (largest == -INFINITY) return row;
    // (2) LSE = log sum exp S, P = exp(S - LSE)
    Real sum = 0;
    for (int64_t j = 0; j < p_.key_length; ++j) {
      if (sees(p_, i, j)) sum += std::exp(row.scores[j] - largest);
    }
    row.lse = largest + std::log(sum);
    for (int64_t j = 0; j < p_.key_length; ++j) {
      if (sees(p_, i, j)) row.probs[j] = round_(std::exp(row.scores[j] - row.lse));
    }
    return row;
  }

  template <typename Visit>
  void for_each_head(const Visit& visit) const {
    const int64_t group = p_.num_query_heads / p_.num_key_heads;
    for (int64_t b = 0; b < p_.batch; ++b) {
      for (int64_t h = 0; h < p_.num_query_heads; ++h) visit(b, h, h / group);
    }
  }

  void round_all(Array& array) const {
    for (double& value : array.values) value = round_(real(value));
  }

  const Problem& p_;
  const Array& query_;
  const Array& key_;
  const Array& value_;
  const Round round_;
};

// The rule of selection, tried prefix by prefix. `negl_prob` is [1] or [H], in fixed point.
inline TileMap reference_select(const Problem& p, const std::vector<float>& tile_stats,
                                const std::vector<int64_t>& negl_prob) {
  const auto fixed = [](float prob) -> int64_t {
    if (std::isnan(prob)) return kProbOne;
    const long double scaled = std::floor(std::ldexp(static_cast<long double>(prob), 40));
    return static_cast<int64_t>(std::clamp(scaled, 0.0L, static_cast<long double>(kProbOne)));
  };
  TileMap tiles(p, false);
  const auto allowed = tiles_in_mask(p);
  for (int64_t b = 0; b < p.batch; ++b) {
    for (int64_t h = 0; h < tiles.heads; ++h) {
      const int64_t threshold = negl_prob[negl_prob.size() == 1 ? 0 : h];
      for (int64_t m = 0; m < tiles.query_tiles; ++m) {
        const auto prob = [&](int64_t n) { return fixed(tile_stats[tiles.index(b, h, m, n)]); };
        std::vector<int64_t> order;
        for (int64_t n = 0; n < tiles.key_tiles; ++n) {
          if (allowed[m][n]) order.push_back(n);
        }
        std::stable_sort(order.begin(), order.end(),
                         [&](int64_t a, int64_t c) { return prob(a) < prob(c); });
        // The longest prefix that may go. The heaviest tile always stays.
        size_t skipped = 0;
        for (size_t length = 1; length < order.size(); ++length) {
          int64_t sum = 0;
          for (size_t i = 0; i < length; ++i) sum += prob(order[i]);
          if (sum < threshold) skipped = length;
        }
        for (size_t i = skipped; i < order.size(); ++i) tiles.at(b, h, m, order[i]) = true;
      }
    }
  }
  return tiles;
}

}  // namespace backlite::test
