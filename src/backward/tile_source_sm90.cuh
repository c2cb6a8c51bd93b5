// Where the next query tile of a work item comes from. Dense and sparse differ in this alone. All
// lanes of the producer's warp call it together and get the same answer.
#pragma once

#include <cstdint>

#include "backward/params_sm90.h"
#include "common/mask.h"

namespace backlite::backward_sm90 {

struct QueryTile {
  int head;   // within the group of query heads of the key head
  int index;  // query tile
};

// Every tile that the mask allows.
class DenseTiles {
 public:
  static constexpr bool kIsSparse = false;

  __device__ __forceinline__ DenseTiles(const BackwardParams& params,
                                        const schedule_sm90::WorkItem& item, int) {
    const Range allowed = params.mask.query_tiles(item.key_tile);
    begin_ = static_cast<int>(allowed.begin);
    end_ = static_cast<int>(allowed.end);
    size_ = end_ - begin_;
    const int ordinal = item.first_live % size_;
    left_ = size_ - ordinal;
    next_ = {.head = item.first_live / size_, .index = begin_ + ordinal};
  }

  __device__ __forceinline__ QueryTile next() {
    const QueryTile tile = next_;
    if (++next_.index == end_) next_.index = begin_;
    if (--left_ == 0) {
      left_ = size_;
      ++next_.head;
    }
    return tile;
  }

 private:
  int begin_;
  int end_;
  int size_;
  int left_;  // of this head
  QueryTile next_;
};

// The set bits of the column within what the mask allows: each lane holds one word of 32 tiles, so
// a load covers 65536 query rows.
class LiveTiles {
 public:
  static constexpr bool kIsSparse = true;

  __device__ __forceinline__ LiveTiles(const BackwardParams& params,
                                       const schedule_sm90::WorkItem& item, int lane)
      : params_(params), key_tile_(item.key_tile), lane_(lane) {
    const int head =
        item.batch * params.num_query_heads + item.key_head * params.heads_per_key_head;
    words_ = params.tile_bits +
             (static_cast<int64_t>(head) * params.num_key_tiles + item.key_tile) * num_words();
    load();
    for (int skip = item.first_live;;) {
      const int live = __popc(word_);
      if (skip < live) {
        for (; skip > 0; --skip) word_ &= word_ - 1;
        break;
      }
      skip -= live;
      advance();
    }
  }

  __device__ __forceinline__ QueryTile next() {
    while (word_ == 0) advance();
    const QueryTile tile{.head = head_, .index = word_index_ * kWordTiles + __ffs(word_) - 1};
    word_ &= word_ - 1;
    return tile;
  }

 private:
  static constexpr int kWordTiles = kTilesPerWord;
  static constexpr int kLanes = 32;

  __device__ __forceinline__ int num_words() const {
    return (params_.num_query_tiles + kWordTiles - 1) / kWordTiles;
  }

  // The words from base_ on, one a lane.
  __device__ __forceinline__ void load() {
    const int index = base_ + lane_;
    my_word_ = index < num_words() ? schedule_sm90::live_word(words_[index], index,
                                                              params_.mask.query_tiles(key_tile_))
                                   : 0;
    lanes_left_ = __ballot_sync(~0u, my_word_ != 0);
    word_ = 0;
    if (lanes_left_ != 0) take();
  }

  __device__ __forceinline__ void take() {
    const int lane = __ffs(lanes_left_) - 1;
    lanes_left_ &= lanes_left_ - 1;
    word_ = __shfl_sync(~0u, my_word_, lane);
    word_index_ = base_ + lane;
  }

  // To the next word with a tile. Past the last one, which the schedule's count rules out, tile 0
  // comes again and again: bits other than the schedule's cost a wrong answer, not a hanging GPU.
  __device__ __forceinline__ void advance() {
    if (lanes_left_ != 0) {
      take();
      return;
    }
    base_ += kLanes;
    if (base_ >= num_words()) {
      base_ = 0;
      ++head_;
      words_ += static_cast<int64_t>(params_.num_key_tiles) * num_words();
    }
    if (head_ < params_.heads_per_key_head) {
      load();
    } else {
      head_ = 0;
      word_ = 1;
      word_index_ = 0;
    }
  }

  const BackwardParams& params_;
  int key_tile_;
  int lane_;
  const uint32_t* words_;
  int base_ = 0;
  int head_ = 0;
  uint32_t my_word_;
  uint32_t lanes_left_;
  uint32_t word_;
  int word_index_ = 0;
};

}  // namespace backlite::backward_sm90
