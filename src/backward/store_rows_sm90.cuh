// How dK and dV leave.
#pragma once

#include <cstdint>

#include "sm90/bulk.cuh"
#include "sm90/layout.h"
#include "sm90/math.cuh"
#include "sm90/tma.cuh"

namespace backlite::backward_sm90 {

// A warp's 16 rows of an accumulator to global memory in the caller's type, `rows_left` of them at
// most, whole lines of 128 bytes at a time. On the way a block of 64 columns is in shared memory,
// in what this warp alone has of one tile of dS: 16 bytes of each of 64 rows. So no barrier is
// needed, and the copy engine, where 64 KiB of dK and dV waited behind dQ at the end of every
// column, has nothing to do with it: 8k dense takes 1 to 2% less, head dim 64 0 to 6%.
template <typename Element, int kSize>
__device__ __forceinline__ void store_rows(const float (&fragment)[kSize], float factor,
                                           uint32_t grad_scores, int warp, int lane, Element* to,
                                           int64_t stride, int rows_left) {
  lane = sm90::not_ahead(lane);
  // Where columns [8 * chunk, 8 * chunk + 8) of a row are. No two lanes of a quarter warp that
  // write or read together meet in a bank.
  const auto address_of = [&](int row, int chunk) {
    return grad_scores + sm90::swizzled_offset(sm90::kMmaRows, 8 * chunk + (row % 8 ^ chunk),
                                               sm90::kWarpRows * warp + row / 8 * 8);
  };
  // What another chunk or another row changes in it: x flipped in the number of the chunk, or in
  // row % 8, flips x * kChunkBits, and x chunks further is x * kChunkStep further besides.
  constexpr uint32_t kChunkBits = sm90::kSwizzleBytes | sm90::kChunkBytes;
  constexpr uint32_t kChunkStep = 8 * sm90::kSwizzleBytes;
  constexpr uint32_t kRow8Bits = sm90::kChunkBytes;
  const uint32_t write_to = address_of(sm90::store_row(lane), sm90::store_column(lane) / 8);
  const int row = lane / 8;  // and every fourth row after it
  const uint32_t read_from = address_of(row, lane % 8);
  Element* const lane_to = to + row * stride + lane % 8 * sm90::kChunkColumns;
#pragma unroll
  for (int b = 0; b < 2 * kSize / sm90::kBlockColumns; ++b) {
    constexpr int kSteps = sm90::kBlockColumns / sm90::kMmaDepth;
    __syncwarp();
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
      uint32_t packed[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int i = 8 * (kSteps * b + k) + 2 * j;
        packed[j] = sm90::pack<Element>(fragment[i] * factor, fragment[i + 1] * factor);
      }
      sm90::store_matrices((write_to ^ 2 * k * kChunkBits) + 2 * k * kChunkStep, packed[0],
                           packed[1], packed[2], packed[3]);
    }
    __syncwarp();
    constexpr int kReads = sm90::kWarpRows / 4;
    uint4 chunks[kReads];
#pragma unroll
    for (int i = 0; i < kReads; ++i) {
      chunks[i] = sm90::load_chunk(read_from ^ (i % 2 * 4 * kChunkBits ^ i / 2 * kRow8Bits));
    }
#pragma unroll
    for (int i = 0; i < kReads; ++i) {
      if (row + 4 * i < rows_left) {
        __stcs(reinterpret_cast<uint4*>(lane_to + 4 * i * stride + b * sm90::kBlockColumns),
               chunks[i]);
      }
    }
  }
}

}  // namespace backlite::backward_sm90
