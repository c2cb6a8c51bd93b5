"""Python processes of their own, for what a process cannot undo: environment, threads, memory."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

_HERE = Path(__file__).resolve().parent
REPOSITORY = _HERE.parents[1]
TIMEOUT = 240  # seconds


def environment(**changes: str) -> dict[str, str]:
    """The environment in which a child imports what we can import, cases and oracle as well."""
    path = os.pathsep.join([str(_HERE), *filter(None, sys.path)])
    return {**os.environ, "PYTHONPATH": path, **changes}


def run(code: str, **changes: str) -> str:
    """Runs the code, which may import cases and oracle, and returns what it prints."""
    process = subprocess.run(
        [sys.executable, "-c", code],
        env=environment(**changes),
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
    )
    assert process.returncode == 0, f"exit status {process.returncode}:\n{process.stderr}"
    return process.stdout


def run_ranks(*arguments: str, folder: Path, count: int = 2) -> list[str]:
    """Runs Python with the arguments, a rank and a file to meet in; returns what each prints."""
    rendezvous = str(folder / "rendezvous")
    ranks = [
        subprocess.Popen(
            [sys.executable, *arguments, str(rank), rendezvous],
            env=environment(GLOO_SOCKET_IFNAME="lo"),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(count)
    ]
    try:
        results = [rank.communicate(timeout=TIMEOUT) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    failures = [
        f"rank {i}: exit status {rank.returncode}:\n{errors}"
        for i, (rank, (_, errors)) in enumerate(zip(ranks, results, strict=True))
        if rank.returncode != 0
    ]
    assert not failures, "\n".join(failures)
    return [output for output, _ in results]
