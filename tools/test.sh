#!/usr/bin/env bash
# Every test: style and the like, the C++ tests, then the package and the Python tests.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source tools/steps.sh

step "lint" tools/lint.sh
step "C++ tests" tools/cpp_tests.sh release
if step "package" tools/build.sh; then
  step "Python tests" python -m pytest tests
fi
finish
