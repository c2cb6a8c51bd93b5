"""The examples, on small problems: they run, a killed training goes on, what they refuse."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).parents[2]
pytest.importorskip("tqdm", reason="the examples show a progress bar")

# Half of the attention may be left out, so that even an untrained model skips tiles.
TINY = ("--size", "small", "--context", "512", "--steps", "14", "--negl-prob", "0.5",
        "--exact-steps", "3", "--save-every", "2", "--device", "cpu")  # fmt: skip


def train(*args: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "examples.train_lm", *args],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def finish(process: subprocess.Popen[str]) -> None:
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 0, output


def read_run(folder: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((folder / "negl_prob_0.5_seed_0.json").read_text())
    return content


def test_a_killed_training_goes_on_with_the_same_curve(tmp_path: Path) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    finish(train(*TINY, "--out", str(whole)))

    process = train(*TINY, "--out", str(killed))
    deadline = time.monotonic() + 60
    while not (killed / "checkpoint.pt").exists() and time.monotonic() < deadline:
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    state = torch.load(killed / "checkpoint.pt", weights_only=True)
    done = len(state["runs"][0.5]["history"]["train_loss"])
    assert 0 < done < 14, "the test was too slow to kill it half-way"

    finish(train("--resume", "--device", "cpu", "--out", str(killed)))
    once, twice = read_run(whole), read_run(killed)
    assert once["text"] == twice["text"]
    for name in ("train_loss", "validation", "density", "error"):
        assert once["run"][name] == twice["run"][name]


def test_a_training_is_exact_first_and_then_sparse(tmp_path: Path) -> None:
    finish(train(*TINY, "--out", str(tmp_path)))
    run = read_run(tmp_path)["run"]
    assert len(run["train_loss"]) == 14
    assert run["train_loss"][-1] < run["train_loss"][0] - 1.0
    first, *others = run["density"]
    assert first[1] == [1.0] * 4
    assert all(density < 0.9 for _, layers in others for density in layers)
    for layer in run["error"][-1]["layers"]:
        assert layer["skipped"] > 0.1
        for name in ("dQ", "dK", "dV"):
            assert 0.0 < layer["relative_l2"][name] < 1.0
            assert layer["cosine"][name] < 1.0


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--negl-prob", "1"), "need --negl-prob in [0, 1)"),
        (("--context", "0"), "of at least 1"),
        (("--resume",), "--resume: there is no"),
    ],
)
def test_a_training_refuses(tmp_path: Path, args: tuple[str, ...], message: str) -> None:
    process = train("--device", "cpu", "--out", str(tmp_path), *args)
    output, _ = process.communicate(timeout=60)
    assert process.returncode != 0
    assert message in output
