#!/usr/bin/env bash
# The C++ tests under AddressSanitizer with UndefinedBehaviorSanitizer, then under ThreadSanitizer.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source tools/steps.sh

step "asan and ubsan" tools/cpp_tests.sh asan
step "tsan" tools/cpp_tests.sh tsan
finish
