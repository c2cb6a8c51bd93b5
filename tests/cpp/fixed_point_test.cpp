// Probabilities in fixed point.
#include "common/fixed_point.h"

#include <boost/test/unit_test.hpp>
#include <cmath>
#include <limits>
#include <random>

using namespace backlite;

BOOST_AUTO_TEST_SUITE(fixed_point)

BOOST_AUTO_TEST_CASE(is_the_floor) {
  constexpr double kUnit = 1.0 / static_cast<double>(kProbOne);
  BOOST_TEST(prob_to_fixed(0.0) == 0);
  BOOST_TEST(prob_to_fixed(0.5) == kProbOne / 2);
  BOOST_TEST(prob_to_fixed(kUnit) == 1);
  BOOST_TEST(prob_to_fixed(std::nextafter(kUnit, 0.0)) == 0);
  BOOST_TEST(prob_to_fixed(1.75 * kUnit) == 1);
  BOOST_TEST(prob_to_fixed(std::nextafter(1.0, 0.0)) == kProbOne - 1);
  BOOST_TEST(prob_to_fixed(std::numeric_limits<double>::denorm_min()) == 0);
}

BOOST_AUTO_TEST_CASE(is_clamped_and_nan_counts_as_one) {
  constexpr double kInf = std::numeric_limits<double>::infinity();
  for (const double high : {1.0, 1.5, 1e300, kInf, std::numeric_limits<double>::quiet_NaN()}) {
    BOOST_TEST(prob_to_fixed(high) == kProbOne);
  }
  for (const double low : {-0.0, -1e-300, -1.0, -kInf}) BOOST_TEST(prob_to_fixed(low) == 0);
}

BOOST_AUTO_TEST_CASE(random_floats_against_long_double) {
  std::mt19937_64 generator(1);
  std::uniform_real_distribution<float> exponent(-50.0f, 0.0f);
  for (int i = 0; i < 100000; ++i) {
    const float p = std::exp2(exponent(generator));
    const auto expected =
        static_cast<int64_t>(std::floor(static_cast<long double>(p) * 1099511627776.0L));
    BOOST_REQUIRE_EQUAL(prob_to_fixed(p), expected);
  }
}

BOOST_AUTO_TEST_CASE(negl_prob_takes_zero_to_below_one) {
  BOOST_TEST(negl_prob_to_fixed(0.0) == 0);
  BOOST_TEST(negl_prob_to_fixed(0.05) == static_cast<int64_t>(0.05L * 1099511627776.0L));
  BOOST_TEST(negl_prob_to_fixed(0.25) == kProbOne / 4);
  BOOST_TEST(negl_prob_to_fixed(1e-13) == 0);
  BOOST_TEST(negl_prob_to_fixed(std::nextafter(1.0, 0.0)) == kProbOne - 1);
}

BOOST_AUTO_TEST_SUITE_END()
