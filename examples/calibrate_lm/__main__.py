"""Calibrates the demo's language model and looks at text that the calibration has not seen.

    python -m examples.calibrate_lm --steps 300

Trains the demo's model with exact gradients (once: it is kept in --out), chooses thresholds for two
targets on training text, with and without the margin for the spread between batches, and measures
them on other text, against the best single threshold.
"""

from __future__ import annotations

import argparse
import itertools
import json
import shlex
import sys
from collections.abc import Iterable
from typing import Any

import back_lite
import torch
from back_lite import Calibration, Target
from torch import Tensor
from tqdm import tqdm

from benchmarks.files import write_text
from benchmarks.machine import describe
from examples.train_lm.__main__ import (
    DEFAULTS,
    LanguageModel,
    Run,
    learning_rate,
    load_text,
    windows,
)
from examples.train_lm.arguments import probability, whole, write_checkpoint

from .arguments import make_parser, prepare

TARGETS = (Target(cosine=0.99), Target(relative_l2=0.1))
PEAK_LEARNING_RATE = DEFAULTS["small"]["learning_rate"]
MARGINS = (2.0, 0.0)  # standard errors; the first is calibrate's own
WITHIN = 1.2  # of the target, on unseen text
MOST = 0.95  # of the heads


def draw(text: Tensor, count: int, size: int, context: int, seed: int, device: str) -> list[Tensor]:
    """Batches of ``size`` random windows."""
    if len(text) < context + 2:
        raise SystemExit(f"--context {context}: accepted are whole numbers to {len(text) - 2}")
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(len(text) - context - 1, (count, size), generator=generator)
    return [windows(text, start, context, device) for start in starts]


def trained_model(args: argparse.Namespace, text: Tensor) -> LanguageModel:
    path = args.out / f"model_{args.steps}_{args.context}_{args.seed}.pt"
    run = Run(0.0, args.seed, args.device)
    if path.exists():
        try:
            run.model.load_state_dict(torch.load(path, weights_only=True))
        except Exception as error:  # which one depends on the bytes of a damaged file
            raise SystemExit(f"{path}: damaged ({type(error).__name__}); remove it") from None
        return run.model
    batches = draw(text, args.steps, 1, args.context, args.seed, args.device)
    for step, batch in enumerate(tqdm(batches, desc="training", unit="step", dynamic_ncols=True)):
        run.step(batch, learning_rate(PEAK_LEARNING_RATE, step, args.steps))
    write_checkpoint(path, run.model.state_dict())
    return run.model


def by_head(calibration: Calibration, what: str) -> Tensor:
    """A curve of all heads: (values, heads of all layers)."""
    curves = [layer.curves for layer in calibration.layers]
    assert all(curves)
    rows = [c.error() if what == "error" else c.density for c in curves if c is not None]
    return torch.cat([torch.tensor(layer, dtype=torch.float64) for layer in rows], dim=1)


def judge(target: Target, chosen: Calibration, unseen: Calibration) -> dict[str, Any]:
    """The chosen thresholds on unseen text, and every single threshold."""
    errors, density = by_head(unseen, "error"), by_head(unseen, "density")
    picks = [value for layer in chosen.layers for value in layer.negl_prob]
    rows = [chosen.values.index(value) if value else -1 for value in picks]
    error = torch.tensor([errors[row, h] if row >= 0 else 0.0 for h, row in enumerate(rows)])
    live = torch.tensor([density[row, h] if row >= 0 else 1.0 for h, row in enumerate(rows)])
    share = (errors <= WITHIN * target.error).double().mean(dim=1)
    single = max((i for i, s in enumerate(share.tolist()) if s >= MOST), default=None)
    return {
        "target": str(target),
        "margin": chosen.margin,
        "negl_prob": picks,
        "heads_within": float((error <= WITHIN * target.error).double().mean()),
        "heads_within_target_itself": float((error <= target.error).double().mean()),
        "error_median": float(error.median()),
        "error_max": float(error.max()),
        "skipped": float(1.0 - live.mean()),
        "single_negl_prob": None if single is None else chosen.values[single],
        "single_heads_within": None if single is None else float(share[single]),
        "single_skipped": None if single is None else float(1.0 - density[single].mean()),
    }


def main() -> None:
    parser = make_parser(
        "examples.calibrate_lm", __doc__, steps=300, context=DEFAULTS["small"]["context"], unseen=8
    )
    parser.add_argument("--batches", type=whole(1), default=8, help="to calibrate on (%(default)s)")
    parser.add_argument(
        "--values",
        type=probability,
        nargs="+",
        help="negl_prob to measure (default: calibrate's own)",
    )
    args = parser.parse_args()
    values = args.values or []
    if values[:1] == [0.0] or any(a >= b for a, b in itertools.pairwise(values)):
        parser.error(f"--values {values}: accepted are ascending numbers above 0 and below 1")
    prepare(args)
    train_text, other_text = load_text()
    model = trained_model(args, train_text)

    def batches(text: Tensor, count: int, seed: int, what: str) -> Iterable[Tensor]:
        drawn = draw(text, count, args.size, args.context, args.seed + seed, args.device)
        return tqdm(drawn, desc=what, unit="batch", dynamic_ncols=True)

    unseen_batches = batches(other_text, args.unseen, 2, "unseen text")
    unseen = back_lite.calibrate(model, unseen_batches, TARGETS[0], values=args.values)
    partial = args.out / "calibration.partial.json"
    partial.unlink(missing_ok=True)
    results = []
    for number, (target, margin) in enumerate(itertools.product(TARGETS, MARGINS)):
        # What is measured depends on neither: all but the first read the partial file.
        bar = batches(train_text, args.batches, 1, "calibrating")
        chosen = back_lite.calibrate(
            model, bar, target, values=args.values, margin=margin, partial=partial
        )
        chosen.save(args.out / f"calibration_{number + 1}.json")
        print(chosen)
        results.append(judge(target, chosen, unseen))
        print(json.dumps(results[-1], indent=1))
    command = shlex.join(["python", "-m", "examples.calibrate_lm", *sys.argv[1:]])
    content = {"command": command, **describe(), "results": results}
    write_text(args.out / "results.json", json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
