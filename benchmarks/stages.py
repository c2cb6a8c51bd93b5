"""Measures every stage of a training step's attention, 2k to 128k tokens, beside cuDNN and FA4.

    python benchmarks/stages.py

Forward (with and without statistics), select, schedule, backward (dense, and at several shares of
live tiles), causal, bfloat16, and the peak memory of forward and backward together. All times of a
length but the schedule's are taken in turns in one process. FlashAttention 4 takes part where it is
installed. Writes JSON to --out as it goes.
"""

from __future__ import annotations

import argparse
import gc
import json
import shlex
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from back_lite import attention, mask_tiles, ops, pack_tiles
from files import write_text
from gpu import HAS_FA4, PEERS, Case, in_turns
from machine import describe
from torch import Tensor

from backward import Problem, schedule_seconds

LENGTHS = (2048, 4096, 8192, 16384, 32768, 65536, 131072)
DENSITIES = (0.5, 0.25, 0.1)
HEADS, HEAD_DIM = 8, 128


def random_bits(case: Case, density: float) -> tuple[Tensor, float]:
    """Tile bits of about that share, and the share itself. Each query tile keeps its last tile."""
    allowed = mask_tiles(case.length, case.length, causal=True, device="cuda")
    shape = (case.num_batches, case.num_heads, *allowed.shape)
    live = (torch.rand(shape, device="cuda") < density) & allowed
    rows = torch.arange(allowed.shape[0], device="cuda")
    live[..., rows, rows // 2] = True
    count = int(allowed.sum()) * case.num_batches * case.num_heads
    return pack_tiles(live), int(live.sum()) / count


def peak_bytes(function: Callable[[], object]) -> int:
    """Beyond what is there before."""
    gc.collect()  # or what an earlier problem left may go meanwhile
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    function()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def memory(case: Case) -> dict[str, int]:
    """Peak of forward and backward beside the inputs, bytes; out and gradients are part of it."""
    *inputs, grad_out = case.random(gradient=True)
    leaves = [t.requires_grad_() for t in inputs]

    def both(forward: Callable[..., Tensor]) -> Callable[[], object]:
        return lambda: torch.autograd.grad(forward(*leaves), leaves, grad_out)

    functions = {
        "exact": both(partial(attention, causal=True)),
        "sparse": both(partial(attention, negl_prob=0.05, causal=True)),
    } | {name: both(partial(peer, causal=True)) for name, peer in PEERS.items()}
    return {name: peak_bytes(function) for name, function in functions.items()}


def measure(length: int) -> dict[str, Any]:
    case = Case(length, HEAD_DIM, causal=True, heads=HEADS)
    problem = Problem(case)
    stats = ops.forward(*problem.inputs, causal=True, record=True)[2]
    assert stats is not None
    lengths = {"query_length": length, "key_length": length}
    functions: dict[str, Callable[[], object]] = {
        "forward": lambda: ops.forward(*problem.inputs, causal=True),
        "forward_with_statistics": lambda: ops.forward(*problem.inputs, causal=True, record=True),
        "select": lambda: ops.select(stats, 0.05, **lengths, causal=True),
        "backward": problem.ours,
    }
    densities = {}
    for density in DENSITIES:
        bits, densities[f"backward_{density:g}"] = random_bits(case, density)
        functions[f"backward_{density:g}"] = partial(problem.ours, bits)
    for name, peer in PEERS.items():
        functions[f"{name}_forward"] = partial(peer, *problem.inputs, True)
        functions[f"{name}_backward"] = problem.peer(name)
    rounds = 25 if length <= 32768 else 9
    times = in_turns(functions, rounds=rounds)
    schedule = schedule_seconds(functions["backward_0.25"])
    return {
        "length": length,
        "batch": case.num_batches,
        "heads": HEADS,
        "head_dim": HEAD_DIM,
        "rounds": rounds,
        "ms": {name: 1e3 * timing.median for name, timing in times.items()}
        | {"schedule": 1e3 * schedule.median},
        "spread": {name: timing.spread for name, timing in times.items()},
        "density": densities,
        "peak_bytes": memory(case),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS)
    parser.add_argument("--out", type=Path, default=Path("build/bench/stages.json"))
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("torch sees no GPU")
    torch.manual_seed(0)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    command = shlex.join(["python", "benchmarks/stages.py", *sys.argv[1:]])
    content: dict[str, Any] = {"command": command, **describe(), "fa4": HAS_FA4, "lengths": []}
    for length in args.lengths:
        row = measure(length)
        torch.cuda.empty_cache()
        print(length, {name: f"{ms:.3f}" for name, ms in row["ms"].items()}, flush=True)
        content["lengths"].append(row)
        write_text(args.out, json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
