// One step of a warpgroup product on operands that are not swizzled.
#pragma once

#include <cstdint>

#include "sm90/layout.h"
#include "sm90/wgmma.cuh"

namespace backlite::sm90 {

// Operands without swizzle consist of core matrices: 8 rows of 8 elements, 128 contiguous bytes.
// The leading offset (low half of the descriptor, from bit 16) leads from one core matrix to the
// next along the depth, the stride offset (high half) to the next eight rows. An offset of zero
// reads the same core matrix again.
inline constexpr int kCoreRows = 8;
inline constexpr int kCoreBytes = 128;

BACKLITE_SM90_HOST_DEVICE constexpr uint32_t core_descriptor_high(uint32_t stride_bytes) {
  return stride_bytes / kChunkBytes;
}

#define BACKLITE_WGMMA_OUT8(d, i)                                                             \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), \
      "+f"(d[i + 6]), "+f"(d[i + 7])

// D (64 x N) += A (64 x 16) * B^T (N x 16), both in shared memory, in core matrices; N is 64 or
// 128. kAHigh, kBHigh: core_descriptor_high of each.
template <typename Element, uint32_t kAHigh, uint32_t kBHigh>
struct CoreStep;

#define BACKLITE_DEFINE_WGMMA_SMALL(ELEMENT, TYPE)                                              \
  template <uint32_t kAHigh, uint32_t kBHigh>                                                   \
  struct CoreStep<ELEMENT, kAHigh, kBHigh> {                                                    \
    __device__ static __forceinline__ void issue(float (&d)[32], uint32_t a, uint32_t b) {      \
      asm volatile(                                                                             \
          "{\n.reg .b64 a, b;\n"                                                                \
          "mov.b64 a, {%32, %34};\n"                                                            \
          "mov.b64 b, {%33, %35};\n"                                                            \
          "wgmma.mma_async.sync.aligned.m64n64k16.f32." TYPE "." TYPE                           \
          " {%0, %1, %2, %3, %4, %5, %6, %7,"                                                   \
          " %8, %9, %10, %11, %12, %13, %14, %15,"                                              \
          " %16, %17, %18, %19, %20, %21, %22, %23,"                                            \
          " %24, %25, %26, %27, %28, %29, %30, %31}, a, b, 1, 1, 1, 0, 0;\n}"                   \
          : BACKLITE_WGMMA_OUT8(d, 0), BACKLITE_WGMMA_OUT8(d, 8), BACKLITE_WGMMA_OUT8(d, 16),   \
            BACKLITE_WGMMA_OUT8(d, 24)                                                          \
          : "r"(a), "r"(b), "n"(kAHigh), "n"(kBHigh));                                          \
    }                                                                                           \
    __device__ static __forceinline__ void issue(float (&d)[64], uint32_t a, uint32_t b) {      \
      asm volatile(                                                                             \
          "{\n.reg .b64 a, b;\n"                                                                \
          "mov.b64 a, {%64, %66};\n"                                                            \
          "mov.b64 b, {%65, %67};\n"                                                            \
          "wgmma.mma_async.sync.aligned.m64n128k16.f32." TYPE "." TYPE                          \
          " {%0, %1, %2, %3, %4, %5, %6, %7,"                                                   \
          " %8, %9, %10, %11, %12, %13, %14, %15,"                                              \
          " %16, %17, %18, %19, %20, %21, %22, %23,"                                            \
          " %24, %25, %26, %27, %28, %29, %30, %31,"                                            \
          " %32, %33, %34, %35, %36, %37, %38, %39,"                                            \
          " %40, %41, %42, %43, %44, %45, %46, %47,"                                            \
          " %48, %49, %50, %51, %52, %53, %54, %55,"                                            \
          " %56, %57, %58, %59, %60, %61, %62, %63}, a, b, 1, 1, 1, 0, 0;\n}"                   \
          : BACKLITE_WGMMA_OUT8(d, 0), BACKLITE_WGMMA_OUT8(d, 8), BACKLITE_WGMMA_OUT8(d, 16),   \
            BACKLITE_WGMMA_OUT8(d, 24), BACKLITE_WGMMA_OUT8(d, 32), BACKLITE_WGMMA_OUT8(d, 40), \
            BACKLITE_WGMMA_OUT8(d, 48), BACKLITE_WGMMA_OUT8(d, 56)                              \
          : "r"(a), "r"(b), "n"(kAHigh), "n"(kBHigh));                                          \
    }                                                                                           \
  };

BACKLITE_DEFINE_WGMMA_SMALL(BFloat16, "bf16")
BACKLITE_DEFINE_WGMMA_SMALL(Float16, "f16")

#undef BACKLITE_DEFINE_WGMMA_SMALL
#undef BACKLITE_WGMMA_OUT8

}  // namespace backlite::sm90
