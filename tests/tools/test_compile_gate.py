"""The compile gate passes a clean kernel and fails on one that spills."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

GATE = Path(__file__).resolve().parents[2] / "tools" / "compile_gate.sh"

CLEAN = "__global__ void kernel(float* x) { x[threadIdx.x] += 1.0f; }\n"

# 128 live values in the 32 registers that two blocks of 1024 threads leave to each.
SPILLING = """
__global__ void __launch_bounds__(1024, 2) kernel(float* x) {
  float values[128];
#pragma unroll
  for (int i = 0; i < 128; ++i) values[i] = x[i * 1024 + threadIdx.x];
  __syncthreads();
#pragma unroll
  for (int i = 0; i < 128; ++i) x[i * 1024 + threadIdx.x] = values[127 - i] * values[i];
}
"""


def run_gate(folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([GATE, folder], capture_output=True, text=True, check=False)


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc is absent")
@pytest.mark.parametrize(
    ("source", "status", "message"),
    [(CLEAN, 0, "is clean"), (SPILLING, 1, "spills"), ("nonsense", 1, "does not compile")],
)
def test_gate_tells_clean_from_spilling(
    tmp_path: Path, source: str, status: int, message: str
) -> None:
    (tmp_path / "kernel.cu").write_text(source)
    result = run_gate(tmp_path)
    assert result.returncode == status, result.stdout
    assert message in result.stdout


def test_gate_passes_where_there_is_nothing_to_compile(tmp_path: Path) -> None:
    assert run_gate(tmp_path).returncode == 0
