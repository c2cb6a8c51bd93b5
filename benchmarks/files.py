"""Files of results: each is there whole, or not at all."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from back_lite._calibration import write_whole


@contextlib.contextmanager
def written(path: Path) -> Iterator[None]:
    """Where the disk is full, say, the program ends in one line."""
    try:
        yield
    except OSError as error:
        raise SystemExit(f"{path}: {error.strerror}") from None


def write_text(path: Path, text: str) -> None:
    """Where it fails, what was there stays."""
    with written(path):
        write_whole(path, text)
