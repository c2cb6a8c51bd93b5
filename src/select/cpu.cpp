// Select, one row of tiles at a time:
//   (1) p in fixed point, for the key tiles that the mask allows
//   (2) sort ascending by (p, key tile)
//   (3) skip the longest prefix whose sum is < negl_prob; the rest is live
//
// Sums are integers, so the result does not depend on who adds in which order. A prefix of sum
// < negl_prob < 1 cannot be the whole row unless the row's own sum is below negl_prob; statistics
// that this library records add up to 1, but a caller's may not, so the heaviest tile always stays.
#include "select/cpu.h"

#include <algorithm>
#include <cstdint>

#include "common/fixed_point.h"
#include "common/mask.h"
#include "common/parallel.h"
#include "common/workspace.h"

namespace backlite::cpu {
namespace {

// (p, key tile) as one integer that sorts as the pair does: p <= 2^40 needs 41 bits, so 23 remain.
constexpr int kKeyTileBits = 23;
constexpr uint64_t kKeyTileMask = (uint64_t{1} << kKeyTileBits) - 1;
static_assert((uint64_t{kProbOne} << kKeyTileBits) >> kKeyTileBits == uint64_t{kProbOne},
              "a probability of one must survive the packing");

}  // namespace

size_t select_workspace_bytes(const Problem& problem, int num_threads) {
  Carver counter(nullptr);
  counter.take<uint64_t>(num_key_tiles(problem.key_length));
  return counter.bytes() * static_cast<size_t>(num_threads);
}

void select(const Problem& problem, const SelectArgs& args, const Execution& execution) {
  const Mask mask = Mask::of(problem);
  const int64_t heads = problem.batch * problem.num_query_heads;
  const int64_t rows = num_query_tiles(problem.query_length);
  const int64_t columns = num_key_tiles(problem.key_length);
  const int64_t words = num_bit_words(problem.query_length);
  const size_t bytes_per_thread = cpu::select_workspace_bytes(problem, 1);

  // A word holds 32 query tiles of one column: one task fills it, so no two threads share a word.
  parallel_for(heads * words, execution.num_threads, [&](int64_t index, int thread) {
    const int64_t head_idx = index / words;
    const int64_t word = index % words;
    const int64_t negl_prob =
        args.negl_prob[args.num_negl_prob == 1 ? 0 : head_idx % problem.num_query_heads];
    Carver carver(static_cast<std::byte*>(execution.workspace) + bytes_per_thread * thread);
    uint64_t* const order = carver.take<uint64_t>(columns);
    int32_t* const bits = args.tile_bits + head_idx * columns * words + word;
    for (int64_t n = 0; n < columns; ++n) bits[n * words] = 0;

    const int64_t row_end = std::min((word + 1) * kTilesPerWord, rows);
    for (int64_t m = word * kTilesPerWord; m < row_end; ++m) {
      const float* const stats = args.tile_stats + (head_idx * rows + m) * columns;
      const Range allowed = mask.key_tiles(m);
      if (allowed.empty()) continue;

      // (1)
      for (int64_t n = allowed.begin; n < allowed.end; ++n) {
        order[n - allowed.begin] = static_cast<uint64_t>(prob_to_fixed(stats[n])) << kKeyTileBits |
                                   static_cast<uint64_t>(n);
      }

      // (2)
      uint64_t* const last = order + allowed.size() - 1;
      std::sort(order, last + 1);

      // (3)
      uint64_t* live = order;
      int64_t skipped = 0;
      while (live < last) {
        skipped += static_cast<int64_t>(*live >> kKeyTileBits);
        if (skipped >= negl_prob) break;
        ++live;
      }
      for (; live <= last; ++live) {
        const auto bit = uint32_t{1} << (m % kTilesPerWord);
        int32_t& column_word = bits[static_cast<int64_t>(*live & kKeyTileMask) * words];
        column_word = static_cast<int32_t>(static_cast<uint32_t>(column_word) | bit);
      }
    }
  });
}

}  // namespace backlite::cpu
