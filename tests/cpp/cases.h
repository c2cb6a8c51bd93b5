// The cases of forward and backward, grouped by why they exist. Pairs of features meet; the full
// product would take hours.
#pragma once

#include <cmath>
#include <ostream>
#include <string>
#include <vector>

#include "backlite/backlite.h"
#include "tensors.h"

namespace backlite::test {

struct Case {
  const char* id = "";
  DType dtype = DType::kFloat32;
  int64_t batch = 1;
  int64_t heads = 2;
  int64_t key_heads = 2;
  int64_t query_length = 200;
  int64_t key_length = 200;
  int64_t head_dim = 32;
  bool causal = false;
  int64_t window_left = -1;
  int64_t window_right = -1;
  Layout layout = Layout::kContiguous;
  double magnitude = 1.0;  // of query, key and value
  double scale = NAN;      // NAN: 1 / sqrt(head_dim)

  Problem problem() const {
    return {.dtype = dtype,
            .batch = batch,
            .num_query_heads = heads,
            .num_key_heads = key_heads,
            .query_length = query_length,
            .key_length = key_length,
            .head_dim = head_dim,
            .scale = std::isnan(scale) ? 1.0 / std::sqrt(static_cast<double>(head_dim)) : scale,
            .causal = causal,
            .window_left = window_left,
            .window_right = window_right};
  }
};

inline std::ostream& operator<<(std::ostream& out, const Case& c) {
  return out << c.id << " (" << info(c.dtype).name << ", batch " << c.batch << ", heads " << c.heads
             << "/" << c.key_heads << ", lengths " << c.query_length << "x" << c.key_length
             << ", head_dim " << c.head_dim << (c.causal ? ", causal" : "") << ", window "
             << c.window_left << "," << c.window_right << ", " << name_of(c.layout) << ")";
}

inline std::vector<Case> all_cases() {
  constexpr DType f16 = DType::kFloat16, bf16 = DType::kBFloat16, f64 = DType::kFloat64;
  return {
      // Lengths around the edges of tiles, of blocks of tiles and of words of bits.
      {.id = "one_by_one", .query_length = 1, .key_length = 1, .head_dim = 8},
      {.id = "one_query", .dtype = f16, .query_length = 1, .key_length = 17, .head_dim = 16},
      {.id = "one_key", .dtype = f64, .query_length = 65, .key_length = 1, .head_dim = 8},
      {.id = "below_tile", .query_length = 63, .key_length = 127, .head_dim = 64},
      {.id = "one_tile", .dtype = bf16, .query_length = 64, .key_length = 128, .head_dim = 64},
      {.id = "above_tile", .dtype = f64, .query_length = 65, .key_length = 129, .causal = true},
      {.id = "square_127", .query_length = 127, .key_length = 127, .causal = true},
      {.id = "square_128", .dtype = f16, .query_length = 128, .key_length = 128, .causal = true},
      {.id = "block", .query_length = 192, .key_length = 256, .head_dim = 16},
      {.id = "above_block", .dtype = bf16, .query_length = 193, .key_length = 257, .causal = true},
      {.id = "second_word",
       .heads = 1,
       .key_heads = 1,
       .query_length = 2050,
       .key_length = 130,
       .head_dim = 8},
      {.id = "many_columns",
       .heads = 1,
       .key_heads = 1,
       .query_length = 70,
       .key_length = 4500,
       .head_dim = 8,
       .causal = true},

      // Empty: no query, no key, no batch, nothing at all.
      {.id = "no_query", .query_length = 0, .key_length = 100},
      {.id = "no_key", .dtype = bf16, .query_length = 100, .key_length = 0},
      {.id = "no_key_causal", .query_length = 100, .key_length = 0, .causal = true},
      {.id = "no_length", .query_length = 0, .key_length = 0},
      {.id = "no_batch", .batch = 0},

      // Causal and window, against lengths that differ.
      {.id = "causal_more_keys", .query_length = 100, .key_length = 300, .causal = true},
      {.id = "causal_rows_without_keys",
       .dtype = f64,
       .query_length = 256,
       .key_length = 128,
       .causal = true},
      {.id = "causal_mostly_empty",
       .dtype = f16,
       .query_length = 300,
       .key_length = 5,
       .causal = true},
      {.id = "window_self", .window_left = 0, .window_right = 0},
      {.id = "window_left_0", .query_length = 130, .window_left = 0},
      {.id = "window_right_0", .key_length = 130, .window_right = 0},
      {.id = "window_63", .dtype = bf16, .window_left = 63, .window_right = 0},
      {.id = "window_64",
       .query_length = 300,
       .key_length = 300,
       .window_left = 64,
       .window_right = 1},
      {.id = "window_128",
       .query_length = 300,
       .key_length = 290,
       .window_left = 128,
       .window_right = 127},
      {.id = "window_wide",
       .query_length = 150,
       .key_length = 310,
       .window_left = 300,
       .window_right = 40},
      {.id = "window_causal",
       .dtype = f64,
       .query_length = 300,
       .key_length = 300,
       .causal = true,
       .window_left = 17,
       .window_right = 5},
      {.id = "window_rows_without_keys",
       .query_length = 300,
       .key_length = 90,
       .window_left = 10,
       .window_right = 20},
      {.id = "window_keys_without_rows",
       .dtype = f16,
       .query_length = 90,
       .key_length = 400,
       .window_left = 10,
       .window_right = 20},
      {.id = "window_beyond_all", .window_left = INT64_MAX, .window_right = INT64_MAX},

      // Heads that share keys, batches, and so many heads that each has one lane.
      {.id = "group_4", .heads = 4, .key_heads = 1, .causal = true},
      {.id = "group_5", .dtype = bf16, .heads = 10, .key_heads = 2, .query_length = 130},
      {.id = "group_8", .heads = 8, .key_heads = 1, .query_length = 70, .key_length = 140},
      {.id = "batch_3",
       .dtype = f64,
       .batch = 3,
       .heads = 4,
       .key_heads = 2,
       .query_length = 70,
       .key_length = 135,
       .head_dim = 16,
       .causal = true},
      {.id = "many_heads",
       .batch = 5,
       .heads = 9,
       .key_heads = 9,
       .query_length = 66,
       .key_length = 131,
       .head_dim = 8},

      // Head dims: the limits, and those that are not a power of two.
      {.id = "dim_8", .dtype = bf16, .head_dim = 8},
      {.id = "dim_40", .dtype = f16, .head_dim = 40, .causal = true},
      {.id = "dim_72", .query_length = 70, .head_dim = 72},
      {.id = "dim_80", .dtype = bf16, .query_length = 70, .head_dim = 80},
      {.id = "dim_96", .query_length = 70, .head_dim = 96, .causal = true},
      {.id = "dim_104", .dtype = f16, .query_length = 70, .key_length = 140, .head_dim = 104},
      {.id = "dim_112", .dtype = f64, .query_length = 70, .key_length = 140, .head_dim = 112},
      {.id = "dim_128", .query_length = 100, .key_length = 140, .head_dim = 128, .causal = true},
      {.id = "dim_192", .dtype = bf16, .query_length = 70, .key_length = 140, .head_dim = 192},
      {.id = "dim_256", .query_length = 70, .key_length = 140, .head_dim = 256},
      {.id = "dim_256_f64", .dtype = f64, .query_length = 70, .key_length = 140, .head_dim = 256},

      // Layouts. Outputs take them too, except for broadcasting.
      {.id = "heads_first", .batch = 2, .heads = 4, .layout = Layout::kHeadsFirst},
      {.id = "heads_first_bf16", .dtype = bf16, .batch = 2, .layout = Layout::kHeadsFirst},
      {.id = "packed",
       .batch = 2,
       .query_length = 70,
       .key_length = 135,
       .causal = true,
       .layout = Layout::kPacked},
      {.id = "packed_f16", .dtype = f16, .layout = Layout::kPacked},
      {.id = "odd_gaps",
       .batch = 2,
       .query_length = 70,
       .key_length = 135,
       .layout = Layout::kOddGaps},
      {.id = "odd_gaps_bf16",
       .dtype = bf16,
       .batch = 2,
       .query_length = 70,
       .key_length = 135,
       .layout = Layout::kOddGaps},
      {.id = "odd_gaps_f64",
       .dtype = f64,
       .query_length = 70,
       .key_length = 135,
       .layout = Layout::kOddGaps},
      {.id = "reversed", .causal = true, .layout = Layout::kReversed},
      {.id = "broadcast",
       .batch = 2,
       .heads = 4,
       .query_length = 70,
       .key_length = 135,
       .layout = Layout::kBroadcast},

      // Large scores, and scales other than the usual one.
      {.id = "large_f16", .dtype = f16, .head_dim = 128, .causal = true, .magnitude = 3.0},
      {.id = "very_large_f16", .dtype = f16, .head_dim = 64, .causal = true, .magnitude = 10.0},
      {.id = "very_large_f32", .query_length = 70, .head_dim = 64, .magnitude = 30.0},
      {.id = "scale_0", .query_length = 70, .causal = true, .scale = 0.0},
      {.id = "scale_negative", .dtype = f64, .query_length = 70, .scale = -0.3},
      {.id = "scale_large", .query_length = 70, .scale = 4.0},
  };
}

}  // namespace backlite::test
