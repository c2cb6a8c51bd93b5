// Runs the four stages with outputs and workspace poisoned before each call. Throws if anything was
// written where nothing belongs.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

#include "backlite/backlite.h"
#include "cases.h"
#include "reference.h"
#include "tensors.h"

namespace backlite::test {

// What differs between runs that must agree bit by bit.
struct RunOptions {
  int num_threads = 2;
  std::byte workspace_fill = Bytes::kPoison;
};

inline void require(bool holds, const std::string& otherwise) {
  if (!holds) throw std::logic_error(otherwise);
}

// A workspace of exactly the stage's size.
class Workspace {
 public:
  Workspace(size_t bytes, const RunOptions& options) : bytes_(bytes, options.workspace_fill) {
    execution_ = {
        .num_threads = options.num_threads, .workspace = bytes_.data(), .workspace_bytes = bytes};
  }
  const Execution& execution() const { return execution_; }
  void check() const {
    require(bytes_.guard_is_untouched(), "a stage wrote past the end of its workspace");
  }

 private:
  Bytes bytes_;
  Execution execution_;
};

// Everything that the stages read and write for one case.
struct Stages {
  static constexpr uint64_t kSeed = 1;

  Problem problem;
  Strided query, key, value, grad_out;
  Strided grad_lse;  // [B, H, Sq, 1]
  Strided out, lse;
  std::vector<float> tile_stats;
  std::vector<int32_t> tile_bits;
  Strided grad_query, grad_key, grad_value;

  explicit Stages(const Case& c)
      : problem(c.problem()),
        query(c.dtype, random_array(query_shape(problem), kSeed, c.magnitude), c.layout),
        key(c.dtype, random_array(key_shape(problem), kSeed + 1, c.magnitude), c.layout),
        value(c.dtype, random_array(key_shape(problem), kSeed + 2, c.magnitude), c.layout),
        grad_out(c.dtype, random_array(query_shape(problem), kSeed + 3), c.layout),
        grad_lse(lse_dtype(c.dtype), random_array(lse_shape(), kSeed + 4), Layout::kContiguous),
        out(c.dtype, query_shape(problem), output_layout(c)),
        lse(lse_dtype(c.dtype), lse_shape(), Layout::kContiguous),
        tile_stats(num_tiles(), NAN),
        tile_bits(num_words(), -1),
        grad_query(c.dtype, query_shape(problem), output_layout(c)),
        grad_key(c.dtype, key_shape(problem), output_layout(c)),
        grad_value(c.dtype, key_shape(problem), output_layout(c)) {}

  Shape lse_shape() const {
    return {problem.batch, problem.num_query_heads, problem.query_length, 1};
  }
  size_t num_tiles() const { return TileMap(problem, false).live.size(); }
  size_t num_words() const {
    const int64_t words = tiles_of(tiles_of(problem.query_length, kQueryTile), kTilesPerWord);
    return static_cast<size_t>(problem.batch * problem.num_query_heads *
                               tiles_of(problem.key_length, kKeyTile) * words);
  }

  ForwardArgs forward_args(bool record) {
    return {.query = query.input(),
            .key = key.input(),
            .value = value.input(),
            .out = out.output(),
            .lse = lse.output().data,
            .tile_stats = record ? tile_stats.data() : nullptr};
  }

  void run_forward(bool record = true, const RunOptions& options = {}) {
    // An empty vector has a null data(), which would mean: record nothing.
    const bool records = record && !tile_stats.empty();
    const Workspace workspace(forward_workspace_bytes(problem, records, options.num_threads),
                              options);
    forward(problem, forward_args(records), workspace.execution());
    workspace.check();
    require(out.gaps_are_untouched(), "forward wrote outside the rows of out");
    require(lse.gaps_are_untouched(), "forward wrote outside lse");
  }

  void run_select(const std::vector<int64_t>& negl_prob, const RunOptions& options = {}) {
    const Workspace workspace(select_workspace_bytes(problem, options.num_threads), options);
    select(problem,
           {.tile_stats = tile_stats.data(),
            .negl_prob = negl_prob.data(),
            .num_negl_prob = static_cast<int64_t>(negl_prob.size()),
            .tile_bits = tile_bits.data()},
           workspace.execution());
    workspace.check();
  }

  BackwardArgs backward_args(bool with_grad_lse, const int32_t* bits, const void* schedule) {
    return {.query = query.input(),
            .key = key.input(),
            .value = value.input(),
            .out = out.input(),
            .grad_out = grad_out.input(),
            .lse = lse.input().data,
            .grad_lse = with_grad_lse ? grad_lse.input().data : nullptr,
            .tile_bits = bits,
            .schedule = schedule,
            .grad_query = grad_query.output(),
            .grad_key = grad_key.output(),
            .grad_value = grad_value.output()};
  }

  // Schedule and backward. `sparse` reads tile_bits.
  void run_backward(bool sparse, bool with_grad_lse, const RunOptions& options = {}) {
    // An empty vector has a null data(), which means dense: the same thing, where no tile exists.
    const int32_t* const bits = sparse ? tile_bits.data() : nullptr;
    Bytes plan(schedule_bytes(problem), options.workspace_fill);
    schedule(
        problem,
        {.tile_bits = bits, .schedule = plan.data(), .schedule_bytes = schedule_bytes(problem)},
        {.num_threads = options.num_threads});
    require(plan.guard_is_untouched(), "written past the end of the schedule");

    const Workspace workspace(backward_workspace_bytes(problem, options.num_threads), options);
    backward(problem, backward_args(with_grad_lse, bits, plan.data()), workspace.execution());
    workspace.check();
    require(grad_query.gaps_are_untouched(), "wrote outside the rows of grad_query");
    require(grad_key.gaps_are_untouched(), "wrote outside the rows of grad_key");
    require(grad_value.gaps_are_untouched(), "wrote outside the rows of grad_value");
  }

  // The tiles that the bits call live.
  TileMap tiles_from_bits() const {
    TileMap tiles(problem, false);
    const int64_t words = tiles_of(tiles.query_tiles, kTilesPerWord);
    for (int64_t b = 0; b < problem.batch; ++b) {
      for (int64_t h = 0; h < tiles.heads; ++h) {
        for (int64_t m = 0; m < tiles.query_tiles; ++m) {
          for (int64_t n = 0; n < tiles.key_tiles; ++n) {
            const int64_t column = (b * tiles.heads + h) * tiles.key_tiles + n;
            const auto word = static_cast<uint32_t>(tile_bits[column * words + m / kTilesPerWord]);
            tiles.at(b, h, m, n) = (word >> (m % kTilesPerWord) & 1) != 0;
          }
        }
      }
    }
    return tiles;
  }

 private:
  static Layout output_layout(const Case& c) {
    return c.layout == Layout::kBroadcast ? Layout::kContiguous : c.layout;
  }
};

}  // namespace backlite::test
