"""The operators on plain CPU tensors: allocation, copies that the library needs, and the call."""

from __future__ import annotations

import torch
from torch import Tensor

from . import _library
from .tiles import grid_shape, tile_bits_shape, words_per_head

Gradients = tuple[Tensor, Tensor, Tensor]


def lse_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return float64 for float64 (a float32 LSE would cap its gradients at 1e-7), else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def _empty_like(tensor: Tensor) -> Tensor:
    return torch.empty_like(tensor, memory_format=torch.contiguous_format)


def _rows(tensor: Tensor) -> Tensor:
    """Return the tensor, copied if its rows are not runs of memory apart from each other.

    Not worth a call (0.2 us) for a tensor that is contiguous.
    """
    _, length_stride, _, last_stride = tensor.stride()
    if last_stride == 1 and (length_stride >= tensor.shape[3] or length_stride == 0):
        return tensor
    return tensor.contiguous()


def allocate_outputs(query: Tensor, key: Tensor, selects: bool, record: bool) -> list[Tensor]:
    """Allocate out and LSE, then tile bits if selecting, then tile statistics if recording.

    Also what a fake (shape-only) call returns. The tile bits have one dimension: torch.compile asks
    whether they are contiguous, and would compile again where one of four dimensions becomes 1
    (from 129 keys to 128, from 2049 queries to 2048).
    """
    batch, query_length, num_heads, _ = query.shape
    outputs = [
        _empty_like(query),
        query.new_empty(batch, num_heads, query_length, dtype=lse_dtype(query.dtype)),
    ]
    if selects:
        words = batch * num_heads * words_per_head(query_length, key.shape[1])
        outputs.append(query.new_empty(words, dtype=torch.int32))
    if record:
        grid = grid_shape(query_length, key.shape[1])
        outputs.append(query.new_empty(batch, num_heads, *grid, dtype=torch.float32))
    return outputs


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    negl_prob: Tensor | None,
    scale: float | None,
    causal: bool,
    window_left: int,
    window_right: int,
    record: bool,
) -> list[Tensor]:
    """Run the forward, and the selection where ``negl_prob`` is given."""
    selects = negl_prob is not None
    outputs = allocate_outputs(query, key, selects, record)
    _library.forward(
        query if query.is_contiguous() else _rows(query),
        key if key.is_contiguous() else _rows(key),
        value if value.is_contiguous() else _rows(value),
        outputs[0],
        outputs[1],
        outputs[-1] if record else None,
        negl_prob,
        outputs[2] if selects else None,
        query.shape[3] ** -0.5 if scale is None else scale,
        causal,
        window_left,
        window_right,
        torch.get_num_threads(),
    )
    return outputs


def allocate_tile_bits(tile_stats: Tensor, query_length: int, key_length: int) -> Tensor:
    """Allocate the tile bits of a selection. Also what a fake call returns."""
    batch, num_heads, _, _ = tile_stats.shape
    shape = tile_bits_shape(batch, num_heads, query_length, key_length)
    return tile_stats.new_empty(shape, dtype=torch.int32)


def select(
    tile_stats: Tensor,
    negl_prob: Tensor,
    query_length: int,
    key_length: int,
    causal: bool,
    window_left: int,
    window_right: int,
) -> Tensor:
    """Run the selection."""
    tile_bits = allocate_tile_bits(tile_stats, query_length, key_length)
    _library.select(
        tile_stats.contiguous(),
        negl_prob.contiguous(),
        tile_bits,
        query_length,
        key_length,
        causal,
        window_left,
        window_right,
        torch.get_num_threads(),
    )
    return tile_bits


def allocate_gradients(query: Tensor, key: Tensor, value: Tensor) -> Gradients:
    """Allocate the three gradients. Also what a fake call returns."""
    return _empty_like(query), _empty_like(key), _empty_like(value)


def backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    tile_bits: Tensor | None,
    grad_lse: Tensor | None,
    scale: float | None,
    causal: bool,
    window_left: int,
    window_right: int,
) -> Gradients:
    """Run the schedule and the backward."""
    gradients = allocate_gradients(query, key, value)
    _library.backward(
        grad_out if grad_out.is_contiguous() else _rows(grad_out),
        query if query.is_contiguous() else _rows(query),
        key if key.is_contiguous() else _rows(key),
        value if value.is_contiguous() else _rows(value),
        out if out.is_contiguous() else _rows(out),
        lse.contiguous(),
        None if grad_lse is None else grad_lse.contiguous(),
        None if tile_bits is None else tile_bits.contiguous(),
        *gradients,
        query.shape[3] ** -0.5 if scale is None else scale,
        causal,
        window_left,
        window_right,
        torch.get_num_threads(),
    )
    return gradients
