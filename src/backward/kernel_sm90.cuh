// The Hopper backward over columns of tiles. One block a multiprocessor, resident for the whole
// grid; it takes work items (a run of live tiles of one column of 128 keys) from a counter.
// For every live tile of 64 query rows:
//
//   (1) S^T = K Q^T - LSE / scale        the row terms as one more step of the product
//   (2) P^T = exp2(c S^T)                c = scale * log2(e); 0 where masked
//   (3) dV += P^T dO                     P^T from registers
//   (4) dP^T = V dO^T - delta            the row terms again
//   (5) dS^T = P^T * dP^T
//   (6) dK += dS^T Q                     dS^T from registers; scale is applied at the end
//   (7) dQ += dS K                       dS through shared memory, dQ added up in global memory
//
// Its warpgroups:
//   consumers  64 keys each for (1) to (6); half of the head dim each for (7)
//   producer   one warp finds the live tiles, one copies K, V, Q, dO and the row terms to shared
//              memory, one adds dQ to global memory, one is idle: producer_sm90.cuh
//
// Float32 operations beside the tensor cores cost them cycles, and loads from shared memory starve
// there; with LSE and delta through the tensor cores two operations an element are left instead of
// four and no loads: 3408 cycles a tile instead of 3620 (docs/hopper-backward.md).
#pragma once

#include <cmath>
#include <cstdint>
#include <type_traits>

#include "backward/config_sm90.h"
#include "backward/params_sm90.h"
#include "backward/producer_sm90.cuh"
#include "backward/shared_sm90.cuh"
#include "backward/tile_source_sm90.cuh"
#include "common/mask.h"
#include "sm90/barrier.cuh"
#include "sm90/bulk.cuh"
#include "sm90/dependency.cuh"
#include "sm90/layout.h"
#include "sm90/math.cuh"
#include "sm90/tma.cuh"
#include "sm90/wgmma.cuh"
#include "sm90/wgmma_small.cuh"

namespace backlite::backward_sm90 {

// Numbers of the hardware's named barriers; 0 belongs to __syncthreads.
enum NamedBarrier : int {
  kBothConsumers = 1,
  kOneConsumer = 2,  // + consumer
  kNumNamedBarriers = kOneConsumer + kConsumers
};
static_assert(kNumNamedBarriers <= 16, "The hardware has 16");

// Masks S^T of one tile: rows are keys, columns queries. `relative` is the key's position minus the
// query's (shifted to the mask's diagonal) for this thread's first element.
__device__ __forceinline__ void mask_scores(float (&scores)[kQueries / 2], int relative, int left,
                                            int right, int keys_left, float masked) {
  const int low = -left - relative;
  const int high = right - relative;
#pragma unroll
  for (int i = 0; i < kQueries / 2; ++i) {
    const int key = sm90::fragment_row(0, i);
    const int step = key - sm90::fragment_column(0, i);
    if (step < low || step > high || key >= keys_left) scores[i] = masked;
  }
}

template <typename Config, typename Element, typename TileSource>
__global__ void __launch_bounds__(kThreads, 1)
    backward_kernel(const __grid_constant__ BackwardParams params) {
  static constexpr BackwardConfig kConfig = Config::kConfig;
  using Shared = SharedMemory<Config, Element>;
  static_assert(sizeof(Shared) <= 232448, "A block's limit of shared memory");
  constexpr int kD = kConfig.head_dim;
  constexpr int kBlocks = kConfig.column_blocks();
  constexpr int kStages = kConfig.query_stages;
  constexpr int kKeyBytes = kKeys * kD * sizeof(Element);
  constexpr int kQueryBytes = kQueries * kD * sizeof(Element);
  constexpr int kRowTermBytes = kQueries * kRowTerms * sizeof(Element);
  constexpr int kGradQueryFloats = kQueries * kConfig.grad_query_columns();
  constexpr int kQueryBlock = kQueries * sm90::kBlockColumns;  // elements of a block of columns
  static_assert(kStages % 2 == 0, "dS takes turns between two buffers with the stage");
  using TileRing = sm90::Ring<kStages>;

  extern __shared__ __align__(sm90::kTileAlignment) unsigned char shared_bytes[];
  auto& shared = *reinterpret_cast<Shared*>(shared_bytes);

  const int warpgroup = sm90::warp_uniform(threadIdx.x / sm90::kWarpgroupThreads);
  const int warp = sm90::warp_uniform(threadIdx.x / sm90::kWarpSize) % 4;
  const int lane = threadIdx.x % sm90::kWarpSize;

  if (threadIdx.x == 0) {
    sm90::prefetch_tensor_map(params.key);
    sm90::prefetch_tensor_map(params.value);
    sm90::prefetch_tensor_map(params.query);
    sm90::prefetch_tensor_map(params.grad_out);
    constexpr int kConsumerWarps = 4 * kConsumers;
    for (int i = 0; i < kItemSlots; ++i) {
      shared.key_full[i].init(1);
      shared.key_empty[i].init(kConsumerWarps);
    }
    shared.value_full.init(1);
    shared.value_empty.init(kConsumerWarps);
    for (int i = 0; i < kStages; ++i) {
      shared.tile_full[i].init(1);
      shared.tile_empty[i].init(kConsumerWarps);
    }
    for (int i = 0; i < kFoundSlots; ++i) {
      shared.found_full[i].init(1);
      shared.found_empty[i].init(1);
    }
    shared.grad_query_full.init(kConsumerWarps);
    shared.grad_query_empty.init(1);
    for (int i = 0; i < kReduceSlots; ++i) shared.reduce_ready[i].init(1);
    sm90::fence_barrier_init();
  }
  for (int i = threadIdx.x; i < kCoreElements; i += kThreads) {
    const int column = i % sm90::kChunkColumns;
    const float first = std::is_same_v<Element, sm90::Float16> ? kFirstPartFactorFp16 : 1.0f;
    const auto factor = [&](int part) { return part == 0 ? first : 1.0f; };
    const bool is_lse = column < kParts;
    const bool is_delta = !is_lse && column < 2 * kParts;
    shared.lse_ones[i] = Element(is_lse ? factor(column) : 0.0f);
    shared.delta_ones[i] = Element(is_delta ? factor(column - kParts) : 0.0f);
    shared.zeros[i] = Element(0.0f);
  }
  sm90::fence_async_proxy();
  __syncthreads();
  sm90::let_next_kernel_launch();
  sm90::wait_for_earlier_kernels();

  if (warpgroup == kConsumers) {
    sm90::give_registers<kConfig.producer_registers>();

    if (warp == kFinder) {
      find_tiles<TileSource>(params, shared, lane);
    } else if (warp == kLoader) {
      if (lane == 0) load_tiles<Config>(params, shared);
    } else if (warp == kReducer) {
      if (lane == 0) add_grad_query<Config>(params, shared);
    }
  } else {
    // ---- Consumers -----------------------------------------------------------------------------
    sm90::take_registers<kConfig.consumer_registers>();
    const int consumer = warpgroup;
    const int thread = threadIdx.x % sm90::kWarpgroupThreads;
    constexpr int kBothThreads = kConsumers * sm90::kWarpgroupThreads;
    constexpr int kStep = sm90::kMmaDepth;

    using ProductS = sm90::Wgmma<Element, kQueries>;
    using ProductK = sm90::Wgmma<Element, kD>;
    float grad_key[kD / 2];
    float grad_value[kD / 2];

    // Operands by descriptor; "rows" are transposed, their depth runs along the rows.
    constexpr int kHalfKeyBytes = sm90::kMmaRows * sm90::kSwizzleBytes;
    constexpr int kQueryBlockBytes = kQueryBlock * sizeof(Element);
    constexpr uint32_t kKeyStep = kKeyBytes / sm90::kChunkBytes;
    constexpr uint32_t kStageStep = kQueryBytes / sm90::kChunkBytes;
    constexpr uint32_t kScoresStep = kQueries * kKeys * sizeof(Element) / sm90::kChunkBytes;
    constexpr uint32_t kTermsStep = kRowTermBytes / sm90::kChunkBytes;
    const auto operand = [](const void* pointer, int offset_bytes, int leading_bytes) {
      return sm90::descriptor_low(sm90::shared_address(pointer) + offset_bytes, leading_bytes);
    };
    const uint32_t key_operand = operand(shared.key, consumer * kHalfKeyBytes, 0);
    const uint32_t value_operand = operand(shared.value, consumer * kHalfKeyBytes, 0);
    const uint32_t query_operand = operand(shared.query, 0, 0);
    const uint32_t grad_out_operand = operand(shared.grad_out, 0, 0);
    const uint32_t query_rows = operand(shared.query, 0, kQueryBlockBytes);
    const uint32_t grad_out_rows = operand(shared.grad_out, 0, kQueryBlockBytes);
    const uint32_t scores_operand = operand(shared.grad_scores, 0, 0);
    constexpr int kGradColumnsBytes = kConfig.grad_query_columns() * sizeof(Element);
    const uint32_t key_rows =
        operand(shared.key,
                kGradColumnsBytes == sm90::kSwizzleBytes ? consumer * kKeys * sm90::kSwizzleBytes
                                                         : consumer * kGradColumnsBytes,
                0);
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

    TileRing stage;
    sm90::Ring<kItemSlots> slot;
    uint32_t value_parity = 0;
    uint32_t grad_query_parity = 1;
    bool has_stored = false;  // dK and dV of the previous item are on their way out
    for (;; slot.advance(), value_parity ^= 1) {
      shared.key_full[slot.stage].wait(slot.parity);
      const int num_live = shared.item[slot.stage].num_live;
      if (num_live == 0) break;
      const int first_key = shared.item[slot.stage].key_tile * kKeys;
      shared.value_full.wait(value_parity);
      const uint32_t key_step = slot.stage * kKeyStep;
#pragma unroll
      for (int i = 0; i < kD / 2; ++i) {
        grad_key[i] = 0.0f;
        grad_value[i] = 0.0f;
      }

#pragma unroll 1
      for (int i = num_live; i > 0; --i) {
        float scores[kQueries / 2];
        float grad_probs[kQueries / 2];
        float grad_query[kConfig.grad_query_columns() / 2];
        uint32_t probs[kQueries / 4];  // two a word: the A operands of (3) and (6)
        uint32_t grad_scores[kQueries / 4];

        shared.tile_full[stage.stage].wait(stage.parity);
        const uint32_t stage_step = stage.stage * kStageStep;
        // Read here: beside products from shared memory a load would wait for most of them.
        // One lane a warp reads, the one that hands the stage back.
        const int first_query =
            sm90::warp_uniform(lane == 0 ? shared.query_tile[stage.stage] : 0) * kQueries;
        sm90::wgmma_fence();

        // (1)
#pragma unroll
        for (int k = 0; k < kD / kStep; ++k) {
          ProductS::template with_shared_a<false>(
              scores, key_operand + key_step + sm90::step_along_columns(kKeys, k),
              query_operand + stage_step + sm90::step_along_columns(kQueries, k), k > 0);
        }
        TermsStep::issue(scores, lse_ones, terms_operand + stage.stage * kTermsStep);
        sm90::wgmma_commit();

        // (4)
#pragma unroll
        for (int k = 0; k < kD / kStep; ++k) {
          ProductS::template with_shared_a<false>(
              grad_probs, value_operand + sm90::step_along_columns(kKeys, k),
              grad_out_operand + stage_step + sm90::step_along_columns(kQueries, k), k > 0);
        }
        TermsStep::issue(grad_probs, delta_ones, terms_operand + stage.stage * kTermsStep);
        sm90::wgmma_commit();

        // (2)
        sm90::wgmma_wait<1>();
        sm90::pin(scores);
        {
          const int diagonal = static_cast<int>(params.mask.offset);
          const int relative = first_key - first_query - diagonal;  // of the tile's first corner
          const int keys_left = static_cast<int>(params.mask.key_length) - first_key;
          const bool is_full = relative - (kQueries - 1) >= -params.mask_left &&
                               relative + kKeys - 1 <= params.mask_right && keys_left >= kKeys;
          if (!is_full) {
            const int key = consumer * sm90::kMmaRows + sm90::fragment_row(thread, 0);
            const int query = sm90::fragment_column(thread, 0);
            mask_scores(scores, relative + key - query, params.mask_left, params.mask_right,
                        keys_left - key, masked);
          }
        }
#pragma unroll
        for (int j = 0; j < kQueries / 2; ++j) {
          scores[j] = sm90::exp2_approx(scores[j] * params.scale_log2);
        }

        // (5)
        sm90::wgmma_wait<0>();
        sm90::pin(grad_probs);
        if (i == 1 && lane == 0) shared.value_empty.arrive();
#pragma unroll
        for (int k = 0; k < kQueries / kStep; ++k) {
#pragma unroll
          for (int j = 8 * k; j < 8 * k + 8; ++j) grad_probs[j] *= scores[j];
#pragma unroll
          for (int j = 4 * k; j < 4 * k + 4; ++j) {
            grad_scores[j] = sm90::pack<Element>(grad_probs[2 * j], grad_probs[2 * j + 1]);
            probs[j] = sm90::pack<Element>(scores[2 * j], scores[2 * j + 1]);
          }
        }
        const int buffer = stage.stage % 2;
        if (has_stored) {
          // dV of the item before leaves through dS's place, dK through that of its K.
          if (thread == 0) sm90::tma_store_wait_read();
          sm90::named_barrier_sync(kBothConsumers, kBothThreads);
          if (lane == 0) shared.key_empty[slot.stage ^ 1].arrive();
          has_stored = false;
        }
#pragma unroll
        for (int k = 0; k < kQueries / kStep; ++k) {
          sm90::store_matrices_transposed(grad_scores_address +
                                              buffer * kScoresStep * sm90::kChunkBytes +
                                              k * kStep * sm90::kSwizzleBytes,
                                          grad_scores[4 * k], grad_scores[4 * k + 1],
                                          grad_scores[4 * k + 2], grad_scores[4 * k + 3]);
        }

        // (3)
        sm90::wgmma_fence();
#pragma unroll
        for (int k = 0; k < kQueries / kStep; ++k) {
          ProductK::template with_register_a<true>(
              grad_value, probs[4 * k], probs[4 * k + 1], probs[4 * k + 2], probs[4 * k + 3],
              grad_out_rows + stage_step + sm90::step_along_rows(k), 1);
        }
        sm90::wgmma_commit();

        // (7)
        sm90::fence_async_proxy();
        sm90::named_barrier_sync(kBothConsumers, kBothThreads);
        sm90::wgmma_fence();
#pragma unroll
        for (int k = 0; k < kKeys / kStep; ++k) {
          const uint32_t a =
              scores_operand + buffer * kScoresStep + sm90::step_along_columns(kQueries, k);
          const uint32_t b = key_rows + key_step + sm90::step_along_rows(k);
          if constexpr (kConfig.grad_query_columns() == 64) {
            ProductS::template with_shared_a<true>(grad_query, a, b, k > 0);
          } else {
            sm90::wgmma_32<Element>(grad_query, a, b, k > 0);
          }
        }
        sm90::wgmma_commit();
        sm90::wgmma_wait<1>();

        // (6)
        sm90::wgmma_fence();
#pragma unroll
        for (int k = 0; k < kQueries / kStep; ++k) {
          ProductK::template with_register_a<true>(
              grad_key, grad_scores[4 * k], grad_scores[4 * k + 1], grad_scores[4 * k + 2],
              grad_scores[4 * k + 3], query_rows + stage_step + sm90::step_along_rows(k), 1);
        }
        sm90::wgmma_commit();

        // dQ to its warp, beside (6)
        sm90::wgmma_wait<1>();
        sm90::pin(grad_query);
        shared.grad_query_empty.wait(grad_query_parity);
        grad_query_parity ^= 1;
        float* const staging = shared.grad_query[consumer] + thread * 4;
#pragma unroll
        for (int j = 0; j < kConfig.grad_query_columns() / 8; ++j) {
          *reinterpret_cast<float4*>(staging + j * 4 * sm90::kWarpgroupThreads) =
              make_float4(grad_query[4 * j], grad_query[4 * j + 1], grad_query[4 * j + 2],
                          grad_query[4 * j + 3]);
        }
        sm90::fence_async_proxy();
        __syncwarp();
        if (lane == 0) shared.grad_query_full.arrive();

        sm90::wgmma_wait<0>();
        __syncwarp();
        if (lane == 0) shared.tile_empty[stage.stage].arrive();
        stage.advance();
      }
      sm90::pin(grad_key);
      sm90::pin(grad_value);
      // ---- dK and dV, while the next item's K and V arrive -----------------------------------
      const schedule_sm90::WorkItem& item = shared.item[slot.stage];
      if (item.part_slot >= 0) {
        constexpr int kFragment = sm90::kMmaRows * kD;
        float* const parts =
            params.grad_parts +
            (static_cast<int64_t>(item.part_slot) * 2 * kConsumers + consumer) * kFragment +
            thread * 4;
        const auto add = [&](const float (&fragment)[kD / 2], float* to) {
#pragma unroll
          for (int j = 0; j < kD / 8; ++j) {
            sm90::add_float4(to + j * 4 * sm90::kWarpgroupThreads, fragment[4 * j],
                             fragment[4 * j + 1], fragment[4 * j + 2], fragment[4 * j + 3]);
          }
        };
        add(grad_value, parts);
        add(grad_key, parts + kConsumers * kFragment);
        __syncwarp();
        if (lane == 0) shared.key_empty[slot.stage].arrive();
        continue;
      }
      // The staging is free once both consumers are done with (7).
      sm90::named_barrier_sync(kBothConsumers, kBothThreads);
      const auto stage_rows = [&](const float (&fragment)[kD / 2], float factor, Element* to) {
        const uint32_t address = sm90::shared_address(to);
        const int row = sm90::kWarpRows * warp + sm90::store_row(lane);
#pragma unroll
        for (int k = 0; k < kD / 16; ++k) {
          uint32_t packed[4];
#pragma unroll
          for (int j = 0; j < 4; ++j) {
            packed[j] = sm90::pack<Element>(fragment[8 * k + 2 * j] * factor,
                                            fragment[8 * k + 2 * j + 1] * factor);
          }
          sm90::store_matrices(address + sm90::swizzled_offset(sm90::kMmaRows, row,
                                                               16 * k + sm90::store_column(lane)),
                               packed[0], packed[1], packed[2], packed[3]);
        }
      };
      stage_rows(grad_value, 1.0f, shared.grad_value[consumer]);
      stage_rows(grad_key, params.grad_scale, shared.grad_key[slot.stage][consumer]);
      sm90::fence_async_proxy();
      sm90::named_barrier_sync(kOneConsumer + consumer, sm90::kWarpgroupThreads);
      if (thread == 0) {
        constexpr int kRowsBlock = sm90::kMmaRows * sm90::kBlockColumns;
#pragma unroll
        for (int b = 0; b < kBlocks; ++b) {
          const auto store = [&](const CUtensorMap& map, const Element* from) {
            sm90::tma_store(map, from + b * kRowsBlock, b * sm90::kBlockColumns,
                            first_key + consumer * sm90::kMmaRows, item.key_head, item.batch,
                            sm90::evict_first());
          };
          store(params.grad_value, shared.grad_value[consumer]);
          store(params.grad_key, shared.grad_key[slot.stage][consumer]);
        }
        sm90::tma_store_commit();
      }
      has_stored = true;  // which keeps the item's slot
    }
    if (has_stored && thread == 0) sm90::tma_store_wait_read();
  }
}

}  // namespace backlite::backward_sm90
