#!/usr/bin/env bash
# Style, types, layering and documentation: everything that is checked without running the code.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source tools/steps.sh

check_cpp_style() {
  python tools/repo_files.py .h .cpp .cu .cuh | xargs -r clang-format --dry-run -Werror
}

step "Python style" ruff check .
step "Python layout" ruff format --check .
step "C++ layout" check_cpp_style
step "types" mypy --strict python/back_lite
step "layering" python tools/check_layering.py
step "source" python tools/check_source.py
step "docs" python tools/check_docs.py
finish
