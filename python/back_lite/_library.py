"""Loads the compiled library and hands out its functions."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

# Before the library: both then use the OpenMP runtime that torch brings. The other way round, two
# of them would live side by side, each with its own threads.
import torch

_LIBRARY_NAME = "libbacklite_ffi.so"


def _import_tvm_ffi() -> ModuleType:
    """Import tvm_ffi without the C++ compilation that it starts for torch before 2.10.

    For such a torch, tvm_ffi builds a faster way to pass tensors, at import, unless the package
    torch-c-dlpack-ext brings it ready-made. A slower way through torch.utils.dlpack always works.
    """
    name = "TVM_FFI_DISABLE_TORCH_C_DLPACK"
    if name in os.environ or hasattr(torch.Tensor, "__dlpack_c_exchange_api__"):
        import tvm_ffi

        return tvm_ffi
    try:
        importlib.import_module("torch_c_dlpack_ext")
    except Exception:  # absent, or built for another torch: an OSError or AttributeError
        os.environ[name] = "1"
    try:
        import tvm_ffi
    finally:
        os.environ.pop(name, None)
    return tvm_ffi


def _find() -> Path:
    override = os.environ.get("BACK_LITE_LIBRARY_DIR")
    # An editable install keeps the library and the sources of the package in two folders.
    homes = sys.modules[__package__].__path__
    folders = [Path(override)] if override else [Path(home) / "lib" for home in homes]
    for folder in folders:
        if (folder / _LIBRARY_NAME).is_file():
            return folder / _LIBRARY_NAME
    searched = ", ".join(str(folder) for folder in folders)
    raise ImportError(
        f"back_lite: {_LIBRARY_NAME} is not in {searched}. Install the package (`pip install .` in "
        "its checkout), or name the folder of a build in BACK_LITE_LIBRARY_DIR."
    )


def _load(path: Path) -> Any:
    try:
        tvm_ffi = _import_tvm_ffi()
    except ImportError as error:
        raise ImportError(
            "back_lite needs tvm-ffi: `pip install apache-tvm-ffi`", name="tvm_ffi"
        ) from error
    tvm_ffi.register_error("NotImplementedError", NotImplementedError)
    try:
        return tvm_ffi.load_module(str(path))
    except Exception as error:
        raise ImportError(f"back_lite: cannot load {path}: {error}", path=str(path)) from error


path: Path = _find()
_module = _load(path)

forward: Callable[..., None] = _module.forward
forward_scratch_bytes: Callable[..., int] = _module.forward_scratch_bytes
select: Callable[..., None] = _module.select
backward: Callable[..., None] = _module.backward
backward_scratch_bytes: Callable[..., int] = _module.backward_scratch_bytes
version: str = str(_module.version())
cpu_isa: str = str(_module.cpu_isa())
max_table_heads: int = int(_module.max_table_heads())
has_cuda: bool = bool(_module.has_cuda())
