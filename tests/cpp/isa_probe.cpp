// Prints the instruction set in use, or why there is none. See "isa" in CMakeLists.txt.
#include <cstdio>

#include "backlite/backlite.h"

int main() {
  try {
    std::printf("isa=%s\n", backlite::cpu_isa());
  } catch (const backlite::InvalidArgument& error) {
    std::printf("InvalidArgument: %s\n", error.what());
  } catch (const backlite::NotSupported& error) {
    std::printf("NotSupported: %s\n", error.what());
  }
}
