// Index functions of the Hopper kernels, exhaustively: they are plain integer functions.
#include "sm90/layout.h"

#include <boost/test/unit_test.hpp>
#include <set>
#include <utility>

using namespace backlite::sm90;

BOOST_AUTO_TEST_SUITE(sm90_layout)

// The 128-byte swizzle as the PTX manual has it: address bits 4-6 are xored with bits 7-9.
BOOST_AUTO_TEST_CASE(swizzle_matches_the_address_rule) {
  for (const int rows : {64, 128, 176}) {
    for (int row = 0; row < rows; ++row) {
      for (int column = 0; column < 128; ++column) {
        const int linear = column / 64 * rows * 128 + row * 128 + column % 64 * 2;
        const int expected = linear ^ (linear >> 7 & 7) << 4;
        BOOST_REQUIRE_EQUAL(swizzled_offset(rows, row, column), expected);
      }
    }
  }
}

BOOST_AUTO_TEST_CASE(swizzle_is_a_permutation_of_the_tile) {
  for (const int rows : {64, 128}) {
    std::set<int> offsets;
    for (int row = 0; row < rows; ++row) {
      for (int column = 0; column < 128; ++column) {
        offsets.insert(swizzled_offset(rows, row, column));
      }
    }
    BOOST_TEST(offsets.size() == static_cast<size_t>(rows) * 128);
    BOOST_TEST(*offsets.begin() == 0);
    BOOST_TEST(*offsets.rbegin() == rows * 128 * 2 - 2);
  }
}

// A column of eight rows, read or written as 16-byte chunks, must touch all 32 banks once.
BOOST_AUTO_TEST_CASE(eight_rows_of_a_chunk_touch_all_banks) {
  for (int first = 0; first < 64; first += 8) {
    for (int column = 0; column < 64; column += kChunkColumns) {
      std::set<int> chunks;
      for (int row = first; row < first + 8; ++row) {
        chunks.insert(swizzled_offset(64, row, column) % 128 / kChunkBytes);
      }
      BOOST_TEST(chunks.size() == 8u);
    }
  }
}

BOOST_AUTO_TEST_CASE(fragments_cover_the_accumulator_once) {
  for (const int columns : {64, 128, 176}) {
    std::set<std::pair<int, int>> elements;
    for (int thread = 0; thread < kWarpgroupThreads; ++thread) {
      for (int i = 0; i < columns / 2; ++i) {
        const int row = fragment_row(thread, i);
        const int column = fragment_column(thread, i);
        BOOST_REQUIRE(row >= 0 && row < kMmaRows && column >= 0 && column < columns);
        BOOST_REQUIRE_EQUAL(row / kWarpRows, thread / kWarpSize);
        elements.emplace(row, column);
      }
    }
    BOOST_TEST(elements.size() == static_cast<size_t>(kMmaRows * columns));
  }
}

// The kernel packs accumulator elements 2 r and 2 r + 1 of a step into operand register r.
BOOST_AUTO_TEST_CASE(an_accumulator_is_the_next_operand) {
  for (int thread = 0; thread < kWarpgroupThreads; ++thread) {
    for (int step = 0; step < 8; ++step) {
      for (int r = 0; r < 4; ++r) {
        for (int half = 0; half < 2; ++half) {
          const int element = 8 * step + 2 * r + half;
          BOOST_REQUIRE_EQUAL(fragment_row(thread, element), operand_row(thread, r));
          BOOST_REQUIRE_EQUAL(fragment_column(thread, element),
                              kMmaDepth * step + operand_column(thread, r) + half);
        }
      }
    }
  }
}

// stmatrix hands element (row i, columns 2 c and 2 c + 1) of matrix j to lane 4 i + c, register j.
BOOST_AUTO_TEST_CASE(stored_matrices_are_where_the_fragment_is) {
  for (int lane = 0; lane < kWarpSize; ++lane) {
    for (int j = 0; j < 4; ++j) {
      const int addressing_lane = 8 * j + lane / 4;
      for (int half = 0; half < 2; ++half) {
        BOOST_REQUIRE_EQUAL(store_row(addressing_lane), fragment_row(lane, 2 * j + half));
        BOOST_REQUIRE_EQUAL(store_column(addressing_lane) + 2 * (lane % 4) + half,
                            fragment_column(lane, 2 * j + half));
      }
    }
  }
}

BOOST_AUTO_TEST_CASE(descriptors_hold_their_fields) {
  BOOST_TEST((kDescriptorHigh & 0x3fff) * kChunkBytes == 8u * kSwizzleBytes);
  BOOST_TEST(kDescriptorHigh >> 30 == 1u);  // 128-byte swizzle
  for (uint32_t address = 0; address < 232448; address += kTileAlignment) {
    for (const uint32_t leading : {0u, 8192u, 16384u}) {
      const uint32_t low = descriptor_low(address, leading);
      BOOST_REQUIRE_EQUAL((low & 0x3fff) * kChunkBytes, address);
      BOOST_REQUIRE_EQUAL((low >> 16) * kChunkBytes, leading);
      // Steps must not carry out of the address field.
      for (int k = 0; k < 8; ++k) {
        if (address + 32768 > 232448) continue;
        const uint32_t stepped = low + step_along_columns(128, k);
        BOOST_REQUIRE_EQUAL(stepped >> 16, low >> 16);
        BOOST_REQUIRE_EQUAL((low + step_along_rows(k)) >> 16, low >> 16);
      }
    }
  }
}

BOOST_AUTO_TEST_CASE(steps_reach_the_elements_of_their_depth) {
  for (const int rows : {64, 128}) {
    for (int k = 0; k < 8; ++k) {
      // Row 0 is not permuted, so the first element of a step is at the step's offset.
      BOOST_TEST(static_cast<int>(step_along_columns(rows, k)) * kChunkBytes ==
                 swizzled_offset(rows, 0, kMmaDepth * k));
      if (kMmaDepth * k < rows) {
        BOOST_TEST(static_cast<int>(step_along_rows(k)) * kChunkBytes ==
                   swizzled_offset(rows, kMmaDepth * k, 0));
      }
    }
  }
}

BOOST_AUTO_TEST_SUITE_END()
