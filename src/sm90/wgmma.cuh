// Warpgroup matrix products: D (64 x N, float, in registers) = A (64 x 16) * B (16 x N) [+ D].
//
// B is always in shared memory, A there or in registers. An operand is given by the low half of its
// descriptor (layout.h). `accumulate` = 0 ignores what D held.
//
// The products are asynchronous. Between wgmma_fence and the wgmma_wait that covers them, D and A
// must not be touched, and everything must be inlined with constant register indices: otherwise
// ptxas waits after each product (its warnings C75xx, which fail our build).
#pragma once

#include <cstdint>

#include "sm90/layout.h"
#include "sm90/math.cuh"

namespace backlite::sm90 {

// Registers written before this line are visible to the products after it.
__device__ __forceinline__ void wgmma_fence() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

__device__ __forceinline__ void wgmma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

// Returns when at most kPending committed groups of this warpgroup are unfinished.
template <int kPending>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// Nothing that reads or writes the array moves across this line.
template <int kSize>
__device__ __forceinline__ void pin(float (&array)[kSize]) {
#pragma unroll
  for (int i = 0; i < kSize; ++i) asm volatile("" : "+f"(array[i])::"memory");
}

template <int kSize>
__device__ __forceinline__ void pin(uint32_t (&array)[kSize]) {
#pragma unroll
  for (int i = 0; i < kSize; ++i) asm volatile("" : "+r"(array[i])::"memory");
}

// Wgmma<Element, N>::with_shared_a and with_register_a, for the widths in use.
template <typename Element, int kN>
struct Wgmma;

// Inline assembly wants every register spelled out; these lists do it, eight a line.
#define BACKLITE_WGMMA_OUT8(d, i)                                                             \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), \
      "+f"(d[i + 6]), "+f"(d[i + 7])
#define BACKLITE_WGMMA_OUT64(d)                                                     \
  BACKLITE_WGMMA_OUT8(d, 0), BACKLITE_WGMMA_OUT8(d, 8), BACKLITE_WGMMA_OUT8(d, 16), \
      BACKLITE_WGMMA_OUT8(d, 24)
#define BACKLITE_WGMMA_OUT128(d)                                                          \
  BACKLITE_WGMMA_OUT8(d, 0), BACKLITE_WGMMA_OUT8(d, 8), BACKLITE_WGMMA_OUT8(d, 16),       \
      BACKLITE_WGMMA_OUT8(d, 24), BACKLITE_WGMMA_OUT8(d, 32), BACKLITE_WGMMA_OUT8(d, 40), \
      BACKLITE_WGMMA_OUT8(d, 48), BACKLITE_WGMMA_OUT8(d, 56)
#define BACKLITE_WGMMA_OUT176(d)                                                          \
  BACKLITE_WGMMA_OUT8(d, 0), BACKLITE_WGMMA_OUT8(d, 8), BACKLITE_WGMMA_OUT8(d, 16),       \
      BACKLITE_WGMMA_OUT8(d, 24), BACKLITE_WGMMA_OUT8(d, 32), BACKLITE_WGMMA_OUT8(d, 40), \
      BACKLITE_WGMMA_OUT8(d, 48), BACKLITE_WGMMA_OUT8(d, 56), BACKLITE_WGMMA_OUT8(d, 64), \
      BACKLITE_WGMMA_OUT8(d, 72), BACKLITE_WGMMA_OUT8(d, 80)
#define BACKLITE_WGMMA_REGISTERS64           \
  "{%0, %1, %2, %3, %4, %5, %6, %7,"         \
  " %8, %9, %10, %11, %12, %13, %14, %15,"   \
  " %16, %17, %18, %19, %20, %21, %22, %23," \
  " %24, %25, %26, %27, %28, %29, %30, %31}"
#define BACKLITE_WGMMA_REGISTERS128          \
  "{%0, %1, %2, %3, %4, %5, %6, %7,"         \
  " %8, %9, %10, %11, %12, %13, %14, %15,"   \
  " %16, %17, %18, %19, %20, %21, %22, %23," \
  " %24, %25, %26, %27, %28, %29, %30, %31," \
  " %32, %33, %34, %35, %36, %37, %38, %39," \
  " %40, %41, %42, %43, %44, %45, %46, %47," \
  " %48, %49, %50, %51, %52, %53, %54, %55," \
  " %56, %57, %58, %59, %60, %61, %62, %63}"
#define BACKLITE_WGMMA_REGISTERS176          \
  "{%0, %1, %2, %3, %4, %5, %6, %7,"         \
  " %8, %9, %10, %11, %12, %13, %14, %15,"   \
  " %16, %17, %18, %19, %20, %21, %22, %23," \
  " %24, %25, %26, %27, %28, %29, %30, %31," \
  " %32, %33, %34, %35, %36, %37, %38, %39," \
  " %40, %41, %42, %43, %44, %45, %46, %47," \
  " %48, %49, %50, %51, %52, %53, %54, %55," \
  " %56, %57, %58, %59, %60, %61, %62, %63," \
  " %64, %65, %66, %67, %68, %69, %70, %71," \
  " %72, %73, %74, %75, %76, %77, %78, %79," \
  " %80, %81, %82, %83, %84, %85, %86, %87}"

// FIRST .. : the numbers of the operands after the accumulator's registers.
#define BACKLITE_WGMMA_LAST64 "39"
#define BACKLITE_WGMMA_LAST128 "71"
#define BACKLITE_WGMMA_LAST176 "95"
#define BACKLITE_DEFINE_WGMMA(ELEMENT, TYPE, N, I0, I1, I2, I3, I4, I5, I6)                       \
  template <>                                                                                     \
  struct Wgmma<ELEMENT, N> {                                                                      \
    template <bool kTransposeB>                                                                   \
    __device__ static __forceinline__ void with_shared_a(float (&d)[N / 2], uint32_t a,           \
                                                         uint32_t b, int accumulate) {            \
      asm volatile(                                                                               \
          "{\n.reg .pred p;\n.reg .b64 a, b;\n"                                                   \
          "setp.ne.b32 p, %" #I2                                                                  \
          ", 0;\n"                                                                                \
          "mov.b64 a, {%" #I0 ", %" #I3                                                           \
          "};\n"                                                                                  \
          "mov.b64 b, {%" #I1 ", %" #I3                                                           \
          "};\n"                                                                                  \
          "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPE "." TYPE                         \
          " " BACKLITE_WGMMA_REGISTERS##N ", a, b, p, 1, 1, 0, %" #I4 ";\n}"                      \
          : BACKLITE_WGMMA_OUT##N(d)                                                              \
          : "r"(a), "r"(b), "r"(accumulate), "n"(kDescriptorHigh), "n"(kTransposeB ? 1 : 0));     \
    }                                                                                             \
    template <bool kTransposeB>                                                                   \
    __device__ static __forceinline__ void with_register_a(float (&d)[N / 2], uint32_t a0,        \
                                                           uint32_t a1, uint32_t a2, uint32_t a3, \
                                                           uint32_t b, int accumulate) {          \
      asm volatile(                                                                               \
          "{\n.reg .pred p;\n.reg .b64 b;\n"                                                      \
          "setp.ne.b32 p, %" #I5                                                                  \
          ", 0;\n"                                                                                \
          "mov.b64 b, {%" #I4 ", %" #I6                                                           \
          "};\n"                                                                                  \
          "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPE "." TYPE                         \
          " " BACKLITE_WGMMA_REGISTERS##N ", {%" #I0 ", %" #I1 ", %" #I2 ", %" #I3                \
                                          "}, b, p, 1, 1, %" BACKLITE_WGMMA_LAST##N ";\n}"        \
          : BACKLITE_WGMMA_OUT##N(d)                                                              \
          : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b), "r"(accumulate), "n"(kDescriptorHigh),    \
            "n"(kTransposeB ? 1 : 0));                                                            \
    }                                                                                             \
  };

BACKLITE_DEFINE_WGMMA(BFloat16, "bf16", 64, 32, 33, 34, 35, 36, 37, 38)
BACKLITE_DEFINE_WGMMA(Float16, "f16", 64, 32, 33, 34, 35, 36, 37, 38)
BACKLITE_DEFINE_WGMMA(BFloat16, "bf16", 128, 64, 65, 66, 67, 68, 69, 70)
BACKLITE_DEFINE_WGMMA(Float16, "f16", 128, 64, 65, 66, 67, 68, 69, 70)
BACKLITE_DEFINE_WGMMA(BFloat16, "bf16", 176, 88, 89, 90, 91, 92, 93, 94)
BACKLITE_DEFINE_WGMMA(Float16, "f16", 176, 88, 89, 90, 91, 92, 93, 94)

// Operands without swizzle consist of core matrices: 8 rows of 8 elements, 128 contiguous bytes.
// The leading offset (low half of the descriptor, from bit 16) leads from one core matrix to the
// next along the depth, the stride offset (high half) to the next eight rows. An offset of zero
// reads the same core matrix again.
inline constexpr int kCoreRows = 8;
inline constexpr int kCoreBytes = 128;

BACKLITE_SM90_HOST_DEVICE constexpr uint32_t core_descriptor_high(uint32_t stride_bytes) {
  return stride_bytes / kChunkBytes;
}

// D (64 x N) += A (64 x 16) * B^T (N x 16), both in shared memory, in core matrices; N is 64 or
// 128. kAHigh, kBHigh: core_descriptor_high of each.
template <typename Element, uint32_t kAHigh, uint32_t kBHigh>
struct CoreStep;

#define BACKLITE_CORE_STEP(TYPE, N, I0, I1, I2, I3)                                         \
  __device__ static __forceinline__ void issue(float (&d)[N / 2], uint32_t a, uint32_t b) { \
    asm volatile(                                                                           \
        "{\n.reg .b64 a, b;\n"                                                              \
        "mov.b64 a, {%" #I0 ", %" #I2                                                       \
        "};\n"                                                                              \
        "mov.b64 b, {%" #I1 ", %" #I3                                                       \
        "};\n"                                                                              \
        "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPE "." TYPE                     \
        " " BACKLITE_WGMMA_REGISTERS##N ", a, b, 1, 1, 1, 0, 0;\n}"                         \
        : BACKLITE_WGMMA_OUT##N(d)                                                          \
        : "r"(a), "r"(b), "n"(kAHigh), "n"(kBHigh));                                        \
  }
#define BACKLITE_DEFINE_CORE_STEP(ELEMENT, TYPE)  \
  template <uint32_t kAHigh, uint32_t kBHigh>     \
  struct CoreStep<ELEMENT, kAHigh, kBHigh> {      \
    BACKLITE_CORE_STEP(TYPE, 64, 32, 33, 34, 35)  \
    BACKLITE_CORE_STEP(TYPE, 128, 64, 65, 66, 67) \
  };

BACKLITE_DEFINE_CORE_STEP(BFloat16, "bf16")
BACKLITE_DEFINE_CORE_STEP(Float16, "f16")

#undef BACKLITE_CORE_STEP
#undef BACKLITE_DEFINE_CORE_STEP
#undef BACKLITE_DEFINE_WGMMA
#undef BACKLITE_WGMMA_OUT8
#undef BACKLITE_WGMMA_OUT64
#undef BACKLITE_WGMMA_REGISTERS64
#undef BACKLITE_WGMMA_LAST64
#undef BACKLITE_WGMMA_OUT128
#undef BACKLITE_WGMMA_REGISTERS128
#undef BACKLITE_WGMMA_LAST128
#undef BACKLITE_WGMMA_OUT176
#undef BACKLITE_WGMMA_REGISTERS176
#undef BACKLITE_WGMMA_LAST176

}  // namespace backlite::sm90
