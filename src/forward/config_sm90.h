// Tile shapes and budgets of the Hopper forward, by name.
#pragma once

#include "common/mask.h"  // BACKLITE_HOST_DEVICE
#include "sm90/layout.h"
#include "sm90/registers.h"

namespace backlite::forward_sm90 {

// Items of which Q is there or on its way.
inline constexpr int kQuerySlots = 2;

// Of the statistics' scratch, for a tile and a consumer: two rows a word (tile_stats_sm90.cuh).
inline constexpr int kMassWords = sm90::kMmaRows / 2;

struct ForwardConfig {
  int head_dim;
  int num_consumers;  // warpgroups that compute, each on 64 query rows
  int block_keys;     // keys of a tile
  int key_stages;
  int value_stages;
  int early_scores;        // exponentials of a thread (of block_keys / 2) before it waits for P V
  bool half_scores;        // S of half a first tile is a product of half as many keys
  bool masks_by_row;       // order of a masked tile's selects, without statistics
  int tiles_in_exchange;   // of which four lanes add up row masses at once (tile_stats_sm90.cuh)
  int consumer_registers;  // a thread, after the warpgroups have traded
  int producer_registers;

  BACKLITE_HOST_DEVICE constexpr int block_rows() const { return num_consumers * sm90::kMmaRows; }
  BACKLITE_HOST_DEVICE constexpr int num_threads() const {
    return (num_consumers + 1) * sm90::kWarpgroupThreads;
  }
  BACKLITE_HOST_DEVICE constexpr int column_blocks() const {
    return head_dim / sm90::kBlockColumns;
  }
};

// Two consumers: S 64, P 32 and O 64 registers a thread leave no room for a third. K is kept until
// its softmax is done (it may be needed again), hence its extra stage. The producer describes items
// and, in its other warps, reduces statistics: 24 registers are too few for that. With two tiles in
// an exchange they cost 1.2%, 1.5% of the forward (two runs, mean of six shapes without a window),
// with one 2.1%, 2.0%.
inline constexpr ForwardConfig kD128{.head_dim = 128,
                                     .num_consumers = 2,
                                     .block_keys = 128,
                                     .key_stages = 3,
                                     .value_stages = 2,
                                     .early_scores = 48,
                                     .half_scores = false,
                                     .masks_by_row = false,
                                     .tiles_in_exchange = 2,
                                     .consumer_registers = 232,
                                     .producer_registers = 40};

// O takes half, so three consumers fit: a K or V tile that has been loaded serves 192 rows. Stages
// fill the shared memory: with 4 and 3 windows and short causal lengths took 1% longer. Masks by
// row make causal shapes 2% faster here, but 1% slower at D = 128 and windows 3% with statistics.
// With two tiles in an exchange the forward with statistics took 1% to 2.5% longer.
inline constexpr ForwardConfig kD64{.head_dim = 64,
                                    .num_consumers = 3,
                                    .block_keys = 128,
                                    .key_stages = 6,
                                    .value_stages = 5,
                                    .early_scores = 0,
                                    .half_scores = true,
                                    .masks_by_row = true,
                                    .tiles_in_exchange = 1,
                                    .consumer_registers = 160,
                                    .producer_registers = 32};

// The same for few items: blocks of 128 rows, where blocks of 192 would leave multiprocessors idle
// in the last round (shorter_blocks_pay in launch_sm90.cpp).
inline constexpr ForwardConfig kD64Pair{.head_dim = 64,
                                        .num_consumers = 2,
                                        .block_keys = 128,
                                        .key_stages = 6,
                                        .value_stages = 5,
                                        .early_scores = 48,
                                        .half_scores = false,
                                        .masks_by_row = false,
                                        .tiles_in_exchange = 1,
                                        .consumer_registers = 232,
                                        .producer_registers = 40};

// A kernel takes its configuration as a type with a member kConfig: nvcc 13.0 writes host code that
// does not compile for a kernel with a template argument of class type.
struct D128 {
  static constexpr ForwardConfig kConfig = kD128;
};
struct D64 {
  static constexpr ForwardConfig kConfig = kD64;
};
struct D64Pair {
  static constexpr ForwardConfig kConfig = kD64Pair;
};

constexpr bool fits_register_file(const ForwardConfig& config) {
  return sm90::fits_register_file(config.num_consumers, config.consumer_registers,
                                  config.producer_registers);
}
static_assert(fits_register_file(kD128));
static_assert(fits_register_file(kD64));
static_assert(fits_register_file(kD64Pair));

}  // namespace backlite::forward_sm90
