"""The operators as this torch can have them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING or hasattr(torch.library, "register_fake"):
    from ._operators import (
        autocast_dtype,
        call_attention,
        call_backward,
        call_select,
        is_compiling,
        is_direct,
    )
else:
    from ._compat import (
        autocast_dtype,
        call_attention,
        call_backward,
        call_select,
        is_compiling,
        is_direct,
    )

__all__ = [
    "autocast_dtype",
    "call_attention",
    "call_backward",
    "call_select",
    "has_numbers",
    "hides_gradients",
    "is_compiling",
    "is_direct",
    "is_readable",
]


# Seen with 2.11, 2.13, 2.14 and 2.15. That of 2.4 cannot be asked while it compiles: transforms of
# torch.func in compiled code get the exact gradient there.
_CAN_ASK = tuple(int(part) for part in torch.__version__.split(".")[:2]) >= (2, 11)


def hides_gradients() -> bool:
    """Tell whether code inside a transform of torch.func is being compiled.

    Torch before 2.15 calls ``requires_grad`` False there, also where the transform is a gradient.
    """
    return _CAN_ASK and is_compiling() and torch._C._are_functorch_transforms_active()


def is_readable(tensor: torch.Tensor) -> bool:
    """Tell whether results of a call with this tensor hold numbers that can be read."""
    return not (
        torch._C._are_functorch_transforms_active() or torch._C._len_torch_dispatch_stack() > 0
    ) and not torch._is_functional_tensor(tensor)


# Batched by is_grads_batched=True; torch before 2.3 cannot be asked.
_is_legacy_batch = getattr(torch._C._functorch, "is_legacy_batchedtensor", lambda _: False)


def has_numbers(tensor: torch.Tensor) -> bool:
    """Tell whether a result holds numbers that can be read once transforms of torch.func are done.

    A batch that is mapped over does not, nor do fake tensors or what a trace sees.
    """
    if torch._C._len_torch_dispatch_stack() > 0 or torch._is_functional_tensor(tensor):
        return False
    functorch = torch._C._functorch
    while functorch.is_gradtrackingtensor(tensor):
        tensor = functorch.get_unwrapped(tensor)
    return not (functorch.is_batchedtensor(tensor) or _is_legacy_batch(tensor))
