#!/usr/bin/env bash
# Builds the libraries and the C++ tests, and installs the Python package into the active environment.
# One build folder serves both, so nothing is compiled twice and a second run is quick.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

echo "Building with ${CXX:-the default C++ compiler} into build/package"
CMAKE_BUILD_PARALLEL_LEVEL=${CMAKE_BUILD_PARALLEL_LEVEL:-$(nproc 2>/dev/null || echo 2)} \
  python -m pip install --quiet --no-build-isolation --no-deps \
  --config-settings=build-dir=build/package \
  --config-settings=build.targets=all \
  --config-settings=cmake.define.BACKLITE_BUILD_TESTS=ON \
  --config-settings=cmake.define.BACKLITE_WARNINGS_AS_ERRORS=ON \
  .
