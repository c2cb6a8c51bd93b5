// Backward, dense and sparse, against the reference.
#include <boost/test/data/test_case.hpp>
#include <boost/test/unit_test.hpp>
#include <random>

#include "cases.h"
#include "compare.h"
#include "stages.h"

using namespace backlite;
using namespace backlite::test;

namespace {

// Fails unless the gradients in `stages` are those of the live tiles.
void check_gradients(const Stages& stages, const TileMap& tiles, bool with_grad_lse) {
  const Problem& p = stages.problem;
  const Array query = stages.query.read(), key = stages.key.read(), value = stages.value.read();
  const Array grad_out = stages.grad_out.read(), grad_lse_values = stages.grad_lse.read();
  const Array* const grad_lse = with_grad_lse ? &grad_lse_values : nullptr;

  const Reference<double> reference(p, query, key, value);
  const ReferenceGradients truth =
      reference.backward(reference.forward().out, grad_out, grad_lse, tiles);
  const ReferenceGradients plain = [&] {
    if (p.dtype == DType::kFloat64) return truth;
    const Reference<float> rounded(
        p, query, key, value, [&](float x) { return static_cast<float>(round_to(p.dtype, x)); });
    return rounded.backward(rounded.forward().out, grad_out, grad_lse, tiles);
  }();

  const auto check = [&](const char* name, const Strided& actual, const Array& expected,
                         const Array& yardstick) {
    const std::string fault = compare(name, p.dtype, actual.read(), expected, yardstick);
    BOOST_CHECK_MESSAGE(fault.empty(), fault);
  };
  check("grad_query", stages.grad_query, truth.query, plain.query);
  check("grad_key", stages.grad_key, truth.key, plain.key);
  check("grad_value", stages.grad_value, truth.value, plain.value);
}

void check_all(const Array& array, double expected, const char* name) {
  for (const double x : array.values) BOOST_REQUIRE_MESSAGE(x == expected, name << " is " << x);
}

}  // namespace

BOOST_AUTO_TEST_SUITE(backward)

BOOST_DATA_TEST_CASE(dense_matches_the_reference, boost::unit_test::data::make(all_cases()),
                     test_case) {
  Stages stages(test_case);
  stages.run_forward(false);
  stages.run_backward(false, false);
  check_gradients(stages, TileMap(stages.problem, true), false);
}

// Every bit is random: also those of tiles outside the mask and past the last query tile, which
// mean nothing. A gradient flows into the LSE.
BOOST_DATA_TEST_CASE(sparse_matches_the_reference, boost::unit_test::data::make(all_cases()),
                     test_case) {
  Stages stages(test_case);
  std::mt19937 generator(7);
  for (int32_t& word : stages.tile_bits) word = static_cast<int32_t>(generator());
  stages.run_forward(false);
  stages.run_backward(true, true);
  check_gradients(stages, stages.tiles_from_bits(), true);
}

BOOST_AUTO_TEST_CASE(all_stages_in_a_row_match_the_reference) {
  Stages stages({.heads = 4,
                 .key_heads = 2,
                 .query_length = 500,
                 .key_length = 600,
                 .head_dim = 16,
                 .causal = true,
                 .magnitude = 3.0});
  stages.run_forward();
  stages.run_select({negl_prob_to_fixed(0.15)});
  stages.run_backward(true, true);
  const TileMap tiles = stages.tiles_from_bits();
  const auto num_live = std::count(tiles.live.begin(), tiles.live.end(), true);
  BOOST_TEST_MESSAGE(num_live << " of " << tiles.live.size() << " tiles are live");
  check_gradients(stages, tiles, true);
}

BOOST_DATA_TEST_CASE(all_tiles_live_is_the_dense_backward,
                     boost::unit_test::data::make(all_cases()), test_case) {
  Stages dense(test_case), sparse(test_case);
  for (Stages* stages : {&dense, &sparse}) {
    stages->run_forward();
    stages->run_select({0});
  }
  dense.run_backward(false, true);
  sparse.run_backward(true, true);
  BOOST_TEST(same_bytes(dense.grad_query, sparse.grad_query));
  BOOST_TEST(same_bytes(dense.grad_key, sparse.grad_key));
  BOOST_TEST(same_bytes(dense.grad_value, sparse.grad_value));
}

BOOST_AUTO_TEST_CASE(no_tile_live_gives_zero) {
  Stages stages({.dtype = DType::kBFloat16, .heads = 4, .key_heads = 2});
  stages.run_forward();
  std::fill(stages.tile_bits.begin(), stages.tile_bits.end(), 0);
  stages.run_backward(true, true);
  check_all(stages.grad_query.read(), 0.0, "grad_query");
  check_all(stages.grad_key.read(), 0.0, "grad_key");
  check_all(stages.grad_value.read(), 0.0, "grad_value");
}

// A skipped tile enters no product: whatever stands in its rows and columns, gradients stay the
// same.
BOOST_AUTO_TEST_CASE(skipped_tiles_are_not_touched) {
  constexpr int64_t kDeadKeyTile = 1, kDeadQueryTile = 2;
  const Case c = {.heads = 4, .key_heads = 2, .query_length = 250, .key_length = 380};
  Stages clean(c), poisoned(c);
  for (Stages* stages : {&clean, &poisoned}) {
    stages->run_forward(false);
    // A column of four query tiles is one word.
    const int64_t key_tiles = tiles_of(c.key_length, kKeyTile);
    for (size_t i = 0; i < stages->tile_bits.size(); ++i) {
      const bool is_dead = static_cast<int64_t>(i) % key_tiles == kDeadKeyTile;
      stages->tile_bits[i] = is_dead ? 0 : 0b1111 & ~(1 << kDeadQueryTile);
    }
  }
  const auto poison = [](Strided& tensor, int64_t begin, int64_t end) {
    Array numbers = tensor.read();
    for (int64_t i = begin; i < end; ++i) {
      std::fill_n(numbers.row(0, i, 0), numbers.shape.heads * numbers.shape.head_dim, NAN);
    }
    tensor.fill(numbers);
  };
  for (Strided* tensor : {&poisoned.key, &poisoned.value}) {
    poison(*tensor, kDeadKeyTile * kKeyTile, (kDeadKeyTile + 1) * kKeyTile);
  }
  for (Strided* tensor : {&poisoned.query, &poisoned.grad_out, &poisoned.out}) {
    poison(*tensor, kDeadQueryTile * kQueryTile, (kDeadQueryTile + 1) * kQueryTile);
  }
  clean.run_backward(true, false);
  poisoned.run_backward(true, false);
  BOOST_TEST(same_bytes(clean.grad_query, poisoned.grad_query));
  BOOST_TEST(same_bytes(clean.grad_key, poisoned.grad_key));
  BOOST_TEST(same_bytes(clean.grad_value, poisoned.grad_value));
}

// A NaN in any input reaches the gradients that it enters.
BOOST_AUTO_TEST_CASE(nan_reaches_the_gradients) {
  constexpr int64_t kRow = 70;
  for (const DType dtype : {DType::kFloat32, DType::kFloat64, DType::kBFloat16}) {
    for (const auto tensor : {&Stages::query, &Stages::key, &Stages::value, &Stages::grad_out}) {
      Stages stages({.dtype = dtype, .heads = 1, .key_heads = 1});
      Array numbers = (stages.*tensor).read();
      numbers.row(0, kRow, 0)[3] = NAN;
      (stages.*tensor).fill(numbers);
      stages.run_forward(false);
      stages.run_backward(false, false);
      // The softmax of row kRow sees every key, and every row sees key kRow.
      const bool of_a_query = tensor == &Stages::query || tensor == &Stages::grad_out;
      const Array grad_query = stages.grad_query.read(), grad_key = stages.grad_key.read();
      const Array grad_value = stages.grad_value.read();
      BOOST_TEST_CONTEXT(info(dtype).name << (of_a_query ? ", in a query row" : ", in a key row")) {
        BOOST_TEST(std::isnan(grad_query.row(0, kRow, 0)[3]));
        BOOST_TEST(std::isnan(grad_query.row(0, 0, 0)[3]) == !of_a_query);
        BOOST_TEST(std::isnan(grad_key.row(0, kRow, 0)[3]));
        BOOST_TEST(std::isnan(grad_value.row(0, kRow, 0)[3]) == (tensor != &Stages::value));
      }
    }
  }
}

// The square of an LSE of -inf has an infinite gradient; it goes nowhere.
BOOST_AUTO_TEST_CASE(rows_without_keys_have_no_gradient) {
  for (const double grad : {-HUGE_VAL, std::nan("")}) {
    Stages stages({.dtype = DType::kFloat64,
                   .heads = 1,
                   .key_heads = 1,
                   .query_length = 200,
                   .key_length = 90,
                   .causal = true});
    const int64_t num_empty = stages.problem.query_length - stages.problem.key_length;
    stages.run_forward(false);
    Array grad_lse = stages.grad_lse.read();
    std::fill_n(grad_lse.values.begin(), num_empty, grad);
    stages.grad_lse.fill(grad_lse);
    stages.run_backward(false, true);
    check_gradients(stages, TileMap(stages.problem, true), true);
    for (int64_t i = 0; i < num_empty; ++i) {
      BOOST_REQUIRE_EQUAL(stages.grad_query.read().row(0, i, 0)[0], 0.0);
    }
  }
}

// The gradient of a sum: one number for all of dO, with strides of 0.
BOOST_AUTO_TEST_CASE(expanded_grad_out) {
  Stages stages({.batch = 2, .query_length = 130});
  Array ones(query_shape(stages.problem));
  std::fill(ones.values.begin(), ones.values.end(), 1.0);
  stages.grad_out = Strided(DType::kFloat32, ones, Layout::kBroadcast);
  stages.run_forward(false);
  stages.run_backward(false, true);
  check_gradients(stages, TileMap(stages.problem, true), true);
}

BOOST_AUTO_TEST_CASE(empty_tensors_may_be_null) {
  for (const auto& [query_length, key_length, batch] :
       {std::array<int64_t, 3>{0, 65, 1}, {65, 0, 1}, {0, 0, 1}, {65, 65, 0}}) {
    Stages stages({.batch = batch, .query_length = query_length, .key_length = key_length});
    stages.run_forward(false);
    Bytes plan(schedule_bytes(stages.problem));
    backlite::schedule(stages.problem,
                       {.schedule = plan.data(), .schedule_bytes = schedule_bytes(stages.problem)},
                       {});
    BackwardArgs args = stages.backward_args(false, nullptr, plan.data());
    const bool no_query = batch * query_length == 0, no_key = batch * key_length == 0;
    if (no_query) {
      args.query.data = args.out.data = args.grad_out.data = args.lse = nullptr;
      args.grad_query.data = nullptr;
    }
    if (no_key) {
      args.key.data = args.value.data = nullptr;
      args.grad_key.data = args.grad_value.data = nullptr;
    }
    const Workspace workspace(backward_workspace_bytes(stages.problem, 2), {});
    BOOST_CHECK_NO_THROW(backlite::backward(stages.problem, args, workspace.execution()));
    if (!no_query) check_all(stages.grad_query.read(), 0.0, "grad_query");
    if (!no_key) check_all(stages.grad_key.read(), 0.0, "grad_key");
    if (!no_key) check_all(stages.grad_value.read(), 0.0, "grad_value");
  }
}

BOOST_AUTO_TEST_SUITE_END()
