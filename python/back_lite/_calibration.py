"""What a calibration found: the thresholds, what they were chosen from, and its JSON file."""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from torch import nn

from . import _calibration_checks
from ._library import version
from .attention import BackLite

SCHEMA = "back_lite.calibration"
SCHEMA_VERSION = 3

#: What shares one threshold.
Per = Literal["head", "layer", "model"]
PER = get_args(Per)

# What torch.compile, FSDP and activation checkpointing put into the names of modules.
_WRAPPERS = frozenset({"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})
# A list of nothing but numbers; no string holds a line break.
_NUMBERS = re.compile(r"\[\n([^\[\]{}\"]*)\]")


@dataclass(frozen=True)
class Target:
    """How good a sparse gradient must be: the worst of dQ, dK and dV against the exact one.

    ::

        Target(relative_l2=0.1)
        Target(cosine=0.99)  # stands for a relative L2 of sqrt(1 - 0.99^2) = 0.141

    Args:
        cosine: the least cosine accepted, between 0 and 1.
        relative_l2: the largest relative L2 error accepted, between 0 and 1.

    Raises:
        TypeError: neither or both are given, or not a number.
        ValueError: not strictly between 0 and 1.
    """

    cosine: float | None = None
    relative_l2: float | None = None

    def __post_init__(self) -> None:
        given = {k: v for k, v in asdict(self).items() if v is not None}
        if len(given) != 1:
            raise TypeError(
                f"Target({', '.join(f'{k}={v!r}' for k, v in given.items())}): accepted is exactly "
                "one of cosine and relative_l2"
            )
        ((name, value),) = given.items()
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise TypeError(f"{name} = {value!r}: accepted are numbers between 0 and 1")
        if not 0.0 < value < 1.0:
            raise ValueError(
                f"{name} = {value}: accepted are numbers between 0 and 1, both excluded; exact "
                "gradients need no calibration but negl_prob = 0"
            )

    @property
    def error(self) -> float:
        """The largest relative L2 accepted; for a cosine c, ``sqrt(1 - c^2)``."""
        if self.relative_l2 is not None:
            return self.relative_l2
        assert self.cosine is not None
        return math.sqrt(1.0 - self.cosine**2)

    def __str__(self) -> str:
        if self.relative_l2 is not None:
            return f"relative L2 <= {self.relative_l2:g}"
        return f"cosine >= {self.cosine:g} (relative L2 <= {self.error:.4g})"


@dataclass(frozen=True)
class Curves:
    """What was measured of one layer: V values, H query heads, Hk key heads."""

    density: list[list[float]]  # (V, H)
    dq: list[list[float]]  # relative L2, (V, H)
    dk: list[list[float]]  # (V, Hk)
    dv: list[list[float]]  # (V, Hk)
    exact_seconds: float  # of the exact backward, mean over the calls
    seconds: list[float]  # (V,), of the sparse one

    def error(self) -> list[list[float]]:
        """Relative L2 of the worst gradient of each query head, ``(V, H)``."""
        rows = []
        for dq, dk, dv in zip(self.dq, self.dk, self.dv, strict=True):
            group = len(dq) // len(dk)
            rows.append([max(e, dk[h // group], dv[h // group]) for h, e in enumerate(dq)])
        return rows


@dataclass(frozen=True)
class LayerCalibration:
    """One BackLite module. Lists by query head have ``num_heads`` entries."""

    name: str  # in model.named_modules(), without what wrappers as DDP's add
    num_heads: int  # 0 if no call with a gradient was seen: it stays exact
    num_key_heads: int
    calls: int  # that were measured
    batches: int  # in which there were some; of a single one there is no margin
    negl_prob: list[float]  # chosen, by query head; 0 is exact
    relative_l2: list[float]  # measured at the chosen value, the worst of dQ, dK, dV
    bound: list[float]  # that with the margin
    density: list[float]  # live tiles / tiles that the mask allows, at the chosen value
    #: None if no call was seen
    curves: Curves | None


@dataclass(frozen=True)
class TileMap:
    """The tiles of one head in one sequence."""

    layer: str
    head: int
    negl_prob: float
    probability: list[list[float]]  # (Tm, Tn), rounded
    live: list[list[int]]  # (Tm, Tn), 1 if the backward visits the tile
    allowed: list[list[int]]  # (Tm, Tn), 1 if the mask allows it


@dataclass(frozen=True)
class Calibration:
    """Thresholds of every BackLite module of a model, and what they were chosen from.

    ``print(calibration)`` shows a table. :meth:`apply` sets the thresholds of a model,
    :meth:`save` writes a JSON file that :func:`back_lite.load_calibration` reads.
    """

    target: Target
    per: Per
    margin: float  # standard errors between batches, part of every bound
    batches: int  # that were watched
    complete: bool  # False: interrupted, chosen from the batches so far
    values: list[float]  # that were measured, ascending
    layers: list[LayerCalibration]
    tile_map: TileMap | None = field(default=None, repr=False)

    @property
    def exact_heads(self) -> list[tuple[str, int]]:
        """``(layer, head)`` of the heads that stay exact.

        No measured value meets the target there, or no gradient reached them.
        """
        return [
            (layer.name, head)
            for layer in self.layers
            for head, value in enumerate(layer.negl_prob)
            if value == 0.0
        ]

    @property
    def unseen_layers(self) -> list[str]:
        """Layers of which no call with a gradient was seen; they stay exact."""
        return [layer.name for layer in self.layers if layer.curves is None]

    @property
    def skipped(self) -> float:
        """Share of the tiles skipped, mean over the heads."""
        shares = [1.0 - density for layer in self.layers for density in layer.density]
        return sum(shares) / len(shares) if shares else 0.0

    def apply(self, model: nn.Module) -> None:
        """Set ``negl_prob`` of every BackLite module of a model; all of them, or none.

        Raises:
            ValueError: the model's modules have other names or head counts.
        """
        modules = find_modules(model)
        names = [layer.name for layer in self.layers]
        if set(names) != set(modules):
            missing = [name for name in names if name not in modules]
            extra = [name for name in modules if name not in names]
            parts = [f"the model lacks {missing}"] * bool(missing)
            parts += [f"the calibration lacks {extra}"] * bool(extra)
            raise ValueError(
                f"calibration of another model: {' and '.join(parts)}; accepted is a model with "
                f"BackLite modules named {names}"
            )
        for layer in self.layers:
            known = known_heads(modules[layer.name])
            if layer.num_heads and known not in (None, layer.num_heads):
                raise ValueError(
                    f"calibration of another model: layer {layer.name!r} has {known} query heads; "
                    f"accepted are the {layer.num_heads} of the calibration"
                )
        for layer in self.layers:
            modules[layer.name].negl_prob = layer.negl_prob or 0.0

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a JSON file; whole, or not at all.

        Raises:
            OSError: it could not be written. What was there before is untouched.
        """
        content = {
            "schema": SCHEMA,
            "schema_version": SCHEMA_VERSION,
            "back_lite": version,
            "target": {k: v for k, v in asdict(self.target).items() if v is not None},
            **{k: v for k, v in asdict(self).items() if k != "target"},
        }
        write_whole(path, _NUMBERS.sub(_one_line, json.dumps(content, indent=1)) + "\n")

    @staticmethod
    def load(path: str | os.PathLike[str]) -> Calibration:
        """Read what :meth:`save` wrote.

        Raises:
            OSError: the file cannot be read.
            ValueError: it is no calibration, or of another version, or damaged.
        """
        content = read_json(path, SCHEMA, SCHEMA_VERSION)
        try:
            layers = [
                LayerCalibration(
                    **{**layer, "curves": layer["curves"] and Curves(**layer["curves"])}
                )
                for layer in content["layers"]
            ]
            calibration = Calibration(
                Target(**content["target"]),
                content["per"],
                content["margin"],
                content["batches"],
                content["complete"],
                content["values"],
                layers,
                content["tile_map"] and TileMap(**content["tile_map"]),
            )
            _calibration_checks.check(calibration, PER)
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise ValueError(f"{os.fspath(path)}: damaged: {error!s}") from error
        return calibration

    def __str__(self) -> str:
        done = "" if self.complete else " (interrupted)"
        lines = [
            f"target: {self.target}, per {self.per}; {self.batches} batches{done}",
            f"skipped: {self.skipped:.1%} of the tiles, mean over the heads",
        ]
        once = [layer.name for layer in self.layers if layer.batches == 1]
        if once and self.margin:
            lines.append(
                f"{len(once)} of {len(self.layers)} layers were seen in one batch: its spread is "
                "unknown, and no margin is kept for it"
            )
        width = max(len(layer.name) for layer in self.layers)
        lines.append(f"{'layer':{width}}  skipped  worst error  negl_prob by head")
        for layer in self.layers:
            if layer.curves is None:
                lines.append(f"{layer.name:{width}}  no gradient seen: exact")
                continue
            skipped = 1.0 - sum(layer.density) / layer.num_heads
            values = " ".join(f"{value:g}" if value else "exact" for value in layer.negl_prob)
            error = max(layer.relative_l2)
            lines.append(f"{layer.name:{width}}  {skipped:7.1%}  {error:11.4f}  {values}")
        exact = sum(value == 0.0 for layer in self.layers for value in layer.negl_prob)
        if exact:
            lines.append(
                f"{exact} heads stay exact: no measured value meets the target there, or no "
                "gradient reached them"
            )
        return "\n".join(lines)


def load_calibration(model: nn.Module, path: str | os.PathLike[str]) -> Calibration:
    """Read a calibration and set the thresholds of a model; all of them, or none.

    Args:
        model: holds BackLite modules of the names in the file.
        path: what :meth:`Calibration.save` wrote.

    Returns:
        The calibration.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is no calibration, of another version or model, or damaged.
    """
    calibration = Calibration.load(path)
    try:
        calibration.apply(model)
    except ValueError as error:
        raise ValueError(f"{os.fspath(path)}: {error}") from error
    return calibration


def find_modules(model: nn.Module) -> dict[str, BackLite]:
    """Find the BackLite modules of a model by name, the same whatever wraps the model.

    Raises:
        TypeError: not a module.
        ValueError: it has none.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model = {type(model).__name__}: accepted is a torch.nn.Module")
    modules = {
        ".".join(part for part in name.split(".") if part not in _WRAPPERS): module
        for name, module in _unwrapped(model).named_modules()
        if isinstance(module, BackLite)
    }
    if not modules:
        raise ValueError(
            f"model = {type(model).__name__} has no BackLite module: accepted are models whose "
            "attention is a back_lite.BackLite"
        )
    return modules


def _unwrapped(model: nn.Module) -> nn.Module:
    while True:
        inner: nn.Module = getattr(model, "_orig_mod", model)
        if isinstance(inner, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
            inner = inner.module
        if inner is model:
            return model
        model = inner


def known_heads(module: BackLite) -> int | None:
    """Return the number of query heads of a module; None if it was not called yet."""
    kept = module._last_call.kept
    if kept is not None:
        return kept[1][2]
    _, count = module._host_thresholds
    return count if count > 1 else None


def write_whole(path: str | os.PathLike[str], content: str | bytes) -> None:
    """Write a file under another name and rename it; text in UTF-8.

    Links are followed. What is there and no file, such as ``/dev/null``, is written to as it is.

    Raises:
        OSError: names the path.
    """
    data = content.encode() if isinstance(content, str) else content
    target = Path(os.path.realpath(path))
    temporary = None
    try:
        if Path(path).exists() and not target.is_file():
            Path(path).write_bytes(data)
            return
        with tempfile.NamedTemporaryFile(
            dir=target.parent, prefix=f".{target.name}.", delete=False
        ) as file:
            temporary = Path(file.name)
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        mask = os.umask(0)
        os.umask(mask)
        temporary.chmod(0o666 & ~mask)  # temporary files are private
        temporary.replace(target)
    except BaseException as error:
        if temporary is not None:
            with contextlib.suppress(OSError):
                temporary.unlink()
        if isinstance(error, OSError):
            raise OSError(error.errno, f"cannot write: {error.strerror}", str(path)) from error
        raise


def read_json(path: str | os.PathLike[str], schema: str, version: int) -> Mapping[str, Any]:
    """Read a JSON object of one of our schemas.

    Raises:
        OSError: the file cannot be read.
        ValueError: no JSON, or of another schema or version.
    """
    name = os.fspath(path)
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise OSError(error.errno, f"cannot read: {error.strerror}", name) from error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{name}: not JSON: {error}") from error
    if not isinstance(content, dict) or content.get("schema") != schema:
        found = content.get("schema") if isinstance(content, dict) else type(content).__name__
        raise ValueError(f"{name}: schema = {found!r}: accepted is {schema!r}")
    if content.get("schema_version") != version:
        raise ValueError(
            f"{name}: schema_version = {content.get('schema_version')!r}: accepted is {version}"
        )
    return content


def _one_line(match: re.Match[str]) -> str:
    return f"[{' '.join(match[1].split())}]"
