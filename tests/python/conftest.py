"""What all Python tests share."""

from __future__ import annotations

import faulthandler
import os
import shutil
import sys
from collections.abc import Iterator

# Before torch loads OpenMP: threads that wait sleep. By default they spin, and where other programs
# use the same cores, thousands of small calls then take ten times as long.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import hypothesis
import pytest
import torch

# The same examples on every run, so that a red run is red again; no deadline on a shared machine.
hypothesis.settings.register_profile(
    "repeatable",
    derandomize=True,
    deadline=None,
    database=None,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile("repeatable")

NUM_THREADS = 2
HANG_SECONDS = 300

_COMPILER = next(filter(None, map(shutil.which, ("g++", "clang++", "c++"))), None)


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "needs_compiler: inductor compiles C++ code")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if _COMPILER is None:
        for item in items:
            if item.get_closest_marker("needs_compiler"):
                item.add_marker(pytest.mark.skip(reason="no C++ compiler for inductor"))


@pytest.fixture(autouse=True)
def _leave_torch_as_it_was() -> Iterator[None]:
    """Two threads, no global setting of one test reaches the next, and a hang ends the run."""
    faulthandler.dump_traceback_later(HANG_SECONDS, exit=True, file=sys.__stderr__)
    torch.set_num_threads(NUM_THREADS)
    yield
    torch.use_deterministic_algorithms(False)
    faulthandler.cancel_dump_traceback_later()


@pytest.fixture(params=["cpu"])
def device(request: pytest.FixtureRequest) -> str:
    """Where a test runs."""
    return str(request.param)
