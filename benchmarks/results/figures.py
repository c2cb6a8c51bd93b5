"""The figures of docs/results.md."""

from __future__ import annotations

import statistics
from collections import defaultdict
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullFormatter, PercentFormatter

from benchmarks.pictures import GREY, STYLE, name_ends, new_figure

from .data import Data, contexts, differences, live_shares, pair_ms, pairs

# Okabe and Ito's palette: told apart by colour-blind readers too.
BLACK = "#222222"
COLOURS = defaultdict(lambda: "#CC79A7", {0.0: BLACK, 0.01: "#56B4E9", 0.02: "#009E73",
                      0.05: "#0072B2", 0.1: "#E69F00", 0.2: "#D55E00"})  # fmt: skip


def draw(data: Data, folder: Path) -> None:
    with matplotlib.rc_context(STYLE | {"savefig.dpi": 110}):
        if 0.0 in data.trainings:
            draw_training(data).savefig(folder / "results_training.png")
        if data.steps:
            draw_steps(data).savefig(folder / "results_steps.png")
        if data.layers:
            draw_layers(data).savefig(folder / "results_layers.png")
        if data.stages is not None:
            draw_stages(data).savefig(folder / "results_stages.png")


def draw_training(data: Data) -> Figure:
    seeds = max(len(runs) for runs in data.trainings.values())
    most = max(data.trainings)
    skipped = statistics.fmean(run.skipped_at_end for run in data.trainings[most])
    figure = new_figure(
        (13, 4.6),
        "The same training with exact and with sparse attention gradients",
        f"Up to {skipped:.0%} of the attention tiles skipped in the backward; means over "
        f"{seeds} seeds, bands and bars are one standard deviation.",
    )
    left, middle, right = figure.subplots(1, 3, width_ratios=(1.1, 1.2, 0.9))
    ends = []
    for value, runs in data.trainings.items():
        colour, name = COLOURS[value], f"{value:g}" if value else "exact"
        steps, losses = zip(*runs[0].content["run"]["validation"], strict=True)
        losses = np.mean([[v for _, v in r.content["run"]["validation"]] for r in runs], axis=0)
        left.plot(steps, losses, color=colour, label=name, linewidth=5 if not value else 1.4,
                  alpha=0.35 if not value else 1)  # fmt: skip
        if not value:
            continue
        shares = np.array([[share for _, share in run.skipped] for run in runs])
        steps = [step for step, _ in runs[0].skipped]
        mean, deviation = shares.mean(axis=0), shares.std(axis=0)
        middle.fill_between(steps, mean - deviation, mean + deviation, color=colour, alpha=0.15)
        middle.plot(steps, mean, color=colour, linewidth=2.2)
        end = statistics.fmean(run.skipped_at_end for run in runs)
        ends.append((f"{value:g}: {end:.0%}", mean[-1], colour))
    left.set_title("Validation loss, nats a byte")
    left.legend(frameon=False, title="negl_prob", alignment="left")
    middle.set_title("Tiles skipped")
    middle.yaxis.set_major_formatter(PercentFormatter(1.0))
    middle.set_ylim(0, 1)
    middle.set_xlim(0, steps[-1])
    name_ends(middle, ends)
    for axes in (left, middle):
        axes.set_xlabel("training step")
    shown = {f"{value:g}": (COLOURS[value], differences(data, value))
             for value in data.trainings if value}  # fmt: skip
    twice = [again.loss - first.loss for again, first in pairs(data) if not again.negl_prob]
    if twice:
        shown = {"exact,\nagain": (BLACK, twice)} | shown
    for place, (colour, found) in enumerate(shown.values()):
        if not found:  # no exact one of these seeds
            continue
        right.plot([place] * len(found), found, "o", color=colour, alpha=0.5, markersize=5)
        error = statistics.stdev(found) if len(found) > 1 else 0.0
        right.errorbar(place, statistics.fmean(found), error, color=colour, marker="_",
                       markersize=20, capsize=5, linewidth=2)  # fmt: skip
    if len(data.trainings[0.0]) > 1:
        deviation = statistics.stdev([run.loss for run in data.trainings[0.0]])
        right.axhspan(-deviation, deviation, color="#ededed", zorder=0)
        right.text(0.02, 0.02, "grey: the exact loss of other seeds", color=GREY, size=9,
                   transform=right.transAxes)  # fmt: skip
    right.axhline(0, color=BLACK, linewidth=1)
    right.set_xticks(range(len(shown)), list(shown))
    right.set_xlim(-0.6, len(shown) - 0.4)
    right.set_xlabel("negl_prob")
    right.set_title("Final loss minus exact, same seed")
    right.grid(visible=False, axis="x")
    return figure


def draw_steps(data: Data) -> Figure:
    found = [context for _, context in contexts(data)]
    figure = new_figure(
        (10, 4.4),
        "A whole training step against the exact one",
        "Forward, backward and optimizer. Above each bar: tiles skipped. Only 8k was trained.",
    )
    axes = figure.subplots()
    names: list[float | None] = [None, 0.01, 0.05, 0.1, 0.2]
    for group, context in enumerate(found):
        rows = {row["negl_prob"]: row for row in context["steps"]}
        shown = [name for name in names if name in rows]
        for place, name in enumerate(shown):
            row = rows[name]
            x = group + 0.16 * (place - (len(shown) - 1) / 2)
            axes.bar(x, row["speedup_over_exact"], 0.14,
                     color="#bdbdbd" if name is None else COLOURS[name],
                     label=("exact, cuDNN" if name is None else f"negl_prob {name:g}")
                     if group == 0 else None)  # fmt: skip
            note = f"{row['skipped']:.0%}" if "skipped" in row else ""
            axes.text(x, row["speedup_over_exact"] + 0.02, note, ha="center", size=9, color=GREY)
    axes.axhline(1.0, color=BLACK, linewidth=1)
    labels = [f"{c['sequences']} x {c['context'] // 1024}k bytes" for c in found]
    axes.set_xticks(range(len(found)), labels)
    axes.set_ylabel("times as fast as exact")
    axes.grid(visible=False, axis="x")
    axes.set_ylim(0, 1.08 * axes.get_ylim()[1])
    axes.legend(frameon=False, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    return figure


def draw_layers(data: Data) -> Figure:
    figure = new_figure(
        (12, 6.4),
        "Layers differ: what they skip, and what that does to their gradients",
        "Sparse against exact gradients on the same tensors, one line for each negl_prob.",
    )
    grid = figure.subplots(2, len(data.layers), squeeze=False, sharey="row")
    labels: list[tuple[Axes, list[tuple[str, float, str]]]] = []
    for (top, bottom), (name, model) in zip(grid.T, data.layers.items(), strict=True):
        numbers = range(1, len(model["layers"]) + 1)
        ends = {top: [], bottom: []}
        for index, row in enumerate(model["layers"][0]):
            value = row["negl_prob"]
            rows = [layer[index] for layer in model["layers"]]
            style: dict[str, Any] = {"color": COLOURS[value], "marker": "o", "markersize": 4}
            for axes, heights in (
                (top, [r["skipped"] for r in rows]),
                (bottom, [r["relative_l2"]["dQ"] for r in rows]),
            ):
                axes.plot(numbers, heights, **style)
                ends[axes].append((f"{value:g}", heights[-1], COLOURS[value]))
        top.set_title(name)
        top.yaxis.set_major_formatter(PercentFormatter(1.0))
        top.set_ylim(0, 1)
        bottom.set_xlabel("layer")
        labels += ends.items()
    grid[1, 0].set_ylim(0, 1.05 * max(axes.dataLim.ymax for axes in grid[1]))
    for axes, found in labels:  # when the heights of all axes are known
        name_ends(axes, found)
    grid[0, 0].set_ylabel("tiles skipped")
    grid[1, 0].set_ylabel("relative L2 error of dQ")
    return figure


def draw_stages(data: Data) -> Figure:
    assert data.stages is not None
    rows = data.stages["lengths"]
    lengths = [row["length"] for row in rows]
    figure = new_figure(
        (9, 4.8),
        "Forward and backward of attention against cuDNN",
        "Everything that a training step's attention needs: statistics, selection, schedule.",
    )
    axes = figure.subplots()
    shares = live_shares(rows[0])
    colours = dict(zip(shares, ("#56B4E9", "#0072B2", "#D55E00"), strict=False))
    ends = []
    for share in (None, *shares):
        heights = [
            (row["ms"]["cuDNN_forward"] + row["ms"]["cuDNN_backward"]) / pair_ms(row, share)
            for row in rows
        ]
        colour = BLACK if share is None else colours[share]
        name = "exact" if share is None else f"{float(share):.0%} live"
        axes.plot(lengths, heights, color=colour, marker="o", linewidth=2.2)
        ends.append((f"{name}: {heights[-1]:.1f}x", heights[-1], colour))
    axes.axhline(1.0, color=GREY, linewidth=1)
    axes.set_xscale("log", base=2)
    axes.set_xticks(lengths, [f"{length // 1024}k" for length in lengths])
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}x"))
    axes.set_ylim(bottom=0)
    axes.set_xlim(lengths[0], lengths[-1])
    axes.set_xlabel("length")
    axes.set_ylabel("times as fast as cuDNN")
    name_ends(axes, ends)
    return figure
