"""Finds the largest thresholds that meet a target, from the gradients of real batches."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from . import ops
from ._calibration import (
    PER,
    Calibration,
    Curves,
    LayerCalibration,
    Per,
    Target,
    TileMap,
    find_modules,
    read_json,
    write_whole,
)
from ._compare import GradientComparison, compare_gradients
from ._watch import Call, watch
from .attention import BackLite
from .tiles import mask_tiles, unpack_tiles

#: What is measured unless the user says otherwise: ten values a decade, 1.26 apart.
VALUES = tuple(min(0.5, float(f"{10 ** (i / 10 - 3):.3g}")) for i in range(28))

PARTIAL_SCHEMA = "back_lite.calibration.partial"
PARTIAL_VERSION = 1
# Two models of equal layers but other weights differ by more; float64 sums of the same by less.
_SAME_WEIGHTS = 1e-9
# A map with more tiles would be a large part of the file, and unreadable as a picture.
_MAX_MAP_TILES = 128 * 128


@dataclass
class Measurement:
    """Sums over batches, by layer; the partial file holds nothing else."""

    names: list[str]
    values: list[float]
    weights_norm: float
    batches: int = 0

    def __post_init__(self) -> None:
        self.layers: dict[str, GradientComparison] = {}
        self.calls = dict.fromkeys(self.names, 0)

    def add(self, name: str, found: GradientComparison) -> None:
        """Add a call of a layer."""
        known = self.layers.get(name)
        self.layers[name] = found if known is None else known + found
        self.calls[name] += 1

    def copy(self) -> Measurement:
        """Return one that can be added to without changing this."""
        new = Measurement(self.names, self.values, self.weights_norm, self.batches)
        new.layers, new.calls = dict(self.layers), dict(self.calls)
        return new

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the partial file; whole, or not at all."""
        layers = {
            name: {
                "num_heads": sums.num_heads,
                "calls": self.calls[name],
                "allowed": sums.allowed,
                **{field: getattr(sums, field).tolist() for field in _SUMS},
            }
            for name, sums in self.layers.items()
        }
        content = {
            "schema": PARTIAL_SCHEMA,
            "schema_version": PARTIAL_VERSION,
            "names": self.names,
            "values": self.values,
            "weights_norm": self.weights_norm,
            "batches": self.batches,
            "layers": layers,
        }
        write_whole(path, json.dumps(content) + "\n")

    @staticmethod
    def load(path: str | os.PathLike[str]) -> Measurement:
        """Read a partial file.

        Raises:
            ValueError: it is none, or damaged.
        """
        content = read_json(path, PARTIAL_SCHEMA, PARTIAL_VERSION)
        try:
            new = Measurement(
                content["names"], content["values"], content["weights_norm"], content["batches"]
            )
            for name, record in content["layers"].items():
                sums = {
                    field: torch.tensor(record[field], dtype=dtype, device="cpu")
                    for field, dtype in _SUMS.items()
                }
                new.calls[name] = record["calls"]
                new.layers[name] = GradientComparison(
                    tuple(new.values), record["num_heads"], allowed=record["allowed"], **sums
                )
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise ValueError(f"{os.fspath(path)}: damaged: {error!s}") from error
        return new

    def check_continues(self, other: Measurement, path: str | os.PathLike[str]) -> None:
        """Check that this, read from ``path``, was begun with the model and values of ``other``.

        Raises:
            ValueError: names what differs.
        """
        for what in ("names", "values"):
            mine, accepted = getattr(self, what), getattr(other, what)
            if mine != accepted:
                raise ValueError(f"{os.fspath(path)}: {what} = {mine}: accepted is {accepted}")
        difference = abs(self.weights_norm - other.weights_norm)
        if difference > _SAME_WEIGHTS * other.weights_norm:
            raise ValueError(
                f"{os.fspath(path)}: weights_norm = {self.weights_norm}: accepted is that of the "
                f"same weights, {other.weights_norm}; remove the file to start anew"
            )


_SUMS = {
    **dict.fromkeys(("exact", "sparse", "dot", "difference", "seconds"), torch.float64),
    "live": torch.int64,
}


def calibrate(
    model: nn.Module,
    batches: Iterable[Any],
    target: Target,
    per: Per = "head",
    *,
    step: Callable[[nn.Module, Any], object] | None = None,
    values: Sequence[float] | None = None,
    partial: str | os.PathLike[str] | None = None,
) -> Calibration:
    """Find the largest ``negl_prob`` that meets a target, from the gradients of real batches.

    Every BackLite module of the model runs exact, and for each of its calls the sparse gradients of
    all values are compared with the exact one, on the very tensors of that call. A head's error is
    the relative L2 of its worst gradient, over all batches: of its own dQ, or of dK or dV of its
    key head. A layer's or the model's error is the root mean square of its heads' errors. The
    largest measured value with an error within the target is chosen; where none is, the head (or
    layer, or model) stays exact. Nothing is set: that is :meth:`Calibration.apply`.

    The model's thresholds, gradients, buffers and training flags, and torch's random numbers, are
    afterwards as before.

    Args:
        model: with at least one :class:`BackLite` module. It must not be compiled.
        batches: what ``step`` takes, at least one; in the same order when resumed.
        target: what the gradients must meet.
        per: what shares one threshold: ``"head"`` (each its own), ``"layer"`` or ``"model"``.
        step: ``step(model, batch)`` runs forward and backward as the training does, without the
            optimizer. By default ``model(batch)`` (``model(*batch)`` for a tuple or list,
            ``model(**batch)`` for a mapping) returns the loss, or an object with one in ``.loss``.
        values: the values to measure, ascending, each above 0 and below 1; by default 28 from 0.001
            to 0.5, 1.26 apart. Each costs a sparse backward of every call.
        partial: a file that receives what was measured after every batch. If it exists, its batches
            are not run again: an interrupted call goes on where it was.

    Returns:
        Thresholds by layer and head, with the curves that they were chosen from.

    Raises:
        TypeError, ValueError: an argument is not one of those above, there are no batches, a
            gradient is not finite, or no gradient reached a BackLite module.
        RuntimeError: ``step`` changed the weights.
        OSError: the partial file cannot be read or written.
    """
    modules = find_modules(model)
    if not isinstance(target, Target):
        raise TypeError(f"target = {target!r}: accepted is a back_lite.Target")
    if per not in PER:
        raise ValueError(f"per = {per!r}: accepted are {', '.join(map(repr, PER))}")
    measurement = Measurement(list(modules), _checked_values(values), _weights_norm(model))
    if partial is not None and Path(partial).exists():
        begun = Measurement.load(partial)
        begun.check_continues(measurement, partial)
        measurement = begun
    map_source = _MapSource(list(modules)[len(modules) // 2])
    with _left_as_it_was(model, modules):
        for index, batch in enumerate(batches):
            if index < measurement.batches:
                continue
            found = measurement.copy()  # a batch counts whole or not at all
            _run(model, modules, batch, step or _default_step, found, map_source)
            if not found.layers:
                raise ValueError(
                    "no gradient reached a BackLite module: accepted is a step that runs forward "
                    "and backward of the model, not compiled"
                )
            found.batches += 1
            measurement = found
            if partial is not None:
                measurement.save(partial)
    if not measurement.batches:
        raise ValueError("batches is empty: accepted is an iterable of at least one batch")
    return choose(measurement, target, per, map_source=map_source)


def choose(
    measurement: Measurement,
    target: Target,
    per: Per,
    *,
    complete: bool = True,
    map_source: _MapSource | None = None,
) -> Calibration:
    """Take the largest values that meet the target."""
    errors = {name: sums.error for name, sums in measurement.layers.items()}  # (V, H) each
    if per == "head":
        chosen = {name: _largest(error, target) for name, error in errors.items()}
    elif per == "layer":
        chosen = {
            name: _largest(_rms(error), target).expand(error.shape[1])
            for name, error in errors.items()
        }
    else:
        one = _largest(_rms(torch.cat(list(errors.values()), dim=1)), target)
        chosen = {name: one.expand(error.shape[1]) for name, error in errors.items()}
    layers = []
    for name in measurement.names:
        if name not in measurement.layers:
            layers.append(LayerCalibration(name, 0, 0, 0, [], [], [], None))
            continue
        sums, rows = measurement.layers[name], chosen[name].tolist()
        density, calls = sums.density, measurement.calls[name]
        dq, dk, dv = (_rounded(curve) for curve in sums.relative_l2)
        exact_seconds, *seconds = _rounded(sums.seconds / calls)
        pick = [(row, head) for head, row in enumerate(rows)]
        layers.append(
            LayerCalibration(
                name,
                sums.num_heads,
                sums.num_key_heads,
                calls,
                [measurement.values[row] if row >= 0 else 0.0 for row, _ in pick],
                [_rounded(errors[name][at]) if at[0] >= 0 else 0.0 for at in pick],
                [_rounded(density[at]) if at[0] >= 0 else 1.0 for at in pick],
                Curves(_rounded(density), dq, dk, dv, exact_seconds, seconds),
            )
        )
    tile_map = map_source.draw(layers) if map_source is not None else None
    return Calibration(
        target, per, measurement.batches, complete, measurement.values, layers, tile_map
    )


def _largest(error: Tensor, target: Target) -> Tensor:
    """Index of the largest value whose error, ``(V, n)``, is within the target; -1 for none."""
    index = torch.arange(error.shape[0])[:, None]
    return torch.where(error <= target.error, index, -1).amax(dim=0)


def _rms(error: Tensor) -> Tensor:
    """``(V, H)`` to ``(V, 1)``."""
    return error.square().mean(dim=1, keepdim=True).sqrt()


def _rounded(values: Tensor) -> Any:
    """As floats in nested lists, to six digits: the file stays readable."""
    if values.dim() == 0:
        return float(f"{values.item():.6g}")
    return [_rounded(value) for value in values]


@dataclass
class _MapSource:
    """What a tile map is drawn from: the statistics of one sequence of one layer."""

    name: str
    stats: Tensor | None = None  # float32 (1, H, Tm, Tn)

    def look(self, call: Call) -> None:
        """Keep the statistics of the first sequence, of the first call that is small enough."""
        lengths, mask = (call.query.shape[1], call.key.shape[1]), (call.causal, call.window_size)
        grid = mask_tiles(*lengths, causal=mask[0], window_size=mask[1], device="cpu")
        if self.stats is not None or not 0 < grid.numel() <= _MAX_MAP_TILES or not len(call.query):
            return
        first = (x[:1] for x in (call.query, call.key, call.value))
        _, _, stats = ops.forward(
            *first, scale=call.scale, causal=mask[0], window_size=mask[1], record=True
        )
        assert stats is not None
        self.stats, self.allowed, self.lengths, self.mask = stats.cpu(), grid, lengths, mask

    def draw(self, layers: list[LayerCalibration]) -> TileMap | None:
        """Draw the head of the median density."""
        layer = next(layer for layer in layers if layer.name == self.name)
        if self.stats is None or not layer.num_heads:
            return None
        order = sorted(range(layer.num_heads), key=lambda head: layer.density[head])
        head = order[len(order) // 2]
        stats = self.stats[:, head : head + 1].contiguous()
        bits = ops.select(
            stats,
            layer.negl_prob[head],
            query_length=self.lengths[0],
            key_length=self.lengths[1],
            causal=self.mask[0],
            window_size=self.mask[1],
        )
        live = unpack_tiles(bits, stats.shape[2])[0, 0]
        probability = [[float(f"{p:.3g}") for p in row] for row in stats[0, 0].tolist()]
        return TileMap(
            self.name,
            head,
            layer.negl_prob[head],
            probability,
            live.int().tolist(),
            self.allowed.int().tolist(),
        )


def _run(
    model: nn.Module,
    modules: Mapping[str, BackLite],
    batch: Any,
    step: Callable[[nn.Module, Any], object],
    found: Measurement,
    map_source: _MapSource,
) -> None:
    """Run one batch; measure every call into ``found``."""

    def receive(name: str, call: Call) -> None:
        try:
            compared = compare_gradients(
                *call[:4],
                found.values,
                grad_lse=call.grad_lse,
                scale=call.scale,
                causal=call.causal,
                window_size=call.window_size,
            )
            found.add(name, compared)
        except ValueError as error:
            raise ValueError(f"layer {name!r}: {error}") from error
        if name == map_source.name:
            map_source.look(call)

    versions = {name: parameter._version for name, parameter in model.named_parameters()}
    with contextlib.ExitStack() as hooks:
        for name, module in modules.items():
            handle = watch(module, lambda call, name=name: receive(name, call))  # type: ignore[misc]
            hooks.callback(handle.remove)
        with torch.enable_grad():
            step(model, batch)
    model.zero_grad(set_to_none=True)
    for name, parameter in model.named_parameters():
        if parameter._version != versions[name]:
            raise RuntimeError(
                f"step changed the parameter {name!r}: accepted is a step that runs forward and "
                "backward alone, without the optimizer"
            )


def _default_step(model: nn.Module, batch: Any) -> None:
    if isinstance(batch, Mapping):
        loss = model(**batch)
    elif isinstance(batch, (tuple, list)):
        loss = model(*batch)
    else:
        loss = model(batch)
    loss = getattr(loss, "loss", loss)
    if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.requires_grad:
        what = f"shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
        raise ValueError(
            f"model(batch) returned {what}: accepted is a loss, a scalar with a gradient; or give "
            "step=, which runs forward and backward"
        )
    loss.backward()


@contextlib.contextmanager
def _left_as_it_was(model: nn.Module, modules: Mapping[str, BackLite]) -> Iterator[None]:
    """Make the modules exact and gradients absent; bring all that a step changes back."""
    thresholds = {module: module.negl_prob for module in modules.values()}
    gradients = {parameter: parameter.grad for parameter in model.parameters()}
    buffers = {buffer: buffer.detach().clone() for buffer in model.buffers()}
    training = {module: module.training for module in model.modules()}
    devices = {p.device for p in model.parameters() if p.is_cuda}
    try:
        with torch.random.fork_rng(devices):
            for module in modules.values():
                module.negl_prob = 0.0
            model.zero_grad(set_to_none=True)
            yield
    finally:
        with torch.no_grad():
            for buffer, value in buffers.items():
                buffer.copy_(value)
        for module, threshold in thresholds.items():
            module.negl_prob = threshold
        for parameter, gradient in gradients.items():
            parameter.grad = gradient
        for each, mode in training.items():
            each.training = mode


def _checked_values(values: Sequence[float] | None) -> list[float]:
    if values is None:
        return list(VALUES)
    accepted = "accepted are numbers above 0 and below 1, ascending"
    try:
        checked = [float(value) for value in values]
    except (TypeError, ValueError) as error:
        raise TypeError(f"values = {values!r}: {accepted}") from error
    ascending = all(a < b for a, b in itertools.pairwise(checked))
    if not checked or not ascending or not 0.0 < checked[0] <= checked[-1] < 1.0:
        raise ValueError(f"values = {checked}: {accepted}")
    return checked


def _weights_norm(model: nn.Module) -> float:
    """Tells the weights of one training step from those of another."""
    norms = [
        torch.linalg.vector_norm(parameter.detach().float(), dtype=torch.float64).item()
        for parameter in model.parameters()
    ]
    return cast(float, torch.tensor(norms, dtype=torch.float64).norm().item())
