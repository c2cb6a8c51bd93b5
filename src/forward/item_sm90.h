// The items of the Hopper forward: in which order blocks take them, and which key tiles one visits.
// Pure integer functions: the producer works them out for all of its block, and the CPU tests them
// exhaustively.
#pragma once

#include <algorithm>
#include <cstdint>

#include "common/mask.h"
#include "sm90/layout.h"

namespace backlite::forward_sm90 {

struct WorkItem {
  int block;  // of query rows; negative: no more work
  int head;   // query head
  int batch;
};

// Items are handed out in this order: group of heads, block of rows, head of the group. What is in
// use of the K and V of a group fits in L2. Under a causal mask the last rows see the most keys, so
// they come first, and short items fill the gaps at the end: of a window those of its first rows,
// which therefore come after the others of all groups.
struct WorkOrder {
  int num_items = 0;
  int num_blocks = 0;       // of query rows
  int short_blocks = 0;     // the first of these, whose items come last
  int num_heads = 0;        // query heads of one batch
  int num_batch_heads = 0;  // B * H
  int group_heads = 0;      // query heads in a group
  bool last_rows_first = false;

  BACKLITE_HOST_DEVICE constexpr WorkItem item(int index) const {
    const int long_items = num_batch_heads * (num_blocks - short_blocks);
    const bool is_short = index >= long_items;
    if (is_short) index -= long_items;
    const int block_begin = is_short ? 0 : short_blocks;
    const int block_end = is_short ? short_blocks : num_blocks;
    const int items_in_group = group_heads * (block_end - block_begin);
    const int group = index / items_in_group;
    const int index_in_group = index - group * items_in_group;
    const int heads_left = num_batch_heads - group * group_heads;
    const int heads = heads_left < group_heads ? heads_left : group_heads;
    const int block = index_in_group / heads;
    const int batch_head = group * group_heads + index_in_group - block * heads;
    const int batch = batch_head / num_heads;
    return {.block = last_rows_first ? block_end - 1 - block : block_begin + block,
            .head = batch_head - batch * num_heads,
            .batch = batch};
  }
};

// How many of the first blocks have rows that see fewer keys than a window holds, where blocks are
// taken from the last: all of them under a causal mask alone.
constexpr int num_short_blocks(const Mask& mask, int block_rows) {
  if (mask.right >= mask.query_length) return 0;
  const int64_t short_rows = std::clamp<int64_t>(mask.left - mask.offset, 0, mask.query_length);
  return static_cast<int>(ceil_div(short_rows, block_rows));
}

// Keys of a head that the blocks of rows at work at one time read: those of the window, and as many
// for blocks that are ahead or behind. In a window of 1024 groups of 16, 32 and 64 heads are within
// 1% of each other; groups of as many as keep all keys in L2, of 3 to 15, are 1 to 3% slower.
constexpr int64_t keys_in_use(const Mask& mask, int block_rows) {
  return std::min(mask.key_length, 2 * (mask.left + mask.right) + block_rows);
}

struct TileRange {  // key tiles [begin, end)
  int begin = 0;
  int end = 0;

  BACKLITE_HOST_DEVICE constexpr bool empty() const { return begin >= end; }
};

// The keys that neighbouring rows see: row i those of [first + i, end + i), as far as they exist.
// The bounds are cut to where they change nothing for the rows of a block, so that 32 bits do.
struct RowKeys {
  static constexpr int kMaxRows = 256;

  int first = 0;
  int end = 0;
  int length = 0;

  BACKLITE_HOST_DEVICE static constexpr RowKeys of(const Mask& mask, int64_t row_begin) {
    const auto cut = [&](int64_t key) {
      return static_cast<int>(key < -kMaxRows         ? -kMaxRows
                              : key > mask.key_length ? mask.key_length
                                                      : key);
    };
    return {.first = cut(row_begin + mask.offset - mask.left),
            .end = cut(row_begin + mask.offset + mask.right + 1),
            .length = static_cast<int>(mask.key_length)};
  }

  // The same of the rows from the i-th on.
  BACKLITE_HOST_DEVICE constexpr RowKeys from(int i) const {
    return {.first = first + i, .end = end + i, .length = length};
  }

  // Behind the last key that some of rows 0 to num_rows - 1 sees.
  BACKLITE_HOST_DEVICE constexpr int end_of(int num_rows) const {
    return at_most_length(end + num_rows - 1);
  }

  // Key tiles of which some of rows 0 to num_rows - 1 sees a key.
  BACKLITE_HOST_DEVICE constexpr TileRange seen(int num_rows) const {
    const int begin_key = at_least_0(first);
    const int end_key = end_of(num_rows);
    if (num_rows <= 0 || begin_key >= end_key) return {};
    return {.begin = begin_key / kTile, .end = (end_key + kTile - 1) / kTile};
  }

  // Of the last of them, only keys of the first half.
  BACKLITE_HOST_DEVICE constexpr bool ends_in_first_half(int num_rows) const {
    const int end_in_tile = end_of(num_rows) % kTile;
    return end_in_tile > 0 && end_in_tile <= kTile / 2;
  }

  // Key tiles of which each of these rows sees every key, and which have all their keys.
  BACKLITE_HOST_DEVICE constexpr TileRange unmasked(int num_rows) const {
    return {.begin = (at_least_0(first + num_rows - 1) + kTile - 1) / kTile,
            .end = at_least_0(at_most_length(end)) / kTile};
  }

 private:
  static constexpr int kTile = static_cast<int>(kKeyTile);

  BACKLITE_HOST_DEVICE static constexpr int at_least_0(int key) { return key < 0 ? 0 : key; }
  BACKLITE_HOST_DEVICE constexpr int at_most_length(int key) const {
    return key > length ? length : key;
  }
};

// What of the block's tiles concerns the 64 rows of one consumer.
struct alignas(16) ConsumerTiles {
  TileRange seen;      // it computes these; empty ranges begin and end at the block's end
  TileRange unmasked;  // and must not mask those of them that are here
  bool is_last_half;   // no second half of the last one: every other query tile on a diagonal
};

// `block`: of `num_rows` rows (those that exist), of which the consumer's begin at the i-th.
BACKLITE_HOST_DEVICE constexpr ConsumerTiles tiles_of_consumer(const RowKeys& block, int num_rows,
                                                               int i) {
  const int rows_left = num_rows - i;
  const int rows = rows_left < sm90::kMmaRows ? rows_left : sm90::kMmaRows;
  const RowKeys keys = block.from(i);
  ConsumerTiles tiles{.seen = keys.seen(rows),
                      .unmasked = keys.unmasked(rows),
                      .is_last_half = keys.ends_in_first_half(rows)};
  if (tiles.seen.empty()) tiles.seen.begin = tiles.seen.end = block.seen(num_rows).end;
  return tiles;
}

}  // namespace backlite::forward_sm90
