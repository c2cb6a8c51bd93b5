"""``BACK_LITE_VERBOSE=1``: one log record a call, through the logger ``back_lite``."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from . import _dispatch
from .tiles import count_live, mask_tiles

logger = logging.getLogger("back_lite")

# os.environ encodes a name at each look-up, which takes 0.7 us; behind it is a dict of bytes.
_environment: Mapping[Any, Any] = getattr(os.environ, "_data", os.environ)
_NAME = b"BACK_LITE_VERBOSE" if _environment is not os.environ else "BACK_LITE_VERBOSE"
_OFF = (None, b"", b"0", "", "0")


def is_on(query: Tensor) -> bool:
    """Tell whether to log this eager call; never while a CUDA graph is captured."""
    if _environment.get(_NAME) in _OFF:
        return False
    return not (query.is_cuda and torch.cuda.is_current_stream_capturing())


def density(
    tile_bits: Tensor,
    query_shape: torch.Size,
    key_shape: torch.Size,
    causal: bool,
    window: tuple[int, int],
) -> float:
    """Return live tiles / tiles that the mask allows; 1.0 where it allows none."""
    batch, query_length, num_heads, _ = query_shape
    mask = mask_tiles(query_length, key_shape[1], causal=causal, window_size=window, device="cpu")
    allowed = int(mask.sum()) * batch * num_heads
    return count_live(tile_bits) / allowed if allowed else 1.0


def log_call(
    query: Tensor,
    key: Tensor,
    causal: bool,
    window: tuple[int, int],
    tile_stats: Tensor | None,
    tile_bits: Tensor | None,
) -> None:
    """Log tile statistics, mask density and backward sparsity; None: nothing was recorded."""
    if not logger.hasHandlers():
        logger.addHandler(logging.StreamHandler())
    if logger.level == logging.NOTSET:
        logger.setLevel(logging.INFO)
    parts = [
        f"query {tuple(query.shape)} key {tuple(key.shape)} {query.dtype}".replace("torch.", "")
    ]
    if not _dispatch.is_readable(query):
        parts.append("tiles cannot be read inside a transform or with fake tensors")
        logger.info(" | ".join(parts))
        return
    query_length, key_length = query.shape[1], key.shape[1]
    mask = mask_tiles(query_length, key_length, causal=causal, window_size=window, device="cpu")
    mask_density = float(mask.double().mean()) if mask.numel() else 1.0
    parts.append(f"mask density {mask_density:.4f} ({int(mask.sum())} of {mask.numel()} tiles)")
    if tile_stats is not None and tile_stats.numel() and bool(mask.any()):
        allowed = tile_stats[..., mask.to(tile_stats.device)]
        low, mean, high = (float(x) for x in (allowed.min(), allowed.mean(), allowed.max()))
        parts.append(f"tile stats min {low:.3e} mean {mean:.3e} max {high:.3e}")
    if tile_bits is None:
        parts.append("backward sparsity 0 (exact)")
    else:
        sparsity = 1.0 - density(tile_bits, query.shape, key.shape, causal, window)
        parts.append(f"backward sparsity {sparsity:.4f}")
    logger.info(" | ".join(parts))
