"""Test cases are data, grouped by why they exist; nothing here depends on the device.

A Case says what is computed; Case.inputs(device) draws its tensors, the same on every device.
"""

from __future__ import annotations

import dataclasses
import itertools
import random
import zlib
from typing import Any, NamedTuple

import torch
from torch import Tensor

FULL = (False, (-1, -1))
CAUSAL = (True, (-1, -1))


class Inputs(NamedTuple):
    query: Tensor  # [B, Sq, H, D]
    key: Tensor  # [B, Sk, Hk, D]
    value: Tensor  # [B, Sk, Hk, D]
    grad_out: Tensor  # [B, Sq, H, D]
    grad_lse: Tensor | None  # [B, H, Sq], float32 (float64 in float64); None: no gradient into LSE

    def one_element_in(self) -> Inputs:
        """Copies that start one element into their buffers: aligned to that element alone."""

        def shifted(t: Tensor) -> Tensor:
            buffer = torch.empty(t.numel() + 1, dtype=t.dtype, device=t.device)
            return buffer[1:].view(t.shape).copy_(t)

        return Inputs(*(None if t is None else shifted(t) for t in self))


@dataclasses.dataclass(frozen=True)
class Case:
    query_length: int
    key_length: int
    head_dim: int = 64
    num_heads: int = 2
    num_key_heads: int = 2
    batch: int = 1
    dtype: torch.dtype = torch.float32
    causal: bool = False
    window_size: tuple[int, int] = (-1, -1)
    scale: float | None = None
    lse_grad: bool = False
    topics: bool = False  # attention that is sparse by tiles, see inputs()
    gain: float = 1.0  # multiplies query, key and value

    @property
    def id(self) -> str:
        mask = "causal" if self.causal else "full"
        if self.window_size != (-1, -1):
            mask += "_w{}_{}".format(*self.window_size)
        parts = [
            f"q{self.query_length}_k{self.key_length}_d{self.head_dim}",
            f"b{self.batch}_h{self.num_heads}_{self.num_key_heads}",
            mask,
            str(self.dtype).removeprefix("torch."),
        ]
        if self.scale is not None:
            parts.append(f"scale{self.scale}")
        if self.gain != 1.0:
            parts.append(f"gain{self.gain}")
        parts += ["lse"] * self.lse_grad + ["topics"] * self.topics
        return "-".join(parts)

    @property
    def mask(self) -> dict[str, Any]:
        """The mask as keyword arguments."""
        return {"causal": self.causal, "window_size": self.window_size}

    @property
    def options(self) -> dict[str, Any]:
        """Scale and mask as keyword arguments."""
        return {"scale": self.scale, **self.mask}

    @property
    def lengths(self) -> dict[str, int]:
        return {"query_length": self.query_length, "key_length": self.key_length}

    @property
    def num_query_tiles(self) -> int:
        return -(-self.query_length // 64)

    @property
    def num_key_tiles(self) -> int:
        return -(-self.key_length // 128)

    def inputs(self, device: torch.device | str = "cpu") -> Inputs:
        """Normal numbers, the same for the same case on every device and in every dtype.

        topics: every query tile and key tile is about one of a few topics (a direction), and tiles
        of the same topic attend to each other, so that most of the probability is in few tiles.
        """
        rng = torch.Generator().manual_seed(zlib.crc32(self.id.encode()))

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=rng, dtype=torch.float64)

        b, sq, sk, d = self.batch, self.query_length, self.key_length, self.head_dim
        query = normal(b, sq, self.num_heads, d)
        key = normal(b, sk, self.num_key_heads, d)
        if self.topics:
            directions = torch.nn.functional.normalize(normal(4, d), dim=-1) * 2.0 * d**0.5
            of_query_tile = torch.randint(4, (self.num_query_tiles,), generator=rng)
            of_key_tile = torch.randint(4, (self.num_key_tiles,), generator=rng)
            query += directions[of_query_tile.repeat_interleave(64)[:sq]][None, :, None]
            key += directions[of_key_tile.repeat_interleave(128)[:sk]][None, :, None] / 2.0
        value = normal(b, sk, self.num_key_heads, d)
        grad_out = normal(b, sq, self.num_heads, d)
        grad_lse = normal(b, self.num_heads, sq)

        def to(tensor: Tensor, gain: float = 1.0) -> Tensor:
            return (tensor * gain).to(device=device, dtype=self.dtype)

        return Inputs(
            to(query, self.gain),
            to(key, self.gain),
            to(value, self.gain),
            to(grad_out),
            grad_lse.to(device=device, dtype=lse_dtype(self.dtype)) if self.lse_grad else None,
        )


def lse_dtype(dtype: torch.dtype) -> torch.dtype:
    """LSE and its gradient are float32, except for float64 inputs."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def pairwise(factors: dict[str, list[Any]], cost: Any, seed: int = 0) -> list[dict[str, Any]]:
    """Rows in which every pair of values of every two factors occurs, cheap rows preferred.

    Greedy: each row starts from an uncovered pair; the other factors, in random order, take the
    value that covers most new pairs (ties: the one that makes the row cheapest).
    """
    rng = random.Random(seed)
    names = list(factors)
    uncovered = {
        (a, i, b, j)
        for a, b in itertools.combinations(range(len(names)), 2)
        for i in range(len(factors[names[a]]))
        for j in range(len(factors[names[b]]))
    }

    def gain(row: dict[int, int], factor: int, value: int) -> int:
        pairs = (
            (a, i, factor, value) if a < factor else (factor, value, a, i) for a, i in row.items()
        )
        return sum(pair in uncovered for pair in pairs)

    def as_values(row: dict[int, int]) -> dict[str, Any]:
        return {names[f]: factors[names[f]][i] for f, i in sorted(row.items())}

    def cost_of(row: dict[int, int]) -> float:
        cheapest = dict.fromkeys(range(len(names)), 0)
        return float(cost(**as_values(cheapest | row)))

    rows = []
    while uncovered:
        a, i, b, j = min(uncovered)
        row = {a: i, b: j}
        rest = [f for f in range(len(names)) if f not in row]
        rng.shuffle(rest)
        for f in rest:
            values = range(len(factors[names[f]]))
            row[f] = max(values, key=lambda v: (gain(row, f, v), -cost_of(row | {f: v}), -v))
        for x, y in itertools.combinations(sorted(row), 2):
            uncovered.discard((x, row[x], y, row[y]))
        rows.append(as_values(row))
    return rows


# Off-by-one and left/right mistakes show at the edges of rows, of tiles and of the band.
WINDOWS = [
    (0, 0),
    (-1, 0),
    (31, 0),
    (63, 0),
    (64, 0),
    (65, 0),
    (127, 0),
    (128, 0),
    (300, 40),
    (256, -1),
]
LENGTHS = [1, 63, 64, 65, 127, 128, 129, 200, 513, 1000, 2048]
HEAD_DIMS = [8, 16, 40, 64, 72, 96, 128, 256]
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
MASKS = [FULL, CAUSAL] + [(False, w) for w in WINDOWS] + [(True, (100, -1)), (True, (64, 40))]
HEAD_GROUPS = [1, 4, 5, 8]


def _grid() -> list[Case]:
    def cost(query_length: int, key_length: int, head_dim: int, group: int, **_: Any) -> float:
        return query_length * key_length * (head_dim + 64) * (group + 1)

    rows = pairwise(
        {
            "query_length": LENGTHS,
            "key_length": LENGTHS,
            "mask": MASKS,
            "head_dim": HEAD_DIMS,
            "group": HEAD_GROUPS,
            "dtype": DTYPES,
            "lse_grad": [False, True],
        },
        cost,
    )
    cases = []
    for row in rows:
        causal, window_size = row.pop("mask")
        group = row.pop("group")
        # Two key heads where size allows: with one, reading the wrong key head cannot be seen.
        small = row["query_length"] * row["key_length"] <= 513 * 513
        num_key_heads = 2 if small or group == 1 else 1
        cases.append(
            Case(
                **row,
                causal=causal,
                window_size=window_size,
                num_heads=group * num_key_heads,
                num_key_heads=num_key_heads,
                batch=2 if small else 1,
            )
        )
    return cases


# Every pair of head dim, lengths, mask, grouping, dtype and gradient into LSE.
GRID = _grid()

# Long in both directions at once, which pairs alone need not be.
LONG = [
    Case(
        2048, 2048, num_heads=8, num_key_heads=2, causal=True, dtype=torch.bfloat16, lse_grad=True
    ),
    Case(2048, 1000, head_dim=128, num_heads=5, num_key_heads=1, lse_grad=True),
    Case(1000, 2048, head_dim=72, causal=True, window_size=(300, -1), dtype=torch.float16),
]

# Scales that are not 1 / sqrt(D): zero gives uniform attention, a negative one turns it around.
SCALES = [
    Case(130, 257, head_dim=32, scale=scale, causal=True, lse_grad=True)
    for scale in (0.0, 1.0, 0.01, -0.3)
]

# Attention that is sparse by tiles: the selection skips many of them.
SPARSE = [
    Case(640, 1100, num_heads=4, num_key_heads=2, topics=True),
    Case(640, 1100, num_heads=4, num_key_heads=2, topics=True, causal=True, lse_grad=True),
    Case(1000, 1000, topics=True, causal=True, dtype=torch.bfloat16, lse_grad=True),
    Case(513, 1025, topics=True, head_dim=128, dtype=torch.float16),
    Case(1000, 900, topics=True, head_dim=40, num_heads=5, num_key_heads=1, window_size=(300, 40)),
    Case(600, 700, topics=True, head_dim=16, batch=2, dtype=torch.float64, lse_grad=True),
    Case(2100, 700, topics=True, head_dim=32, dtype=torch.bfloat16),  # more than one word of bits
    Case(300, 1000, head_dim=256, topics=True, causal=True, window_size=(500, -1)),
    Case(900, 500, topics=True, causal=True),  # rows, and whole query tiles, that see no key
    Case(1, 2000, topics=True, causal=True),  # decoding
]
SPARSE_NEGL_PROBS = [0.02, 0.3]

# What tile statistics must survive: odd lengths, few keys, large scores, empty rows, all masks.
STATS = SPARSE + [
    Case(129, 257, dtype=dtype, causal=causal, window_size=window_size, gain=gain)
    for dtype in DTYPES
    for (causal, window_size), gain in [(FULL, 1.0), (CAUSAL, 3.0), ((False, (65, 0)), 1.0)]
]


def ids(cases: list[Case]) -> list[str]:
    return [case.id for case in cases]


HOPPER_DTYPES = [torch.bfloat16, torch.float16]
HOPPER_HEAD_DIMS = [64, 128]


def on_hopper(cases: list[Case]) -> list[Case]:
    """The same cases in the dtypes and head dims that the CUDA backend serves, without repeats."""
    narrow = {torch.float32: torch.bfloat16, torch.float64: torch.float16}
    served = [
        dataclasses.replace(
            case,
            dtype=narrow.get(case.dtype, case.dtype),
            head_dim=64 if case.head_dim <= 64 else 128,
        )
        for case in cases
    ]
    return list({case.id: case for case in served}.values())
