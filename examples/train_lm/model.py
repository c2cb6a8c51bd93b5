"""A small causal language model of bytes, with BackLite as its attention."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from back_lite import BackLite
from torch import Tensor, nn

from .arguments import fitting, read_checkpoint


@dataclass(frozen=True)
class Shape:
    layers: int
    width: int
    heads: int
    head_dim: int


SMALL = Shape(layers=4, width=256, heads=4, head_dim=64)  # trains on two CPU cores
LARGE = Shape(layers=6, width=512, heads=8, head_dim=128)  # 25 million weights, for a GPU
SHAPES = {"small": SMALL, "large": LARGE}


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions. x: [B, S, H, D]; cos, sin: [S, 1, D / 2]."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


class Block(nn.Module):
    def __init__(self, negl_prob: float, shape: Shape) -> None:
        super().__init__()
        width, inner = shape.width, shape.heads * shape.head_dim
        self.heads = shape.heads
        self.attention = BackLite(negl_prob)
        self.norm1 = nn.LayerNorm(width, bias=False)
        self.norm2 = nn.LayerNorm(width, bias=False)
        self.qkv = nn.Linear(width, 3 * inner, bias=False)
        self.mix = nn.Linear(inner, width, bias=False)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)
        for last in (self.mix, self.down):
            nn.init.zeros_(last.weight)  # a new block changes nothing: deeper models start well

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        qkv = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1))
        query, key, value = qkv.unbind(dim=2)
        cos, sin = cos.to(qkv.dtype), sin.to(qkv.dtype)
        out = self.attention(rotate(query, cos, sin), rotate(key, cos, sin), value, causal=True)
        x = x + self.mix(out.flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class LanguageModel(nn.Module):
    """Computes in bfloat16 on a GPU, through autocast, and in float32 on a CPU."""

    def __init__(self, negl_prob: float, shape: Shape = SMALL) -> None:
        super().__init__()
        self.head_dim = shape.head_dim
        self.embed = nn.Embedding(256, shape.width)
        self.blocks = nn.ModuleList(Block(negl_prob, shape) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.width, bias=False)
        self.head = nn.Linear(shape.width, 256, bias=False)

    def attentions(self) -> list[BackLite]:
        return [module for module in self.modules() if isinstance(module, BackLite)]

    def set_negl_prob(self, negl_prob: float) -> None:
        for attention in self.attentions():
            attention.negl_prob = negl_prob

    def forward(self, text: Tensor) -> Tensor:
        """Mean loss, in nats per byte, of predicting text[:, 1:] from what comes before."""
        half = self.head_dim // 2
        frequencies = 10000 ** -(torch.arange(half, device=text.device) / half)
        angles = torch.arange(text.shape[1] - 1, device=text.device)[:, None, None] * frequencies
        cos, sin = angles.cos(), angles.sin()
        with torch.autocast(text.device.type, torch.bfloat16, enabled=text.is_cuda):
            x = self.embed(text[:, :-1])
            for block in self.blocks:
                x = block(x, cos, sin)
            logits: Tensor = self.head(self.norm(x))
            return F.cross_entropy(logits.flatten(0, 1), text[:, 1:].flatten())


def load_trained(
    checkpoint: Path, negl_prob: float, device: str
) -> tuple[LanguageModel, dict[str, Any]]:
    """The model of one training of a checkpoint, and the settings of all of them."""
    state = read_checkpoint("--checkpoint", checkpoint, ("settings", "runs"))
    if negl_prob not in state["runs"]:
        raise SystemExit(
            f"--run: {checkpoint} has no training with {negl_prob}: {list(state['runs'])}"
        )
    with fitting("--checkpoint", checkpoint):
        model = LanguageModel(0.0, SHAPES[state["settings"]["size"]]).to(device)
        model.load_state_dict(state["runs"][negl_prob]["model"])
    return model, state["settings"]
