"""What the two trainings and the comparison found, as a table and as JSON."""

from __future__ import annotations

import argparse
import json
import re
import shlex
import statistics
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.files import write_text
from benchmarks.machine import describe

GRADIENTS = ("dQ", "dK", "dV")


@dataclass
class History:
    """One training."""

    train_loss: list[float] = field(default_factory=list)  # nats per byte, one a step
    step_seconds: list[float] = field(default_factory=list)
    density: list[tuple[int, list[float]]] = field(default_factory=list)  # (step, by layer)
    validation: list[tuple[int, float]] = field(default_factory=list)  # (step, nats per byte)
    error: list[dict[str, Any]] = field(default_factory=list)  # of the gradients; compare.py


@dataclass
class LayerReport:
    """Sparse against exact backward of one layer's attention, on the same tensors."""

    density: float  # live tiles / tiles that the causal mask allows
    cosine: dict[str, float]  # of dQ, dK, dV
    relative_l2: dict[str, float]
    exact_ms: float
    sparse_ms: float
    speedup: float


@dataclass
class Tiles:
    """The tiles of one layer, for the first sequence of a batch."""

    prob: NDArray[np.float32]  # [H, Tm, Tn]
    live: NDArray[np.bool_]  # [H, Tm, Tn]
    allowed: NDArray[np.bool_]  # [Tm, Tn], by the mask


@dataclass
class Result:
    settings: dict[str, Any]
    runs: dict[str, History]  # "exact" and "sparse"
    layers: list[LayerReport]


def print_tables(result: Result) -> None:
    exact, sparse = result.runs["exact"], result.runs["sparse"]
    print("\nBoth trainings          exact    sparse")
    losses = [run.validation[-1][1] for run in (exact, sparse)]
    print(f"  validation loss     {losses[0]:7.4f}   {losses[1]:7.4f}   nats per byte")
    seconds = [statistics.median(run.step_seconds) for run in (exact, sparse)]
    print(f"  training step       {seconds[0]:7.3f}   {seconds[1]:7.3f}   s, median")
    if result.settings["size"] == "small":
        print(
            "  So short a training says little about small differences: with the default\n"
            "  settings, another --seed moved either loss by 0.06 to 0.14."
        )

    print(
        "\nThe backward of attention in the sparse model, sparse against exact on the same batch\n"
        "  layer  density  skipped |  cosine dQ     dK     dV |"
        "  rel. L2 dQ    dK    dV |  exact ms  sparse ms   ratio"
    )
    for index, layer in enumerate(result.layers):
        cosines = " ".join(f"{layer.cosine[name]:6.4f}" for name in GRADIENTS)
        errors = " ".join(f"{layer.relative_l2[name]:5.3f}" for name in GRADIENTS)
        print(
            f"  {index + 1:>5}  {layer.density:>7.0%}  {1 - layer.density:>7.0%} |"
            f"     {cosines} |      {errors} |  {layer.exact_ms:8.2f}   {layer.sparse_ms:8.2f}"
            f"  {layer.speedup:5.2f}x"
        )
    density = statistics.fmean(layer.density for layer in result.layers)
    exact_ms = sum(layer.exact_ms for layer in result.layers)
    sparse_ms = sum(layer.sparse_ms for layer in result.layers)
    print(
        f"    all  {density:>7.0%}  {1 - density:>7.0%} |{'':26}|{'':24}|"
        f"  {exact_ms:8.2f}   {sparse_ms:8.2f}  {exact_ms / sparse_ms:5.2f}x"
    )


def settings(args: argparse.Namespace) -> dict[str, object]:
    """Of a command line, as JSON takes them."""
    return {k: v for k, v in vars(args).items() if k not in ("out", "resume")}


def write_json(path: Path, content: dict[str, Any]) -> None:
    """What was found, what it was measured on, and the command that made it."""
    main = sys.modules["__main__"].__spec__
    module = main.name.removesuffix(".__main__") if main else "examples.train_lm"
    command = shlex.join(["python", "-m", module, *sys.argv[1:]])
    text = json.dumps({"command": command, **describe(), **content}, default=asdict)
    rounded = json.loads(text, parse_float=lambda number: float(f"{float(number):.6g}"))
    # One line a list of numbers: shorter, and still to be read.
    write_text(path, re.sub(r"\n +(?=[-\d\]])", " ", json.dumps(rounded, indent=1)) + "\n")
