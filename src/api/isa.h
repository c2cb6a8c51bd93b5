// Which of the CPU libraries serves this process.
#pragma once

#include "common/cpu_backend.h"

namespace backlite {

// The widest instruction set that this processor has, or the one named by the environment variable
// BACK_LITE_CPU_ISA, read once. Throws InvalidArgument if that names none, NotSupported if the
// processor lacks it.
const CpuBackend& cpu_backend();

}  // namespace backlite
