"""_operators.py for torch 2.2 and 2.3, whose torch.library knows neither fakes nor keysets.

A plain autograd.Function: eager mode only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from . import _kernels
from ._kernels import Gradients

call_select = _kernels.select


def is_compiling() -> bool:
    """Return False: here everything is eager."""
    return False


def autocast_dtype(device_type: str) -> torch.dtype | None:
    """Return the dtype that autocast computes in on a kind of device; None outside autocast."""
    if device_type == "cpu":
        return torch.get_autocast_cpu_dtype() if torch.is_autocast_cpu_enabled() else None
    return torch.get_autocast_gpu_dtype() if torch.is_autocast_enabled() else None


def _in_memory(tensor: Any) -> Any:
    """Carry out what torch keeps as a mark of the tensor: a sign, or zeros without memory."""
    if isinstance(tensor, Tensor):
        return tensor.clone() if tensor._is_zerotensor() else tensor.resolve_neg()
    return tensor


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, negl_prob: Tensor | None, *options: Any
    ) -> tuple[Tensor, ...]:
        query, key, value = map(_in_memory, (query, key, value))
        outputs = _kernels.attention(query, key, value, negl_prob, *options)
        *ctx.mask, record = options
        if record:
            ctx.mark_non_differentiable(outputs[-1])
        ctx.save_for_backward(query, key, value, *(outputs[:-1] if record else outputs))
        ctx.set_materialize_grads(False)
        return tuple(outputs)

    @staticmethod
    def backward(
        ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None, *_: None
    ) -> tuple[Tensor | None, ...]:
        if grad_out is None and grad_lse is None:
            return (None,) * 9
        query, key, value, out, lse, *tile_bits = ctx.saved_tensors
        if grad_out is None:
            grad_out = torch.zeros_like(out)
        gradients = call_backward(
            grad_out,
            query,
            key,
            value,
            out,
            lse,
            tile_bits[0] if tile_bits else None,
            grad_lse,
            *ctx.mask,
        )
        return (*gradients, *(None,) * 6)


class _Backward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Gradients:
        return _kernels.backward(*map(_in_memory, arguments))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        raise NotImplementedError(
            "back_lite: attention has no second derivative. Differentiate once (without "
            "create_graph=True), or use torch's scaled_dot_product_attention with its math backend"
        )


_apply_attention: Callable[..., Any] = _Attention.apply
_apply_backward: Callable[..., Any] = _Backward.apply


def is_direct(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Return False: there is one way here."""
    return False


def _call_attention(
    is_direct: bool, needs_grad: bool, wants_lse: bool, *arguments: Any
) -> Sequence[Tensor]:
    return cast(tuple[Tensor, ...], _apply_attention(*arguments))


def call_backward(*arguments: Any) -> Gradients:
    """Run the backward, as a node that has no derivative."""
    return cast(Gradients, _apply_backward(*arguments))


# A graph break under torch.compile, in place of an attempt and a page of warnings.
call_attention: Callable[..., Sequence[Tensor]] = torch.compiler.disable(_call_attention)
