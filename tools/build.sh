#!/usr/bin/env bash
# Builds the package and installs it into the active environment, as `pip install .` would, but with
# the pinned tools of that environment and a build folder that is kept: a second run is quick.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

echo "Building the package in build/package"
CMAKE_BUILD_PARALLEL_LEVEL=${CMAKE_BUILD_PARALLEL_LEVEL:-$(nproc)} \
  python -m pip install --quiet --no-build-isolation --no-deps \
  --config-settings=build-dir=build/package \
  --config-settings=cmake.define.BACKLITE_WARNINGS_AS_ERRORS=ON \
  .
