"""One training: model, optimizer, history, and what of them goes into a checkpoint."""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch
from torch import Tensor, nn

from .compare import compare_layers, layer_errors, record_calls
from .model import SMALL, LanguageModel, Shape
from .report import History


class Run:
    """One training. The first exact_steps steps are exact, whatever negl_prob is."""

    def __init__(
        self,
        negl_prob: float,
        seed: int,
        device: str,
        shape: Shape = SMALL,
        exact_steps: int = 0,
    ) -> None:
        torch.manual_seed(seed)
        self.negl_prob, self.exact_steps = negl_prob, exact_steps
        self.model = LanguageModel(0.0 if exact_steps else negl_prob, shape).to(device)
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), betas=(0.9, 0.95), fused=device.startswith("cuda")
        )
        self.history = History()

    @property
    def name(self) -> str:
        return f"negl_prob_{self.negl_prob:g}" if self.negl_prob else "exact"

    @property
    def num_steps(self) -> int:
        """Done so far."""
        return len(self.history.train_loss)

    def step(self, text: Tensor, learning_rate: float) -> None:
        if self.exact_steps and self.num_steps == self.exact_steps:
            self.model.set_negl_prob(self.negl_prob)
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

    def note_density(self) -> float:
        """Keeps each layer's density in the last step; returns their mean."""
        densities = [a.last_density or 0.0 for a in self.model.attentions()]
        self.history.density.append((self.num_steps, densities))
        return statistics.fmean(densities)

    @torch.no_grad()
    def validate(self, text: Tensor, batch: int) -> float:
        losses = [self.model(part).item() * len(part) for part in text.split(batch)]
        self.history.validation.append((self.num_steps, sum(losses) / len(text)))
        return self.history.validation[-1][1]

    def measure(self, text: Tensor) -> dict[str, float]:
        """How far the sparse gradients of attention are from the exact ones, on this text.

        Keeps it by layer; returns the mean over the layers. Trains nothing.
        """
        found = compare_layers([record_calls(self.model, text)], [self.negl_prob])
        rows = [layer_errors(layer)[0] for layer in found]
        self.history.error.append({"step": self.num_steps, "layers": rows})
        return {
            f"{kind}/{name}": statistics.fmean(row[kind][name] for row in rows)
            for kind in ("relative_l2", "cosine")
            for name in rows[0][kind]
        }

    def state_dict(self) -> dict[str, Any]:
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "history": vars(self.history),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.history = History(**state["history"])
        if self.num_steps > self.exact_steps:
            self.model.set_negl_prob(self.negl_prob)
