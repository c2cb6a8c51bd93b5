"""What the command lines of the examples accept: types for argparse, and files and folders."""

from __future__ import annotations

import argparse
import contextlib
import math
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

# What a checkpoint keeps, and the command line that resumes it may not change.
FIXED = ("size", "context", "batch", "steps", "learning_rate", "corpus", "seed", "exact_steps")


def _refused(text: str, accepted: str) -> argparse.ArgumentTypeError:
    return argparse.ArgumentTypeError(f"{text}: accepted {accepted}")


def whole(least: int) -> Callable[[str], int]:
    """Whole numbers from least to what 63 bits hold."""

    def parse(text: str) -> int:
        if not text.removeprefix("-").isdecimal() or not least <= int(text) < 2**63:
            raise _refused(text, f"are whole numbers from {least} to below 2^63")
        return int(text)

    return parse


def _number(text: str, accepted: str, accepts: Callable[[float], bool]) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not accepts(number):
        raise _refused(text, accepted)
    return number


def probability(text: str) -> float:
    """A negl_prob."""
    return abs(_number(text, "are numbers from 0 to below 1", lambda x: 0 <= x < 1))  # -0 is 0


def positive(text: str) -> float:
    return _number(text, "are finite numbers above 0", lambda x: 0 < x < math.inf)


def device(text: str) -> str:
    """cpu, cuda or cuda:N, where this torch sees that GPU."""
    kind, _, index = text.partition(":")
    if text != "cpu" and (kind != "cuda" or text == "cuda:" or not (index or "0").isdecimal()):
        raise _refused(text, "are cpu, cuda and cuda:N")
    if kind == "cuda" and int(index or 0) >= torch.cuda.device_count():
        raise _refused(text, f"is cpu: this torch sees {torch.cuda.device_count()} GPUs")
    return text


def different(option: str, values: list[float]) -> None:
    """Refuse values that a table or a file could not tell apart."""
    names = [f"{value:g}" for value in values]
    if len(set(names)) < len(names):
        raise SystemExit(f"{option} {' '.join(names)}: accepted are different values")


def finite(loss: float, name: str, learning_rate: float) -> float:
    """End a training that has diverged: nothing can be compared with it."""
    if not math.isfinite(loss):
        raise SystemExit(
            f"--learning-rate {learning_rate:g}: the loss of {name} is {loss}; accepted is a rate "
            "at which it stays finite"
        )
    return loss


def make_folder(option: str, folder: Path) -> None:
    """So that what takes minutes is not lost at its end."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SystemExit(f"{option} {folder}: {error.strerror}") from None
    if not os.access(folder, os.W_OK | os.X_OK):
        raise SystemExit(f"{option} {folder}: not to be written to")


def read_checkpoint(option: str, path: Path, names: tuple[str, ...]) -> dict[str, Any]:
    """A checkpoint of examples.train_lm, with these names in it, on the CPU."""
    if not path.is_file():
        raise SystemExit(f"{option}: there is no {path}")
    try:
        state = torch.load(path, weights_only=True, map_location="cpu")
    except Exception as error:  # which one depends on the bytes of a damaged file
        reason = f"{type(error).__name__}: {error}".splitlines()[0].partition(". ")[0]
        raise SystemExit(f"{option}: {path} is damaged, or no checkpoint: {reason}") from None
    if (
        not isinstance(state, dict)
        or any(name not in state for name in names)
        or not (isinstance(state["settings"], dict) and set(state["settings"]) == set(FIXED))
        or not (isinstance(state["runs"], dict) and state["runs"])
    ):
        raise SystemExit(f"{option}: {path} is no checkpoint of examples.train_lm")
    return state


def write_checkpoint(path: Path, state: dict[str, Any]) -> None:
    """Under another name, then renamed: it is there whole or not at all."""
    partial = path.with_suffix(".partial")
    try:
        torch.save(state, partial)
        os.replace(partial, path)
    except (OSError, RuntimeError) as error:
        partial.unlink(missing_ok=True)
        raise SystemExit(f"{path}: not written: {error}") from None


@contextlib.contextmanager
def fitting(option: str, path: Path) -> Iterator[None]:
    """Around what loads a checkpoint's weights: they may be those of another version's model."""
    try:
        yield
    except (RuntimeError, ValueError, LookupError, TypeError) as error:
        raise SystemExit(f"{option}: {path} does not fit: {' '.join(str(error).split())}") from None
