// Words in global memory by which blocks of one kernel tell each other how far they are.
#pragma once

#include <cstdint>

namespace backlite::sm90 {

// Orders this thread's ordinary accesses to global memory and those of the copy engine that it
// starts or has waited for.
__device__ __forceinline__ void fence_async_proxy_global() {
  asm volatile("fence.proxy.async.global;" ::: "memory");
}

// Returns what was there. Who sees bits that were set sees what was done before they were.
__device__ __forceinline__ uint32_t fetch_add(uint32_t* word, uint32_t value) {
  uint32_t before;
  asm volatile("atom.acquire.gpu.global.add.u32 %0, [%1], %2;"
               : "=r"(before)
               : "l"(word), "r"(value)
               : "memory");
  return before;
}

__device__ __forceinline__ void set_bits(uint32_t* word, uint32_t bits) {
  asm volatile("red.release.gpu.global.or.b32 [%0], %1;" ::"l"(word), "r"(bits) : "memory");
}

// Returns once one of the bits is set.
__device__ __forceinline__ void wait_for_bits(const uint32_t* word, uint32_t bits) {
  uint32_t now = 0;
  for (uint32_t tries = 0;; ++tries) {
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(now) : "l"(word) : "memory");
    if ((now & bits) != 0) break;
#if defined(BACKLITE_SM90_TRAP)
    if (tries > 10000000) asm volatile("trap;");
#endif
  }
}

}  // namespace backlite::sm90
