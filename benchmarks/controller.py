"""What a measurement of the controller costs the host: its time, and torch's calls.

    python benchmarks/controller.py [--rounds 300]

Forward and backward of one layer and controller.step(), with a measurement and without, in turns.
Time is that of short sequences, less what the library's own calls take: Python and torch are left,
nearly as on a GPU, whose kernels run beside. Calls of torch's operators are those for tensors as in
a training (8 sequences of 2048 tokens, 4 heads of 64).
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from typing import Any

import back_lite
import torch
from back_lite import BackLite, Target, _library
from machine import describe
from timing import Timing
from torch.profiler import ProfilerActivity, profile


class LibraryClock:
    """Adds up the seconds that calls of the library take."""

    def __init__(self) -> None:
        self.seconds = 0.0
        for name in ("forward", "select", "backward"):
            setattr(_library, name, self.timed(getattr(_library, name)))

    def timed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            start = time.perf_counter()
            result = function(*arguments)
            self.seconds += time.perf_counter() - start
            return result

        return call


def make(shape: tuple[int, int, int, int], every: int) -> tuple[object, Callable[[], None]]:
    """Return a controller of a layer, and a step of its training."""
    layer = BackLite()
    query, key, value = (torch.randn(shape, requires_grad=True) for _ in range(3))
    grad_out = torch.randn(shape)
    records: list[object] = []
    controller = back_lite.Controller(
        layer, Target(relative_l2=0.1), every=every, warmup=0, log=records.append
    )

    def step() -> None:
        layer(query, key, value, causal=True).backward(grad_out)
        controller.step()

    return controller, step


def count_calls(step: Callable[[], None]) -> int:
    """Count the operators of torch that Python calls in a step; those inside others do not."""
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        step()
    return sum(
        event.name.startswith(("aten::", "back_lite::"))
        and (event.cpu_parent is None or not event.cpu_parent.name.startswith("aten::"))
        for event in profiled.events()
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=300, help="(%(default)s)")
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    clock = LibraryClock()
    intervals = {"measured": 1, "plain": 10**9}
    timings = {name: Timing() for name in intervals}
    # The controllers live as long as they are kept.
    small = {name: make((2, 129, 2, 8), every) for name, every in intervals.items()}
    for index in range(20 + args.rounds):
        for name, (_, step) in small.items():
            start, in_library = time.perf_counter(), clock.seconds
            step()
            spent = time.perf_counter() - start - (clock.seconds - in_library)
            if index >= 20:
                timings[name].seconds.append(spent)
    calls = {}
    for name, every in intervals.items():
        _kept, step = make((8, 2048, 4, 64), every)
        step()
        calls[name] = count_calls(step)
    content = {
        "microseconds": {name: 1e6 * timing.median for name, timing in timings.items()},
        "spread": {name: timing.spread for name, timing in timings.items()},
        "calls": calls,
        **describe(),
    }
    print(json.dumps(content, indent=1))


if __name__ == "__main__":
    main()
