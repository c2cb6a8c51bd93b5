// Stage 1 on a Hopper GPU. Arguments have been checked by the caller as far as all backends agree.
#pragma once

#include <cstddef>
#include <string>

#include "backlite/backlite.h"

namespace backlite::forward_sm90 {

// Why a problem of a kind that Hopper's kernels take is too large, in words; empty if it is not.
std::string why_not_supported(const Problem& problem);

// Why the copy engine cannot take these tensors as they are, naming the first one; empty if it can.
// A copy with touching elements is always taken.
std::string why_not_supported(const Problem& problem, const ForwardArgs& args);

// 64 bytes, or none if there are at most as many blocks of rows as multiprocessors; with statistics
// and Tn key tiles, on a GPU of M multiprocessors, M * Tn * 512 bytes more (768 at head dim 64,
// unless items are so few that it is worked off in blocks of 128 rows).
size_t workspace_bytes(const Problem& problem, bool record_tile_stats);

// Launches on the stream of `execution`: a kernel of one thread, if there is a counter to clear,
// and one of all.
void forward(const Problem& problem, const ForwardArgs& args, const Execution& execution);

}  // namespace backlite::forward_sm90
