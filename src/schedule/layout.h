// What the schedule says to the backward on the CPU.
#pragma once

#include <algorithm>
#include <cstdint>

#include "common/mask.h"
#include "common/workspace.h"

namespace backlite::cpu {

// One column of live tiles: all query tiles of all query heads that share one key head.
struct WorkItem {
  int32_t batch;
  int32_t key_head;
  int32_t key_tile;
  int32_t num_live;  // live tiles, over the query heads of the group

  // In quarters of a tile. Beyond its tiles a column takes a quarter of one: its K and V are read,
  // its dK and dV written, zeros too.
  int64_t work() const { return 4 * int64_t{num_live} + 1; }
};

// Columns of one (batch, key head) add to the same dQ. They are dealt to lanes: a lane is worked
// off by one thread, in order, into a dQ of its own, and the lanes' dQ are added in order
// afterwards. So the result does not depend on the number of threads, nothing waits, and few heads
// still feed many threads. The number of lanes bounds the parallelism and, times dQ, the workspace.
// This is how many there are at least, over all heads, if there are that many columns.
inline constexpr int64_t kMinLanes = 16;

inline int64_t lanes_per_head(const Problem& problem) {
  const int64_t heads = std::max<int64_t>(problem.batch * problem.num_key_heads, 1);
  const int64_t columns = std::max<int64_t>(num_key_tiles(problem.key_length), 1);
  return std::min(ceil_div(kMinLanes, heads), columns);
}

struct ScheduleLayout {
  int64_t num_lanes;    // batch * num_key_heads * lanes_per_head
  int32_t* lane_order;  // [num_lanes]: lanes, the most work first
  int64_t* lane_begin;  // [num_lanes + 1]: items of lane i are [lane_begin[i], lane_begin[i + 1])
  WorkItem* items;     // [B * Hk * Tn], lane by lane; columns without a live tile too (dK = dV = 0)
  WorkItem* sorted;    // [Tn]: scratch of schedule()
  int64_t* lane_load;  // [num_lanes]: the work of each lane
  int32_t* lane_of;    // [Tn]: scratch of schedule()
  size_t bytes;

  ScheduleLayout(const Problem& problem, void* base) {
    const int64_t heads = problem.batch * problem.num_key_heads;
    const int64_t columns = num_key_tiles(problem.key_length);
    Carver carver(base);
    num_lanes = heads * lanes_per_head(problem);
    lane_order = carver.take<int32_t>(num_lanes);
    lane_begin = carver.take<int64_t>(num_lanes + 1);
    items = carver.take<WorkItem>(heads * columns);
    sorted = carver.take<WorkItem>(columns);
    lane_load = carver.take<int64_t>(num_lanes);
    lane_of = carver.take<int32_t>(columns);
    bytes = carver.bytes();
  }
};

}  // namespace backlite::cpu
