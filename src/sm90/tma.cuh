// Tensor copies between global and shared memory.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "sm90/barrier.cuh"

namespace backlite::sm90 {

__device__ __forceinline__ void prefetch_tensor_map(const CUtensorMap& map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}

// For data that is used once: what stays in L2 is better used for other things.
__device__ __forceinline__ uint64_t evict_first() {
  uint64_t policy;
  asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

// As tma_load below, with a policy for L2.
__device__ __forceinline__ void tma_load(void* shared, const CUtensorMap& map, Barrier& full,
                                         int column, int row, int head, int batch,
                                         uint64_t policy) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint"
      " [%0], [%1, {%3, %4, %5, %6}], [%2], %7;" ::"r"(shared_address(shared)),
      "l"(&map), "r"(full.address()), "r"(column), "r"(row), "r"(head), "r"(batch), "l"(policy)
      : "memory");
}

// Copies one box of a (batch, head, row, column) tensor to shared memory; its bytes count on
// `full`. Elements outside the tensor arrive as zero.
__device__ __forceinline__ void tma_load(void* shared, const CUtensorMap& map, Barrier& full,
                                         int column, int row, int head, int batch) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes"
      " [%0], [%1, {%3, %4, %5, %6}], [%2];" ::"r"(shared_address(shared)),
      "l"(&map), "r"(full.address()), "r"(column), "r"(row), "r"(head), "r"(batch)
      : "memory");
}

// The way back; elements outside the tensor are not written.
__device__ __forceinline__ void tma_store(const CUtensorMap& map, const void* shared, int column,
                                          int row, int head, int batch) {
  asm volatile(
      "cp.async.bulk.tensor.4d.global.shared::cta.bulk_group [%0, {%2, %3, %4, %5}], [%1];" ::"l"(
          &map),
      "r"(shared_address(shared)), "r"(column), "r"(row), "r"(head), "r"(batch)
      : "memory");
}

__device__ __forceinline__ void tma_store(const CUtensorMap& map, const void* shared, int column,
                                          int row, int head, int batch, uint64_t policy) {
  asm volatile(
      "cp.async.bulk.tensor.4d.global.shared::cta.bulk_group.L2::cache_hint"
      " [%0, {%2, %3, %4, %5}], [%1], %6;" ::"l"(&map),
      "r"(shared_address(shared)), "r"(column), "r"(row), "r"(head), "r"(batch), "l"(policy)
      : "memory");
}

__device__ __forceinline__ void tma_store_commit() {
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

// The stores of this thread have finished reading shared memory, all but the last kPending groups.
template <int kPending = 0>
__device__ __forceinline__ void tma_store_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
}

// Orders ordinary writes to shared memory before reads by the copy engine and the tensor cores.
__device__ __forceinline__ void fence_async_proxy() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// Writes four 8 x 8 matrices of 16-bit elements (see store_row and store_column in layout.h).
__device__ __forceinline__ void store_matrices(uint32_t address, uint32_t m0, uint32_t m1,
                                               uint32_t m2, uint32_t m3) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address),
               "r"(m0), "r"(m1), "r"(m2), "r"(m3)
               : "memory");
}

}  // namespace backlite::sm90
