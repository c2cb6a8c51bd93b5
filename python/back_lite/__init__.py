"""Attention with an exact forward and a backward that skips negligible tiles."""

from . import ops
from ._library import version as __version__
from .attention import BackLite, attention
from .tiles import mask_tiles, pack_tiles, tile_stats_shape, unpack_tiles

__all__ = [
    "BackLite",
    "__version__",
    "attention",
    "mask_tiles",
    "ops",
    "pack_tiles",
    "tile_stats_shape",
    "unpack_tiles",
]
