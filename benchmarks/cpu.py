"""Measures the CPU backend against torch's attention, and the sparse backward against the dense.

    python benchmarks/cpu.py [--only forward,backward,bfloat16,random,masks,recording,host]

Everything compared runs in one process, in turns (ours, torch, ours, torch, ...); a ratio is the
median over the turns. Data is random. Results are checked before they are timed, which warms up,
too. torch gets (B, H, S, D) in memory, ours (B, S, H, D): each the order that it likes best.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from back_lite import BackLite, attention, mask_tiles, ops, pack_tiles, reference
from machine import describe
from rows import (
    Groups,
    Row,
    choose,
    collect,
    faster_row,
    mean_row,
    slower_row,
    verdict,
    write_json,
)
from tiles import MODEL_LAYERS, model_tiles, random_tiles
from timing import Timing, alternate
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

HEADS = 8
MAX_RELATIVE_ERROR = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


@dataclass(frozen=True)
class Case:
    length: int
    head_dim: int
    causal: bool
    dtype: torch.dtype = torch.float32

    def __str__(self) -> str:
        kind = "causal" if self.causal else "full"
        return f"S={self.length} D={self.head_dim} {kind}"

    @property
    def rounds(self) -> int:
        rounds = 5 if self.length > 2048 else 21
        return rounds if self.dtype == torch.float32 else (rounds + 1) // 2

    def random(self, count: int) -> list[Tensor]:
        """[1, S, H, D] each; the same at every call."""
        generator = torch.Generator().manual_seed(self.length + self.head_dim)
        shape = (1, self.length, HEADS, self.head_dim)
        return [torch.randn(shape, generator=generator).to(self.dtype) for _ in range(count)]


def cases(dtype: torch.dtype = torch.float32) -> Iterator[Case]:
    for length in (2048, 8192):
        for head_dim in (64, 128):
            for causal in (False, True):
                yield Case(length, head_dim, causal, dtype)


def check(name: str, actual: Tensor, expected: Tensor, limit: float) -> None:
    difference = (actual.double() - expected.double()).norm() / expected.double().norm()
    if not difference <= limit:
        raise SystemExit(f"{name}: relative error {difference:.2e}, allowed is {limit:.0e}")


# -------------------------------------------------------------------------------- against torch


def torch_attention(turned: list[Tensor], case: Case) -> Tensor:
    query, key, value = turned
    return scaled_dot_product_attention(query, key, value, is_causal=case.causal)


def time_forward(case: Case) -> tuple[Timing, Timing]:
    query, key, value = case.random(3)
    turned = [t.transpose(1, 2).contiguous() for t in (query, key, value)]

    def ours() -> Tensor:
        out: Tensor = attention(query, key, value, causal=case.causal)
        return out

    def theirs() -> Tensor:
        return torch_attention(turned, case)

    with torch.no_grad():
        check(f"out, {case}", ours(), theirs().transpose(1, 2), MAX_RELATIVE_ERROR[case.dtype])
        times = alternate(
            {"ours": ours, "torch": theirs}, rounds=case.rounds, warmup=0, max_seconds=20
        )
    return times["ours"], times["torch"]


def time_backward(case: Case) -> tuple[Timing, Timing]:
    *inputs, grad_out = case.random(4)
    turned = [t.transpose(1, 2).contiguous().requires_grad_() for t in inputs]
    turned_grad = grad_out.transpose(1, 2).contiguous()
    inputs = [t.requires_grad_() for t in inputs]
    out = attention(*inputs, causal=case.causal)
    turned_out = torch_attention(turned, case)

    def ours() -> tuple[Tensor, ...]:
        return torch.autograd.grad(out, inputs, grad_out, retain_graph=True)

    def theirs() -> tuple[Tensor, ...]:
        return torch.autograd.grad(turned_out, turned, turned_grad, retain_graph=True)

    for name, actual, expected in zip(("dQ", "dK", "dV"), ours(), theirs(), strict=True):
        limit = MAX_RELATIVE_ERROR[case.dtype]
        check(f"{name}, {case}", actual, expected.transpose(1, 2), limit)
    times = alternate({"ours": ours, "torch": theirs}, rounds=case.rounds, warmup=0, max_seconds=30)
    return times["ours"], times["torch"]


def against_torch(group: str, measure: Callable[[Case], tuple[Timing, Timing]]) -> Iterator[Row]:
    ratios = []
    for case in cases():
        result = faster_row(group, str(case), "torch", measure(case), bar=0.85)
        ratios.append(result.ratio)
        yield result
    yield mean_row(group, "geometric mean", "torch", ratios, bar=1.0)


def bench_forward() -> Iterator[Row]:
    return against_torch("forward", time_forward)


def bench_backward() -> Iterator[Row]:
    return against_torch("backward", time_backward)


def bench_bfloat16() -> Iterator[Row]:
    ratios = []
    for case in cases(torch.bfloat16):
        for name, measure in (("forward", time_forward), ("backward", time_backward)):
            result = faster_row("bfloat16", f"{case} {name}", "torch", measure(case), bar=None)
            ratios.append(result.ratio)
            yield result
        yield mean_row("bfloat16", f"{case} mean of both", "torch", ratios[-2:], bar=0.8)
    yield mean_row("bfloat16", "geometric mean of all", "torch", ratios, bar=0.8)


# ------------------------------------------------------------------------ sparse against dense


def time_sparse(case: Case, choices: dict[str, Tensor]) -> dict[str, Timing]:
    """Backward with every tile ("dense") and with each choice of live tiles, [1, H, Tm, Tn]."""
    query, key, value, grad_out = case.random(4)
    out, lse, _ = ops.forward(query, key, value, causal=case.causal)

    def backward(bits: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        return ops.backward(grad_out, query, key, value, out, lse, bits, causal=case.causal)

    functions: dict[str, Callable[[], object]] = {"dense": partial(backward, None)}
    check_one_head(f"dense, {case}", case, allowed_tiles(case), backward(None))
    for name, live in choices.items():
        bits = pack_tiles(live)
        check_one_head(f"{name}, {case}", case, live, backward(bits))
        functions[name] = partial(backward, bits)
    return alternate(functions, rounds=case.rounds, warmup=0, max_seconds=40)


def check_one_head(
    name: str, case: Case, live: Tensor, gradients: tuple[Tensor, Tensor, Tensor]
) -> None:
    """The last head against float64: all of them would take longer than the benchmark."""
    query, key, value, grad_out = (t[:, :, -1:] for t in case.random(4))
    expected = reference.backward(
        grad_out, query, key, value, live=live[:, -1:], causal=case.causal
    )
    for gradient, ours, theirs in zip(("dQ", "dK", "dV"), gradients, expected, strict=True):
        check(f"{gradient}, {name}", ours[:, :, -1:], theirs, MAX_RELATIVE_ERROR[case.dtype])


def allowed_tiles(case: Case) -> Tensor:
    tiles = mask_tiles(case.length, case.length, causal=case.causal)
    return tiles.expand(1, HEADS, *tiles.shape)


def bench_random() -> Iterator[Row]:
    for case in cases():
        allowed = allowed_tiles(case)
        choices = {f"{d:.0%} live": random_tiles(allowed, d) for d in (0.5, 0.25, 0.1, 0.05)}
        times = time_sparse(case, choices)
        for name, live in choices.items():
            bar = ((live.sum() / allowed.sum()).item() + 0.02) * 1.15
            pair = times[name], times["dense"]
            yield slower_row("random", f"{case} {name}", "dense backward", pair, bar)


def bench_masks() -> Iterator[Row]:
    for head_dim in (64, 128):
        case = Case(8192, head_dim, causal=True)
        choices = {f"layer {layer}": model_tiles(layer) for layer in MODEL_LAYERS}
        times = time_sparse(case, choices)
        for name, live in choices.items():
            density = (live.sum() / allowed_tiles(case).sum()).item()
            label = f"{case} {name} {density:.0%} live"
            pair = times[name], times["dense"]
            yield slower_row("masks", label, "dense backward", pair, bar=1.15 * density)


# -------------------------------------------------------------------------------- what it costs


def time_recording(case: Case) -> tuple[Timing, Timing]:
    """Forward of a training step with statistics and selection, and without."""
    inputs = [t.requires_grad_() for t in case.random(3)]

    def plain() -> Tensor:
        out: Tensor = attention(*inputs, 0.0, causal=case.causal)
        return out

    def recorded() -> Tensor:
        out: Tensor = attention(*inputs, 0.05, causal=case.causal)
        return out

    check(f"recorded out, {case}", recorded(), plain(), 1e-6)
    # More turns than elsewhere, for a difference of a few percent.
    times = alternate(
        {"ours": recorded, "plain": plain}, rounds=2 * case.rounds, warmup=0, max_seconds=25
    )
    return times["ours"], times["plain"]


def bench_recording() -> Iterator[Row]:
    for case in cases():
        yield slower_row("recording", str(case), "plain forward", time_recording(case), bar=1.03)


# ------------------------------------------------------------------------------------ per call


def bench_host() -> Iterator[Row]:
    """What a call costs beside its work: a problem of a few numbers, with gradients."""
    inputs = [torch.randn(1, 16, 1, 8, requires_grad=True) for _ in range(3)]
    calls, limit = 200, 25e-6
    modules = {"exact": BackLite(0.0), "sparse": BackLite(0.05)}

    def many(module: BackLite) -> None:
        for _ in range(calls):
            module(*inputs)

    functions = {name: partial(many, module) for name, module in modules.items()}
    times = alternate(functions, rounds=41, warmup=5)
    for name, timing in times.items():
        a_call = Timing([seconds / calls for seconds in timing.seconds])
        yield Row("host", f"{name} S=16 D=8", "25 us", a_call.median / limit, False, 1.0, a_call)


GROUPS: Groups = {
    "forward": bench_forward,
    "backward": bench_backward,
    "bfloat16": bench_bfloat16,
    "random": bench_random,
    "masks": bench_masks,
    "recording": bench_recording,
    "host": bench_host,
}


def main() -> None:
    parser = argparse.ArgumentParser(description="Measures the CPU backend.")
    parser.add_argument("--only", default=",".join(GROUPS), help="groups (%(default)s)")
    parser.add_argument("--threads", type=int, default=2, help="of ours and torch's (%(default)s)")
    parser.add_argument("--out", type=Path, default=Path("build/bench/cpu.json"), help="JSON file")
    args = parser.parse_args()
    chosen = choose(parser, args.only, GROUPS)
    torch.set_num_threads(args.threads)

    start = time.perf_counter()
    load = os.getloadavg()[0]
    described = describe()
    for facts in described.values():
        print(", ".join(f"{name} {value}" for name, value in facts.items() if value is not None))
    if load > 0.5:
        print(f"The load average is {load:.1f}: other programs disturb what is measured.")
    rows = collect(GROUPS, chosen)
    seconds = time.perf_counter() - start
    print(f"{verdict(rows)}, in {seconds:.0f} s")
    write_json(args.out, rows, {**described, "load_average": load, "seconds": seconds})


if __name__ == "__main__":
    main()
