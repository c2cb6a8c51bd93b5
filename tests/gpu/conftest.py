"""Tests that need a Hopper GPU; they share cases, oracle and comparer with tests/python."""

from __future__ import annotations

import faulthandler
import sys
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest
import torch
from back_lite._library import has_cuda

hypothesis.settings.register_profile(
    "gpu",
    derandomize=True,
    deadline=None,
    database=None,
    suppress_health_check=list(hypothesis.HealthCheck),
)
# Before the tests are imported: their settings are taken from the profile of that moment.
hypothesis.settings.load_profile("gpu")

HERE = Path(__file__).resolve().parent
HANG_SECONDS = 300


def _why_not() -> str | None:
    if not has_cuda:
        return "this build of back_lite has no CUDA backend"
    if not torch.cuda.is_available():
        return "torch sees no GPU"
    if torch.cuda.get_device_capability()[0] != 9:
        return f"{torch.cuda.get_device_name()} is not a Hopper GPU"
    return None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    ours = [item for item in items if HERE in item.path.parents]
    reason = _why_not() if ours else None
    if reason is not None:
        for item in ours:
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(autouse=True)
def _leave_torch_as_it_was() -> Iterator[None]:
    """No global setting of one test reaches the next, and a hang ends the run."""
    faulthandler.dump_traceback_later(HANG_SECONDS, exit=True, file=sys.__stderr__)
    yield
    torch.use_deterministic_algorithms(False)
    faulthandler.cancel_dump_traceback_later()


@pytest.fixture
def poisoned() -> None:
    """Every torch.empty, outputs and scratch memory included, is full of NaN."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert torch.empty(1, device="cuda").isnan().all()
    assert (torch.empty(1, device="cuda", dtype=torch.uint8) == 255).all()


@pytest.fixture
def device() -> str:
    return "cuda"
