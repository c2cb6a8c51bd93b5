#!/usr/bin/env bash
# Compiles every CUDA kernel under a folder (by default src) for Hopper and fails on what silently
# costs speed: spilled registers, and the notes C75xx of ptxas (products of a warpgroup that were
# serialised). Needs nvcc, no GPU. Says so where there is nothing to do.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

mapfile -t kernels < <(find "${1:-src}" -name '*.cu' | sort)
if ! command -v nvcc >/dev/null; then
  echo "compile gate: nvcc is absent, nothing compiled"
  exit 0
fi
if [[ ${#kernels[@]} -eq 0 ]]; then
  echo "compile gate: no kernels yet"
  exit 0
fi

log=$(mktemp)
trap 'rm -f "$log"' EXIT
nvcc --version | tail -1
status=0
for kernel in "${kernels[@]}"; do
  start=$SECONDS
  if ! nvcc -std=c++20 -O3 -gencode arch=compute_90a,code=sm_90a -Xptxas -v -Isrc -Iinclude \
    -c "$kernel" -o /dev/null >"$log" 2>&1; then
    cat "$log"
    echo "compile gate: $kernel does not compile"
    status=1
  elif grep -E '(^|[^0-9])[1-9][0-9]* bytes spill|C75[0-9][0-9]' "$log"; then
    echo "compile gate: $kernel spills or serialises"
    status=1
  else
    echo "compile gate: $kernel is clean ($((SECONDS - start)) s)"
  fi
done
exit "$status"
