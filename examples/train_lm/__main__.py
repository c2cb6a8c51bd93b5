"""Trains a causal language model of bytes, exact or with sparse attention gradients.

    python -m examples.train_lm                            # the demo: exact and sparse, compared
    python -m examples.train_lm --negl-prob 0.05 --out runs/sparse       # one training
    python -m examples.train_lm --out runs/sparse --resume  # goes on at its last checkpoint

With more than one --negl-prob, all trainings start from the same weights, see the same data in the
same order and take turns, step by step, so that their times can be compared even on a busy machine.
On a GPU the model is larger: 128-wide heads at 8192 bytes of context.

Writes into --out: one JSON a training, TensorBoard logs where tensorboard is installed, a
checkpoint, and, of one exact and one sparse training, pictures and a table.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from pathlib import Path
from typing import Any

import back_lite
import torch
from torch import Tensor
from tqdm import tqdm

from . import report
from .arguments import (
    FIXED,
    device,
    different,
    finite,
    fitting,
    make_folder,
    positive,
    probability,
    read_checkpoint,
    whole,
    write_checkpoint,
)
from .compare import compare_layer, record_calls
from .log import Log
from .model import LARGE, SHAPES, LanguageModel
from .text import CORPORA, Text, load_text, read, windows
from .training import Run

__all__ = [
    "LanguageModel",
    "Run",
    "learning_rate",
    "load_text",
    "main",
    "windows",
]  # for other examples too

HELP = "Trains a causal language model of bytes, exact or with sparse attention gradients."
# context in bytes, sequences a step
DEFAULTS: dict[str, dict[str, Any]] = {
    "small": {"context": 2048, "batch": 1, "steps": 300, "learning_rate": 3e-3},
    "large": {"context": 8192, "batch": 4, "steps": 200, "learning_rate": 2e-3},
}
DEFAULTS["small"]["corpus"], DEFAULTS["large"]["corpus"] = CORPORA
for _defaults in DEFAULTS.values():
    _defaults |= {"negl_prob": [0.0, 0.05], "exact_steps": 20, "seed": 0}
WARMUP_STEPS = 20  # of the learning rate
VALIDATE_EVERY, VALIDATION_WINDOWS = 30, 12
DENSITY_EVERY = 5


def learning_rate(peak: float, step: int, steps: int) -> float:
    decay = 0.55 + 0.45 * math.cos(math.pi * step / steps)  # 1 to 0.1
    return peak * decay * min(1.0, (step + 1) / WARMUP_STEPS)


# ---------------------------------------------------------------------------------- checkpoints


def save(
    path: Path, args: argparse.Namespace, text: Text, runs: list[Run], data: torch.Generator
) -> None:
    state: dict[str, Any] = {
        "settings": {name: getattr(args, name) for name in FIXED},
        "runs": {run.negl_prob: run.state_dict() for run in runs},
        "data": data.get_state(),  # which windows come next
        "text": text.description,
        "random": torch.get_rng_state(),
    }
    if args.device.startswith("cuda"):
        state["random_cuda"] = torch.cuda.get_rng_state(args.device)
    write_checkpoint(path, state)


def load(path: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Reads a checkpoint and takes its settings over into args."""
    state = read_checkpoint("--resume", path, ("settings", "runs", "data", "text", "random"))
    for name, kept in {**state["settings"], "negl_prob": list(state["runs"])}.items():
        given = getattr(args, name)
        if given not in (None, kept):
            raise SystemExit(
                f"--{name.replace('_', '-')} {given}: {path} was begun with {kept}; accepted with "
                "--resume is the same, or nothing; another --out begins anew"
            )
        setattr(args, name, kept)
    return state


def restore(state: dict[str, Any], runs: list[Run], data: torch.Generator, device: str) -> None:
    for run in runs:
        run.load_state_dict(state["runs"][run.negl_prob])
    data.set_state(state["data"])
    torch.set_rng_state(state["random"])
    if device.startswith("cuda") and "random_cuda" in state:
        torch.cuda.set_rng_state(state["random_cuda"], device)


# ------------------------------------------------------------------------------------- training


def validation_windows(args: argparse.Namespace, text: Text) -> Tensor:
    last = len(text.validation) - args.context - 1
    if last < 0:
        raise SystemExit(f"--context {args.context}: at most {len(text.validation) - 1} bytes")
    starts = torch.linspace(0, last, VALIDATION_WINDOWS).long()
    return windows(text.validation, starts, args.context, args.device)


def train(
    args: argparse.Namespace, text: Text, validation: Tensor, state: dict[str, Any] | None
) -> list[Run]:
    """All trainings, in turns; from a checkpoint's state, if there is one."""
    shape = SHAPES[args.size]
    runs = [Run(p, args.seed, args.device, shape, args.exact_steps) for p in args.negl_prob]
    data = torch.Generator().manual_seed(args.seed)
    if state is not None:
        with fitting("--resume", args.out / "checkpoint.pt"):
            restore(state, runs, data, args.device)
    done = runs[0].num_steps
    logs = [Log(args.out / "tensorboard" / run.name, done) for run in runs]
    bar = tqdm(
        range(done, args.steps), "training", initial=done, total=args.steps, dynamic_ncols=True
    )
    for step in bar:
        starts = torch.randint(len(text.train) - args.context - 1, (args.batch,), generator=data)
        batch = windows(text.train, starts, args.context, args.device)
        last = step + 1 == args.steps
        for run, log in zip(runs, logs, strict=True):
            run.step(batch, learning_rate(args.learning_rate, step, args.steps))
            loss = run.history.train_loss[-1]
            log.add(step + 1, {"loss/train": finite(loss, run.name, args.learning_rate)})
            if step % DENSITY_EVERY == 0 or last:
                log.add(step + 1, {"density": run.note_density()})
            if (step + 1) % VALIDATE_EVERY == 0 or last:
                loss = run.validate(validation, args.batch)
                log.add(step + 1, {"loss/validation": finite(loss, run.name, args.learning_rate)})
                if run.negl_prob:
                    log.add(step + 1, run.measure(batch[:1]))
        if (step + 1) % args.save_every == 0 or last:
            save(args.out / "checkpoint.pt", args, text, runs, data)
        bar.set_postfix(
            {run.name: f"{run.history.train_loss[-1]:.3f}" for run in runs}
            | {"skipped": f"{1 - statistics.fmean(runs[-1].history.density[-1][1]):.0%}"}
        )
    for log in logs:
        log.close()
    return runs


# ----------------------------------------------------------------------------------------- main


def default_device() -> str:
    """cuda where back_lite has kernels for it."""
    if torch.cuda.is_available():
        shape = 1, 1, 1, LARGE.head_dim
        probe = torch.ones(shape, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        try:
            back_lite.attention(probe, probe, probe, 0.5, causal=True).sum().backward()
            return "cuda"
        except NotImplementedError as reason:
            print(f"Using the CPU: {reason}")
    return "cpu"


def parse_arguments() -> argparse.Namespace:
    """Those that a checkpoint keeps are None where they are not given."""
    parser = argparse.ArgumentParser(prog="python -m examples.train_lm", description=HELP)
    add = parser.add_argument
    add("--negl-prob", type=probability, nargs="+", metavar="P",
        help="probability that the backward may leave out, one for each training; 0 is exact "
        "(default: 0 0.05)")  # fmt: skip
    add("--exact-steps", type=whole(0), help="exact ones at the start (default: 20)")
    add("--size", choices=SHAPES, help="of the model (default: large on a GPU)")
    add("--context", type=whole(1), help="bytes read (default: 2048, large 8192)")
    add("--batch", type=whole(1), help="sequences a step (default: 1, large 4)")
    add("--steps", type=whole(1), help="of each training (default: 300, large 200)")
    add("--learning-rate", type=positive, help="its peak (default: 0.003, large 0.002)")
    add("--corpus", choices=CORPORA, help="text: Python's standard library (the default of small), "
        "or that and torch's sources (of large)")  # fmt: skip
    add("--device", type=device, help="cpu or cuda (default: cuda where there are kernels)")
    add("--seed", type=whole(0), help="of weights and data (default: 0)")
    add("--save-every", type=whole(1), default=100, help="steps from checkpoint to checkpoint")
    add("--resume", action="store_true", help="go on at the checkpoint in --out, as it was begun")
    add("--out", type=Path, default=Path("demo"), help="folder (%(default)s)")
    args = parser.parse_args()
    different("--negl-prob", args.negl_prob or [])
    return args


def set_defaults(args: argparse.Namespace) -> None:
    args.size = args.size or ("large" if args.device.startswith("cuda") else "small")
    for name, value in DEFAULTS[args.size].items():
        if getattr(args, name) is None:
            setattr(args, name, value)


def compare(args: argparse.Namespace, runs: dict[str, Run], validation: Tensor) -> None:
    """A table and pictures of an exact and a sparse training."""
    negl_prob = runs["sparse"].negl_prob
    calls = record_calls(runs["sparse"].model, validation[:1])
    layers, tiles = zip(*(compare_layer(call, negl_prob) for call in calls), strict=True)
    histories = {name: run.history for name, run in runs.items()}
    result = report.Result(vars(args) | {"negl_prob": negl_prob}, histories, list(layers))
    report.print_tables(result)
    report.write_json(
        args.out / "results.json", {"settings": report.settings(args), "layers": layers}
    )
    try:
        from . import plots
    except ModuleNotFoundError as error:
        print(f"No pictures: {error} (pip install matplotlib)")
    else:
        plots.draw_all(result, tiles, args.out)


def main() -> None:
    args = parse_arguments()
    start = time.perf_counter()
    checkpoint = args.out / "checkpoint.pt"
    state = load(checkpoint, args) if args.resume else None
    args.device = args.device or default_device()
    set_defaults(args)
    make_folder("--out", args.out)
    text = read(args.corpus)
    if state is not None and state["text"] != text.description:
        raise SystemExit(f"--resume: {checkpoint} was begun with another text: that of the Python "
                         "and torch that trained it")  # fmt: skip
    validation = validation_windows(args, text)
    try:
        runs = train(args, text, validation, state)
    except KeyboardInterrupt:
        print(f"\nInterrupted. With {checkpoint}, --resume --out {args.out} goes on"
              if checkpoint.exists() else "\nInterrupted before the first checkpoint")  # fmt: skip
        raise SystemExit(130) from None
    for run in runs:
        path = args.out / f"{run.name}_seed_{args.seed}.json"
        settings = report.settings(args) | {"negl_prob": run.negl_prob}
        report.write_json(
            path, {"settings": settings, "text": text.description, "run": run.history}
        )
    pair = {"sparse" if run.negl_prob else "exact": run for run in runs}
    if len(runs) == len(pair) == 2:
        compare(args, pair, validation)
    print(f"\nTook {time.perf_counter() - start:.0f} s. The results are in {args.out}/")


if __name__ == "__main__":
    main()
