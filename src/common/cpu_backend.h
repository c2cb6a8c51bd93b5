// The stages whose speed depends on the instruction set. They are compiled once per set, each into
// a shared library of its own with local symbols: Eigen's inline functions are weak symbols, and in
// one library the linker would let baseline code call an AVX-512 copy.
#pragma once

#include <cstddef>

#include "backlite/backlite.h"

namespace backlite {

struct CpuBackend {
  const char* isa;
  size_t (*forward_workspace_bytes)(const Problem&, bool record_tile_stats, int num_threads);
  void (*forward)(const Problem&, const ForwardArgs&, const Execution&);
  size_t (*backward_workspace_bytes)(const Problem&, int num_threads);
  void (*backward)(const Problem&, const BackwardArgs&, const Execution&);
};

}  // namespace backlite

extern "C" {
extern const backlite::CpuBackend backlite_cpu_baseline;
extern const backlite::CpuBackend backlite_cpu_avx2;
extern const backlite::CpuBackend backlite_cpu_avx512;
}
