"""Files of results: each is there whole, or not at all."""

from __future__ import annotations

from pathlib import Path

from back_lite._calibration import write_whole


def write_text(path: Path, text: str) -> None:
    """Where the disk is full, say, the program ends in one line, and what was there stays."""
    try:
        write_whole(path, text)
    except OSError as error:
        raise SystemExit(f"{path}: {error.strerror}") from None
