"""Trains the demo's language model with a controller, and checks the error that it holds.

    python -m examples.calibrate_lm.control --steps 240 --context 1024 --every 10

Every --check steps, the thresholds in force are measured on fixed windows of other text, all heads
whole. Writes control.json and control.png into --out. The learning rate is that of the demo.
"""

from __future__ import annotations

import json
import shlex
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import back_lite
import torch
from back_lite import Target
from matplotlib.figure import Figure
from tqdm import tqdm

from benchmarks.files import write_text
from benchmarks.machine import describe
from examples.train_lm.__main__ import (
    LanguageModel,
    Run,
    learning_rate,
    load_text,
)
from examples.train_lm.arguments import whole
from examples.train_lm.compare import record_calls

from .__main__ import PEAK_LEARNING_RATE, draw
from .arguments import make_parser, prepare


def check(model: LanguageModel, batches: list[torch.Tensor]) -> dict[str, list[float]]:
    """Error and density of every head, with the thresholds in force."""
    thresholds = [attention.negl_prob for attention in model.attentions()]
    sums: dict[int, back_lite.GradientComparison] = {}
    for batch in batches:
        for layer, call in enumerate(record_calls(model, batch)):
            tensors = call.query, call.key, call.value, call.grad_out
            found = back_lite.compare_gradients(*tensors, [thresholds[layer]], **call.options)
            sums[layer] = sums[layer] + found if layer in sums else found
    return {
        "error": torch.cat([found.error[0] for found in sums.values()]).tolist(),
        "density": torch.cat([found.density[0] for found in sums.values()]).tolist(),
        "negl_prob": [
            value
            for layer, found in sums.items()
            for value in torch.as_tensor(thresholds[layer]).expand(found.num_heads).tolist()
        ],
    }


def draw_checks(checks: list[dict[str, Any]], target: Target, warmup: int, path: Path) -> None:
    figure = Figure(figsize=(9, 7), layout="constrained")
    figure.suptitle("Error of the heads' gradients under the controller", x=0.01, ha="left")
    top, bottom = figure.subplots(2, 1, sharex=True)
    after = [c for c in checks if c["step"] > warmup]
    steps = [c["step"] for c in after]
    for head in range(len(after[0]["error"])):
        top.plot(steps, [c["error"][head] for c in after], color="#56B4E9", linewidth=0.8)
        bottom.plot(steps, [c["negl_prob"][head] for c in after], color="#E69F00", linewidth=0.9)
    top.plot(steps, [statistics.median(c["error"]) for c in after], color="black", linewidth=2.5)
    top.axhspan(target.error / 1.2, 1.2 * target.error, color="#D55E00", alpha=0.15, linewidth=0)
    top.axhline(target.error, color="#D55E00", linestyle="--", linewidth=1.5)
    top.set_ylabel("relative L2, worst of dQ, dK, dV")
    top.set_title(
        f"Heads (thin), their median (black), the target {target.error:g} and 20% around it",
        loc="left",
    )
    bottom.set_ylabel("negl_prob")
    bottom.set_title("Thresholds of the heads", loc="left")
    bottom.set_xlabel("training step")
    for axes in (top, bottom):
        axes.set_yscale("log")
        axes.grid(color="#ebebeb")
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = make_parser(
        "examples.calibrate_lm.control", __doc__, steps=240, context=1024, unseen=4
    )
    add = parser.add_argument
    add("--every", type=whole(1), default=10, help="(%(default)s)")
    add("--warmup", type=whole(0), default=40, help="(%(default)s)")
    add("--check", type=whole(1), default=20, help="steps between (%(default)s)")
    add("--relative-l2", type=float, default=0.1, help="target (%(default)s)")
    args = parser.parse_args()
    if args.steps // args.check * args.check <= args.warmup:
        parser.error(f"--steps {args.steps}: accepted are enough for a check after the warm-up")
    try:
        target = Target(relative_l2=args.relative_l2)
    except ValueError as error:
        parser.error(str(error))
    prepare(args)
    # Of the CPU its own time: other programs run there too.
    clock = time.process_time if args.device == "cpu" else time.perf_counter
    train_text, other_text = load_text()
    run = Run(0.0, args.seed, args.device)
    records: list[dict[str, Any]] = []
    controller = back_lite.Controller(
        run.model, target, every=args.every, warmup=args.warmup, log=records.append
    )
    unseen = draw(other_text, args.unseen, args.size, args.context, args.seed + 2, args.device)
    checks: list[dict[str, Any]] = []
    seconds: dict[int, list[float]] = {}  # of a step, by the layers measured in it
    idle: list[float] = []  # of the controller, in a step without a measurement
    batches = draw(train_text, args.steps, args.size, args.context, args.seed, args.device)
    for step, batch in enumerate(tqdm(batches, desc="training", unit="step", dynamic_ncols=True)):
        start, known = clock(), len(records)
        run.step(batch, learning_rate(PEAK_LEARNING_RATE, step, args.steps))
        spent = clock() - start
        if (step + 1) % args.check == 0:
            checks.append({"step": step + 1, **check(run.model, unseen)})
        start = clock()
        controller.step()
        own = clock() - start
        if step >= args.warmup:
            seconds.setdefault(len(records) - known, []).append(spent + own)
            if len(records) == known:
                idle.append(own)
    medians = {count: statistics.median(times) for count, times in sorted(seconds.items())}
    layers = len(run.model.attentions())
    cost = cost_after_warmup = None  # unknown where every step measures
    if 0 in medians and 1 in medians:
        without = medians[0] - statistics.median(idle)
        cost = (layers * medians[1] + (100 - layers) * medians[0]) / (100 * without) - 1
        counts = {count: len(times) for count, times in seconds.items()}
        spent = sum(medians[count] * number for count, number in counts.items())
        cost_after_warmup = spent / (without * sum(counts.values())) - 1
    after = [c for c in checks if c["step"] > args.warmup]
    ratios = [statistics.median(c["error"]) / target.error for c in after]
    content = {
        "command": shlex.join(["python", "-m", "examples.calibrate_lm.control", *sys.argv[1:]]),
        **describe(),
        "median_error_over_target": ratios,
        "skipped": [1.0 - statistics.fmean(c["density"]) for c in after],
        "clock": "CPU" if args.device == "cpu" else "wall",
        "step_seconds": medians,
        "idle_seconds": statistics.median(idle) if idle else None,
        "cost_at_every_100": cost,
        "cost_after_warmup": cost_after_warmup,
        "final_negl_prob": checks[-1]["negl_prob"],
        "checks": checks,
        "records": records,
    }
    write_text(args.out / "control.json", json.dumps(content, indent=1) + "\n")
    draw_checks(checks, target, args.warmup, args.out / "control.png")
    print(json.dumps({k: v for k, v in content.items() if k not in ("checks", "records")}))


if __name__ == "__main__":
    main()
