// The items of the Hopper forward: their key tiles, against the mask read row by row, and their
// order.
#include "forward/item_sm90.h"

#include <boost/test/unit_test.hpp>
#include <set>
#include <tuple>

#include "backlite/backlite.h"

using namespace backlite;
using namespace backlite::forward_sm90;

namespace {

bool contains(const TileRange& range, int n) { return n >= range.begin && n < range.end; }

void check_block(const Mask& mask, int first_row, int block_rows) {
  const int rows_left = static_cast<int>(mask.query_length) - first_row;
  const int num_rows = std::min(rows_left, block_rows);
  const RowKeys block = RowKeys::of(mask, first_row);
  const TileRange block_tiles = block.seen(num_rows);
  const auto num_tiles = static_cast<int>(num_key_tiles(mask.key_length));

  for (int i = 0; i < block_rows; i += sm90::kMmaRows) {
    const ConsumerTiles tiles = tiles_of_consumer(block, num_rows, i);
    BOOST_REQUIRE(tiles.seen.begin >= block_tiles.begin && tiles.seen.end <= block_tiles.end);
    // Consumers step through the block's tiles together: each may lack one at either end.
    if (tiles.seen.empty()) {
      BOOST_REQUIRE(tiles.seen.begin == block_tiles.end);
    } else {
      BOOST_REQUIRE(tiles.seen.begin - block_tiles.begin <= 1);
      BOOST_REQUIRE(block_tiles.end - tiles.seen.end <= 1);
    }
    for (int n = 0; n < num_tiles; ++n) {
      const Range tile = mask.keys_of_tile(n);
      bool some = false, all = tile.size() == kKeyTile;
      for (int row = first_row + i; row < first_row + std::min(i + 64, num_rows); ++row) {
        const Range keys = mask.keys_of_row(row);
        some |= keys.begin < tile.end && keys.end > tile.begin && !keys.empty();
        all &= keys.begin <= tile.begin && keys.end >= tile.end;
        const RowKeys own = block.from(row - first_row);
        for (int64_t key = tile.begin; key < tile.end; ++key) {
          const bool sees = key >= own.first && key < own.end;
          BOOST_REQUIRE(sees == (key >= keys.begin && key < keys.end));
        }
      }
      BOOST_REQUIRE(contains(tiles.seen, n) == some);
      if (some) BOOST_REQUIRE(contains(tiles.unmasked, n) == all);
    }
    if (!tiles.seen.empty()) {
      const int64_t first = first_row + i;
      const Range keys = mask.keys_of_rows(first, std::min<int64_t>(first + 64, mask.query_length));
      const int64_t middle = (tiles.seen.end - 1) * kKeyTile + kKeyTile / 2;
      BOOST_REQUIRE(tiles.is_last_half == (keys.end <= middle));
    }
  }
}

// Every item once; in the two parts of the order, the second of short items, groups of heads follow
// each other, and in a group no item sees more keys than the one before.
void check_order(const Mask& mask, int block_rows, int num_heads, int batch, int group_heads) {
  const int num_blocks = static_cast<int>(ceil_div(mask.query_length, block_rows));
  const WorkOrder order{.num_items = num_blocks * num_heads * batch,
                        .num_blocks = num_blocks,
                        .short_blocks = num_short_blocks(mask, block_rows),
                        .num_heads = num_heads,
                        .num_batch_heads = num_heads * batch,
                        .group_heads = group_heads,
                        .last_rows_first = mask.right < mask.query_length};
  const auto num_keys = [&](const WorkItem& item) {
    const int64_t row = int64_t{item.block} * block_rows;
    return mask.keys_of_rows(row, row + block_rows).size();
  };
  std::set<std::tuple<int, int, int>> seen;
  WorkItem last{};
  int last_group = 0;
  for (int index = 0; index < order.num_items; ++index) {
    const WorkItem item = order.item(index);
    BOOST_REQUIRE(item.block >= 0 && item.block < num_blocks);
    BOOST_REQUIRE(item.head >= 0 && item.head < num_heads);
    BOOST_REQUIRE(item.batch >= 0 && item.batch < batch);
    BOOST_REQUIRE(seen.emplace(item.block, item.head, item.batch).second);
    const bool is_short = index >= order.num_batch_heads * (num_blocks - order.short_blocks);
    BOOST_REQUIRE(is_short == (item.block < order.short_blocks));
    const int group = (item.batch * num_heads + item.head) / group_heads;
    const bool starts_part = index == 0 || is_short != (last.block < order.short_blocks);
    if (!starts_part) {
      BOOST_REQUIRE(group >= last_group);
      if (group == last_group && order.last_rows_first) {
        BOOST_REQUIRE(item.block <= last.block);
        if (is_short) BOOST_REQUIRE(num_keys(item) <= num_keys(last));
      }
    }
    last = item;
    last_group = group;
  }
}

}  // namespace

BOOST_AUTO_TEST_SUITE(forward_item)

BOOST_AUTO_TEST_CASE(tiles_are_those_of_the_mask) {
  for (const int64_t query_length : {1, 63, 200, 333}) {
    for (const int64_t key_length : {0, 1, 127, 128, 200, 640}) {
      for (const int64_t left : {-1, 0, 17, 64, 128, 300}) {
        for (const int64_t right : {-1, 0, 40, 256}) {
          const Mask mask = Mask::of({.query_length = query_length,
                                      .key_length = key_length,
                                      .window_left = left,
                                      .window_right = right});
          for (const int block_rows : {128, 192}) {
            for (int row = 0; row < query_length; row += block_rows) {
              BOOST_TEST_CONTEXT("lengths " << query_length << " x " << key_length << ", window "
                                            << left << "," << right << ", rows from " << row) {
                check_block(mask, row, block_rows);
              }
            }
          }
        }
      }
    }
  }
}

// Beyond 32 bits in between: lengths of 2^30, no limit on either side.
BOOST_AUTO_TEST_CASE(long_tensors_do_not_overflow) {
  constexpr int64_t kLong = int64_t{1} << 30;
  const Mask mask = Mask::of({.query_length = kLong, .key_length = kLong});
  const TileRange tiles = RowKeys::of(mask, kLong - 128).seen(128);
  BOOST_TEST(tiles.begin == 0);
  BOOST_TEST(tiles.end == static_cast<int>(kLong / kKeyTile));
  const Mask causal = Mask::of({.query_length = kLong, .key_length = kLong, .causal = true});
  BOOST_TEST(RowKeys::of(causal, 0).seen(128).end == 1);
  BOOST_TEST(RowKeys::of(causal, kLong - 128).unmasked(64).end ==
             static_cast<int>(kLong / kKeyTile) - 1);
}

BOOST_AUTO_TEST_CASE(order_has_every_item_once_and_short_ones_last) {
  for (const int64_t query_length : {1, 128, 1000}) {
    for (const int64_t key_length : {0, 700, 1000, 1500}) {
      for (const int64_t left : {-1, 0, 300, 1200}) {
        for (const int64_t right : {-1, 0, 40}) {
          const Mask mask = Mask::of({.query_length = query_length,
                                      .key_length = key_length,
                                      .window_left = left,
                                      .window_right = right});
          for (const int block_rows : {128, 192}) {
            for (const int group_heads : {1, 4, 6}) {
              BOOST_TEST_CONTEXT("lengths " << query_length << " x " << key_length << ", window "
                                            << left << "," << right << ", groups of "
                                            << group_heads) {
                check_order(mask, block_rows, 3, 2, group_heads);
              }
            }
          }
        }
      }
    }
  }
}

BOOST_AUTO_TEST_CASE(short_blocks_are_those_before_the_window_is_full) {
  const auto count = [](int64_t query_length, int64_t key_length, int64_t left, bool causal) {
    return num_short_blocks(Mask::of({.query_length = query_length,
                                      .key_length = key_length,
                                      .causal = causal,
                                      .window_left = left}),
                            128);
  };
  BOOST_TEST(count(8192, 8192, 1024, true) == 8);
  BOOST_TEST(count(8192, 8192, 1025, true) == 9);
  BOOST_TEST(count(8192, 8192, 0, true) == 0);
  BOOST_TEST(count(8192, 8192, -1, true) == 64);    // causal: all
  BOOST_TEST(count(8192, 8192, 1024, false) == 0);  // the last rows see the fewest
  BOOST_TEST(count(1000, 3000, 1024, true) == 0);   // every window begins at a key
  BOOST_TEST(count(1000, 900, 300, true) == 4);
}

BOOST_AUTO_TEST_SUITE_END()
