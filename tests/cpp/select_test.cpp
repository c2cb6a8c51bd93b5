// Selection against an independent implementation of its rule.
#include <boost/test/unit_test.hpp>
#include <random>

#include "reference.h"
#include "stages.h"

using namespace backlite;
using namespace backlite::test;

namespace {

// Statistics without a forward: any float may stand there.
struct Selection {
  Stages stages;
  std::vector<int64_t> negl_prob;

  explicit Selection(const Case& c, std::vector<int64_t> threshold)
      : stages(c), negl_prob(std::move(threshold)) {}

  TileMap run() {
    std::fill(stages.tile_bits.begin(), stages.tile_bits.end(), -1);
    stages.run_select(negl_prob);
    return stages.tiles_from_bits();
  }

  // Fails unless the selected tiles are those of the rule.
  void check() {
    const TileMap actual = run();
    const TileMap expected = reference_select(stages.problem, stages.tile_stats, negl_prob);
    for (size_t i = 0; i < expected.live.size(); ++i) {
      const auto tiles = static_cast<size_t>(expected.key_tiles);
      BOOST_REQUIRE_MESSAGE(actual.live[i] == expected.live[i],
                            "row of tiles " << i / tiles << ", key tile " << i % tiles << " is "
                                            << (actual.live[i] ? "live" : "skipped"));
    }
    check_padding();
  }

  // Bits past the last query tile are 0.
  void check_padding() const {
    const auto& bits = stages.tile_bits;
    const int64_t tiles = tiles_of(stages.problem.query_length, kQueryTile);
    const int64_t words = tiles_of(tiles, kTilesPerWord);
    if (tiles % kTilesPerWord == 0) return;
    for (size_t i = static_cast<size_t>(words) - 1; i < bits.size(); i += words) {
      BOOST_REQUIRE_EQUAL(static_cast<uint32_t>(bits[i]) >> (tiles % kTilesPerWord), 0u);
    }
  }
};

Case row_of_tiles(int64_t key_tiles) {
  return {.heads = 1,
          .key_heads = 1,
          .query_length = 64,
          .key_length = key_tiles * kKeyTile,
          .head_dim = 8};
}

// The live tiles of one row of tiles as a text of 0 and 1.
std::string select_row(const std::vector<double>& probs, double negl_prob) {
  Selection selection(row_of_tiles(static_cast<int64_t>(probs.size())),
                      {negl_prob_to_fixed(negl_prob)});
  std::copy(probs.begin(), probs.end(), selection.stages.tile_stats.begin());
  selection.check();
  std::string text;
  for (const bool live : selection.run().live) text += live ? '1' : '0';
  return text;
}

// Many rows and columns, several words of bits, and a mask.
std::vector<Case> masks() {
  return {{.heads = 2, .key_heads = 1, .query_length = 300, .key_length = 700},
          {.batch = 2,
           .heads = 3,
           .key_heads = 3,
           .query_length = 4200,
           .key_length = 1000,
           .causal = true},
          {.heads = 1,
           .key_heads = 1,
           .query_length = 2049,
           .key_length = 3000,
           .window_left = 500,
           .window_right = 200},
          {.heads = 1, .key_heads = 1, .query_length = 900, .key_length = 300, .causal = true},
          {.heads = 1, .key_heads = 1, .query_length = 64, .key_length = 20000}};
}

}  // namespace

BOOST_AUTO_TEST_SUITE(selection)

BOOST_AUTO_TEST_CASE(skips_the_longest_light_prefix) {
  BOOST_TEST(select_row({0.5, 0.25, 0.125, 0.125}, 0.2) == "1101");
  BOOST_TEST(select_row({0.5, 0.25, 0.125, 0.125}, 0.26) == "1100");
  BOOST_TEST(select_row({0.5, 0.25, 0.125, 0.125}, 0.6) == "1000");
}

BOOST_AUTO_TEST_CASE(sum_equal_to_the_threshold_stays) {
  BOOST_TEST(select_row({0.5, 0.25, 0.125, 0.125}, 0.25) == "1101");
  BOOST_TEST(select_row({0.5, 0.25, 0.125, 0.125}, 0.125) == "1111");
}

BOOST_AUTO_TEST_CASE(ties_skip_the_lower_key_tile) {
  BOOST_TEST(select_row({0.2, 0.2, 0.2, 0.2, 0.2}, 0.5) == "00111");
  BOOST_TEST(select_row({0.4, 0.1, 0.1, 0.4}, 0.15) == "1011");
}

BOOST_AUTO_TEST_CASE(zero_threshold_keeps_every_tile_of_the_mask) {
  BOOST_TEST(select_row({1.0, 0.0, 0.0}, 0.0) == "111");
  BOOST_TEST(select_row({1.0, 0.0, 0.0}, 1e-12) == "100");
}

BOOST_AUTO_TEST_CASE(heaviest_tile_stays_whatever_the_row_adds_up_to) {
  BOOST_TEST(select_row({0.0, 0.0, 0.0}, 0.5) == "001");
  BOOST_TEST(select_row({0.01, 0.03, 0.02}, 0.9) == "010");
  BOOST_TEST(select_row({0.5}, 0.999) == "1");
}

BOOST_AUTO_TEST_CASE(tile_of_nan_or_more_than_one_is_never_skipped) {
  BOOST_TEST(select_row({NAN, 0.0, 0.9}, 0.95) == "100");
  BOOST_TEST(select_row({INFINITY, 0.1, 7.0}, 0.95) == "101");
  BOOST_TEST(select_row({-1.0, -INFINITY, 0.9}, 0.5) == "001");
}

BOOST_AUTO_TEST_CASE(random_statistics) {
  std::mt19937_64 generator(1);
  std::exponential_distribution<float> light(20.0f);
  for (const Case& c : masks()) {
    for (const double negl_prob : {0.0, 1e-9, 0.02, 0.3, 0.999}) {
      Selection selection(c, {negl_prob_to_fixed(negl_prob)});
      for (float& p : selection.stages.tile_stats) p = light(generator);
      selection.check();
    }
  }
}

// Few values, so that nearly everything ties; some of them no probabilities at all.
BOOST_AUTO_TEST_CASE(random_statistics_with_ties_and_odd_values) {
  constexpr float kValues[] = {0.0f,  0.0f,  0.125f, 0.125f, 0.25f, 1e-12f, 1e-13f,
                               -0.5f, 1e-9f, NAN,    2.0f,   0.02f, 0.02f,  0.02f};
  std::mt19937_64 generator(2);
  std::uniform_int_distribution<size_t> pick(0, std::size(kValues) - 1);
  for (const Case& c : masks()) {
    for (const double negl_prob : {1e-12, 0.02, 0.1, 0.125, 0.5}) {
      Selection selection(c, {negl_prob_to_fixed(negl_prob)});
      for (float& p : selection.stages.tile_stats) p = kValues[pick(generator)];
      selection.check();
    }
  }
}

BOOST_AUTO_TEST_CASE(a_threshold_per_head_acts_on_its_head) {
  std::mt19937_64 generator(3);
  std::exponential_distribution<float> light(20.0f);
  Selection selection(
      {.batch = 2, .heads = 4, .key_heads = 2, .query_length = 300, .key_length = 1500},
      {0, negl_prob_to_fixed(0.1), negl_prob_to_fixed(0.5), kProbOne - 1});
  for (float& p : selection.stages.tile_stats) p = light(generator);
  selection.check();
  const TileMap tiles = selection.run();
  for (int64_t m = 0; m < tiles.query_tiles; ++m) {
    for (int64_t n = 0; n < tiles.key_tiles; ++n) BOOST_TEST(tiles.at(1, 0, m, n));
  }
}

BOOST_AUTO_TEST_CASE(nothing_to_select_from) {
  for (const auto& [query_length, key_length, batch] :
       {std::array<int64_t, 3>{0, 300, 1}, {300, 0, 1}, {0, 0, 1}, {300, 300, 0}}) {
    const Problem p = {
        .batch = batch, .query_length = query_length, .key_length = key_length, .head_dim = 8};
    const int64_t negl_prob = 0;
    Workspace workspace(select_workspace_bytes(p, 2), {});
    BOOST_CHECK_NO_THROW(
        backlite::select(p, {.negl_prob = &negl_prob, .num_negl_prob = 1}, workspace.execution()));
  }
}

// What is promised of a real forward: of every row of tiles, less than negl_prob is skipped, and a
// row that sees a key keeps a tile.
BOOST_AUTO_TEST_CASE(skipped_probability_of_a_forward_is_negligible) {
  constexpr double kNeglProb = 0.2;
  Stages stages(
      {.query_length = 500, .key_length = 700, .head_dim = 16, .causal = true, .magnitude = 3.0});
  stages.run_forward();
  stages.run_select({negl_prob_to_fixed(kNeglProb)});
  const TileMap tiles = stages.tiles_from_bits();
  int64_t num_skipped = 0;
  for (int64_t h = 0; h < tiles.heads; ++h) {
    for (int64_t m = 0; m < tiles.query_tiles; ++m) {
      double skipped = 0.0, kept = 0.0;
      for (int64_t n = 0; n < tiles.key_tiles; ++n) {
        const float p = stages.tile_stats[tiles.index(0, h, m, n)];
        (tiles.at(0, h, m, n) ? kept : skipped) += p;
        if (!tiles.at(0, h, m, n) && p > 0.0f) ++num_skipped;
      }
      BOOST_TEST(skipped < kNeglProb);
      BOOST_TEST(kept > 0.0);
    }
  }
  BOOST_TEST(num_skipped > 0);
}

BOOST_AUTO_TEST_SUITE_END()
