// What the Hopper forward kernel is given, and the order in which its blocks take work.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "common/mask.h"

namespace backlite::forward_sm90 {

struct WorkItem {
  int block;  // of query rows; negative: no more work
  int head;   // query head
  int batch;
};

// Items are handed out in this order: group of heads, block of rows, head of the group. The K and V
// of a group fit in L2. Under a causal mask the last rows see the most keys, so they come first,
// and short items fill the gaps at the end.
struct WorkOrder {
  int num_items = 0;
  int num_blocks = 0;       // of query rows
  int num_heads = 0;        // query heads of one batch
  int num_batch_heads = 0;  // B * H
  int group_heads = 0;      // query heads in a group
  bool last_rows_first = false;

  BACKLITE_HOST_DEVICE constexpr WorkItem item(int index) const {
    const int items_in_group = group_heads * num_blocks;
    const int group = index / items_in_group;
    const int index_in_group = index - group * items_in_group;
    const int heads_left = num_batch_heads - group * group_heads;
    const int heads = heads_left < group_heads ? heads_left : group_heads;
    const int block = index_in_group / heads;
    const int batch_head = group * group_heads + index_in_group - block * heads;
    const int batch = batch_head / num_heads;
    return {.block = last_rows_first ? num_blocks - 1 - block : block,
            .head = batch_head - batch * num_heads,
            .batch = batch};
  }
};

struct ForwardParams {
  CUtensorMap query;  // (B, H, Sq, D), boxes of 64 rows
  CUtensorMap key;    // (B, Hk, Sk, D), boxes of block_keys rows
  CUtensorMap value;
  CUtensorMap out;  // as query
  WorkOrder order;
  int* next_item;  // zero at the start: how many items beyond the first round are taken
  Mask mask;
  int heads_per_key_head;
  float scale_log2;      // > 0; |scale| * log2(e)
  float score_sign;      // 1, or -1 if scale is negative: then every tile counts as masked
  float* lse;            // [B, H, Sq]
  float* tile_stats;     // [B, H, Tm, Tn], or nullptr without statistics
  uint32_t* row_masses;  // [grid][2][consumers][Tn][32]: see tile_stats_sm90.cuh
  int block_rows;        // query rows of an item: which of the compiled forms
  int num_query_tiles;   // Tm
  int num_key_tiles;     // Tn
};

}  // namespace backlite::forward_sm90
