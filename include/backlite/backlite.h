// BackLite: attention with an exact forward and a backward that skips negligible tiles.
//
//   S = scale * Q K^T (masked)    LSE_i = log sum_j exp S_ij    P = exp(S - LSE)    O = P V
//   delta_i = dO_i . O_i - dLSE_i
//   dS = P * (dO V^T - delta)     dV = P^T dO     dQ = scale * dS K     dK = scale * dS^T Q
//
// Four stages, called in this order, each on caller-owned memory:
//
//   forward   Q, K, V          -> O, LSE, tile_stats (how much probability every tile holds)
//   select    tile_stats       -> tile_bits    (one bit a tile: 1 = live, visited by the backward)
//   schedule  tile_bits        -> schedule     (who computes which live tiles, in which order)
//   backward  all of the above -> dQ, dK, dV
//
// Nothing here allocates device memory or synchronises: every stage states how much workspace it
// needs and the caller brings it. Errors are exceptions of the family of backlite::Error.
//
// With Device::kCuda every pointer in the arguments below points into memory of the current GPU
// (cudaSetDevice), workspace, schedule and negl_prob included; stages are queued on the stream of
// Execution, and a CUDA graph can capture them. The kernels are for Hopper GPUs (compute capability
// 9.0: H100, H200), bfloat16 and float16, head_dim 64 and 128. Addresses of the large tensors, and
// the strides of their dimensions longer than 1, are multiples of 16 bytes. The gradients come from
// floating-point atomics: their last bits may differ from call to call. All else is repeatable.
//
// Shapes use B = batch, H = num_query_heads, Hk = num_key_heads, Sq = query_length,
// Sk = key_length, D = head_dim, Tm = ceil(Sq / 64), Tn = ceil(Sk / 128), W = ceil(Tm / 32).
#pragma once

#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>

#if defined(BACKLITE_BUILDING)
#define BACKLITE_API __attribute__((visibility("default")))
#else
#define BACKLITE_API
#endif

namespace backlite {

// The grid of tiles is the same for every head dim, dtype and backend.
inline constexpr int64_t kQueryTile = 64;     // query rows of a tile
inline constexpr int64_t kKeyTile = 128;      // key columns of a tile
inline constexpr int64_t kTilesPerWord = 32;  // query tiles in one int32 of tile bits

// Probabilities are compared and added in fixed point, so that every backend and every order of
// summation selects the same tiles: fixed(p) = floor(p * 2^40), clamped to [0, 2^40]; NaN is 2^40.
inline constexpr int kProbFractionBits = 40;
inline constexpr int64_t kProbOne = int64_t{1} << kProbFractionBits;

// The family of everything that this library throws.
class BACKLITE_API Error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// An argument is wrong; the message names it, its value and what is accepted.
class BACKLITE_API InvalidArgument : public Error {
 public:
  using Error::Error;
};

// The arguments are sound, but no backend of this build can serve them; the message lists why.
class BACKLITE_API NotSupported : public Error {
 public:
  using Error::Error;
};

enum class Device { kCpu, kCuda };
enum class DType { kFloat16, kBFloat16, kFloat32, kFloat64 };

// What all four stages agree on.
struct Problem {
  Device device = Device::kCpu;
  DType dtype = DType::kFloat32;
  int64_t batch = 0;            // B >= 0
  int64_t num_query_heads = 1;  // H >= 1, a multiple of num_key_heads
  int64_t num_key_heads = 1;    // Hk >= 1; query head h reads key head h / (H / Hk)
  int64_t query_length = 0;     // Sq >= 0
  int64_t key_length = 0;       // Sk >= 0
  int64_t head_dim = 0;         // D: a multiple of 8, from 8 to 256
  double scale = 1.0;           // multiplies Q K^T; usually 1 / sqrt(D)
  bool causal = false;          // query i sees key j iff j <= i + Sk - Sq; intersects the window
  int64_t window_left = -1;     // i + Sk - Sq - window_left <= j; -1 = unlimited
  int64_t window_right = -1;    // j <= i + Sk - Sq + window_right; -1 = unlimited
};

// A (batch, length, heads, head_dim) tensor. Strides count elements; the last one is 1.
struct ConstTensor {
  const void* data = nullptr;
  int64_t batch_stride = 0;
  int64_t length_stride = 0;
  int64_t head_stride = 0;
};

struct Tensor {
  void* data = nullptr;
  int64_t batch_stride = 0;
  int64_t length_stride = 0;
  int64_t head_stride = 0;
};

// Where and with what a stage runs.
struct Execution {
  void* stream = nullptr;     // cudaStream_t on CUDA, ignored on the CPU
  int num_threads = 1;        // CPU only; results do not depend on it
  void* workspace = nullptr;  // at least the stage's *_workspace_bytes, 64-byte aligned
  size_t workspace_bytes = 0;
};

// ---- Stage 1: forward -------------------------------------------------------------------------

struct ForwardArgs {
  ConstTensor query;            // [B, Sq, H, D]
  ConstTensor key;              // [B, Sk, Hk, D]
  ConstTensor value;            // [B, Sk, Hk, D]
  Tensor out;                   // [B, Sq, H, D]; 0 for a row that sees no key
  void* lse = nullptr;          // [B, H, Sq] contiguous float32 (float64 if dtype is), or nullptr:
                                // not wanted. Natural log, -inf for a row that sees no key
  float* tile_stats = nullptr;  // [B, H, Tm, Tn] contiguous, or nullptr: record nothing. Mean over
                                // the tile's rows that see a key of the row's probability in it
};

BACKLITE_API size_t forward_workspace_bytes(const Problem& problem, bool record_tile_stats,
                                            int num_threads);
BACKLITE_API void forward(const Problem& problem, const ForwardArgs& args,
                          const Execution& execution);

// ---- Stage 2: select --------------------------------------------------------------------------

// Per query-tile row: sort the tiles that the mask allows by probability, ascending (ties: lower
// key tile first), and skip the longest prefix whose sum is < negl_prob.
struct SelectArgs {
  const float* tile_stats = nullptr;   // [B, H, Tm, Tn] contiguous
  const int64_t* negl_prob = nullptr;  // [num_negl_prob] in fixed point, 0 <= value < kProbOne; on
                                       // CUDA values outside are not refused: below 0 counts as 0
  int64_t num_negl_prob = 0;           // 1 (all heads alike) or H
  int32_t* tile_bits = nullptr;        // [B, H, Tn, W]: bit m % 32 of word m / 32 of column n
};

// floor(negl_prob * 2^40). Throws InvalidArgument unless 0 <= negl_prob < 1.
BACKLITE_API int64_t negl_prob_to_fixed(double negl_prob);

BACKLITE_API size_t select_workspace_bytes(const Problem& problem, int num_threads);
BACKLITE_API void select(const Problem& problem, const SelectArgs& args,
                         const Execution& execution);

// ---- Stage 3: schedule ------------------------------------------------------------------------

struct ScheduleArgs {
  const int32_t* tile_bits = nullptr;  // [B, H, Tn, W], or nullptr: every tile the mask allows
  void* schedule = nullptr;            // 64-byte aligned; opaque to the caller
  size_t schedule_bytes = 0;           // how large it is: at least schedule_bytes(problem)
};

// schedule() needs no workspace beside it.
BACKLITE_API size_t schedule_bytes(const Problem& problem);
BACKLITE_API void schedule(const Problem& problem, const ScheduleArgs& args,
                           const Execution& execution);

// ---- Stage 4: backward ------------------------------------------------------------------------

struct BackwardArgs {
  ConstTensor query;               // [B, Sq, H, D]
  ConstTensor key;                 // [B, Sk, Hk, D]
  ConstTensor value;               // [B, Sk, Hk, D]
  ConstTensor out;                 // [B, Sq, H, D], as the forward wrote it
  ConstTensor grad_out;            // [B, Sq, H, D]
  const void* lse = nullptr;       // [B, H, Sq], as the forward wrote it
  const void* grad_lse = nullptr;  // [B, H, Sq] of lse's dtype, or nullptr: no gradient into LSE
  const int32_t* tile_bits = nullptr;  // [B, H, Tn, W], or nullptr: exact. As given to schedule()
  const void* schedule = nullptr;      // from schedule() of the same problem and tile_bits
  Tensor grad_query;                   // [B, Sq, H, D]
  Tensor grad_key;                     // [B, Sk, Hk, D]
  Tensor grad_value;                   // [B, Sk, Hk, D]
};

BACKLITE_API size_t backward_workspace_bytes(const Problem& problem, int num_threads);
BACKLITE_API void backward(const Problem& problem, const BackwardArgs& args,
                           const Execution& execution);

// ---- About this build -------------------------------------------------------------------------

BACKLITE_API const char* version();  // "0.1.0"
BACKLITE_API const char* cpu_isa();  // instruction set in use: "baseline", "avx2" or "avx512"
BACKLITE_API bool has_cuda();        // were the Hopper kernels built?

}  // namespace backlite
