// Words in global memory by which blocks that are at work at the same time, of one kernel or two,
// tell each other how far they are.
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

// Takes `value` off and returns what is left. Who takes the last sees what was done before the
// others took theirs, and so does whom it tells.
__device__ __forceinline__ uint64_t take_off(uint64_t* word, uint64_t value) {
  uint64_t before;
  asm volatile("atom.acq_rel.gpu.global.add.u64 %0, [%1], %2;"
               : "=l"(before)
               : "l"(word), "l"(-value)
               : "memory");
  return before - value;
}

// Returns the word once one of the bits is set.
__device__ __forceinline__ uint32_t wait_for_bits(const uint32_t* word, uint32_t bits) {
  uint32_t now = 0;
  for (uint32_t tries = 0;; ++tries) {
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(now) : "l"(word) : "memory");
    if ((now & bits) != 0) return now;
#if defined(BACKLITE_SM90_TRAP)
    if (tries > 10000000) asm volatile("trap;");
#endif
  }
}

}  // namespace backlite::sm90
