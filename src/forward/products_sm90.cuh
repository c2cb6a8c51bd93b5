// The two products of the Hopper forward on a warpgroup's 64 rows, issued and committed. The caller
// puts wgmma_fence before and waits for them.
#pragma once

#include <cstdint>

#include "sm90/barrier.cuh"
#include "sm90/layout.h"
#include "sm90/wgmma.cuh"

namespace backlite::forward_sm90 {

// (1) S = Q K^T with the first keys of a tile of kTileKeys, as many as `scores` has columns.
template <int kHeadDim, int kTileKeys, typename Element, int kSize>
__device__ __forceinline__ void issue_scores(float (&scores)[kSize], uint32_t query_operand,
                                             const Element* key) {
  const uint32_t key_operand = sm90::descriptor_low(sm90::shared_address(key), 0);
#pragma unroll
  for (int k = 0; k < kHeadDim / sm90::kMmaDepth; ++k) {
    sm90::Wgmma<Element, 2 * kSize>::template with_shared_a<false>(
        scores, query_operand + sm90::step_along_columns(sm90::kMmaRows, k),
        key_operand + sm90::step_along_columns(kTileKeys, k), k > 0);
  }
  sm90::wgmma_commit();
}

// (4) O = P V, added to what `out` has.
template <int kHeadDim, int kTileKeys, typename Element>
__device__ __forceinline__ void issue_out(float (&out)[kHeadDim / 2],
                                          const uint32_t (&probs)[kTileKeys / 4],
                                          const Element* value, bool has_out) {
  constexpr int kColumnBlockBytes = kTileKeys * sm90::kBlockColumns * sizeof(Element);
  const uint32_t value_operand =
      sm90::descriptor_low(sm90::shared_address(value), kColumnBlockBytes);
#pragma unroll
  for (int k = 0; k < kTileKeys / sm90::kMmaDepth; ++k) {
    sm90::Wgmma<Element, kHeadDim>::template with_register_a<true>(
        out, probs[4 * k], probs[4 * k + 1], probs[4 * k + 2], probs[4 * k + 3],
        value_operand + sm90::step_along_rows(k), k > 0 || has_out);
  }
  sm90::wgmma_commit();
}

}  // namespace backlite::forward_sm90
