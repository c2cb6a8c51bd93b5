// Compiled once per instruction set, with BACKLITE_ISA = baseline, avx2 or avx512.
#include "backward/cpu.h"
#include "common/cpu_backend.h"
#include "forward/cpu.h"

#define BACKLITE_JOIN_(a, b) a##b
#define BACKLITE_JOIN(a, b) BACKLITE_JOIN_(a, b)
#define BACKLITE_TEXT_(a) #a
#define BACKLITE_TEXT(a) BACKLITE_TEXT_(a)

extern "C" {
extern __attribute__((visibility("default"))) constinit const backlite::CpuBackend BACKLITE_JOIN(
    backlite_cpu_, BACKLITE_ISA) = {
    .isa = BACKLITE_TEXT(BACKLITE_ISA),
    .forward_workspace_bytes = backlite::cpu::forward_workspace_bytes,
    .forward = backlite::cpu::forward,
    .backward_workspace_bytes = backlite::cpu::backward_workspace_bytes,
    .backward = backlite::cpu::backward,
};
}
