// Copies of contiguous bytes between global and shared memory, 16 bytes of a lane, and the
// transposed matrix store.
#pragma once

#include <cstdint>

#include "sm90/barrier.cuh"

namespace backlite::sm90 {

// Copies `bytes` (a multiple of 16, both ends 16-byte aligned) to shared memory; they count on
// `full`.
__device__ __forceinline__ void bulk_load(void* shared, const void* global, int bytes,
                                          Barrier& full) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
          "r"(shared_address(shared)),
      "l"(global), "r"(bytes), "r"(full.address())
      : "memory");
}

// The way back. A group of its own.
__device__ __forceinline__ void bulk_store(void* global, const void* shared, int bytes) {
  asm volatile(
      "cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;\n"
      "cp.async.bulk.commit_group;" ::"l"(global),
      "r"(shared_address(shared)), "r"(bytes)
      : "memory");
}

// Adds `bytes` of floats to global memory, element by element. A group of its own.
__device__ __forceinline__ void bulk_add(float* global, const void* shared, int bytes) {
  asm volatile(
      "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;\n"
      "cp.async.bulk.commit_group;" ::"l"(global),
      "r"(shared_address(shared)), "r"(bytes)
      : "memory");
}

// The bulk groups of this thread are finished altogether, writes included.
__device__ __forceinline__ void bulk_wait() {
  asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}

// Adds four floats to global memory (16-byte aligned).
__device__ __forceinline__ void add_float4(float* global, float a, float b, float c, float d) {
  asm volatile("red.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(global), "f"(a), "f"(b),
               "f"(c), "f"(d)
               : "memory");
}

// 16 bytes of shared memory.
__device__ __forceinline__ uint4 load_chunk(uint32_t address) {
  uint4 chunk;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(chunk.x), "=r"(chunk.y), "=r"(chunk.z), "=r"(chunk.w)
               : "r"(address)
               : "memory");
  return chunk;
}

// As store_matrices, each 8 x 8 matrix transposed. Lane l gives the address of row l % 8 of the
// stored matrix l / 8, a column of what the registers hold.
__device__ __forceinline__ void store_matrices_transposed(uint32_t address, uint32_t m0,
                                                          uint32_t m1, uint32_t m2, uint32_t m3) {
  asm volatile(
      "stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address),
      "r"(m0), "r"(m1), "r"(m2), "r"(m3)
      : "memory");
}

}  // namespace backlite::sm90
