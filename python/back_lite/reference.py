"""The maths of BackLite in plain PyTorch and float64: the oracle of every test.

    (1) S  = scale * Q K^T, masked     LSE = log sum_j exp S_ij
    (2) P  = exp(S - LSE)              O = P V,  delta = dO . O - dLSE
    (3) dV = P^T dO
    (4) dP = dO V^T
    (5) dS = P * (dP - delta)
    (6) dK = scale * dS^T Q
    (7) dQ = scale * dS K

Written to be believed by reading: one (batch, head, block of query rows) after the other, a whole
row of keys at once, no tricks. A block bounds the memory: a few [512, Sk] matrices of float64.

Shapes: B batch, Sq and Sk lengths, H query heads, Hk key heads (query head h reads key head
h // (H / Hk)), D head dim, Tm = ceil(Sq / 64) query tiles, Tn = ceil(Sk / 128) key tiles. Inputs
are (B, S, H, D) of any floating dtype; results are float64 on the device of the inputs.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

QUERY_TILE = 64
KEY_TILE = 128
PROB_ONE = 1 << 40  # probabilities are compared and added as floor(p * 2^40)

_BLOCK_ROWS = 8 * QUERY_TILE  # whole query tiles, so that a block never splits one


def visible(
    query_length: int,
    key_length: int,
    *,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    rows: slice = slice(None),
    device: torch.device | None = None,
) -> Tensor:
    """Which keys each of the given query rows sees: bool [rows, Sk]."""
    # No wider than the problem, so that sums stay in 64 bits.
    left, right = (min(side, query_length + key_length) for side in window_size)
    shift = key_length - query_length  # the last query is aligned with the last key
    diagonal = torch.arange(query_length, device=device)[rows, None] + shift
    j = torch.arange(key_length, device=device)[None, :]
    see = torch.ones(diagonal.shape[0], key_length, dtype=torch.bool, device=device)
    if causal:
        see &= j <= diagonal
    if left >= 0:
        see &= j >= diagonal - left
    if right >= 0:
        see &= j <= diagonal + right
    return see


def mask_tiles(
    query_length: int,
    key_length: int,
    *,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
) -> Tensor:
    """Tiles in which at least one query row sees at least one key: bool [Tm, Tn]."""
    rows_of_tiles = [
        _fold_keys(
            visible(
                query_length,
                key_length,
                causal=causal,
                window_size=window_size,
                rows=slice(start, start + QUERY_TILE),
            )
        ).any(dim=(0, 2))
        for start in range(0, query_length, QUERY_TILE)
    ]
    empty = torch.zeros(0, _ceil_div(key_length, KEY_TILE), dtype=torch.bool)
    return torch.stack(rows_of_tiles) if rows_of_tiles else empty


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
) -> tuple[Tensor, Tensor]:
    """Exact attention: out [B, Sq, H, D] and lse [B, H, Sq] (natural log).

    A row that sees no key has out 0 and lse -inf.
    """
    batch, query_length, num_heads, head_dim = query.shape
    out = query.new_zeros(batch, query_length, num_heads, head_dim, dtype=torch.float64)
    lse = query.new_zeros(batch, num_heads, query_length, dtype=torch.float64)
    for block in _blocks(query, key, scale, causal, window_size):
        b, h, rows = block.b, block.h, block.rows
        out[b, rows, h] = block.prob @ value[b, :, block.key_head].double()
        lse[b, h, rows] = block.lse
    return out, lse


def tile_stats(
    query: Tensor,
    key: Tensor,
    *,
    scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
) -> Tensor:
    """Probability of every tile, [B, H, Tm, Tn].

    It is the mean, over the query tile's rows that see a key, of the probability that the row gives
    to the tile's keys.
    """
    batch, query_length, num_heads, _ = query.shape
    shape = tile_stats_shape(batch, num_heads, query_length, key.shape[1])
    stats = query.new_zeros(shape, dtype=torch.float64)
    for block in _blocks(query, key, scale, causal, window_size):
        mass = _fold_keys(block.prob).sum(dim=-1)  # [rows, Tn]
        for start in range(0, mass.shape[0], QUERY_TILE):
            tile_rows = slice(start, start + QUERY_TILE)
            num_seeing = int(block.lse[tile_rows].ne(-math.inf).sum())
            m = (block.rows.start + start) // QUERY_TILE
            stats[block.b, block.h, m] = mass[tile_rows].sum(dim=0) / max(num_seeing, 1)
    return stats


def select(
    tile_stats: Tensor,
    negl_prob: float | Sequence[float],
    *,
    query_length: int,
    key_length: int,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
) -> Tensor:
    """Live tiles, bool [B, H, Tm, Tn], of float32 tile_stats; negl_prob: one number or one a head.

    In every query-tile row: sort the tiles that the mask allows by probability (ties: lower key
    tile first) and skip the longest prefix whose sum is < negl_prob; the last tile, the heaviest,
    always stays. Python integers, so sums are exact. A NaN counts as one and is never skipped.
    """
    batch, num_heads, num_rows, _ = tile_stats.shape
    allowed = mask_tiles(query_length, key_length, causal=causal, window_size=window_size)
    live = allowed.expand(tile_stats.shape).clone()
    per_head = [negl_prob] * num_heads if isinstance(negl_prob, (int, float)) else negl_prob
    fixed = [[[[_to_fixed(p) for p in r] for r in h] for h in b] for b in tile_stats.tolist()]
    for b in range(batch):
        for h in range(num_heads):
            budget = _to_fixed(per_head[h])
            for m in range(num_rows):
                tiles = allowed[m].nonzero().flatten().tolist()
                skipped_sum = 0
                for n in sorted(tiles, key=lambda n: (fixed[b][h][m][n], n))[:-1]:
                    skipped_sum += fixed[b][h][m][n]
                    if skipped_sum >= budget:
                        break
                    live[b, h, m, n] = False
    return live.to(tile_stats.device)


def backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    live: Tensor | None = None,
    grad_lse: Tensor | None = None,
    scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of attention(): dq [B, Sq, H, D], dk and dv [B, Sk, Hk, D].

    live (bool [B, H, Tm, Tn], None: all) restricts steps 3 to 7 to live tiles; O and LSE stay
    exact. grad_lse is [B, H, Sq], None: no gradient into LSE.
    """
    scale = _scale_or_default(scale, query)
    dq = torch.zeros_like(query, dtype=torch.float64, memory_format=torch.contiguous_format)
    dk = torch.zeros_like(key, dtype=torch.float64, memory_format=torch.contiguous_format)
    dv = torch.zeros_like(value, dtype=torch.float64, memory_format=torch.contiguous_format)
    for block in _blocks(query, key, scale, causal, window_size):
        b, h, hk, rows, p = block.b, block.h, block.key_head, block.rows, block.prob  # (1), (2)
        q, k, v = query[b, rows, h].double(), key[b, :, hk].double(), value[b, :, hk].double()
        do = grad_out[b, rows, h].double()
        delta = (do * (p @ v)).sum(dim=-1, keepdim=True)
        if grad_lse is not None:
            delta -= grad_lse[b, h, rows, None].double()
        if live is not None:
            p = p * _spread_tiles(live[b, h], rows, key.shape[1])
        dv[b, :, hk] += p.T @ do  # (3)
        dp = do @ v.T  # (4)
        ds = p * (dp - delta)  # (5)
        dk[b, :, hk] += scale * (ds.T @ q)  # (6)
        dq[b, rows, h] = scale * (ds @ k)  # (7)
    return dq, dk, dv


def tile_stats_shape(
    batch: int, num_heads: int, query_length: int, key_length: int
) -> tuple[int, int, int, int]:
    """(B, H, Tm, Tn)."""
    return (
        batch,
        num_heads,
        _ceil_div(query_length, QUERY_TILE),
        _ceil_div(key_length, KEY_TILE),
    )


class _Block(NamedTuple):
    """Some query rows of one head, with all their keys."""

    b: int
    h: int
    key_head: int
    rows: slice  # query rows, starting at a query tile
    prob: Tensor  # P, [rows, Sk]
    lse: Tensor  # [rows]


def _blocks(
    query: Tensor, key: Tensor, scale: float | None, causal: bool, window_size: tuple[int, int]
) -> Iterator[_Block]:
    """Compute steps 1 and 2, block by block."""
    scale = _scale_or_default(scale, query)
    batch, query_length, num_heads, _ = query.shape
    key_length, num_key_heads = key.shape[1:3]
    for start in range(0, query_length, _BLOCK_ROWS):
        rows = slice(start, min(start + _BLOCK_ROWS, query_length))
        hidden = ~visible(
            query_length,
            key_length,
            causal=causal,
            window_size=window_size,
            rows=rows,
            device=query.device,
        )
        for b in range(batch):
            for h in range(num_heads):
                key_head = h // (num_heads // num_key_heads)
                s = scale * (query[b, rows, h].double() @ key[b, :, key_head].double().T)  # (1)
                s.masked_fill_(hidden, -math.inf)
                lse = torch.logsumexp(s, dim=-1)
                p = (s - lse[:, None]).exp_().masked_fill_(hidden, 0.0)  # (2)
                yield _Block(b, h, key_head, rows, p, lse)


def _fold_keys(per_key: Tensor) -> Tensor:
    """[rows, Sk] -> [rows, Tn, 128], padded with zeros."""
    rows, key_length = per_key.shape
    num_tiles = _ceil_div(key_length, KEY_TILE)
    padded = per_key.new_zeros(rows, num_tiles * KEY_TILE)
    padded[:, :key_length] = per_key
    return padded.reshape(rows, num_tiles, KEY_TILE)


def _spread_tiles(live: Tensor, rows: slice, key_length: int) -> Tensor:
    """[Tm, Tn] -> [rows, Sk]: the value of the tile that each element lies in."""
    m = torch.arange(rows.start, rows.stop, device=live.device) // QUERY_TILE
    n = torch.arange(key_length, device=live.device) // KEY_TILE
    return live[m[:, None], n[None, :]]


def _to_fixed(prob: float) -> int:
    """floor(prob * 2^40), clamped to [0, 2^40]; NaN is 2^40."""
    if math.isnan(prob):
        return PROB_ONE
    return math.floor(min(max(prob, 0.0), 1.0) * PROB_ONE)


def _scale_or_default(scale: float | None, query: Tensor) -> float:
    return 1.0 / math.sqrt(query.shape[-1]) if scale is None else scale


def _ceil_div(a: int, b: int) -> int:
    return -(-a // b)
