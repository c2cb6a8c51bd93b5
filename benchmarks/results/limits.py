"""The section of docs/results.md that says where the sparse backward does not pay."""

from __future__ import annotations

import statistics
from collections.abc import Iterator

from .data import Data, Json, break_even, contexts, length_name, live_shares, pair_ms


def does_not_pay(data: Data) -> Iterator[str]:
    yield "## Where it does not pay"
    points = []
    if data.stages is not None:
        rows = data.stages["lengths"]
        short, share = rows[0], live_shares(rows[0])[-1]
        gains = {
            row["length"]: pair_ms(row, None) / pair_ms(row, share) for row in (short, rows[-1])
        }
        points.append(
            f"**Short contexts.** With {float(share):.0%} of the tiles live, forward and backward "
            f"together are {gains[short['length']]:.2f} times as fast as exact at "
            f"{length_name(short['length'])}, and {gains[rows[-1]['length']]:.2f} times at "
            f"{length_name(rows[-1]['length'])}. And short contexts have less to skip."
        )
        shares = ", ".join(f"{break_even(row):.0%} at {length_name(row['length'])}" for row in rows)
        points.append(
            "**Dense layers.** Statistics and selection cost something whatever is skipped. A "
            f"layer must skip more than this for its backward to win that back: {shares}. Layers "
            "that skip less are better left at `negl_prob=0`, which records nothing."
        )
    for name, model in data.layers.items():
        found = [next(r for r in layer if r["negl_prob"] == 0.05) for layer in model["layers"]]
        least = min(range(len(found)), key=lambda index: found[index]["skipped"])
        points.append(
            f"**{name}** at 0.05: layer {least + 1} skips {found[least]['skipped']:.0%}; the mean "
            f"over the layers is {statistics.fmean(row['skipped'] for row in found):.0%}."
        )
    if data.trainings:
        value = next((v for v in data.trainings if v == 0.05), max(data.trainings))
        early = [share for run in data.trainings[value] for step, share in run.skipped
                 if run.content["settings"]["exact_steps"] < step <= 40]  # fmt: skip
        if early:
            points.append(
                f"**The start of a training.** Attention that has learned nothing is even: until "
                f"step 40, {statistics.fmean(early):.0%} of the tiles are skipped at {value:g}."
            )
    if data.steps:
        _, context = next(iter(contexts(data)))
        best = max(context["steps"], key=lambda row: row["speedup_over_exact"])
        points.append(
            f"**Steps in which attention is a small part.** At {context['context']} bytes the "
            f"whole step is at most {best['speedup_over_exact']:.2f} times as fast as the exact "
            "one: its other parts do not change. This model has attention twice as wide as its "
            "other parts; a model with more work in them gains less."
        )
    if data.smollm2_steps:
        points.append(f"**A GPU that waits for its host.** {waiting(data.smollm2_steps[0])}")
    points.append(
        "**One sequence and few heads.** Then few columns of tiles share the multiprocessors, and "
        "skewed masks leave some idle: [the backward's tables](hopper-backward.md#speed) have "
        "batch 1 with 8 heads."
    )
    yield "\n".join(f"* {point}" for point in points)


def waiting(found: Json) -> str:
    """At which shapes kernels are the bound, and what is gained there and elsewhere."""
    layers = found["settings"]["layers"]
    starved, fed, more = [], [], []
    for shape in found["shapes"]:
        sdpa, exact, *_, sparse = shape["steps"]
        busy = sdpa["kernel_ms"] / sdpa["step_ms"]
        gains = (
            f"{shape['sequences']} x {shape['context']} tokens, of which kernels take {busy:.0%}, "
            f"it is {exact['speedup_over_sdpa']:.2f} exact and {sparse['speedup_over_sdpa']:.2f} "
            f"with {sparse['skipped']:.0%} of the tiles skipped"
        )
        if busy > 0.9:
            fed.append(gains)
        else:
            starved.append(gains)
            more.append((exact["step_ms"] - sdpa["step_ms"]) / layers)
    parts = []
    if starved:
        parts.append(
            "With few, narrow heads and many layers the host is the bound, whose calls from Python "
            f"take {statistics.fmean(more):.2f} ms more a layer and step than SDPA's, which is "
            "C++; faster kernels then change nothing. The speed of a SmolLM2-sized step beside "
            f"SDPA's: for {'; for '.join(starved)}."
        )
    if fed:
        parts.append(f"With more work it pays: for {'; for '.join(fed)}.")
    return " ".join(parts)
