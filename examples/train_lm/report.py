"""What the two trainings and the comparison found, as a table and as JSON."""

from __future__ import annotations

import json
import shlex
import statistics
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path

from benchmarks.machine import describe

GRADIENTS = ("dQ", "dK", "dV")


@dataclass
class History:
    """One training."""

    train_loss: list[float] = field(default_factory=list)  # nats per byte, one a step
    step_seconds: list[float] = field(default_factory=list)
    skipped: list[list[float]] = field(default_factory=list)  # [step][layer], share of the tiles
    validation: list[tuple[int, float]] = field(default_factory=list)  # (step, nats per byte)


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
class Result:
    settings: dict[str, object]
    seconds: float
    runs: dict[str, History]  # "exact" and "sparse"
    layers: list[LayerReport]


def print_tables(result: Result) -> None:
    exact, sparse = result.runs["exact"], result.runs["sparse"]
    print("\nBoth trainings          exact    sparse")
    losses = [run.validation[-1][1] for run in (exact, sparse)]
    print(f"  validation loss     {losses[0]:7.4f}   {losses[1]:7.4f}   nats per byte")
    seconds = [statistics.median(run.step_seconds) for run in (exact, sparse)]
    print(f"  training step       {seconds[0]:7.3f}   {seconds[1]:7.3f}   s, median")
    print(
        "  So short a training says little about small differences: with the default settings,\n"
        "  another --seed moved either loss by 0.06 to 0.14."
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


def write_json(result: Result, path: Path) -> None:
    command = shlex.join(["python", "-m", "examples.train_lm", *sys.argv[1:]])
    content = {"command": command, **describe(), **asdict(result)}
    path.write_text(json.dumps(content, indent=1) + "\n")
