// Where things are: swizzled shared memory, wgmma descriptors, accumulator fragments. Pure integer
// functions, usable and tested (exhaustively) on the CPU.
//
// One layout serves every 16-bit operand: a tile of R rows x C columns is cut into blocks of 64
// columns, each stored as R rows of 128 bytes, and the 16-byte chunks of a row are permuted by
// xor with the row's number modulo 8 (the 128-byte swizzle of TMA and wgmma). Blocks follow each
// other; every tile starts at a multiple of 1024 bytes.
#pragma once

#include <cstdint>

#if defined(__CUDACC__)
#define BACKLITE_SM90_HOST_DEVICE __host__ __device__
#else
#define BACKLITE_SM90_HOST_DEVICE
#endif

namespace backlite::sm90 {

inline constexpr int kSwizzleBytes = 128;    // one row of a block
inline constexpr int kBlockColumns = 64;     // 16-bit columns in a row of a block
inline constexpr int kChunkBytes = 16;       // what the swizzle moves as one
inline constexpr int kChunkColumns = 8;      // 16-bit columns in a chunk
inline constexpr int kTileAlignment = 1024;  // eight rows: the period of the swizzle
inline constexpr int kMmaRows = 64;          // M of every wgmma
inline constexpr int kMmaDepth = 16;         // K of every wgmma on 16-bit elements
inline constexpr int kWarpRows = 16;         // rows of the accumulator that one warp holds
inline constexpr int kWarpSize = 32;
inline constexpr int kWarpgroupThreads = 128;

// Byte offset of element (row, column) in a tile of `num_rows` rows.
BACKLITE_SM90_HOST_DEVICE constexpr int swizzled_offset(int num_rows, int row, int column) {
  const int block = column / kBlockColumns;
  const int chunk = column % kBlockColumns / kChunkColumns;
  return block * num_rows * kSwizzleBytes + row * kSwizzleBytes + (chunk ^ row % 8) * kChunkBytes +
         column % kChunkColumns * 2;
}

// ---- Accumulator fragments --------------------------------------------------------------------
// Element i of thread t (0..127) of a 64 x N float accumulator.

BACKLITE_SM90_HOST_DEVICE constexpr int fragment_row(int thread, int i) {
  return kWarpRows * (thread / kWarpSize) + thread % kWarpSize / 4 + 8 * (i / 2 % 2);
}

BACKLITE_SM90_HOST_DEVICE constexpr int fragment_column(int thread, int i) {
  return 8 * (i / 4) + 2 * (thread % 4) + i % 2;
}

// The A operand of one 64 x 16 step, when it comes from registers: register r (0..3) of a thread
// holds two neighbouring columns. It is exactly the accumulator's elements 8 * step + 2 * r and the
// next one, packed: a product's result becomes the next product's operand without moving.
BACKLITE_SM90_HOST_DEVICE constexpr int operand_row(int thread, int r) {
  return kWarpRows * (thread / kWarpSize) + thread % kWarpSize / 4 + 8 * (r % 2);
}

BACKLITE_SM90_HOST_DEVICE constexpr int operand_column(int thread, int r) {
  return 2 * (thread % 4) + 8 * (r / 2);
}

// stmatrix with four 8 x 8 matrices writes the 16 x 16 elements that a warp packs from accumulator
// elements 8 * step .. 8 * step + 7: matrix j takes the packed pair j of every lane. Lane l gives
// the address of row l % 8 of matrix l / 8, which is this element of the warp's 16 x 16 block.
BACKLITE_SM90_HOST_DEVICE constexpr int store_row(int lane) {
  return lane % 8 + 8 * (lane / 8 % 2);
}
BACKLITE_SM90_HOST_DEVICE constexpr int store_column(int lane) { return 8 * (lane / 16); }

// ---- wgmma descriptors ------------------------------------------------------------------------
// 64 bits; addresses and offsets count 16 bytes. The high half is a constant: the stride offset
// (1024 bytes between groups of eight rows) and the 128-byte swizzle. The low half holds the
// address (14 bits) and the leading offset (from bit 16), which only a transposed operand reads.

inline constexpr uint32_t kDescriptorHigh = (kTileAlignment / kChunkBytes) | 1u << 30;

// `leading_bytes`: for a transposed operand, the distance between its blocks of 64 columns.
BACKLITE_SM90_HOST_DEVICE constexpr uint32_t descriptor_low(uint32_t shared_address,
                                                            uint32_t leading_bytes) {
  return (shared_address / kChunkBytes & 0x3fff) | leading_bytes / kChunkBytes << 16;
}

// What to add to descriptor_low for the k-th step of 16 along the depth of the product.
// Plain operand (depth runs along the columns): 32 bytes a step, the next block after four.
BACKLITE_SM90_HOST_DEVICE constexpr uint32_t step_along_columns(int num_rows, int k) {
  constexpr int kStepsInBlock = kBlockColumns / kMmaDepth;
  return static_cast<uint32_t>(k % kStepsInBlock * kMmaDepth * 2 +
                               k / kStepsInBlock * num_rows * kSwizzleBytes) /
         kChunkBytes;
}

// Transposed operand (depth runs along the rows): 16 rows a step.
BACKLITE_SM90_HOST_DEVICE constexpr uint32_t step_along_rows(int k) {
  return static_cast<uint32_t>(k * kMmaDepth * kSwizzleBytes) / kChunkBytes;
}

}  // namespace backlite::sm90
