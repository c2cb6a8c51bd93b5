"""Python processes of their own, for what a process cannot undo: environment, threads, memory."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

_HERE = Path(__file__).resolve().parent
REPOSITORY = _HERE.parents[1]


def run(code: str, **environment: str) -> str:
    """Runs the code, which may import cases and oracle, and returns what it prints."""
    path = os.pathsep.join([str(_HERE), *filter(None, sys.path)])
    process = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": path, **environment},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert process.returncode == 0, f"exit status {process.returncode}:\n{process.stderr}"
    return process.stdout
