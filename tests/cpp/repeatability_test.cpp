// Bit by bit the same: whatever the number of threads, the contents of the workspace, the layout of
// the tensors, and who else is computing.
#include <boost/test/data/test_case.hpp>
#include <boost/test/unit_test.hpp>
#include <cstring>
#include <future>

#include "cases.h"
#include "stages.h"

using namespace backlite;
using namespace backlite::test;

namespace {

std::vector<Case> cases() {
  return {
      {.id = "few_heads",
       .heads = 1,
       .key_heads = 1,
       .query_length = 700,
       .key_length = 900,
       .causal = true},
      {.id = "groups",
       .batch = 2,
       .heads = 6,
       .key_heads = 2,
       .query_length = 330,
       .key_length = 270},
      {.id = "windows",
       .dtype = DType::kFloat64,
       .query_length = 300,
       .key_length = 500,
       .window_left = 100,
       .window_right = 20},
      {.id = "bfloat16",
       .dtype = DType::kBFloat16,
       .query_length = 450,
       .key_length = 450,
       .head_dim = 40,
       .causal = true},
      {.id = "float16",
       .dtype = DType::kFloat16,
       .heads = 8,
       .key_heads = 1,
       .query_length = 200,
       .key_length = 300,
       .head_dim = 64},
  };
}

// All results of one run, as bytes.
std::vector<std::byte> run_all(const Case& c, const RunOptions& options, bool sparse) {
  Stages stages(c);
  stages.run_forward(true, options);
  stages.run_select({negl_prob_to_fixed(0.1)}, options);
  stages.run_backward(sparse, true, options);
  std::vector<std::byte> results;
  const auto append = [&](const void* data, size_t bytes) {
    const auto* const begin = static_cast<const std::byte*>(data);
    results.insert(results.end(), begin, begin + bytes);
  };
  append(stages.tile_stats.data(), stages.tile_stats.size() * sizeof(float));
  append(stages.tile_bits.data(), stages.tile_bits.size() * sizeof(int32_t));
  for (const Strided* tensor :
       {&stages.out, &stages.lse, &stages.grad_query, &stages.grad_key, &stages.grad_value}) {
    const Array numbers = tensor->read();
    append(numbers.values.data(), numbers.values.size() * sizeof(double));
  }
  return results;
}

}  // namespace

BOOST_AUTO_TEST_SUITE(repeatability)

BOOST_DATA_TEST_CASE(number_of_threads, boost::unit_test::data::make(cases()), test_case) {
  for (const bool sparse : {false, true}) {
    const auto expected = run_all(test_case, {.num_threads = 1}, sparse);
    for (const int num_threads : {2, 3, 8, 40}) {
      BOOST_CHECK_MESSAGE(run_all(test_case, {.num_threads = num_threads}, sparse) == expected,
                          num_threads << " threads, sparse = " << sparse);
    }
  }
}

// A result that depends on what stood in the workspace comes from memory that nobody wrote.
BOOST_DATA_TEST_CASE(contents_of_the_workspace, boost::unit_test::data::make(all_cases()),
                     test_case) {
  const auto expected = run_all(test_case, {}, true);
  for (const auto fill : {std::byte{0x00}, std::byte{0x7F}, std::byte{0x3F}}) {
    BOOST_CHECK(run_all(test_case, {.workspace_fill = fill}, true) == expected);
  }
}

BOOST_DATA_TEST_CASE(layout, boost::unit_test::data::make(cases()), test_case) {
  const auto expected = run_all(test_case, {}, true);
  for (const Layout layout :
       {Layout::kHeadsFirst, Layout::kPacked, Layout::kOddGaps, Layout::kReversed}) {
    Case other = test_case;
    other.layout = layout;
    BOOST_CHECK_MESSAGE(run_all(other, {}, true) == expected, name_of(layout));
  }
}

BOOST_AUTO_TEST_CASE(calls_at_the_same_time) {
  const std::vector<Case> all = cases();
  for (const int num_threads : {1, 2}) {
    std::vector<std::vector<std::byte>> expected;
    for (const Case& c : all) expected.push_back(run_all(c, {.num_threads = num_threads}, true));
    std::vector<std::future<std::vector<std::byte>>> running;
    for (const Case& c : all) {
      running.push_back(
          std::async(std::launch::async, run_all, c, RunOptions{.num_threads = num_threads}, true));
    }
    for (size_t i = 0; i < all.size(); ++i) {
      BOOST_CHECK_MESSAGE(running[i].get() == expected[i],
                          all[i] << ", num_threads = " << num_threads);
    }
  }
}

BOOST_AUTO_TEST_SUITE_END()
