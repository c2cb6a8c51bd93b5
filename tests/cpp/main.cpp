// The test program: one suite a stage, run by CTest once for each instruction set where that
// matters.
#define BOOST_TEST_MODULE backlite
#include <boost/test/included/unit_test.hpp>
#include <cstdio>
#include <cstdlib>

#include "backlite/backlite.h"

namespace {

// CTest's SKIP_RETURN_CODE: this processor lacks the instruction set that is asked for.
constexpr int kSkipped = 77;

struct NeedsIsa {
  NeedsIsa() {
    try {
      BOOST_TEST_MESSAGE("instruction set: " << backlite::cpu_isa());
    } catch (const backlite::NotSupported& error) {
      std::fprintf(stderr, "skipped: %s\n", error.what());
      std::_Exit(kSkipped);
    }
  }
};

}  // namespace

BOOST_TEST_GLOBAL_FIXTURE(NeedsIsa);
