#!/usr/bin/env bash
# Builds and runs the C++ tests with a preset of CMakePresets.json: tools/cpp_tests.sh PRESET
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

cmake --preset "$1"
cmake --build --preset "$1" --parallel "${CMAKE_BUILD_PARALLEL_LEVEL:-$(nproc)}"
ctest --preset "$1" --no-tests=error
