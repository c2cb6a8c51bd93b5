// Times builds of the Hopper forward against each other, in one process and in turns: between
// processes the same build differs by up to 3%, between turns by less than 1%.
//
//   forward_turns BUILD.so ...    each shape's time in ms, and its ratio to that of the first build
//
// A build is a shared object of src/forward/*sm90* and src/sm90: see docs/hopper-forward.md. A turn
// is 12 ms of launches after 4 ms of warming up. Every round begins with another build; printed are
// medians over the rounds, of times and of ratios within a round.
#include <cuda_runtime.h>
#include <dlfcn.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "backlite/backlite.h"
#include "forward_data.cuh"
#include "probe.cuh"
#include "sm90/math.cuh"

namespace {

constexpr float kWarmMs = 4.0f;
constexpr float kTurnMs = 12.0f;
constexpr int kRounds = 9;     // of shapes that a percent matters for
constexpr int kFewRounds = 3;  // of long ones, which hardly change

// The functions of forward/launch_sm90.h in one build.
struct Build {
  std::string name;
  void (*forward)(const backlite::Problem&, const backlite::ForwardArgs&,
                  const backlite::Execution&);
  size_t (*workspace_bytes)(const backlite::Problem&, bool);

  explicit Build(const std::string& path) {
    const size_t slash = path.rfind('/');
    name = path.substr(slash == std::string::npos ? 0 : slash + 1);
    name = name.substr(0, name.rfind('.'));
    void* object = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (object == nullptr) fail();
    find(object, forward,
         "_ZN8backlite12forward_sm907forwardERKNS_7ProblemERKNS_11ForwardArgsERKNS_9ExecutionE");
    find(object, workspace_bytes, "_ZN8backlite12forward_sm9015workspace_bytesERKNS_7ProblemEb");
  }

 private:
  template <typename Function>
  static void find(void* object, Function*& function, const char* symbol) {
    function = reinterpret_cast<Function*>(dlsym(object, symbol));
    if (function == nullptr) fail();
  }
  [[noreturn]] static void fail() {
    std::printf("%s\n", dlerror());
    std::exit(1);
  }
};

void compare(const std::vector<Build>& builds, const Case& c, int rounds) {
  size_t workspace_bytes = 0;
  for (const Build& build : builds) {
    workspace_bytes = std::max(workspace_bytes, build.workspace_bytes(problem_of(c), true));
  }
  Data<backlite::sm90::BFloat16> data(c, workspace_bytes);
  for (const bool record : {false, true}) {
    const auto args = data.args_of(record);
    const auto ms_of_build = [&](size_t b, float ms, float ms_in_all) {
      return ms_of(static_cast<int>(std::ceil(ms_in_all / ms)),
                   [&] { builds[b].forward(data.problem, args, data.execution); });
    };
    std::vector<float> guesses;
    std::vector<std::vector<float>> times(builds.size()), ratios(builds.size());
    for (size_t b = 0; b < builds.size(); ++b) {
      ms_of_build(b, 1.0f, 1.0f);
      guesses.push_back(ms_of_build(b, 1.0f, 1.0f));
    }
    for (int round = 0; round < rounds; ++round) {
      for (size_t i = 0; i < builds.size(); ++i) {
        const size_t b = (round + i) % builds.size();
        ms_of_build(b, guesses[b], kWarmMs);
        times[b].push_back(ms_of_build(b, guesses[b], kTurnMs));
      }
      for (size_t b = 0; b < builds.size(); ++b) {
        ratios[b].push_back(times[b][round] / times[0][round]);
      }
    }
    std::printf("D %3lld  %-20s %s", static_cast<long long>(c.head_dim), c.name,
                record ? "stats" : "plain");
    for (size_t b = 0; b < builds.size(); ++b) {
      std::printf("  %s %.4f %.3f", builds[b].name.c_str(), median(times[b]), median(ratios[b]));
    }
    std::printf("\n");
    std::fflush(stdout);
  }
}

}  // namespace

int main(int argc, char** argv) {
  const std::vector<Build> builds(argv + 1, argv + argc);
  for (const int64_t d : {128, 64}) {
    const int64_t h = 2048 / d;
    for (const Case& c : {Case{"8k window 1024", 4, h, h, 8192, 8192, d, true, 1024},
                          Case{"32k window 1024", 1, h, h, 32768, 32768, d, true, 1024},
                          Case{"2k causal", 16, h, h, 2048, 2048, d, true},
                          Case{"B=1 H=8 4k", 1, 8, 8, 4096, 4096, d},
                          Case{"B=1 H=8 4k causal", 1, 8, 8, 4096, 4096, d, true}}) {
      compare(builds, c, kRounds);
    }
    for (const Case& c :
         {Case{"8k causal", 4, h, h, 8192, 8192, d, true},
          Case{"32k causal", 1, h, h, 32768, 32768, d, true}, Case{"2k", 16, h, h, 2048, 2048, d},
          Case{"1024", 32, h, h, 1024, 1024, d}, Case{"1000", 32, h, h, 1000, 1000, d}}) {
      compare(builds, c, kFewRounds);
    }
  }
  return 0;
}
