// The schedule of the CPU: every column of tiles once, dealt evenly.
#include <algorithm>
#include <boost/test/unit_test.hpp>
#include <numeric>
#include <random>
#include <set>
#include <tuple>

#include "schedule/layout.h"
#include "stages.h"

using namespace backlite;
using namespace backlite::test;

namespace {

void check_schedule(const Case& c, double density) {
  Stages stages(c);
  const Problem& p = stages.problem;
  const auto allowed = tiles_in_mask(p);
  TileMap tiles(p, false);
  std::mt19937_64 generator(1);
  std::bernoulli_distribution is_live(density);
  std::fill(stages.tile_bits.begin(), stages.tile_bits.end(), 0);
  const int64_t words = tiles_of(tiles.query_tiles, kTilesPerWord);
  for (size_t i = 0; i < tiles.live.size(); ++i) {
    const auto n = static_cast<int64_t>(i) % tiles.key_tiles;
    const auto m = static_cast<int64_t>(i) / tiles.key_tiles % tiles.query_tiles;
    const auto head = static_cast<int64_t>(i) / tiles.key_tiles / tiles.query_tiles;
    tiles.live[i] = allowed[m][n] && (density >= 1.0 || is_live(generator));
    if (tiles.live[i]) {
      int32_t& word = stages.tile_bits[(head * tiles.key_tiles + n) * words + m / kTilesPerWord];
      word = static_cast<int32_t>(static_cast<uint32_t>(word) | 1u << (m % kTilesPerWord));
    }
  }

  Bytes plan(schedule_bytes(p));
  schedule(p,
           {.tile_bits = density >= 1.0 ? nullptr : stages.tile_bits.data(),
            .schedule = plan.data(),
            .schedule_bytes = schedule_bytes(p)},
           {});
  const cpu::ScheduleLayout layout(p, plan.data());

  std::vector<int32_t> lanes(layout.lane_order, layout.lane_order + layout.num_lanes);
  std::sort(lanes.begin(), lanes.end());
  for (int32_t i = 0; i < layout.num_lanes; ++i) BOOST_REQUIRE_EQUAL(lanes[i], i);

  const int64_t group = p.num_query_heads / p.num_key_heads;
  const int64_t lanes_of_head = cpu::lanes_per_head(p);
  std::set<std::tuple<int, int, int>> columns;
  std::vector<int64_t> load(static_cast<size_t>(layout.num_lanes));
  int64_t heaviest_column = 0;
  BOOST_REQUIRE_EQUAL(layout.lane_begin[0], 0);
  for (int64_t lane = 0; lane < layout.num_lanes; ++lane) {
    for (int64_t i = layout.lane_begin[lane]; i < layout.lane_begin[lane + 1]; ++i) {
      const cpu::WorkItem& item = layout.items[i];
      BOOST_REQUIRE_EQUAL(item.batch * p.num_key_heads + item.key_head, lane / lanes_of_head);
      BOOST_REQUIRE(columns.insert({item.batch, item.key_head, item.key_tile}).second);
      int64_t live = 0;
      for (int64_t h = item.key_head * group; h < (item.key_head + 1) * group; ++h) {
        for (int64_t m = 0; m < tiles.query_tiles; ++m) {
          live += tiles.at(item.batch, h, m, item.key_tile);
        }
      }
      BOOST_REQUIRE_EQUAL(item.num_live, live);
      load[lane] += item.work();
      heaviest_column = std::max(heaviest_column, item.work());
    }
  }
  BOOST_TEST(static_cast<int64_t>(columns.size()) == p.batch * p.num_key_heads * tiles.key_tiles);

  for (int64_t i = 1; i < layout.num_lanes; ++i) {
    BOOST_REQUIRE(load[layout.lane_order[i - 1]] >= load[layout.lane_order[i]]);
  }
  // The least loaded lane takes the next column, so no lane is more than a column ahead of the
  // mean.
  for (int64_t first = 0; first < layout.num_lanes; first += lanes_of_head) {
    const auto begin = load.begin() + first, end = begin + lanes_of_head;
    const int64_t mean = std::accumulate(begin, end, int64_t{0}) / lanes_of_head;
    BOOST_TEST(*std::max_element(begin, end) <= mean + heaviest_column);
  }
}

}  // namespace

BOOST_AUTO_TEST_SUITE(schedule)

BOOST_AUTO_TEST_CASE(every_column_once_and_evenly) {
  const std::vector<Case> cases = {{.heads = 1,
                                    .key_heads = 1,
                                    .query_length = 700,
                                    .key_length = 9000,
                                    .head_dim = 8,
                                    .causal = true},
                                   {.batch = 3,
                                    .heads = 6,
                                    .key_heads = 2,
                                    .query_length = 2100,
                                    .key_length = 900,
                                    .head_dim = 8,
                                    .window_left = 300,
                                    .window_right = 10},
                                   {.batch = 9,
                                    .heads = 4,
                                    .key_heads = 4,
                                    .query_length = 300,
                                    .key_length = 500,
                                    .head_dim = 8}};
  for (const Case& c : cases) {
    for (const double density : {1.0, 0.3, 0.0}) check_schedule(c, density);
  }
}

BOOST_AUTO_TEST_CASE(nothing_to_schedule) {
  check_schedule({.query_length = 0}, 1.0);
  check_schedule({.key_length = 0}, 1.0);
  check_schedule({.batch = 0}, 1.0);
}

BOOST_AUTO_TEST_SUITE_END()
