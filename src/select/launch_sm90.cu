#include "select/launch_sm90.h"

#include <cuda_runtime_api.h>

#include <limits>

#include "common/cuda_device.h"
#include "select/kernel_sm90.cuh"
#include "sm90/dependency.cuh"

namespace backlite::select_sm90 {
namespace {

constexpr int64_t kMaxKeyTiles = 16384;
constexpr int64_t kBlocksOfWord = kTilesPerWord / kRowsOfBlock;

// A block for each byte of a column of tile bits, in each head.
int64_t num_blocks(const Problem& problem) {
  return problem.batch * problem.num_query_heads * num_bit_words(problem.query_length) *
         kBlocksOfWord;
}

}  // namespace

std::string why_not_supported(const Problem& problem) {
  if (num_key_tiles(problem.key_length) > kMaxKeyTiles) {
    return "the Hopper select takes key lengths up to 2^21";
  }
  if (num_blocks(problem) > std::numeric_limits<int>::max()) {
    return "batch * num_query_heads * query_length is too large for the Hopper select";
  }
  return {};
}

void select(const Problem& problem, const SelectArgs& args, const Execution& execution) {
  const int64_t columns = num_key_tiles(problem.key_length);
  const int64_t blocks = num_blocks(problem);
  if (blocks == 0 || columns == 0) return;

  const SelectParams params{
      .mask = Mask::of(problem),
      .tile_stats = args.tile_stats,
      .negl_prob = args.negl_prob,
      .tile_bits = reinterpret_cast<uint8_t*>(args.tile_bits),
      .num_negl_prob = static_cast<int>(args.num_negl_prob),
      .num_heads = static_cast<int>(problem.num_query_heads),
      .num_query_tiles = static_cast<int>(num_query_tiles(problem.query_length)),
      .num_key_tiles = static_cast<int>(columns),
      .num_words = static_cast<int>(num_bit_words(problem.query_length))};
  const auto kernel = columns <= 64     ? select_kernel<32, 2>
                      : columns <= 256  ? select_kernel<32, 8>
                      : columns <= 2048 ? select_kernel<kThreads, 8>
                                        : select_kernel<kThreads, 64>;
  const size_t shared_bytes = static_cast<size_t>(ceil_div(columns, 4)) * 4;
  check_cuda(sm90::launch_early(kernel, static_cast<unsigned>(blocks), kThreads, shared_bytes,
                                static_cast<cudaStream_t>(execution.stream), params),
             "select");
}

}  // namespace backlite::select_sm90
