"""What the GPU tests share."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import comparer
import oracle
import torch
from cases import Case, Inputs
from torch import Tensor

# Sums of float32 in another order, rounded to 16 bits: a few last bits differ.
NEAR = 2.0**-9


def library(case: Case, inputs: Inputs, negl_prob: Any = 0.0) -> oracle.Results:
    """Gradients are not asked to be deterministic: memory is poisoned through that switch."""
    return oracle.library(case, inputs, negl_prob, deterministic=False)


def check(case: Case, inputs: Inputs, negl_prob: Any = 0.0) -> oracle.Results:
    live = oracle.live_tiles(case, inputs, negl_prob)[0] if negl_prob else None
    got = library(case, inputs, negl_prob)
    comparer.check_results(case, inputs, got, live=live)
    return got


def assert_alike(a: oracle.Results, b: oracle.Results) -> None:
    """Bitwise the same forward; gradients up to the order of their sums."""
    assert torch.equal(a.out, b.out)
    assert torch.equal(a.lse, b.lse)
    for name, x, y in zip(a._fields[2:], a[2:], b[2:], strict=True):
        assert_near(name, x, y)


def assert_near(name: str, a: Tensor, b: Tensor) -> None:
    assert a.shape == b.shape
    assert a.isfinite().all()
    difference = float((a.double() - b.double()).norm())
    assert difference <= NEAR * float(b.double().norm()), f"{name}: {difference}"


def milliseconds(function: Callable[[], object], rounds: int = 20) -> float:
    """Median time on the device."""
    times = []
    for _ in range(rounds + 3):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        function()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return statistics.median(times[3:])
