// The reference and the tools of these tests, tested themselves.
#include <boost/test/unit_test.hpp>

#include "compare.h"
#include "reference.h"
#include "tensors.h"

using namespace backlite;
using namespace backlite::test;

BOOST_AUTO_TEST_SUITE(reference)

BOOST_AUTO_TEST_CASE(sixteen_bit_numbers_survive_a_round_trip) {
  for (const DType dtype : {DType::kFloat16, DType::kBFloat16}) {
    for (uint32_t bits = 0; bits < 0x10000; ++bits) {
      const double x = decode16(dtype, static_cast<uint16_t>(bits));
      if (std::isnan(x)) {
        BOOST_REQUIRE(std::isnan(decode16(dtype, encode16(dtype, x))));
      } else {
        BOOST_REQUIRE_EQUAL(encode16(dtype, x), bits);
      }
    }
  }
}

BOOST_AUTO_TEST_CASE(rounding_goes_to_the_nearest_and_to_even) {
  BOOST_TEST(round_to(DType::kFloat16, 1.0 + 0.5 / 1024) == 1.0);
  BOOST_TEST(round_to(DType::kFloat16, 1.0 + 1.5 / 1024) == 1.0 + 2.0 / 1024);
  BOOST_TEST(round_to(DType::kFloat16, 65519.0) == 65504.0);
  BOOST_TEST(round_to(DType::kFloat16, 65520.0) == INFINITY);
  BOOST_TEST(round_to(DType::kFloat16, std::ldexp(1.0, -25)) == 0.0);
  BOOST_TEST(round_to(DType::kFloat16, -std::ldexp(1.1, -25)) == -std::ldexp(1.0, -24));
  BOOST_TEST(round_to(DType::kBFloat16, 1.0 + 1.0 / 256) == 1.0);
  BOOST_TEST(round_to(DType::kBFloat16, 1.0 + 3.0 / 256) == 1.0 + 4.0 / 256);
}

BOOST_AUTO_TEST_CASE(comparison_fails_where_it_must) {
  Array truth({1, 2, 1, 2});
  truth.values = {1.0, -2.0, -INFINITY, 0.5};
  BOOST_TEST(compare("same", DType::kFloat32, truth, truth, truth) == "");
  Array wrong = truth;
  wrong.values[3] += 1e-6;
  BOOST_TEST(compare("off", DType::kFloat32, wrong, truth, truth) != "");
  BOOST_TEST(compare("no worse than plain code", DType::kFloat32, wrong, truth, wrong) == "");
  for (const double special : {static_cast<double>(NAN), static_cast<double>(INFINITY), 0.0}) {
    wrong = truth;
    wrong.values[2] = special;
    BOOST_TEST(compare("special", DType::kFloat32, wrong, truth, wrong) != "");
  }
}

// The gradients of sum(O * dO) + sum(LSE * dLSE) against central differences, at every input.
BOOST_AUTO_TEST_CASE(gradients_are_those_of_the_forward) {
  const Problem p = {.dtype = DType::kFloat64,
                     .batch = 2,
                     .num_query_heads = 4,
                     .num_key_heads = 2,
                     .query_length = 6,
                     .key_length = 5,
                     .head_dim = 8,
                     .scale = 0.4,
                     .causal = true,
                     .window_left = 2};
  Array query = random_array(query_shape(p), 1), key = random_array(key_shape(p), 2);
  Array value = random_array(key_shape(p), 3);
  const Array grad_out = random_array(query_shape(p), 4);
  const Array grad_lse = random_array({p.batch, p.num_query_heads, p.query_length, 1}, 5);
  const Reference<double> reference(p, query, key, value);

  const auto loss = [&] {
    const ReferenceForward result = reference.forward();
    double sum = 0.0;
    for (size_t i = 0; i < grad_out.values.size(); ++i) {
      sum += result.out.values[i] * grad_out.values[i];
    }
    for (size_t i = 0; i < grad_lse.values.size(); ++i) {
      if (std::isfinite(result.lse.values[i])) sum += result.lse.values[i] * grad_lse.values[i];
    }
    return sum;
  };
  const Array out = reference.forward().out;
  const ReferenceGradients grad = reference.backward(out, grad_out, &grad_lse, TileMap(p, true));
  const auto check = [&](const char* name, Array& input, const Array& gradient) {
    constexpr double kStep = 1e-5;
    for (size_t i = 0; i < input.values.size(); ++i) {
      const double saved = input.values[i];
      input.values[i] = saved + kStep;
      const double above = loss();
      input.values[i] = saved - kStep;
      const double below = loss();
      input.values[i] = saved;
      const double difference = (above - below) / (2 * kStep);
      BOOST_REQUIRE_MESSAGE(std::abs(difference - gradient.values[i]) < 1e-8,
                            name << "[" << i << "]: " << gradient.values[i]
                                 << ", the difference quotient is " << difference);
    }
  };
  check("query", query, grad.query);
  check("key", key, grad.key);
  check("value", value, grad.value);
}

BOOST_AUTO_TEST_SUITE_END()
