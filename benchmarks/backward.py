"""Measures the Hopper backward, dense and sparse, against cuDNN and, where it is there, FA4.

    python benchmarks/backward.py [--only dense,random,masks,sink,window,overheads,pair]

Everything compared runs in one process, in turns, on random bfloat16 data; times are the device's.
R = time / (live share * cuDNN's dense time): 1.0 is live work at cuDNN's rate. The bars are for the
backward without its schedule, which is timed apart; a second row has R with it. All else holds the
schedule.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from back_lite import mask_tiles, ops, pack_tiles, reference
from gpu import HAS_FA4, PEERS, Case, check, dense_cases, in_turns, run
from rows import Row, faster_row, mean_row, slower_row
from tiles import MODEL_HEADS, MODEL_LAYERS, model_tiles, random_tiles
from timing import Timing
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

MEAN_BARS = {64: 1.15, 128: 1.08}
# Of R, at head dim 128; at 64 they are 20% higher.
RANDOM_BARS = {
    (2048, 0.1): 1.7,
    (8192, 0.1): 1.15,
    (32768, 0.1): 0.98,
    (8192, 0.05): 1.35,
    (32768, 0.05): 1.08,
}
MASK_BARS = {4: 1.05, 1: 1.15}  # of R, by batch


class Problem:
    """Tensors of a case, its forward, and its backward by each of those compared."""

    def __init__(self, case: Case, window: int = -1) -> None:
        self.case = case
        self.mask = {"causal": case.causal, "window_size": (window, -1)}
        *self.inputs, self.grad_out = case.random(gradient=True)
        self.out, self.lse, _ = ops.forward(*self.inputs, **self.mask)

    def ours(self, bits: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        return ops.backward(self.grad_out, *self.inputs, self.out, self.lse, bits, **self.mask)

    def peer(self, name: str) -> Callable[[], tuple[Tensor, ...]]:
        if name == "FA4":  # as ours, without autograd
            from flash_attn.cute.interface import _flash_attn_bwd, _flash_attn_fwd

            options = {"causal": self.case.causal}
            out, lse, *_ = _flash_attn_fwd(*self.inputs, **options, return_lse=True)
            tensors = *self.inputs, out, self.grad_out, lse
            return lambda: _flash_attn_bwd(*tensors, **options)
        leaves = [t.detach().requires_grad_() for t in self.inputs]
        out = PEERS[name](*leaves, self.case.causal)
        return lambda: torch.autograd.grad(out, leaves, self.grad_out, retain_graph=True)

    def fa4_lists(self, live: Tensor) -> Callable[[], tuple[Tensor, ...]]:
        """FlashAttention 4's backward, each key tile with the list of its live query tiles."""
        from flash_attn.cute.block_sparsity import BlockSparseTensorsTorch
        from flash_attn.cute.interface import _flash_attn_bwd

        columns = live.transpose(2, 3).contiguous().cuda()
        count = columns.sum(-1, dtype=torch.int32)
        tiles = columns.logical_not().sort(dim=-1, stable=True).indices.int()
        # No tile of the first two, whose elements would be masked one by one.
        lists = BlockSparseTensorsTorch(
            torch.zeros_like(count), tiles, count, tiles, block_size=(64, 128)
        )
        tensors = *self.inputs, self.out, self.grad_out, self.lse
        return lambda: _flash_attn_bwd(*tensors, block_sparse_tensors=lists)

    def allowed(self) -> Tensor:
        tiles = mask_tiles(self.case.length, self.case.length, causal=self.case.causal)
        return tiles.expand(self.case.num_batches, self.case.num_heads, *tiles.shape)

    def check_last_head(self, name: str, live: Tensor, bits: Tensor) -> None:
        alone = [t[-1:, :, -1:] for t in (self.grad_out, *self.inputs)]
        expected = reference.backward(*alone, live=live[-1:, -1:].cuda(), causal=self.case.causal)
        for gradient, actual, truth in zip(
            ("dQ", "dK", "dV"), self.ours(bits), expected, strict=True
        ):
            check(f"{gradient}, {name}, {self.case}", actual, truth)


def r_rows(
    group: str,
    case: str,
    density: float,
    sparse: Callable[[], object],
    times: tuple[Timing, Timing],
    bar: float | None,
) -> Iterator[Row]:
    """R against cuDNN's dense backward. times: of `sparse`, of cuDNN."""
    whole, dense = times
    schedule = schedule_seconds(sparse).median
    alone = Timing([seconds - schedule for seconds in whole.seconds])
    for other, timing, bound in (("R (cuDNN)", alone, bar), ("R, scheduled", whole, None)):
        ratio = timing.median / (density * dense.median)
        yield Row(group, case, other, ratio, False, bound, timing, dense)


def bench_dense() -> Iterator[Row]:
    for head_dim in (128, 64):
        ratios: dict[str, list[float]] = {name: [] for name in PEERS}
        for case in dense_cases(head_dim):
            problem = Problem(case)
            functions: dict[str, Callable[[], object]] = {"ours": problem.ours}
            for name in PEERS:
                functions[name] = peer = problem.peer(name)
                for gradient, a, b in zip(("dQ", "dK", "dV"), problem.ours(), peer(), strict=True):
                    check(f"{gradient} of {name}, {case}", a, b)
            times = in_turns(functions)
            for name in PEERS:
                bar = 1.0 if name == "cuDNN" else None
                row = faster_row("dense", str(case), name, (times["ours"], times[name]), bar)
                ratios[name].append(row.ratio)
                yield row
        for name, values in ratios.items():
            bar = MEAN_BARS[head_dim] if name == "cuDNN" else None
            yield mean_row("dense", f"D={head_dim} geometric mean", name, values, bar)


def bench_random() -> Iterator[Row]:
    for head_dim in (128, 64):
        for length in (2048, 8192, 32768):
            case = Case(length, head_dim)
            problem = Problem(case)
            allowed = problem.allowed()
            whole = partial(problem.ours, pack_tiles(allowed.cuda()))
            times = in_turns({"bits": whole, "dense": problem.ours})
            pair = times["bits"], times["dense"]
            yield slower_row("random", f"{case} 100% as bits", "our dense", pair, 1.02)
            cudnn = problem.peer("cuDNN")
            for density in (0.5, 0.25, 0.1, 0.05):
                live = random_tiles(allowed, density)
                words = pack_tiles(live.cuda())
                ours = partial(problem.ours, words)
                label = f"{case} {density:.0%} live"
                if length <= 8192:
                    problem.check_last_head(f"{density:.0%} live", live, words)
                # With cuDNN alone: at the power limit, what else takes turns changes the clock.
                functions: dict[str, Callable[[], object]] = {"ours": ours, "cuDNN": cudnn}
                listed = HAS_FA4 and head_dim == 128 and density <= 0.1
                if listed:
                    functions["FA4 lists"] = lists = problem.fa4_lists(live)
                    for gradient, a, b in zip(("dQ", "dK", "dV"), lists(), ours(), strict=True):
                        check(f"{gradient} of FA4 with lists, {label}", a, b)
                times = in_turns(functions)
                bar = RANDOM_BARS.get((length, density))
                if bar is not None and head_dim == 64:
                    bar *= 1.2
                pair = times["ours"], times["cuDNN"]
                yield from r_rows("random", label, density, ours, pair, bar)
                if listed:
                    pair = times["ours"], times["FA4 lists"]
                    yield faster_row("random", label, "FA4 lists", pair, None)


def bench_masks() -> Iterator[Row]:
    for batch, bar in MASK_BARS.items():
        case = Case(8192, 128, causal=True, batch=batch, heads=MODEL_HEADS)
        problem = Problem(case)
        num_allowed = int(problem.allowed().sum())
        functions: dict[str, Callable[[], object]] = {"cuDNN": problem.peer("cuDNN")}
        densities = {}
        for layer in MODEL_LAYERS:
            live = model_tiles(layer).expand(batch, -1, -1, -1)
            words = pack_tiles(live.cuda())
            problem.check_last_head(f"layer {layer}", live, words)
            densities[layer] = int(live.sum()) / num_allowed
            functions[f"layer {layer}"] = partial(problem.ours, words)
        times = in_turns(functions, rounds=100)
        for layer, density in densities.items():
            label = f"{case} layer {layer} {density:.0%} live"
            pair = times[f"layer {layer}"], times["cuDNN"]
            yield from r_rows("masks", label, density, functions[f"layer {layer}"], pair, bar)


def bench_sink() -> Iterator[Row]:
    """One column that every query tile visits, against as many live tiles anywhere."""
    problem = Problem(Case(8192, 128, batch=1, heads=8))
    allowed = problem.allowed()
    live = random_tiles(allowed, 0.05)
    live[..., 0] = True
    even = random_tiles(allowed, int(live[0, 0].sum()) / int(allowed[0, 0].sum()))
    words = {"sink": pack_tiles(live.cuda()), "even": pack_tiles(even.cuda())}
    times = in_turns(
        {name: partial(problem.ours, bits) for name, bits in words.items()}, rounds=100
    )
    pair = times["sink"], times["even"]
    yield slower_row("sink", f"{problem.case} one dense column", "spread evenly", pair, 1.15)


def bench_window() -> Iterator[Row]:
    """Against causal; the bar is the share of the tiles that causal visits, and 25%."""
    for head_dim in (128, 64):
        case = Case(8192, head_dim, causal=True)
        tiles = [
            int(mask_tiles(8192, 8192, causal=True, window_size=(left, -1)).sum())
            for left in (1024, -1)
        ]
        problems = {"window": Problem(case, window=1024), "causal": Problem(case)}
        times = in_turns({name: problem.ours for name, problem in problems.items()})
        pair = times["window"], times["causal"]
        bar = 1.25 * tiles[0] / tiles[1]
        yield slower_row("window", f"{case} window 1024", "causal", pair, bar)


def kernel_seconds(function: Callable[[], object], first: str, last: str) -> Timing:
    """Time on the device from the start of one kernel to the end of another, each by a part of its
    name. (A kernel that is launched early waits for the one before it: times of their own would
    count that twice.)
    """
    for _ in range(3):
        function()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as recorded:
        for _ in range(25):
            function()
        torch.cuda.synchronize()

    def ranges(name: str) -> list[Any]:
        found = [e.time_range for e in recorded.events() if name in e.name]
        return sorted(found, key=lambda r: r.start)

    pairs = zip(ranges(first), ranges(last), strict=True)
    return Timing([(b.end - a.start) * 1e-6 for a, b in pairs])


def schedule_seconds(backward: Callable[[], object]) -> Timing:
    return kernel_seconds(backward, "count_kernel", "plan_kernel")


def time_overheads(problem: Problem) -> dict[str, Timing]:
    """Select and schedule, from the profiler, and the dense backward."""
    length = problem.case.length
    options = {"query_length": length, "key_length": length, "causal": problem.case.causal}
    stats = ops.forward(*problem.inputs, **problem.mask, record=True)[2]
    assert stats is not None
    select = partial(ops.select, stats, 0.05, **options)
    bits = select()
    return {
        **in_turns({"dense": problem.ours}),
        "select": kernel_seconds(select, "select_kernel", "select_kernel"),
        "schedule": schedule_seconds(partial(problem.ours, bits)),
    }


def bench_overheads() -> Iterator[Row]:
    """Each at most 1% of a large problem's dense backward; together at most 15 us in a small."""
    case = Case(8192, 128, causal=True, batch=4, heads=16)
    times = time_overheads(Problem(case))
    for name in ("select", "schedule"):
        ratio = times[name].median / times["dense"].median
        yield Row(
            "overheads", f"{case} {name}", "dense", ratio, False, 0.01, times[name], times["dense"]
        )
    case = Case(8192, 128, causal=True, batch=1, heads=8)
    times = time_overheads(Problem(case))
    total = 0.0
    for name in ("select", "schedule"):
        ratio = times[name].median / 15e-6
        total += ratio
        yield Row("overheads", f"{case} {name}", "15 us", ratio, False, None, times[name])
    yield Row("overheads", f"{case} both", "15 us", total, False, 1.0)


def bench_pair() -> Iterator[Row]:
    """Forward and backward at 10% live against a dense pair; the bar is for FA4's."""
    case = Case(32768, 128)
    problem = Problem(case)
    bits = pack_tiles(random_tiles(problem.allowed(), 0.1).cuda())

    def ours() -> object:
        ops.forward(*problem.inputs, record=True)
        return problem.ours(bits)

    functions: dict[str, Callable[[], object]] = {"ours": ours}
    for name, peer in PEERS.items():
        backward = problem.peer(name)

        def both(peer=peer, backward=backward) -> object:
            with torch.no_grad():
                peer(*problem.inputs, case.causal)
            return backward()

        functions[name] = both
    times = in_turns(functions)
    for name in PEERS:
        bar = 2.6 if name == "FA4" else None
        yield faster_row("pair", f"{case} 10% live", name, (times["ours"], times[name]), bar)


GROUPS = {
    "dense": bench_dense,
    "random": bench_random,
    "masks": bench_masks,
    "sink": bench_sink,
    "window": bench_window,
    "overheads": bench_overheads,
    "pair": bench_pair,
}

if __name__ == "__main__":
    run("Measures the Hopper backward.", "backward", GROUPS)
