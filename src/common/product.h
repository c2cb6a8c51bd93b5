// The matrix product of all tiles:  C[n][m] (+)= sum over k of A[k][m] * B(k, n).
//
// m is the fast dimension of A and C; B is read one number at a time and broadcast, so it may be
// stored either way round. Each product of attention can be written like this with operands exactly
// as they lie, which leaves nothing to pack: a general library packs both operands at every call,
// and for a 64 x 128 tile that is a fifth of the time. One core of a 2.3 GHz Xeon with AVX-512,
// a tile in float: this 164-180 GFLOP/s, Eigen 3.4 112-124 (benchmarks/cpp/product.cpp).
#pragma once

#include <cstdint>

namespace backlite::cpu {

#if defined(__AVX512F__)
inline constexpr int kVectorBytes = 64;
inline constexpr int kProductColumns = 8;  // 8 x 2 sums and 2 of A in 32 registers
#elif defined(__AVX2__)
inline constexpr int kVectorBytes = 32;
inline constexpr int kProductColumns = 4;  // 4 x 2 sums and 2 of A in 16 registers
#else
inline constexpr int kVectorBytes = 16;
inline constexpr int kProductColumns = 4;
#endif

// Callers pad m and n to these, and align A and C to kVectorBytes (their data and, with strides
// that are multiples of kProductRowStep, every row). Padding of A and B is computed with, but only
// into padding of C, of which nothing is used.
inline constexpr int64_t kProductRowStep = 16;
inline constexpr int64_t kProductColumnStep = 8;

constexpr int64_t pad_rows(int64_t size) {
  return (size + kProductRowStep - 1) / kProductRowStep * kProductRowStep;
}
constexpr int64_t pad_columns(int64_t size) {
  return (size + kProductColumnStep - 1) / kProductColumnStep * kProductColumnStep;
}

template <typename T>
struct ProductA {  // [k][m]
  const T* data;
  int64_t stride;
};

template <typename T>
struct ProductB {  // B(k, n) = data[k * stride_k + n * stride_n]; one of the strides is 1
  const T* data;
  int64_t stride_k;
  int64_t stride_n;
};

template <typename T>
struct ProductC {  // [n][m]
  T* data;
  int64_t stride;
};

enum class Into { kStore, kAdd };

namespace product_detail {

template <typename T>
struct VectorOf {
  using Type [[gnu::vector_size(kVectorBytes), gnu::may_alias]] = T;
};

// kVectors vectors of m by kProductColumns of n: the sums stay in registers over all of k.
template <typename T, int kVectors, bool kUnitStrideK>
inline void block(ProductA<T> a, ProductB<T> b, ProductC<T> c, int64_t size_k, Into into) {
  using Vector = typename VectorOf<T>::Type;
  constexpr int kLanes = kVectorBytes / sizeof(T);
  Vector sum[kProductColumns][kVectors] = {};
  for (int64_t k = 0; k < size_k; ++k) {
    Vector a_k[kVectors];
#pragma GCC unroll 2
    for (int v = 0; v < kVectors; ++v) {
      a_k[v] = *reinterpret_cast<const Vector*>(a.data + k * a.stride + v * kLanes);
    }
#pragma GCC unroll 8
    for (int n = 0; n < kProductColumns; ++n) {
      const T b_kn = kUnitStrideK ? b.data[k + n * b.stride_n] : b.data[k * b.stride_k + n];
#pragma GCC unroll 2
      for (int v = 0; v < kVectors; ++v) sum[n][v] += a_k[v] * b_kn;
    }
  }
#pragma GCC unroll 8
  for (int n = 0; n < kProductColumns; ++n) {
#pragma GCC unroll 2
    for (int v = 0; v < kVectors; ++v) {
      auto* out = reinterpret_cast<Vector*>(c.data + n * c.stride + v * kLanes);
      *out = into == Into::kAdd ? *out + sum[n][v] : sum[n][v];
    }
  }
}

template <typename T, int kVectors, bool kUnitStrideK>
void panel(ProductA<T> a, ProductB<T> b, ProductC<T> c, int64_t m, int64_t size_n, int64_t size_k,
           Into into) {
  for (int64_t n = 0; n < size_n; n += kProductColumns) {
    block<T, kVectors, kUnitStrideK>(
        {a.data + m, a.stride},
        {b.data + n * (kUnitStrideK ? b.stride_n : 1), b.stride_k, b.stride_n},
        {c.data + n * c.stride + m, c.stride}, size_k, into);
  }
}

template <typename T, bool kUnitStrideK>
void all_panels(ProductA<T> a, ProductB<T> b, ProductC<T> c, int64_t size_m, int64_t size_n,
                int64_t size_k, Into into) {
  constexpr int kLanes = kVectorBytes / sizeof(T);
  static_assert(kProductRowStep % kLanes == 0 && kProductColumnStep % kProductColumns == 0,
                "padded sizes must be whole blocks");
  int64_t m = 0;
  for (; m + 2 * kLanes <= size_m; m += 2 * kLanes) {
    panel<T, 2, kUnitStrideK>(a, b, c, m, size_n, size_k, into);
  }
  for (; m < size_m; m += kLanes) panel<T, 1, kUnitStrideK>(a, b, c, m, size_n, size_k, into);
}

}  // namespace product_detail

// size_m and size_n are rounded up to kProductRowStep and kProductColumnStep; size_k is exact.
template <typename T>
void product(ProductA<T> a, ProductB<T> b, ProductC<T> c, int64_t size_m, int64_t size_n,
             int64_t size_k, Into into) {
  if (b.stride_k == 1) {
    product_detail::all_panels<T, true>(a, b, c, pad_rows(size_m), pad_columns(size_n), size_k,
                                        into);
  } else {
    product_detail::all_panels<T, false>(a, b, c, pad_rows(size_m), pad_columns(size_n), size_k,
                                         into);
  }
}

}  // namespace backlite::cpu
