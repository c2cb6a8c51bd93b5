// Forward: O, LSE and tile statistics against the reference.
#include <boost/test/data/test_case.hpp>
#include <boost/test/unit_test.hpp>

#include "cases.h"
#include "compare.h"
#include "stages.h"

using namespace backlite;
using namespace backlite::test;

namespace {

// Relative error of a tile's probability above 1e-6: 1e-2 in 16 bits; in float32, a small number
// times the largest score, whose rounding the exponential magnifies.
double stats_bound(DType dtype, double largest_score) {
  switch (dtype) {
    case DType::kFloat16:
    case DType::kBFloat16: return 1e-2;
    case DType::kFloat32: return 1e-5 * std::max(1.0, largest_score);
    // Computed in double, but stored as float32.
    case DType::kFloat64: return 1e-6;
  }
  return 0.0;
}

void check_stats(const Stages& stages, const ReferenceForward& truth) {
  const double bound = stats_bound(stages.problem.dtype, truth.largest_score);
  for (size_t i = 0; i < truth.tile_stats.size(); ++i) {
    const double p = stages.tile_stats[i], expected = truth.tile_stats[i];
    if (expected > 1e-6) {
      BOOST_REQUIRE_MESSAGE(std::abs(p - expected) <= bound * expected,
                            "tile_stats[" << i << "] = " << p << ", the truth is " << expected);
    } else {
      // Light tiles stay light, and tiles outside the mask hold nothing.
      BOOST_REQUIRE_MESSAGE(expected == 0.0 ? p == 0.0 : p >= 0.0 && p < 1.1e-6,
                            "tile_stats[" << i << "] = " << p << ", the truth is " << expected);
    }
  }
}

}  // namespace

BOOST_AUTO_TEST_SUITE(forward)

BOOST_DATA_TEST_CASE(matches_the_reference, boost::unit_test::data::make(all_cases()), test_case) {
  Stages stages(test_case);
  stages.run_forward();

  const Array query = stages.query.read(), key = stages.key.read(), value = stages.value.read();
  const DType dtype = test_case.dtype;
  const ReferenceForward truth = Reference<double>(stages.problem, query, key, value).forward();
  const auto check = [&](const char* name, DType of, const Array& actual, const Array& expected,
                         const Array& plain) {
    const std::string fault = compare(name, of, actual, expected, plain);
    BOOST_CHECK_MESSAGE(fault.empty(), fault);
  };
  if (dtype == DType::kFloat64) {
    check("out", dtype, stages.out.read(), truth.out, truth.out);
    check("lse", dtype, stages.lse.read(), truth.lse, truth.lse);
  } else {
    const auto rounded = [dtype](float x) { return static_cast<float>(round_to(dtype, x)); };
    const Array plain_out =
        Reference<float>(stages.problem, query, key, value, rounded).forward().out;
    const Array plain_lse = Reference<float>(stages.problem, query, key, value).forward().lse;
    check("out", dtype, stages.out.read(), truth.out, plain_out);
    check("lse", DType::kFloat32, stages.lse.read(), truth.lse, plain_lse);
  }
  check_stats(stages, truth);
}

BOOST_DATA_TEST_CASE(recording_changes_nothing_else, boost::unit_test::data::make(all_cases()),
                     test_case) {
  Stages with(test_case), without(test_case);
  with.run_forward(true);
  without.run_forward(false);
  BOOST_TEST(same_bytes(with.out, without.out));
  BOOST_TEST(same_bytes(with.lse, without.lse));
}

BOOST_DATA_TEST_CASE(lse_may_be_left_out,
                     boost::unit_test::data::make(all_cases()) *
                         boost::unit_test::data::make({false, true}),
                     test_case, record) {
  Stages with(test_case), without(test_case);
  with.run_forward(record);
  const bool records = record && !without.tile_stats.empty();
  ForwardArgs args = without.forward_args(records);
  args.lse = nullptr;
  const Workspace workspace(forward_workspace_bytes(without.problem, records, 2), {});
  backlite::forward(without.problem, args, workspace.execution());
  workspace.check();
  BOOST_TEST(without.out.gaps_are_untouched());
  BOOST_TEST(same_bytes(with.out, without.out));
  if (records) BOOST_TEST(with.tile_stats == without.tile_stats);
}

// The sum over a row of tiles is 1, or 0 if no row of the tile sees a key.
BOOST_AUTO_TEST_CASE(statistics_of_a_row_of_tiles_add_up) {
  Stages stages({.query_length = 400, .key_length = 190, .causal = true});
  stages.run_forward();
  const TileMap tiles(stages.problem, false);
  for (int64_t h = 0; h < tiles.heads; ++h) {
    for (int64_t m = 0; m < tiles.query_tiles; ++m) {
      double sum = 0.0;
      for (int64_t n = 0; n < tiles.key_tiles; ++n) {
        sum += stages.tile_stats[tiles.index(0, h, m, n)];
      }
      // Rows 0 to 209 see no key; tile 3 ends at row 255.
      BOOST_TEST(std::abs(sum - (m < 3 ? 0.0 : 1.0)) < 1e-5, "query tile " << m << ": " << sum);
    }
  }
}

// A NaN must reach whoever looks: neither lost in an exponential nor taken for a row without keys.
BOOST_AUTO_TEST_CASE(nan_shows_in_every_row_that_it_enters) {
  constexpr int64_t kRow = 70;
  for (const DType dtype : {DType::kFloat32, DType::kFloat64, DType::kBFloat16}) {
    const Case c = {.dtype = dtype, .heads = 1, .key_heads = 1, .causal = true};
    const auto run_with_nan_in = [&](Strided Stages::* tensor) {
      Stages stages(c);
      Array numbers = (stages.*tensor).read();
      numbers.row(0, kRow, 0)[3] = NAN;
      (stages.*tensor).fill(numbers);
      stages.run_forward();
      return std::pair(stages.out.read(), stages.lse.read());
    };
    const auto [out_q, lse_q] = run_with_nan_in(&Stages::query);
    const auto [out_k, lse_k] = run_with_nan_in(&Stages::key);
    const auto [out_v, lse_v] = run_with_nan_in(&Stages::value);
    for (int64_t i = 0; i < c.query_length; ++i) {
      BOOST_TEST_CONTEXT(info(dtype).name << ", row " << i) {
        BOOST_TEST(std::isnan(out_q.row(0, i, 0)[0]) == (i == kRow));
        BOOST_TEST(std::isnan(lse_q.values[i]) == (i == kRow));
        BOOST_TEST(std::isnan(out_k.row(0, i, 0)[0]) == (i >= kRow));
        BOOST_TEST(std::isnan(lse_k.values[i]) == (i >= kRow));
        // 0 * NaN is NaN, so rows of the same tile that only mask the key may show it too.
        if (i >= kRow) BOOST_TEST(std::isnan(out_v.row(0, i, 0)[3]));
        BOOST_TEST(std::isfinite(lse_v.values[i]));
      }
    }
  }
}

// A tile that holds a NaN is not negligible.
BOOST_AUTO_TEST_CASE(nan_shows_in_the_statistics) {
  Stages stages({.heads = 1, .key_heads = 1, .query_length = 64, .key_length = 300});
  Array query = stages.query.read();
  query.row(0, 5, 0)[0] = NAN;
  stages.query.fill(query);
  stages.run_forward();
  for (const float p : stages.tile_stats) BOOST_TEST(std::isnan(p));
}

// Tensors without elements may have no memory.
BOOST_AUTO_TEST_CASE(empty_tensors_may_be_null) {
  for (const auto& [query_length, key_length, batch] :
       {std::array<int64_t, 3>{0, 65, 1}, {65, 0, 1}, {0, 0, 1}, {65, 65, 0}}) {
    Stages stages({.batch = batch, .query_length = query_length, .key_length = key_length});
    ForwardArgs args = stages.forward_args(false);
    const bool no_query = batch * query_length == 0, no_key = batch * key_length == 0;
    if (no_query) args.query.data = args.out.data = args.lse = nullptr;
    if (no_key) args.key.data = args.value.data = nullptr;
    const Workspace workspace(forward_workspace_bytes(stages.problem, false, 2), {});
    BOOST_CHECK_NO_THROW(backlite::forward(stages.problem, args, workspace.execution()));
    if (!no_query) {
      for (const double x : stages.out.read().values) BOOST_REQUIRE_EQUAL(x, 0.0);
      for (const double x : stages.lse.read().values) BOOST_REQUIRE_EQUAL(x, -INFINITY);
    }
  }
}

BOOST_AUTO_TEST_SUITE_END()
