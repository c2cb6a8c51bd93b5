// Tensors of a test: numbers in double, and their image in memory in a dtype and a layout.
//
// Memory is filled with bytes of 0xFF, which read as NaN in every dtype, before anything is
// written. An input that is read between its rows, or an output that is not written, shows as NaN;
// an output that is written between its rows shows in gaps_are_untouched().
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <new>
#include <random>
#include <stdexcept>
#include <utility>
#include <vector>

#include "backlite/backlite.h"

namespace backlite::test {

// ---- dtypes -------------------------------------------------------------------------------------

struct DTypeInfo {
  const char* name;
  int bytes;
  int exponent_bits;
  int mantissa_bits;

  int bias() const { return (1 << (exponent_bits - 1)) - 1; }
  double eps() const { return std::ldexp(1.0, -mantissa_bits); }
};

inline DTypeInfo info(DType dtype) {
  switch (dtype) {
    case DType::kFloat16: return {"float16", 2, 5, 10};
    case DType::kBFloat16: return {"bfloat16", 2, 8, 7};
    case DType::kFloat32: return {"float32", 4, 8, 23};
    case DType::kFloat64: return {"float64", 8, 11, 52};
  }
  throw std::logic_error("unknown dtype");
}

inline DType lse_dtype(DType dtype) {
  return dtype == DType::kFloat64 ? DType::kFloat64 : DType::kFloat32;
}

// The nearest number of the dtype, ties to even; infinity past its largest.
inline double round_to(DType dtype, double x) {
  if (dtype == DType::kFloat64) return x;
  if (dtype == DType::kFloat32) return static_cast<float>(x);
  if (!std::isfinite(x) || x == 0.0) return x;
  const DTypeInfo type = info(dtype);
  const int exponent = std::max(std::ilogb(x), 1 - type.bias());
  const double step = std::ldexp(1.0, exponent - type.mantissa_bits);
  const double rounded = std::nearbyint(x / step) * step;
  const double limit = std::ldexp(2.0, type.bias());
  return std::abs(rounded) >= limit ? std::copysign(INFINITY, x) : rounded;
}

inline uint16_t encode16(DType dtype, double x) {
  const DTypeInfo type = info(dtype);
  const auto sign = static_cast<uint16_t>(std::signbit(x) ? 0x8000 : 0);
  const auto infinity =
      static_cast<uint16_t>(((1 << type.exponent_bits) - 1) << type.mantissa_bits);
  if (std::isnan(x)) return static_cast<uint16_t>(sign | infinity | 1);
  const double value = std::abs(round_to(dtype, x));
  if (std::isinf(value)) return static_cast<uint16_t>(sign | infinity);
  const int lowest = 1 - type.bias();
  const int exponent = value == 0.0 ? lowest : std::max(std::ilogb(value), lowest);
  // Counted in steps of the last bit, a normal number brings its implicit leading one, which adds
  // one to the exponent field; a subnormal number does not.
  const auto steps = static_cast<int>(std::ldexp(value, type.mantissa_bits - exponent));
  return static_cast<uint16_t>(sign | (((exponent - lowest) << type.mantissa_bits) + steps));
}

inline double decode16(DType dtype, uint16_t bits) {
  const DTypeInfo type = info(dtype);
  const int field = (bits & 0x7FFF) >> type.mantissa_bits;
  const int mantissa = bits & ((1 << type.mantissa_bits) - 1);
  const double sign = bits & 0x8000 ? -1.0 : 1.0;
  if (field == (1 << type.exponent_bits) - 1) {
    return mantissa == 0 ? sign * INFINITY : std::numeric_limits<double>::quiet_NaN();
  }
  const int implicit_one = field == 0 ? 0 : 1 << type.mantissa_bits;
  const int exponent = std::max(field, 1) - type.bias();
  return sign * std::ldexp(implicit_one + mantissa, exponent - type.mantissa_bits);
}

inline void write_element(DType dtype, std::byte* at, double x) {
  const auto copy = [&](auto value) { std::memcpy(at, &value, sizeof(value)); };
  switch (dtype) {
    case DType::kFloat16:
    case DType::kBFloat16: return copy(encode16(dtype, x));
    case DType::kFloat32: return copy(static_cast<float>(x));
    case DType::kFloat64: return copy(x);
  }
}

inline double read_element(DType dtype, const std::byte* at) {
  const auto value_at = [&](auto value) {
    std::memcpy(&value, at, sizeof(value));
    return value;
  };
  switch (dtype) {
    case DType::kFloat16:
    case DType::kBFloat16: return decode16(dtype, value_at(uint16_t{}));
    case DType::kFloat32: return value_at(float{});
    case DType::kFloat64: return value_at(double{});
  }
  throw std::logic_error("unknown dtype");
}

// ---- numbers ------------------------------------------------------------------------------------

struct Shape {  // of a (batch, length, heads, head_dim) tensor
  int64_t batch = 0;
  int64_t length = 0;
  int64_t heads = 0;
  int64_t head_dim = 0;

  int64_t size() const { return batch * length * heads * head_dim; }
};

struct Array {
  Shape shape;
  std::vector<double> values;

  explicit Array(Shape s) : shape(s), values(static_cast<size_t>(s.size())) {}

  // The head_dim numbers of one row of one head.
  double* row(int64_t b, int64_t i, int64_t h) {
    return values.data() + ((b * shape.length + i) * shape.heads + h) * shape.head_dim;
  }
  const double* row(int64_t b, int64_t i, int64_t h) const {
    return const_cast<Array*>(this)->row(b, i, h);
  }
};

inline Array random_array(Shape shape, uint64_t seed, double magnitude = 1.0) {
  Array array(shape);
  std::mt19937_64 generator(seed);
  std::normal_distribution<double> normal(0.0, magnitude);
  for (double& value : array.values) value = normal(generator);
  return array;
}

inline Shape query_shape(const Problem& p) {
  return {p.batch, p.query_length, p.num_query_heads, p.head_dim};
}

inline Shape key_shape(const Problem& p) {
  return {p.batch, p.key_length, p.num_key_heads, p.head_dim};
}

// ---- memory -------------------------------------------------------------------------------------

enum class Layout {
  kContiguous,  // (batch, length, heads, head_dim)
  kHeadsFirst,  // (batch, heads, length, head_dim)
  kPacked,      // the middle third of a (batch, length, 3, heads, head_dim) tensor
  kOddGaps,     // gaps of odd sizes everywhere: no row starts on an aligned address
  kReversed,    // rows in falling order: a negative length stride
  kBroadcast,   // inputs only: one row for all batches, rows and heads (all strides 0)
};

inline const char* name_of(Layout layout) {
  constexpr const char* kNames[] = {"contiguous", "heads_first", "packed",
                                    "odd_gaps",   "reversed",    "broadcast"};
  return kNames[static_cast<int>(layout)];
}

// A byte buffer at a 64-byte boundary, full of `fill`. Bytes past the end are watched by guard
// bytes, or by AddressSanitizer, which then sees reads too.
class Bytes {
 public:
  static constexpr auto kPoison = std::byte{0xFF};
#if defined(__SANITIZE_ADDRESS__)
  static constexpr size_t kGuardBytes = 0;
#else
  static constexpr size_t kGuardBytes = 256;
#endif

  explicit Bytes(size_t size, std::byte fill = kPoison)
      : size_(size),
        data_(static_cast<std::byte*>(::operator new(size + kGuardBytes, kAlignment))) {
    std::fill_n(data_, size, fill);
    std::fill_n(data_ + size, kGuardBytes, kPoison);
  }
  Bytes(Bytes&& other) noexcept : size_(other.size_), data_(std::exchange(other.data_, nullptr)) {}
  Bytes& operator=(Bytes&& other) noexcept {
    std::swap(size_, other.size_);
    std::swap(data_, other.data_);
    return *this;
  }
  ~Bytes() { ::operator delete(data_, kAlignment); }

  std::byte* data() { return data_; }
  const std::byte* data() const { return data_; }
  size_t size() const { return size_; }
  bool guard_is_untouched() const {
    return std::all_of(data_ + size_, data_ + size_ + kGuardBytes,
                       [](std::byte b) { return b == kPoison; });
  }

 private:
  static constexpr std::align_val_t kAlignment{64};
  size_t size_;
  std::byte* data_;
};

// A tensor in memory.
class Strided {
 public:
  Strided(DType dtype, Shape shape, Layout layout)
      : dtype_(dtype), shape_(shape), bytes_(place(layout) * info(dtype).bytes) {}

  Strided(DType dtype, const Array& numbers, Layout layout)
      : Strided(dtype, numbers.shape, layout) {
    fill(numbers);
  }

  void fill(const Array& numbers) {
    for_each_row([&](int64_t b, int64_t i, int64_t h) {
      for (int64_t d = 0; d < shape_.head_dim; ++d) {
        write_element(dtype_, at(b, i, h, d), numbers.row(b, i, h)[d]);
      }
    });
  }

  // What the memory holds: rounded to the dtype.
  Array read() const {
    Array numbers(shape_);
    for_each_row([&](int64_t b, int64_t i, int64_t h) {
      for (int64_t d = 0; d < shape_.head_dim; ++d) {
        numbers.row(b, i, h)[d] = read_element(dtype_, const_cast<Strided*>(this)->at(b, i, h, d));
      }
    });
    return numbers;
  }

  ConstTensor input() const { return {origin(), batch_stride_, length_stride_, head_stride_}; }
  Tensor output() {
    return {const_cast<void*>(origin()), batch_stride_, length_stride_, head_stride_};
  }
  const Bytes& bytes() const { return bytes_; }

  bool gaps_are_untouched() const {
    std::vector<bool> is_gap(bytes_.size(), true);
    const int64_t row_bytes = shape_.head_dim * info(dtype_).bytes;
    for_each_row([&](int64_t b, int64_t i, int64_t h) {
      const int64_t begin = const_cast<Strided*>(this)->at(b, i, h, 0) - bytes_.data();
      std::fill_n(is_gap.begin() + begin, row_bytes, false);
    });
    for (size_t i = 0; i < bytes_.size(); ++i) {
      if (is_gap[i] && bytes_.data()[i] != Bytes::kPoison) return false;
    }
    return bytes_.guard_is_untouched();
  }

 private:
  // Sets the strides and where the first row starts; returns the number of elements to allocate.
  size_t place(Layout layout) {
    const auto [batch, length, heads, head_dim] = shape_;
    const auto strides = [&](int64_t b, int64_t i, int64_t h) {
      batch_stride_ = b, length_stride_ = i, head_stride_ = h;
    };
    switch (layout) {
      case Layout::kContiguous:
        strides(length * heads * head_dim, heads * head_dim, head_dim);
        break;
      case Layout::kHeadsFirst:
        strides(heads * length * head_dim, head_dim, length * head_dim);
        break;
      case Layout::kPacked:
        strides(length * 3 * heads * head_dim, 3 * heads * head_dim, head_dim);
        first_ = heads * head_dim;
        break;
      case Layout::kOddGaps:
        head_stride_ = head_dim + 1;
        length_stride_ = heads * head_stride_ + 3;
        batch_stride_ = length * length_stride_ + 5;
        first_ = 1;
        break;
      case Layout::kReversed:
        strides(length * heads * head_dim, -heads * head_dim, head_dim);
        first_ = std::max<int64_t>(length - 1, 0) * heads * head_dim;
        break;
      case Layout::kBroadcast: strides(0, 0, 0); break;
    }
    // A few elements after the last row, so that packed and gapped tensors end in a gap.
    int64_t last = first_ + (layout == Layout::kReversed ? 0 : (length - 1) * length_stride_);
    last += (batch - 1) * batch_stride_ + (heads - 1) * head_stride_ + head_dim;
    if (layout == Layout::kPacked) last += heads * head_dim;
    return static_cast<size_t>(shape_.size() == 0 ? 0 : last);
  }

  template <typename Visit>
  void for_each_row(const Visit& visit) const {
    for (int64_t b = 0; b < shape_.batch; ++b) {
      for (int64_t i = 0; i < shape_.length; ++i) {
        for (int64_t h = 0; h < shape_.heads; ++h) visit(b, i, h);
      }
    }
  }

  std::byte* at(int64_t b, int64_t i, int64_t h, int64_t d) {
    const int64_t element = first_ + b * batch_stride_ + i * length_stride_ + h * head_stride_ + d;
    return bytes_.data() + element * info(dtype_).bytes;
  }

  const void* origin() const { return bytes_.data() + first_ * info(dtype_).bytes; }

  DType dtype_;
  Shape shape_;
  int64_t first_ = 0;
  int64_t batch_stride_ = 0;
  int64_t length_stride_ = 0;
  int64_t head_stride_ = 0;
  Bytes bytes_;
};

inline bool same_bytes(const Strided& a, const Strided& b) {
  return std::memcmp(a.bytes().data(), b.bytes().data(), a.bytes().size()) == 0;
}

}  // namespace backlite::test
