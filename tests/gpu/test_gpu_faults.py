"""The rows of tests/python/test_faults.py that a GPU can show, on poisoned memory."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import back_lite
import cases
import comparer
import hopper
import oracle
import pytest
import torch
from back_lite import attention, ops, reference
from cases import Case, Inputs
from test_faults import LAYOUTS, NEGL_PROBS
from torch import Tensor

pytestmark = pytest.mark.usefixtures("poisoned")
BF16 = torch.bfloat16


@pytest.mark.parametrize("negl_prob", NEGL_PROBS)
@pytest.mark.parametrize("head_dim", cases.HOPPER_HEAD_DIMS)
@pytest.mark.parametrize("gain", [3.0, 10.0])
def test_row01_nan_in_backward_of_large_fp16(
    gain: float, head_dim: int, negl_prob: float, device: str
) -> None:
    case = Case(1024, 1024, head_dim, 8, 8, batch=2, dtype=torch.float16, causal=True, gain=gain)
    got = hopper.check(case, case.inputs(device), negl_prob)
    assert all(t.isfinite().all() for t in got)


@pytest.mark.parametrize("negl_prob", NEGL_PROBS)
def test_row02_one_query_row(negl_prob: float, device: str) -> None:
    case = Case(1, 17, dtype=torch.float16)
    hopper.check(case, case.inputs(device), negl_prob)


@pytest.mark.parametrize("negl_prob", NEGL_PROBS)
@pytest.mark.parametrize("dtype", cases.HOPPER_DTYPES)
def test_row04_rows_that_see_no_key(dtype: torch.dtype, negl_prob: float, device: str) -> None:
    case = Case(256, 128, causal=True, dtype=dtype, lse_grad=True)
    inputs = case.inputs(device)
    got = hopper.check(case, inputs, negl_prob)
    assert (got.out[:, :128] == 0.0).all()
    assert (got.lse[..., :128] == -math.inf).all()
    assert (got.grad_query[:, :128] == 0.0).all()
    live, stats = oracle.live_tiles(case, inputs, 0.05)
    assert stats.isfinite().all()
    assert live[0, 0].flatten().tolist() == [False, False, True, True]


@pytest.mark.parametrize("negl_prob", NEGL_PROBS)
@pytest.mark.parametrize("poison", [-math.inf, math.inf, math.nan])
def test_row04_gradient_into_minus_infinity(poison: float, negl_prob: float, device: str) -> None:
    case = Case(200, 70, causal=True, lse_grad=True, dtype=BF16)
    inputs = case.inputs(device)
    assert inputs.grad_lse is not None
    clean = hopper.library(case, inputs, negl_prob)
    poisoned_grad = inputs.grad_lse.clone()
    poisoned_grad[..., :130] = poison
    hopper.assert_alike(
        clean, hopper.library(case, inputs._replace(grad_lse=poisoned_grad), negl_prob)
    )


@pytest.mark.parametrize("negl_prob", [0.0, 0.1])
@pytest.mark.parametrize("lengths", [(0, 100), (100, 0), (0, 0)])
def test_row07_zero_length(lengths: tuple[int, int], negl_prob: float, device: str) -> None:
    case = Case(*lengths, causal=True, num_heads=4, lse_grad=True, dtype=BF16)
    got = hopper.check(case, case.inputs(device), negl_prob)
    if lengths == (100, 0):
        assert (got.out == 0.0).all()
        assert (got.lse == -math.inf).all()
        assert (got.grad_query == 0.0).all()
    if lengths == (0, 100):
        assert not got.grad_key.any()
        assert not got.grad_value.any()


@pytest.mark.parametrize("negl_prob", [0.0, 0.1])
def test_row08_batch_zero(negl_prob: float, device: str) -> None:
    case = Case(128, 128, 128, 8, 8, batch=0, dtype=BF16)
    hopper.check(case, case.inputs(device), negl_prob)


@pytest.mark.parametrize("negl_prob", NEGL_PROBS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_row11_strides_read_as_contiguous(
    layout: Callable[[Tensor], Tensor], negl_prob: float, device: str
) -> None:
    case = Case(130, 200, 128, 4, 2, batch=2, causal=True, dtype=BF16)
    inputs = case.inputs(device)
    contiguous = hopper.library(case, inputs, negl_prob)
    for which in [{0}, {1}, {2}, {3}, {0, 1, 2, 3}]:
        strided = [layout(t) if i in which else t for i, t in enumerate(inputs[:4])]
        hopper.assert_alike(contiguous, hopper.library(case, Inputs(*strided, None), negl_prob))


@pytest.mark.parametrize("negl_prob", NEGL_PROBS)
def test_row11_expanded_tensors(negl_prob: float, device: str) -> None:
    """out.sum() sends a gradient whose strides are all 0; keys may be expanded over heads."""
    case = Case(130, 200, 64, 4, 4, batch=2, dtype=BF16)
    inputs = case.inputs(device)
    ones = torch.ones((), dtype=BF16, device=device).expand(inputs.query.shape)
    key, value = (t[:, :, :1].expand(t.shape) for t in inputs[1:3])
    expanded = Inputs(inputs.query, key, value, ones, None)
    contiguous = Inputs(*(t.contiguous() for t in expanded[:4]), None)
    hopper.assert_alike(
        hopper.library(case, expanded, negl_prob), hopper.library(case, contiguous, negl_prob)
    )


def test_row11_strides_of_dimensions_of_size_one(device: str) -> None:
    case = Case(1, 200, 64, 1, 1, dtype=BF16)
    q, *others = inputs = case.inputs(device)
    odd = q.as_strided(q.shape, (7, 3, 5, 1))
    hopper.assert_alike(hopper.library(case, inputs), hopper.library(case, Inputs(odd, *others)))


@pytest.mark.parametrize("head_dim", [8, 72, 96, 256])
def test_row15_head_dims_that_are_not_served(head_dim: int, device: str) -> None:
    q = torch.randn(1, 8, 2, head_dim, device=device, dtype=BF16)
    with pytest.raises(NotImplementedError, match=rf"head_dim = {head_dim}.*CUDA are 64 and 128"):
        attention(q, q, q)
    with pytest.raises(ValueError, match=r"head_dim.*100"):
        attention(*[torch.randn(1, 8, 2, 100, device=device, dtype=BF16)] * 3)


@pytest.mark.parametrize("negl_prob", NEGL_PROBS)
@pytest.mark.parametrize("length", [1, 100, 127, 129, 333])
def test_row21_odd_lengths_with_grouped_heads(length: int, negl_prob: float, device: str) -> None:
    case = Case(length, length + 3, 64, 10, 2, causal=True, topics=True, dtype=BF16)
    hopper.check(case, case.inputs(device), negl_prob)


def test_row25_deterministic_is_refused_not_ignored(device: str) -> None:
    torch.use_deterministic_algorithms(False)
    case = Case(70, 130, dtype=BF16)
    inputs = case.inputs(device)
    with pytest.raises(NotImplementedError, match=r"deterministic = True"):
        oracle.library(case, inputs, deterministic=True)
    attention(*inputs[:3], deterministic=True)  # no gradient is wanted
    torch.use_deterministic_algorithms(True)
    with pytest.raises(NotImplementedError, match="use_deterministic_algorithms"):
        oracle.library(case, inputs)
    oracle.library(case, inputs, deterministic=False)
    torch.use_deterministic_algorithms(True, warn_only=True)
    with pytest.warns(UserWarning, match="order that changes"):
        oracle.library(case, inputs)


@pytest.mark.parametrize("dtype", cases.HOPPER_DTYPES)
def test_row30_odd_storage_offset(dtype: torch.dtype, device: str) -> None:
    case = Case(130, 200, dtype=dtype, lse_grad=True)
    inputs = case.inputs(device)
    aligned = hopper.library(case, inputs, 0.05)
    hopper.assert_alike(aligned, hopper.library(case, inputs.one_element_in(), 0.05))


def test_row34_hang_with_window_and_odd_length(device: str) -> None:
    case = Case(1000, 1000, window_size=(17, 0), dtype=BF16)
    for negl_prob in NEGL_PROBS:
        hopper.check(case, case.inputs(device), negl_prob)


@pytest.mark.parametrize("lengths", [(200, 200), (130, 333), (333, 130)])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window_size", [(-1, -1), *cases.WINDOWS, (0, -1), (-1, 5), (5, 5)])
def test_row35_window_off_by_one(
    window_size: tuple[int, int], causal: bool, lengths: tuple[int, int], device: str
) -> None:
    case = Case(*lengths, causal=causal, window_size=window_size, dtype=BF16)
    inputs = case.inputs(device)
    truth = oracle.truth(case, inputs)
    for negl_prob in (0.0, 1e-6):
        got = hopper.library(case, inputs, negl_prob)
        comparer.check_results(case, inputs, got, truth=truth)


def _backward_ms(case: Case, bits: Tensor | None = None) -> float:
    torch.use_deterministic_algorithms(False)
    q, k, v, grad_out, _ = case.inputs("cuda")
    out, lse, _ = ops.forward(q, k, v, **case.options)
    return hopper.milliseconds(
        lambda: ops.backward(grad_out, q, k, v, out, lse, bits, **case.options)
    )


def test_row36_windowed_work_is_that_of_the_window() -> None:
    causal = Case(8192, 8192, 128, 8, 8, causal=True, dtype=BF16)
    window = dataclasses.replace(causal, window_size=(1024, -1))
    tiles = [int(reference.mask_tiles(**c.lengths, **c.mask).sum()) for c in (window, causal)]
    share = tiles[0] / tiles[1]
    assert share < 0.3
    assert _backward_ms(window) < 2.0 * share * _backward_ms(causal)


def test_row51_time_falls_with_density() -> None:
    # Large enough that a slow host is not what takes the time.
    case = Case(8192, 8192, 128, 32, 32, dtype=BF16)
    times = [_backward_ms(case)]
    for density in (0.5, 0.25, 0.1):
        shape = (1, case.num_heads, case.num_query_tiles, case.num_key_tiles)
        live = torch.rand(shape, generator=torch.Generator().manual_seed(0)) < density
        times.append(_backward_ms(case, back_lite.pack_tiles(live).cuda()))
        assert times[-1] < times[-2]
        assert times[-1] < (density + 0.12) * times[0]
