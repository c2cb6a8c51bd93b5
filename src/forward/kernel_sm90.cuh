// The Hopper forward. One block a multiprocessor, resident for the whole grid; it takes items of
// (batch, head, block of query rows) from a counter. Its warpgroups:
//
//   producer     warp 0 copies Q, K and V into shared memory; with statistics one warp per consumer
//                reduces them
//   consumers    64 query rows each; for every key tile, from the last to the first:
//
//     (1) S = Q K^T        of tile n     issued together, in turns: while one warpgroup's products
//     (4) O = O + P V      of tile n+1   run, another one is at (3)
//     (2) the reference    set by the first tile visited; if it grows later, O = O * alpha
//     (3) P = exp2(c S - reference), l = l + rowsum P            c = scale * log2(e)
//   and at the item's end
//     (5) O = O / l    LSE = (reference + log2 l) * ln 2
//     (6) tile statistics: tile_stats_sm90.cuh
#pragma once

#include <cstdint>
#include <type_traits>

#include "common/mask.h"
#include "forward/config_sm90.h"
#include "forward/item_sm90.h"
#include "forward/params_sm90.h"
#include "forward/products_sm90.cuh"
#include "forward/shared_sm90.cuh"
#include "forward/softmax_sm90.cuh"
#include "forward/tile_stats_sm90.cuh"
#include "sm90/barrier.cuh"
#include "sm90/dependency.cuh"
#include "sm90/layout.h"
#include "sm90/math.cuh"
#include "sm90/tma.cuh"
#include "sm90/wgmma.cuh"

namespace backlite::forward_sm90 {

template <typename Config, typename Element, bool kRecord>
__global__ void __launch_bounds__(Config::kConfig.num_threads(), 1)
    forward_kernel(const __grid_constant__ ForwardParams params) {
  constexpr ForwardConfig kConfig = Config::kConfig;
  constexpr int kD = kConfig.head_dim;
  constexpr int kKeys = kConfig.block_keys;
  constexpr int kConsumers = kConfig.num_consumers;
  constexpr int kConsumerWarps = kConsumers * 4;
  constexpr bool kMasksByRow = kConfig.masks_by_row && !kRecord;
  constexpr int kColumnBlocks = kConfig.column_blocks();
  constexpr int kQueryBlockElements = sm90::kMmaRows * sm90::kBlockColumns;
  constexpr int kQueryBlockBytes = kQueryBlockElements * sizeof(Element);
  constexpr int kKeyBlockElements = kKeys * sm90::kBlockColumns;
  constexpr int kQueryBytes = kConfig.block_rows() * kD * sizeof(Element);
  constexpr int kKeyBytes = kKeys * kD * sizeof(Element);
  static_assert(kD % sm90::kBlockColumns == 0, "Head dim is cut into blocks of 64 columns");
  static_assert(kConsumers <= kMaxConsumers, "Named barriers are counted for three");
  static_assert(kKeys == kKeyTile, "Statistics and item_sm90.h are of tiles of 128 keys");
  static_assert(kConfig.block_rows() <= RowKeys::kMaxRows, "Bounds of keys are cut for a block");
  static_assert(sizeof(SharedMemory<Config, Element>) <= 232448, "227 KiB a block");
  using KeyRing = sm90::Ring<kConfig.key_stages>;
  using ValueRing = sm90::Ring<kConfig.value_stages>;
  using QueryRing = sm90::Ring<kQuerySlots>;

  extern __shared__ __align__(sm90::kTileAlignment) unsigned char shared_bytes[];
  auto& shared = *reinterpret_cast<SharedMemory<Config, Element>*>(shared_bytes);

  const int warpgroup = sm90::warp_uniform(threadIdx.x / sm90::kWarpgroupThreads);
  const int warp = sm90::warp_uniform(threadIdx.x / sm90::kWarpSize);
  const int lane = threadIdx.x % sm90::kWarpSize;

  if (threadIdx.x == 0) {
    sm90::prefetch_tensor_map(params.query);
    sm90::prefetch_tensor_map(params.key);
    sm90::prefetch_tensor_map(params.value);
    sm90::prefetch_tensor_map(params.out);
    for (int i = 0; i < kQuerySlots; ++i) {
      shared.query_full[i].init(2);  // Q on its way, and the item described
      shared.query_empty[i].init(kRecord ? 2 * kConsumers : kConsumers);
      for (int c = 0; c < kConsumers; ++c) shared.sums_full[i][c].init(sm90::kMmaRows);
    }
    for (int i = 0; i < kConfig.key_stages; ++i) {
      shared.key_full[i].init(1);
      shared.key_empty[i].init(kConsumerWarps);
    }
    for (int i = 0; i < kConfig.value_stages; ++i) {
      shared.value_full[i].init(1);
      shared.value_empty[i].init(kConsumerWarps);
    }
    sm90::fence_barrier_init();
  }
  __syncthreads();

  if (warpgroup == 0) {
    sm90::give_registers<kConfig.producer_registers>();

    // ---- Producer: one thread, elected: for lane 0 the forward took 1% longer -------------------
    if (warp == 0 && sm90::elect_one()) {
      QueryRing slot;
      KeyRing key_stage;
      ValueRing value_stage;
      const auto load_tile = [&](Element* tile, const CUtensorMap& map, sm90::Barrier& full,
                                 int tile_idx, const WorkItem& item) {
        full.arrive_and_expect(kKeyBytes);
#pragma unroll
        for (int b = 0; b < kColumnBlocks; ++b) {
          sm90::tma_load(tile + b * kKeyBlockElements, map, full, b * sm90::kBlockColumns,
                         tile_idx * kKeys, item.head / params.heads_per_key_head, item.batch);
        }
      };
      const auto load_key = [&](int tile_idx, const WorkItem& item) {
        shared.key_empty[key_stage.stage].wait(key_stage.parity ^ 1);
        load_tile(shared.key[key_stage.stage], params.key, shared.key_full[key_stage.stage],
                  tile_idx, item);
        key_stage.advance();
      };
      const auto load_value = [&](int tile_idx, const WorkItem& item) {
        shared.value_empty[value_stage.stage].wait(value_stage.parity ^ 1);
        load_tile(shared.value[value_stage.stage], params.value,
                  shared.value_full[value_stage.stage], tile_idx, item);
        value_stage.advance();
      };

      // All that the block does to global memory follows from Q's arrival, and so from this wait.
      sm90::wait_for_earlier_kernels();
      int index = blockIdx.x;
      while (index < params.order.num_items) {
        const WorkItem item = params.order.item(index);
        const int first_row = item.block * kConfig.block_rows();
        const int rows_left = static_cast<int>(params.mask.query_length) - first_row;
        const int num_rows = min(rows_left, kConfig.block_rows());
        const RowKeys keys = RowKeys::of(params.mask, first_row);
        const TileRange tiles = keys.seen(num_rows);
        // Asked for early: the answer takes about a microsecond and is needed at the item's end.
        index = static_cast<int>(gridDim.x);
        if (index < params.order.num_items) index += atomicAdd(params.next_item, 1);

        shared.query_empty[slot.stage].wait(slot.parity ^ 1);
        shared.query_full[slot.stage].arrive_and_expect(kQueryBytes);
#pragma unroll
        for (int c = 0; c < kConsumers; ++c) {
#pragma unroll
          for (int b = 0; b < kColumnBlocks; ++b) {
            sm90::tma_load(shared.query[slot.stage][c] + b * kQueryBlockElements, params.query,
                           shared.query_full[slot.stage], b * sm90::kBlockColumns,
                           first_row + c * sm90::kMmaRows, item.head, item.batch);
          }
        }
        // In the order in which consumers ask: K runs one tile ahead of V.
        if (!tiles.empty()) load_key(tiles.end - 1, item);

        shared.item[slot.stage] = item;
        shared.tiles[slot.stage] = tiles;
        shared.keys[slot.stage] = keys;
#pragma unroll 1
        for (int c = 0; c < kConsumers; ++c) {
          ConsumerTiles of_consumer = tiles_of_consumer(keys, num_rows, c * sm90::kMmaRows);
          if (params.score_sign < 0.0f) of_consumer.unmasked = {};
          shared.consumer_tiles[slot.stage][c] = of_consumer;
        }
        shared.query_full[slot.stage].arrive();
        slot.advance();
#pragma unroll 1
        for (int n = tiles.end - 2; n >= tiles.begin; --n) {
          load_key(n, item);
          load_value(n + 1, item);
        }
        if (!tiles.empty()) load_value(tiles.begin, item);
      }
      shared.query_empty[slot.stage].wait(slot.parity ^ 1);
      shared.item[slot.stage].block = -1;
      shared.query_full[slot.stage].arrive();
      shared.query_full[slot.stage].arrive();
    }

    // ---- Statistics: warp 1 + c for consumer c -------------------------------------------------
    if constexpr (kRecord) {
      if (warp >= 1 && warp <= kConsumers) {
        const int consumer = warp - 1;
        for (QueryRing slot;; slot.advance()) {
          shared.query_full[slot.stage].wait(slot.parity);
          const WorkItem item = shared.item[slot.stage];
          if (item.block < 0) break;
          const TileRange tiles = shared.consumer_tiles[slot.stage][consumer].seen;
          const int query_tile = item.block * kConsumers + consumer;
          shared.sums_full[slot.stage][consumer].wait(slot.parity);
          if (query_tile < params.num_query_tiles) {
            const int64_t batch_head =
                static_cast<int64_t>(item.batch) * params.order.num_heads + item.head;
            reduce_tile_stats(
                item_row_masses<kConsumers>(params, slot.stage, consumer),
                shared.inverse_sums[slot.stage][consumer],
                params.tile_stats +
                    (batch_head * params.num_query_tiles + query_tile) * params.num_key_tiles,
                tiles.begin, tiles.end, params.num_key_tiles);
          }
          __syncwarp();
          if (lane == 0) shared.query_empty[slot.stage].arrive();
        }
      }
    }
  } else {
    // ---- Consumers -----------------------------------------------------------------------------
    sm90::take_registers<kConfig.consumer_registers>();
    const int consumer = warpgroup - 1;
    const int thread = threadIdx.x % sm90::kWarpgroupThreads;
    const int my_turn = kTurn + consumer;
    const int next_turn = kTurn + (consumer + 1 == kConsumers ? 0 : consumer + 1);
    constexpr int kTurnThreads = 2 * sm90::kWarpgroupThreads;  // who waits, and who passes
    const float scale_log2 = params.scale_log2;

    float out[kD / 2];
    float scores[kKeys / 2];
    uint32_t probs[kKeys / 4];  // two a word: the A operand of (4)

    if (consumer == kConsumers - 1) sm90::named_barrier_arrive(next_turn, kTurnThreads);

    QueryRing slot;
    KeyRing key_stage;
    ValueRing value_stage;
    bool is_finished = false;  // `probs` holds the O of the previous slot
    bool has_stored = false;   // this thread's O is on its way out of the previous slot

    // (5), second part: O of the previous item, through the place of its Q.
    const auto store_out = [&] {
      if (!is_finished) return;
      const int previous = slot.stage ^ 1;
      Element* query = shared.query[previous][consumer];
      // Every warp has finished reading Q before any of them writes over it.
      sm90::named_barrier_sync(kWarpgroup + consumer, sm90::kWarpgroupThreads);
      const int row = sm90::kWarpRows * (thread / sm90::kWarpSize) + sm90::store_row(lane);
      const uint32_t place = sm90::shared_address(query) +
                             sm90::swizzled_offset(sm90::kMmaRows, row, sm90::store_column(lane));
#pragma unroll
      for (int k = 0; k < kD / 16; ++k) {
        // Sixteen columns further within a block of 64 only bits of the swizzled chunk flip.
        constexpr int kSteps = sm90::kBlockColumns / 16;
        sm90::store_matrices((place ^ k % kSteps * 32) + k / kSteps * kQueryBlockBytes,
                             probs[4 * k], probs[4 * k + 1], probs[4 * k + 2], probs[4 * k + 3]);
      }
      sm90::fence_async_proxy();
      sm90::named_barrier_sync(kWarpgroup + consumer, sm90::kWarpgroupThreads);
      if (thread == 0) {
        const WorkItem item = shared.item[previous];
#pragma unroll
        for (int b = 0; b < kColumnBlocks; ++b) {
          sm90::tma_store(params.out, query + b * kQueryBlockElements, b * sm90::kBlockColumns,
                          item.block * kConfig.block_rows() + consumer * sm90::kMmaRows, item.head,
                          item.batch);
        }
        sm90::tma_store_commit();
        has_stored = true;
      }
    };
    // Hands the slot of the previous item back, once its O has left.
    const auto release_query = [&] {
      if (has_stored) {
        sm90::tma_store_wait_read();
        shared.query_empty[slot.stage ^ 1].arrive();
        has_stored = false;
      }
    };

    for (;; slot.advance()) {
      shared.query_full[slot.stage].wait(slot.parity);
      const int block = shared.item[slot.stage].block;
      if (block < 0) break;
      const int row_begin = block * kConfig.block_rows() + consumer * sm90::kMmaRows;
      const ConsumerTiles own = shared.consumer_tiles[slot.stage][consumer];
      const TileRange seen = own.seen, unmasked = own.unmasked;

      // Where this thread stores row masses next. Walked, and found anew in the rare branch that
      // rescales: indexed by tile, statistics cost 3.4% at D = 128 instead of 2.0%. Set after the
      // first product, beside which registers are scarce.
      uint32_t* next_word;
      const auto first_word = [&] {
        return item_row_masses<kConsumers>(params, slot.stage, consumer) +
               first_mass_word<kConfig.tiles_in_exchange>(thread);
      };
      Rows rows;
      RowMasses<kConfig.tiles_in_exchange> masses;

      // (1)
      Element* query = shared.query[slot.stage][consumer];
      const uint32_t query_operand = sm90::descriptor_low(sm90::shared_address(query), 0);
      const auto issue_tile_scores = [&] {
        issue_scores<kD, kKeys>(scores, query_operand, shared.key[key_stage.stage]);
      };

      // (4)
      const auto issue_tile_out = [&](bool has_out) {
        issue_out<kD, kKeys>(out, probs, shared.value[value_stage.stage], has_out);
      };

      const auto release = [&](sm90::Barrier* empty, auto& stage) {
        if (lane == 0) empty[stage.stage].arrive();
        stage.advance();
      };

      // (2) and (3). Products (4) read `probs` until the wait in the middle, which is placed where
      // they are about to end: the rounding to `probs` then hides behind the exponentials left. K
      // stays until nobody can need it again.
      const auto softmax = [&]<bool kFirst>(int n, std::bool_constant<kFirst>) {
        const bool is_masked = n < unmasked.begin || n >= unmasked.end;
        const bool is_half = kFirst && own.is_last_half;
        const auto round_probs = [&] {
#pragma unroll
          for (int i = 0; i < kKeys / 4; ++i) {
            probs[i] = i >= kKeys / 8 && is_half
                           ? 0
                           : sm90::pack<Element>(scores[2 * i], scores[2 * i + 1]);
          }
        };
        rows.has_grown = false;
        float mass[2];
        for (bool is_retry = false;; is_retry = true) {
          if (is_retry) {
            recompute_scores<kD, kKeys>(scores, query, shared.key[key_stage.stage], thread);
          }
          if (is_retry || is_masked) {
            const RowKeys keys = shared.keys[slot.stage].from(consumer * sm90::kMmaRows);
            mask_scores<kMasksByRow>(scores, keys, n * kKeys, params.score_sign, thread, is_half);
          }
          if (kFirst || is_retry || !rows.has_begun) {
            raise_references<kFirst>(scores, rows, scale_log2, is_half);
          }
          mass[0] = mass[1] = 0.0f;
          constexpr int kSplit = kFirst ? kKeys / 4 : kConfig.early_scores;
          exponentiate<0, kSplit>(scores, rows, scale_log2, mass);
          if constexpr (!kFirst) {
            sm90::pin(scores);
            sm90::wgmma_wait<0>();
            sm90::pin(out);
            sm90::pin(scores);
          }
          if (!is_half) exponentiate<kSplit, kKeys / 2>(scores, rows, scale_log2, mass);
          round_probs();
          if (kFirst || is_retry || !has_overflown(mass, kMaxMass<Element>)) break;
          if (!has_overflown(mass, kFiniteMass)) {
            lower_probs(scores, rows, mass);
            round_probs();
            break;
          }
        }
        release(shared.key_empty, key_stage);
        if constexpr (!kFirst) {
          release(shared.value_empty, value_stage);
          if (rows.has_grown) {
#pragma unroll
            for (int i = 0; i < kD / 2; ++i) out[i] *= rows.alpha[i / 2 % 2];
            if constexpr (kRecord) {
              masses.rescale(first_word(), seen.end - 1 - n, rows.alpha, lane);
            }
          }
        }
        rows.sum[0] += mass[0];
        rows.sum[1] += mass[1];
        if constexpr (kRecord) {
          masses.last = sm90::pack<sm90::BFloat16>(mass[0], mass[1]);
        }
      };

      // (5), first part: what does not need O, and so runs beside the last product.
      float inverse[2];  // 1 / l of the two rows
      const auto finish_rows = [&] {
        const RowTotals total = row_totals(rows, lane);
        inverse[0] = total.inverse[0];
        inverse[1] = total.inverse[1];
        if (lane % 4 < 2) {
          const int row_in_tile = sm90::fragment_row(thread, 2 * (lane % 2));
          const int row = row_begin + row_in_tile;
          const bool exists = row < params.mask.query_length;
          if (exists && params.lse != nullptr) {
            const WorkItem item = shared.item[slot.stage];
            const int64_t batch_head =
                static_cast<int64_t>(item.batch) * params.order.num_heads + item.head;
            params.lse[batch_head * params.mask.query_length + row] = total.lse();
          }
          if constexpr (kRecord) {
            shared.inverse_sums[slot.stage][consumer][row_in_tile] =
                exists ? (lane % 2 ? inverse[1] : inverse[0]) : 0.0f;
          }
        }
        if constexpr (kRecord) {  // the lanes that wrote sums or row masses say so themselves
          if (lane % 4 < 2) shared.sums_full[slot.stage][consumer].arrive();
        }
      };

      // Tiles of the block that only other consumers see. Every consumer takes and passes its turn
      // at every tile but the first, whether it has products to issue or not.
      const auto take_turn = [&](int n) {
        if (n + 1 < shared.tiles[slot.stage].end) sm90::named_barrier_sync(my_turn, kTurnThreads);
      };
      const auto pass_turn = [&](int n) {
        if (n + 1 < shared.tiles[slot.stage].end) {
          sm90::named_barrier_arrive(next_turn, kTurnThreads);
        }
      };
      const auto skip_key = [&] {
        shared.key_full[key_stage.stage].wait(key_stage.parity);
        release(shared.key_empty, key_stage);
      };
      const auto skip_value = [&] {
        shared.value_full[value_stage.stage].wait(value_stage.parity);
        release(shared.value_empty, value_stage);
      };

      int tail = seen.begin - 1;  // the next tile to pass over after the last of our own
      if (!seen.empty()) {
        for (int n = shared.tiles[slot.stage].end - 1; n >= seen.end; --n) {
          skip_key();
          take_turn(n);
          pass_turn(n);
        }
        shared.key_full[key_stage.stage].wait(key_stage.parity);
        take_turn(seen.end - 1);
        const auto beside_scores = [&] {
          pass_turn(seen.end - 1);
          store_out();
          for (int n = shared.tiles[slot.stage].end - 1; n >= seen.end; --n) skip_value();
          sm90::wgmma_wait<0>();
          sm90::pin(scores);
        };
        // Each branch waits: ptxas serialises products in flight where branches meet (C7515).
        if (kConfig.half_scores && own.is_last_half) {
          auto& half = reinterpret_cast<float (&)[kKeys / 4]>(scores);
          sm90::wgmma_fence();
          issue_scores<kD, kKeys>(half, query_operand, shared.key[key_stage.stage]);
          beside_scores();
        } else {
          sm90::wgmma_fence();
          issue_tile_scores();
          beside_scores();
        }
        if constexpr (kRecord) next_word = first_word();
        softmax(seen.end - 1, std::true_type{});
        release_query();

        bool has_out = false;
#pragma unroll 1
        for (int n = seen.end - 2; n >= seen.begin; --n) {
          shared.key_full[key_stage.stage].wait(key_stage.parity);
          sm90::named_barrier_sync(my_turn, kTurnThreads);
          sm90::wgmma_fence();
          issue_tile_scores();
          shared.value_full[value_stage.stage].wait(value_stage.parity);
          sm90::wgmma_fence();
          issue_tile_out(has_out);
          has_out = true;
          sm90::named_barrier_arrive(next_turn, kTurnThreads);
          if constexpr (kRecord) masses.store(next_word, lane);
          sm90::wgmma_wait<1>();
          sm90::pin(scores);
          softmax(n, std::false_type{});
        }

        shared.value_full[value_stage.stage].wait(value_stage.parity);
        const bool has_tail = tail >= shared.tiles[slot.stage].begin;
        if (has_tail) sm90::named_barrier_sync(my_turn, kTurnThreads);
        sm90::wgmma_fence();
        issue_tile_out(has_out);
        if (has_tail) sm90::named_barrier_arrive(next_turn, kTurnThreads);
        if constexpr (kRecord) masses.finish(next_word, lane);
        finish_rows();
        sm90::wgmma_wait<0>();
        sm90::pin(out);
        release(shared.value_empty, value_stage);
        if (has_tail) {
          skip_key();
          skip_value();
          --tail;
        }
      } else {
        store_out();
        release_query();
        finish_rows();
#pragma unroll
        for (int i = 0; i < kD / 2; ++i) out[i] = 0.0f;
      }
#pragma unroll
      for (int i = 0; i < kD / 4; ++i) {
        probs[i] =
            sm90::pack<Element>(out[2 * i] * inverse[i % 2], out[2 * i + 1] * inverse[i % 2]);
      }
      is_finished = true;
      for (; tail >= shared.tiles[slot.stage].begin; --tail) {
        skip_key();
        take_turn(tail);
        pass_turn(tail);
        skip_value();
      }
    }
    store_out();
    if (has_stored) sm90::tma_store_wait_read();
  }
}

}  // namespace backlite::forward_sm90
