"""Keeps thresholds at a target while a model trains."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from . import _thresholds
from ._calibration import Target, find_modules, known_heads
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
_FAR = 1e6  # errors of more times the target count as this: an infinite one is forgotten some day
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
            where no gradient was seen, or one with NaN or infinity: that changes nothing. What it
            raises leaves :meth:`step` when all else is done.

    Raises:
        TypeError, ValueError: an argument is not one of those above.

    Every BackLite module is exact until its heads were measured and the warm-up is over. Thresholds
    that others set are set again at the next measurement. Modules that join the model later are not
    controlled: make a new controller. One that is deleted watches no more.
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
        weakref.finalize(self, _remove, self._handles).atexit = False
        self._apply()
        self._arm()

    def step(self) -> None:
        """Take over what the training step measured; call it after each, on every rank."""
        self._disarm()
        due = [name for name, _ in self._due()]
        mine, self._slices = self._slices, {}
        slices = [mine]
        if due and torch.distributed.is_available() and torch.distributed.is_initialized():
            slices = [{} for _ in range(torch.distributed.get_world_size())]
            torch.distributed.all_gather_object(slices, mine)
        self._num_steps += 1
        records = [
            self._update(name, [rank[name] for rank in slices if name in rank]) for name in due
        ]
        if due or self._num_steps == self.warmup:
            self._apply()
        self._arm()
        if self._log is not None:
            for record in records:
                self._log(record)

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
            ValueError: it is of another version or model, or damaged. Nothing has changed then.
        """
        num_steps, proposed, estimates = self._checked(state)
        self._disarm()
        self._slices = {}
        self._num_steps, self._proposed, self._estimates = num_steps, proposed, estimates
        self._apply()
        self._arm()

    def _checked(
        self, state: Mapping[str, Any]
    ) -> tuple[int, dict[str, list[float]], dict[str, list[float | None]]]:
        """Read the steps, and by layer what is proposed and the estimates."""
        if not isinstance(state, Mapping) or state.get("version") != STATE_VERSION:
            given = state.get("version") if isinstance(state, Mapping) else type(state).__name__
            raise ValueError(f"state version = {given!r}: accepted is {STATE_VERSION}")
        try:
            num_steps, layers = state["num_steps"], dict(state["layers"])
            unknown = [name for name in layers if name not in self._modules]
            proposed = {name: list(layer["proposed"]) for name, layer in layers.items()}
            estimates = {name: list(layer["estimates"]) for name, layer in layers.items()}
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(
                f"state is damaged: {error!r}; accepted is that of state_dict()"
            ) from error
        if unknown:
            raise ValueError(
                f"state of another model: it has layers {unknown}; accepted are {[*self._modules]}"
            )
        if isinstance(num_steps, bool) or not isinstance(num_steps, int) or num_steps < 0:
            raise ValueError(f"state num_steps = {num_steps!r}: accepted are ints from 0")
        for name, values in proposed.items():
            try:
                _thresholds.parse(values)
            except (TypeError, ValueError) as error:
                raise ValueError(f"state of layer {name!r}: {error}") from error
            known = known_heads(self._modules[name])
            if len(estimates[name]) != len(values) or known not in (None, len(values)):
                raise ValueError(
                    f"state of layer {name!r}: {len(values)} proposed and {len(estimates[name])} "
                    f"estimates; accepted is one for each query head ({known or 'not known yet'})"
                )
            if not all(map(_is_estimate, estimates[name])) or not all(values):
                raise ValueError(
                    f"state of layer {name!r}: proposed = {values}, estimates = {estimates[name]}: "
                    "accepted are numbers above 0, and estimates that are None or numbers from 0"
                )
        return num_steps, proposed, estimates

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
        me = weakref.ref(self)  # the model's hooks must not keep the controller
        for name, turn in self._due():

            def receive(call: Call, name: str = name, turn: int = turn) -> None:
                controller = me()
                # The first of several calls in a step.
                if controller is not None and name not in controller._slices:
                    controller._measure(name, turn, call)

            self._handles.append(watch(self._modules[name], receive))

    def _disarm(self) -> None:
        _remove(self._handles)

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

    def _update(self, name: str, slices: list[_Slice]) -> dict[str, Any]:
        """Move the thresholds of the measured heads; return what to log."""
        record: dict[str, Any] = {"step": self._num_steps, "layer": name, "relative_l2": None}
        if slices:
            num_heads, heads, found = slices[0]
            for other in slices[1:]:
                found = found + other.found
            proposed = self._proposed.setdefault(name, [_START] * num_heads)
            estimates = self._estimates.setdefault(name, [None] * num_heads)
            errors, tells = found.error[0].tolist(), found.has_gradient.tolist()
            for head, error, tells_something in zip(heads, errors, tells, strict=True):
                if not tells_something:
                    continue
                square, known = min(error / self.target.error, _FAR) ** 2, estimates[head]
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
        return record

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


def _remove(handles: list[RemovableHandle]) -> None:
    while handles:
        handles.pop().remove()


def _is_estimate(value: object) -> bool:
    return value is None or (
        isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value < math.inf
    )
