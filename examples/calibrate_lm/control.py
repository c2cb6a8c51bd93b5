"""Trains the demo's language model with a controller, and checks the error that it holds.

    python -m examples.calibrate_lm.control --steps 240 --context 1024 --every 10

Every --check steps, the thresholds in force are measured on fixed windows of other text, all heads
whole. Writes control.json and control.png into --out.
"""

from __future__ import annotations

import argparse
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

from benchmarks.machine import describe
from examples.train_lm.__main__ import LanguageModel, Run, load_text
from examples.train_lm.compare import record_calls

from .__main__ import LEARNING_RATE, WARMUP_STEPS, draw

WINDOWS = 4  # to check on


def check(model: LanguageModel, windows: list[torch.Tensor]) -> dict[str, list[float]]:
    """Error and density of every head, with the thresholds in force."""
    sums: dict[int, back_lite.GradientComparison] = {}
    for window in windows:
        for layer, call in enumerate(record_calls(model, window)):
            value = model.attentions()[layer].negl_prob
            tensors = call.query, call.key, call.value, call.grad_out
            found = back_lite.compare_gradients(*tensors, [value], causal=True)
            sums[layer] = sums[layer] + found if layer in sums else found
    return {
        "error": torch.cat([found.error[0] for found in sums.values()]).tolist(),
        "density": torch.cat([found.density[0] for found in sums.values()]).tolist(),
        "negl_prob": [float(v) for a in model.attentions() for v in torch.as_tensor(a.negl_prob)]
        if all(torch.as_tensor(a.negl_prob).dim() for a in model.attentions())
        else [],
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
    top.axhline(target.error, color="#D55E00", linestyle="--", linewidth=1.5)
    top.set_ylabel("relative L2, worst of dQ, dK, dV")
    top.set_title(f"Heads (thin), their median (black) and the target {target.error:g}", loc="left")
    bottom.set_ylabel("negl_prob")
    bottom.set_title("Thresholds of the heads", loc="left")
    bottom.set_xlabel("training step")
    for axes in (top, bottom):
        axes.set_yscale("log")
        axes.grid(color="#ebebeb")
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m examples.calibrate_lm.control", description=__doc__
    )
    parser.add_argument("--steps", type=int, default=240, help="of training (%(default)s)")
    parser.add_argument("--context", type=int, default=1024, help="bytes read (%(default)s)")
    parser.add_argument("--every", type=int, default=10, help="(%(default)s)")
    parser.add_argument("--warmup", type=int, default=40, help="(%(default)s)")
    parser.add_argument("--check", type=int, default=20, help="steps between (%(default)s)")
    parser.add_argument("--relative-l2", type=float, default=0.1, help="target (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of weights and data (%(default)s)")
    parser.add_argument("--out", type=Path, default=Path("build/calibrate_lm"), help="folder")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    train_text, other_text = load_text()
    target = Target(relative_l2=args.relative_l2)
    run = Run(0.0, args.seed, "cpu")
    records: list[dict[str, Any]] = []
    controller = back_lite.Controller(
        run.model, target, every=args.every, warmup=args.warmup, log=records.append
    )
    windows = draw(other_text, WINDOWS, args.context, args.seed + 2)
    checks: list[dict[str, Any]] = []
    seconds: dict[int, list[float]] = {}  # CPU time of a step, by the layers measured in it
    batches = draw(train_text, args.steps, args.context, args.seed)
    for step, batch in enumerate(tqdm(batches, desc="training", unit="step", dynamic_ncols=True)):
        start, known = time.process_time(), len(records)
        run.step(batch, LEARNING_RATE * min(1.0, (step + 1) / WARMUP_STEPS))
        spent = time.process_time() - start
        if (step + 1) % args.check == 0:
            checks.append({"step": step + 1, **check(run.model, windows)})
        start = time.process_time()
        controller.step()
        spent += time.process_time() - start
        if step >= args.warmup:
            seconds.setdefault(len(records) - known, []).append(spent)
    medians = {count: statistics.median(times) for count, times in sorted(seconds.items())}
    layers = len(run.model.attentions())
    cost = None  # unknown where every step measures
    if 0 in medians and 1 in medians:
        cost = layers * (medians[1] - medians[0]) / (100 * medians[0])
    after = [c for c in checks if c["step"] > args.warmup]
    ratios = [statistics.median(c["error"]) / target.error for c in after]
    content = {
        "command": shlex.join(["python", "-m", "examples.calibrate_lm.control", *sys.argv[1:]]),
        **describe(),
        "median_error_over_target": ratios,
        "skipped": [1.0 - statistics.fmean(c["density"]) for c in after],
        "step_cpu_seconds": medians,
        "cost_at_every_100": cost,
        "final_negl_prob": checks[-1]["negl_prob"],
        "checks": checks,
        "records": records,
    }
    (args.out / "control.json").write_text(json.dumps(content, indent=1) + "\n")
    draw_checks(checks, target, args.warmup, args.out / "control.png")
    print(json.dumps({k: v for k, v in content.items() if k not in ("checks", "records")}))


if __name__ == "__main__":
    main()
