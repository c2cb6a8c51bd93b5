"""Sparse gradients against exact ones, head by head."""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from . import _checks, _dispatch, _thresholds, ops
from .tiles import count_live_by_head, mask_tiles

# Elements that are in float64 at a time. Whole tensors would double or quadruple the memory, and
# more blocks are more calls.
_BLOCK_ELEMENTS = 1 << 22


class ByGradient(NamedTuple):
    """Numbers of the three gradients: dq by query head, dk and dv by key head."""

    dq: Tensor
    dk: Tensor
    dv: Tensor

    def worst(self) -> Tensor:
        """Largest number of each query head: its own dq, or dk or dv of its key head."""
        group = self.dq.shape[-1] // self.dk.shape[-1]
        by_key_head = torch.maximum(self.dk, self.dv)
        if group > 1:
            by_key_head = by_key_head.repeat_interleave(group, dim=-1)
        return torch.maximum(self.dq, by_key_head)


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
    statistics (float32 ``(B, H, Tm, Tn)``) and up to 64 MiB.

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
    problem = Problem(
        query,
        key,
        value,
        grad_out,
        grad_lse,
        scale=scale,
        causal=causal,
        window_size=window_size,
        is_timed=True,
    )
    rows: list[Tensor] = []
    live: list[Tensor] = []
    seconds = [problem.seconds]
    for threshold in thresholds:
        tile_bits, norms, sparse_seconds = problem.measure(threshold)
        rows.append(problem.layout.sums(norms.cpu()))
        if not rows[-1][0].isfinite().all():
            raise _not_finite(query, key, value, grad_out, grad_lse)
        live.append(count_live_by_head(tile_bits))
        seconds.append(sparse_seconds)
    return problem.layout.comparison(
        thresholds,
        torch.stack(rows, dim=1),
        torch.stack(live).cpu(),
        torch.tensor(seconds, dtype=torch.float64, device="cpu"),
    )


class PendingComparison:
    """A comparison for one value whose numbers may still be on the way, as the GPU's work is.

    Raises what :func:`compare_gradients` does of a value; gradients that are not finite show in
    :meth:`result`. Nothing waits for a GPU, if the problem takes no times.
    """

    def __init__(self, problem: Problem, negl_prob: Sequence[float]) -> None:
        self._threshold = _thresholds.parse(negl_prob)
        tile_bits, norms, _ = problem.measure(self._threshold)
        self._layout = problem.layout  # and not the problem with its tensors
        self._tile_bits = tile_bits.to("cpu", non_blocking=True)
        self._norms = norms.to("cpu", non_blocking=True)
        self._copied: torch.cuda.Event | None = None
        if tile_bits.is_cuda:
            self._copied = torch.cuda.Event()
            self._copied.record(torch.cuda.current_stream(tile_bits.device))

    def result(self) -> GradientComparison | None:
        """Wait for the numbers; None where a gradient, exact or sparse, is not finite."""
        if self._copied is not None:
            self._copied.synchronize()
        sums = self._layout.sums(self._norms)[:, None]
        if not math.isfinite(sums.max()):  # of squares; NaN is the largest
            return None
        live = count_live_by_head(self._tile_bits)[None]
        seconds = torch.zeros(2, dtype=torch.float64, device="cpu")
        return self._layout.comparison((self._threshold,), sums, live, seconds)


class _Group(NamedTuple):
    """Gradients of one length, which are summed as one tensor, by blocks of rows."""

    members: tuple[int, ...]  # 0: dQ, 1: dK, 2: dV
    num_heads: int  # of all of them
    rows: int
    num_blocks: int


class _Layout(NamedTuple):
    """How the numbers of a problem lie."""

    num_heads: int
    groups: list[_Group]
    allowed: int

    @staticmethod
    def of(query: Tensor, key: Tensor, allowed: int) -> _Layout:
        batch, query_length, num_heads, head_dim = query.shape
        key_length, num_key_heads = key.shape[1:3]

        def group(length: int, members: tuple[int, ...], heads: int) -> _Group:
            row = 2 * batch * heads * head_dim
            least = max(1, -(-length * row // _BLOCK_ELEMENTS))  # blocks; and then of equal size
            rows = max(1, -(-length // least))
            return _Group(members, heads, rows, max(1, -(-length // rows)))

        if query_length == key_length:
            groups = [group(query_length, (0, 1, 2), num_heads + 2 * num_key_heads)]
        else:
            groups = [
                group(query_length, (0,), num_heads),
                group(key_length, (1, 2), 2 * num_key_heads),
            ]
        return _Layout(num_heads, groups, allowed * batch)

    def norms(self, exact: Sequence[Tensor], sparse: Sequence[Tensor]) -> Tensor:
        """Take norms by block and head: of exact and sparse, and of their difference; one row.

        Calls of torch are what this costs on small tensors; so all gradients and heads are one.
        """
        norms = []
        for group in self.groups:
            tensors = [gradients[i] for gradients in (exact, sparse) for i in group.members]
            for block in zip(*(x.split(group.rows, dim=1) for x in tensors), strict=True):
                both = torch.cat(block, dim=2).double()
                norms.append(torch.linalg.vector_norm(both, dim=(0, 1, 3)))
                one, other = both.chunk(2, dim=2)
                norms.append(torch.linalg.vector_norm(other.sub_(one), dim=(0, 1, 3)))
        return torch.cat(norms)

    def sums(self, norms: Tensor) -> Tensor:
        """Sum over batch, length and head_dim: float64 ``(3, H + 2 Hk)``.

        The squares of the exact gradient, of the sparse one, and of their difference.
        """
        sizes = [3 * group.num_blocks * group.num_heads for group in self.groups]
        parts = norms.square().split(sizes)
        return torch.cat(
            [
                part.view(group.num_blocks, 3, group.num_heads).sum(0)
                for part, group in zip(parts, self.groups, strict=True)
            ],
            dim=1,
        )

    def comparison(
        self,
        thresholds: tuple[_thresholds.Thresholds, ...],
        sums: Tensor,
        live: Tensor,
        seconds: Tensor,
    ) -> GradientComparison:
        """Put the numbers of V values together; sums are ``(3, V, H + 2 Hk)``."""
        exact, sparse, difference = sums
        return GradientComparison(
            thresholds,
            self.num_heads,
            exact[0],
            sparse,
            (exact + sparse - difference) / 2,
            difference,
            live,
            self.allowed,
            seconds,
        )


class Problem:
    """Inputs with their exact gradients; one sparse backward a value.

    Takes and raises what :func:`compare_gradients` does, gradients that are not finite apart. Only
    if ``is_timed`` does it wait for a GPU.
    """

    def __init__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        grad_out: Tensor,
        grad_lse: Tensor | None,
        *,
        scale: float | None,
        causal: bool,
        window_size: Sequence[int],
        is_timed: bool,
    ) -> None:
        query, key, value = (
            x.detach() if isinstance(x, Tensor) else x for x in (query, key, value)
        )
        self._is_timed = is_timed
        with torch.no_grad():
            out, lse, stats = ops.forward(
                query, key, value, scale=scale, causal=causal, window_size=window_size, record=True
            )
            assert stats is not None
            self._stats, self._lengths = stats, (query.shape[1], key.shape[1])
            self._tensors = grad_out, query, key, value, out, lse
            self._grad_lse = grad_lse
            self._mask = causal, *_checks.check_window(window_size)
            self._scale = _checks.check_scale(scale)
            start = self._now()
            self._exact = ops.backward(
                *self._tensors,
                None,
                grad_lse,
                scale=scale,
                causal=causal,
                window_size=window_size,
            )
            self.seconds = self._now() - start
        self.layout = _Layout.of(query, key, _count_allowed(*self._lengths, *self._mask))

    def measure(self, thresholds: _thresholds.Thresholds) -> tuple[Tensor, Tensor, float]:
        """Return tile bits, norms (see :class:`_Layout`) and the seconds of a sparse backward."""
        count = _thresholds.count(thresholds)
        if count not in (1, self.layout.num_heads):
            raise _thresholds.wrong_count(count, self.layout.num_heads)
        with torch.no_grad():
            # What the checks of the stages say is known already.
            fixed = _thresholds.fixed_point(thresholds, self._stats.device)
            tile_bits = _dispatch.call_select(self._stats, fixed, *self._lengths, *self._mask)
            start = self._now()
            sparse = _dispatch.call_backward(
                *self._tensors, tile_bits, self._grad_lse, self._scale, *self._mask
            )
            seconds = self._now() - start
            return tile_bits, self.layout.norms(self._exact, sparse), seconds

    def _now(self) -> float:
        if self._is_timed and self._stats.is_cuda:
            torch.cuda.synchronize(self._stats.device)
        return time.perf_counter()


@functools.lru_cache(maxsize=64)
def _count_allowed(query_length: int, key_length: int, causal: bool, left: int, right: int) -> int:
    grid = mask_tiles(
        query_length, key_length, causal=causal, window_size=(left, right), device="cpu"
    )
    return int(grid.sum())


def _not_finite(
    query: Tensor, key: Tensor, value: Tensor, grad_out: Tensor, grad_lse: Tensor | None
) -> ValueError:
    named = {"query": query, "key": key, "value": value, "grad_out": grad_out, "grad_lse": grad_lse}
    for name, x in named.items():
        if x is not None and not x.isfinite().all():
            return ValueError(f"{name} holds NaN or infinity: accepted are finite numbers")
    return ValueError("the exact gradients overflow: accepted are inputs with finite ones")
