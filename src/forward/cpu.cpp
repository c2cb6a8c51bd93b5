// Forward, one block of query tiles at a time: online softmax over the key tiles that its rows see.
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
// (6) needs the final LSE, so r and m' of every tile are kept until the block ends: two numbers a
// row and tile, in scratch that belongs to the thread. One exponential a row and tile is 1/128 of
// the work of (3).
#include "forward/cpu.h"

#include <algorithm>
#include <limits>

#include "common/mask.h"
#include "common/matrix.h"
#include "common/output.h"
#include "common/parallel.h"
#include "common/product.h"
#include "common/transpose.h"
#include "common/workspace.h"
#include "forward/tile_score.h"

namespace backlite::cpu {
namespace {

// Three query tiles share one pass over K and V, which are read from memory a third as often; Q is
// transposed once for all of it.
constexpr int64_t kBlockTiles = 3;
constexpr int64_t kBlockRows = kBlockTiles * kQueryTile;

// What softmax does to a tile is done for a strip of 32 queries at a time, over all keys: the
// strip's row vectors then stay in registers, and its 16 KiB of scores in L1 between one pass and
// the next (passes over the whole 192 x 128 block took 24% of the forward, strips take 12%). Arrays
// of rows are padded to whole strips; padding is computed with, but no result of it is used.
constexpr int64_t kStripRows = 32;
template <typename T>
using StripValues = Eigen::Array<T, kStripRows, 1>;
template <typename T>
using Strip = Eigen::Map<StripValues<T>, Eigen::AlignedMax>;
static_assert(kQueryTile % kStripRows == 0);

template <typename Compute>
struct Scratch {       // of one thread; Dp = D, padded for transposes
  Compute* query;      // [Dp, 192], scaled
  Compute* scores;     // [128, 192]: S, then P; a key's queries are contiguous
  Compute* out;        // [Dp, 192], likewise
  Compute* row_max;    // [192]
  Compute* row_sum;    // [192]
  Compute* alpha;      // [192]
  Compute* reference;  // [Tn, 192]: m' of (2) by tile, if statistics are recorded
  Compute* tile_mass;  // [Tn, 192]: r of (3) by tile, likewise

  Scratch(Carver& carver, const Problem& problem, bool record) {
    const int64_t tiles = record ? num_key_tiles(problem.key_length) : 0;
    const int64_t padded_dim = pad_rows(problem.head_dim);
    query = carver.take<Compute>(kBlockRows * padded_dim);
    scores = carver.take<Compute>(kKeyTile * kBlockRows);
    out = carver.take<Compute>(kBlockRows * padded_dim);
    row_max = carver.take<Compute>(kBlockRows);
    row_sum = carver.take<Compute>(kBlockRows);
    alpha = carver.take<Compute>(kBlockRows);
    reference = carver.take<Compute>(tiles * kBlockRows);
    tile_mass = carver.take<Compute>(tiles * kBlockRows);
  }
};

// K and V of one head lie heads * head_dim elements apart from row to row, a power of two in
// practice: they map to a fraction of the cache's sets and would be fetched from memory by every
// block anew (10% of the forward). So they are copied once, contiguous and in the compute type.
template <typename Compute>
struct Workspace {
  Compute* key;          // [B, Hk, Tn * 128, D]
  Compute* value;        // [B, Hk, Tn * 128, D]
  std::byte* scratch;    // [num_threads, scratch_bytes]
  size_t scratch_bytes;  // of one thread
  size_t bytes;
  int64_t rows_per_head;

  Workspace(const Problem& problem, bool record, int num_threads, void* base) {
    Carver counter(nullptr);
    Scratch<Compute>(counter, problem, record);
    scratch_bytes = counter.bytes();
    rows_per_head = num_key_tiles(problem.key_length) * kKeyTile;
    const int64_t rows = problem.batch * problem.num_key_heads * rows_per_head;
    Carver carver(base);
    key = carver.take<Compute>(rows * problem.head_dim);
    value = carver.take<Compute>(rows * problem.head_dim);
    scratch = carver.take<std::byte>(static_cast<int64_t>(scratch_bytes) * num_threads);
    bytes = carver.bytes();
  }
};

template <typename Element>
class Block {
 public:
  using Compute = ComputeOf<Element>;

  Block(const Problem& problem, const ForwardArgs& args, const Output<Element>& output,
        const Mask& mask, int64_t head_idx, int64_t block, const Workspace<Compute>& workspace,
        const Scratch<Compute>& scratch)
      : problem_(problem),
        args_(args),
        output_(output),
        mask_(mask),
        workspace_(workspace),
        scratch_(scratch),
        head_idx_(head_idx),
        batch_(head_idx / problem.num_query_heads),
        head_(head_idx % problem.num_query_heads),
        first_key_row_((batch_ * problem.num_key_heads +
                        head_ / (problem.num_query_heads / problem.num_key_heads)) *
                       workspace.rows_per_head),
        tiles_{block * kBlockTiles,
               std::min((block + 1) * kBlockTiles, num_query_tiles(problem.query_length))},
        rows_{tiles_.begin * kQueryTile, std::min(tiles_.end * kQueryTile, problem.query_length)},
        padded_dim_(pad_rows(problem.head_dim)),
        out_(scratch.out, problem.head_dim, rows_.size(), Eigen::OuterStride<>(kBlockRows)) {}

  void run() {
    load_query();
    out_.setZero();
    row_vector(scratch_.row_max, rows_).setConstant(kMinusInf);
    row_vector(scratch_.row_sum, rows_).setZero();

    const Range key_tiles = mask_.key_tiles_of_rows(rows_);
    for (int64_t n = key_tiles.begin; n < key_tiles.end; ++n) visit_key_tile(n);
    store();
    if (args_.tile_stats != nullptr) {
      for (int64_t m = tiles_.begin; m < tiles_.end; ++m) store_tile_stats(m);
    }
  }

 private:
  static constexpr Compute kMinusInf = -std::numeric_limits<Compute>::infinity();

  // The part of a [192] vector that belongs to `rows`.
  Vector<Compute> row_vector(Compute* vector, Range rows) const {
    return {vector + (rows.begin - rows_.begin), rows.size()};
  }

  // Before the first key tile and after the last the scores are free: here and in store(), one
  // query tile after the other passes there, [64, Dp], on its way to or from a transposed block.
  void load_query() {
    for (int64_t m = tiles_.begin; m < tiles_.end; ++m) {
      const Range rows = mask_.rows_of_tile(m);
      RowBlock<Compute>(scratch_.scores, rows.size(), problem_.head_dim,
                        Eigen::OuterStride<>(padded_dim_)) =
          rows_of<Element>(args_.query, batch_, head_, rows.begin, rows.size(), problem_.head_dim)
              .template cast<Compute>() *
          static_cast<Compute>(problem_.scale);
      transpose(scratch_.scores, padded_dim_, scratch_.query + rows.begin - rows_.begin, kBlockRows,
                rows.size(), problem_.head_dim);
    }
  }

  void visit_key_tile(int64_t n) {
    // Under a causal mask or a window only some of the block's query tiles see this key tile.
    const Range seen_by = mask_.query_tiles(n);
    const Range tiles = {std::max(tiles_.begin, seen_by.begin), std::min(tiles_.end, seen_by.end)};
    const Range rows = {tiles.begin * kQueryTile, std::min(tiles.end * kQueryTile, rows_.end)};
    const Range keys = mask_.keys_of_tile(n);
    const int64_t first = rows.begin - rows_.begin;
    const int64_t head_dim = problem_.head_dim;

    const Compute* const key = workspace_.key + (first_key_row_ + keys.begin) * head_dim;
    const Compute* const value = workspace_.value + (first_key_row_ + keys.begin) * head_dim;

    // (1)
    product<Compute>({scratch_.query + first, kBlockRows}, {key, 1, head_dim},
                     {scratch_.scores, kBlockRows}, rows.size(), keys.size(), head_dim,
                     Into::kStore);
    for (int64_t m = tiles.begin; m < tiles.end; ++m) {
      if (!mask_.is_full(m, n)) mask_tile(m, n, rows);
    }

    bool max_has_grown = false;
    for (int64_t i = 0; i < rows.size(); i += kStripRows) {
      const auto strip = [&](Compute* vector) { return Strip<Compute>(vector + first + i); };
      const auto key_scores = [&](int64_t j) {
        return Strip<Compute>(scratch_.scores + j * kBlockRows + i);
      };

      // (2) A row that has seen no key yet has m' = -inf; it is measured against 0 instead, so that
      // exp(-inf - 0) = 0 and never exp(-inf + inf).
      const StripValues<Compute> old_max = strip(scratch_.row_max);
      StripValues<Compute> new_max = old_max;
      for (int64_t j = 0; j < keys.size(); ++j) new_max = new_max.max(key_scores(j));
      const StripValues<Compute> reference = (new_max == kMinusInf).select(Compute{0}, new_max);
      const StripValues<Compute> alpha = (old_max - reference).exp();
      max_has_grown |= (new_max > old_max).any();

      // (3)
      StripValues<Compute> mass = StripValues<Compute>::Zero();
      for (int64_t j = 0; j < keys.size(); ++j) {
        const StripValues<Compute> probs = (key_scores(j) - reference).exp();
        key_scores(j) = probs;
        mass += probs;
      }

      strip(scratch_.row_max) = new_max;
      strip(scratch_.row_sum) = alpha * strip(scratch_.row_sum) + mass;
      strip(scratch_.alpha) = alpha;
      if (args_.tile_stats != nullptr) {
        strip(scratch_.reference + n * kBlockRows) = reference;
        strip(scratch_.tile_mass + n * kBlockRows) = mass;
      }
    }

    // (4) After the first few tiles the maximum seldom grows, and alpha is 1 in every row.
    if (max_has_grown) {
      out_.middleCols(first, rows.size()).array().rowwise() *=
          row_vector(scratch_.alpha, rows).transpose();
    }
    product<Compute>({scratch_.scores, kBlockRows}, {value, head_dim, 1},
                     {scratch_.out + first, kBlockRows}, rows.size(), head_dim, keys.size(),
                     Into::kAdd);
  }

  void mask_tile(int64_t m, int64_t n, Range rows) const {
    const Range tile_rows = mask_.rows_of_tile(m);
    const Range keys = mask_.keys_of_tile(n);
    for (int64_t j = 0; j < keys.size(); ++j) {
      const Range seen_by = mask_.rows_of_key(keys.begin + j);
      for (int64_t row = tile_rows.begin; row < tile_rows.end; ++row) {
        if (row < seen_by.begin || row >= seen_by.end) {
          scratch_.scores[j * kBlockRows + row - rows.begin] = kMinusInf;
        }
      }
    }
  }

  // (5) A row saw a key iff its sum is not 0 (at its maximum P = 1): a NaN counts as seen, and
  // stays.
  void store() {
    const auto row_max = row_vector(scratch_.row_max, rows_);
    const auto row_sum = row_vector(scratch_.row_sum, rows_);
    auto inverse_sum = row_vector(scratch_.alpha, rows_);
    const auto has_keys = row_sum != Compute{0};
    // In double: Eigen's float log is off by up to 2 units in the last place.
    const auto exact_lse = row_max.template cast<double>() + row_sum.template cast<double>().log();
    lse(rows_) = has_keys.select(exact_lse.template cast<Compute>(), kMinusInf);
    if (args_.lse != nullptr) {
      Vector<Compute>(
          static_cast<Compute*>(args_.lse) + head_idx_ * problem_.query_length + rows_.begin,
          rows_.size()) = lse(rows_);
    }
    inverse_sum = has_keys.select(row_sum.inverse(), Compute{0});
    out_.array().rowwise() *= inverse_sum.transpose();
    for (int64_t m = tiles_.begin; m < tiles_.end; ++m) {
      const Range rows = mask_.rows_of_tile(m);
      transpose(scratch_.out + rows.begin - rows_.begin, kBlockRows, scratch_.scores, padded_dim_,
                problem_.head_dim, rows.size());
      output_.write_rows(batch_, head_, rows, scratch_.scores, padded_dim_);
    }
  }

  // (6)
  void store_tile_stats(int64_t m) {
    const int64_t num_tiles = num_key_tiles(problem_.key_length);
    float* const stats =
        args_.tile_stats +
        (head_idx_ * num_query_tiles(problem_.query_length) + m) * num_tiles;  // [Tn]
    std::fill(stats, stats + num_tiles, 0.0f);
    const Range rows = mask_.rows_of_tile(m);
    const Range tiles = mask_.key_tiles(m);
    const auto has_keys = lse(rows) != kMinusInf;
    const int64_t num_rows_with_keys = has_keys.count();
    for (int64_t n = tiles.begin; n < tiles.end; ++n) {
      const auto reference = row_vector(scratch_.reference + n * kBlockRows, rows);
      const auto tile_mass = row_vector(scratch_.tile_mass + n * kBlockRows, rows);
      const auto row_mass = tile_mass * (reference - lse(rows)).exp();
      stats[n] = tile_score_mean(has_keys.select(row_mass, Compute{0}).sum(), num_rows_with_keys);
    }
  }

  // From store() on, in place of the maxima.
  Vector<Compute> lse(Range rows) const { return row_vector(scratch_.row_max, rows); }

  const Problem& problem_;
  const ForwardArgs& args_;
  const Output<Element>& output_;
  const Mask& mask_;
  const Workspace<Compute>& workspace_;
  const Scratch<Compute>& scratch_;
  const int64_t head_idx_;
  const int64_t batch_;
  const int64_t head_;
  const int64_t first_key_row_;  // of this head in the workspace's K and V
  const Range tiles_;
  const Range rows_;
  const int64_t padded_dim_;
  RowBlock<Compute> out_;  // [D, rows]
};

template <typename Element>
void forward_all(const Problem& problem, const ForwardArgs& args, const Execution& execution) {
  using Compute = ComputeOf<Element>;
  const Mask mask = Mask::of(problem);
  const int64_t blocks = ceil_div(num_query_tiles(problem.query_length), kBlockTiles);
  const int64_t heads = problem.batch * problem.num_query_heads;
  const int64_t key_heads = problem.batch * problem.num_key_heads;
  const int64_t key_tiles = num_key_tiles(problem.key_length);
  const bool record = args.tile_stats != nullptr;
  const Workspace<Compute> workspace(problem, record, execution.num_threads, execution.workspace);
  const Output<Element> output(args.out, problem, problem.query_length, problem.num_query_heads);

  parallel_for(key_heads * key_tiles, execution.num_threads, [&](int64_t index, int) {
    const int64_t head_idx = index / key_tiles;
    const Range keys = mask.keys_of_tile(index % key_tiles);
    const int64_t first = (head_idx * workspace.rows_per_head + keys.begin) * problem.head_dim;
    const auto copy = [&](const ConstTensor& tensor, Compute* to) {
      load<Element>(rows_of<Element>(tensor, head_idx / problem.num_key_heads,
                                     head_idx % problem.num_key_heads, keys.begin, keys.size(),
                                     problem.head_dim),
                    to + first, problem.head_dim);
    };
    copy(args.key, workspace.key);
    copy(args.value, workspace.value);
  });

  // Head by head, so that its K and V stay in L2; the last blocks first, since they see the most
  // keys under a causal mask.
  parallel_for(heads * blocks, execution.num_threads, [&](int64_t index, int thread) {
    Carver carver(workspace.scratch + workspace.scratch_bytes * thread);
    const Scratch<Compute> scratch(carver, problem, record);
    Block<Element>(problem, args, output, mask, index / blocks, blocks - 1 - index % blocks,
                   workspace, scratch)
        .run();
  });
}

}  // namespace

size_t forward_workspace_bytes(const Problem& problem, bool record_tile_stats, int num_threads) {
  return problem.dtype == DType::kFloat64
             ? Workspace<double>(problem, record_tile_stats, num_threads, nullptr).bytes
             : Workspace<float>(problem, record_tile_stats, num_threads, nullptr).bytes;
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
