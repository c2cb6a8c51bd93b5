// Matrix products of a single warp: slower than a warpgroup's, but a warp can start one alone.
#pragma once

#include <cstdint>

#include "sm90/math.cuh"

namespace backlite::sm90 {

// D (16 x 8, float) += A (16 x 16) * B (16 x 8). A and D as one warp's part of a warpgroup's
// operand and accumulator (layout.h); B by lane: column lane / 4, rows 2 * (lane % 4) and the next
// in b0, eight further down in b1.
template <typename Element>
__device__ __forceinline__ void mma_16x8x16(float& d0, float& d1, float& d2, float& d3,
                                            const uint32_t (&a)[4], uint32_t b0, uint32_t b1);

#define BACKLITE_DEFINE_MMA(ELEMENT, TYPE)                                                         \
  template <>                                                                                      \
  __device__ __forceinline__ void mma_16x8x16<ELEMENT>(float& d0, float& d1, float& d2, float& d3, \
                                                       const uint32_t (&a)[4], uint32_t b0,        \
                                                       uint32_t b1) {                              \
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." TYPE "." TYPE                            \
                 ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"            \
                 : "+f"(d0), "+f"(d1), "+f"(d2), "+f"(d3)                                          \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));                  \
  }

BACKLITE_DEFINE_MMA(BFloat16, "bf16")
BACKLITE_DEFINE_MMA(Float16, "f16")

#undef BACKLITE_DEFINE_MMA

}  // namespace backlite::sm90
