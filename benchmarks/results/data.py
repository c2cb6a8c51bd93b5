"""What the JSON in docs/results/ must hold, and the numbers that follow from it."""

from __future__ import annotations

import itertools
import json
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .shapes import problem

Json = dict[str, Any]
EXTRA = ("select", "schedule")  # what a sparse pass has and an exact one has not


@dataclass(frozen=True)
class Training:
    """One run of examples.train_lm."""

    content: Json

    @property
    def negl_prob(self) -> float:
        return float(self.content["settings"]["negl_prob"])

    @property
    def seed(self) -> int:
        return int(self.content["settings"]["seed"])

    @property
    def losses(self) -> list[float]:
        """Of the validations, in order."""
        return [loss for _, loss in self.content["run"]["validation"]]

    @property
    def loss(self) -> float:
        return self.losses[-1]

    @property
    def step_ms(self) -> float:
        """Median of the second half, in which attention has become selective."""
        seconds = self.content["run"]["step_seconds"]
        return 1e3 * statistics.median(seconds[len(seconds) // 2 :])

    @property
    def skipped(self) -> list[tuple[int, float]]:
        """(step, mean over the layers)."""
        return [(s, 1.0 - statistics.fmean(layers)) for s, layers in self.content["run"]["density"]]

    @property
    def skipped_at_end(self) -> float:
        """Mean over the last quarter of the training."""
        return statistics.fmean(share for _, share in self.skipped[-len(self.skipped) // 4 :])


@dataclass
class Data:
    trainings: dict[float, list[Training]] = field(default_factory=dict)  # by negl_prob and seed
    again: list[Training] = field(default_factory=list)  # repetitions of some of them
    layers: dict[str, Json] = field(default_factory=dict)  # by name of the model
    steps: list[Json] = field(default_factory=list)
    smollm2: Json | None = None
    smollm2_steps: list[Json] = field(default_factory=list)
    stages: Json | None = None


def read(path: Path, kind: str) -> Json:
    """One file; a damaged one, or another program's, ends the program with its name."""

    def refuse(word: str) -> None:
        raise ValueError(f"{word}, of which no mean follows")

    try:
        found = json.loads(path.read_text(), parse_constant=refuse)
    except (OSError, ValueError) as error:
        raise SystemExit(f"{path}: {error}") from None
    if text := problem(found, kind):
        raise SystemExit(f"{path}: {text}")
    return found


def read_trainings(folder: Path) -> list[Training]:
    """All of a folder: alike but for negl_prob and seed, and each once."""
    runs: dict[tuple[float, int], Training] = {}
    expected: Json = {}
    for path in sorted(folder.glob("*.json")):
        run = Training(read(path, "training"))
        content, settings = run.content, run.content["settings"]
        what = {k: v for k, v in settings.items() if k not in ("negl_prob", "seed", "save_every")}
        what |= {"text": content["text"], "gpu": content["machine"].get("gpu")}
        what |= {"torch": content["versions"]["torch"]}
        what["steps"] = len(content["run"]["train_loss"])
        for name in ("validation", "density"):
            what[name] = [step for step, _ in content["run"][name]]
            if not what[name]:
                raise SystemExit(f"{path}: run.{name} = []: accepted is that of a whole training")
        expected = expected or {**what, "size": "large", "steps": settings["steps"]}
        for name, value in expected.items():
            if what.get(name) != value:
                raise SystemExit(
                    f"{path}: {name} = {what.get(name)}: accepted is {value}, as in all trainings"
                )
        if (run.negl_prob, run.seed) in runs:
            raise SystemExit(f"{path}: a second one of this negl_prob and seed")
        runs[run.negl_prob, run.seed] = run
    return [runs[key] for key in sorted(runs)]


def load(folder: Path) -> Data:
    def read_one(kind: str) -> Json | None:
        path = folder / f"{kind}.json"
        return read(path, kind) if path.exists() else None

    def read_all(kind: str) -> list[Json]:
        return [read(path, kind) for path in sorted(folder.glob(f"{kind}*.json"))]

    data = Data(
        smollm2=read_one("smollm2"),
        smollm2_steps=read_all("smollm2_steps"),
        stages=read_one("stages"),
    )
    for run in read_trainings(folder / "training"):
        data.trainings.setdefault(run.negl_prob, []).append(run)
    data.again = read_trainings(folder / "training_again")
    trained = read_one("layers")
    if trained is not None:
        data.layers["The language model trained here"] = trained
    if data.smollm2 is not None:
        data.layers["SmolLM2-135M"] = data.smollm2
    data.steps = read_all("speed")
    return data


# -------------------------------------------------------------------------------------- numbers


def spread(values: Sequence[float], digits: int = 4, sign: str = "") -> str:
    if not values:
        return ""
    mean = format(statistics.fmean(values), f"{sign}.{digits}f")
    return f"{mean} ± {statistics.stdev(values):.{digits}f}" if len(values) > 1 else mean


def differences(data: Data, negl_prob: float) -> list[float]:
    """Validation loss minus that of the exact training of the same seed."""
    exact = {run.seed: run.loss for run in data.trainings[0.0]}
    runs = data.trainings[negl_prob]
    return [run.loss - exact[run.seed] for run in runs if run.seed in exact]


def pairs(data: Data) -> list[tuple[Training, Training]]:
    """A training that was made again, and the first one."""
    return [
        (again, first)
        for again in data.again
        for first in data.trainings.get(again.negl_prob, [])
        if first.seed == again.seed
    ]


def contexts(data: Data) -> Iterable[tuple[Json, Json]]:
    """(file, one context of it), shortest first."""
    found = [(steps, context) for steps in data.steps for context in steps["contexts"]]
    return sorted(found, key=lambda pair: pair[1]["context"])


def pair_ms(row: Json, density: str | None) -> float:
    """Forward and backward of one length: exact (None), or with a share of live tiles."""
    ms = row["ms"]
    if density is None:
        return float(ms["forward"] + ms["backward"])
    return float(ms["forward_with_statistics"] + ms["select"] + ms[f"backward_{density}"])


def length_name(length: int) -> str:
    return f"{length // 1024}k"


def live_shares(row: Json) -> list[str]:
    return [name.removeprefix("backward_") for name in row["density"]]


def break_even(row: Json) -> float:
    """Share of tiles that must be skipped before a sparse pass is the faster one.

    Between the measured shares time is taken for linear.
    """
    points = [(1.0, float(row["ms"]["backward"]))]
    points += [(row["density"][f"backward_{d}"], row["ms"][f"backward_{d}"]) for d in
               live_shares(row)]  # fmt: skip
    extra = row["ms"]["forward_with_statistics"] - row["ms"]["forward"] + row["ms"]["select"]
    allowed = points[0][1] - extra
    for (more, slow), (less, fast) in itertools.pairwise(points):
        if fast <= allowed:
            return 1.0 - (less + (more - less) * (allowed - fast) / (slow - fast))
    return 1.0


def table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines)


def machine(content: Json) -> str:
    versions = content["versions"]
    return f"{content['machine']['gpu']}, torch {versions['torch']}"
