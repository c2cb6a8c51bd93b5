"""Trains a small language model with exact and with sparse attention gradients, and compares.

    python -m examples.train_lm --steps 300 --context 2048 --negl-prob 0.05

The model reads bytes of Python's standard library and predicts the next one. Both trainings start
from the same weights and see the same data in the same order. They take turns, step by step, so
that their times can be compared even on a busy machine.

Writes pictures and results.json into --out, and prints a table.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sysconfig
import time
import zlib
from pathlib import Path

import back_lite
import torch
import torch.nn.functional as F  # noqa: N812
from back_lite import BackLite
from torch import Tensor, nn
from tqdm import tqdm

from . import plots, report
from .compare import compare_layer, record_calls
from .report import History, Result

HELP = "Trains a small language model with exact and with sparse gradients, and compares."
LAYERS, WIDTH, HEADS = 4, 256, 4  # heads of 64
PEAK_LEARNING_RATE, WARMUP_STEPS = 3e-3, 20
VALIDATE_EVERY, VALIDATION_WINDOWS = 30, 10
NOT_TEXT = {"site-packages", "dist-packages", "test", "tests", "encodings", "lib2to3", "idlelib"}


# ---------------------------------------------------------------------------------------- data


def load_text() -> tuple[Tensor, Tensor]:
    """Bytes of Python's standard library, its documentation included: (training, validation).

    Every 16th file or so is for validation: which ones depends on their names alone.
    """
    root = Path(sysconfig.get_path("stdlib"))
    parts: tuple[list[bytes], list[bytes]] = ([], [])
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root)
        if not NOT_TEXT & set(name.parts) and not name.name.startswith("_sysconfigdata"):
            parts[zlib.crc32(name.as_posix().encode()) % 16 == 0].append(path.read_bytes())
    train, validation = (
        torch.frombuffer(bytearray(b"\n".join(part)), dtype=torch.uint8) for part in parts
    )
    return train, validation


def windows(text: Tensor, starts: Tensor, context: int, device: str) -> Tensor:
    """int64 [len(starts), context + 1]: inputs, and the same shifted by one as targets."""
    return text[starts[:, None] + torch.arange(context + 1)].long().to(device)


# --------------------------------------------------------------------------------------- model


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions. x: [B, S, H, D]; cos, sin: [S, 1, D / 2]."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


class Block(nn.Module):
    def __init__(self, negl_prob: float) -> None:
        super().__init__()
        self.attention = BackLite(negl_prob)
        self.norm1 = nn.LayerNorm(WIDTH, bias=False)
        self.norm2 = nn.LayerNorm(WIDTH, bias=False)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.mix = nn.Linear(WIDTH, WIDTH, bias=False)
        self.up = nn.Linear(WIDTH, 4 * WIDTH, bias=False)
        self.down = nn.Linear(4 * WIDTH, WIDTH, bias=False)
        for last in (self.mix, self.down):
            nn.init.zeros_(last.weight)  # a new block changes nothing: deeper models start well

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        qkv = self.qkv(self.norm1(x)).unflatten(-1, (3, HEADS, WIDTH // HEADS))
        query, key, value = qkv.unbind(dim=2)
        query, key = rotate(query, cos, sin), rotate(key, cos, sin)
        if x.is_cuda:  # the GPU kernels take 16-bit numbers
            query, key, value = (t.bfloat16() for t in (query, key, value))
        out = self.attention(query, key, value, causal=True)
        x = x + self.mix(out.to(x.dtype).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class LanguageModel(nn.Module):
    def __init__(self, negl_prob: float) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, WIDTH)
        self.blocks = nn.ModuleList(Block(negl_prob) for _ in range(LAYERS))
        self.norm = nn.LayerNorm(WIDTH, bias=False)
        self.head = nn.Linear(WIDTH, 256, bias=False)

    def attentions(self) -> list[BackLite]:
        return [module for module in self.modules() if isinstance(module, BackLite)]

    def forward(self, text: Tensor) -> Tensor:
        """Mean loss, in nats per byte, of predicting text[:, 1:] from what comes before."""
        half = WIDTH // HEADS // 2
        frequencies = 10000 ** -(torch.arange(half, device=text.device) / half)
        angles = torch.arange(text.shape[1] - 1, device=text.device)[:, None, None] * frequencies
        cos, sin = angles.cos(), angles.sin()
        x = self.embed(text[:, :-1])
        for block in self.blocks:
            x = block(x, cos, sin)
        logits: Tensor = self.head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1), text[:, 1:].flatten())


# ------------------------------------------------------------------------------------ training


class Run:
    """One of the two trainings."""

    def __init__(self, negl_prob: float, seed: int, device: str) -> None:
        torch.manual_seed(seed)
        self.model = LanguageModel(negl_prob).to(device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), betas=(0.9, 0.95))
        self.history = History()

    def step(self, text: Tensor, learning_rate: float) -> None:
        start = time.perf_counter()
        loss = self.model(text)
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.history.train_loss.append(loss.item())  # waits for the device: the time is whole
        self.history.step_seconds.append(time.perf_counter() - start)
        densities = [attention.last_density or 0.0 for attention in self.model.attentions()]
        self.history.skipped.append([1.0 - density for density in densities])

    @torch.no_grad()
    def validate(self, text: Tensor) -> None:
        self.history.validation.append((len(self.history.train_loss), self.model(text).item()))


def train(args: argparse.Namespace) -> tuple[dict[str, Run], Tensor]:
    """Trains both models in turns. Returns them and the text of the validation."""
    train_text, validation_text = load_text()
    last = len(validation_text) - args.context - 1
    if last < 0:
        raise SystemExit(f"--context {args.context}: at most {len(validation_text) - 1} bytes")
    starts = torch.linspace(0, last, VALIDATION_WINDOWS).long()
    validation = windows(validation_text, starts, args.context, args.device)
    runs = {
        "exact": Run(0.0, args.seed, args.device),
        "sparse": Run(args.negl_prob, args.seed, args.device),
    }
    generator = torch.Generator().manual_seed(args.seed)
    bar = tqdm(range(args.steps), desc="training both", unit="step", dynamic_ncols=True)
    for step in bar:
        start = torch.randint(len(train_text) - args.context - 1, (1,), generator=generator)
        text = windows(train_text, start, args.context, args.device)
        decay = 0.55 + 0.45 * math.cos(math.pi * step / args.steps)  # 1 to 0.1
        learning_rate = PEAK_LEARNING_RATE * decay * min(1.0, (step + 1) / WARMUP_STEPS)
        for run in runs.values():
            run.step(text, learning_rate)
            if (step + 1) % VALIDATE_EVERY == 0 or step + 1 == args.steps:
                run.validate(validation)
        bar.set_postfix(
            {name: f"{run.history.train_loss[-1]:.3f}" for name, run in runs.items()}
            | {"skipped": f"{statistics.fmean(runs['sparse'].history.skipped[-1]):.0%}"}
        )
    return runs, validation


# ---------------------------------------------------------------------------------------- main


def default_device() -> str:
    """cuda where back_lite has kernels for it."""
    if torch.cuda.is_available():
        shape = 1, 1, 1, WIDTH // HEADS
        probe = torch.ones(shape, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        try:
            back_lite.attention(probe, probe, probe, 0.5, causal=True).sum().backward()
            return "cuda"
        except NotImplementedError as reason:
            print(f"Using the CPU: {reason}")
    return "cpu"


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m examples.train_lm", description=HELP)
    parser.add_argument("--steps", type=int, default=300, help="of each training (%(default)s)")
    parser.add_argument("--context", type=int, default=2048, help="bytes read (%(default)s)")
    parser.add_argument(
        "--negl-prob",
        type=float,
        default=0.05,
        help="attention probability that the sparse backward may leave out (%(default)s)",
    )
    parser.add_argument("--device", help="cpu or cuda (default: cuda where there are kernels)")
    parser.add_argument("--seed", type=int, default=0, help="of weights and data (%(default)s)")
    parser.add_argument("--out", type=Path, default=Path("demo"), help="folder (%(default)s)")
    args = parser.parse_args()
    if args.steps < 1 or args.context < 1 or not 0 <= args.negl_prob < 1:
        parser.error("need --steps >= 1, --context >= 1 and --negl-prob in [0, 1)")
    args.device = args.device or default_device()
    if args.device.startswith("cuda") and not torch.cuda.is_available():
        parser.error(f"--device {args.device}: this torch sees no GPU")
    return args


def main() -> None:
    args = parse_arguments()
    start = time.perf_counter()
    runs, validation = train(args)
    calls = record_calls(runs["sparse"].model, validation[:1])
    layers, tiles = zip(*(compare_layer(call, args.negl_prob) for call in calls), strict=True)
    result = Result(
        settings=vars(args) | {"out": str(args.out)},
        seconds=time.perf_counter() - start,
        runs={name: run.history for name, run in runs.items()},
        layers=list(layers),
    )
    args.out.mkdir(parents=True, exist_ok=True)
    plots.draw_all(result, tiles, args.out)
    report.write_json(result, args.out / "results.json")
    report.print_tables(result)
    print(f"\nTook {result.seconds:.0f} s. Pictures and numbers are in {args.out}/")


if __name__ == "__main__":
    main()
