// What the Hopper backward's kernels are given.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "common/mask.h"
#include "schedule/layout_sm90.h"

namespace backlite::backward_sm90 {

// Row terms: what (1) and (4) add to every element of a query row, as 16-bit numbers that the
// tensor cores add up: -LSE / scale in three parts, then -delta in three parts, then two zeros.
inline constexpr int kRowTerms = 8;
inline constexpr int kParts = 3;  // 3 * 8 bits of bfloat16 hold a float32

// fp16 reaches 65504 only, and -LSE / scale may be larger: its first part is multiplied by this.
// (The parts after it make up for what the first one rounds.)
inline constexpr float kFirstPartFactorFp16 = 32768.0f;

struct Strides {  // of a (batch, length, heads, head_dim) tensor, in elements
  int64_t batch;
  int64_t length;
  int64_t head;
};

// In BackwardParams::started: the first block to come to a query tile has stored its dQ, the rest
// may add.
inline constexpr uint32_t kStored = 1u << 31;

// There, too: the query tile has one live tile, which stores dQ as the caller wants it.
inline constexpr uint32_t kOnlyOne = 1u << 30;

// In Heads::done: the other bits are the number of a head.
inline constexpr uint32_t kListed = 1u << 31;

// How far the heads are: the last pass turns a head's dQ into rows when all its live tiles are
// done. A head is a key head of one batch entry, with its group of query heads.
struct Heads {
  uint64_t* left;      // [B * Hk]: live tiles that are not done, and one more (list_empty_heads)
  uint32_t* num_done;  // zero at the start
  uint32_t* done;      // [B * Hk], zero at the start: heads in the order in which they are done
};

struct BackwardParams {
  CUtensorMap query;            // (B, H, Sq, D), boxes of 64 rows
  CUtensorMap grad_out;         // as query
  CUtensorMap key;              // (B, Hk, Sk, D), boxes of 128 rows
  CUtensorMap value;            // as key
  CUtensorMap grad_query_rows;  // as query
  Mask mask;
  const schedule_sm90::Header* schedule;
  const schedule_sm90::WorkItem* items;  // [schedule->num_items]
  int* next_item;                        // zero at the start: items taken beyond the first round
  void* grad_key;                        // [B, Sk, Hk, D]
  void* grad_value;
  Strides grad_key_strides, grad_value_strides;
  const uint32_t* tile_bits;  // [B, H, Tn, W], nullptr if dense
  const void* row_terms;      // [B, H, Tm * 64, kRowTerms] of 16 bits
  uint32_t* started;          // [B, H, Tm]: if first_stores, how many have come, kStored, kOnlyOne
  float* grad_query;          // [B, H, Tm][D / 64][8][128][4]: dQ / scale by accumulator fragment
  float* grad_parts;    // [max_slots][dV, dK / scale][2][D / 8][128][4]: split columns, likewise
  Heads heads;          // how far each is
  int num_heads;        // B * Hk
  int num_query_heads;  // H
  int heads_per_key_head;
  int num_query_tiles;  // Tm
  int num_key_tiles;    // Tn
  int64_t num_tiles;    // B * H * Tm
  float scale_log2;     // scale * log2(e), not 0
  float grad_scale;     // of dK and dQ
  int mask_left;        // the mask's sides, small enough for 32 bits
  int mask_right;
};

// The passes before and after the columns.
struct RowsParams {
  Mask mask;
  const uint32_t* tile_bits;  // as BackwardParams
  const void* out;            // [B, Sq, H, D]
  const void* grad_out;
  void* grad_query;
  void* grad_key;  // [B, Sk, Hk, D]
  void* grad_value;
  Strides out_strides, grad_out_strides, grad_query_strides, grad_key_strides, grad_value_strides;
  const float* lse;       // [B, H, Sq]
  const float* grad_lse;  // [B, H, Sq] or nullptr
  const schedule_sm90::Header* schedule;
  const int32_t* live;          // [B * Hk * Tn]
  const int32_t* slot_columns;  // [schedule->num_slots]
  int* next_item;
  void* row_terms;
  uint32_t* started;       // as BackwardParams
  float* grad_query_sums;  // BackwardParams::grad_query
  float* grad_parts;
  Heads heads;        // how far each is
  int num_heads;      // B * Hk
  int tiles_of_head;  // of its group: H / Hk * Tm
  int tiles_in_run;   // tiles and parts that a block of the last pass takes
  int query_length;
  int key_length;
  int num_query_heads;
  int num_key_heads;
  int num_query_tiles;
  int num_key_tiles;
  int num_columns;
  int64_t num_tiles;    // B * H * Tm
  float inverse_scale;  // 1 / scale, with a scale of 0 replaced: see launch_sm90.cpp
  float grad_scale;     // of dQ and dK
};

}  // namespace backlite::backward_sm90
