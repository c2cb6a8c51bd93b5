"""How long a whole training step of a SmolLM2-sized model takes: SDPA, exact and sparse BackLite.

    python -m examples.transformers.speed
    python -m examples.transformers.speed --compile --shapes 1x8192

The model has the shape of SmolLM2-135M and random weights, whose attention is even: a negl_prob of
0.7 skips about what one of 0.05 skips in the trained model. Everything takes turns in one process.
Forward, backward, clipping and optimizer count. Beside each step stands how long its kernels alone
take: where the step takes longer, the GPU waits for the host. With --compile, torch.compile takes
every layer but the first, which looks at the data. Writes JSON to --out.
"""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from tqdm import tqdm
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

from benchmarks.timing import alternate, median_ratio
from examples.train_lm.arguments import device, different, make_folder, probability, whole
from examples.train_lm.report import write_json

from .__main__ import Training, attentions

SHAPES = ("1x2048", "1x8192", "4x8192", "1x32768")


def shape(text: str) -> tuple[int, int]:
    """Sequences and tokens of each, as in 4x8192."""
    sequences, _, context = text.partition("x")
    return whole(1)(sequences), whole(2)(context)


def smollm2(layers: int, context: int) -> PreTrainedModel:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=layers,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=context,
        tie_word_embeddings=True,
    )
    return AutoModelForCausalLM.from_config(config)


def kernel_ms(training: Training, tokens: Tensor) -> float | None:
    """Of one step, on the device; None on the CPU."""
    if not tokens.is_cuda:
        return None
    with profile(activities=[ProfilerActivity.CUDA]) as recorded:
        training.update(tokens)
    # Kernels that are launched early overlap the one before them: time during which any runs.
    ranges = sorted(
        (event.time_range.start, event.time_range.end)
        for event in recorded.events()
        if event.device_type == torch.autograd.DeviceType.CUDA
    )
    busy, last = 0.0, 0.0
    for start, end in ranges:
        busy += max(0.0, end - max(start, last))
        last = max(last, end)
    return 1e-3 * busy


def measure(trainings: dict[str, Training], tokens: Tensor, rounds: int) -> list[dict[str, Any]]:
    """tokens: int64 [sequences, context]. Every step ends with reading the loss, which waits."""
    functions = {name: partial(t.update, tokens) for name, t in trainings.items()}
    times = alternate(functions, rounds=rounds, warmup=3)
    rows = []
    for name, timing in times.items():
        training = trainings[name]
        rows.append(
            {
                "attention": name,
                "rounds": rounds,
                "step_ms": 1e3 * timing.median,
                "spread": timing.spread,
                "kernel_ms": kernel_ms(training, tokens),
                "speedup_over_sdpa": median_ratio(times["sdpa"], timing),
                "skipped": training.skipped() if training.back_lite else 0.0,
            }
        )
    return rows


def main() -> None:
    cuda = torch.cuda.is_available()
    parser = argparse.ArgumentParser(
        prog="python -m examples.transformers.speed",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--shapes", type=shape, nargs="+", default=[shape(text) for text in SHAPES],
        help=f"sequences x tokens (default: {' '.join(SHAPES)})")  # fmt: skip
    add("--values", type=probability, nargs="+", default=[0.7], help="(%(default)s)")
    add("--layers", type=whole(1), default=30, help="of the model (%(default)s)")
    add("--rounds", type=whole(1), default=20, help="half of them beyond 8192 tokens")
    add("--compile", action="store_true", help="the layers, by torch.compile")
    add("--device", type=device, default="cuda" if cuda else "cpu", help="(%(default)s)")
    add("--out", type=Path, default=Path("build/smollm2_steps.json"), help="(%(default)s)")
    args = parser.parse_args()
    different("--values", args.values)
    make_folder("--out", args.out.parent)
    with torch.device(args.device):
        model = smollm2(args.layers, max(context for _, context in args.shapes))
    trainings = {name: Training(model, name, learning_rate=0.0) for name in attentions(args.values)}
    if args.compile:
        for training in trainings.values():
            for layer in training.model.model.layers[1:]:
                layer.compile()
    found = []
    for sequences, context in tqdm(args.shapes, "shapes"):
        tokens = torch.randint(49152, (sequences, context), device=args.device)
        rounds = max(3, args.rounds // (1 if tokens.numel() <= 8192 else 2))
        rows = measure(trainings, tokens, rounds)
        found.append({"sequences": sequences, "context": context, "steps": rows})
        write_json(
            args.out,
            {"settings": {"layers": args.layers, "compile": args.compile}, "shapes": found},
        )
        for row in rows:
            print(sequences, context, {k: v if k == "attention" else v and round(v, 3)
                                       for k, v in row.items()}, flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
