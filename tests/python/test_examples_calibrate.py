"""The examples of calibration, on small problems: they run, and say what they refuse."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

example: Any = pytest.importorskip(
    "examples.calibrate_lm.__main__", reason="the examples show a progress bar with tqdm"
)
TINY = ("--steps", "2", "--context", "256", "--batches", "2", "--unseen", "2", "--device", "cpu")
TINY_CONTROL = ("--steps", "6", "--context", "256", "--every", "20", "--warmup", "1",
                "--check", "2", "--unseen", "1", "--device", "cpu")  # fmt: skip


def run(monkeypatch: pytest.MonkeyPatch, module: Any, *args: str | Path) -> None:
    monkeypatch.setattr(sys, "argv", ["example", *map(str, args)])
    module.main()


def test_calibration_compares_with_single_values(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(monkeypatch, example, *TINY, "--values", "0.1", "0.4", "--out", tmp_path)
    results = json.loads((tmp_path / "results.json").read_text())["results"]
    assert [result["margin"] for result in results] == [2.0, 0.0, 2.0, 0.0]
    assert {value for result in results for value in result["negl_prob"]} <= {0.0, 0.1, 0.4}
    (model,) = tmp_path.glob("model_*")
    assert model.suffix == ".pt"
    model.write_bytes(model.read_bytes()[:1000])
    with pytest.raises(SystemExit, match=r"\.pt: damaged \(.*\); remove it"):
        run(monkeypatch, example, *TINY, "--out", tmp_path)


def test_an_interrupted_save_leaves_no_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(_: object, path: Path) -> None:
        path.write_bytes(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr(torch, "save", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run(monkeypatch, example, *TINY, "--out", tmp_path)
    assert not list(tmp_path.glob("*.pt"))


def test_control_draws_layers_that_were_not_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib")
    control = importlib.import_module("examples.calibrate_lm.control")
    run(monkeypatch, control, *TINY_CONTROL, "--out", tmp_path)
    checks = json.loads((tmp_path / "control.json").read_text())["checks"]
    assert [len(check["negl_prob"]) for check in checks] == [16] * 3
    assert (tmp_path / "control.png").stat().st_size > 0


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("--steps", "0"), "--steps: 0: accepted are whole numbers from 1"),
        (("--batches", "0"), "--batches: 0: accepted"),
        (("--values", "0.1", "2"), "--values: 2: accepted"),
        (("--values", "0.2", "0.1"), "--values [0.2, 0.1]: accepted are ascending"),
        (("--values", "0"), "--values [0.0]: accepted are ascending numbers above 0"),
        (("--device", "tpu"), "--device: tpu: accepted"),
        (("--context", "999999999999"), "--context 999999999999: accepted are whole numbers to"),
    ],
)
def test_calibration_refuses(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    args: tuple[str, ...],
    words: str,
) -> None:
    with pytest.raises(SystemExit) as error:
        run(monkeypatch, example, *TINY, "--out", tmp_path, *args)
    assert words in capsys.readouterr().err + str(error.value)


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("--warmup", "6"), "--steps 6: accepted are enough for a check after the warm-up"),
        (("--check", "7"), "--steps 6: accepted are enough"),
        (("--relative-l2", "2"), "relative_l2 = 2.0: accepted"),
    ],
)
def test_control_refuses(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    args: tuple[str, ...],
    words: str,
) -> None:
    pytest.importorskip("matplotlib")
    control = importlib.import_module("examples.calibrate_lm.control")
    with pytest.raises(SystemExit):
        run(monkeypatch, control, *TINY_CONTROL, "--out", tmp_path, *args)
    assert words in capsys.readouterr().err
