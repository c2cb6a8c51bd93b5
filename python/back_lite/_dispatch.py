"""The operators as this torch can have them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING or hasattr(torch.library, "register_fake"):
    from ._operators import autocast_dtype, backward, call_attention, is_compiling, select
else:
    from ._compat import autocast_dtype, backward, call_attention, is_compiling, select

__all__ = [
    "autocast_dtype",
    "backward",
    "call_attention",
    "is_compiling",
    "is_readable",
    "select",
]


def is_readable(tensor: torch.Tensor) -> bool:
    """Tell whether results of a call with this tensor hold numbers that can be read."""
    return not (
        torch._C._are_functorch_transforms_active() or torch._C._len_torch_dispatch_stack() > 0
    ) and not torch._is_functional_tensor(tensor)
