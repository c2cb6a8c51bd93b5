// Which key tiles an item of the Hopper forward visits. Pure integer functions: the producer works
// them out for all of its block, and the CPU tests them exhaustively.
#pragma once

#include "common/mask.h"
#include "sm90/layout.h"

namespace backlite::forward_sm90 {

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

  // Key tiles of which some of rows 0 to num_rows - 1 sees a key.
  BACKLITE_HOST_DEVICE constexpr TileRange seen(int num_rows) const {
    const int begin_key = at_least_0(first);
    const int end_key = at_most_length(end + num_rows - 1);
    if (num_rows <= 0 || begin_key >= end_key) return {};
    return {.begin = begin_key / kTile, .end = (end_key + kTile - 1) / kTile};
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
};

// `block`: of `num_rows` rows (those that exist), of which the consumer's begin at the i-th.
BACKLITE_HOST_DEVICE constexpr ConsumerTiles tiles_of_consumer(const RowKeys& block, int num_rows,
                                                               int i) {
  const int rows_left = num_rows - i;
  const int rows = rows_left < sm90::kMmaRows ? rows_left : sm90::kMmaRows;
  const RowKeys keys = block.from(i);
  ConsumerTiles tiles{.seen = keys.seen(rows), .unmasked = keys.unmasked(rows)};
  if (tiles.seen.empty()) tiles.seen.begin = tiles.seen.end = block.seen(num_rows).end;
  return tiles;
}

}  // namespace backlite::forward_sm90
