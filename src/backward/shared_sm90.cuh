// The shared memory of the Hopper backward.
#pragma once

#include <cstdint>

#include "backward/config_sm90.h"
#include "backward/params_sm90.h"
#include "schedule/layout_sm90.h"
#include "sm90/barrier.cuh"
#include "sm90/layout.h"
#include "sm90/wgmma_small.cuh"

namespace backlite::backward_sm90 {

inline constexpr int kReduceSlots = 4;  // query tiles whose dQ is on its way
inline constexpr int kItemSlots = 2;    // an item's K is loaded while the one before is at work
inline constexpr int kCoreElements = sm90::kCoreRows * sm90::kChunkColumns;

// A live tile on its way from the warp that finds it to the one that loads it.
struct alignas(16) FoundTile {
  int32_t batch;
  int32_t head;        // query head
  int32_t query_tile;  // within the head; negative: the end
  int32_t key_tile;
  int32_t num_live;   // of the item if this is its first tile, otherwise 0
  int32_t part_slot;  // of the item
  int32_t reserved[2];
};
static_assert(sizeof(FoundTile) == 32, "Moved as two 16-byte words");

// Columns with few live tiles take less time than the memory accesses that find them one by one:
// the finder runs this many tiles ahead.
inline constexpr int kFoundSlots = 7;

template <typename Config, typename AnyElement>
struct alignas(sm90::kTileAlignment) SharedMemory {
  using Element = AnyElement;
  static constexpr BackwardConfig kConfig = Config::kConfig;
  static constexpr int kTileElements = kQueries * kConfig.head_dim;

  // The small things come first: compute-sanitizer takes the operands of the row terms' step for
  // 2 KiB each and reports them where the block's memory ends sooner.
  Element row_terms[kConfig.query_stages][kQueries * kRowTerms];
  // The other operand of the row terms' step, core matrices for the two halves of its depth. First
  // half: ones (or the first part's factor) in the columns of LSE's parts for (1), of delta's for
  // (4). Second half: zeros for both.
  Element lse_ones[kCoreElements];
  Element delta_ones[kCoreElements];
  Element zeros[kCoreElements];

  FoundTile found[kFoundSlots];

  schedule_sm90::WorkItem item[kItemSlots];
  int query_tile[kConfig.query_stages];  // within the head
  int reduce_tile[kReduceSlots];         // (b * H + h) * Tm + query tile; negative: the end

  sm90::Barrier key_full[kItemSlots], key_empty[kItemSlots], value_full, value_empty;
  sm90::Barrier tile_full[kConfig.query_stages], tile_empty[kConfig.query_stages];
  sm90::Barrier grad_query_full, grad_query_empty;
  sm90::Barrier reduce_ready[kReduceSlots];
  sm90::Barrier found_full[kFoundSlots], found_empty[kFoundSlots];

  // After an item's last tile its K makes room for its dK on its way out, each consumer's 64 rows.
  union {
    alignas(sm90::kTileAlignment) Element key[kItemSlots][kKeys * kConfig.head_dim];
    Element grad_key[kItemSlots][kConsumers][kTileElements];
  };
  Element value[kKeys * kConfig.head_dim];
  Element query[kConfig.query_stages][kTileElements];
  Element grad_out[kConfig.query_stages][kTileElements];
  // dS [64 queries][128 keys], two, so that one barrier a tile is enough. After an item's last tile
  // the same bytes hold dV on its way out, each consumer's 64 rows.
  union {
    Element grad_scores[2][kQueries * kKeys];
    Element grad_value[kConsumers][kTileElements];
  };
  // Each consumer's columns of dQ, as they are in global memory.
  float grad_query[kConsumers][kQueries * kConfig.grad_query_columns()];
};

}  // namespace backlite::backward_sm90
