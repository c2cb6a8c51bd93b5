"""The operators as this torch can have them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING or hasattr(torch.library, "register_fake"):
    from ._operators import autocast_dtype, backward, call_attention, is_compiling, select
else:
    from ._compat import autocast_dtype, backward, call_attention, is_compiling, select

__all__ = ["autocast_dtype", "backward", "call_attention", "is_compiling", "select"]
