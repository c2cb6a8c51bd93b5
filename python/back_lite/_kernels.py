"""The operators on plain tensors: allocation, copies that the library needs, and the call."""

from __future__ import annotations

import torch
from torch import Tensor

from . import _library, _thresholds
from .tiles import grid_shape, tile_bits_shape, words_per_head

Gradients = tuple[Tensor, Tensor, Tensor]

_FLOAT32, _FLOAT64, _INT32 = torch.float32, torch.float64, torch.int32


def lse_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return float64 for float64 (a float32 LSE would cap its gradients at 1e-7), else float32."""
    return _FLOAT64 if dtype is _FLOAT64 else _FLOAT32


def _empty_like(tensor: Tensor) -> Tensor:
    return torch.empty_like(tensor, memory_format=torch.contiguous_format)


def _rows(tensor: Tensor) -> Tensor:
    """Return the tensor, copied if its rows are not runs of memory apart from each other.

    Not worth a call (0.2 us) for a tensor that is contiguous.
    """
    _, length_stride, _, last_stride = tensor.stride()
    if last_stride == 1 and (length_stride >= tensor.shape[3] or length_stride == 0):
        return tensor
    return tensor.contiguous()


def _are_mappable(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Tell of the usual case that _mappable takes all three as they are; two thirds of its time."""
    return (
        query.is_contiguous()
        and key.is_contiguous()
        and value.is_contiguous()
        and (query.data_ptr() | key.data_ptr() | value.data_ptr()) % 16 == 0
    )


def _mappable(tensor: Tensor) -> Tensor:
    """Return the CUDA tensor, copied if the GPU's copy engine cannot take it as it is.

    It takes addresses and strides that are multiples of 16 bytes, 8 elements. The stride of a
    dimension of size 1 means nothing.
    """
    if tensor.data_ptr() % 16 == 0:
        if tensor.is_contiguous():
            return tensor
        batch, length, heads, head_dim = tensor.shape
        batch_stride, length_stride, head_stride, last_stride = tensor.stride()
        if (
            last_stride == 1
            and (length == 1 or (length_stride % 8 == 0 and length_stride >= head_dim))
            and (heads == 1 or (head_stride % 8 == 0 and head_stride > 0))
            and (batch == 1 or (batch_stride % 8 == 0 and batch_stride > 0))
        ):
            return tensor
    return tensor.clone(memory_format=torch.contiguous_format)


def _is_elsewhere(tensor: Tensor) -> bool:
    """Tell whether the CUDA tensor is on a GPU that is not the current one."""
    return tensor.get_device() != torch._C._cuda_getDevice()


# From torch 2.10 on, or with torch-c-dlpack-ext, the library itself reaches torch's allocator.
_library_allocates = hasattr(torch.Tensor, "__dlpack_c_exchange_api__")


def _scratch(size: int, like: Tensor) -> Tensor:
    """Take `size` bytes for the time of one call from torch's allocator."""
    return like.new_empty(size, dtype=torch.uint8)


def allocate_outputs(query: Tensor, key: Tensor, selects: bool, record: bool) -> list[Tensor]:
    """Allocate out and LSE, then tile bits if selecting, then tile statistics if recording.

    Also what a fake (shape-only) call returns. The tile bits have one dimension, the words of
    ``(B, H, Tn, ceil(Tm / 32))``: torch.compile asks whether they are contiguous, and would compile
    again where one of four dimensions becomes 1 (from 129 keys to 128, from 2049 queries to 2048).
    """
    batch, query_length, num_heads, _ = query.shape
    outputs = [
        _empty_like(query),
        query.new_empty(batch, num_heads, query_length, dtype=lse_dtype(query.dtype)),
    ]
    if selects:
        words = batch * num_heads * words_per_head(query_length, key.shape[1])
        outputs.append(query.new_empty(words, dtype=_INT32))
    if record:
        grid = grid_shape(query_length, key.shape[1])
        outputs.append(query.new_empty(batch, num_heads, *grid, dtype=_FLOAT32))
    return outputs


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    negl_prob: Tensor | None,
    scale: float | None,
    causal: bool,
    window_left: int,
    window_right: int,
    record: bool,
    wants_lse: bool = True,
) -> list[Tensor]:
    """Run the forward, and the selection where ``negl_prob`` is given; see allocate_outputs.

    Where nothing but out is wanted, that is all: the LSE takes 6 us, most of it torch's allocation.
    """
    selects = negl_prob is not None
    scratch = None
    if query.is_cpu:
        query = query if query.is_contiguous() else _rows(query)
        key = key if key.is_contiguous() else _rows(key)
        value = value if value.is_contiguous() else _rows(value)
    elif _is_elsewhere(query):
        with torch.cuda.device(query.device):
            return attention(
                query,
                key,
                value,
                negl_prob,
                scale,
                causal,
                window_left,
                window_right,
                record,
                wants_lse,
            )
    else:
        if negl_prob is not None:
            _thresholds.check_cuda_table(negl_prob, query.shape[2])
        if not _are_mappable(query, key, value):
            query, key, value = _mappable(query), _mappable(key), _mappable(value)
        if not _library_allocates:
            scratch = _scratch(_library.forward_scratch_bytes(query, key, selects, record), query)
    lse: Tensor | None = None
    if wants_lse or selects or record:
        outputs = allocate_outputs(query, key, selects, record)
        lse = outputs[1]
    else:
        outputs = [_empty_like(query)]
    _library.forward(
        query,
        key,
        value,
        outputs[0],
        lse,
        outputs[-1] if record else None,
        negl_prob,
        outputs[2] if selects else None,
        scratch,
        scale,
        causal,
        window_left,
        window_right,
        torch.get_num_threads(),
    )
    return outputs


def allocate_tile_bits(tile_stats: Tensor, query_length: int, key_length: int) -> Tensor:
    """Allocate the tile bits of a selection. Also what a fake call returns."""
    batch, num_heads, _, _ = tile_stats.shape
    shape = tile_bits_shape(batch, num_heads, query_length, key_length)
    return tile_stats.new_empty(shape, dtype=_INT32)


def select(
    tile_stats: Tensor,
    negl_prob: Tensor,
    query_length: int,
    key_length: int,
    causal: bool,
    window_left: int,
    window_right: int,
) -> Tensor:
    """Run the selection."""
    if not tile_stats.is_cpu and _is_elsewhere(tile_stats):
        with torch.cuda.device(tile_stats.device):
            return select(
                tile_stats, negl_prob, query_length, key_length, causal, window_left, window_right
            )
    tile_bits = allocate_tile_bits(tile_stats, query_length, key_length)
    _library.select(
        tile_stats.contiguous(),
        negl_prob.contiguous(),
        tile_bits,
        query_length,
        key_length,
        causal,
        window_left,
        window_right,
        torch.get_num_threads(),
    )
    return tile_bits


def allocate_gradients(query: Tensor, key: Tensor, value: Tensor) -> Gradients:
    """Allocate the three gradients. Also what a fake call returns."""
    return _empty_like(query), _empty_like(key), _empty_like(value)


def backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    tile_bits: Tensor | None,
    grad_lse: Tensor | None,
    scale: float | None,
    causal: bool,
    window_left: int,
    window_right: int,
) -> Gradients:
    """Run the schedule and the backward."""
    if not query.is_cpu and _is_elsewhere(query):
        mask = (causal, window_left, window_right)
        with torch.cuda.device(query.device):
            return backward(
                grad_out, query, key, value, out, lse, tile_bits, grad_lse, scale, *mask
            )
    gradients = allocate_gradients(query, key, value)
    scratch = None
    if query.is_cpu:
        grad_out = grad_out if grad_out.is_contiguous() else _rows(grad_out)
        query = query if query.is_contiguous() else _rows(query)
        key = key if key.is_contiguous() else _rows(key)
        value = value if value.is_contiguous() else _rows(value)
        out = out if out.is_contiguous() else _rows(out)
    else:
        grad_out, out = _mappable(grad_out), _mappable(out)
        query, key, value = _mappable(query), _mappable(key), _mappable(value)
        if not _library_allocates:
            scratch = _scratch(_library.backward_scratch_bytes(query, key), query)
    _library.backward(
        grad_out,
        query,
        key,
        value,
        out,
        lse.contiguous(),
        None if grad_lse is None else grad_lse.contiguous(),
        None if tile_bits is None else tile_bits.contiguous(),
        *gradients,
        scratch,
        scale,
        causal,
        window_left,
        window_right,
        torch.get_num_threads(),
    )
    return gradients
