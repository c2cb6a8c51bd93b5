// Memory that a call needs for its own time.
#pragma once

#include <backlite/backlite.h>
#include <sys/mman.h>
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/extra/c_env_api.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <new>
#include <optional>

#include "binding/conversions.h"

namespace backlite_ffi {

constexpr size_t kAlignment = 64;  // what the core asks for

constexpr size_t aligned(size_t bytes) {
  return (bytes + kAlignment - 1) / kAlignment * kAlignment;
}

// On the CPU. The allocator maps large blocks anew at each call, and a fresh page costs 1.7 us:
// 14 ms for 32 MiB, more than a sparse backward at 2k. In huge pages, where Linux has them, it is
// 3.5 ms; for a block that is used again it is nothing. So the last block waits for the next call,
// if it is not larger than kMaxKept.
class HostBlock {
 public:
  explicit HostBlock(size_t bytes) : block_(kept_.exchange(nullptr)) {
    if (block_ != nullptr && block_->bytes >= bytes) return;
    delete block_;
    block_ = nullptr;
    block_ = new Block(bytes);
  }
  ~HostBlock() {
    if (block_->bytes <= kMaxKept) {
      Block* const waiting = kept_.exchange(block_);
      const bool is_larger = waiting != nullptr && waiting->bytes > block_->bytes;
      block_ = is_larger ? kept_.exchange(waiting) : waiting;
    }
    delete block_;
  }
  HostBlock(const HostBlock&) = delete;
  HostBlock& operator=(const HostBlock&) = delete;

  std::byte* data() const { return static_cast<std::byte*>(block_->data); }

 private:
  static constexpr size_t kHugePage = size_t{2} << 20;
  static constexpr size_t kMaxKept = size_t{64} << 20;

  struct Block {
    explicit Block(size_t size)
        : bytes(size),
          alignment(size >= kHugePage ? kHugePage : kAlignment),
          data(::operator new(size, std::align_val_t{alignment})) {
#if defined(MADV_HUGEPAGE)
      // Advice: where it is refused, ordinary pages serve.
      if (bytes >= kHugePage) madvise(data, bytes, MADV_HUGEPAGE);
#endif
    }
    ~Block() { ::operator delete(data, std::align_val_t{alignment}); }
    Block(const Block&) = delete;
    Block& operator=(const Block&) = delete;

    size_t bytes;
    size_t alignment;
    void* data;
  };

  static inline std::atomic<Block*> kept_{nullptr};
  Block* block_;
};

// `bytes` in all, handed out in slices that are aligned as the core asks. On CUDA it is memory of
// torch's allocator: a tensor that the caller took from it or, without one, by way of tvm-ffi (3 us
// less a call), which reaches the allocator of torch 2.10 and newer.
class Scratch {
 public:
  Scratch(const OptionalView& given, const TensorView& like, size_t bytes) {
    const DLDevice device = like.device();
    if (bytes == 0) return;
    if (device.device_type == kDLCPU) {
      next_ = host_.emplace(bytes).data();
    } else if (given.has_value()) {
      const TensorView& tensor = given.value();
      require_device(tensor, "scratch", device);
      require_dtype(tensor, "scratch", kUInt8);
      if (!tensor.IsContiguous()) refuse("scratch must be contiguous");
      if (tensor.numel() < static_cast<int64_t>(bytes)) {
        refuse("scratch has ", tensor.numel(), " bytes; it must have ", bytes);
      }
      next_ = data_of<std::byte>(tensor);
    } else {
      const auto size = static_cast<int64_t>(bytes);
      tensor_ =
          ffi::Tensor::FromEnvAlloc(TVMFFIEnvTensorAlloc, ffi::ShapeView(&size, 1), kUInt8, device);
      next_ = static_cast<std::byte*>(tensor_->data_ptr());
    }
  }

  void* take(size_t bytes) {
    if (bytes == 0) return nullptr;
    void* const slice = next_;
    next_ += aligned(bytes);
    return slice;
  }

 private:
  std::optional<HostBlock> host_;
  std::optional<ffi::Tensor> tensor_;
  std::byte* next_ = nullptr;
};

}  // namespace backlite_ffi
