"""Keeps thresholds at a target while a model trains."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from . import _thresholds
from ._calibration import Target, find_modules, known_heads
from ._compare import GradientComparison, PendingComparison, Problem
from ._watch import Call, watch
from .attention import BackLite
from .tiles import KEY_TILE

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
_BLIND_TURNS = 2  # of all layers in which none was called, before step() says so
_FAR = 1e6  # errors of more times the target count as this: an infinite one is forgotten some day
_START, _LEAST, _MOST = 0.01, 1e-4, 0.5


class _Slice(NamedTuple):
    """What was measured of a layer: its heads, and what their errors are made of."""

    num_heads: int
    heads: list[int]
    found: GradientComparison


class _Moves(NamedTuple):
    """Where the heads of a layer go."""

    heads: list[int]
    errors: list[float]
    density: list[float]
    proposed: list[float]
    estimates: list[float | None]


# A module's thresholds have one owner.
_owners: weakref.WeakKeyDictionary[BackLite, weakref.ref[Controller]] = weakref.WeakKeyDictionary()


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
        model: with at least one :class:`BackLite` module. Calls from compiled code are not seen: in
            a model that is compiled, ``torch.compiler.disable(layer)`` must stand for each of them.
        target: what each head's worst gradient must meet.
        every: steps between two measurements of a layer, later on.
        warmup: steps with exact gradients at the start; what is measured in them counts after.
        log: called with a dict for each layer measured: ``step``, ``layer``, ``heads``,
            ``relative_l2`` and ``density`` (by head, as measured, before the move) and
            ``negl_prob`` (by head, from now on). ``relative_l2`` is None and the others are absent
            where no gradient was seen, or one with NaN or infinity, or no more than 128 keys, of
            which nothing can be skipped: that changes nothing. What it raises leaves :meth:`step`
            when all else is done.

    Raises:
        TypeError, ValueError: an argument is not one of those above.

    Every BackLite module is exact until its heads were measured and the warm-up is over. Thresholds
    that others set are set again at the next measurement. Modules that join the model later are not
    controlled: make a new controller. One that is deleted watches no more, nor does one whose model
    gets another: the last one made owns the thresholds.
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
        #: by layer: its number of heads, those that were measured, and what is found of them
        self._pending: dict[str, tuple[int, list[int], PendingComparison]] = {}
        #: why it watches no more; None while it does
        self._closed: str | None = None
        #: of the layers that are due, what their last call before the step kept
        self._before: dict[str, object] = {}
        #: turns until some layer was called where calls are seen; None from then on
        self._unseen: int | None = 0
        self._handles: list[RemovableHandle] = []
        weakref.finalize(self, _remove, self._handles).atexit = False
        for module in self._modules.values():
            owner = _owners.get(module, lambda: None)()
            if owner is not None and owner._closed is None:
                owner._close("another Controller of the same model has taken over")
            _owners[module] = weakref.ref(self)
        self._apply()
        self._arm()

    def step(self) -> None:
        """Take over what the training step measured; call it after each, on every rank.

        Raises:
            RuntimeError: it is closed, by :meth:`close` or because another controller of the same
                model was made; or, when all else is done and once, each layer had two turns and
                none was called where it is seen.
            ValueError: ranks have other thresholds than this one, or numbers of heads. Nothing has
                changed then, nor where a rank cannot be reached.
        """
        self._check_open()
        due = [name for name, _ in self._due()]
        slices = self._gather(due) if due else []
        if self._unseen is not None and due:
            is_seen = bool(self._pending) or any(
                self._modules[name]._last_call.kept is not kept
                for name, kept in self._before.items()
            )
            self._unseen = None if is_seen else self._unseen + len(due)
        # All that may fail comes before the first change.
        moves = {
            name: self._moves(name, [rank[name] for rank in slices if name in rank]) for name in due
        }
        self._disarm()
        self._pending = {}
        self._num_steps += 1
        for name, move in moves.items():
            if move is not None:
                self._proposed[name], self._estimates[name] = move.proposed, move.estimates
        if due or self._num_steps == self.warmup:
            self._apply()
        self._arm()
        if self._log is not None:
            for name, move in moves.items():
                self._log(self._record(name, move))
        if (
            due
            and self._unseen is not None
            and 0 <= self._unseen - _BLIND_TURNS * len(self._modules) < len(due)
        ):
            raise RuntimeError(
                f"in {self._unseen} turns no BackLite module was called where the controller sees "
                "it, and all stay exact: accepted are calls outside compiled code, torch.func.vmap "
                "and captured CUDA graphs; of a model that is to be compiled, put "
                "torch.compiler.disable(layer) in the place of each BackLite layer"
            )

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
            RuntimeError: the controller is closed.
            ValueError: it is of another version or model, or damaged. Nothing has changed then.
        """
        self._check_open()
        num_steps, proposed, estimates = self._checked(state)
        self._disarm()
        self._pending = {}
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
            in_range = all(_LEAST <= value <= _MOST for value in values)
            if not in_range or not all(map(_is_estimate, estimates[name])):
                raise ValueError(
                    f"state of layer {name!r}: proposed = {values}, estimates = {estimates[name]}: "
                    f"accepted are numbers from {_LEAST} to {_MOST}, and estimates that are None "
                    f"or numbers from 0 to {_FAR**2:g}"
                )
        return num_steps, proposed, estimates

    def close(self) -> None:
        """Stop watching the model. The thresholds stay as they are; :meth:`step` is refused."""
        self._close("close() was called")

    def _close(self, why: str) -> None:
        self._closed = self._closed or why
        self._disarm()
        self._pending = {}

    def _check_open(self) -> None:
        if self._closed is not None:
            raise RuntimeError(f"the controller is closed: {self._closed}; make a new one")

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
        due = self._due()
        self._before = {name: self._modules[name]._last_call.kept for name, _ in due}
        for name, turn in due:

            def receive(call: Call, name: str = name, turn: int = turn) -> None:
                controller = me()
                # The first of several calls in a step.
                if (
                    controller is not None
                    and controller._closed is None
                    and name not in controller._pending
                ):
                    controller._measure(name, turn, call)

            self._handles.append(watch(self._modules[name], receive))

    def _disarm(self) -> None:
        _remove(self._handles)

    def _measure(self, name: str, turn: int, call: Call) -> None:
        """Compare the gradients of some sequences, or of half of the heads of a single one."""
        batch, _, num_heads, _ = call.query.shape
        num_key_heads = call.key.shape[2]
        if not batch or call.key.shape[1] <= KEY_TILE:
            return  # a row of tiles never skips its last: an error of 0 says nothing
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
        if len(proposed) != num_heads:
            raise ValueError(
                f"layer {name!r} has {num_heads} query heads: accepted are {len(proposed)}, as in "
                "an earlier step or in the state that was loaded"
            )
        problem = Problem(
            part(call.query, 2, heads),
            part(call.key, 2, keys),
            part(call.value, 2, keys),
            part(call.grad_out, 2, heads),
            None if call.grad_lse is None else part(call.grad_lse, 1, heads),
            scale=call.scale,
            causal=call.causal,
            window_size=call.window_size,
            is_timed=False,
        )
        found = PendingComparison(problem, [proposed[head] for head in heads])
        self._pending[name] = num_heads, heads, found

    def _gather(self, due: Sequence[str]) -> list[dict[str, _Slice]]:
        """Return what each rank measured of the layers that are due."""
        mine = {}
        for name in due:
            if name in self._pending:
                num_heads, heads, pending = self._pending[name]
                found = pending.result()
                if found is not None:  # else NaN or infinity, as of a loss scale that is too large
                    mine[name] = _Slice(num_heads, heads, found)
        if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
            return [mine]
        slices: list[dict[str, _Slice]] = [{} for _ in range(torch.distributed.get_world_size())]
        torch.distributed.all_gather_object(slices, mine)
        return slices

    def _moves(self, name: str, slices: list[_Slice]) -> _Moves | None:
        """Compute where the measured heads of a layer go; None: nothing was measured."""
        if not slices:
            return None
        # Of ranks with other heads than the rest, as with a last batch of one sequence, no use.
        num_heads, heads, found = max(slices, key=lambda each: len(each.heads))
        same = [each.found for each in slices if each.heads == heads]
        found = sum(same[1:], same[0])
        proposed = list(self._proposed.get(name, [_START] * num_heads))
        estimates = list(self._estimates.get(name, [None] * num_heads))
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
        return _Moves(heads, errors, found.density[0].tolist(), proposed, estimates)

    def _record(self, name: str, moves: _Moves | None) -> dict[str, Any]:
        """Return what to log of a layer."""
        record: dict[str, Any] = {"step": self._num_steps, "layer": name, "relative_l2": None}
        if moves is not None:
            in_force = self._in_force(name)
            record |= {
                "heads": moves.heads,
                "relative_l2": moves.errors,
                "density": moves.density,
                "negl_prob": [in_force[head] for head in moves.heads],
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
            thresholds = _thresholds.parse(self._in_force(name))
            if module._thresholds != thresholds:
                module.negl_prob = thresholds


def _remove(handles: list[RemovableHandle]) -> None:
    while handles:
        handles.pop().remove()


def _is_estimate(value: object) -> bool:
    return value is None or (
        isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value <= _FAR**2
    )
