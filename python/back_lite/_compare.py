"""Sparse gradients against exact ones, head by head."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from . import _thresholds, ops
from .tiles import count_live_by_head, mask_tiles

# Elements that are in float64 at a time. Whole tensors would double or quadruple the memory.
_BLOCK_ELEMENTS = 1 << 20


class ByGradient(NamedTuple):
    """Numbers of the three gradients: dq by query head, dk and dv by key head."""

    dq: Tensor
    dk: Tensor
    dv: Tensor

    def worst(self) -> Tensor:
        """Largest number of each query head: its own dq, or dk or dv of its key head."""
        group = self.dq.shape[-1] // self.dk.shape[-1]
        by_key_head = torch.maximum(self.dk, self.dv)
        return torch.maximum(self.dq, by_key_head.repeat_interleave(group, dim=-1))


@dataclass(frozen=True)
class GradientComparison:
    """What :func:`back_lite.compare_gradients` found, for V values of ``negl_prob``.

    Shapes: V values, H query heads, Hk key heads. Tensors are on the CPU. All is derived from sums,
    so that ``a + b`` is the comparison of both calls together.
    """

    #: V values: a float each, or a tuple of one per head
    negl_prob: tuple[float | tuple[float, ...], ...]
    num_heads: int
    #: sums of squares of the exact gradients, float64 ``(H + 2 Hk,)``: of dQ, dK, dV by head
    exact: Tensor
    #: of the sparse gradients, float64 ``(V, H + 2 Hk)``
    sparse: Tensor
    #: sums of exact * sparse, float64 ``(V, H + 2 Hk)``
    dot: Tensor
    #: sums of squares of sparse - exact, float64 ``(V, H + 2 Hk)``
    difference: Tensor
    #: live tiles, int64 ``(V, H)``
    live: Tensor
    #: tiles that the mask allows, in each head
    allowed: int
    #: time of the exact backward and of each sparse one, in seconds, float64 ``(1 + V,)``
    seconds: Tensor

    @property
    def num_key_heads(self) -> int:
        """Hk."""
        return (self.exact.shape[0] - self.num_heads) // 2

    @property
    def relative_l2(self) -> ByGradient:
        """``|sparse - exact| / |exact|``: float64 ``(V, H)``, ``(V, Hk)``, ``(V, Hk)``.

        0 where both are zero.
        """
        error = (self.difference / self.exact).sqrt()
        return self.split(torch.where(self.difference == 0, 0.0, error))

    @property
    def cosine(self) -> ByGradient:
        """Cosine of sparse and exact: float64 ``(V, H)``, ``(V, Hk)``, ``(V, Hk)``.

        1 where both are zero, 0 where one of them is.
        """
        norms = self.exact.sqrt() * self.sparse.sqrt()
        cosine = torch.where(norms == 0, 0.0, self.dot / norms)
        return self.split(torch.where(self.difference == 0, 1.0, cosine))

    @property
    def error(self) -> Tensor:
        """Relative L2 of the worst gradient of each query head, float64 ``(V, H)``.

        A query head answers for its own dQ, and for dK and dV of its key head.
        """
        return self.relative_l2.worst()

    @property
    def has_gradient(self) -> Tensor:
        """Whether any exact gradient of each query head is not zero, bool ``(H,)``.

        Its own dQ, or dK or dV of its key head. Where none is, an error of 0 says nothing.
        """
        return self.split(self.exact > 0).worst()

    @property
    def density(self) -> Tensor:
        """Live tiles / tiles that the mask allows, float64 ``(V, H)``; 1 where it allows none."""
        if not self.allowed:
            return torch.ones_like(self.live, dtype=torch.float64)
        return self.live.double() / self.allowed

    def __add__(self, other: GradientComparison) -> GradientComparison:
        """Both calls together.

        Raises:
            ValueError: they differ in values or head counts.
        """
        if (self.negl_prob, self.num_heads, self.exact.shape) != (
            other.negl_prob,
            other.num_heads,
            other.exact.shape,
        ):
            raise ValueError(
                f"{other.num_heads} query and {other.num_key_heads} key heads, negl_prob = "
                f"{other.negl_prob}: accepted, to be added up, are {self.num_heads} and "
                f"{self.num_key_heads} heads, negl_prob = {self.negl_prob}"
            )
        return GradientComparison(
            self.negl_prob,
            self.num_heads,
            self.exact + other.exact,
            self.sparse + other.sparse,
            self.dot + other.dot,
            self.difference + other.difference,
            self.live + other.live,
            self.allowed + other.allowed,
            self.seconds + other.seconds,
        )

    def split(self, by_head: Tensor) -> ByGradient:
        """Split ``(..., H + 2 Hk)``, as the sums are, into the three gradients."""
        sizes = (self.num_heads, self.num_key_heads, self.num_key_heads)
        return ByGradient(*by_head.split(sizes, dim=-1))


def compare_gradients(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    grad_out: Tensor,
    negl_prob: Sequence[float | Sequence[float] | Tensor],
    *,
    grad_lse: Tensor | None = None,
    scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int] = (-1, -1),
) -> GradientComparison:
    """Measure how far sparse gradients are from the exact ones of the same inputs.

    One forward, one exact backward, and one sparse backward for each value. Besides their results,
    which never are more than one exact and one sparse at a time, it holds out, LSE, the tile
    statistics (float32 ``(B, H, Tm, Tn)``) and a few MiB.

    Shapes: B = batch, H = query heads, Hk = key heads, Sq, Sk = lengths, D = head_dim.

    Args:
        query: ``(B, Sq, H, D)``, of any dtype and device that :func:`back_lite.attention` takes.
        key: ``(B, Sk, Hk, D)``.
        value: like key.
        grad_out: ``(B, Sq, H, D)``, gradient of the loss with respect to the output.
        negl_prob: the values to measure, each from 0 to below 1: one for all heads, or H of them.
        grad_lse: ``(B, H, Sq)``, gradient with respect to the LSE; None is zero.
        scale, causal, window_size: as for :func:`back_lite.attention`.

    Returns:
        Cosine and relative L2 of dQ (by query head), dK and dV (by key head), and the density (by
        query head), for each value.

    Raises:
        TypeError, ValueError: an argument is not one of those above, or a gradient is not finite.
        NotImplementedError: there is no backend for the tensors' device, or it does not serve them.
    """
    if isinstance(negl_prob, (str, Tensor)) or not isinstance(negl_prob, Sequence) or not negl_prob:
        raise TypeError(
            f"negl_prob = {negl_prob!r}: accepted is a sequence of at least one value to measure, "
            "each a number or one per head"
        )
    thresholds = tuple(_thresholds.parse(value) for value in negl_prob)
    query, key, value = (x.detach() if isinstance(x, Tensor) else x for x in (query, key, value))

    def timed_backward(tile_bits: Tensor | None) -> tuple[tuple[Tensor, Tensor, Tensor], float]:
        start = _now(out)
        gradients = ops.backward(
            grad_out,
            query,
            key,
            value,
            out,
            lse,
            tile_bits,
            grad_lse,
            scale=scale,
            causal=causal,
            window_size=window_size,
        )
        return gradients, _now(out) - start

    with torch.no_grad():
        out, lse, stats = ops.forward(
            query, key, value, scale=scale, causal=causal, window_size=window_size, record=True
        )
        assert stats is not None
        lengths = query.shape[1], key.shape[1]
        exact, exact_seconds = timed_backward(None)
        exact_squares = torch.cat([_sums(gradient)[0] for gradient in exact]).cpu()
        if not exact_squares.isfinite().all():
            raise _not_finite(query, key, value, grad_out, grad_lse)
        rows: list[Tensor] = []
        live: list[Tensor] = []
        seconds = [exact_seconds]
        for threshold in thresholds:
            tile_bits = ops.select(
                stats,
                threshold,
                query_length=lengths[0],
                key_length=lengths[1],
                causal=causal,
                window_size=window_size,
            )
            live.append(count_live_by_head(tile_bits))
            sparse, sparse_seconds = timed_backward(tile_bits)
            rows.append(torch.cat([_sums(*pair) for pair in zip(exact, sparse, strict=True)], 1))
            seconds.append(sparse_seconds)
            del sparse  # before the next one is made
    grid = mask_tiles(*lengths, causal=causal, window_size=window_size, device="cpu")
    squares, dot, difference = torch.stack(rows, dim=1).cpu()
    return GradientComparison(
        thresholds,
        query.shape[2],
        exact_squares,
        squares,
        dot,
        difference,
        torch.stack(live).cpu(),
        int(grid.sum()) * query.shape[0],
        torch.tensor(seconds, dtype=torch.float64, device="cpu"),
    )


def _sums(exact: Tensor, sparse: Tensor | None = None) -> Tensor:
    """Sum over batch, length and head_dim: ``(1, heads)`` or ``(3, heads)`` float64.

    The square of the exact gradient; or the square of the sparse one, their product, and the square
    of their difference.
    """
    batch, _, num_heads, head_dim = exact.shape
    rows = max(1, _BLOCK_ELEMENTS // max(1, batch * num_heads * head_dim))
    total = exact.new_zeros(1 if sparse is None else 3, num_heads, dtype=torch.float64)
    for start in range(0, exact.shape[1], rows):
        e = exact[:, start : start + rows].double()
        if sparse is None:
            total[0] += e.square().sum(dim=(0, 1, 3))
            continue
        s = sparse[:, start : start + rows].double()
        total[0] += s.square().sum(dim=(0, 1, 3))
        total[1] += (e * s).sum(dim=(0, 1, 3))
        total[2] += (s - e).square().sum(dim=(0, 1, 3))
    return total


def _now(like: Tensor) -> float:
    if like.is_cuda:
        torch.cuda.synchronize(like.device)
    return time.perf_counter()


def _not_finite(
    query: Tensor, key: Tensor, value: Tensor, grad_out: Tensor, grad_lse: Tensor | None
) -> ValueError:
    named = {"query": query, "key": key, "value": value, "grad_out": grad_out, "grad_lse": grad_lse}
    for name, x in named.items():
        if x is not None and not x.isfinite().all():
            return ValueError(f"{name} holds NaN or infinity: accepted are finite numbers")
    return ValueError("the exact gradients overflow: accepted are inputs with finite ones")
