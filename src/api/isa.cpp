#include "api/isa.h"

#include <array>
#include <cstdlib>
#include <string>
#include <string_view>

namespace backlite {
namespace {

struct Isa {
  const CpuBackend* backend;
  bool available;
};

// Widest first. What the compiler may use for each is in CMakeLists.txt (x86-64-v3 and v4).
std::array<Isa, 3> known_isas() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                    __builtin_cpu_supports("bmi2") && __builtin_cpu_supports("f16c");
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") &&
                      __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512cd") &&
                      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  return {
      {{&backlite_cpu_avx512, avx512}, {&backlite_cpu_avx2, avx2}, {&backlite_cpu_baseline, true}}};
#else
#error "BackLite's CPU backend is built for x86-64"
#endif
}

const CpuBackend& choose() {
  const std::array<Isa, 3> isas = known_isas();
  const char* const forced = std::getenv("BACK_LITE_CPU_ISA");
  if (forced == nullptr || *forced == '\0') {
    for (const Isa& isa : isas) {
      if (isa.available) return *isa.backend;
    }
  }
  for (const Isa& isa : isas) {
    if (std::string_view(forced) != isa.backend->isa) continue;
    if (isa.available) return *isa.backend;
    throw NotSupported("BACK_LITE_CPU_ISA = " + std::string(forced) +
                       ": this processor does not have these instructions");
  }
  throw InvalidArgument("BACK_LITE_CPU_ISA = " + std::string(forced) +
                        ": accepted are baseline, avx2 and avx512");
}

}  // namespace

const CpuBackend& cpu_backend() {
  static const CpuBackend& backend = choose();
  return backend;
}

}  // namespace backlite
