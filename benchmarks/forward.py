"""Measures the Hopper forward against cuDNN and, where it is installed, FlashAttention 4.

    python benchmarks/forward.py [--only dense,statistics,window,grouped,small,ragged,host]

Everything compared runs in one process, in turns, on random bfloat16 data; times are the device's.
The ratio is the median over the turns. All get tensors in (B, S, H, D) memory.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Iterator

import torch
from back_lite import BackLite, mask_tiles, ops
from gpu import PEERS, Case, check, cudnn, dense_cases, in_graphs, in_turns, run
from rows import Row, faster_row, mean_row, slower_row
from timing import Timing

MEAN_BARS = {64: 1.10, 128: 1.06}
BARS = {(64, 2048, True): 0.98}  # all others 1.0


def ours(case: Case, record: bool = False, window: int = -1) -> Callable[[], object]:
    tensors = case.random()
    options = {"causal": case.causal, "window_size": (window, -1), "record": record}
    return lambda: ops.forward(*tensors, **options)


def bench_dense() -> Iterator[Row]:
    for head_dim in (128, 64):
        ratios: dict[str, list[float]] = {name: [] for name in PEERS}
        for case in dense_cases(head_dim):
            tensors = case.random()

            def forward(tensors=tensors, case=case) -> torch.Tensor:
                return ops.forward(*tensors, causal=case.causal)[0]

            functions = {"ours": forward}
            for name, peer in PEERS.items():
                functions[name] = lambda peer=peer, t=tensors, c=case: peer(*t, c.causal)
                check(f"{name}, {case}", forward(), functions[name]())
            times = in_turns(functions)
            for name in PEERS:
                bar = None
                if name == "cuDNN":
                    bar = BARS.get((head_dim, case.length, case.causal), 1.0)
                row = faster_row("dense", str(case), name, (times["ours"], times[name]), bar)
                ratios[name].append(row.ratio)
                yield row
        for name, values in ratios.items():
            bar = MEAN_BARS[head_dim] if name == "cuDNN" else None
            yield mean_row("dense", f"D={head_dim} geometric mean", name, values, bar)


def bench_statistics() -> Iterator[Row]:
    for head_dim in (128, 64):
        ratios = []
        for case in dense_cases(head_dim):
            times = in_turns({"with": ours(case, record=True), "without": ours(case)})
            pair = times["with"], times["without"]
            row = slower_row("statistics", str(case), "without", pair, None)
            ratios.append(row.ratio)
            yield row
        case = f"D={head_dim} geometric mean"
        yield mean_row("statistics", case, "without", ratios, 1.03, faster=False)


def bench_window() -> Iterator[Row]:
    """Against causal; the bar is the share of the tiles that causal visits, and 12%."""
    for head_dim in (128, 64):
        for length in (8192, 32768):
            case = Case(length, head_dim, causal=True)
            tiles = [
                int(mask_tiles(length, length, causal=True, window_size=(left, -1)).sum())
                for left in (1024, -1)
            ]
            times = in_turns({"window": ours(case, window=1024), "causal": ours(case)})
            pair = times["window"], times["causal"]
            bar = 1.12 * tiles[0] / tiles[1]
            yield slower_row("window", f"{case} window 1024", "causal", pair, bar)


def bench_grouped() -> Iterator[Row]:
    """Against as many key heads as query heads: the same products, less memory."""
    for heads, key_heads in ((16, 4), (64, 8)):
        for causal in (False, True):
            case = Case(8192, 128, causal, heads=heads)
            grouped = dataclasses.replace(case, key_heads=key_heads)
            times = in_turns({"grouped": ours(grouped), "plain": ours(case)})
            pair = times["grouped"], times["plain"]
            yield faster_row("grouped", str(grouped), "no groups", pair, 0.98)


def bench_small() -> Iterator[Row]:
    for head_dim in (128, 64):
        for causal in (False, True):
            case = Case(4096, head_dim, causal, batch=1, heads=8)
            tensors = case.random()
            times = in_graphs(
                {
                    "ours": lambda t=tensors, c=case: ops.forward(*t, causal=c.causal),
                    "cuDNN": lambda t=tensors, c=case: cudnn(*t, c.causal),
                }
            )
            yield faster_row("small", str(case), "cuDNN", (times["ours"], times["cuDNN"]), 1.0)


def bench_ragged() -> Iterator[Row]:
    for head_dim in (128, 64):
        for length, round_length, bar in ((1000, 1024, 1.03), (8191, 8192, 1.02)):
            whole = Case(round_length, head_dim)
            case = dataclasses.replace(whole, length=length, batch=whole.num_batches)
            times = in_turns({"ragged": ours(case), "whole": ours(whole)})
            pair = times["ragged"], times["whole"]
            yield slower_row("ragged", str(case), f"S={round_length}", pair, bar)


def bench_host() -> Iterator[Row]:
    """Until a call of the module returns, with an idle GPU; the bar is 40 us."""
    attn = BackLite()
    tensors = Case(1024, 128, batch=1, heads=8).random()
    seconds = []
    for _ in range(500):
        torch.cuda.synchronize()
        start = time.perf_counter()
        attn(*tensors, causal=True)
        seconds.append(time.perf_counter() - start)
    timing = Timing(seconds[100:])
    ratio = statistics.median(timing.seconds) / 40e-6
    yield Row("host", "BackLite()(q, k, v) returns", "40 us", ratio, False, 1.0, timing)


GROUPS = {
    "dense": bench_dense,
    "statistics": bench_statistics,
    "window": bench_window,
    "grouped": bench_grouped,
    "small": bench_small,
    "ragged": bench_ragged,
    "host": bench_host,
}

if __name__ == "__main__":
    run("Measures the Hopper forward.", "forward", GROUPS)
