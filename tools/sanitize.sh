#!/usr/bin/env bash
# The C++ tests under AddressSanitizer with UndefinedBehaviorSanitizer, then under ThreadSanitizer.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source tools/steps.sh

# run_preset NAME: configure, build, test.
run_preset() {
  cmake --preset "$1" && cmake --build --preset "$1" && ctest --preset "$1"
}

step "asan and ubsan" run_preset asan
step "tsan" run_preset tsan
finish
