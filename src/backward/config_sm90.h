// Tile shapes and budgets of the Hopper backward, by name.
#pragma once

#include "common/mask.h"
#include "sm90/layout.h"
#include "sm90/registers.h"

namespace backlite::backward_sm90 {

// Two consumer warpgroups of 64 keys each, and a producer's warpgroup.
inline constexpr int kConsumers = 2;
inline constexpr int kThreads = (kConsumers + 1) * sm90::kWarpgroupThreads;
inline constexpr int kQueries = kQueryTile;
inline constexpr int kKeys = kKeyTile;
static_assert(kKeys == kConsumers * sm90::kMmaRows, "One wgmma's rows of keys for each consumer");

// Columns of dQ that a consumer has of a tile.
inline constexpr int kGradQueryColumns = 64;

// The last pass: a block of it takes so many tiles one after the other (or one, where there are too
// few: tiles_in_run), so many on their way to shared memory.
inline constexpr int kTilesInRun = 8;
inline constexpr int kFinishStages = 3;

struct BackwardConfig {
  int head_dim;
  int key_stages;          // of K: with one, the next item's arrives while this one's dK leaves
  int query_stages;        // of Q, dO and the row terms
  int grad_query_places;   // of tiles whose dQ is on its way out
  int tiles_at_once;       // query tiles in a step
  int consumer_registers;  // a thread, after the warpgroups have traded
  int producer_registers;

  BACKLITE_HOST_DEVICE constexpr int column_blocks() const {
    return head_dim / sm90::kBlockColumns;
  }
  // The consumers share dQ by columns, or each has the dQ of one tile of the step.
  BACKLITE_HOST_DEVICE constexpr bool shares_tiles() const { return tiles_at_once == kConsumers; }
};

// A thread's accumulators: dK 64, dV 64, S^T 32, dP^T 32, dQ 32. Instead of a second stage of K
// there is a second place for dQ, which at the end of every tile was waited for: 2 to 3% of sparse
// problems at 8k and of a real mask.
inline constexpr BackwardConfig kD128{.head_dim = 128,
                                      .key_stages = 1,
                                      .query_stages = 2,
                                      .grad_query_places = 2,
                                      .tiles_at_once = 1,
                                      .consumer_registers = 232,
                                      .producer_registers = 40};

// dK 32, dV 32, S^T 64, dP^T 64; dQ 32 when P^T and dS^T are packed. Two tiles at a time: products
// 64 wide take as long to read as to multiply, 128 wide three quarters of that, and each consumer's
// dQ of a tile of its own is 64 wide instead of 32 (docs/hopper-backward.md: 9% of the time).
inline constexpr BackwardConfig kD64{.head_dim = 64,
                                     .key_stages = 2,
                                     .query_stages = 4,
                                     .grad_query_places = 2,
                                     .tiles_at_once = 2,
                                     .consumer_registers = 232,
                                     .producer_registers = 40};

// A kernel takes its configuration as a type with a member kConfig: nvcc 13.0 writes host code that
// does not compile for a kernel with a template argument of class type.
struct D128 {
  static constexpr BackwardConfig kConfig = kD128;
};
struct D64 {
  static constexpr BackwardConfig kConfig = kD64;
};

constexpr bool is_valid(const BackwardConfig& config) {
  return sm90::fits_register_file(kConsumers, config.consumer_registers,
                                  config.producer_registers) &&
         config.query_stages % config.tiles_at_once == 0 &&
         // Places follow the stages; with two tiles a step they are numbered as the consumers.
         config.query_stages % config.grad_query_places == 0 &&
         (config.tiles_at_once == 1 || config.grad_query_places == config.tiles_at_once);
}
static_assert(is_valid(kD128) && is_valid(kD64));

}  // namespace backlite::backward_sm90
