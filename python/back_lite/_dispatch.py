"""The operators as this torch can have them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING or hasattr(torch.library, "register_fake"):
    from ._operators import autocast_dtype, backward, is_compiling, select
    from ._operators import call_attention as attention
else:
    from ._compat import attention, autocast_dtype, backward, is_compiling, select

__all__ = ["attention", "autocast_dtype", "backward", "is_compiling", "select"]
