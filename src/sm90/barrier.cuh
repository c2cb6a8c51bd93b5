// mbarriers, named barriers, and the ring of stages that producer and consumer walk.
#pragma once

#include <cstdint>

namespace backlite::sm90 {

__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// The same value in every lane, said so that the compiler keeps it in a uniform register.
__device__ __forceinline__ int warp_uniform(int value) { return __shfl_sync(0xffffffff, value, 0); }

// True in one lane of a whole warp. As a branch's condition it tells the compiler that there is a
// single thread; for `lane == 0` it puts a loop over threads around every instruction that starts
// a copy.
__device__ __forceinline__ bool elect_one() {
  uint32_t elected;
  asm volatile(
      "{\n.reg .pred p;\n"
      "elect.sync _|p, 0xffffffff;\n"
      "selp.u32 %0, 1, 0, p;\n}"
      : "=r"(elected));
  return elected != 0;
}

// A barrier in shared memory that counts arrivals and bytes of asynchronous copies.
class Barrier {
 public:
  __device__ __forceinline__ void init(int num_arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(address()), "r"(num_arrivals));
  }

  __device__ __forceinline__ void arrive() {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(address()) : "memory");
  }

  __device__ __forceinline__ void arrive_and_expect(int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(address()),
                 "r"(bytes)
                 : "memory");
  }

  // Returns once the phase with this parity has completed. A barrier that has never completed a
  // phase lets a wait for parity 1 pass.
  __device__ __forceinline__ void wait(uint32_t parity) {
#if defined(BACKLITE_SM90_TRAP)
    // One piece of assembly: a trap that the compiler can see costs it the register budget.
    asm volatile(
        "{\n.reg .pred p;\n.reg .u32 tries;\nmov.u32 tries, 0;\n"
        "WAIT_%=:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n"
        "@p bra DONE_%=;\n"
        "add.u32 tries, tries, 1;\n"
        "setp.gt.u32 p, tries, 1000000;\n"
        "@p trap;\n"
        "bra WAIT_%=;\n"
        "DONE_%=:\n}" ::"r"(address()),
        "r"(parity)
        : "memory");
#else
    while (!try_wait(parity)) {
    }
#endif
  }

  // Whether a wait for this parity would return at once.
  __device__ __forceinline__ bool has_completed(uint32_t parity) const {
    uint32_t done;
    asm volatile(
        "{\n.reg .pred p;\n"
        "mbarrier.test_wait.parity.shared::cta.b64 p, [%1], %2;\n"
        "selp.u32 %0, 1, 0, p;\n}"
        : "=r"(done)
        : "r"(address()), "r"(parity)
        : "memory");
    return done != 0;
  }

  __device__ __forceinline__ uint32_t address() const { return shared_address(&state_); }

 private:
  __device__ __forceinline__ bool try_wait(uint32_t parity) {
    uint32_t done;
    asm volatile(
        "{\n.reg .pred p;\n"
        "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
        "selp.u32 %0, 1, 0, p;\n}"
        : "=r"(done)
        : "r"(address()), "r"(parity)
        : "memory");
    return done != 0;
  }

  uint64_t state_;
};

// Makes initialised barriers visible to the asynchronous proxy.
__device__ __forceinline__ void fence_barrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

// One position in a ring of kNumStages stages. The parity flips each time the ring wraps, so a wait
// can tell this round's completion of a stage from the last round's.
template <int kNumStages>
struct Ring {
  int stage = 0;
  uint32_t parity = 0;

  __device__ __forceinline__ void advance() {
    if (++stage == kNumStages) {
      stage = 0;
      parity ^= 1;
    }
  }
};

// Hardware barriers by number; 0 belongs to __syncthreads.
__device__ __forceinline__ void named_barrier_sync(int id, int num_threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(num_threads) : "memory");
}

__device__ __forceinline__ void named_barrier_arrive(int id, int num_threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(num_threads) : "memory");
}

// Moves registers between warpgroups: all of a warpgroup's warps must call it.
template <int kRegisters>
__device__ __forceinline__ void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

template <int kRegisters>
__device__ __forceinline__ void give_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

}  // namespace backlite::sm90
