// The one place that talks to OpenMP.
#pragma once

#include <omp.h>
#include <pthread.h>

#include <algorithm>
#include <cstdint>

namespace backlite {

// Watched from when the library is loaded, and not from its first use: a child may be the first to
// use this library after its parent has used another one with the same OpenMP runtime.
inline bool is_forked_child = false;
inline const int kWatchesForks = pthread_atfork(nullptr, nullptr, [] { is_forked_child = true; });

// GNU OpenMP's worker threads do not survive fork(), and waiting for them would hang for ever, so a
// forked child computes on its own thread.
inline int usable_threads(int requested) { return is_forked_child ? 1 : std::max(requested, 1); }

// Subnormal numbers cost a microcode assist (about 150 cycles) each on x86. Softmax makes many:
// exp of anything below -87 in float. While this object lives they are zero on this thread.
class FlushSubnormals {
 public:
#if defined(__SSE2__)
  FlushSubnormals() : saved_(__builtin_ia32_stmxcsr()) { __builtin_ia32_ldmxcsr(saved_ | kFlush); }
  ~FlushSubnormals() { __builtin_ia32_ldmxcsr(saved_); }

 private:
  static constexpr unsigned kFlush = 0x8040;  // flush to zero | subnormals are zero
  unsigned saved_;
#else
  FlushSubnormals() {}
  ~FlushSubnormals() {}
#endif
  FlushSubnormals(const FlushSubnormals&) = delete;
  FlushSubnormals& operator=(const FlushSubnormals&) = delete;
};

// Calls body(index, thread) for every index in [0, count), where 0 <= thread < num_threads. A
// thread that is free takes the next index, so that calls start in the order of their indices. The
// body must not throw.
template <typename Body>
void parallel_for(int64_t count, int num_threads, const Body& body) {
  if (count <= 1 || num_threads <= 1) {  // OpenMP would take 0.3 us for it
    const FlushSubnormals flush;
    for (int64_t index = 0; index < count; ++index) body(index, 0);
    return;
  }
#pragma omp parallel num_threads(usable_threads(num_threads))
  {
    const FlushSubnormals flush;
    const int thread = omp_get_thread_num();
#pragma omp for schedule(dynamic, 1)
    for (int64_t index = 0; index < count; ++index) body(index, thread);
  }
}

}  // namespace backlite
