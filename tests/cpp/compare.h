// A comparison that explains itself. An array passes if its error against the truth is at most
// twice that of plain code in the same dtype: the L2 norm of all errors, and the largest of them.
// The floor is the dtype's eps relative to the truth (1e-10 for float64, where no plain code is
// better), and what rounding leaves where terms of order one, as in these tests, cancel to nothing.
#pragma once

#include <algorithm>
#include <cmath>
#include <sstream>
#include <string>

#include "tensors.h"

namespace backlite::test {

struct Error {
  double l2 = 0.0;
  double largest = 0.0;
  size_t worst = 0;          // index of the largest error
  bool same_special = true;  // infinities and NaN are where the truth has them
};

inline Error error_of(const Array& actual, const Array& truth) {
  Error error;
  double squares = 0.0;
  for (size_t i = 0; i < truth.values.size(); ++i) {
    const double a = actual.values[i], t = truth.values[i];
    if (!std::isfinite(a) || !std::isfinite(t)) {
      if (!(a == t) && error.same_special) {
        error.same_special = false;
        error.worst = i;
      }
      continue;
    }
    const double difference = std::abs(a - t);
    if (difference > error.largest && error.same_special) error.worst = i;
    error.largest = std::max(error.largest, difference);
    squares += difference * difference;
  }
  error.l2 = std::sqrt(squares);
  return error;
}

// Empty if `actual` passes, otherwise why not.
inline std::string compare(const std::string& name, DType dtype, const Array& actual,
                           const Array& truth, const Array& plain) {
  const bool is_double = dtype == DType::kFloat64;
  const double floor = is_double ? 1e-10 : info(dtype).eps();
  const double least = is_double ? 1e-12 : info(DType::kFloat32).eps();
  double truth_largest = 0.0, truth_squares = 0.0;
  for (const double t : truth.values) {
    if (!std::isfinite(t)) continue;
    truth_largest = std::max(truth_largest, std::abs(t));
    truth_squares += t * t;
  }
  const Error error = error_of(actual, truth), plain_error = error_of(plain, truth);
  const double l2_bound = std::max({2 * plain_error.l2, floor * std::sqrt(truth_squares),
                                    least * std::sqrt(static_cast<double>(truth.values.size()))});
  const double largest_bound = std::max({2 * plain_error.largest, floor * truth_largest, least});
  if (error.same_special && error.l2 <= l2_bound && error.largest <= largest_bound) return "";

  const auto [batch, length, heads, head_dim] = truth.shape;
  const auto i = static_cast<int64_t>(error.worst);
  std::ostringstream text;
  text << name << ": L2 error " << error.l2 << " (bound " << l2_bound << "), largest error "
       << error.largest << " (bound " << largest_bound << "); "
       << (error.same_special ? "worst" : "infinity or NaN out of place") << " at ["
       << i / head_dim / heads / length << ", " << i / head_dim / heads % length << ", "
       << i / head_dim % heads << ", " << i % head_dim << "]: " << actual.values[error.worst]
       << ", the truth is " << truth.values[error.worst];
  return text.str();
}

}  // namespace backlite::test
