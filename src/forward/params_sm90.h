// What the Hopper forward kernel is given.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "common/mask.h"
#include "forward/item_sm90.h"

namespace backlite::forward_sm90 {

struct ForwardParams {
  CUtensorMap query;  // (B, H, Sq, D), boxes of 64 rows
  CUtensorMap key;    // (B, Hk, Sk, D), boxes of block_keys rows
  CUtensorMap value;
  CUtensorMap out;  // as query
  WorkOrder order;
  int* next_item;  // zero at the start: how many items beyond the first round are taken, if any are
  Mask mask;
  int heads_per_key_head;
  float scale_log2;      // > 0; |scale| * log2(e)
  float score_sign;      // 1, or -1 if scale is negative: then every tile counts as masked
  float* lse;            // [B, H, Sq], or nullptr
  float* tile_stats;     // [B, H, Tm, Tn], or nullptr without statistics
  uint32_t* row_masses;  // [grid][2][consumers][Tn][32]: see tile_stats_sm90.cuh
  int block_rows;        // query rows of an item: which of the compiled forms
  int num_query_tiles;   // Tm
  int num_key_tiles;     // Tn
};

}  // namespace backlite::forward_sm90
