// Which keys a query sees, and which tiles therefore exist. Pure integer functions, shared by all
// stages and all backends.
#pragma once

#include <algorithm>
#include <cstdint>

#include "backlite/backlite.h"

#if defined(__CUDACC__)
#define BACKLITE_HOST_DEVICE __host__ __device__
#else
#define BACKLITE_HOST_DEVICE
#endif

namespace backlite {

BACKLITE_HOST_DEVICE constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

BACKLITE_HOST_DEVICE constexpr int64_t num_query_tiles(int64_t query_length) {
  return ceil_div(query_length, kQueryTile);
}

BACKLITE_HOST_DEVICE constexpr int64_t num_key_tiles(int64_t key_length) {
  return ceil_div(key_length, kKeyTile);
}

// Words of tile bits in one column: W in the public header.
BACKLITE_HOST_DEVICE constexpr int64_t num_bit_words(int64_t query_length) {
  return ceil_div(num_query_tiles(query_length), kTilesPerWord);
}

struct Range {  // [begin, end), empty if begin >= end
  int64_t begin = 0;
  int64_t end = 0;

  BACKLITE_HOST_DEVICE constexpr bool empty() const { return begin >= end; }
  BACKLITE_HOST_DEVICE constexpr int64_t size() const { return empty() ? 0 : end - begin; }
};

// Query i sees key j iff  i + offset - left <= j <= i + offset + right  and  0 <= j < key_length.
// Causal is right = 0, and no window's right is less; "unlimited" is any number past both lengths.
// The keys of consecutive rows overlap or touch, so the keys of a query tile, its key tiles, and
// the query tiles of a key tile are all contiguous ranges.
struct Mask {
  int64_t query_length = 0;
  int64_t key_length = 0;
  int64_t offset = 0;  // key_length - query_length ("shift" in the docs): aligns the last of each
  int64_t left = 0;
  int64_t right = 0;

  static constexpr Mask of(const Problem& problem) {
    const int64_t unlimited = problem.query_length + problem.key_length;
    const auto limit = [&](int64_t side) {
      return side < 0 ? unlimited : std::min(side, unlimited);
    };
    return {.query_length = problem.query_length,
            .key_length = problem.key_length,
            .offset = problem.key_length - problem.query_length,
            .left = limit(problem.window_left),
            .right = problem.causal ? 0 : limit(problem.window_right)};
  }

  BACKLITE_HOST_DEVICE constexpr Range keys_of_rows(int64_t row_begin, int64_t row_end) const {
    if (row_begin >= row_end) return {};
    return clamp(row_begin + offset - left, row_end - 1 + offset + right + 1, key_length);
  }

  BACKLITE_HOST_DEVICE constexpr Range keys_of_row(int64_t row) const {
    return keys_of_rows(row, row + 1);
  }

  BACKLITE_HOST_DEVICE constexpr Range rows_of_keys(int64_t key_begin, int64_t key_end) const {
    if (key_begin >= key_end) return {};
    return clamp(key_begin - offset - right, key_end - 1 - offset + left + 1, query_length);
  }

  BACKLITE_HOST_DEVICE constexpr Range rows_of_key(int64_t key) const {
    return rows_of_keys(key, key + 1);
  }

  BACKLITE_HOST_DEVICE constexpr Range rows_of_tile(int64_t query_tile) const {
    return clamp(query_tile * kQueryTile, (query_tile + 1) * kQueryTile, query_length);
  }

  BACKLITE_HOST_DEVICE constexpr Range keys_of_tile(int64_t key_tile) const {
    return clamp(key_tile * kKeyTile, (key_tile + 1) * kKeyTile, key_length);
  }

  BACKLITE_HOST_DEVICE constexpr Range key_tiles_of_rows(Range rows) const {
    return tiles(keys_of_rows(rows.begin, rows.end), kKeyTile);
  }

  // The key tiles in which query tile m sees at least one key: the tiles that the mask allows.
  BACKLITE_HOST_DEVICE constexpr Range key_tiles(int64_t query_tile) const {
    return key_tiles_of_rows(rows_of_tile(query_tile));
  }

  // The same set, read by column: the query tiles that see at least one key of key tile n.
  BACKLITE_HOST_DEVICE constexpr Range query_tiles(int64_t key_tile) const {
    const Range keys = keys_of_tile(key_tile);
    return tiles(rows_of_keys(keys.begin, keys.end), kQueryTile);
  }

  // Does every row of the query tile see every key of the key tile?
  BACKLITE_HOST_DEVICE constexpr bool is_full(int64_t query_tile, int64_t key_tile) const {
    const Range rows = rows_of_tile(query_tile);
    const Range keys = keys_of_tile(key_tile);
    return rows.end - 1 + offset - left <= keys.begin &&
           keys.end - 1 <= rows.begin + offset + right;
  }

 private:
  BACKLITE_HOST_DEVICE static constexpr Range clamp(int64_t begin, int64_t end, int64_t length) {
    return {begin < 0 ? 0 : begin, end > length ? length : end};
  }

  BACKLITE_HOST_DEVICE static constexpr Range tiles(Range elements, int64_t tile) {
    if (elements.empty()) return {};
    return {elements.begin / tile, ceil_div(elements.end, tile)};
  }
};

}  // namespace backlite
