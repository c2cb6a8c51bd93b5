"""What ``python -m back_lite calibrate --example`` runs; also a pattern for ``--script``.

A script defines three names: ``model``, ``batches`` and, where ``model(batch)`` does not return the
loss, ``step``. This one trains a model of two layers for some seconds before, since attention that
has learned nothing is spread evenly and has nothing to skip.
"""

from __future__ import annotations

import sysconfig
from pathlib import Path

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from back_lite import BackLite

CONTEXT, WIDTH, HEADS, TRAINING_STEPS, BATCHES = 1024, 128, 4, 60, 4


class Block(nn.Module):
    """Attention and a small network, each added to its input."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = BackLite()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.mix = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """``(batch, length, WIDTH)`` to the same."""
        qkv = self.qkv(self.norm1(x)).unflatten(-1, (3, HEADS, WIDTH // HEADS))
        x = x + self.mix(self.attention(*qkv.unbind(dim=2), causal=True).flatten(2))
        out: Tensor = x + self.down(F.gelu(self.up(self.norm2(x))))
        return out


class LanguageModel(nn.Module):
    """Predicts the next byte."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, WIDTH)
        self.place = nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.Sequential(Block(), Block())
        self.head = nn.Linear(WIDTH, 256)

    def forward(self, text: Tensor) -> Tensor:
        """Mean loss over int64 ``(batch, CONTEXT + 1)``."""
        x = self.blocks(self.embed(text[:, :-1]) + self.place.weight)
        return F.cross_entropy(self.head(x).flatten(0, 1), text[:, 1:].flatten())


def read_windows(count: int) -> list[Tensor]:
    """Windows of Python's own sources, each int64 ``(1, CONTEXT + 1)``."""
    sources = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    joined = bytearray(b"\n".join(path.read_bytes() for path in sources))
    text = torch.frombuffer(joined, dtype=torch.uint8).long()
    starts = torch.linspace(0, len(text) - CONTEXT - 1, count).long()
    return [text[start : start + CONTEXT + 1][None] for start in starts]


torch.manual_seed(0)
model = LanguageModel()
windows = read_windows(TRAINING_STEPS + BATCHES)
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
for window in windows[::-1][BATCHES:]:
    model(window).backward()
    optimizer.step()
    optimizer.zero_grad()

batches = windows[-BATCHES:]


def step(model: nn.Module, batch: Tensor) -> None:
    """Run forward and backward, as the training does, without the optimizer."""
    model(batch).backward()
