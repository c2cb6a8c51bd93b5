// How outputs are written: in huge pages and past the caches, if they are large.
#pragma once

#include <emmintrin.h>
#include <sys/mman.h>

#include <array>
#include <cstdint>
#include <cstring>

#include "common/limits.h"
#include "common/mask.h"
#include "common/matrix.h"

namespace backlite::cpu {

// Bytes. An output of this size fills a core's second-level cache: nobody finds it there later.
inline constexpr int64_t kLargeOutput = int64_t{2} << 20;

// A (batch, length, heads, head_dim) tensor that receives whole rows.
template <typename Element>
class Output {
 public:
  using Compute = ComputeOf<Element>;

  Output(const Tensor& tensor, const Problem& problem, int64_t length, int64_t heads)
      : tensor_(tensor), head_dim_(problem.head_dim) {
    const std::array<int64_t, 3> last = {(problem.batch - 1) * tensor.batch_stride,
                                         (length - 1) * tensor.length_stride,
                                         (heads - 1) * tensor.head_stride};
    int64_t low = 0;
    int64_t high = head_dim_;
    for (const int64_t offset : last) (offset < 0 ? low : high) += offset;
    large_ = problem.batch > 0 && length > 0 &&
             (high - low) * static_cast<int64_t>(sizeof(Element)) >= kLargeOutput;
    if (large_) prefer_huge_pages(data() + low, data() + high);
  }

  // One row, converted; zeros if `row` is nullptr. fence() comes after the last one.
  void write(int64_t batch, int64_t head, int64_t index, const Compute* row) const {
    alignas(64) std::array<Element, kMaxHeadDim> converted;
    Eigen::Map<Eigen::Array<Element, Eigen::Dynamic, 1>> elements(converted.data(), head_dim_);
    if (row == nullptr) {
      elements.setZero();
    } else {
      elements = Eigen::Map<const Eigen::Array<Compute, Eigen::Dynamic, 1>>(row, head_dim_)
                     .template cast<Element>();
    }
    Element* const to = data() + batch * tensor_.batch_stride + head * tensor_.head_stride +
                        index * tensor_.length_stride;
    const size_t bytes = static_cast<size_t>(head_dim_) * sizeof(Element);
    if (large_ && reinterpret_cast<uintptr_t>(to) % kLine == 0 && bytes % kLine == 0) {
      stream(converted.data(), to, bytes);
    } else {
      std::memcpy(to, converted.data(), bytes);
    }
  }

  // The same for rows that are `stride` apart in scratch.
  void write_rows(int64_t batch, int64_t head, Range rows, const Compute* first,
                  int64_t stride) const {
    for (int64_t i = 0; i < rows.size(); ++i) {
      write(batch, head, rows.begin + i, first == nullptr ? nullptr : first + i * stride);
    }
    fence();
  }

  // Makes rows visible to other threads: what goes past the caches is not ordered by itself.
  static void fence() { _mm_sfence(); }

 private:
  static constexpr size_t kLine = 64;

  Element* data() const { return static_cast<Element*>(tensor_.data); }

  // Whole cache lines, past the caches: an ordinary store would first fetch each from memory. By
  // ordinary stores, writing dK and dV took a fifth of the backward at 2048 tokens and 5% live
  // tiles; like this it takes 7%.
  static void stream(const Element* from, Element* to, size_t bytes) {
    const auto* const source = reinterpret_cast<const __m128i*>(from);
    auto* const target = reinterpret_cast<__m128i*>(to);
    for (size_t i = 0; i < bytes / sizeof(__m128i); ++i) {
      _mm_stream_si128(target + i, _mm_load_si128(source + i));
    }
  }

  // Advice: where the system refuses it, or where the pages are there already, nothing changes. A
  // fresh page of 4 KiB costs 1.7 us, one of 2 MiB 210 us: a quarter as much for a byte.
  static void prefer_huge_pages(Element* first, Element* end) {
#if defined(MADV_HUGEPAGE)
    constexpr uintptr_t kPage = 4096;
    const uintptr_t begin = reinterpret_cast<uintptr_t>(first) / kPage * kPage;
    madvise(reinterpret_cast<void*>(begin), reinterpret_cast<uintptr_t>(end) - begin,
            MADV_HUGEPAGE);
#else
    (void)first, (void)end;
#endif
  }

  Tensor tensor_;
  int64_t head_dim_;
  bool large_;
};

}  // namespace backlite::cpu
