"""Choices of live tiles, bool [B, H, Tm, Tn]."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

MODEL_LAYERS = (3, 9)
MODEL_HEADS = 8
_FILE = Path(__file__).parent / "data" / "lm_8k_causal.npz"


def model_tiles(layer: int) -> Tensor:
    """[1, 8, 128, 64]: a language model's layer at 8192 tokens, causal; see data/README.md."""
    packed = np.load(_FILE)
    heads = [packed[f"l{layer}h{h}p0.05"] for h in range(MODEL_HEADS)]
    tiles = np.unpackbits(np.stack(heads), axis=-1, bitorder="little")
    return torch.from_numpy(tiles)[None].bool()


def random_tiles(allowed: Tensor, density: float) -> Tensor:
    """The same number of live tiles in every head, anywhere that the mask allows."""
    generator = torch.Generator().manual_seed(0)
    order = torch.rand(allowed.shape, generator=generator).masked_fill(~allowed, 2.0).flatten(2)
    count = round(density * allowed[0, 0].sum().item())
    threshold = order.kthvalue(count, dim=-1, keepdim=True).values
    return (order <= threshold).view(allowed.shape)
