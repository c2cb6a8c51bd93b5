"""The examples, on small problems: they run, a killed training goes on, what they refuse."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from examples.train_lm.model import load_trained

ROOT = Path(__file__).parents[2]
train_lm: Any = pytest.importorskip(
    "examples.train_lm.__main__", reason="the examples show a progress bar with tqdm"
)

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
        # A shell that starts tests in the background has them, and their children, ignore it.
        preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),
    )


def finish(process: subprocess.Popen[str]) -> None:
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 0, output


def read_run(folder: Path, seed: int = 0) -> dict[str, Any]:
    path = folder / f"negl_prob_0.5_seed_{seed}.json"
    content: dict[str, Any] = json.loads(path.read_text())
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


def test_an_interrupted_training_says_how_it_goes_on(tmp_path: Path) -> None:
    process = train(*TINY, "--steps", "100000", "--out", str(tmp_path))
    deadline = time.monotonic() + 60
    while not (tmp_path / "checkpoint.pt").exists() and time.monotonic() < deadline:
        time.sleep(0.005)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 130
    assert f"--resume --out {tmp_path} goes on" in output
    assert "Traceback" not in output


def run_here(monkeypatch: pytest.MonkeyPatch, *args: str) -> None:
    monkeypatch.setattr(sys, "argv", ["train_lm", "--device", "cpu", *args])
    train_lm.main()


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--negl-prob", "1"), "--negl-prob: 1: accepted are numbers from 0 to below 1"),
        (("--negl-prob", "nan"), "--negl-prob: nan: accepted"),
        (("--negl-prob", "0.05", "0", "0.05"), "--negl-prob 0.05 0 0.05: accepted are different"),
        (("--context", "0"), "--context: 0: accepted are whole numbers from 1"),
        (("--context", "99999999"), "--context 99999999: at most"),
        (("--exact-steps", "-1"), "--exact-steps: -1: accepted are whole numbers from 0"),
        (("--learning-rate", "-1"), "--learning-rate: -1: accepted are finite numbers above 0"),
        (("--learning-rate", "inf"), "--learning-rate: inf: accepted"),
        (("--seed", str(2**63)), "--seed: 9223372036854775808: accepted"),
        (("--device", "cuda:99"), "this torch sees"),
        (("--device", "meta"), "--device: meta: accepted are cpu"),
        (("--out", __file__), f"--out {__file__}: File exists"),
        (("--resume",), "--resume: there is no"),
    ],
)
def test_a_training_refuses(
    tmp_path: Path,
    args: tuple[str, ...],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as refusal:
        run_here(monkeypatch, "--out", str(tmp_path), *args)
    assert message in capsys.readouterr().err + str(refusal.value)


def test_a_training_goes_on_only_as_it_was_begun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    same = ("--steps", "2", "--seed", "3", "--negl-prob", "0.5")
    run_here(monkeypatch, "--context", "65", *same, "--out", str(tmp_path))
    begun = read_run(tmp_path, seed=3)["run"]
    resume = ("--resume", "--out", str(tmp_path))
    run_here(monkeypatch, *resume, *same)
    assert read_run(tmp_path, seed=3)["run"] == begun
    for option, value in (("--steps", "3"), ("--seed", "0"), ("--negl-prob", "0.4")):
        with pytest.raises(SystemExit, match=f"^{option} .*{value}.* was begun with"):
            run_here(monkeypatch, *resume, option, value)

    checkpoint = tmp_path / "checkpoint.pt"
    whole = checkpoint.read_bytes()
    state = torch.load(checkpoint, weights_only=True)
    torch.save(state | {"text": {**state["text"], "sha256": "0"}}, checkpoint)
    with pytest.raises(SystemExit, match="begun with another text"):
        run_here(monkeypatch, *resume)
    weights = state["runs"][0.5]["model"]
    for other in ({**weights, "head.weight": torch.zeros(1)}, {}):
        run = {**state["runs"][0.5], "model": other}
        torch.save({**state, "runs": {0.5: run}}, checkpoint)
        with pytest.raises(SystemExit, match=r"checkpoint\.pt does not fit: .*head\.weight"):
            run_here(monkeypatch, *resume)
        with pytest.raises(SystemExit, match=r"checkpoint\.pt does not fit: .*head\.weight"):
            load_trained(checkpoint, 0.5, "cpu")
    settings = {name: kept for name, kept in state["settings"].items() if name != "context"}
    for other in (weights, state | {"settings": settings}, state | {"runs": {}}):
        torch.save(other, checkpoint)
        with pytest.raises(SystemExit, match="is no checkpoint of"):
            run_here(monkeypatch, *resume)
    for damaged in (whole[:-9], whole[:1000], b"", b"text"):
        checkpoint.write_bytes(damaged)
        with pytest.raises(SystemExit, match="is damaged"):
            run_here(monkeypatch, *resume)


def test_a_full_disk_leaves_the_last_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "checkpoint.pt").write_bytes(b"the last")
    (tmp_path / "checkpoint.partial").symlink_to("/dev/full")
    with pytest.raises(SystemExit, match=r"checkpoint\.pt: not written"):
        run_here(monkeypatch, "--steps", "1", "--context", "65", "--out", str(tmp_path))
    assert (tmp_path / "checkpoint.pt").read_bytes() == b"the last"
    assert not (tmp_path / "checkpoint.partial").is_symlink()


def test_results_are_there_whole_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "exact_seed_0.json").mkdir()
    with pytest.raises(SystemExit, match=r"exact_seed_0\.json: cannot write: Is a directory"):
        run_here(monkeypatch, "--steps", "1", "--context", "65", "--negl-prob", "0",
                 "--out", str(tmp_path))  # fmt: skip
    (tmp_path / "tensorboard" / "exact").rename(tmp_path / "curves")
    (tmp_path / "tensorboard" / "exact").touch()
    with pytest.raises(SystemExit, match="tensorboard/exact: "):
        run_here(monkeypatch, "--steps", "1", "--context", "65", "--negl-prob", "0",
                 "--out", str(tmp_path))  # fmt: skip


@pytest.mark.parametrize("steps", ["1", "3"])
def test_a_diverged_training_ends_in_one_line(
    steps: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    args = ("--steps", steps, "--context", "65", "--exact-steps", "0", "--out", str(tmp_path))
    message = r"--learning-rate 1e\+30: the loss of exact is (nan|inf); accepted is"
    with pytest.raises(SystemExit, match=message):
        run_here(monkeypatch, *args, "--learning-rate", "1e30")


def test_a_new_training_drops_the_curves_of_the_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    accumulator = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator", reason="needs tensorboard"
    )
    for _ in range(2):
        args = ("--steps", "2", "--context", "65", "--negl-prob", "0", "--out", str(tmp_path))
        run_here(monkeypatch, *args)
        time.sleep(1.1)  # the file's name holds the second
    events = accumulator.EventAccumulator(str(tmp_path / "tensorboard" / "exact"))
    events.Reload()
    assert [event.step for event in events.Scalars("loss/train")] == [1, 2]
