"""Sees a BackLite module's call and its gradient, in a real training step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from . import _dispatch
from .attention import BackLite


class Call(NamedTuple):
    """What one call was given, and the gradient of its results. Detached; views where possible."""

    query: Tensor  # (B, Sq, H, D)
    key: Tensor  # (B, Sk, Hk, D)
    value: Tensor
    grad_out: Tensor  # (B, Sq, H, D)
    grad_lse: Tensor | None  # (B, H, Sq)
    scale: float | None
    causal: bool
    window_size: Sequence[int]


def watch(module: BackLite, receive: Callable[[Call], None]) -> RemovableHandle:
    """Hand every call of a module to ``receive`` when its gradient arrives, until removed.

    ``receive`` runs inside the backward, without gradients, so that the tensors of one call are
    held at a time; what it raises leaves the backward. Not seen are calls without a gradient, from
    compiled code, inside vmap (of the gradient as well) or a captured CUDA graph, and on fake
    tensors.
    """
    return module.register_forward_hook(_AfterForward(receive), with_kwargs=True)


class _AfterForward:
    """The hook of a module. A copy of the module, or one saved whole, has one that does nothing."""

    def __init__(self, receive: Callable[[Call], None] | None = None) -> None:
        self.receive = receive

    def __reduce__(self) -> tuple[type[_AfterForward], tuple[()]]:
        return _AfterForward, ()

    def __call__(
        self, _: BackLite, args: tuple[Any, ...], kwargs: dict[str, Any], outputs: Any
    ) -> None:
        receive = self.receive
        if receive is None or _dispatch.is_compiling():
            return
        out, lse = outputs if isinstance(outputs, tuple) else (outputs, None)
        if not out.requires_grad or not _dispatch.has_numbers(out):
            return
        if out.is_cuda and torch.cuda.is_current_stream_capturing():
            return
        given = dict(zip(("query", "key", "value"), args, strict=False)) | kwargs
        # Autocast casts inside the call.
        query, key, value = (
            given[name].detach().to(out.dtype) for name in ("query", "key", "value")
        )
        scale, causal = given.get("scale"), given.get("causal", False)
        window_size = given.get("window_size", (-1, -1))

        def after_backward(grad_out: Tensor | None, grad_lse: Tensor | None) -> None:
            if not all(g is None or _dispatch.has_numbers(g) for g in (grad_out, grad_lse)):
                return
            with torch.no_grad():
                if grad_out is None:
                    grad_out = torch.zeros_like(query)
                if grad_lse is not None:
                    grad_lse = grad_lse.detach()
                receive(
                    Call(query, key, value, grad_out.detach(), grad_lse, scale, causal, window_size)
                )

        if lse is None:
            out.register_hook(lambda grad: after_backward(grad, None))
            return

        def after_both(gradients: Sequence[Tensor | None]) -> None:
            handle.remove()  # it is part of a cycle, which would keep the graph's tensors
            after_backward(*gradients)

        handle = torch.autograd.graph.register_multi_grad_hook((out, lse), after_both)
