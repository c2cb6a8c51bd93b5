// Backward, one column of live tiles at a time. For every live (query tile, key tile):
//   (1) S = scale * Q K^T
//   (2) P = exp(S - LSE)                       0 where masked
//   (3) dV += P^T dO
//   (4) dP = dO V^T
//   (5) dS = P * (dP - delta)                  delta = rowsum(dO * O) - dLSE, with the exact O
//   (6) dK += dS^T Q                           scale is already in the scaled Q of (1)
//   (7) dQ += dS K                             scale is applied once, at the end
//
// K^T and V^T are made once a column; Q and dO are used as they lie.
#include "backward/cpu.h"

#include <algorithm>
#include <limits>

#include "backward/tile_source.h"
#include "common/mask.h"
#include "common/matrix.h"
#include "common/output.h"
#include "common/parallel.h"
#include "common/product.h"
#include "common/transpose.h"
#include "common/workspace.h"
#include "schedule/layout.h"

namespace backlite::cpu {
namespace {

template <typename Compute>
struct Scratch {              // of one thread; Dp = D, padded for products
  Compute* query;             // [64, Dp], scaled
  Compute* grad_out;          // [64, Dp]
  Compute* key;               // [128, Dp]
  Compute* key_transposed;    // [Dp, 128]
  Compute* value_transposed;  // [Dp, 128]
  Compute* probs;             // [64, 128]: S, then P
  Compute* grad_probs;        // [64, 128]: dP, then dS
  Compute* grad_key;          // [128, Dp]
  Compute* grad_value;        // [128, Dp]

  Scratch(Carver& carver, const Problem& problem) {
    const int64_t padded_dim = pad_rows(problem.head_dim);
    query = carver.take<Compute>(kQueryTile * padded_dim);
    grad_out = carver.take<Compute>(kQueryTile * padded_dim);
    key = carver.take<Compute>(kKeyTile * padded_dim);
    key_transposed = carver.take<Compute>(kKeyTile * padded_dim);
    value_transposed = carver.take<Compute>(kKeyTile * padded_dim);
    probs = carver.take<Compute>(kQueryTile * kKeyTile);
    grad_probs = carver.take<Compute>(kQueryTile * kKeyTile);
    grad_key = carver.take<Compute>(kKeyTile * padded_dim);
    grad_value = carver.take<Compute>(kKeyTile * padded_dim);
  }
};

template <typename Compute>
struct Workspace {
  Compute* lse;          // [B, H, Tm * 64]: +inf instead of -inf, so that P = exp(S - LSE) is 0
  Compute* delta;        // [B, H, Tm * 64]
  Compute* grad_query;   // [lanes_per_head, B, H, Tm * 64, Dp]
  uint8_t* touched;      // [lanes_per_head, B, H, Tm]: has the lane written this dQ tile?
  std::byte* scratch;    // [num_threads, scratch_bytes]
  size_t scratch_bytes;  // of one thread
  size_t bytes;
  int64_t num_tiles;  // B * H * Tm

  // Where a lane keeps its part of a dQ tile.
  int64_t lane_tile(int64_t lane, int64_t tile) const { return lane * num_tiles + tile; }

  Workspace(const Problem& problem, int num_threads, void* base) {
    Carver counter(nullptr);
    Scratch<Compute>(counter, problem);
    scratch_bytes = counter.bytes();

    num_tiles = problem.batch * problem.num_query_heads * num_query_tiles(problem.query_length);
    const int64_t rows = num_tiles * kQueryTile;
    const int64_t lanes = lanes_per_head(problem);
    Carver carver(base);
    lse = carver.take<Compute>(rows);
    delta = carver.take<Compute>(rows);
    grad_query = carver.take<Compute>(lanes * rows * pad_rows(problem.head_dim));
    touched = carver.take<uint8_t>(lanes * num_tiles);
    scratch = carver.take<std::byte>(static_cast<int64_t>(scratch_bytes) * num_threads);
    bytes = carver.bytes();
  }
};

// Before the columns: delta, and a LSE that is safe for rows without keys. Their delta is 0,
// whatever the gradient into their LSE of -inf is. All heads of a query together, since they are
// neighbours in memory: (batch, length, heads, head_dim).
template <typename Element>
void prepare_query(const Problem& problem, const BackwardArgs& args, int64_t batch, int64_t query,
                   const Workspace<ComputeOf<Element>>& workspace) {
  using Compute = ComputeOf<Element>;
  const int64_t padded_length = num_query_tiles(problem.query_length) * kQueryTile;
  const auto row_of = [&](const ConstTensor& tensor, int64_t head) {
    return rows_of<Element>(tensor, batch, head, query, 1, problem.head_dim)
        .array()
        .template cast<Compute>();
  };
  for (int64_t head = 0; head < problem.num_query_heads; ++head) {
    const int64_t head_idx = batch * problem.num_query_heads + head;
    const int64_t from = head_idx * problem.query_length + query;
    const int64_t to = head_idx * padded_length + query;
    const Compute lse = static_cast<const Compute*>(args.lse)[from];
    const Compute grad_lse =
        args.grad_lse == nullptr ? Compute{0} : static_cast<const Compute*>(args.grad_lse)[from];
    const Compute dot = (row_of(args.out, head) * row_of(args.grad_out, head)).sum();
    const bool has_keys = lse != -std::numeric_limits<Compute>::infinity();
    workspace.lse[to] = has_keys ? lse : std::numeric_limits<Compute>::infinity();
    workspace.delta[to] = has_keys ? dot - grad_lse : Compute{0};
  }
}

template <typename Element>
struct Gradients {
  Output<Element> query;
  Output<Element> key;
  Output<Element> value;

  Gradients(const Problem& problem, const BackwardArgs& args)
      : query(args.grad_query, problem, problem.query_length, problem.num_query_heads),
        key(args.grad_key, problem, problem.key_length, problem.num_key_heads),
        value(args.grad_value, problem, problem.key_length, problem.num_key_heads) {}
};

template <typename Element>
class Column {
 public:
  using Compute = ComputeOf<Element>;

  Column(const Problem& problem, const BackwardArgs& args, const Gradients<Element>& gradients,
         const Mask& mask, const WorkItem& item, int64_t lane, const Workspace<Compute>& workspace,
         const Scratch<Compute>& scratch)
      : problem_(problem),
        args_(args),
        gradients_(gradients),
        mask_(mask),
        item_(item),
        lane_(lane),
        workspace_(workspace),
        scratch_(scratch),
        keys_(mask.keys_of_tile(item.key_tile)),
        padded_dim_(pad_rows(problem.head_dim)) {}

  void run() {
    if (item_.num_live > 0) visit_live_tiles();
    const bool none_visited = into_column_ == Into::kStore;
    const auto write = [&](const Output<Element>& output, const Compute* rows) {
      output.write_rows(item_.batch, item_.key_head, keys_, none_visited ? nullptr : rows,
                        padded_dim_);
    };
    write(gradients_.key, scratch_.grad_key);
    write(gradients_.value, scratch_.grad_value);
  }

 private:
  void visit_live_tiles() {
    load_key_and_value();
    const int64_t group = problem_.num_query_heads / problem_.num_key_heads;
    const Range allowed = mask_.query_tiles(item_.key_tile);
    for (int64_t head = item_.key_head * group; head < (item_.key_head + 1) * group; ++head) {
      const auto visit = [&](int64_t query_tile) { visit_tile(head, query_tile); };
      if (args_.tile_bits == nullptr) {
        DenseTiles{allowed}.for_each(visit);
      } else {
        const int64_t column =
            (item_.batch * problem_.num_query_heads + head) * num_key_tiles(problem_.key_length) +
            item_.key_tile;
        LiveTiles{allowed, args_.tile_bits + column * num_bit_words(problem_.query_length)}
            .for_each(visit);
      }
    }
  }

  void load_key_and_value() {
    const auto rows = [&](const ConstTensor& tensor) {
      return rows_of<Element>(tensor, item_.batch, item_.key_head, keys_.begin, keys_.size(),
                              problem_.head_dim);
    };
    load<Element>(rows(args_.key), scratch_.key, padded_dim_);
    transpose(scratch_.key, padded_dim_, scratch_.key_transposed, kKeyTile, keys_.size(),
              problem_.head_dim);
    Compute* const value = scratch_.grad_value;  // free until the first tile
    load<Element>(rows(args_.value), value, padded_dim_);
    transpose(value, padded_dim_, scratch_.value_transposed, kKeyTile, keys_.size(),
              problem_.head_dim);
  }

  void visit_tile(int64_t head, int64_t query_tile) {
    const int64_t head_dim = problem_.head_dim;
    const Range rows = mask_.rows_of_tile(query_tile);
    const int64_t head_idx = item_.batch * problem_.num_query_heads + head;
    const int64_t tile = head_idx * num_query_tiles(problem_.query_length) + query_tile;

    // Copied at every visit: the copy brings the rows into L1 in long strides of the prefetcher,
    // where the products would fetch them a few numbers at a time. Reading one contiguous copy of
    // all of Q and dO in place instead made the backward 20% slower.
    const auto fetch = [&](const ConstTensor& tensor, Compute* to) {
      load<Element>(rows_of<Element>(tensor, item_.batch, head, rows.begin, rows.size(), head_dim),
                    to, padded_dim_);
    };
    fetch(args_.query, scratch_.query);
    fetch(args_.grad_out, scratch_.grad_out);
    RowBlock<Compute>(scratch_.query, rows.size(), head_dim, Eigen::OuterStride<>(padded_dim_)) *=
        static_cast<Compute>(problem_.scale);

    // (1)
    product<Compute>({scratch_.key_transposed, kKeyTile}, {scratch_.query, 1, padded_dim_},
                     {scratch_.probs, kKeyTile}, keys_.size(), rows.size(), head_dim, Into::kStore);

    // (2)
    for (int64_t i = 0; i < rows.size(); ++i) {
      Vector<Compute> probs(scratch_.probs + i * kKeyTile, keys_.size());
      probs = (probs - workspace_.lse[tile * kQueryTile + i]).exp();
    }
    if (!mask_.is_full(query_tile, item_.key_tile)) mask_tile(rows);

    // (3)
    product<Compute>({scratch_.grad_out, padded_dim_}, {scratch_.probs, kKeyTile, 1},
                     {scratch_.grad_value, padded_dim_}, head_dim, keys_.size(), rows.size(),
                     into_column_);

    // (4)
    product<Compute>({scratch_.value_transposed, kKeyTile}, {scratch_.grad_out, 1, padded_dim_},
                     {scratch_.grad_probs, kKeyTile}, keys_.size(), rows.size(), head_dim,
                     Into::kStore);

    // (5)
    for (int64_t i = 0; i < rows.size(); ++i) {
      const Vector<Compute> probs(scratch_.probs + i * kKeyTile, keys_.size());
      Vector<Compute> grad_probs(scratch_.grad_probs + i * kKeyTile, keys_.size());
      grad_probs = probs * (grad_probs - workspace_.delta[tile * kQueryTile + i]);
    }

    // (6)
    product<Compute>({scratch_.query, padded_dim_}, {scratch_.grad_probs, kKeyTile, 1},
                     {scratch_.grad_key, padded_dim_}, head_dim, keys_.size(), rows.size(),
                     into_column_);
    into_column_ = Into::kAdd;

    // (7) The first tile that a lane adds to a row of dQ is stored too: no zeroing pass, which
    // would cost as much as the live tiles themselves when few are live.
    const int64_t lane_tile = workspace_.lane_tile(lane_, tile);
    uint8_t& touched = workspace_.touched[lane_tile];
    product<Compute>({scratch_.key, padded_dim_}, {scratch_.grad_probs, 1, kKeyTile},
                     {workspace_.grad_query + lane_tile * kQueryTile * padded_dim_, padded_dim_},
                     head_dim, rows.size(), keys_.size(), touched ? Into::kAdd : Into::kStore);
    touched = 1;
  }

  void mask_tile(Range rows) const {
    for (int64_t i = 0; i < rows.size(); ++i) {
      const Range sees = mask_.keys_of_row(rows.begin + i);
      for (int64_t j = 0; j < keys_.size(); ++j) {
        const int64_t key = keys_.begin + j;
        if (key < sees.begin || key >= sees.end) scratch_.probs[i * kKeyTile + j] = Compute{0};
      }
    }
  }

  const Problem& problem_;
  const BackwardArgs& args_;
  const Gradients<Element>& gradients_;
  const Mask& mask_;
  const WorkItem item_;
  const int64_t lane_;
  const Workspace<Compute>& workspace_;
  const Scratch<Compute>& scratch_;
  const Range keys_;
  const int64_t padded_dim_;
  Into into_column_ = Into::kStore;  // the first tile makes dK and dV, the others add to them
};

// The step after the columns, again all heads of a query together:
// dQ = scale * (sum of the lanes that touched the tile, in their order).
template <typename Element>
void finish_query(const Problem& problem, const Output<Element>& grad_query, int64_t batch,
                  int64_t query, const Workspace<ComputeOf<Element>>& workspace) {
  using Compute = ComputeOf<Element>;
  const int64_t tiles = num_query_tiles(problem.query_length);
  const int64_t padded_dim = pad_rows(problem.head_dim);
  const auto scale = static_cast<Compute>(problem.scale);
  for (int64_t head = 0; head < problem.num_query_heads; ++head) {
    const int64_t head_idx = batch * problem.num_query_heads + head;
    const int64_t tile = head_idx * tiles + query / kQueryTile;
    const auto part_of = [&](int64_t lane) {
      const int64_t row = workspace.lane_tile(lane, tile) * kQueryTile + query % kQueryTile;
      return Vector<Compute>(workspace.grad_query + row * padded_dim, problem.head_dim);
    };
    Compute* sum = nullptr;  // the first lane that has a part collects the others
    for (int64_t lane = 0; lane < lanes_per_head(problem); ++lane) {
      if (!workspace.touched[workspace.lane_tile(lane, tile)]) continue;
      if (sum == nullptr) {
        sum = part_of(lane).data();
      } else {
        Vector<Compute>(sum, problem.head_dim) += part_of(lane);
      }
    }
    if (sum != nullptr) Vector<Compute>(sum, problem.head_dim) *= scale;
    grad_query.write(batch, head, query, sum);
  }
}

template <typename Element>
void backward_all(const Problem& problem, const BackwardArgs& args, const Execution& execution) {
  using Compute = ComputeOf<Element>;
  const Mask mask = Mask::of(problem);
  const Workspace<Compute> workspace(problem, execution.num_threads, execution.workspace);
  const ScheduleLayout schedule(problem, const_cast<void*>(args.schedule));
  const int64_t tiles = num_query_tiles(problem.query_length);
  const int64_t lanes = lanes_per_head(problem);

  const Gradients<Element> gradients(problem, args);

  std::fill_n(workspace.touched, lanes * workspace.num_tiles, uint8_t{0});
  parallel_for(problem.batch * tiles, execution.num_threads, [&](int64_t index, int) {
    const Range rows = mask.rows_of_tile(index % tiles);
    for (int64_t query = rows.begin; query < rows.end; ++query) {
      prepare_query<Element>(problem, args, index / tiles, query, workspace);
    }
  });
  parallel_for(schedule.num_lanes, execution.num_threads, [&](int64_t index, int thread) {
    Carver carver(workspace.scratch + workspace.scratch_bytes * thread);
    const Scratch<Compute> scratch(carver, problem);
    const int64_t lane = schedule.lane_order[index];
    for (int64_t i = schedule.lane_begin[lane]; i < schedule.lane_begin[lane + 1]; ++i) {
      Column<Element>(problem, args, gradients, mask, schedule.items[i], lane % lanes, workspace,
                      scratch)
          .run();
    }
  });
  parallel_for(problem.batch * tiles, execution.num_threads, [&](int64_t index, int) {
    const Range rows = mask.rows_of_tile(index % tiles);
    for (int64_t query = rows.begin; query < rows.end; ++query) {
      finish_query<Element>(problem, gradients.query, index / tiles, query, workspace);
    }
    Output<Element>::fence();
  });
}

}  // namespace

size_t backward_workspace_bytes(const Problem& problem, int num_threads) {
  return problem.dtype == DType::kFloat64 ? Workspace<double>(problem, num_threads, nullptr).bytes
                                          : Workspace<float>(problem, num_threads, nullptr).bytes;
}

void backward(const Problem& problem, const BackwardArgs& args, const Execution& execution) {
  switch (problem.dtype) {
    case DType::kFloat16: return backward_all<Eigen::half>(problem, args, execution);
    case DType::kBFloat16: return backward_all<Eigen::bfloat16>(problem, args, execution);
    case DType::kFloat32: return backward_all<float>(problem, args, execution);
    case DType::kFloat64: return backward_all<double>(problem, args, execution);
  }
}

}  // namespace backlite::cpu
