"""The operators ``torch.ops.back_lite.*`` (torch 2.4 or newer): schema, kernel, fake, autograd.

Autograd is a kernel of our own under the dispatch key ``Autograd`` and not
``torch.library.register_autograd``: the same thing, at half the host time of a call (29 us against
56 us with empty kernels, torch 2.13, where 13 us are the floor of any autograd.Function).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch._functorch.utils import enable_single_level_autograd_function
from torch.autograd import forward_ad
from torch.autograd.function import _SingleLevelFunction
from torch.utils.flop_counter import register_flop_formula

from . import _kernels
from ._kernels import Gradients

_registry = torch.library.Library("back_lite", "DEF")
_TAGS = (torch.Tag.pt2_compliant_tag,)
_OPTIONS = "float? scale, bool causal, int window_left, int window_right"
# out, lse; tile bits if negl_prob is given; tile statistics if recorded. A list, because every
# output costs 3 us of host time, needed or not.
_registry.define(
    "attention(Tensor query, Tensor key, Tensor value, Tensor? negl_prob, "
    f"{_OPTIONS}, bool record) -> Tensor[]",
    tags=_TAGS,
)
_registry.define(
    "select(Tensor tile_stats, Tensor negl_prob, SymInt query_length, SymInt key_length, "
    "bool causal, int window_left, int window_right) -> Tensor",
    tags=_TAGS,
)
_registry.define(
    "backward(Tensor grad_out, Tensor query, Tensor key, Tensor value, Tensor out, Tensor lse, "
    f"Tensor? tile_bits, Tensor? grad_lse, {_OPTIONS}) -> (Tensor, Tensor, Tensor)",
    tags=_TAGS,
)
attention = torch.ops.back_lite.attention.default
select = torch.ops.back_lite.select.default
backward = torch.ops.back_lite.backward.default

for _key in ("CPU", "CUDA"):
    _registry.impl("attention", _kernels.attention, _key)
    _registry.impl("select", _kernels.select, _key)
    _registry.impl("backward", _kernels.backward, _key)


def _fake_attention(
    query: Tensor, key: Tensor, value: Tensor, negl_prob: Tensor | None, *options: Any
) -> list[Tensor]:
    return _kernels.allocate_outputs(query, key, negl_prob is not None, record=options[-1])


def _fake_select(
    tile_stats: Tensor, negl_prob: Tensor, query_length: int, key_length: int, *options: Any
) -> Tensor:
    return _kernels.allocate_tile_bits(tile_stats, query_length, key_length)


def _fake_backward(
    grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, *options: Any
) -> Gradients:
    return _kernels.allocate_gradients(query, key, value)


torch.library.register_fake("back_lite::attention", _fake_attention, lib=_registry)
torch.library.register_fake("back_lite::select", _fake_select, lib=_registry)
torch.library.register_fake("back_lite::backward", _fake_backward, lib=_registry)


# For torch.utils.flop_counter, as it counts torch's own attention: every pair of a query and a key,
# masked or skipped as well, two products in the forward and five in the backward.


def _product_flops(query: Sequence[int], key: Sequence[int]) -> int:
    batch, query_length, num_heads, head_dim = query
    return 2 * batch * num_heads * query_length * key[1] * head_dim


@register_flop_formula(torch.ops.back_lite.attention)
def _attention_flops(query: Sequence[int], key: Sequence[int], *_: Any, **__: Any) -> int:
    return 2 * _product_flops(query, key)


@register_flop_formula(torch.ops.back_lite.backward)
def _backward_flops(_: Any, query: Sequence[int], key: Sequence[int], *__: Any, **___: Any) -> int:
    return 5 * _product_flops(query, key)


is_compiling = torch.compiler.is_compiling


def autocast_dtype(device_type: str) -> torch.dtype | None:
    """Return the dtype that autocast computes in on a kind of device; None outside autocast."""
    enabled = torch.is_autocast_enabled(device_type)
    return torch.get_autocast_dtype(device_type) if enabled else None


_below_autograd = torch._C._AutoDispatchBelowAutograd
_after_autograd_keyset = torch._C._after_autograd_keyset
_cpu_keyset = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
_cuda_keyset = torch._C.DispatchKeySet(torch._C.DispatchKey.CUDA)


def _redispatch(operator: Any, keyset: torch._C.DispatchKeySet, arguments: tuple[Any, ...]) -> Any:
    with _below_autograd():
        return operator.redispatch(keyset, *arguments)


def _nested_redispatch(
    operator: Any, keyset: torch._C.DispatchKeySet, arguments: tuple[Any, ...]
) -> Any:
    """Redispatch from within an autograd.Function, which has switched gradients off.

    An outer transform of torch.func sees the call from below, and still wants its gradient.
    """
    if torch._C._are_functorch_transforms_active():
        with torch.enable_grad(), forward_ad._set_fwd_grad_enabled(True):
            return _redispatch(operator, keyset, arguments)
    return _redispatch(operator, keyset, arguments)


class _Function(_SingleLevelFunction):
    """An autograd.Function that does not go back into the dispatcher: torch.func's own base class.

    Only callers above the dispatcher need that. In torch before 2.14 apply saves 3 us, too.
    """

    @staticmethod
    def _compiled_autograd_key(ctx: Any) -> tuple[Any, ...]:
        """Do as autograd.Function does, for torch._dynamo.config.compiled_autograd."""
        return (ctx._autograd_function_id,)


_C = torch._C
_autograd_key = _C.DispatchKey.AutogradFunctionality
_is_profiling = _C._autograd._profiler_enabled


def _plain_keysets(backend: str) -> tuple[_C.DispatchKeySet, ...]:
    """Return the dispatch keys of a tensor that is only memory, and of one of inference mode."""
    keys = [
        _C.DispatchKeySet(getattr(_C.DispatchKey, name))
        for name in (backend, f"Autocast{backend}", f"Autograd{backend}", "ADInplaceOrView")
    ]
    inference = keys[0] | keys[1]
    return inference | keys[2] | keys[3], inference


_dispatch_keys = _C._dispatch_keys
_PLAIN_KEYSETS = _plain_keysets("CUDA") + _plain_keysets("CPU")


def is_plain(tensor: Tensor) -> bool:
    """Tell whether a kernel may read the tensor's memory as it is.

    Not so where torch keeps a sign to be changed, zeros without memory, a batch that is mapped
    over, another layout or a subclass: 0.4 us. False where torch (2.4) does not compare keys: the
    dispatcher is always right, and slower.
    """
    return type(tensor) is Tensor and _dispatch_keys(tensor) in _PLAIN_KEYSETS


def _needs_dispatcher(*tensors: Tensor | None) -> bool:
    """Tell whether something between an operator and its kernel wants to see a call."""
    for tensor in tensors:
        if tensor is not None and not is_plain(tensor):
            return True
    return (
        _C._len_torch_dispatch_stack() > 0
        or _C._len_torch_function_stack() > 0
        or _C._are_functorch_transforms_active()
        or _C._get_tracing_state() is not None
        or _C._dispatch_tls_is_dispatch_key_excluded(_autograd_key)
        or forward_ad._current_level >= 0
        or _is_profiling()
    )


class _Attention(_Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        keyset: torch._C.DispatchKeySet | None,
        options: tuple[Any, ...],
    ) -> tuple[Tensor, ...]:
        if keyset is None:
            outputs = _kernels.attention(query, key, value, *options)
        else:
            outputs = _nested_redispatch(attention, keyset, (query, key, value, *options))
        ctx.options = options
        if options[-1]:  # tile statistics, recorded last
            ctx.mark_non_differentiable(outputs[-1])
            ctx.save_for_backward(query, key, value, *outputs[:-1])
        else:
            ctx.save_for_backward(query, key, value, *outputs)
        ctx.set_materialize_grads(False)
        return tuple(outputs)

    @staticmethod
    def backward(
        ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None, *_: None
    ) -> tuple[Tensor | None, ...]:
        if grad_out is None and grad_lse is None:
            return (None,) * 5
        query, key, value, out, lse, *tile_bits = ctx.saved_tensors
        if grad_out is None:
            grad_out = torch.zeros_like(out)
        mask = ctx.options[1:-1]
        bits = tile_bits[0] if tile_bits else None
        arguments = (grad_out, query, key, value, out, lse, bits, grad_lse, *mask)
        if torch.is_grad_enabled() or is_compiling():  # create_graph=True, or compiled autograd
            return (*backward(*arguments), None, None)
        if not _needs_dispatcher(*arguments[:8]):  # 6 us less
            return (*_kernels.backward(*arguments), None, None)
        with _below_autograd():
            return (*backward(*arguments), None, None)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        raise NotImplementedError(
            "back_lite: attention has no forward-mode derivative (jvp); use reverse mode"
        )


_apply_attention: Callable[..., Any] = cast(Any, _Attention).apply


def _apply(function: Callable[..., Any], *arguments: Any) -> Any:
    if torch._C._are_functorch_transforms_active():
        # Here, below the dispatcher, one level of torch.func's transforms is at work at a time.
        with enable_single_level_autograd_function():
            return function(*arguments)
    return function(*arguments)


def _attention_autograd(
    keyset: torch._C.DispatchKeySet,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *options: Any,
) -> Sequence[Tensor]:
    rest = keyset & _after_autograd_keyset
    # The usual case: spare another trip through the dispatcher.
    is_plain = rest in (_cpu_keyset, _cuda_keyset)
    outputs: Sequence[Tensor]
    if (
        torch.is_grad_enabled()
        and (query.requires_grad or key.requires_grad or value.requires_grad)
    ) or forward_ad._current_level >= 0:  # a forward-mode tangent raises in apply
        if is_plain:
            outputs = _apply_attention(query, key, value, None, options)
        else:
            outputs = _apply(_apply_attention, query, key, value, rest, options)
    elif is_plain:
        outputs = _kernels.attention(query, key, value, *options)
    else:
        outputs = _redispatch(attention, rest, (query, key, value, *options))
    return outputs


_registry.impl("attention", _attention_autograd, "Autograd", with_keyset=True)


def is_direct(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Tell whether an eager call is on plain tensors, and may do without the dispatcher."""
    return not _needs_dispatcher(query, key, value)


def call_attention(
    is_direct: bool,
    needs_grad: bool,
    wants_lse: bool,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    negl_prob: Tensor | None,
    scale: float | None,
    causal: bool,
    window_left: int,
    window_right: int,
    record: bool,
) -> Sequence[Tensor]:
    """Do what the operator does, without the dispatcher where that makes no difference: 4 us less.

    ``is_direct`` is that of the three tensors; ``needs_grad`` tells whether gradients are on and
    one of the three needs one. Without ``wants_lse`` the LSE may be missing, if out is alone.
    """
    options = (negl_prob, scale, causal, window_left, window_right, record)
    outputs: Sequence[Tensor]  # not a cast of the results: torch 2.4 does not compile one
    if not is_direct or (negl_prob is not None and not is_plain(negl_prob)):
        outputs = attention(query, key, value, *options)
    elif needs_grad:
        outputs = _apply_attention(query, key, value, None, options)
    else:
        outputs = _kernels.attention(query, key, value, *options, wants_lse)
    return outputs


def call_select(tile_stats: Tensor, negl_prob: Tensor, *options: Any) -> Tensor:
    """Do what the operator does, without the dispatcher where that makes no difference."""
    tile_bits: Tensor  # not a cast, as in call_attention
    if is_compiling() or _needs_dispatcher(tile_stats, negl_prob):
        tile_bits = select(tile_stats, negl_prob, *options)
    else:
        tile_bits = _kernels.select(tile_stats, negl_prob, *options)
    return tile_bits


def call_backward(*arguments: Any) -> Gradients:
    """Do what the operator does, without the dispatcher where that makes no difference.

    With gradients switched on, the results are of a node that tells that it has no derivative.
    """
    gradients: Gradients
    if is_compiling() or torch.is_grad_enabled() or _needs_dispatcher(*arguments[:8]):
        gradients = backward(*arguments)
    else:
        gradients = _kernels.backward(*arguments)
    return gradients


class _Backward(_Function):
    """The first derivative, as a node whose own backward explains that there is none."""

    @staticmethod
    def forward(ctx: Any, keyset: torch._C.DispatchKeySet, *arguments: Any) -> Gradients:
        rest = keyset & _after_autograd_keyset
        return cast(Gradients, _nested_redispatch(backward, rest, arguments))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        raise NotImplementedError(
            "back_lite: attention has no second derivative. Differentiate once (without "
            "create_graph=True), or use torch's scaled_dot_product_attention with its math backend"
        )


_apply_backward: Callable[..., Any] = cast(Any, _Backward).apply


def _backward_autograd(keyset: torch._C.DispatchKeySet, *arguments: Any) -> Gradients:
    return cast(Gradients, _apply(_apply_backward, keyset, *arguments))


_registry.impl("backward", _backward_autograd, "Autograd", with_keyset=True)


# Rules for torch.func.vmap: the mapped dimension becomes part of the batch.


def _fold(tensor: Tensor | None, dim: int | None, size: int) -> Tensor | None:
    if tensor is None:
        return None
    tensor = tensor.expand(size, *tensor.shape) if dim is None else tensor.movedim(dim, 0)
    if size == 0:  # one stands for what none would return
        return tensor.new_zeros(tensor.shape[1:])
    return tensor.flatten(0, 1)


def _unfold(tensors: Sequence[Tensor], size: int) -> list[Tensor]:
    if size == 0:
        return [tensor.new_empty(0, *tensor.shape) for tensor in tensors]
    return [tensor.reshape(size, tensor.shape[0] // size, *tensor.shape[1:]) for tensor in tensors]


def _vmap(
    operator: Callable[..., Any], num_folded: int, info: Any, in_dims: Any, *arguments: Any
) -> tuple[list[Tensor], list[int]]:
    if any(dim is not None for dim in in_dims[num_folded:]):
        raise NotImplementedError("negl_prob is mapped over: accepted is one for all calls")
    size = info.batch_size
    folded = (_fold(arguments[i], in_dims[i], size) for i in range(num_folded))
    results = _unfold(operator(*folded, *arguments[num_folded:]), size)
    return results, [0] * len(results)


def _vmap_select(info: Any, in_dims: Any, *arguments: Any) -> tuple[Tensor, int]:
    (bits,), _ = _vmap(lambda *folded: [select(*folded)], 1, info, in_dims, *arguments)
    return bits, 0


if hasattr(torch.library, "register_vmap"):  # torch 2.5
    torch.library.register_vmap(
        "back_lite::attention", functools.partial(_vmap, attention, 3), lib=_registry
    )
    torch.library.register_vmap("back_lite::select", _vmap_select, lib=_registry)
    torch.library.register_vmap(
        "back_lite::backward", functools.partial(_vmap, backward, 8), lib=_registry
    )
