"""What each kind of JSON in docs/results/ must hold, for the page to follow from it."""

from __future__ import annotations

import itertools
import math
from typing import Any

GRADIENTS = ("dQ", "dK", "dV")
NUMBER = int | float

# A type; [of each], where none may be there with ...; (of one, of the other); {name: of it}, where
# "name?" may be missing and "*" is any.
_ERRORS = {
    "negl_prob": NUMBER,
    "skipped": NUMBER,
    "cosine": dict.fromkeys(GRADIENTS, NUMBER),
    "relative_l2": dict.fromkeys(GRADIENTS, NUMBER),
}
_FORWARD = {"loss": NUMBER, "loss_difference": NUMBER, "logits_relative_l2": NUMBER}
_HEAD = {"command": str, "machine": {"gpu": str}, "versions": {"torch": str}}
_SPEED = {"step_ms": NUMBER, "spread": NUMBER, "rounds": int}
SHAPES: dict[str, dict[str, Any]] = {
    "training": {
        "settings": dict.fromkeys(("context", "batch", "steps", "exact_steps", "seed"), int)
        | {"negl_prob": NUMBER},
        "text": {"train_bytes": int},
        "run": {
            "train_loss": [NUMBER],
            "step_seconds": [NUMBER],
            "validation": [(int, NUMBER)],
            "density": [(int, [NUMBER])],
        },
    },
    "layers": {"settings": {"context": int}, "layers": [[_ERRORS]]},
    "smollm2": {
        "settings": dict.fromkeys(("context", "batch", "steps"), int),
        "forward": dict.fromkeys(("sdpa", "back_lite", "eager"), _FORWARD)
        | {"tokens": int, "float32_loss": NUMBER},
        "layers": [[_ERRORS]],
        "trainings": {
            "*": {
                "validation": ((int, NUMBER), (int, NUMBER)),
                "step_seconds": [NUMBER],
                "skipped": [NUMBER, ...],
            }
        },
    },
    "smollm2_steps": {
        "settings": {"layers": int, "compile?": bool},
        "shapes": [
            {
                "sequences": int,
                "context": int,
                "steps": [
                    {"attention": str, "skipped": NUMBER, "kernel_ms": NUMBER, **_SPEED}
                    | {"speedup_over_sdpa": NUMBER}
                ],
            }
        ],
    },
    "speed": {
        "contexts": [
            {
                "sequences": int,
                "context": int,
                "steps": [
                    {"negl_prob": NUMBER | None, "skipped?": NUMBER, **_SPEED}
                    | {"speedup_over_exact": NUMBER}
                ],
            }
        ],
    },
    "stages": {
        "fa4": bool,
        "lengths": [
            {
                "length": int,
                "heads": int,
                "head_dim": int,
                "ms": dict.fromkeys(
                    ("forward", "forward_with_statistics", "select", "backward", "cuDNN_forward",
                     "cuDNN_backward"), NUMBER,
                ) | {"*": NUMBER},
                "density": {"*": NUMBER},
                "peak_bytes": {"*": int},
            }
        ],
    },
}  # fmt: skip


def problem(found: Any, kind: str) -> str:
    """What is wrong with a file of a kind, and what is accepted; nothing if it is as it must be."""
    return _differs(found, _HEAD | SHAPES[kind], "") or _does_not_agree(found, kind)


def _differs(found: Any, shape: Any, name: str) -> str:
    def accepted(what: str) -> str:
        return f"{name or 'the file'} = {str(found)[:40]}: accepted is {what}"

    if isinstance(shape, dict):
        names = [key for key in shape if key != "*" and not key.endswith("?")]
        if not isinstance(found, dict) or not found or any(key not in found for key in names):
            return accepted(f"an object with {', '.join(names) or 'names'}")
        shapes = {key: shape.get(key, shape.get(f"{key}?", shape.get("*"))) for key in found}
        parts = [(key, found[key], of) for key, of in shapes.items() if of is not None]
    elif isinstance(shape, (list, tuple)):
        count = len(shape) if isinstance(shape, tuple) else 0
        if not isinstance(found, list) or (count and len(found) != count):
            return accepted(f"a list of {count}" if count else "a list")
        if not found and shape[-1] is not ...:
            return accepted("a list of one or more")
        kinds = shape if count else itertools.repeat(shape[0])
        parts = [(i, x, of) for i, (x, of) in enumerate(zip(found, kinds, strict=False))]
    elif not isinstance(found, shape) or (isinstance(found, bool) and shape is not bool):
        return accepted("a number" if shape is NUMBER else str(getattr(shape, "__name__", shape)))
    elif isinstance(found, float) and not math.isfinite(found):
        return accepted("a finite number")
    else:
        return ""
    inner = (_differs(x, of, f"{name}.{key}".lstrip(".")) for key, x, of in parts)
    return next((text for text in inner if text), "")


def _does_not_agree(found: Any, kind: str) -> str:
    """Between parts that the page puts into one table."""
    if kind in ("layers", "smollm2"):
        first = [row["negl_prob"] for row in found["layers"][0]]
        for number, layer in enumerate(found["layers"]):
            values = [row["negl_prob"] for row in layer]
            if values != first or 0.05 not in values:
                return (
                    f"layers.{number}: negl_prob = {values}: accepted are those of layers.0, with "
                    "0.05 among them"
                )
    if kind == "smollm2_steps":
        for number, shape in enumerate(found["shapes"]):
            if len(shape["steps"]) < 3:
                return f"shapes.{number}.steps: accepted are SDPA, exact and sparse"
    if kind == "stages":
        first = list(found["lengths"][0]["density"])
        for number, row in enumerate(found["lengths"]):
            if list(row["density"]) != first or any(name not in row["ms"] for name in first):
                return f"lengths.{number}: density and ms: accepted are {', '.join(first)} in both"
    return ""
