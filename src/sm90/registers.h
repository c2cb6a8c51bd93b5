// The register file, which a block's warpgroups trade in.
#pragma once

#include "sm90/layout.h"

namespace backlite::sm90 {

// A block of consumers' warpgroups and one producer's starts with as many registers a thread, in
// units of 8, as the register file has for all of its threads. setmaxnreg moves them between
// warpgroups, and never returns if it asks for more.
constexpr bool fits_register_file(int num_consumers, int consumer_registers,
                                  int producer_registers) {
  constexpr int kRegisterFile = 65536, kUnit = 8;
  const int num_threads = (num_consumers + 1) * kWarpgroupThreads;
  const int at_start = kRegisterFile / num_threads / kUnit * kUnit * num_threads;
  const int total = kWarpgroupThreads * (num_consumers * consumer_registers + producer_registers);
  return total <= at_start && consumer_registers % kUnit == 0 && producer_registers % kUnit == 0;
}

}  // namespace backlite::sm90
