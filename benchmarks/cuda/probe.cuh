// What the probes of the Hopper kernels share: errors, problems, memory, random inputs, times.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "backlite/backlite.h"

inline void require(cudaError_t error, int line) {
  if (error == cudaSuccess) return;
  std::printf("line %d: %s\n", line, cudaGetErrorString(error));
  std::exit(1);
}
#define REQUIRE(call) require((call), __LINE__)

// Of a case of any probe: their names of these members agree.
template <typename Case>
backlite::Problem problem_of(const Case& c) {
  return {.device = backlite::Device::kCuda,
          .dtype = c.dtype,
          .batch = c.batch,
          .num_query_heads = c.query_heads,
          .num_key_heads = c.key_heads,
          .query_length = c.query_length,
          .key_length = c.key_length,
          .head_dim = c.head_dim,
          .scale = c.scale_factor / std::sqrt(double(c.head_dim)),
          .causal = c.causal,
          .window_left = c.left,
          .window_right = c.right};
}

// Arrays on the device that go with it.
class DeviceArrays {
 public:
  DeviceArrays() = default;
  DeviceArrays(const DeviceArrays&) = delete;
  DeviceArrays& operator=(const DeviceArrays&) = delete;
  ~DeviceArrays() {
    for (void* array : arrays_) cudaFree(array);
  }

  template <typename T>
  T* own(int64_t count) {
    void* array = nullptr;
    REQUIRE(cudaMalloc(&array, std::max<int64_t>(count, 1) * sizeof(T)));
    arrays_.push_back(array);
    return static_cast<T*>(array);
  }

 private:
  std::vector<void*> arrays_;
};

__device__ inline uint64_t mix(uint64_t x) {
  x ^= x >> 33;
  x *= 0xff51afd7ed558ccdull;
  x ^= x >> 33;
  x *= 0xc4ceb9fe1a85ec53ull;
  return x ^ x >> 33;
}

template <typename Element>
__global__ void fill_normal(Element* data, int64_t count, uint64_t seed, float factor) {
  for (int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; i < count;
       i += int64_t{gridDim.x} * blockDim.x) {
    const uint64_t bits = mix(seed * 0x9e3779b97f4a7c15ull + i);
    const float u = (static_cast<uint32_t>(bits) + 0.5f) * 0x1p-32f;
    const float v = static_cast<uint32_t>(bits >> 32) * 0x1p-32f;
    data[i] = Element(factor * sqrtf(-2.0f * logf(u)) * cospif(2.0f * v));
  }
}

template <typename T>
std::vector<T> to_host(const T* device, int64_t count) {
  std::vector<T> host(count);
  REQUIRE(cudaMemcpy(host.data(), device, count * sizeof(T), cudaMemcpyDeviceToHost));
  return host;
}

inline double median(std::vector<float> times) {
  std::nth_element(times.begin(), times.begin() + times.size() / 2, times.end());
  return times[times.size() / 2];
}

inline cudaEvent_t make_event() {
  cudaEvent_t event;
  REQUIRE(cudaEventCreate(&event));
  return event;
}

// Milliseconds of a launch, by events around some.
template <typename Launch>
float ms_of(int num_launches, const Launch& launch) {
  static const cudaEvent_t begin = make_event(), end = make_event();
  REQUIRE(cudaEventRecord(begin));
  for (int i = 0; i < num_launches; ++i) launch();
  REQUIRE(cudaEventRecord(end));
  REQUIRE(cudaEventSynchronize(end));
  float ms = 0;
  REQUIRE(cudaEventElapsedTime(&ms, begin, end));
  return ms / static_cast<float>(num_launches);
}

// Median times of several launches in milliseconds, each in a warm steady state: the clock of a GPU
// that has been idle is higher than the one it can hold. Launches take turns, in batches.
struct Timing {
  int rounds;
  float warm_ms;     // of each launch, before the first round
  int max_launches;  // of each launch in a round: short ones would take long to fill a batch
};

template <typename... Launch>
std::vector<double> time_ms(const Timing& timing, const Launch&... launch) {
  constexpr float kBatchMs = 40.0f;
  std::vector<float> times[sizeof...(Launch)];
  for (int round = -1; round < timing.rounds; ++round) {
    int which = 0;
    (
        [&] {
          float spent = 0;
          for (int i = 0;
               i < timing.max_launches && spent < (round < 0 ? timing.warm_ms : kBatchMs); ++i) {
            const float ms = ms_of(1, launch);
            spent += ms;
            if (round >= 0) times[which].push_back(ms);
          }
          ++which;
        }(),
        ...);
  }
  std::vector<double> medians;
  for (const auto& t : times) medians.push_back(median(t));
  return medians;
}
