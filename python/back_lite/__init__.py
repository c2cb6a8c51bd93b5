"""Attention with an exact forward and a backward that skips negligible tiles."""

import sys as _sys

# `python -m back_lite doctor` has to speak where what follows fails or crashes. The first argument
# is "-m" only while Python looks for the module to run.
if not (
    _sys.argv[:2] == ["-m", "doctor"]
    and _sys.orig_argv[-len(_sys.argv)].removeprefix("-m") == "back_lite"
):
    try:
        import torch as _torch  # noqa: F401
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "back_lite needs PyTorch 2.2 or newer: https://pytorch.org/get-started", name="torch"
        ) from error

    from . import ops
    from ._calibrate import calibrate
    from ._calibration import Calibration, Target, load_calibration
    from ._compare import GradientComparison, compare_gradients
    from ._controller import Controller
    from ._library import version as __version__
    from .attention import BackLite, attention
    from .tiles import mask_tiles, pack_tiles, tile_stats_shape, unpack_tiles

__all__ = [
    "BackLite",
    "Calibration",
    "Controller",
    "GradientComparison",
    "Target",
    "__version__",
    "attention",
    "calibrate",
    "compare_gradients",
    "load_calibration",
    "mask_tiles",
    "ops",
    "pack_tiles",
    "tile_stats_shape",
    "unpack_tiles",
]
