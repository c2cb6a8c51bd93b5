// Which key tiles an item of the Hopper forward visits.
#pragma once

#include <cstdint>

#include "common/mask.h"
#include "forward/config_sm90.h"
#include "sm90/layout.h"

namespace backlite::forward_sm90 {

struct TileRange {  // key tiles [begin, end)
  int begin;
  int end;
};

// The keys that the 64 rows of a consumer see: row i those of [first + i, end + i), of which
// `length` exist. The bounds are cut to where they change nothing, so that 32 bits do.
struct RowKeys {
  int first;
  int end;
  int length;

  __device__ __forceinline__ RowKeys(const Mask& mask, int row_begin)
      : first(cut(row_begin + mask.offset - mask.left, mask.key_length)),
        end(cut(row_begin + mask.offset + mask.right + 1, mask.key_length)),
        length(static_cast<int>(mask.key_length)) {}

 private:
  __device__ static __forceinline__ int cut(int64_t key, int64_t length) {
    return static_cast<int>(key < -sm90::kMmaRows ? -sm90::kMmaRows : key > length ? length : key);
  }
};

// Key tiles of which some row of [begin, end) sees a key.
template <typename Config>
__device__ __forceinline__ TileRange tiles_of_rows(const Mask& mask, int begin, int end) {
  constexpr ForwardConfig kConfig = Config::kConfig;
  const Range keys =
      mask.keys_of_rows(begin < 0 ? 0 : begin, end < mask.query_length ? end : mask.query_length);
  if (keys.empty()) return {0, 0};
  return {static_cast<int>(keys.begin / kConfig.block_keys),
          static_cast<int>(ceil_div(keys.end, kConfig.block_keys))};
}

// Key tiles of which each of the 64 rows sees every key, and which have all their keys.
template <typename Config>
__device__ __forceinline__ TileRange unmasked_tiles(const Mask& mask, int row_begin) {
  constexpr ForwardConfig kConfig = Config::kConfig;
  const RowKeys keys(mask, row_begin);
  const int num_rows = min(static_cast<int>(mask.query_length) - row_begin, sm90::kMmaRows);
  const int begin = max(keys.first + num_rows - 1, 0);
  const int end = max(min(keys.end, keys.length), 0);
  return {(begin + kConfig.block_keys - 1) / kConfig.block_keys, end / kConfig.block_keys};
}

}  // namespace backlite::forward_sm90
