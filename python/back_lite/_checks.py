"""Argument checks. Each refusal is one message: the argument, its value, and what is accepted."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from numbers import Real

import torch
from torch import Tensor

from ._library import has_cuda

_DTYPES = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})
_CUDA_DTYPES = frozenset({torch.float16, torch.bfloat16})
_CUDA_HEAD_DIMS = (64, 128)
_MIN_HEAD_DIM = 8
_MAX_HEAD_DIM = 256
_HEAD_DIM_STEP = 8
_NOT_DETERMINISTIC = (
    "the gradient of attention on CUDA is summed in an order that changes from call to call"
)
# Farther than any length, so that sums with a length stay in 64 bits.
_WIDEST_WINDOW = 2**40


def check_inputs(
    query: Tensor, key: Tensor, value: Tensor, *, are_plain: bool = False
) -> tuple[torch.Size, torch.Size]:
    """Check query ``(B, Sq, H, D)`` and key and value ``(B, Sk, Hk, D)`` against each other.

    ``are_plain`` tells that all three are known to be dense tensors.

    Returns:
        query's and key's shape.

    Raises:
        TypeError: not a tensor, or a dtype that is not supported, or dtypes that differ.
        ValueError: a shape or layout that is not supported, or shapes that do not fit.
        NotImplementedError: a device for which this build has no backend, or what its backend
            does not serve.
    """
    # One pass without words; which of the conditions failed is looked up afterwards.
    if are_plain or (
        isinstance(query, Tensor)
        and isinstance(key, Tensor)
        and isinstance(value, Tensor)
        and not (query.is_nested or key.is_nested or value.is_nested)
    ):
        shape, key_shape, dtype = query.shape, key.shape, query.dtype
        if len(shape) == 4 and len(key_shape) == 4 and key_shape == value.shape:
            batch, _, heads, head_dim = shape
            key_batch, _, key_heads, key_head_dim = key_shape
            if (
                batch == key_batch
                and head_dim == key_head_dim
                and key_heads > 0
                and heads > 0
                and heads % key_heads == 0
                and key.dtype == dtype
                and value.dtype == dtype
                and (
                    _suit_cuda(dtype, head_dim, query, key, value)
                    if query.is_cuda
                    else _suit_cpu(dtype, head_dim, query, key, value)
                )
                and (are_plain or query.layout == key.layout == value.layout == torch.strided)
            ):
                return shape, key_shape
    raise _refusal(query, key, value)


def _suit_cpu(dtype: torch.dtype, head_dim: int, query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Tell whether all are on the CPU, of a dtype and head_dim that the CPU backend serves."""
    return (
        query.is_cpu
        and key.is_cpu
        and value.is_cpu
        and dtype in _DTYPES
        and _MIN_HEAD_DIM <= head_dim <= _MAX_HEAD_DIM
        and head_dim % _HEAD_DIM_STEP == 0
    )


def _suit_cuda(
    dtype: torch.dtype, head_dim: int, query: Tensor, key: Tensor, value: Tensor
) -> bool:
    """Tell whether all are on query's GPU, of a dtype and head_dim that the CUDA backend serves.

    Which GPU it is, the library checks.
    """
    return (
        has_cuda
        and head_dim in _CUDA_HEAD_DIMS
        and dtype in _CUDA_DTYPES
        and query.device == key.device == value.device
    )


def _device_refusal(name: str, tensor: Tensor, query: Tensor) -> Exception | None:
    device = tensor.device
    if device.type not in ("cpu", "cuda"):
        return NotImplementedError(f"{name}.device = {device}: accepted are CPU and CUDA tensors")
    if device.type == "cuda" and not has_cuda:
        return NotImplementedError(
            f"{name}.device = {device}: this build of back_lite has no CUDA backend (there was no "
            f"nvcc when it was built); accepted are CPU tensors ({name}.cpu())"
        )
    if device != query.device:
        return ValueError(f"{name}.device = {device}: accepted is query's, {query.device}")
    return None


def _refusal(query: Tensor, key: Tensor, value: Tensor) -> Exception:
    named = {"query": query, "key": key, "value": value}
    for name, tensor in named.items():
        if not isinstance(tensor, Tensor):
            return TypeError(f"{name} = {type(tensor).__name__}: accepted are tensors")
        if tensor.is_nested or tensor.layout != torch.strided:
            layout = "nested" if tensor.is_nested else tensor.layout
            return ValueError(f"{name}.layout = {layout}: accepted are dense (strided) tensors")
        if tensor.dtype not in _DTYPES:
            return TypeError(
                f"{name}.dtype = {tensor.dtype}: accepted are float16, bfloat16, float32, float64"
            )
        wrong_device = _device_refusal(name, tensor, query)
        if wrong_device is not None:
            return wrong_device
        if tensor.dim() != 4:
            return ValueError(
                f"{name}.shape = {tuple(tensor.shape)}: accepted are four dimensions, "
                "(batch, length, heads, head_dim)"
            )
    for name in ("key", "value"):
        if named[name].dtype != query.dtype:
            return TypeError(
                f"{name}.dtype = {named[name].dtype}: accepted is query's, {query.dtype}"
            )
    batch, _, num_heads, head_dim = query.shape
    if head_dim % _HEAD_DIM_STEP != 0 or not _MIN_HEAD_DIM <= head_dim <= _MAX_HEAD_DIM:
        return ValueError(
            f"head_dim = {head_dim} (last dimension of query): accepted are multiples of "
            f"{_HEAD_DIM_STEP} from {_MIN_HEAD_DIM} to {_MAX_HEAD_DIM}"
        )
    for name in ("key", "value"):
        shape = named[name].shape
        if shape[3] != head_dim:
            return ValueError(f"{name}.shape[3] = {shape[3]}: accepted is head_dim = {head_dim}")
        if shape[0] != batch:
            return ValueError(f"{name}.shape[0] = {shape[0]}: accepted is query's batch, {batch}")
    if key.shape != value.shape:
        return ValueError(
            f"value.shape = {tuple(value.shape)}: accepted is key's, {tuple(key.shape)}"
        )
    num_key_heads = key.shape[2]
    if num_heads < 1 or num_key_heads < 1 or num_heads % num_key_heads != 0:
        return ValueError(
            f"key.shape[2] = {num_key_heads} key heads: accepted are divisors of the "
            f"{num_heads} query heads, and at least one head of each"
        )
    if query.dtype not in _CUDA_DTYPES:
        return NotImplementedError(
            f"query.dtype = {query.dtype}: accepted on CUDA are float16 and bfloat16 (inside "
            "torch.autocast, float32 is cast); on the CPU also float32 and float64"
        )
    if head_dim not in _CUDA_HEAD_DIMS:
        return NotImplementedError(
            f"head_dim = {head_dim} (last dimension of query): accepted on CUDA are 64 and 128; on "
            "the CPU, multiples of 8 from 8 to 256"
        )
    raise AssertionError("a condition of check_inputs has no words")


def check_window(window_size: Sequence[int]) -> tuple[int, int]:
    """Return ``(left, right)``; each is -1 (unlimited) or more.

    Raises:
        TypeError: not a pair of ints.
        ValueError: one of them is below -1.
    """
    if isinstance(window_size, (tuple, list)) and len(window_size) == 2:
        left, right = window_size
        if isinstance(left, int) and isinstance(right, int):
            if left < -1 or right < -1:
                raise ValueError(
                    f"window_size = {tuple(window_size)}: accepted are a pair of ints "
                    "(left, right), each from 0, or -1 for unlimited"
                )
            if left > _WIDEST_WINDOW or right > _WIDEST_WINDOW:
                left, right = min(left, _WIDEST_WINDOW), min(right, _WIDEST_WINDOW)
            return left, right
    raise TypeError(f"window_size = {window_size!r}: accepted is a pair of ints (left, right)")


def check_scale(scale: float | None) -> float | None:
    """Return the scale as a float; None stays None.

    Raises:
        TypeError: not a number.
        ValueError: infinite or NaN.
    """
    if scale is None:
        return None
    if not isinstance(scale, float):
        if not isinstance(scale, Real) or isinstance(scale, bool):
            raise TypeError(f"scale = {scale!r}: accepted are finite numbers, and None")
        try:
            scale = float(scale)
        except OverflowError:
            scale = math.inf
    if not abs(scale) < math.inf:  # NaN fails as well
        raise ValueError(f"scale = {scale}: accepted are finite numbers")
    return scale


def check_flag(name: str, value: bool) -> None:
    """Raise TypeError unless the value is a bool."""
    if value is not True and value is not False:
        raise TypeError(f"{name} = {value!r}: accepted are True and False")


def check_options(
    scale: float | None,
    causal: bool,
    window_size: Sequence[int],
    deterministic: bool | None,
) -> tuple[float | None, tuple[int, int]]:
    """Check the options of a call, and return scale and window in the form that operators take.

    Of ``deterministic`` only the type; see :func:`check_deterministic`.

    Raises:
        TypeError, ValueError: an option is not one of those that are accepted.
    """
    if scale is not None:
        scale = check_scale(scale)
    if causal is not True and causal is not False:
        check_flag("causal", causal)
    if deterministic is not None and deterministic is not True and deterministic is not False:
        raise TypeError(f"deterministic = {deterministic!r}: accepted are True, False and None")
    return scale, check_window(window_size)


def check_deterministic(deterministic: bool | None, may_warn: bool) -> None:
    """Refuse a deterministic gradient on CUDA; the CPU repeats its results bit by bit.

    Under torch's ``warn_only``, warn instead if ``may_warn`` (compiled code cannot).

    Raises:
        NotImplementedError: it is asked for, here or by ``torch.use_deterministic_algorithms``.
    """
    if deterministic is None:
        if not torch.are_deterministic_algorithms_enabled():
            return
        if torch.is_deterministic_algorithms_warn_only_enabled():
            if may_warn:
                warnings.warn(f"back_lite: {_NOT_DETERMINISTIC}", stacklevel=4)
            return
        asked = "torch.use_deterministic_algorithms(True)"
    elif deterministic:
        asked = "deterministic = True"
    else:
        return
    raise NotImplementedError(
        f"{asked}: {_NOT_DETERMINISTIC}; accepted are deterministic=False, warn_only=True, tensors "
        "on the CPU, and inputs that need no gradient"
    )


def check_tensor(
    name: str, tensor: Tensor, dtype: torch.dtype, shape: tuple[int, ...], device: torch.device
) -> None:
    """Check a tensor whose dtype, shape and device follow from the others.

    Raises:
        TypeError: not a tensor, or another dtype.
        ValueError: another shape, device or layout.
    """
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name} = {type(tensor).__name__}: accepted is a tensor")
    if tensor.dtype != dtype:
        raise TypeError(f"{name}.dtype = {tensor.dtype}: accepted is {dtype}")
    if tensor.layout != torch.strided or tensor.is_nested:
        raise ValueError(f"{name}.layout = {tensor.layout}: accepted are dense (strided) tensors")
    if tuple(tensor.shape) != shape:
        raise ValueError(f"{name}.shape = {tuple(tensor.shape)}: accepted is {shape}")
    if tensor.device != device:
        raise ValueError(f"{name}.device = {tensor.device}: accepted is query's, {device}")


def check_tile_stats(tile_stats: Tensor, shape: tuple[int, ...], device: torch.device) -> None:
    """Check a buffer that is to receive tile statistics.

    Raises:
        TypeError: not a tensor, or not float32.
        ValueError: another shape or device, not contiguous, or part of an autograd graph.
    """
    check_tensor("tile_stats", tile_stats, torch.float32, shape, device)
    if not tile_stats.is_contiguous():
        raise ValueError(
            f"tile_stats.stride() = {tile_stats.stride()}: accepted is a contiguous tensor"
        )
    if tile_stats.requires_grad:
        raise ValueError("tile_stats.requires_grad = True: accepted is a plain buffer (False)")
