// Single instructions on numbers.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

namespace backlite::sm90 {

using BFloat16 = __nv_bfloat16;
using Float16 = __half;

__device__ __forceinline__ float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

__device__ __forceinline__ float log2_approx(float x) {
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

__device__ __forceinline__ float reciprocal_approx(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// The same number, said to change here: what is computed from it is computed when it is needed, not
// before a loop and kept in registers.
__device__ __forceinline__ int not_ahead(int value) {
  asm volatile("" : "+r"(value));
  return value;
}

// Two floats rounded to 16 bits, the first in the low half.
template <typename Element>
__device__ __forceinline__ uint32_t pack(float low, float high);

template <>
__device__ __forceinline__ uint32_t pack<BFloat16>(float low, float high) {
  uint32_t packed;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
}

template <>
__device__ __forceinline__ uint32_t pack<Float16>(float low, float high) {
  uint32_t packed;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
}

// The two halves of a packed bfloat16 pair.
__device__ __forceinline__ float low_bfloat16(uint32_t packed) {
  return __uint_as_float(packed << 16);
}

__device__ __forceinline__ float high_bfloat16(uint32_t packed) {
  return __uint_as_float(packed & 0xffff0000u);
}

__device__ __forceinline__ uint32_t add_bfloat16_pairs(uint32_t a, uint32_t b) {
  uint32_t sum;
  asm("add.rn.bf16x2 %0, %1, %2;" : "=r"(sum) : "r"(a), "r"(b));
  return sum;
}

}  // namespace backlite::sm90
