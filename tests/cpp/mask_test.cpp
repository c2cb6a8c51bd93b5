// Mask geometry against brute force: every pair of a query and a key is asked whether it is seen.
#include "common/mask.h"

#include <boost/test/unit_test.hpp>
#include <vector>

#include "reference.h"

using namespace backlite;

namespace {

using Grid = std::vector<std::vector<bool>>;

Grid seen_pairs(const Problem& p) {
  Grid seen(static_cast<size_t>(p.query_length),
            std::vector<bool>(static_cast<size_t>(p.key_length)));
  for (int64_t i = 0; i < p.query_length; ++i) {
    for (int64_t j = 0; j < p.key_length; ++j) seen[i][j] = test::sees(p, i, j);
  }
  return seen;
}

// Is `range`, possibly empty, exactly the indices in [0, count) for which `holds`?
template <typename Holds>
bool is_exactly(Range range, int64_t count, const Holds& holds) {
  if (!range.empty() && (range.begin < 0 || range.end > count)) return false;
  for (int64_t i = 0; i < count; ++i) {
    if (holds(i) != (i >= range.begin && i < range.end)) return false;
  }
  return true;
}

std::string describe(const Problem& p) {
  return "lengths " + std::to_string(p.query_length) + "x" + std::to_string(p.key_length) +
         ", window " + std::to_string(p.window_left) + "," + std::to_string(p.window_right) +
         (p.causal ? ", causal" : "");
}

void check_rows_and_keys(const Problem& p) {
  const Mask mask = Mask::of(p);
  const Grid seen = seen_pairs(p);
  for (int64_t i = 0; i < p.query_length; ++i) {
    BOOST_REQUIRE_MESSAGE(
        is_exactly(mask.keys_of_row(i), p.key_length, [&](int64_t j) { return seen[i][j]; }),
        "keys of row " << i << ": " << describe(p));
  }
  for (int64_t j = 0; j < p.key_length; ++j) {
    BOOST_REQUIRE_MESSAGE(
        is_exactly(mask.rows_of_key(j), p.query_length, [&](int64_t i) { return seen[i][j]; }),
        "rows of key " << j << ": " << describe(p));
  }
}

void check_tiles(const Problem& p) {
  const Mask mask = Mask::of(p);
  const Grid seen = seen_pairs(p);
  const int64_t rows = num_query_tiles(p.query_length), columns = num_key_tiles(p.key_length);
  Grid any(rows, std::vector<bool>(columns)), all(rows, std::vector<bool>(columns, true));
  for (int64_t i = 0; i < p.query_length; ++i) {
    for (int64_t j = 0; j < p.key_length; ++j) {
      if (seen[i][j]) any[i / kQueryTile][j / kKeyTile] = true;
      if (!seen[i][j]) all[i / kQueryTile][j / kKeyTile] = false;
    }
  }
  for (int64_t m = 0; m < rows; ++m) {
    BOOST_REQUIRE_MESSAGE(
        is_exactly(mask.key_tiles(m), columns, [&](int64_t n) { return any[m][n]; }),
        "key tiles of query tile " << m << ": " << describe(p));
    for (int64_t n = 0; n < columns; ++n) {
      BOOST_REQUIRE_MESSAGE(mask.is_full(m, n) == all[m][n],
                            "is_full(" << m << ", " << n << "): " << describe(p));
    }
  }
  for (int64_t n = 0; n < columns; ++n) {
    BOOST_REQUIRE_MESSAGE(
        is_exactly(mask.query_tiles(n), rows, [&](int64_t m) { return any[m][n]; }),
        "query tiles of key tile " << n << ": " << describe(p));
  }
}

}  // namespace

BOOST_AUTO_TEST_SUITE(mask)

BOOST_AUTO_TEST_CASE(every_small_row_and_key) {
  constexpr int64_t kLongest = 9;
  Problem p;
  for (p.query_length = 0; p.query_length <= kLongest; ++p.query_length) {
    for (p.key_length = 0; p.key_length <= kLongest; ++p.key_length) {
      for (p.window_left = -1; p.window_left <= kLongest + 1; ++p.window_left) {
        for (p.window_right = -1; p.window_right <= kLongest + 1; ++p.window_right) {
          for (const bool causal : {false, true}) {
            p.causal = causal;
            check_rows_and_keys(p);
          }
        }
      }
    }
  }
}

BOOST_AUTO_TEST_CASE(tiles_around_their_edges) {
  Problem p;
  for (const int64_t query_length : {0, 1, 64, 65, 129, 200}) {
    for (const int64_t key_length : {0, 1, 127, 128, 130, 300}) {
      for (const int64_t left : {-1, 0, 1, 63, 64, 127, 129, 250}) {
        for (const int64_t right : {-1, 0, 1, 63, 65, 128, 129, 250}) {
          for (const bool causal : {false, true}) {
            p.query_length = query_length, p.key_length = key_length;
            p.window_left = left, p.window_right = right, p.causal = causal;
            check_tiles(p);
          }
        }
      }
    }
  }
}

// Sums with a window near the largest integer must not wrap.
BOOST_AUTO_TEST_CASE(window_beyond_all_lengths_is_unlimited) {
  Problem limited = {
      .query_length = 200, .key_length = 300, .window_left = INT64_MAX, .window_right = INT64_MAX};
  Problem unlimited = {.query_length = 200, .key_length = 300};
  for (int64_t i = 0; i < limited.query_length; ++i) {
    const Range a = Mask::of(limited).keys_of_row(i), b = Mask::of(unlimited).keys_of_row(i);
    BOOST_TEST(a.begin == b.begin);
    BOOST_TEST(a.end == b.end);
  }
}

BOOST_AUTO_TEST_CASE(counts_of_tiles_and_words) {
  for (int64_t length = 0; length < 5000; ++length) {
    BOOST_REQUIRE_EQUAL(num_query_tiles(length), (length + 63) / 64);
    BOOST_REQUIRE_EQUAL(num_key_tiles(length), (length + 127) / 128);
    BOOST_REQUIRE_EQUAL(num_bit_words(length), (length + 2047) / 2048);
  }
}

BOOST_AUTO_TEST_SUITE_END()
