// Cuts a caller's workspace into aligned arrays. The same code, run on a null base, counts bytes,
// so a stage's size and its layout cannot disagree.
#pragma once

#include <cstddef>
#include <cstdint>

namespace backlite {

inline constexpr size_t kWorkspaceAlignment = 64;  // a cache line, and the widest vector

class Carver {
 public:
  explicit Carver(void* base) : base_(static_cast<std::byte*>(base)) {}

  // `count` elements of T; nullptr while only counting.
  template <typename T>
  T* take(int64_t count) {
    const size_t begin = used_;
    const size_t bytes = static_cast<size_t>(count) * sizeof(T);
    used_ += (bytes + kWorkspaceAlignment - 1) / kWorkspaceAlignment * kWorkspaceAlignment;
    return base_ == nullptr ? nullptr : reinterpret_cast<T*>(base_ + begin);
  }

  size_t bytes() const { return used_; }

 private:
  std::byte* base_;
  size_t used_ = 0;
};

}  // namespace backlite
