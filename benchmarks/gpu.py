"""What the GPU benchmarks share: peers, tensors, timing in turns."""

from __future__ import annotations

import argparse
import importlib.util
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from machine import describe
from rows import Groups, choose, collect, verdict, write_json
from timing import Timing
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

TOKENS = 32768
LENGTHS = (2048, 8192, 16384, 32768)


def _has_fa4() -> bool:
    try:
        return importlib.util.find_spec("flash_attn.cute") is not None
    except ModuleNotFoundError:
        return False


@dataclass(frozen=True)
class Case:
    length: int
    head_dim: int
    causal: bool = False
    batch: int = 0  # 0: as many as make TOKENS
    heads: int = 0  # 0: 16 of 128, 32 of 64
    key_heads: int = 0  # 0: as many as heads

    def __str__(self) -> str:
        kind = "causal" if self.causal else "full"
        text = f"S={self.length} D={self.head_dim} {kind}"
        if self.batch or self.heads:
            text += f" B={self.num_batches} H={self.num_heads}"
        return text + (f":{self.key_heads}" if self.key_heads else "")

    @property
    def num_batches(self) -> int:
        return self.batch or max(TOKENS // self.length, 1)

    @property
    def num_heads(self) -> int:
        return self.heads or 2048 // self.head_dim

    def random(self, gradient: bool = False) -> list[Tensor]:
        """Query, key, value and, if asked, grad_out: [B, S, H, D] bfloat16."""
        heads = [self.num_heads, *[self.key_heads or self.num_heads] * 2]
        if gradient:
            heads.append(self.num_heads)
        shapes = [(self.num_batches, self.length, h, self.head_dim) for h in heads]
        return [torch.randn(s, device="cuda", dtype=torch.bfloat16) for s in shapes]


def dense_cases(head_dim: int) -> Iterator[Case]:
    for length in LENGTHS:
        for causal in (False, True):
            yield Case(length, head_dim, causal)


def cudnn(query: Tensor, key: Tensor, value: Tensor, causal: bool) -> Tensor:
    """cuDNN's attention through torch; tensors and result are [B, S, H, D]."""
    turned = [t.transpose(1, 2) for t in (query, key, value)]
    grouped = query.shape[2] != key.shape[2]
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        out = scaled_dot_product_attention(*turned, is_causal=causal, enable_gqa=grouped)
    return out.transpose(1, 2)


def fa4(query: Tensor, key: Tensor, value: Tensor, causal: bool) -> Tensor:
    """FlashAttention 4, where it is installed."""
    from flash_attn.cute import flash_attn_func

    out = flash_attn_func(query, key, value, causal=causal)
    return out[0] if isinstance(out, tuple) else out


HAS_FA4 = _has_fa4()
PEERS = {"cuDNN": cudnn, **({"FA4": fa4} if HAS_FA4 else {})}


def in_turns(
    functions: Mapping[str, Callable[[], object]], rounds: int = 25, warm_ms: float = 100.0
) -> dict[str, Timing]:
    """Runs a, b, a, b, ... and times each on the device, by events.

    The host never waits in between, so that the GPU has no gaps, and is warm from the start.
    """
    for function in functions.values():  # builds plans, compiles
        function()
    torch.cuda.synchronize()
    began = time.perf_counter()
    while time.perf_counter() - began < warm_ms * 1e-3:
        for function in functions.values():
            function()
        torch.cuda.synchronize()
    marks: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {n: [] for n in functions}
    for _ in range(rounds):
        for name, function in functions.items():
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            function()
            end.record()
            marks[name].append((begin, end))
    torch.cuda.synchronize()
    return {
        name: Timing([begin.elapsed_time(end) * 1e-3 for begin, end in pairs])
        for name, pairs in marks.items()
    }


def in_graphs(
    functions: Mapping[str, Callable[[], object]], rounds: int = 25, calls: int = 10
) -> dict[str, Timing]:
    """As in_turns, of calls that take the GPU less than the host: `calls` of them are one graph."""
    replays = {}
    for name, function in functions.items():
        function()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(calls):
                function()
        replays[name] = graph.replay
    times = in_turns(replays, rounds)
    return {name: Timing([s / calls for s in timing.seconds]) for name, timing in times.items()}


def check(name: str, actual: Tensor, expected: Tensor, limit: float = 2e-2) -> None:
    """Compares one head of the last batch: a benchmark of wrong results is worth nothing."""
    ours, theirs = actual[-1, :, -1].double(), expected[-1, :, -1].double()
    error = float((ours - theirs).norm() / theirs.norm())
    if not error <= limit:
        raise SystemExit(f"{name}: relative difference {error:.2e}, allowed is {limit:.0e}")


def matmul_tflops() -> float:
    """An 8192^3 product through cuBLAS: what this GPU does in this process."""
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    seconds = in_turns({"matmul": lambda: a @ b})["matmul"].median
    return 2 * 8192**3 / seconds * 1e-12


def run(description: str, name: str, groups: Groups) -> None:
    """The command line of a GPU benchmark: prints a table and keeps it as JSON."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--only", default=",".join(groups), help="groups (%(default)s)")
    parser.add_argument("--out", type=Path, default=Path(f"build/bench/{name}.json"))
    args = parser.parse_args()
    chosen = choose(parser, args.only, groups)
    if not torch.cuda.is_available():
        parser.error("torch sees no GPU")

    torch.manual_seed(0)
    start = time.perf_counter()
    facts: dict[str, object] = {**describe(), "matmul_tflops": matmul_tflops(), "fa4": HAS_FA4}
    print(facts)
    rows = collect(groups, chosen, after_row=torch.cuda.empty_cache)
    seconds = time.perf_counter() - start
    print(f"{verdict(rows)}, in {seconds:.0f} s")
    write_json(args.out, rows, {**facts, "seconds": seconds})
