"""Finds the largest thresholds that meet a target, from the gradients of real batches."""

from __future__ import annotations

import contextlib
import itertools
import json
import math
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
PARTIAL_VERSION = 3
# Two models of equal layers but other weights differ by more; float64 sums of the same by less.
_SAME_WEIGHTS = 1e-9
# A map with more tiles would be a large part of the file, and unreadable as a picture.
_MAX_MAP_TILES = 128 * 128


@dataclass(frozen=True)
class LayerMeasurement:
    """Sums over the calls of a layer; V values, H query heads, Hk key heads."""

    sums: GradientComparison
    calls: int
    batches: int  # in which there were calls
    #: sums over batches of e * e, e * d and d * d, float64 ``(3, V, H + 2 Hk)``, where e is a
    #: batch's sum of squares of the exact gradient and d that of the difference
    moments: Tensor

    @staticmethod
    def of_batch(sums: GradientComparison, calls: int) -> LayerMeasurement:
        """Return the measurement of one batch."""
        d = sums.difference
        e = sums.exact.expand_as(d)
        return LayerMeasurement(sums, calls, 1, torch.stack([e * e, e * d, d * d]))

    def __add__(self, other: LayerMeasurement) -> LayerMeasurement:
        """Both batches together."""
        return LayerMeasurement(
            self.sums + other.sums,
            self.calls + other.calls,
            self.batches + other.batches,
            self.moments + other.moments,
        )

    def bound(self, margin: float) -> Tensor:
        """Error of each query head with ``margin`` standard errors on top, float64 ``(V, H)``.

        The squared error is a ratio of sums over n batches, R = sum d / sum e; its variance, to
        first order, is n / (n - 1) sum (d - R e)^2 / (sum e)^2. The spread of one batch is unknown,
        and then there is no margin. NaN where no gradient arrived: nothing was learned there.
        """
        with_margin = self.sums.error
        if self.batches > 1:
            ratio = self.sums.difference / self.sums.exact
            ee, ed, dd = self.moments
            residual = (dd - 2.0 * ratio * ed + ratio.square() * ee).clamp(min=0.0)
            variance = self.batches / (self.batches - 1) * residual / self.sums.exact.square()
            error = ratio.sqrt()
            error = error + margin * variance.sqrt() / (2.0 * error)
            with_margin = self.sums.split(
                torch.where(self.sums.difference == 0, 0.0, error)
            ).worst()
        return torch.where(self.sums.has_gradient, with_margin, math.nan)


@dataclass
class Measurement:
    """What was measured, by layer; the partial file holds nothing else."""

    names: list[str]
    values: list[float]
    weights_norm: float
    batches: int = 0

    def __post_init__(self) -> None:
        self.layers: dict[str, LayerMeasurement] = {}

    def add(self, found: Mapping[str, LayerMeasurement]) -> None:
        """Add a batch."""
        added = dict(found)
        for name in found.keys() & self.layers.keys():
            try:
                added[name] = self.layers[name] + found[name]
            except ValueError as error:
                raise ValueError(f"layer {name!r}: {error}") from error
        self.layers |= added
        self.batches += 1

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the partial file; whole, or not at all."""
        layers = {
            name: {
                "num_heads": layer.sums.num_heads,
                "calls": layer.calls,
                "batches": layer.batches,
                "moments": layer.moments.tolist(),
                "allowed": layer.sums.allowed,
                **{field: getattr(layer.sums, field).tolist() for field in _SUMS},
            }
            for name, layer in self.layers.items()
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
                compared = GradientComparison(
                    tuple(new.values), record["num_heads"], allowed=record["allowed"], **sums
                )
                moments = torch.tensor(record["moments"], dtype=torch.float64, device="cpu")
                layer = LayerMeasurement(compared, record["calls"], record["batches"], moments)
                new.layers[name] = layer
            new._check()
        except (KeyError, TypeError, AttributeError, ValueError, RuntimeError) as error:
            raise ValueError(f"{os.fspath(path)}: damaged: {error!s}") from error
        return new

    def _check(self) -> None:
        """Check what a file held.

        Raises:
            TypeError, ValueError: something does not fit the rest.
        """
        counts = {"batches": self.batches}
        for name, layer in self.layers.items():
            sums, rows = layer.sums, len(layer.sums.exact)
            by_value = len(self.values), rows
            shapes = {
                "exact": (sums.exact, (rows,)),
                "moments": (layer.moments, (3, *by_value)),
                "live": (sums.live, (len(self.values), sums.num_heads)),
                "seconds": (sums.seconds, (1 + len(self.values),)),
                **{
                    each: (getattr(sums, each), by_value)
                    for each in ("sparse", "dot", "difference")
                },
            }
            for what, (given, shape) in shapes.items():
                if given.shape != shape:
                    raise ValueError(f"{name}: {what} is {tuple(given.shape)}, not {shape}")
            if (
                name not in self.names
                or sums.num_key_heads < 1
                or sums.num_heads % sums.num_key_heads
            ):
                raise ValueError(f"{name}: no layer of {self.names}, or of wrong head counts")
            counts |= {f"{name}: calls": layer.calls, f"{name}: batches": layer.batches}
        for what, count in counts.items():
            if not isinstance(count, int) or count < 1:
                raise ValueError(f"{what} = {count!r}: accepted are whole numbers from 1")

    def check_continues(self, other: Measurement, path: str | os.PathLike[str]) -> None:
        """Check that this, read from ``path``, was begun with the model and values of ``other``.

        Raises:
            ValueError: names what differs.
        """
        for what in ("names", "values"):
            mine, accepted = getattr(self, what), getattr(other, what)
            if mine != accepted:
                raise ValueError(f"{os.fspath(path)}: {what} = {mine}: accepted is {accepted}")
        if _differ(self.weights_norm, other.weights_norm):
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
    margin: float = 2.0,
    partial: str | os.PathLike[str] | None = None,
) -> Calibration:
    """Find the largest ``negl_prob`` that meets a target, from the gradients of real batches.

    Every BackLite module of the model runs exact, and for each of its calls the sparse gradients of
    all values are compared with the exact one, on the very tensors of that call. A head's error is
    the relative L2 of its worst gradient, over all batches: of its own dQ, or of dK or dV of its
    key head. A layer's or the model's error is the root mean square of its heads' errors. The
    largest measured value is chosen at which the error is within the target, with a margin for what
    these batches may not tell of others; where there is none, or no gradient arrives, the head (or
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
        margin: standard errors that are added to each error before it is compared with the target,
            from 0. They are estimated from the spread between batches; of one batch there is none,
            and no margin.
        partial: a file that receives what was measured after every batch. If it exists, its batches
            are not run again: an interrupted call goes on where it was. It stays afterwards: remove
            it for other batches or another ``step``.

    Returns:
        Thresholds by layer and head, with the curves that they were chosen from.

    Raises:
        TypeError, ValueError: an argument is not one of those above, there are no batches, a
            gradient is not finite, or no gradient reached a BackLite module.
        RuntimeError: ``step`` changed the weights, or ``torch.inference_mode()`` is on.
        OSError: the partial file cannot be read or written.
    """
    modules = find_modules(model)
    check_batches(batches)
    if torch.is_inference_mode_enabled():
        raise RuntimeError("torch.inference_mode() is on: accepted is a call outside it")
    if not isinstance(target, Target):
        raise TypeError(f"target = {target!r}: accepted is a back_lite.Target")
    if per not in PER:
        raise ValueError(f"per = {per!r}: accepted are {', '.join(map(repr, PER))}")
    if step is not None and not callable(step):
        raise TypeError(f"step = {step!r}: accepted is a function of the model and a batch")
    if isinstance(margin, bool) or not isinstance(margin, (int, float)):
        raise TypeError(f"margin = {margin!r}: accepted are numbers from 0")
    if not 0.0 <= margin < math.inf:
        raise ValueError(f"margin = {margin}: accepted are finite numbers from 0")
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
            found = _run(
                model, modules, batch, step or _default_step, measurement.values, map_source
            )
            if _differ(_weights_norm(model), measurement.weights_norm):  # through .data, say
                raise _weights_changed("weights")
            if not found and not measurement.layers:
                raise ValueError(
                    "no gradient reached a BackLite module: accepted is a step that runs forward "
                    "and backward of the model, not compiled"
                )
            measurement.add(found)  # a batch counts whole or not at all
            if partial is not None:
                measurement.save(partial)
    if not measurement.batches:
        raise ValueError("batches is empty: accepted is an iterable of at least one batch")
    return choose(measurement, target, per, margin, map_source=map_source)


def choose(
    measurement: Measurement,
    target: Target,
    per: Per,
    margin: float = 2.0,
    *,
    complete: bool = True,
    map_source: _MapSource | None = None,
) -> Calibration:
    """Take the largest values that meet the target."""
    bounds = {  # (V, H) each
        name: layer.bound(margin) for name, layer in measurement.layers.items()
    }
    if per == "head":
        chosen = {name: _largest(bound, target) for name, bound in bounds.items()}
    elif per == "layer":
        chosen = {
            name: _largest(_rms(bound), target).expand(bound.shape[1])
            for name, bound in bounds.items()
        }
    else:
        one = _largest(_rms(torch.cat(list(bounds.values()), dim=1)), target)
        chosen = {name: one.expand(bound.shape[1]) for name, bound in bounds.items()}
    layers = []
    for name in measurement.names:
        if name not in measurement.layers:
            layers.append(LayerCalibration(name, 0, 0, 0, 0, [], [], [], [], None))
            continue
        measured = measurement.layers[name]
        sums, calls = measured.sums, measured.calls
        error, density, rows = sums.error, sums.density, chosen[name].tolist()
        dq, dk, dv = (_rounded(curve) for curve in sums.relative_l2)
        exact_seconds, *seconds = _rounded(sums.seconds / calls)
        pick = [(row, head) for head, row in enumerate(rows)]
        layers.append(
            LayerCalibration(
                name,
                sums.num_heads,
                sums.num_key_heads,
                calls,
                measured.batches,
                [measurement.values[row] if row >= 0 else 0.0 for row, _ in pick],
                [_rounded(error[at]) if at[0] >= 0 else 0.0 for at in pick],
                [_rounded(bounds[name][at]) if at[0] >= 0 else 0.0 for at in pick],
                [_rounded(density[at]) if at[0] >= 0 else 1.0 for at in pick],
                Curves(_rounded(density), dq, dk, dv, exact_seconds, seconds),
            )
        )
    tile_map = map_source.draw(layers) if map_source is not None else None
    return Calibration(
        target, per, margin, measurement.batches, complete, measurement.values, layers, tile_map
    )


def _largest(bound: Tensor, target: Target) -> Tensor:
    """Index of the largest value whose bound, ``(V, n)``, is within the target; -1 for none."""
    index = torch.arange(bound.shape[0])[:, None]
    return torch.where(bound <= target.error, index, -1).amax(dim=0)


def _rms(bound: Tensor) -> Tensor:
    """``(V, H)`` to ``(V, 1)``, over the heads that a gradient reached."""
    return bound.square().nanmean(dim=1, keepdim=True).sqrt()


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
    values: Sequence[float],
    map_source: _MapSource,
) -> dict[str, LayerMeasurement]:
    """Run one batch and measure every call."""
    sums: dict[str, GradientComparison] = {}
    calls = dict.fromkeys(modules, 0)

    def receive(name: str, call: Call) -> None:
        try:
            compared = compare_gradients(
                *call[:4],
                values,
                grad_lse=call.grad_lse,
                scale=call.scale,
                causal=call.causal,
                window_size=call.window_size,
            )
            sums[name] = sums[name] + compared if name in sums else compared
            calls[name] += 1
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
            raise _weights_changed(f"parameter {name!r}")
    return {name: LayerMeasurement.of_batch(found, calls[name]) for name, found in sums.items()}


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
    buffers = [
        (module, name, buffer, None if buffer is None else buffer.detach().clone())
        for module in model.modules()
        for name, buffer in module._buffers.items()
    ]
    training = {module: module.training for module in model.modules()}
    devices = {p.device for p in model.parameters() if p.is_cuda}
    try:
        with torch.random.fork_rng(devices):
            for module in modules.values():
                module.negl_prob = 0.0
            model.zero_grad(set_to_none=True)
            yield
    finally:
        for module, threshold in thresholds.items():
            module.negl_prob = threshold
        for parameter, gradient in gradients.items():
            parameter.grad = gradient
        for each, mode in training.items():
            each.training = mode
        with torch.no_grad():
            for owner, name, buffer, value in buffers:
                owner._buffers[name] = buffer  # a step may put another there
                if buffer is not None and value is not None and not torch.equal(buffer, value):
                    buffer.copy_(value)


def check_batches(batches: Iterable[Any]) -> None:
    """Check that batches can be iterated over.

    Raises:
        TypeError: they cannot, or are a single one, a mapping.
    """
    if not isinstance(batches, Iterable) or isinstance(batches, (str, bytes, Mapping)):
        raise TypeError(
            f"batches = {type(batches).__name__}: accepted is an iterable of at least one batch"
        )


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


def _differ(norm: float, other: float) -> bool:
    return abs(norm - other) > _SAME_WEIGHTS * other


def _weights_changed(what: str) -> RuntimeError:
    return RuntimeError(
        f"step changed the {what}: accepted is a step that runs forward and backward alone, "
        "without the optimizer"
    )
