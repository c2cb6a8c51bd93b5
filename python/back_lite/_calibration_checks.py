"""Checks what a calibration's file held, so that nothing after it meets a surprise."""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING, Any

from . import _thresholds

if TYPE_CHECKING:
    from ._calibration import Calibration, Curves, LayerCalibration, TileMap


def check(calibration: Calibration, per: tuple[str, ...]) -> None:
    """Check types, ranges and lengths; ``per`` are those accepted.

    Raises:
        ValueError: names the field, its value and what is accepted.
    """
    if calibration.per not in per:
        raise ValueError(f"per = {calibration.per!r}: accepted are {', '.join(map(repr, per))}")
    _check_number("margin", calibration.margin)
    if calibration.margin == math.inf:
        raise ValueError("margin = inf: accepted are finite numbers")
    _check_int("batches", calibration.batches, 1)
    if not isinstance(calibration.complete, bool):
        raise ValueError(f"complete = {calibration.complete!r}: accepted are true and false")
    values, layers = calibration.values, calibration.layers
    _check_numbers("values", values, (_length("values", values),), 1.0)
    if any(a >= b for a, b in itertools.pairwise(values)):
        raise ValueError(f"values = {values}: accepted are ascending numbers")
    _length("layers", layers)
    for layer in layers:
        _check_string("name", layer.name)
        try:
            _check_layer(layer, len(values))
        except ValueError as error:
            raise ValueError(f"layer {layer.name!r}: {error}") from error
    names = [layer.name for layer in layers]
    twice = {name for name in names if names.count(name) > 1}
    if twice:
        raise ValueError(f"layers named {sorted(twice)} twice: accepted is one of each name")
    if calibration.tile_map is not None:
        _check_map(calibration.tile_map)


def _check_layer(layer: LayerCalibration, num_values: int) -> None:
    for name in ("num_heads", "num_key_heads", "calls", "batches"):
        _check_int(name, getattr(layer, name), 0)
    shape = (layer.num_heads,)
    _check_numbers("negl_prob", layer.negl_prob, shape)
    if layer.num_heads:
        _thresholds.parse(layer.negl_prob)
    _check_numbers("relative_l2", layer.relative_l2, shape)
    _check_numbers("bound", layer.bound, shape)
    _check_numbers("density", layer.density, shape, 1.0)
    if (layer.curves is None) != (layer.num_heads == 0):
        raise ValueError(f"num_heads = {layer.num_heads}: accepted is 0 where curves is null alone")
    if layer.curves is not None:
        _check_curves(layer.curves, num_values, layer.num_heads, layer.num_key_heads)


def _check_curves(curves: Curves, num_values: int, num_heads: int, num_key_heads: int) -> None:
    if not num_key_heads or num_heads % num_key_heads:
        raise ValueError(
            f"num_key_heads = {num_key_heads}: accepted are divisors of num_heads = {num_heads}"
        )
    _check_numbers("curves.density", curves.density, (num_values, num_heads), 1.0)
    _check_numbers("curves.dq", curves.dq, (num_values, num_heads))
    _check_numbers("curves.dk", curves.dk, (num_values, num_key_heads))
    _check_numbers("curves.dv", curves.dv, (num_values, num_key_heads))
    _check_number("curves.exact_seconds", curves.exact_seconds)
    _check_numbers("curves.seconds", curves.seconds, (num_values,))


def _check_map(tiles: TileMap) -> None:
    _check_string("tile_map.layer", tiles.layer)
    _check_int("tile_map.head", tiles.head, 0)
    _check_number("tile_map.negl_prob", tiles.negl_prob, 1.0)
    rows = _length("tile_map.probability", tiles.probability)
    shape = rows, _length("tile_map.probability[0]", tiles.probability[0])
    # A mean of float32 probabilities may round to a little above 1.
    _check_numbers("tile_map.probability", tiles.probability, shape)
    _check_numbers("tile_map.live", tiles.live, shape, 1.0)
    _check_numbers("tile_map.allowed", tiles.allowed, shape, 1.0)


def _check_numbers(name: str, rows: Any, shape: tuple[int, ...], most: float = math.inf) -> None:
    """Check lists of numbers, nested as ``shape`` says."""
    if not shape:
        _check_number(name, rows, most)
        return
    if not isinstance(rows, list) or len(rows) != shape[0]:
        given = f"has {len(rows)} entries" if isinstance(rows, list) else f"= {rows!r}"
        raise ValueError(f"{name} {given}: accepted are lists of {shape[0]}")
    for i, row in enumerate(rows):
        _check_numbers(f"{name}[{i}]", row, shape[1:], most)


def _check_number(name: str, value: Any, most: float = math.inf) -> None:
    # NaN fails as well.
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= most:
        upper = f" to {most:g}" if most < math.inf else ""
        raise ValueError(f"{name} = {value!r}: accepted are numbers from 0{upper}")


def _check_int(name: str, value: Any, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{name} = {value!r}: accepted are whole numbers from {least}")


def _check_string(name: str, value: Any) -> None:
    if not isinstance(value, str):
        raise ValueError(f"{name} = {value!r}: accepted are strings")


def _length(name: str, rows: Any) -> int:
    if not isinstance(rows, list) or not rows:
        raise ValueError(f"{name} = {rows!r}: accepted are lists that are not empty")
    return len(rows)
