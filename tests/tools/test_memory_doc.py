"""The formulas of docs/3-memory.md give what the library asks for."""

from __future__ import annotations

import ctypes
import importlib.util
import inspect
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import memory_doc
import pytest


class Problem(ctypes.Structure):
    """backlite::Problem of include/backlite/backlite.h."""

    _fields_ = (
        ("device", ctypes.c_int),
        ("dtype", ctypes.c_int),
        ("batch", ctypes.c_int64),
        ("num_query_heads", ctypes.c_int64),
        ("num_key_heads", ctypes.c_int64),
        ("query_length", ctypes.c_int64),
        ("key_length", ctypes.c_int64),
        ("head_dim", ctypes.c_int64),
        ("scale", ctypes.c_double),
        ("causal", ctypes.c_bool),
        ("window_left", ctypes.c_int64),
        ("window_right", ctypes.c_int64),
    )


DTYPES = ("float16", "bfloat16", "float32", "float64")  # backlite::DType


@pytest.fixture(scope="module")
def formulas() -> dict[str, Callable[..., int]]:
    return memory_doc.formulas()


@pytest.fixture(scope="module")
def library() -> ctypes.CDLL:
    folders = [Path(os.environ.get("BACK_LITE_LIBRARY_DIR", "."))]
    package = importlib.util.find_spec("back_lite")
    if package is not None and package.submodule_search_locations is not None:
        folders += [Path(home) / "lib" for home in package.submodule_search_locations]
    found = [folder / "libbacklite.so" for folder in folders]
    found = [path for path in found if path.exists()]
    assert found, "the library is not there: run `make build`"
    return ctypes.CDLL(str(found[0]))


def ask(library: ctypes.CDLL, name: str, problem: Problem, *arguments: Any) -> int:
    """Call `size_t backlite::name(const Problem&, bool..., int...)`."""
    kinds = "".join("b" if isinstance(argument, bool) else "i" for argument in arguments)
    function = library[f"_ZN8backlite{len(name)}{name}ERKNS_7ProblemE{kinds}"]
    function.restype = ctypes.c_size_t
    return int(function(ctypes.byref(problem), *arguments))


NAMES = ("B", "H", "Hk", "Sq", "Sk", "D", "dtype", "threads")


@pytest.mark.parametrize(
    "values",
    [
        (1, 8, 8, 2048, 2048, 64, "float32", 2),
        (2, 8, 2, 1000, 3001, 80, "bfloat16", 1),
        (4, 40, 8, 513, 129, 128, "float16", 7),
        (1, 1, 1, 1, 1, 8, "float64", 3),
        (1, 6, 3, 200, 0, 256, "float64", 2),
        (0, 4, 4, 128, 128, 64, "float32", 2),
    ],
)
@pytest.mark.parametrize("record", [False, True])
@pytest.mark.parametrize(
    ("stage", "arguments"),
    [
        ("forward_workspace_bytes", ("record", "threads")),
        ("select_workspace_bytes", ("threads",)),
        ("schedule_bytes", ()),
        ("backward_workspace_bytes", ("threads",)),
    ],
)
def test_formula_gives_what_the_library_asks_for(
    formulas: dict[str, Callable[..., int]],
    library: ctypes.CDLL,
    stage: str,
    arguments: tuple[str, ...],
    record: bool,
    values: tuple[Any, ...],
) -> None:
    case = dict(zip(NAMES, values, strict=True)) | {"record": record}
    case["element"] = 8 if case["dtype"] == "float64" else 4
    sizes = [case[name] for name in NAMES[:6]]
    problem = Problem(0, DTYPES.index(case["dtype"]), *sizes, 1.0, False, -1, -1)
    formula = formulas[stage]
    documented = formula(**{name: case[name] for name in inspect.signature(formula).parameters})
    assert documented == ask(library, stage, problem, *[case[name] for name in arguments])
