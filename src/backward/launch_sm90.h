// Stage 4 on a Hopper GPU. Arguments have been checked by the caller as far as all backends agree.
#pragma once

#include <cstddef>
#include <string>

#include "backlite/backlite.h"

namespace backlite::backward_sm90 {

// Why a problem of a kind that Hopper's kernels take is too large, in words; empty if it is not.
std::string why_not_supported(const Problem& problem);

// Why the copy engine cannot take these tensors as they are, naming the first one; empty if it can.
// A copy with touching elements is always taken.
std::string why_not_supported(const Problem& problem, const BackwardArgs& args);

// With R = B * H * Tm * 64 rows, C = B * Hk * Tn columns and M multiprocessors:
// R * (4 D + 16) + R / 16 + min(C, 2 M) * 1024 D + 12 B * Hk + 8 bytes, and what rounding eight
// arrays up to 64 bytes adds.
size_t workspace_bytes(const Problem& problem);

// Launches up to three kernels on the stream of `execution`: the first pass, the columns and the
// last pass.
void backward(const Problem& problem, const BackwardArgs& args, const Execution& execution);

}  // namespace backlite::backward_sm90
