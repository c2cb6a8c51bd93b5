"""Rows of a benchmark's table: a comparison, its bar, and how it is printed and kept."""

from __future__ import annotations

import argparse
import json
import shlex
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from files import write_text
from timing import Timing, median_ratio


@dataclass(frozen=True)
class Row:
    """One comparison, or the mean of some."""

    group: str
    case: str
    other: str  # what ours is compared with
    ratio: float
    faster: bool  # the ratio says how many times faster ours is; if not, how many times slower
    bar: float | None  # bounds the ratio from below if `faster`, from above if not
    ours: Timing | None = None
    theirs: Timing | None = None

    @property
    def passed(self) -> bool | None:
        if self.bar is None:
            return None
        return self.ratio >= self.bar if self.faster else self.ratio <= self.bar

    def __str__(self) -> str:
        ours, theirs = (
            "" if timing is None else f"{1e3 * timing.median:.4g} +-{timing.spread / 2:4.0%}"
            for timing in (self.ours, self.theirs)
        )
        bar = "" if self.bar is None else f"{'>=' if self.faster else '<='} {self.bar:.3f}"
        word = {True: "pass", False: "MISS", None: ""}[self.passed]
        return TABLE.format(
            self.group, self.case, self.other, ours, theirs, f"{self.ratio:.3f}", bar, word
        )

    def as_json(self) -> dict[str, object]:
        content: dict[str, object] = {
            "group": self.group,
            "case": self.case,
            "other": self.other,
            "ratio": self.ratio,
            "ratio_is": "other / ours" if self.faster else "ours / other",
            "bar": self.bar,
            "passed": self.passed,
        }
        for name, timing in (("ours", self.ours), ("other", self.theirs)):
            if timing is not None:
                content[f"{name}_ms"] = 1e3 * timing.median
                content[f"{name}_spread"] = timing.spread
                content[f"{name}_rounds"] = len(timing.seconds)
        return content


TABLE = "{:<10} {:<33} {:<14} {:>16} {:>16} {:>7} {:>9} {}"
HEADER = TABLE.format(
    "group", "case", "against", "ours, ms", "other, ms", "ratio", "bar", "(+-: half the middle 50%)"
)


Groups = Mapping[str, Callable[[], Iterator[Row]]]


def choose(parser: argparse.ArgumentParser, only: str, groups: Groups) -> list[str]:
    """Names of groups, separated by commas; ends the program where one is unknown."""
    chosen = only.split(",")
    if unknown := set(chosen) - set(groups):
        parser.error(f"--only {','.join(sorted(unknown))}: there are {', '.join(groups)}")
    return chosen


def collect(
    groups: Groups, chosen: Sequence[str], after_row: Callable[[], object] = lambda: None
) -> list[Row]:
    """Measures groups and prints their rows as they come."""
    print(HEADER)
    rows = []
    for group in chosen:
        for row in groups[group]():
            rows.append(row)
            print(row, flush=True)
            after_row()
    return rows


def faster_row(
    group: str, case: str, other: str, times: tuple[Timing, Timing], bar: float | None
) -> Row:
    """times: ours, theirs."""
    return Row(group, case, other, median_ratio(times[1], times[0]), True, bar, *times)


def slower_row(group: str, case: str, other: str, times: tuple[Timing, Timing], bar: float) -> Row:
    """times: ours, theirs."""
    return Row(group, case, other, median_ratio(times[0], times[1]), False, bar, *times)


def mean_row(
    group: str, case: str, other: str, ratios: list[float], bar: float | None, faster: bool = True
) -> Row:
    return Row(group, case, other, statistics.geometric_mean(ratios), faster, bar)


def verdict(rows: list[Row]) -> str:
    judged = [row for row in rows if row.passed is not None]
    return f"{sum(row.passed is True for row in judged)} of {len(judged)} bars passed"


def write_json(path: Path, rows: list[Row], facts: dict[str, object]) -> None:
    """The rows, what they were measured on, and the command that made them."""
    program = Path(sys.argv[0]).name
    content = {
        "command": shlex.join(["python", f"benchmarks/{program}", *sys.argv[1:]]),
        **facts,
        "rows": [row.as_json() for row in rows],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, json.dumps(content, indent=1) + "\n")
