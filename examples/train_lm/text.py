"""The bytes that the model reads: Python's own sources, and torch's for longer trainings."""

from __future__ import annotations

import functools
import hashlib
import sysconfig
import zlib
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

NOT_TEXT = {"site-packages", "dist-packages", "test", "tests", "encodings", "lib2to3", "idlelib"}
CORPORA = ("stdlib", "torch")


@dataclass(frozen=True)
class Text:
    train: Tensor  # uint8 [bytes]
    validation: Tensor  # uint8 [bytes]

    @functools.cached_property
    def description(self) -> dict[str, object]:
        """Two machines trained on the same text if this is the same."""
        digest = hashlib.sha256(self.train.numpy().tobytes())
        digest.update(self.validation.numpy().tobytes())
        return {
            "train_bytes": len(self.train),
            "validation_bytes": len(self.validation),
            "sha256": digest.hexdigest(),
        }


@functools.cache
def read(corpus: str = "stdlib") -> Text:
    """Bytes of the *.py files of Python's standard library; "torch" adds those of torch.

    Files come in the order of their names. Every 16th or so is for validation: which ones depends
    on their names alone.
    """
    roots = [Path(sysconfig.get_path("stdlib"))]
    if corpus == "torch":
        roots.append(Path(torch.__file__).parent)
    parts: tuple[list[bytes], list[bytes]] = ([], [])
    for root in roots:
        for path in sorted(root.rglob("*.py")):
            name = path.relative_to(root)
            if not NOT_TEXT & set(name.parts) and not name.name.startswith("_sysconfigdata"):
                parts[zlib.crc32(name.as_posix().encode()) % 16 == 0].append(path.read_bytes())
    return Text(
        *(torch.frombuffer(bytearray(b"\n".join(part)), dtype=torch.uint8) for part in parts)
    )


def load_text() -> tuple[Tensor, Tensor]:
    """(training, validation) bytes of the standard library."""
    text = read()
    return text.train, text.validation


def windows(text: Tensor, starts: Tensor, context: int, device: str) -> Tensor:
    """int64 [len(starts), context + 1]: inputs, and the same shifted by one as targets."""
    return text[starts[:, None] + torch.arange(context + 1)].to(device).long()
