// The shared memory of the Hopper backward.
#pragma once

#include <cstdint>

#include "backward/config_sm90.h"
#include "backward/params_sm90.h"
#include "schedule/layout_sm90.h"
#include "sm90/barrier.cuh"
#include "sm90/layout.h"
#include "sm90/wgmma.cuh"

namespace backlite::backward_sm90 {

// What describes an item is read until its dK has left. The next item but one takes its slot, and
// is written there when a stage of K is free: of two stages the same item's, of one stage that of
// the item between, whose last (7) comes after that dK.
inline constexpr int kItemSlots = 2;
inline constexpr int kCoreElements = sm90::kCoreRows * sm90::kChunkColumns;

// A live tile on its way from the warp that finds it to the one that loads it.
struct alignas(16) FoundTile {
  int32_t batch;
  int32_t head;        // query head
  int32_t query_tile;  // within the head; negative: the end
  int32_t key_tile;
  int32_t num_live;   // of the item if this is its first tile, otherwise 0
  int32_t part_slot;  // of the item
  int32_t is_only;    // the only live tile of its query tile
  int32_t reserved;
};
static_assert(sizeof(FoundTile) == 32, "Moved as two 16-byte words");

// In SharedMemory::query_tile: FoundTile::is_only.
inline constexpr int kOnlyTile = 1 << 30;

// A query tile whose dQ is on its way.
struct alignas(16) ReduceTile {
  int32_t batch;
  int32_t head;
  int32_t query_tile;  // negative: the end
  int16_t is_only;
  int16_t place;  // in SharedMemory::grad_query
};

// Columns with few live tiles take less time than the memory accesses that find them one by one:
// the finder runs this many tiles ahead, for which there is room at D = 128.
inline constexpr int kFoundSlots = 7;

template <typename Config, typename AnyElement>
struct alignas(sm90::kTileAlignment) SharedMemory {
  using Element = AnyElement;
  static constexpr BackwardConfig kConfig = Config::kConfig;
  static constexpr int kTileElements = kQueries * kConfig.head_dim;
  // Query tiles whose dQ is on its way, and the mark that ends them. A step's stages are free when
  // its dQ has been handed over, for which the reducer must have taken the step before, one tile of
  // it at least (also where tiles take two places in turn: it hands back the other one when it has
  // taken a tile): so the loader is at most this many ahead and overwrites none that is yet to be
  // read.
  static constexpr int kReduceSlots = kConfig.query_stages + kConfig.tiles_at_once + 1;

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
  ReduceTile reduce_tile[kReduceSlots];
  alignas(8) int query_tile[kConfig.query_stages];  // within the head, with kOnlyTile

  sm90::Barrier key_full[kConfig.key_stages], key_empty[kConfig.key_stages];
  sm90::Barrier value_full, value_empty;
  sm90::Barrier tile_full[kConfig.query_stages], tile_empty[kConfig.query_stages];
  sm90::Barrier grad_query_full[kConfig.grad_query_places];
  sm90::Barrier grad_query_empty[kConfig.grad_query_places];
  sm90::Barrier reduce_ready[kReduceSlots];
  sm90::Barrier found_full[kFoundSlots], found_empty[kFoundSlots];

  alignas(sm90::kTileAlignment) Element key[kConfig.key_stages][kKeys * kConfig.head_dim];
  Element value[kKeys * kConfig.head_dim];
  Element query[kConfig.query_stages][kTileElements];
  Element grad_out[kConfig.query_stages][kTileElements];
  // dS [64 queries][128 keys] of each tile, two, so that one barrier a step is enough.
  Element grad_scores[2][kConfig.tiles_at_once][kQueries * kKeys];
  // dQ of a tile as it is in global memory: float32 by fragment, or, of the only live tile of a
  // query tile, rows in the caller's type.
  float grad_query[kConfig.grad_query_places][kTileElements];
};

}  // namespace backlite::backward_sm90
