"""TensorBoard, where it is installed."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from benchmarks.files import written


class Log:
    """One training's curves. Without tensorboard it keeps nothing: the JSON has all of it."""

    def __init__(self, folder: Path, done: int) -> None:
        """done: steps so far; what the folder holds of later ones, or of another training, is
        dropped."""
        self._folder = folder
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:  # absent, or too old for this torch
            self._writer = None
        else:
            with written(folder):
                self._writer = SummaryWriter(str(folder), purge_step=done + 1)

    def add(self, step: int, values: Mapping[str, float]) -> None:
        if self._writer is not None:
            with written(self._folder):
                for name, value in values.items():
                    self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        if self._writer is not None:
            with written(self._folder):
                self._writer.close()
