// Backward, one column of live tiles at a time. For every live (query tile, key tile):
//   (1) S = scale * Q K^T
//   (2) P = exp(S - LSE)                       0 where masked
//   (3) dV += P^T dO
//   (4) dP = dO V^T
//   (5) dS = P * (dP - delta)                  delta = rowsum(dO * O) - dLSE, with the exact O
//   (6) dK += dS^T Q                           scale is already in the scaled Q of (1)
//   (7) dQ += dS K                             scale is applied once, at the end
//
// Tiles are kept key-major, S^T = K Q^T, as in the Hopper kernel: the 64 queries of a key are
// contiguous, so LSE and delta are vectors along the fast dimension.
#include "backward/cpu.h"

#include <cmath>
#include <limits>

#include "backward/tile_source.h"
#include "common/mask.h"
#include "common/matrix.h"
#include "common/parallel.h"
#include "common/workspace.h"
#include "schedule/layout.h"

namespace backlite::cpu {
namespace {

template <typename Compute>
struct Scratch {  // of one thread
  Compute* query;       // [64, D], scaled
  Compute* grad_out;    // [64, D], unused where no conversion is needed
  Compute* key;         // [128, D], likewise
  Compute* value;       // [128, D], likewise
  Compute* probs;       // [128, 64]: S, then P
  Compute* grad_probs;  // [128, 64]: dP, then dS
  Compute* grad_key;    // [128, D]
  Compute* grad_value;  // [128, D]

  Scratch(Carver& carver, const Problem& problem) {
    query = carver.take<Compute>(kQueryTile * problem.head_dim);
    grad_out = carver.take<Compute>(kQueryTile * problem.head_dim);
    key = carver.take<Compute>(kKeyTile * problem.head_dim);
    value = carver.take<Compute>(kKeyTile * problem.head_dim);
    probs = carver.take<Compute>(kKeyTile * kQueryTile);
    grad_probs = carver.take<Compute>(kKeyTile * kQueryTile);
    grad_key = carver.take<Compute>(kKeyTile * problem.head_dim);
    grad_value = carver.take<Compute>(kKeyTile * problem.head_dim);
  }
};

template <typename Compute>
struct Workspace {
  Compute* lse;          // [B, H, Sq]: +inf instead of -inf, so that P = exp(S - LSE) is 0 there
  Compute* delta;        // [B, H, Sq]
  Compute* grad_query;   // [lanes_per_head, B, H, Sq, D]
  uint8_t* touched;      // [lanes_per_head, B, H, Tm]: has the lane written this dQ tile?
  std::byte* scratch;    // [num_threads, scratch_bytes]
  size_t scratch_bytes;  // of one thread
  size_t bytes;

  Workspace(const Problem& problem, int num_threads, void* base) {
    Carver counter(nullptr);
    Scratch<Compute>(counter, problem);
    scratch_bytes = counter.bytes();

    const int64_t heads = problem.batch * problem.num_query_heads;
    const int64_t rows = heads * problem.query_length;
    const int64_t lanes = lanes_per_head(problem);
    Carver carver(base);
    lse = carver.take<Compute>(rows);
    delta = carver.take<Compute>(rows);
    grad_query = carver.take<Compute>(lanes * rows * problem.head_dim);
    touched = carver.take<uint8_t>(lanes * heads * num_query_tiles(problem.query_length));
    scratch = carver.take<std::byte>(static_cast<int64_t>(scratch_bytes) * num_threads);
    bytes = carver.bytes();
  }
};

// The steps before the columns: delta, and a LSE that is safe for rows without keys. Their delta is
// 0, whatever the gradient into their LSE of -inf is.
template <typename Element>
void prepare_query_tile(const Problem& problem, const BackwardArgs& args, const Mask& mask,
                        int64_t head_idx, int64_t query_tile,
                        const Workspace<ComputeOf<Element>>& workspace) {
  using Compute = ComputeOf<Element>;
  const int64_t batch = head_idx / problem.num_query_heads;
  const int64_t head = head_idx % problem.num_query_heads;
  const Range rows = mask.rows_of_tile(query_tile);
  const int64_t first = head_idx * problem.query_length + rows.begin;
  const auto out =
      rows_of<Element>(args.out, batch, head, rows.begin, rows.size(), problem.head_dim);
  const auto grad_out =
      rows_of<Element>(args.grad_out, batch, head, rows.begin, rows.size(), problem.head_dim);
  const auto* lse = static_cast<const Compute*>(args.lse) + first;
  const auto* grad_lse =
      args.grad_lse == nullptr ? nullptr : static_cast<const Compute*>(args.grad_lse) + first;

  for (int64_t i = 0; i < rows.size(); ++i) {
    const bool has_keys = lse[i] != -std::numeric_limits<Compute>::infinity();
    const Compute dot = out.row(i).template cast<Compute>().dot(
        grad_out.row(i).template cast<Compute>());
    workspace.lse[first + i] = has_keys ? lse[i] : std::numeric_limits<Compute>::infinity();
    workspace.delta[first + i] =
        has_keys ? dot - (grad_lse == nullptr ? Compute{0} : grad_lse[i]) : Compute{0};
  }
}

template <typename Element>
class Column {
 public:
  using Compute = ComputeOf<Element>;

  Column(const Problem& problem, const BackwardArgs& args, const Mask& mask, const WorkItem& item,
         int64_t lane, const Workspace<Compute>& workspace, const Scratch<Compute>& scratch)
      : problem_(problem),
        args_(args),
        mask_(mask),
        item_(item),
        lane_(lane),
        workspace_(workspace),
        scratch_(scratch),
        keys_(mask.keys_of_tile(item.key_tile)),
        key_(in_compute_type<Element>(
            rows_of<Element>(args.key, item.batch, item.key_head, keys_.begin, keys_.size(),
                             problem.head_dim),
            scratch.key)),
        value_(in_compute_type<Element>(
            rows_of<Element>(args.value, item.batch, item.key_head, keys_.begin, keys_.size(),
                             problem.head_dim),
            scratch.value)),
        grad_key_(scratch.grad_key, keys_.size(), problem.head_dim,
                  Eigen::OuterStride<>(problem.head_dim)),
        grad_value_(scratch.grad_value, keys_.size(), problem.head_dim,
                    Eigen::OuterStride<>(problem.head_dim)) {}

  void run() {
    grad_key_.setZero();
    grad_value_.setZero();
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
    store(args_.grad_key, grad_key_);
    store(args_.grad_value, grad_value_);
  }

 private:
  void visit_tile(int64_t head, int64_t query_tile) {
    const int64_t head_dim = problem_.head_dim;
    const Range rows = mask_.rows_of_tile(query_tile);
    const int64_t head_idx = item_.batch * problem_.num_query_heads + head;
    const int64_t first = head_idx * problem_.query_length + rows.begin;

    RowBlock<Compute> query(scratch_.query, rows.size(), head_dim, Eigen::OuterStride<>(head_dim));
    query = rows_of<Element>(args_.query, item_.batch, head, rows.begin, rows.size(), head_dim)
                .template cast<Compute>() *
            static_cast<Compute>(problem_.scale);
    const auto grad_out = in_compute_type<Element>(
        rows_of<Element>(args_.grad_out, item_.batch, head, rows.begin, rows.size(), head_dim),
        scratch_.grad_out);
    const Vector<Compute> lse(workspace_.lse + first, rows.size());
    const Vector<Compute> delta(workspace_.delta + first, rows.size());

    // (1)
    ColBlock<Compute> probs(scratch_.probs, rows.size(), keys_.size());
    probs.noalias() = query * key_.transpose();

    // (2)
    for (int64_t j = 0; j < keys_.size(); ++j) {
      probs.col(j).array() = (probs.col(j).array() - lse).exp();
    }
    if (!mask_.is_full(query_tile, item_.key_tile)) {
      for (int64_t j = 0; j < keys_.size(); ++j) {
        const Range seen_by = mask_.rows_of_key(keys_.begin + j);
        for (int64_t i = 0; i < rows.size(); ++i) {
          const int64_t row = rows.begin + i;
          if (row < seen_by.begin || row >= seen_by.end) probs(i, j) = Compute{0};
        }
      }
    }

    // (3)
    grad_value_.noalias() += probs.transpose() * grad_out;

    // (4)
    ColBlock<Compute> grad_probs(scratch_.grad_probs, rows.size(), keys_.size());
    grad_probs.noalias() = grad_out * value_.transpose();

    // (5)
    for (int64_t j = 0; j < keys_.size(); ++j) {
      grad_probs.col(j).array() =
          probs.col(j).array() * (grad_probs.col(j).array() - delta);
    }

    // (6)
    grad_key_.noalias() += grad_probs.transpose() * query;

    // (7) The first tile that a lane adds to a row of dQ is stored instead: no zeroing pass, which
    // would cost as much as the live tiles themselves when few are live.
    const int64_t heads = problem_.batch * problem_.num_query_heads;
    RowBlock<Compute> grad_query(
        workspace_.grad_query + (lane_ * heads * problem_.query_length + first) * head_dim,
        rows.size(), head_dim, Eigen::OuterStride<>(head_dim));
    uint8_t& touched =
        workspace_.touched[(lane_ * heads + head_idx) * num_query_tiles(problem_.query_length) +
                           query_tile];
    if (touched) {
      grad_query.noalias() += grad_probs * key_;
    } else {
      grad_query.noalias() = grad_probs * key_;
      touched = 1;
    }
  }

  void store(const Tensor& tensor, const RowBlock<Compute>& block) const {
    rows_of<Element>(tensor, item_.batch, item_.key_head, keys_.begin, keys_.size(),
                     problem_.head_dim) = block.template cast<Element>();
  }

  const Problem& problem_;
  const BackwardArgs& args_;
  const Mask& mask_;
  const WorkItem item_;
  const int64_t lane_;
  const Workspace<Compute>& workspace_;
  const Scratch<Compute>& scratch_;
  const Range keys_;
  const ConstRowBlock<Compute> key_;
  const ConstRowBlock<Compute> value_;
  RowBlock<Compute> grad_key_;
  RowBlock<Compute> grad_value_;
};

// The step after the columns: dQ = scale * (sum of the lanes, in their order).
template <typename Element>
void finish_query_tile(const Problem& problem, const BackwardArgs& args, const Mask& mask,
                       int64_t head_idx, int64_t query_tile,
                       const Workspace<ComputeOf<Element>>& workspace) {
  using Compute = ComputeOf<Element>;
  const int64_t head_dim = problem.head_dim;
  const int64_t heads = problem.batch * problem.num_query_heads;
  const Range rows = mask.rows_of_tile(query_tile);
  const auto part_of = [&](int64_t lane) {
    return RowBlock<Compute>(
        workspace.grad_query +
            ((lane * heads + head_idx) * problem.query_length + rows.begin) * head_dim,
        rows.size(), head_dim, Eigen::OuterStride<>(head_dim));
  };
  int64_t first = -1;  // the first lane that has a part; it collects the others
  for (int64_t lane = 0; lane < lanes_per_head(problem); ++lane) {
    if (!workspace.touched[(lane * heads + head_idx) * num_query_tiles(problem.query_length) +
                           query_tile]) {
      continue;
    }
    if (first < 0) {
      first = lane;
    } else {
      part_of(first) += part_of(lane);
    }
  }
  auto grad_query =
      rows_of<Element>(args.grad_query, head_idx / problem.num_query_heads,
                       head_idx % problem.num_query_heads, rows.begin, rows.size(), head_dim);
  if (first < 0) {
    grad_query.setZero();
  } else {
    grad_query =
        (part_of(first) * static_cast<Compute>(problem.scale)).template cast<Element>();
  }
}

template <typename Element>
void backward_all(const Problem& problem, const BackwardArgs& args, const Execution& execution) {
  using Compute = ComputeOf<Element>;
  const Mask mask = Mask::of(problem);
  const Workspace<Compute> workspace(problem, execution.num_threads, execution.workspace);
  const ScheduleLayout schedule(problem, const_cast<void*>(args.schedule));
  const int64_t heads = problem.batch * problem.num_query_heads;
  const int64_t tiles = num_query_tiles(problem.query_length);
  const int64_t lanes = lanes_per_head(problem);

  std::fill_n(workspace.touched, lanes * heads * tiles, uint8_t{0});
  parallel_for(heads * tiles, execution.num_threads, [&](int64_t index, int) {
    prepare_query_tile<Element>(problem, args, mask, index / tiles, index % tiles, workspace);
  });
  parallel_for(schedule.num_lanes, execution.num_threads, [&](int64_t index, int thread) {
    Carver carver(workspace.scratch + workspace.scratch_bytes * thread);
    const Scratch<Compute> scratch(carver, problem);
    const int64_t lane = schedule.lane_order[index];
    for (int64_t i = schedule.lane_begin[lane]; i < schedule.lane_begin[lane + 1]; ++i) {
      Column<Element>(problem, args, mask, schedule.items[i], lane % lanes, workspace, scratch)
          .run();
    }
  });
  parallel_for(heads * tiles, execution.num_threads, [&](int64_t index, int) {
    finish_query_tile<Element>(problem, args, mask, index / tiles, index % tiles, workspace);
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
