// What the warps of the producer's warpgroup do: find live tiles, load, add dQ.
#pragma once

#include <cstdint>

#include "backward/config_sm90.h"
#include "backward/heads_sm90.cuh"
#include "backward/params_sm90.h"
#include "backward/shared_sm90.cuh"
#include "backward/tile_source_sm90.cuh"
#include "sm90/barrier.cuh"
#include "sm90/bulk.cuh"
#include "sm90/progress.cuh"
#include "sm90/tma.cuh"

namespace backlite::backward_sm90 {

enum ProducerWarp : int { kFinder = 0, kLoader = 1, kReducer = 2, kLister = 3, kNumProducerWarps };
static_assert(kNumProducerWarps == 4, "A warpgroup");

// The number of a query tile among all of them: batch by batch, head by head.
__device__ __forceinline__ int number_of_tile(const BackwardParams& params, int batch, int head,
                                              int query_tile) {
  return (batch * params.num_query_heads + head) * params.num_query_tiles + query_tile;
}

// Takes items from the counter and hands their tiles to the loader. A whole warp.
template <typename Config, typename TileSource, typename Shared>
__device__ __forceinline__ void find_tiles(const BackwardParams& params, Shared& shared, int lane) {
  sm90::Ring<kFoundSlots> slot;
  const auto hand_over = [&](const FoundTile& tile) {
    if (lane == 0) {
      shared.found_empty[slot.stage].wait(slot.parity ^ 1);
      shared.found[slot.stage] = tile;
      shared.found_full[slot.stage].arrive();
    }
    slot.advance();
    __syncwarp();
  };
  const int num_items = params.schedule->num_items;
  const int num_blocks =
      num_working_blocks(*params.schedule, params.num_tiles, static_cast<int>(gridDim.x));
  const bool has_only =
      TileSource::kIsSparse &&
      schedule_sm90::first_stores(*params.schedule, params.num_tiles, Config::kConfig.head_dim);
  int index = static_cast<int>(blockIdx.x) < num_blocks ? blockIdx.x : num_items;
  while (index < num_items) {
    const schedule_sm90::WorkItem item = params.items[index];
    // Asked for early: the answer takes about a microsecond and is needed at the item's end.
    if (lane == 0) index = num_blocks + atomicAdd(params.next_item, 1);
    TileSource source(params, item, lane);
#pragma unroll 1
    for (int i = 0; i < item.num_live; ++i) {
      const QueryTile tile = source.next();
      const int head = item.key_head * params.heads_per_key_head + tile.head;
      const bool is_only =
          has_only &&
          params.started[number_of_tile(params, item.batch, head, tile.index)] == kOnlyOne;
      hand_over({.batch = item.batch,
                 .head = head,
                 .query_tile = tile.index,
                 .key_tile = item.key_tile,
                 .num_live = i == 0 ? item.num_live : 0,
                 .part_slot = item.part_slot,
                 .is_only = is_only,
                 .reserved = 0});
    }
    index = __shfl_sync(~0u, index, 0);
  }
  hand_over({.query_tile = -1});
}

// Copies K, V, Q, dO and the row terms to shared memory. One thread.
template <typename Config, typename Shared>
__device__ __forceinline__ void load_tiles(const BackwardParams& params, Shared& shared) {
  using Element = typename Shared::Element;
  constexpr BackwardConfig kConfig = Config::kConfig;
  constexpr int kBlocks = kConfig.column_blocks();
  constexpr int kElementBytes = sizeof(Element);
  constexpr int kKeyBytes = kKeys * kConfig.head_dim * kElementBytes;
  constexpr int kQueryBytes = kQueries * kConfig.head_dim * kElementBytes;
  constexpr int kRowTermBytes = kQueries * kRowTerms * kElementBytes;

  sm90::Ring<kFoundSlots> found;
  constexpr uint32_t kKeyStages = kConfig.key_stages;
  uint32_t item_number = 0;  // of this block
  sm90::Ring<kConfig.query_stages> stage;
  sm90::Ring<Shared::kReduceSlots> reduce;
  const uint64_t once = sm90::evict_first();
  int num_left = 0;  // tiles of the item
  bool needs_value = false;
  for (;; found.advance()) {
    shared.found_full[found.stage].wait(found.parity);
    const FoundTile tile = shared.found[found.stage];
    shared.found_empty[found.stage].arrive();
    if (tile.query_tile < 0) break;
    const int key_head = tile.head / params.heads_per_key_head;

    const auto load_key_side = [&](Element* to, const CUtensorMap& map, sm90::Barrier& full) {
#pragma unroll
      for (int b = 0; b < kBlocks; ++b) {
        sm90::tma_load(to + b * kKeys * sm90::kBlockColumns, map, full, b * sm90::kBlockColumns,
                       tile.key_tile * kKeys, key_head, tile.batch, once);
      }
    };
    const auto load_query_side = [&](Element* to, const CUtensorMap& map, sm90::Barrier& full) {
#pragma unroll
      for (int b = 0; b < kBlocks; ++b) {
        sm90::tma_load(to + b * kQueries * sm90::kBlockColumns, map, full, b * sm90::kBlockColumns,
                       tile.query_tile * kQueries, tile.head, tile.batch);
      }
    };

    const auto load_key = [&] {
      const uint32_t key_stage = item_number % kKeyStages;
      shared.key_empty[key_stage].wait(item_number / kKeyStages % 2 ^ 1);
      shared.item[item_number % kItemSlots] = {.batch = tile.batch,
                                               .key_head = key_head,
                                               .key_tile = tile.key_tile,
                                               .first_live = 0,
                                               .num_live = tile.num_live,
                                               .part_slot = tile.part_slot,
                                               .reserved = {}};
      sm90::Barrier& full = shared.key_full[key_stage];
      full.arrive_and_expect(kKeyBytes);
      load_key_side(shared.key[key_stage], params.key, full);
    };

    // In the order in which space becomes free: K's second stage after the item before the last, Q
    // and dO after a step of the last item, V during its last step, K's only stage after (7) of
    // that step.
    if (tile.num_live > 0) {
      if constexpr (kKeyStages > 1) load_key();
      num_left = tile.num_live;
      needs_value = true;
    }

    const int global_tile = number_of_tile(params, tile.batch, tile.head, tile.query_tile);
    const auto load_tile = [&] {
      sm90::Barrier& full = shared.tile_full[stage.stage];
      shared.query_tile[stage.stage] = tile.query_tile | (tile.is_only != 0 ? kOnlyTile : 0);
      full.arrive_and_expect(2 * kQueryBytes + kRowTermBytes);
      load_query_side(shared.query[stage.stage], params.query, full);
      sm90::bulk_load(shared.row_terms[stage.stage],
                      static_cast<const Element*>(params.row_terms) +
                          static_cast<int64_t>(global_tile) * kQueries * kRowTerms,
                      kRowTermBytes, full);
      load_query_side(shared.grad_out[stage.stage], params.grad_out, full);
    };
    constexpr int kTiles = kConfig.tiles_at_once;
    shared.tile_empty[stage.stage].wait(stage.parity ^ 1);
    shared.reduce_tile[reduce.stage] = {
        .batch = tile.batch,
        .head = tile.head,
        .query_tile = tile.query_tile,
        .is_only = static_cast<int16_t>(tile.is_only),
        .place = static_cast<int16_t>(stage.stage % kConfig.grad_query_places)};
    shared.reduce_ready[reduce.stage].arrive();
    reduce.advance();
    load_tile();
    stage.advance();
    --num_left;
    if (kTiles > 1 && num_left == 0 && stage.stage % kTiles != 0) {
      // The step is filled with what is masked there: numbers of the same column, so that one which
      // is none changes nothing but the columns that it changes anyway.
      shared.tile_empty[stage.stage].wait(stage.parity ^ 1);
      load_tile();
      stage.advance();
    }

    if (needs_value && stage.stage % kTiles == 0) {  // K, Q and dO are on their way
      needs_value = false;
      shared.value_empty.wait(item_number % 2 ^ 1);
      shared.value_full.arrive_and_expect(kKeyBytes);
      load_key_side(shared.value, params.value, shared.value_full);
      if constexpr (kKeyStages == 1) load_key();
      ++item_number;
    }
  }
  const uint32_t key_stage = item_number % kKeyStages;
  shared.key_empty[key_stage].wait(item_number / kKeyStages % 2 ^ 1);
  shared.item[item_number % kItemSlots].num_live = 0;
  shared.key_full[key_stage].arrive();
  shared.reduce_tile[reduce.stage].query_tile = -1;
  shared.reduce_ready[reduce.stage].arrive();
}

// Adds dQ to global memory. One thread. If first_stores, the first block to come to a query tile
// stores instead of adding, so that nobody need write zeros before, and the others wait until that
// is done. The only live tile of a query tile is neither added nor converted but goes to dQ itself.
//
// Who is first? A block asks when the copy engine has been given dQ of its tile before. From there
// to the store of the next tile, which follows if it is the first, it waits for its own copies
// alone and for its consumers, who wait for nobody outside: so whoever is first stores, and says
// so, and nobody waits for ever. (Two threads with half of dQ each could wait for each other
// through the consumers, which meet at every tile.) The answer takes about a microsecond: it is on
// its way while the tile before is read. At 8k and 5% that is 4% at D = 64, and 2% at D = 128 if dQ
// had one place only.
//
// Tiles are counted off their head when the next tile is of another one: at most once an item,
// because it takes the end of all that is on its way, a fence and an atomic.
template <typename Config, typename Shared>
__device__ __forceinline__ void add_grad_query(const BackwardParams& params, Shared& shared) {
  constexpr BackwardConfig kConfig = Config::kConfig;
  constexpr int kFloats = kQueries * kConfig.head_dim;
  // Copies that may still read when a place is handed back. With two places for tiles one by one
  // that is the place of the tile before: the next tile does not wait for that of this one. With a
  // place for each tile of a step it does, if this step has one tile only.
  constexpr int kPending = kConfig.grad_query_places / kConfig.tiles_at_once - 1;
  static_assert(kPending == 0 || kPending == 1);
  sm90::Ring<Shared::kReduceSlots> ready;
  uint32_t parities = 0;  // a bit for each place
  int head = 0;           // of the tiles that are not counted off
  int num_tiles = 0;
  const auto count_tiles_off = [&] {
    sm90::bulk_wait();
    sm90::fence_async_proxy_global();
    if (num_tiles > 0) count_off(params.heads, head, num_tiles);
    num_tiles = 0;
  };
  const bool asks =
      schedule_sm90::first_stores(*params.schedule, params.num_tiles, kConfig.head_dim);
  bool has_asked = false;          // for the next tile
  uint32_t started = 1 | kStored;  // the answer
  const auto ask = [&](const ReduceTile& at) {
    const int tile = number_of_tile(params, at.batch, at.head, at.query_tile);
    started = sm90::fetch_add(params.started + tile, 1);
    has_asked = true;
  };
  const auto ask_for_next = [&] {
    if (!asks || !shared.reduce_ready[ready.stage].has_completed(ready.parity)) return;
    const ReduceTile next = shared.reduce_tile[ready.stage];
    if (next.query_tile >= 0 && next.is_only == 0) ask(next);
  };
  // The first tile hands back the rest.
  for (int place = 0; place < kConfig.grad_query_places - kPending; ++place) {
    shared.grad_query_empty[place].arrive();
  }
  for (;;) {
    shared.reduce_ready[ready.stage].wait(ready.parity);
    const ReduceTile at = shared.reduce_tile[ready.stage];
    ready.advance();
    if (at.query_tile < 0) break;
    const int its_head = (at.batch * params.num_query_heads + at.head) / params.heads_per_key_head;
    if (its_head != head) count_tiles_off();
    head = its_head;
    ++num_tiles;
    const float* const from = shared.grad_query[at.place];
    const auto wait_until_full = [&] {
      shared.grad_query_full[at.place].wait(parities >> at.place & 1);
      parities ^= 1u << at.place;
    };
    // After a copy has been started. A place is handed back when it has been read. The question for
    // the next tile goes out while this copy reads: before that is waited for, if it is.
    const auto go_on = [&] {
      if constexpr (kPending == 0) ask_for_next();
      sm90::tma_store_wait_read<kPending>();
      shared.grad_query_empty[(at.place + kPending) % kConfig.grad_query_places].arrive();
      if constexpr (kPending > 0) ask_for_next();
    };
    if (at.is_only != 0) {
      wait_until_full();
      const auto* const rows = reinterpret_cast<const typename Shared::Element*>(from);
#pragma unroll
      for (int b = 0; b < kConfig.column_blocks(); ++b) {
        sm90::tma_store(params.grad_query_rows, rows + b * kQueries * sm90::kBlockColumns,
                        b * sm90::kBlockColumns, at.query_tile * kQueries, at.head, at.batch,
                        sm90::evict_first());
      }
      sm90::tma_store_commit();
      go_on();
      continue;
    }
    if (asks && !has_asked) ask(at);
    has_asked = false;
    const int tile = number_of_tile(params, at.batch, at.head, at.query_tile);
    float* const to = params.grad_query + static_cast<int64_t>(tile) * kFloats;
    uint32_t* const word = params.started + tile;
    if (started == 0) {
      wait_until_full();
      sm90::bulk_store(to, from, kFloats * sizeof(float));
      go_on();
      sm90::bulk_wait();
      sm90::fence_async_proxy_global();
      sm90::set_bits(word, kStored);
    } else {
      if ((started & kStored) == 0) sm90::wait_for_bits(word, kStored);
      if (asks) sm90::fence_async_proxy_global();
      wait_until_full();
      sm90::bulk_add(to, from, kFloats * sizeof(float));
      go_on();
    }
  }
  count_tiles_off();
}

}  // namespace backlite::backward_sm90
