"""How long a whole training step takes at several contexts: exact, sparse, and with cuDNN.

    python -m examples.train_lm.speed --checkpoint demo/checkpoint.pt

The model is one that was trained at its own context; it reads real text at every context, so that
what is skipped is what such weights skip there. Everything takes turns in one process. Forward,
backward, clipping and optimizer count; the learning rate is 0, so that the weights stay. Writes
JSON to --out.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention
from tqdm import tqdm

from benchmarks.timing import alternate, median_ratio

from .arguments import device, different, make_folder, probability, whole
from .model import LanguageModel, load_trained
from .report import write_json
from .text import read, windows

TOKENS = 32768  # a step, or one sequence if that is longer


class TorchAttention(nn.Module):
    """torch's own: cuDNN on a GPU."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *, causal: bool) -> Tensor:
        turned = [t.transpose(1, 2) for t in (query, key, value)]
        backends = [SDPBackend.CUDNN_ATTENTION] if query.is_cuda else [SDPBackend.FLASH_ATTENTION]
        with sdpa_kernel(backends):
            return scaled_dot_product_attention(*turned, is_causal=causal).transpose(1, 2)


def measure(
    model: LanguageModel, text: Tensor, values: list[float], rounds: int
) -> list[dict[str, Any]]:
    """text: int64 [sequences, context + 1]."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, fused=text.is_cuda)
    ours = model.attentions()
    densities: dict[str, list[float]] = {}

    def step() -> None:
        model(text).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    def sparse(value: float) -> Callable[[], None]:
        def run() -> None:
            model.set_negl_prob(value)
            step()

        return run

    def peer() -> None:
        for block in model.blocks:
            block.attention = TorchAttention()
        step()
        for block, attention in zip(model.blocks, ours, strict=True):
            block.attention = attention

    functions = {"torch": peer} | {f"{value:g}": sparse(value) for value in [0.0, *values]}
    for value in values:  # the first call of each is not timed
        functions[f"{value:g}"]()
        densities[f"{value:g}"] = [a.last_density or 0.0 for a in ours]
    synchronize = torch.cuda.synchronize if text.is_cuda else lambda: None
    times = alternate(functions, rounds=rounds, synchronize=synchronize)
    rows = []
    for name, timing in times.items():
        row: dict[str, Any] = {
            "negl_prob": None if name == "torch" else float(name),
            "step_ms": 1e3 * timing.median,
            "spread": timing.spread,
            "rounds": rounds,
            "speedup_over_exact": median_ratio(times["0"], timing),
        }
        if name in densities:
            row["skipped"] = 1.0 - statistics.fmean(densities[name])
        rows.append(row)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m examples.train_lm.speed",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--checkpoint", type=Path, default=Path("demo/checkpoint.pt"))
    parser.add_argument("--run", type=probability, default=0.0, help="its negl_prob (%(default)s)")
    parser.add_argument("--contexts", type=whole(1), nargs="+", default=[8192, 32768, 131072])
    parser.add_argument("--values", type=probability, nargs="+", default=[0.01, 0.05, 0.1, 0.2])
    parser.add_argument("--rounds", type=whole(1), default=20, help="fewer beyond 32768 tokens")
    parser.add_argument(
        "--device", type=device, default="cuda" if torch.cuda.is_available() else "cpu"
    )
    parser.add_argument("--out", type=Path, default=Path("build/speed.json"))
    args = parser.parse_args()
    different("--values", args.values)
    make_folder("--out", args.out.parent)
    model, settings = load_trained(args.checkpoint, args.run, args.device)
    text = read(settings["corpus"]).validation
    if max(args.contexts) >= len(text):
        parser.error(f"--contexts {max(args.contexts)}: at most {len(text) - 1} bytes")
    found = []
    for context in tqdm(args.contexts, "contexts"):
        sequences = max(TOKENS // context, 1)
        starts = torch.linspace(0, len(text) - context - 1, sequences).long()
        batch = windows(text, starts, context, args.device)
        rounds = max(3, args.rounds * TOKENS // max(TOKENS, context))
        rows = measure(model, batch, args.values, rounds)
        found.append({"context": context, "sequences": sequences, "steps": rows})
        write_json(args.out, {"settings": {**settings, "negl_prob": args.run}, "contexts": found})


if __name__ == "__main__":
    main()
