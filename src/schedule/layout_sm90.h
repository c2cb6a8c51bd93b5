// What the schedule says to the backward on a Hopper GPU.
#pragma once

#include <algorithm>
#include <cstdint>

#include "common/mask.h"
#include "common/workspace.h"

namespace backlite::schedule_sm90 {

// A run of live tiles of one column (batch, key head, key tile). The live tiles of a column are
// numbered through the query heads of its group, then the query tiles.
struct alignas(16) WorkItem {
  int32_t batch;
  int32_t key_head;
  int32_t key_tile;
  int32_t first_live;  // the item's tiles are live tiles [first_live, first_live + num_live)
  int32_t num_live;    // of the column; at least 1
  int32_t part_slot;   // where the parts of a split column are added up, or -1: the whole column
  int32_t reserved[2];
};
static_assert(sizeof(WorkItem) == 32, "Read as two 16-byte words");

// Columns longer than a limit are split into parts of about equal length. The limit is this share
// of the mean work of a block: longest first, the last item to start then ends at most that much
// after the mean.
inline constexpr int kSplitsPerBlock = 2;

// Of word `index` of a column's tile bits, the tiles that the mask allows.
BACKLITE_HOST_DEVICE constexpr uint32_t live_word(uint32_t word, int index, const Range& allowed) {
  const int64_t first = allowed.begin - index * kTilesPerWord;
  const int64_t last = allowed.end - index * kTilesPerWord;
  if (first > 0) word &= first < kTilesPerWord ? ~0u << first : 0;
  if (last < kTilesPerWord) word &= last > 0 ? ~(~0u << last) : 0;
  return word;
}

struct Header {
  int32_t num_items;
  int32_t num_slots;            // split columns
  unsigned long long num_live;  // live tiles altogether
};

// Where few live tiles meet in a query tile, the first one stores its dQ instead of adding it, and
// nobody writes zeros before: 20% of the time at 2k, 5% live. To ask who is the first costs as much
// as zeros where six to ten meet: even at 8k, 10% live, and 1% gained on real masks with seven. At
// head dim 64, where zeros are half as many, it costs more: 1.44 ms beside 1.37 at 8k, 10% live.
BACKLITE_HOST_DEVICE constexpr bool first_stores(const Header& header, int64_t num_query_tiles,
                                                 int head_dim) {
  const int64_t few_adds = head_dim == 64 ? 4 : 8;
  return static_cast<int64_t>(header.num_live) <= few_adds * num_query_tiles;
}

struct ScheduleLayout {
  int64_t num_columns;  // B * Hk * Tn
  int64_t max_slots;    // a split column is longer than the limit: so many fit into the total
  int64_t max_items;
  Header* header;
  int32_t* live;          // [num_columns]: live tiles
  WorkItem* items;        // [max_items]: see plan_sm90.cuh for their order
  int32_t* slot_columns;  // [max_slots]: which column each slot belongs to
  size_t bytes;

  ScheduleLayout(const Problem& problem, int num_blocks, void* base) {
    num_columns = problem.batch * problem.num_key_heads * num_key_tiles(problem.key_length);
    const int64_t limits = int64_t{kSplitsPerBlock} * num_blocks;
    max_slots = std::min(num_columns, limits);
    max_items = num_columns + limits;
    Carver carver(base);
    header = carver.take<Header>(1);
    live = carver.take<int32_t>(num_columns);
    items = carver.take<WorkItem>(max_items);
    slot_columns = carver.take<int32_t>(max_slots);
    bytes = carver.bytes();
  }
};

}  // namespace backlite::schedule_sm90
