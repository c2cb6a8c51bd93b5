"""Keeps thresholds at a target while a model trains."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from . import _thresholds
from ._calibration import Target, find_modules, known_heads
from ._compare import GradientComparison, compare_gradients
from ._watch import Call, watch

STATE_VERSION = 1

# Of log error against log negl_prob: the median over the heads was 0.6 to 0.86 along a training of
# examples/train_lm, that of single heads 0.4 to 2. A move by target / error takes that share of the
# distance.
_SLOPE = 0.7
_MAX_FACTOR = 2.0  # of one move: a slice where nothing is skipped does not say how far to go
# Of a new measurement in the estimate, of squares. Logs of single slices would hold their geometric
# mean at the target; where slices differ, the error over all of them is larger.
_WEIGHT = 1 / 3
# Of a batch in one measurement, but not more than half of it. Errors of single sequences differ
# widely.
_SEQUENCES = 4
# How often a layer is measured, in times of once in `every` steps, until which step, in `every`.
# Attention changes fastest at the start of a training.
_RATES = ((4, 2), (2, 6))
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

    The layers take turns, so that each is measured once in ``every`` steps, four times as often in
    the first ``2 * every`` steps and twice as often until ``6 * every``: inside the backward of a
    training step, for half of the batch and up to four sequences (of a single one, for every second
    key head with its query heads), the sparse gradients are compared with exact ones. Each measured
    head's ``negl_prob`` moves by ``target / error``, at most twofold, within 0.0001 to 0.5, where
    error is a running root mean square; a head that misses the target even at 0.0001 is exact.

    A measurement costs 0.9 to 1.75 times the layer's attention, forward and backward, in that step,
    the more the sparser, and less where a batch has more than eight sequences: after the start,
    with ``every=100``, at most 1.75% of the training time, where attention is all of it.

    With ``torch.distributed`` initialised, all ranks must make the same calls; what they measure is
    added up, so that they agree.

    Args:
        model: with at least one :class:`BackLite` module. Calls from compiled code are not seen.
        target: what each head's worst gradient must meet.
        every: steps between two measurements of a layer, later on.
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
        first, last = (self._num_turns(step) for step in (self._num_steps, self._num_steps + 1))
        first = max(first, last - len(names))  # each at most once in a step
        return [(names[turn % len(names)], turn // len(names)) for turn in range(first, last)]

    def _num_turns(self, num_steps: int) -> int:
        """Return how many layers are measured in the first steps."""
        counted = num_steps  # once in `every` steps, and what is more at the start
        slower = 1
        for rate, end in reversed(_RATES):
            counted += (rate - slower) * min(num_steps, end * self.every)
            slower = rate
        return counted * len(self._modules) // self.every

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
        """Compare the gradients of some sequences, or of half of the heads of a single one."""
        batch, _, num_heads, _ = call.query.shape
        num_key_heads = call.key.shape[2]
        if not batch:
            return
        group = num_heads // num_key_heads
        stride = 2 if batch == 1 and num_key_heads > 1 else 1
        keys = range(turn % stride, num_key_heads, stride)
        heads = [key * group + i for key in keys for i in range(group)]
        count = max(1, min(batch // 2, _SEQUENCES))
        first = turn // stride % (batch // count) * count

        def part(x: Tensor, dim: int, chosen: Sequence[int]) -> Tensor:
            x = x[first : first + count]
            if len(chosen) == x.shape[dim]:
                return x
            return x.index_select(dim, torch.tensor(chosen, device=x.device))

        proposed = self._proposed.get(name, [_START] * num_heads)
        try:
            found = compare_gradients(
                part(call.query, 2, heads),
                part(call.key, 2, keys),
                part(call.value, 2, keys),
                part(call.grad_out, 2, heads),
                [[proposed[head] for head in heads]],
                grad_lse=None if call.grad_lse is None else part(call.grad_lse, 1, heads),
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
            # Of ranks with other heads than the rest, as with a last batch of one sequence, no use.
            num_heads, heads, found = max(slices, key=lambda each: len(each.heads))
            same = [each.found for each in slices if each.heads == heads]
            found = sum(same[1:], same[0])
            proposed = self._proposed.setdefault(name, [_START] * num_heads)
            estimates = self._estimates.setdefault(name, [None] * num_heads)
            errors, tells = found.error[0].tolist(), found.has_gradient.tolist()
            for head, error, tells_something in zip(heads, errors, tells, strict=True):
                if not tells_something:
                    continue
                square, known = min(error / self.target.error, _FAR) ** 2, estimates[head]
                if known is not None:
                    square = _WEIGHT * square + (1.0 - _WEIGHT) * known
                factor = square**-0.5 if square else _MAX_FACTOR
                factor = min(max(factor, 1.0 / _MAX_FACTOR), _MAX_FACTOR)
                moved = min(max(proposed[head] * factor, _LEAST), _MOST)
                estimates[head] = square * (moved / proposed[head]) ** (2.0 * _SLOPE)
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
