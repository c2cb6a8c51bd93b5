"""The stages one by one: for tests, benchmarks and other selection rules.

::

    out, lse, tile_stats = ops.forward(query, key, value, causal=True, record=True)
    tile_bits = ops.select(tile_stats, 0.05, query_length=Sq, key_length=Sk, causal=True)
    dq, dk, dv = ops.backward(grad_out, query, key, value, out, lse, tile_bits, causal=True)

Shapes use B = batch, H = query heads, Hk = key heads, Sq, Sk = lengths, D = head_dim,
Tm = ceil(Sq / 64), Tn = ceil(Sk / 128).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from . import _checks, _dispatch, _thresholds
from ._kernels import lse_dtype
from .tiles import grid_shape, tile_bits_shape


def forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int] = (-1, -1),
    record: bool = False,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Compute exact attention. Differentiable, with the exact backward.

    Args:
        query: ``(B, Sq, H, D)``: float16, bfloat16, float32 or float64; any strides. On CUDA:
            float16 or bfloat16, D 64 or 128.
        key: ``(B, Sk, Hk, D)`` of the same dtype; Hk divides H.
        value: like key.
        scale: multiplies ``query @ key^T``; by default ``1 / sqrt(D)``.
        causal: query i sees key j only if ``j <= i + Sk - Sq``.
        window_size: ``(left, right)``: query i sees key j only if
            ``i + Sk - Sq - left <= j <= i + Sk - Sq + right``; -1 is unlimited.
        record: measure how much probability each tile holds.

    Returns:
        out ``(B, Sq, H, D)`` of query's dtype; lse ``(B, H, Sq)``, float32 (float64 for float64),
        natural log; and tile_stats, float32 ``(B, H, Tm, Tn)``, or None if not recorded. A query
        that sees no key has out 0 and lse -inf.

    Raises:
        TypeError, ValueError: an argument is not one of those above.
        NotImplementedError: there is no backend for the tensors' device, or it does not serve them.
    """
    is_eager = not _dispatch.is_compiling()
    is_direct = is_eager and _dispatch.is_direct(query, key, value)
    _checks.check_inputs(query, key, value, are_plain=is_direct)
    _checks.check_flag("causal", causal)
    _checks.check_flag("record", record)
    left, right = _checks.check_window(window_size)
    scale = _checks.check_scale(scale)
    needs_grad = torch.is_grad_enabled() and (
        query.requires_grad or key.requires_grad or value.requires_grad
    )
    if needs_grad and query.is_cuda:
        _checks.check_deterministic(None, may_warn=is_eager)
    out, lse, *tile_stats = _dispatch.call_attention(
        is_direct, needs_grad, True, query, key, value, None, scale, causal, left, right, record
    )
    return out, lse, tile_stats[0] if record else None


def select(
    tile_stats: Tensor,
    negl_prob: float | Sequence[float] | Tensor,
    *,
    query_length: int,
    key_length: int,
    causal: bool = False,
    window_size: Sequence[int] = (-1, -1),
) -> Tensor:
    """Choose the tiles that the backward visits.

    In each query-tile row, the lightest tiles are skipped as long as their probabilities add up to
    less than ``negl_prob``. Of equal tiles, the one of lower index goes first.

    Args:
        tile_stats: float32 ``(B, H, Tm, Tn)`` from :func:`forward`.
        negl_prob: from 0 to below 1; one for all heads, or H of them (also as a float tensor).
        query_length: Sq.
        key_length: Sk.
        causal, window_size: as given to :func:`forward`.

    Returns:
        tile_bits, int32 ``(B, H, Tn, ceil(Tm / 32))``; see :func:`back_lite.unpack_tiles`.

    Raises:
        TypeError, ValueError: an argument is not one of those above.
    """
    _checks.check_flag("causal", causal)
    left, right = _checks.check_window(window_size)
    grid = grid_shape(query_length, key_length)
    if isinstance(tile_stats, Tensor) and tile_stats.dim() == 4:
        expected = (*tile_stats.shape[:2], *grid)
    else:  # the check below refuses
        expected = (-1, -1, *grid)
    device = tile_stats.device if isinstance(tile_stats, Tensor) else torch.device("cpu")
    _checks.check_tensor("tile_stats", tile_stats, torch.float32, expected, device)
    if isinstance(negl_prob, Tensor):
        fixed = _thresholds.fixed_point_of_tensor(negl_prob)
        if negl_prob.is_cpu:
            fixed = fixed.to(device, non_blocking=True)
    else:
        fixed = _thresholds.fixed_point(_thresholds.parse(negl_prob), device)
    if fixed.shape[0] not in (1, expected[1]):
        raise _thresholds.wrong_count(fixed.shape[0], expected[1])
    tile_bits: Tensor = _dispatch.call_select(
        tile_stats, fixed, query_length, key_length, causal, left, right
    )
    return tile_bits


def backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    tile_bits: Tensor | None = None,
    grad_lse: Tensor | None = None,
    *,
    scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int] = (-1, -1),
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the gradients, visiting live tiles alone.

    Args:
        grad_out: ``(B, Sq, H, D)``, gradient of the loss with respect to out.
        query, key, value, scale, causal, window_size: as given to :func:`forward`.
        out, lse: as :func:`forward` returned them.
        tile_bits: int32 ``(B, H, Tn, ceil(Tm / 32))``, a set bit for each tile to visit; None is
            exact. A bit of a tile outside the mask has no effect.
        grad_lse: gradient of the loss with respect to lse, of its shape and dtype; None is zero.

    Returns:
        The gradients with respect to query, key and value, of their shapes and dtype.

    Raises:
        TypeError, ValueError: an argument is not one of those above.
        NotImplementedError: there is no backend for the tensors' device, or it does not serve them.
    """
    _checks.check_inputs(query, key, value)
    _checks.check_flag("causal", causal)
    left, right = _checks.check_window(window_size)
    scale = _checks.check_scale(scale)
    if query.is_cuda:
        _checks.check_deterministic(None, may_warn=not _dispatch.is_compiling())
    batch, query_length, num_heads, _ = query.shape
    device, rows = query.device, (batch, num_heads, query_length)
    _checks.check_tensor("grad_out", grad_out, query.dtype, tuple(query.shape), device)
    _checks.check_tensor("out", out, query.dtype, tuple(query.shape), device)
    _checks.check_tensor("lse", lse, lse_dtype(query.dtype), rows, device)
    if grad_lse is not None:
        _checks.check_tensor("grad_lse", grad_lse, lse_dtype(query.dtype), rows, device)
    if tile_bits is not None:
        shape = tile_bits_shape(batch, num_heads, query_length, key.shape[1])
        _checks.check_tensor("tile_bits", tile_bits, torch.int32, shape, device)
    gradients: tuple[Tensor, Tensor, Tensor] = _dispatch.call_backward(
        grad_out, query, key, value, out, lse, tile_bits, grad_lse, scale, causal, left, right
    )
    return gradients
