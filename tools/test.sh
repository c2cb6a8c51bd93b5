#!/usr/bin/env bash
# Every test: style and the like, then the build, the C++ tests and the Python tests.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source tools/steps.sh

step "lint" tools/lint.sh
# Without a build there is nothing to test.
step "build" tools/build.sh || finish
step "C++ tests" ctest --test-dir build/package --output-on-failure --no-tests=error
step "Python tests" python -m pytest tests
finish
