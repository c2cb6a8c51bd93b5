"""docs/results.md follows from its JSON, and the numbers that it derives are right."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from benchmarks.results.data import (
    Data,
    Training,
    break_even,
    differences,
    load,
    pairs,
)
from benchmarks.results.text import noise, write

ROOT = Path(__file__).resolve().parents[2]


def test_the_page_is_that_of_the_json() -> None:
    text = write(load(ROOT / "docs/results"))
    assert (ROOT / "docs/results.md").read_text() == text, "make results"


def test_what_is_missing_leaves_its_section_out(tmp_path: Path) -> None:
    text = write(load(tmp_path))
    assert "## A training" not in text
    assert "## Stages" not in text


def write_training(folder: Path, name: str, content: dict[str, Any], **changes: Any) -> Path:
    settings = {**content["settings"], **changes}
    path = folder / f"training/{name}.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps({**content, "settings": settings}))
    return path


EXACT = json.loads((ROOT / "docs/results/training/exact_seed_0.json").read_text())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"seed": 0}, "a second one of this negl_prob and seed"),
        ({"context": 4096}, "context = 4096: accepted is 8192, as in all trainings"),
        ({"steps": 100}, "steps = 200: accepted is 100"),
        ({"size": "small"}, "size = small: accepted is large"),
    ],
)
def test_trainings_of_two_kinds_are_not_averaged(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    write_training(tmp_path, "b", EXACT)
    write_training(tmp_path, "c", EXACT, seed=1)
    write_training(tmp_path, "d", EXACT, seed=0, negl_prob=0.3)
    assert "| 0.3 | 1 |" in write(load(tmp_path))
    path = write_training(tmp_path, "a" if "steps" in changes else "e", EXACT, **changes)
    with pytest.raises(SystemExit, match=message) as refusal:
        load(tmp_path)
    assert str(path) in str(refusal.value)


@pytest.mark.parametrize("name", ["validation", "density"])
@pytest.mark.parametrize("kept", [0, 2])
def test_trainings_that_were_cut_off_are_refused(name: str, kept: int, tmp_path: Path) -> None:
    run = {**EXACT["run"], name: EXACT["run"][name][:kept]}
    write_training(tmp_path, "a", EXACT)
    path = write_training(tmp_path, "b", {**EXACT, "run": run}, seed=1)
    with pytest.raises(SystemExit, match=rf"{re.escape(str(path))}: .*{name} = \["):
        load(tmp_path)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"command": "x"}', '{"a": NaN}', "\xff"])
def test_a_file_that_is_none_of_ours_is_named(text: str, tmp_path: Path) -> None:
    (tmp_path / "stages.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(SystemExit, match=r"stages\.json: "):
        load(tmp_path)


DAMAGED: list[tuple[str, str, Any, str]] = [
    ("layers", "layers.0.1.cosine.dQ", "x", "accepted is a number"),
    ("layers", "layers.2.1.negl_prob", 0.3, "layers.2: negl_prob = "),
    ("smollm2", "trainings.sdpa.step_seconds", [], "accepted is a list of one or more"),
    ("smollm2", "forward.eager", {}, "accepted is an object with loss"),
    ("smollm2_steps", "shapes.0.steps.1.kernel_ms", None, "accepted is a number"),
    ("speed", "contexts.0.steps", None, "accepted is a list"),
    ("stages", "lengths.3.density", {"backward_0.5": 0.5}, "lengths.3: density and ms"),
    ("stages", "machine.gpu", None, "accepted is str"),
    ("training/exact_seed_0", "settings", "x", "accepted is an object with context"),
    ("training/exact_seed_0", "run.validation.1", [60], "accepted is a list of 2"),
]


@pytest.mark.parametrize(("name", "place", "value", "message"), DAMAGED)
def test_what_a_file_lacks_is_named(
    name: str, place: str, value: Any, message: str, tmp_path: Path
) -> None:
    content = inner = json.loads((ROOT / f"docs/results/{name}.json").read_text())
    *way, last = [int(key) if key.isdecimal() else key for key in place.split(".")]
    for key in way:
        inner = inner[key]
    inner[last] = value
    path = tmp_path / f"{name}.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(content))
    with pytest.raises(SystemExit, match=rf"{re.escape(str(path))}: .*{re.escape(message)}"):
        load(tmp_path)


def test_seeds_without_an_exact_training_have_no_difference(tmp_path: Path) -> None:
    write_training(tmp_path, "exact", EXACT)
    write_training(tmp_path, "other", EXACT, negl_prob=0.05, seed=1, exact_steps=20)
    text = write(load(tmp_path))
    assert re.search(r"\| 0\.05 \| 1 \| [\d.]+ \|  \|", text)


def row(extra_ms: float) -> dict[str, Any]:
    """Backward times of 10 ms dense, 6 at half of the tiles and 4 at a quarter."""
    return {
        "ms": {
            "forward": 5.0,
            "forward_with_statistics": 5.0 + extra_ms / 2,
            "select": extra_ms / 2,
            "backward": 10.0,
            "backward_0.5": 6.0,
            "backward_0.25": 4.0,
        },
        "density": {"backward_0.5": 0.5, "backward_0.25": 0.25},
    }


@pytest.mark.parametrize(
    ("extra_ms", "skipped"), [(0.0, 0.0), (2.0, 0.25), (4.0, 0.5), (5.0, 0.625), (7.0, 1.0)]
)
def test_break_even(extra_ms: float, skipped: float) -> None:
    assert break_even(row(extra_ms)) == pytest.approx(skipped)


STAGES = json.loads((ROOT / "docs/results/stages.json").read_text())


def test_a_peer_has_a_column_where_it_was_measured(tmp_path: Path) -> None:
    short, long = (
        {**row} | {part: {n: x for n, x in row[part].items() if "FA4" not in n}
                   for part in ("ms", "peak_bytes")}
        for row in (STAGES["lengths"][0], STAGES["lengths"][-1])
    )  # fmt: skip
    there = {**short, "ms": {**short["ms"], "FA4_forward": 12.5, "FA4_backward": 25.25}}
    content = {**STAGES, "fa4": True, "lengths": [there, long]}
    assert "FA4" not in write(Data(stages={**content, "lengths": [long]}))
    header, _, first, last = re.findall(r"^\|.*", write(Data(stages=content)), re.MULTILINE)[:4]
    places = [header.split("|").index(f" FA4 {name} ") for name in ("forward", "backward")]
    assert [first.split("|")[place] for place in places] == [" 12.500 ", " 25.250 "]
    assert [last.split("|")[place].strip() for place in places] == ["", ""]


def training(negl_prob: float, seed: int, *losses: float) -> Training:
    run = {"validation": [[step, loss] for step, loss in enumerate(losses)]}
    return Training({"settings": {"negl_prob": negl_prob, "seed": seed}, "run": run})


def test_trainings_are_compared_by_seed() -> None:
    data = Data(
        trainings={
            0.0: [training(0.0, 0, 3.0, 2.0), training(0.0, 1, 3.0, 1.0)],
            0.1: [training(0.1, 1, 3.0, 1.5), training(0.1, 7, 9.0, 9.0)],
        },
        again=[training(0.0, 1, 3.5, 1.25)],
    )
    assert differences(data, 0.1) == [0.5]
    assert [(again.loss, first.loss) for again, first in pairs(data)] == [(1.25, 1.0)]
    assert noise(data).endswith("ended that much higher: +0.2500 (exact, 1 seed).")
    data.again.append(training(0.0, 0, 3.0, 2.5))
    assert "+0.3750 ± 0.1768 (exact, 2 seeds). Beside" in noise(data)
    data.trainings[0.1][1] = training(0.1, 0, 3.0, 2.5)
    assert noise(data).endswith("the differences are +0.312 at 0.1.")
    assert noise(Data()) == ""


def test_exact_trainings_that_differ_are_said_to() -> None:
    first = [training(0.0, seed, 2.0) for seed in range(4)]
    for shift, is_far in ((0.1, True), (0.0, False)):
        again = [training(0.0, seed, 2.0 + shift + 0.01 * seed) for seed in range(4)]
        text = noise(Data(trainings={0.0: first}, again=again))
        assert ("+17.8 standard errors away with nothing skipped" in text) == is_far
