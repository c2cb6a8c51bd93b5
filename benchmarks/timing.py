"""Times functions in turn, so that whatever slows the machine down slows all of them."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field


@dataclass
class Timing:
    """Run times of one function, in seconds."""

    seconds: list[float] = field(default_factory=list)

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    @property
    def spread(self) -> float:
        """Distance between the quartiles, as a share of the median."""
        if len(self.seconds) < 2:
            return 0.0
        low, _, high = statistics.quantiles(self.seconds, n=4, method="inclusive")
        return (high - low) / self.median


def alternate(
    functions: Mapping[str, Callable[[], object]],
    *,
    rounds: int,
    warmup: int = 1,
    max_seconds: float = float("inf"),
    min_rounds: int = 3,
    synchronize: Callable[[], object] = lambda: None,
) -> dict[str, Timing]:
    """Runs a, b, a, b, ... `rounds` times, or until `max_seconds` are over, but `min_rounds` times.

    synchronize waits for work that a function leaves running, as torch.cuda.synchronize does.
    """
    timings = {name: Timing() for name in functions}
    for _ in range(warmup):
        for function in functions.values():
            function()
    synchronize()
    began = time.perf_counter()
    for done in range(rounds):
        if done >= min_rounds and time.perf_counter() - began > max_seconds:
            break
        for name, function in functions.items():
            start = time.perf_counter()
            function()
            synchronize()
            timings[name].seconds.append(time.perf_counter() - start)
    return timings


def median_ratio(numerator: Timing, denominator: Timing) -> float:
    """Median of the ratios of the pairs: less noisy than the ratio of the medians."""
    pairs = zip(numerator.seconds, denominator.seconds, strict=True)
    return statistics.median(a / b for a, b in pairs)
