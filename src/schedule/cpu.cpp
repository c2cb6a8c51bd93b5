// Schedule: deal the columns of every (batch, key head) to its lanes.
//   (1) count the live tiles of every column
//   (2) sort the columns, most live tiles first (ties: lower key tile first)
//   (3) give each column to the lane with the least work so far (ties: lower lane)
//   (4) order all lanes, most work first
// Longest first, each to the least loaded, ends within 4/3 of the best possible finish (Graham,
// "Bounds on multiprocessing timing anomalies", 1969).
#include "schedule/cpu.h"

#include <algorithm>
#include <bit>
#include <numeric>

#include "schedule/layout.h"

namespace backlite::cpu {
namespace {

int32_t count_live(const Problem& problem, const Mask& mask, const int32_t* tile_bits,
                   int64_t batch, int64_t key_head, int64_t key_tile) {
  const int64_t group = problem.num_query_heads / problem.num_key_heads;
  if (tile_bits == nullptr) return static_cast<int32_t>(group * mask.query_tiles(key_tile).size());
  const int64_t words = num_bit_words(problem.query_length);
  const int64_t columns = num_key_tiles(problem.key_length);
  int32_t live = 0;
  for (int64_t head = key_head * group; head < (key_head + 1) * group; ++head) {
    const int32_t* const column =
        tile_bits + ((batch * problem.num_query_heads + head) * columns + key_tile) * words;
    for (int64_t word = 0; word < words; ++word) {
      live += std::popcount(static_cast<uint32_t>(column[word]));
    }
  }
  return live;
}

}  // namespace

size_t schedule_bytes(const Problem& problem) { return ScheduleLayout(problem, nullptr).bytes; }

void schedule(const Problem& problem, const ScheduleArgs& args) {
  const Mask mask = Mask::of(problem);
  const ScheduleLayout layout(problem, args.schedule);
  const int64_t heads = problem.batch * problem.num_key_heads;
  const int64_t columns = num_key_tiles(problem.key_length);
  const int64_t lanes = lanes_per_head(problem);

  layout.lane_begin[0] = 0;
  for (int64_t head_idx = 0; head_idx < heads; ++head_idx) {
    const int64_t batch = head_idx / problem.num_key_heads;
    const int64_t key_head = head_idx % problem.num_key_heads;

    // (1)
    for (int64_t n = 0; n < columns; ++n) {
      layout.sorted[n] = {
          .batch = static_cast<int32_t>(batch),
          .key_head = static_cast<int32_t>(key_head),
          .key_tile = static_cast<int32_t>(n),
          .num_live = count_live(problem, mask, args.tile_bits, batch, key_head, n)};
    }

    // (2)
    std::sort(layout.sorted, layout.sorted + columns, [](const WorkItem& a, const WorkItem& b) {
      return a.num_live != b.num_live ? a.num_live > b.num_live : a.key_tile < b.key_tile;
    });

    // (3)
    int64_t* const load = layout.lane_load + head_idx * lanes;
    std::fill(load, load + lanes, 0);
    for (int64_t i = 0; i < columns; ++i) {
      const auto lightest = std::min_element(load, load + lanes);
      *lightest += layout.sorted[i].work();
      layout.lane_of[i] = static_cast<int32_t>(lightest - load);
    }
    WorkItem* item = layout.items + head_idx * columns;
    for (int64_t lane = 0; lane < lanes; ++lane) {
      for (int64_t i = 0; i < columns; ++i) {
        if (layout.lane_of[i] == lane) *item++ = layout.sorted[i];
      }
      layout.lane_begin[head_idx * lanes + lane + 1] = item - layout.items;
    }
  }

  // (4)
  std::iota(layout.lane_order, layout.lane_order + layout.num_lanes, 0);
  std::sort(layout.lane_order, layout.lane_order + layout.num_lanes, [&](int32_t a, int32_t b) {
    const int64_t load_a = layout.lane_load[a];
    const int64_t load_b = layout.lane_load[b];
    return load_a != load_b ? load_a > load_b : a < b;
  });
}

}  // namespace backlite::cpu
