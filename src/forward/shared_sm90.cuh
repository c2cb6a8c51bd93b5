// What the warps of a block of the Hopper forward share: memory, barriers, names.
#pragma once

#include "forward/config_sm90.h"
#include "forward/item_sm90.h"
#include "forward/params_sm90.h"
#include "sm90/barrier.cuh"
#include "sm90/layout.h"

namespace backlite::forward_sm90 {

// Numbers of the hardware's named barriers; 0 belongs to __syncthreads.
inline constexpr int kMaxConsumers = 3;
enum NamedBarrier : int {
  kTurn = 1,                           // + consumer: it may issue its products
  kWarpgroup = kTurn + kMaxConsumers,  // + consumer: its 128 threads meet
  kNumNamedBarriers = kWarpgroup + kMaxConsumers
};
static_assert(kNumNamedBarriers <= 16, "The hardware has 16");

template <typename Config, typename Element>
struct alignas(sm90::kTileAlignment) SharedMemory {
  static constexpr ForwardConfig kConfig = Config::kConfig;
  // The rows of one consumer. The finished O leaves through the place of its own Q.
  Element query[kQuerySlots][kConfig.num_consumers][sm90::kMmaRows * kConfig.head_dim];
  Element key[kConfig.key_stages][kConfig.block_keys * kConfig.head_dim];
  Element value[kConfig.value_stages][kConfig.block_keys * kConfig.head_dim];
  float inverse_sums[kQuerySlots][kConfig.num_consumers][sm90::kMmaRows];  // 1 / l, 0 without keys
  // What travels with Q.
  WorkItem item[kQuerySlots];
  TileRange tiles[kQuerySlots];  // of the block
  RowKeys keys[kQuerySlots];     // of its rows
  ConsumerTiles consumer_tiles[kQuerySlots][kConfig.num_consumers];
  sm90::Barrier query_full[kQuerySlots], query_empty[kQuerySlots];
  sm90::Barrier key_full[kConfig.key_stages], key_empty[kConfig.key_stages];
  sm90::Barrier value_full[kConfig.value_stages], value_empty[kConfig.value_stages];
  sm90::Barrier sums_full[kQuerySlots][kConfig.num_consumers];
};

}  // namespace backlite::forward_sm90
