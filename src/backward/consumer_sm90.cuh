// What the two warpgroups of consumers do, 64 keys of a column each. For every live tile of 64
// query rows, one or two at a time:
//
//   (1) S^T = K Q^T - LSE / scale        the row terms as one more step of the product
//   (2) P^T = exp2(c S^T)                c = scale * log2(e); 0 where masked
//   (3) dV += P^T dO                     P^T from registers
//   (4) dP^T = V dO^T - delta            the row terms again
//   (5) dS^T = P^T * dP^T
//   (6) dK += dS^T Q                     dS^T from registers; scale is applied at the end
//   (7) dQ += dS K                       dS through shared memory, dQ added up in global memory
//
// Float32 operations beside the tensor cores cost them cycles, and loads from shared memory starve
// there; with LSE and delta through the tensor cores two operations an element are left instead of
// four and no loads: 3408 cycles a tile instead of 3620, when that was tried at D = 128.
#pragma once

#include <cmath>
#include <cstdint>

#include "backward/config_sm90.h"
#include "backward/params_sm90.h"
#include "backward/shared_sm90.cuh"
#include "backward/store_rows_sm90.cuh"
#include "sm90/barrier.cuh"
#include "sm90/bulk.cuh"
#include "sm90/layout.h"
#include "sm90/math.cuh"
#include "sm90/tma.cuh"
#include "sm90/wgmma.cuh"

namespace backlite::backward_sm90 {

// The hardware's named barrier of both consumers; 0 belongs to __syncthreads.
inline constexpr int kBothConsumers = 1;

// Masks S^T of one tile, elements [kFirst, kFirst + 32) of the step's: rows are keys, columns
// queries. `relative` is the key's position minus the query's (shifted to the mask's diagonal) for
// this thread's first element.
template <int kFirst, int kSize>
__device__ __forceinline__ void mask_scores(float (&scores)[kSize], int relative, int left,
                                            int right, int keys_left, float masked) {
  const int low = -left - relative;
  const int high = right - relative;
#pragma unroll
  for (int i = 0; i < kQueries / 2; ++i) {
    const int key = sm90::fragment_row(0, i);
    const int step = key - sm90::fragment_column(0, i);
    if (step < low || step > high || key >= keys_left) scores[kFirst + i] = masked;
  }
}

// All of one consumer's threads. kMeetsOnly: the tiles may be the only live ones of their query
// tiles (kOnlyTile).
template <typename Config, bool kMeetsOnly, typename Shared>
__device__ __forceinline__ void consume(const BackwardParams& params, Shared& shared, int consumer,
                                        int warp, int lane) {
  using Element = typename Shared::Element;
  constexpr BackwardConfig kConfig = Config::kConfig;
  constexpr int kD = kConfig.head_dim;
  constexpr int kBlocks = kConfig.column_blocks();
  constexpr int kTiles = kConfig.tiles_at_once;
  constexpr uint32_t kKeyStages = kConfig.key_stages;
  constexpr int kRows = kTiles * kQueries;  // of a step
  constexpr bool kSharesTiles = kConfig.shares_tiles();
  constexpr int kStep = sm90::kMmaDepth;
  constexpr int kBothThreads = kConsumers * sm90::kWarpgroupThreads;
  constexpr int kKeyBytes = kKeys * kD * sizeof(Element);
  constexpr int kQueryBytes = kQueries * kD * sizeof(Element);
  constexpr int kQueryBlockBytes = kQueries * sm90::kSwizzleBytes;
  static_assert(kTiles == 1 || kBlocks == 1, "Then neighbouring stages are one operand");
  const int thread = warp * sm90::kWarpSize + lane;

  using ProductS = sm90::Wgmma<Element, kRows>;
  using ProductK = sm90::Wgmma<Element, kD>;
  using ProductQ = sm90::Wgmma<Element, kGradQueryColumns>;
  float grad_key[kD / 2];
  float grad_value[kD / 2];
  float scores[kRows / 2];
  float grad_probs[kRows / 2];
  float grad_query[kGradQueryColumns / 2];
  uint32_t probs[kRows / 4];  // two a word: the A operands of (3) and (6)
  uint32_t grad_scores[kRows / 4];

  // Operands by descriptor; "rows" are transposed, their depth runs along the rows.
  constexpr int kHalfKeyBytes = sm90::kMmaRows * sm90::kSwizzleBytes;
  constexpr uint32_t kKeyStep = kKeyBytes / sm90::kChunkBytes;
  constexpr uint32_t kStageStep = kQueryBytes / sm90::kChunkBytes;
  constexpr int kScoresBytes = kQueries * kKeys * sizeof(Element);
  constexpr uint32_t kScoresStep = kScoresBytes / sm90::kChunkBytes;
  constexpr uint32_t kTermsStep = kQueries * kRowTerms * sizeof(Element) / sm90::kChunkBytes;
  const auto operand = [](const void* pointer, int offset_bytes, int leading_bytes) {
    return sm90::descriptor_low(sm90::shared_address(pointer) + offset_bytes, leading_bytes);
  };
  const uint32_t key_operand = operand(shared.key, consumer * kHalfKeyBytes, 0);
  const uint32_t value_operand = operand(shared.value, consumer * kHalfKeyBytes, 0);
  const uint32_t query_operand = operand(shared.query, 0, 0);
  const uint32_t grad_out_operand = operand(shared.grad_out, 0, 0);
  const uint32_t query_rows = operand(shared.query, 0, kQueryBlockBytes);
  const uint32_t grad_out_rows = operand(shared.grad_out, 0, kQueryBlockBytes);
  const uint32_t scores_operand =
      operand(shared.grad_scores, kSharesTiles ? consumer * kScoresBytes : 0, 0);
  const uint32_t key_rows =
      operand(shared.key, kSharesTiles ? 0 : consumer * kKeys * sm90::kSwizzleBytes, 0);
  // Both halves of the depth read the same eight columns of row terms (leading offset 0); the
  // second half meets zeros.
  const uint32_t terms_operand = operand(shared.row_terms, 0, 0);
  constexpr uint32_t kOnesHigh = sm90::core_descriptor_high(0);  // all rows are alike
  constexpr uint32_t kTermsHigh = sm90::core_descriptor_high(sm90::kCoreBytes);
  using TermsStep = sm90::CoreStep<Element, kOnesHigh, kTermsHigh>;
  const uint32_t lse_ones = operand(shared.lse_ones, 0, 2 * sm90::kCoreBytes);
  const uint32_t delta_ones = operand(shared.delta_ones, 0, sm90::kCoreBytes);

  // Where this lane's rows of dS go: transposed, so a row is a query, 64 keys of this consumer.
  const int lane_query = lane % 8 + 8 * (lane / 16);
  const int lane_key = sm90::kMmaRows * consumer + sm90::kWarpRows * warp + 8 * (lane / 8 % 2);
  const uint32_t grad_scores_address = sm90::shared_address(shared.grad_scores) +
                                       sm90::swizzled_offset(kQueries, lane_query, lane_key);
  const float masked = params.scale_log2 > 0.0f ? -INFINITY : INFINITY;

  sm90::Ring<kConfig.query_stages / kTiles> stage;  // of the step
  uint32_t item_number = 0;                         // of this block
  uint32_t grad_query_parities = 0;                 // a bit for each place
  int buffer = 0;                                   // of dS
  int first_key = 0;
  // dV and dK: not in an item's first step. Zeros instead are 128 moves an item beside the
  // products' registers: 8k dense and real masks at D = 128 take 1% more with them, 2k dense 3%.
  int accumulates = 0;
  int query_tiles[kTiles] = {};  // within the head, with kOnlyTile
  bool is_full = true;           // the step has kTiles tiles

  const auto key_stage = [&] { return item_number % kKeyStages; };

  // (1)
  const auto issue_scores = [&] {
    const uint32_t a = key_operand + key_stage() * kKeyStep;
    const uint32_t b = query_operand + stage.stage * (kTiles * kStageStep);
    sm90::wgmma_fence();
#pragma unroll
    for (int k = 0; k < kD / kStep; ++k) {
      ProductS::template with_shared_a<false>(scores, a + sm90::step_along_columns(kKeys, k),
                                              b + sm90::step_along_columns(kQueries, k), k > 0);
    }
    TermsStep::issue(scores, lse_ones, terms_operand + stage.stage * (kTiles * kTermsStep));
    sm90::wgmma_commit();
  };

  // (4)
  const auto issue_grad_probs = [&] {
    const uint32_t b = grad_out_operand + stage.stage * (kTiles * kStageStep);
    sm90::wgmma_fence();
#pragma unroll
    for (int k = 0; k < kD / kStep; ++k) {
      ProductS::template with_shared_a<false>(grad_probs,
                                              value_operand + sm90::step_along_columns(kKeys, k),
                                              b + sm90::step_along_columns(kQueries, k), k > 0);
    }
    TermsStep::issue(grad_probs, delta_ones, terms_operand + stage.stage * (kTiles * kTermsStep));
    sm90::wgmma_commit();
  };

  // (2)
  const auto take_exponentials = [&] {
    const int diagonal = static_cast<int>(params.mask.offset);
    const int keys_left = static_cast<int>(params.mask.key_length) - first_key;
    const auto mask_tile = [&]<int kTile>() {
      const int first_query = (query_tiles[kTile] & ~kOnlyTile) * kQueries;
      const int relative = first_key - first_query - diagonal;  // of the tile's first corner
      const bool sees_all = relative - (kQueries - 1) >= -params.mask_left &&
                            relative + kKeys - 1 <= params.mask_right && keys_left >= kKeys;
      const bool exists = kTile == 0 || is_full;
      if (!sees_all || !exists) {
        const int key = consumer * sm90::kMmaRows + sm90::fragment_row(thread, 0);
        const int query = sm90::fragment_column(thread, 0);
        mask_scores<kTile * kQueries / 2>(scores, relative + key - query, params.mask_left,
                                          params.mask_right, exists ? keys_left - key : 0, masked);
      }
    };
    mask_tile.template operator()<0>();
    if constexpr (kTiles > 1) mask_tile.template operator()<1>();
#pragma unroll
    for (int j = 0; j < kRows / 2; ++j) {
      scores[j] = sm90::exp2_approx(scores[j] * params.scale_log2);
    }
  };

  // (5), and dS to shared memory
  const auto take_grad_scores = [&] {
#pragma unroll
    for (int k = 0; k < kRows / kStep; ++k) {
#pragma unroll
      for (int j = 8 * k; j < 8 * k + 8; ++j) grad_probs[j] *= scores[j];
#pragma unroll
      for (int j = 4 * k; j < 4 * k + 4; ++j) {
        grad_scores[j] = sm90::pack<Element>(grad_probs[2 * j], grad_probs[2 * j + 1]);
        probs[j] = sm90::pack<Element>(scores[2 * j], scores[2 * j + 1]);
      }
    }
    constexpr int kStepsOfTile = kQueries / kStep;
#pragma unroll
    for (int k = 0; k < kRows / kStep; ++k) {
      sm90::store_matrices_transposed(grad_scores_address +
                                          (buffer * kTiles + k / kStepsOfTile) * kScoresBytes +
                                          k % kStepsOfTile * kStep * sm90::kSwizzleBytes,
                                      grad_scores[4 * k], grad_scores[4 * k + 1],
                                      grad_scores[4 * k + 2], grad_scores[4 * k + 3]);
    }
  };

  // (3), (7), (6)
  const auto issue_gradients = [&] {
    const uint32_t stage_step = stage.stage * (kTiles * kStageStep);
    sm90::wgmma_fence();
#pragma unroll
    for (int k = 0; k < kRows / kStep; ++k) {
      ProductK::template with_register_a<true>(
          grad_value, probs[4 * k], probs[4 * k + 1], probs[4 * k + 2], probs[4 * k + 3],
          grad_out_rows + stage_step + sm90::step_along_rows(k), k > 0 || accumulates);
    }
    sm90::wgmma_commit();

    sm90::fence_async_proxy();
    sm90::named_barrier_sync(kBothConsumers, kBothThreads);
    sm90::wgmma_fence();
#pragma unroll
    for (int k = 0; k < kKeys / kStep; ++k) {
      ProductQ::template with_shared_a<true>(
          grad_query,
          scores_operand + buffer * kTiles * kScoresStep + sm90::step_along_columns(kQueries, k),
          key_rows + key_stage() * kKeyStep + sm90::step_along_rows(k), k > 0);
    }
    sm90::wgmma_commit();
    sm90::wgmma_wait<1>();

    sm90::wgmma_fence();
#pragma unroll
    for (int k = 0; k < kRows / kStep; ++k) {
      ProductK::template with_register_a<true>(grad_key, grad_scores[4 * k], grad_scores[4 * k + 1],
                                               grad_scores[4 * k + 2], grad_scores[4 * k + 3],
                                               query_rows + stage_step + sm90::step_along_rows(k),
                                               k > 0 || accumulates);
    }
    sm90::wgmma_commit();
  };

  // Rows of dQ to shared memory, swizzled, in the caller's type: of a query tile's only live tile.
  const auto stage_rows = [&](const void* to, int first_column) {
    const uint32_t address = sm90::shared_address(to);
    const int here = sm90::not_ahead(lane);
    const int row = sm90::kWarpRows * warp + sm90::store_row(here);
#pragma unroll
    for (int k = 0; k < kGradQueryColumns / 16; ++k) {
      uint32_t packed[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        packed[j] = sm90::pack<Element>(grad_query[8 * k + 2 * j] * params.grad_scale,
                                        grad_query[8 * k + 2 * j + 1] * params.grad_scale);
      }
      sm90::store_matrices(
          address + sm90::swizzled_offset(sm90::kMmaRows, row,
                                          first_column + 16 * k + sm90::store_column(here)),
          packed[0], packed[1], packed[2], packed[3]);
    }
  };

  // dQ to the thread that adds it (add_grad_query).
  const auto hand_over_grad_query = [&] {
    const int place = kSharesTiles ? consumer : stage.stage % kConfig.grad_query_places;
    if (kSharesTiles && place > 0 && !is_full) return;
    const int query_tile = kSharesTiles && consumer > 0 ? query_tiles[kTiles - 1] : query_tiles[0];
    shared.grad_query_empty[place].wait(grad_query_parities >> place & 1);
    grad_query_parities ^= 1u << place;
    if (kMeetsOnly && (query_tile & kOnlyTile) != 0) {
      stage_rows(shared.grad_query[place], kSharesTiles ? 0 : consumer * kGradQueryColumns);
    } else {
      float* const staging = shared.grad_query[place] +
                             (kSharesTiles ? 0 : consumer * kQueries * kGradQueryColumns) +
                             thread * 4;
#pragma unroll
      for (int j = 0; j < kGradQueryColumns / 8; ++j) {
        *reinterpret_cast<float4*>(staging + j * 4 * sm90::kWarpgroupThreads) = make_float4(
            grad_query[4 * j], grad_query[4 * j + 1], grad_query[4 * j + 2], grad_query[4 * j + 3]);
      }
    }
    sm90::fence_async_proxy();
    __syncwarp();
    if (lane == 0) shared.grad_query_full[place].arrive();
  };

  // dV (which = 0) or dK (1) of an item leaves. Staged in the buffer of dS that is not in use: (7)
  // of the step before, its last reader, is done on both sides of the barrier since, and the next
  // to write to a warp's corner of it is that warp.
  const auto store_gradient = [&](float (&gradient)[kD / 2], int which, int free_buffer) {
    sm90::pin(gradient);
    const schedule_sm90::WorkItem& item = shared.item[item_number % kItemSlots];
    if (item.part_slot >= 0) {
      constexpr int kFragment = sm90::kMmaRows * kD;
      float* const to =
          params.grad_parts +
          ((static_cast<int64_t>(item.part_slot) * 2 + which) * kConsumers + consumer) * kFragment +
          thread * 4;
#pragma unroll
      for (int j = 0; j < kD / 8; ++j) {
        sm90::add_float4(to + j * 4 * sm90::kWarpgroupThreads, gradient[4 * j], gradient[4 * j + 1],
                         gradient[4 * j + 2], gradient[4 * j + 3]);
      }
    } else {
      const int first_row =
          item.key_tile * kKeys + consumer * sm90::kMmaRows + warp * sm90::kWarpRows;
      const Strides& strides = which == 0 ? params.grad_value_strides : params.grad_key_strides;
      Element* const to = static_cast<Element*>(which == 0 ? params.grad_value : params.grad_key) +
                          item.batch * strides.batch + item.key_head * strides.head +
                          first_row * strides.length;
      store_rows<Element>(gradient, which == 0 ? 1.0f : params.grad_scale,
                          sm90::shared_address(shared.grad_scores[free_buffer]) +
                              consumer * sm90::kMmaRows * sm90::kSwizzleBytes,
                          warp, lane, to, strides.length,
                          static_cast<int>(params.mask.key_length) - first_row);
    }
  };

#pragma unroll
  for (int i = 0; i < kD / 2; ++i) {  // never read, but ptxas cannot know
    grad_key[i] = 0.0f;
    grad_value[i] = 0.0f;
  }
  for (;; ++item_number) {
    shared.key_full[key_stage()].wait(item_number / kKeyStages % 2);
    const int num_live = shared.item[item_number % kItemSlots].num_live;
    if (num_live == 0) break;
    first_key = shared.item[item_number % kItemSlots].key_tile * kKeys;
    shared.value_full.wait(item_number % 2);
    accumulates = 0;

#pragma unroll 1
    for (int left = num_live; left > 0; left -= kTiles) {
      is_full = left >= kTiles;
      const int first = stage.stage * kTiles;
#pragma unroll
      for (int t = 0; t < kTiles; ++t) shared.tile_full[first + t].wait(stage.parity);
      // Read here: beside products from shared memory a load would wait for most of them.
      // One lane a warp reads, the one that hands the stages back.
#pragma unroll
      for (int t = 0; t < kTiles; ++t) {
        query_tiles[t] = sm90::warp_uniform(lane == 0 ? shared.query_tile[first + t] : 0);
      }
      issue_scores();
      issue_grad_probs();

      sm90::wgmma_wait<1>();
      sm90::pin(scores);
      take_exponentials();

      sm90::wgmma_wait<0>();
      sm90::pin(grad_probs);
      if (left <= kTiles && lane == 0) shared.value_empty.arrive();
      take_grad_scores();
      issue_gradients();
      accumulates = 1;
      if (left <= kTiles) store_gradient(grad_value, 0, buffer ^ 1);  // beside (7) and (6)

      sm90::wgmma_wait<1>();
      sm90::pin(grad_query);
      if (kKeyStages == 1 && left <= kTiles && lane == 0) shared.key_empty[key_stage()].arrive();
      hand_over_grad_query();  // beside (6)
      sm90::wgmma_wait<0>();
      __syncwarp();
      if (lane == 0) {
#pragma unroll
        for (int t = 0; t < kTiles; ++t) shared.tile_empty[first + t].arrive();
      }
      stage.advance();
      buffer ^= 1;
    }
    store_gradient(grad_key, 1, buffer);
    __syncwarp();
    if (kKeyStages > 1 && lane == 0) shared.key_empty[key_stage()].arrive();
  }
}

}  // namespace backlite::backward_sm90
