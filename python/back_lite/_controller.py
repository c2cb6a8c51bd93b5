"""Keeps thresholds at a target while a model trains."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from ._calibration import Target, find_modules
from ._compare import GradientComparison, compare_gradients
from ._watch import Call, watch

STATE_VERSION = 1

# log error against log negl_prob has a slope of about 1: half the distance at each measurement is
# stable.
_GAIN = 0.5
_MAX_FACTOR = 2.0  # of one move: a slice where nothing is skipped does not say how far to go
# Of a new measurement in the estimate. The log of single slices would hold their geometric mean at
# the target; where slices differ, the error over all of them is larger (1.3 times in a first test,
# which measured heads of one key head together and so read somewhat too high).
_WEIGHT = 0.5
# Sequences of a batch in one measurement. The errors of single ones differ widely: in a simulation
# with errors recorded in a training of examples/train_lm, the median head was within 20% of the
# target at 91% of the checks with one sequence, at all of them with four.
_SEQUENCES = 4
_START, _LEAST, _MOST = 0.01, 1e-4, 0.5


class _Slice(NamedTuple):
    """What was measured of a layer: its heads, and what their errors are made of."""

    num_heads: int
    heads: list[int]
    found: GradientComparison


class Controller:
    """Adjusts ``negl_prob`` of every head during training, from measured gradient errors.

    ::

        controller = Controller(model, Target(relative_l2=0.1), every=100, warmup=200, log=print)
        for batch in data:
            model(batch).backward()
            optimizer.step()
            controller.step()

    The layers take turns, so that each is measured once in ``every`` steps: inside the backward of
    a training step, for up to four sequences of the batch and every second key head with its query
    heads, the sparse gradients are compared with exact ones. Each measured head's ``negl_prob``
    moves by ``(target / error)**0.5``, at most twofold, within 0.0001 to 0.5, where error is a
    running root mean square; a head that misses the target even at 0.0001 is exact.

    A layer's measurement costs 0.9 to 1.75 times its attention's forward and backward of those
    sequences, the more the sparser: with ``every=100``, at most 1.75% of the training time, where
    attention is all of it and a batch has no more sequences.

    With ``torch.distributed`` initialised, all ranks must make the same calls; what they measure is
    added up, so that they agree.

    Args:
        model: with at least one :class:`BackLite` module. Calls from compiled code are not seen.
        target: what each head's worst gradient must meet.
        every: steps between two measurements of a layer.
        warmup: steps with exact gradients at the start; what is measured in them counts after.
        log: called with a dict for each layer measured: ``step``, ``layer``, ``heads``,
            ``relative_l2`` and ``density`` (by head, as measured, before the move) and
            ``negl_prob`` (by head, from now on). ``relative_l2`` is None and the others are absent
            where no gradient was seen, or one with NaN or infinity: that changes nothing.

    Raises:
        TypeError, ValueError: an argument is not one of those above.

    Every BackLite module is exact until its heads were measured and the warm-up is over.
    """

    def __init__(
        self,
        model: nn.Module,
        target: Target,
        *,
        every: int = 100,
        warmup: int = 100,
        log: Callable[[dict[str, Any]], object] | None = None,
    ) -> None:
        self._modules = find_modules(model)
        if not isinstance(target, Target):
            raise TypeError(f"target = {target!r}: accepted is a back_lite.Target")
        for name, count, least in (("every", every, 1), ("warmup", warmup, 0)):
            if isinstance(count, bool) or not isinstance(count, int):
                raise TypeError(f"{name} = {count!r}: accepted are ints from {least}")
            if count < least:
                raise ValueError(f"{name} = {count}: accepted are ints from {least}")
        if log is not None and not callable(log):
            raise TypeError(f"log = {log!r}: accepted is a function of a dict")
        self.target, self.every, self.warmup, self._log = target, every, warmup, log
        self._num_steps = 0
        #: by layer, once its number of heads is known: what to measure next, by query head
        self._proposed: dict[str, list[float]] = {}
        #: by query head, square of (relative L2 of what is proposed / target); None: not measured
        self._estimates: dict[str, list[float | None]] = {}
        self._slices: dict[str, _Slice] = {}
        self._handles: list[RemovableHandle] = []
        self._apply()
        self._arm()

    def step(self) -> None:
        """Take over what the training step measured; call it after each, on every rank."""
        self._disarm()
        due = [name for name, _ in self._due()]
        slices = [self._slices]
        if due and torch.distributed.is_available() and torch.distributed.is_initialized():
            slices = [{} for _ in range(torch.distributed.get_world_size())]
            torch.distributed.all_gather_object(slices, self._slices)
        self._num_steps += 1
        for name in due:
            self._update(name, [rank[name] for rank in slices if name in rank])
        self._slices = {}
        if due or self._num_steps == self.warmup:
            self._apply()
        self._arm()

    def state_dict(self) -> dict[str, Any]:
        """Return all that changes, in plain lists and numbers, for a checkpoint."""
        layers = {
            name: {"proposed": list(proposed), "estimates": list(self._estimates[name])}
            for name, proposed in self._proposed.items()
        }
        return {"version": STATE_VERSION, "num_steps": self._num_steps, "layers": layers}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where :meth:`state_dict` was called.

        Raises:
            ValueError: it is of another version or model. Nothing has changed then.
        """
        version = state.get("version")
        if version != STATE_VERSION:
            raise ValueError(f"state version = {version!r}: accepted is {STATE_VERSION}")
        unknown = [name for name in state["layers"] if name not in self._modules]
        if unknown:
            raise ValueError(
                f"state of another model: it has layers {unknown}; accepted are {[*self._modules]}"
            )
        self._disarm()
        self._slices = {}
        self._num_steps = int(state["num_steps"])
        self._proposed = {name: list(layer["proposed"]) for name, layer in state["layers"].items()}
        self._estimates = {
            name: list(layer["estimates"]) for name, layer in state["layers"].items()
        }
        self._apply()
        self._arm()

    def close(self) -> None:
        """Stop watching the model. The thresholds stay as they are."""
        self._disarm()

    def _due(self) -> list[tuple[str, int]]:
        """Return the layers to measure in the coming step, and how often each was measured."""
        names = list(self._modules)
        first = self._num_steps * len(names) // self.every
        last = (self._num_steps + 1) * len(names) // self.every
        return [(names[turn % len(names)], turn // len(names)) for turn in range(first, last)]

    def _arm(self) -> None:
        for name, turn in self._due():

            def receive(call: Call, name: str = name, turn: int = turn) -> None:
                if name not in self._slices:  # the first of several calls in a step
                    self._measure(name, turn, call)

            self._handles.append(watch(self._modules[name], receive))

    def _disarm(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _measure(self, name: str, turn: int, call: Call) -> None:
        """Compare the gradients of some sequences and every second key head."""
        batch, _, num_heads, _ = call.query.shape
        num_key_heads = call.key.shape[2]
        if not batch:
            return
        group = num_heads // num_key_heads
        keys = list(range(num_key_heads))[turn % 2 :: 2] if num_key_heads > 1 else [0]
        heads = [key * group + i for key in keys for i in range(group)]
        count = min(batch, _SEQUENCES)
        rows = [(turn // 2 * count + i) % batch for i in range(count)]
        proposed = self._proposed.get(name, [_START] * num_heads)
        try:
            found = compare_gradients(
                call.query[rows][:, :, heads],
                call.key[rows][:, :, keys],
                call.value[rows][:, :, keys],
                call.grad_out[rows][:, :, heads],
                [[proposed[head] for head in heads]],
                grad_lse=None if call.grad_lse is None else call.grad_lse[rows][:, heads],
                scale=call.scale,
                causal=call.causal,
                window_size=call.window_size,
            )
        except ValueError:  # NaN or infinity, as where a loss scale is too large; train on
            return
        self._slices[name] = _Slice(num_heads, heads, found)

    def _update(self, name: str, slices: list[_Slice]) -> None:
        """Move the thresholds of the measured heads."""
        record: dict[str, Any] = {"step": self._num_steps, "layer": name, "relative_l2": None}
        if slices:
            num_heads, heads, found = slices[0]
            for other in slices[1:]:
                found = found + other.found
            proposed = self._proposed.setdefault(name, [_START] * num_heads)
            estimates = self._estimates.setdefault(name, [None] * num_heads)
            errors = found.error[0].tolist()
            for head, error in zip(heads, errors, strict=True):
                square, known = (error / self.target.error) ** 2, estimates[head]
                if known is not None:
                    square = _WEIGHT * square + (1.0 - _WEIGHT) * known
                factor = square ** (-0.5 * _GAIN) if square else _MAX_FACTOR
                factor = min(max(factor, 1.0 / _MAX_FACTOR), _MAX_FACTOR)
                moved = min(max(proposed[head] * factor, _LEAST), _MOST)
                estimates[head] = square * (moved / proposed[head]) ** 2  # the slope of about 1
                proposed[head] = moved
            record |= {
                "heads": heads,
                "relative_l2": errors,
                "density": found.density[0].tolist(),
                "negl_prob": [self._in_force(name)[head] for head in heads],
            }
        if self._log is not None:
            self._log(record)

    def _in_force(self, name: str) -> list[float]:
        """Return the thresholds of a layer: exact where nothing better is known to do."""
        if name not in self._proposed:
            return [0.0]
        is_warm = self._num_steps >= self.warmup
        pairs = zip(self._proposed[name], self._estimates[name], strict=True)
        return [
            value if is_warm and estimate is not None and value > _LEAST else 0.0
            for value, estimate in pairs
        ]

    def _apply(self) -> None:
        for name, module in self._modules.items():
            module.negl_prob = self._in_force(name)
