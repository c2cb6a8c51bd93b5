"""Faults that users of attention kernels met in public, as small inputs.

They were collected as rows of a table; a test bears the number of its row and says what the fault
is. Rows about torch.compile, checkpointing and transforms (38 to 45) are in test_compose.py; rows
that only a GPU, a build or a benchmark can show are not here.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable

import back_lite
import cases
import comparer
import oracle
import pytest
import torch
from back_lite import BackLite, attention, ops, reference
from cases import Case, Inputs
from torch import Tensor

NEGL_PROBS = [0.0, 0.05]


def check(case: Case, inputs: Inputs, negl_prob: float = 0.0) -> oracle.Results:
    live = oracle.live_tiles(case, inputs, negl_prob)[0] if negl_prob else None
    got = oracle.library(case, inputs, negl_prob)
    comparer.check_results(case, inputs, got, live=live)
    return got


# ---- Wrong, NaN, or missing gradients ------------------------------------------------------------


@pytest.mark.parametrize("gain", [3.0, 10.0])
def test_row01_nan_in_backward_of_large_fp16(gain: float, device: str) -> None:
    case = Case(
        1024,
        1024,
        head_dim=128,
        batch=2,
        num_heads=4,
        num_key_heads=4,
        dtype=torch.float16,
        causal=True,
        gain=gain,
    )
    got = check(case, case.inputs(device))
    assert all(t.isfinite().all() for t in got)


@pytest.mark.parametrize("negl_prob", NEGL_PROBS)
def test_row02_nan_with_one_query_row(negl_prob: float, device: str) -> None:
    case = Case(1, 17, head_dim=16, dtype=torch.float16)
    check(case, case.inputs(device), negl_prob)


@pytest.mark.parametrize("negl_prob", NEGL_PROBS)
@pytest.mark.parametrize("dtype", cases.DTYPES)
def test_row04_rows_that_see_no_key(dtype: torch.dtype, negl_prob: float, device: str) -> None:
    """Out 0, lse -inf, gradients 0, and the selection is not poisoned."""
    case = Case(256, 128, causal=True, dtype=dtype, lse_grad=True)
    inputs = case.inputs(device)
    got = check(case, inputs, negl_prob)
    assert (got.out[:, :128] == 0.0).all()
    assert (got.lse[..., :128] == -math.inf).all()
    assert (got.grad_query[:, :128] == 0.0).all()
    live, stats = oracle.live_tiles(case, inputs, 0.05)
    assert stats.isfinite().all()
    assert live[0, 0].flatten().tolist() == [False, False, True, True]


@pytest.mark.parametrize("negl_prob", NEGL_PROBS)
@pytest.mark.parametrize("poison", [-math.inf, math.inf, math.nan])
def test_row04_gradient_into_minus_infinity(poison: float, negl_prob: float, device: str) -> None:
    """lse.square() sends -inf into rows without keys: it must not come out as NaN."""
    case = Case(200, 70, causal=True, lse_grad=True)
    inputs = case.inputs(device)
    assert inputs.grad_lse is not None
    clean = oracle.library(case, inputs, negl_prob)
    poisoned_grad = inputs.grad_lse.clone()
    poisoned_grad[..., :130] = poison
    poisoned = oracle.library(case, inputs._replace(grad_lse=poisoned_grad), negl_prob)
    comparer.assert_same(clean, poisoned)


@pytest.mark.parametrize("negl_prob", NEGL_PROBS)
@pytest.mark.parametrize("length", [65, 129, 1000])
def test_row05_uninitialised_memory(
    length: int, negl_prob: float, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every torch.empty, workspaces included, is full of NaN; results are those of a clean run."""
    case = Case(length, length, num_heads=4, num_key_heads=2, causal=True, window_size=(300, -1))
    inputs = case.inputs(device)
    clean = oracle.library(case, inputs, negl_prob)
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    torch.use_deterministic_algorithms(True)
    assert torch.empty(1).isnan().all()
    comparer.assert_same(clean, oracle.library(case, inputs, negl_prob))


@pytest.mark.parametrize("negl_prob", [0.0, 0.1])
@pytest.mark.parametrize("lengths", [(0, 100), (100, 0), (0, 0)])
def test_row07_zero_length(lengths: tuple[int, int], negl_prob: float, device: str) -> None:
    case = Case(*lengths, causal=True, num_heads=4, lse_grad=True)
    got = check(case, case.inputs(device), negl_prob)
    if lengths == (100, 0):
        assert (got.out == 0.0).all()
        assert (got.lse == -math.inf).all()
        assert (got.grad_query == 0.0).all()
    if lengths == (0, 100):
        assert not got.grad_key.any()
        assert not got.grad_value.any()


@pytest.mark.parametrize("negl_prob", [0.0, 0.1])
def test_row08_batch_zero(negl_prob: float, device: str) -> None:
    case = Case(128, 128, head_dim=128, num_heads=8, num_key_heads=8, batch=0)
    check(case, case.inputs(device), negl_prob)


@pytest.mark.parametrize("negl_prob", NEGL_PROBS)
def test_row09_gradient_through_lse_dropped(negl_prob: float, device: str) -> None:
    """As a user writes it: a loss of out and lse, and a loss of lse alone."""
    case = Case(300, 500, topics=True, lse_grad=True)
    inputs = case.inputs(device)
    live = oracle.live_tiles(case, inputs, negl_prob)[0]
    for loss_of_out in (True, False):
        leaves = [t.detach().requires_grad_() for t in inputs[:3]]
        out, lse = attention(*leaves, negl_prob, return_softmax_lse=True)
        loss = lse.square().sum() + (out.sum() if loss_of_out else 0.0)
        grads = torch.autograd.grad(loss, leaves, allow_unused=True, materialize_grads=True)
        as_given = Inputs(
            *inputs[:3],
            torch.ones_like(out) if loss_of_out else torch.zeros_like(out),
            2.0 * lse.detach(),
        )
        got = oracle.Results(out.detach(), lse.detach(), *grads)
        comparer.check_results(case, as_given, got, live=live)


def _column_major_last(t: Tensor) -> Tensor:
    """The same values, the last dimension with stride 2."""
    wide = torch.empty(*t.shape[:-1], 2 * t.shape[-1], dtype=t.dtype, device=t.device)
    return wide[..., ::2].copy_(t)


def _heads_first(t: Tensor) -> Tensor:
    """The same values in (B, H, S, D) memory."""
    return t.transpose(1, 2).contiguous().transpose(1, 2)


def _length_last(t: Tensor) -> Tensor:
    """The same values in (B, H, D, S) memory."""
    return t.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2)


def _in_packed(t: Tensor) -> Tensor:
    """The same values inside a packed (B, S, 3, H, D)."""
    packed = torch.full((*t.shape[:2], 3, *t.shape[2:]), math.nan, dtype=t.dtype, device=t.device)
    return packed[:, :, 1].copy_(t)


def _reversed_strides(t: Tensor) -> Tensor:
    """The same values in (D, H, S, B) memory."""
    return t.permute(3, 2, 1, 0).contiguous().permute(3, 2, 1, 0)


LAYOUTS = [_column_major_last, _heads_first, _length_last, _in_packed, _reversed_strides]


@pytest.mark.parametrize("negl_prob", NEGL_PROBS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_row11_strides_read_as_contiguous(
    layout: Callable[[Tensor], Tensor], negl_prob: float, device: str
) -> None:
    """Each input in turn, and all of them."""
    case = Case(130, 200, batch=2, num_heads=4, num_key_heads=2, causal=True)
    inputs = case.inputs(device)
    contiguous = oracle.library(case, inputs, negl_prob)
    for which in [{0}, {1}, {2}, {3}, {0, 1, 2, 3}]:
        strided = [layout(t) if i in which else t for i, t in enumerate(inputs[:4])]
        comparer.assert_same(contiguous, oracle.library(case, Inputs(*strided, None), negl_prob))


@pytest.mark.parametrize("negl_prob", NEGL_PROBS)
def test_row11_expanded_gradient(negl_prob: float, device: str) -> None:
    """out.sum() sends a gradient whose strides are all 0."""
    case = Case(130, 200, batch=2, num_heads=4, num_key_heads=2)
    inputs = case.inputs(device)
    ones = torch.ones((), dtype=case.dtype, device=device).expand(inputs.query.shape)
    expanded = oracle.library(case, inputs._replace(grad_out=ones), negl_prob)
    comparer.assert_same(
        expanded, oracle.library(case, inputs._replace(grad_out=ones.contiguous()), negl_prob)
    )
    leaves = [t.detach().requires_grad_() for t in inputs[:3]]
    attention(*leaves, negl_prob).sum().backward()
    for leaf, grad in zip(leaves, expanded[2:], strict=True):
        assert leaf.grad is not None
        assert torch.equal(leaf.grad, grad)


def test_row11_strided_lse_gradient(device: str) -> None:
    case = Case(130, 200, num_heads=4, num_key_heads=2, lse_grad=True)
    inputs = case.inputs(device)
    assert inputs.grad_lse is not None
    strided = inputs.grad_lse.transpose(1, 2).contiguous().transpose(1, 2)
    comparer.assert_same(
        oracle.library(case, inputs), oracle.library(case, inputs._replace(grad_lse=strided))
    )


def test_row11_key_and_value_of_different_strides(device: str) -> None:
    """Strides of dimensions of size one mean nothing, whatever they are."""
    case = Case(1, 200, num_heads=1, num_key_heads=1)
    q, k, v, grad_out, _ = inputs = case.inputs(device)
    odd = q.as_strided(q.shape, (7, 3, 5, 1))
    strided = Inputs(odd, _heads_first(k), _in_packed(v), grad_out, None)
    comparer.assert_same(oracle.library(case, inputs), oracle.library(case, strided))


@pytest.mark.parametrize("causal", [False, True])
def test_row13_head_dim_256(causal: bool, device: str) -> None:
    case = Case(513, 513, head_dim=256, dtype=torch.bfloat16, causal=causal)
    check(case, case.inputs(device))


def test_row14_value_head_dim_differs(device: str) -> None:
    q = torch.randn(1, 384, 2, 192, device=device)
    v = torch.randn(1, 384, 2, 128, device=device)
    with pytest.raises(ValueError, match=r"value.*128.*192"):
        attention(q, q, v, 0.05)


@pytest.mark.parametrize("negl_prob", NEGL_PROBS)
@pytest.mark.parametrize("head_dim", [8, 24, 40, 72, 80, 96, 104, 112, 136, 200, 248])
def test_row15_padded_head_dims(head_dim: int, negl_prob: float, device: str) -> None:
    case = Case(200, 200, head_dim=head_dim, topics=True, lse_grad=True)
    check(case, case.inputs(device), negl_prob)


@pytest.mark.parametrize("head_dim", [0, 1, 4, 100, 257, 260, 264, 512])
def test_row16_head_dim_unsupported(head_dim: int, device: str) -> None:
    q = torch.randn(1, 8, 2, head_dim, device=device)
    with pytest.raises(ValueError, match=rf"head_dim.*{head_dim}.*8.*256"):
        attention(q, q, q)


@pytest.mark.parametrize("dtype", cases.DTYPES)
def test_row17_sparse_backward_silently_wrong(dtype: torch.dtype, device: str) -> None:
    case = Case(1024, 1024, topics=True, dtype=dtype)
    inputs = case.inputs(device)
    live, _ = oracle.live_tiles(case, inputs, 0.02)
    assert not live.all()
    check(case, inputs, 0.02)


@pytest.mark.parametrize("negl_prob", NEGL_PROBS)
@pytest.mark.parametrize("length", [1, 100, 127, 129, 333])
def test_row21_odd_lengths_with_grouped_heads(length: int, negl_prob: float, device: str) -> None:
    case = Case(length, length + 3, num_heads=10, num_key_heads=2, causal=True, topics=True)
    check(case, case.inputs(device), negl_prob)


@pytest.mark.parametrize("keyword", ["cu_seqlens_q", "sinks", "dropout_p", "neg_prob", "softcap"])
def test_row23_and_50_unknown_keyword_gives_dense(keyword: str, device: str) -> None:
    """What is not offered (varlen, sinks), and what is misspelt, must not be ignored."""
    q = torch.randn(1, 8, 2, 8, device=device)
    with pytest.raises(TypeError, match=keyword):
        attention(q, q, q, **{keyword: 0.1})
    with pytest.raises(TypeError, match=keyword):
        BackLite(**{keyword: 0.1})
    with pytest.raises(TypeError, match=keyword):
        BackLite()(q, q, q, **{keyword: 0.1})


# ---- Determinism ---------------------------------------------------------------------------------


@pytest.mark.parametrize("negl_prob", NEGL_PROBS)
@pytest.mark.parametrize("heads", [(2, 2), (8, 2)])
def test_row25_and_26_deterministic_flag_ignored(
    heads: tuple[int, int], negl_prob: float, device: str
) -> None:
    case = Case(513, 700, num_heads=heads[0], num_key_heads=heads[1], topics=True, causal=True)
    inputs = case.inputs(device)
    first = oracle.library(case, inputs, negl_prob, deterministic=True)
    for _ in range(20):
        comparer.assert_same(first, oracle.library(case, inputs, negl_prob, deterministic=True))
    comparer.assert_same(first, oracle.library(case, inputs, negl_prob, deterministic=False))
    torch.use_deterministic_algorithms(True)
    comparer.assert_same(first, oracle.library(case, inputs, negl_prob))


# ---- Memory safety, overflow, long sequences -----------------------------------------------------


@pytest.mark.parametrize("dim", [0, 1, 2])
def test_row29_offsets_beyond_32_bits(dim: int, device: str) -> None:
    """Strides of 2^31 elements and more; of the buffer, only the pages in use become memory."""
    case = Case(2, 3, batch=2, dtype=torch.float16, head_dim=8)
    inputs = case.inputs(device)
    huge_stride = 2**31 + 8
    try:
        buffer = torch.empty(2 * huge_stride + 4096, dtype=case.dtype, device=device)
    except RuntimeError as error:
        pytest.skip(f"this machine gives no 8 GiB of address space: {error}")
    far = []
    for i, t in enumerate(inputs[:4]):
        strides = [64, 16, 8, 1]
        strides[dim] = huge_stride
        far.append(buffer.as_strided(t.shape, strides, storage_offset=512 * i).copy_(t))
    comparer.assert_same(oracle.library(case, inputs), oracle.library(case, Inputs(*far, None)))


@pytest.mark.parametrize("dtype", cases.DTYPES)
def test_row30_odd_storage_offset(dtype: torch.dtype, device: str) -> None:
    """A tensor that starts one element into its buffer is aligned to that element alone."""
    case = Case(130, 200, dtype=dtype, lse_grad=True)
    inputs = case.inputs(device)
    aligned = oracle.library(case, inputs, 0.05)
    comparer.assert_same(aligned, oracle.library(case, inputs.one_element_in(), 0.05))


def test_row34_hang_with_window_and_odd_length(device: str) -> None:
    """conftest.py ends a test that hangs."""
    case = Case(1000, 1000, window_size=(17, 0))
    for negl_prob in NEGL_PROBS:
        check(case, case.inputs(device), negl_prob)


# ---- Window and causal meaning -------------------------------------------------------------------


@pytest.mark.parametrize("lengths", [(200, 200), (130, 333), (333, 130)])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window_size", [(-1, -1), *cases.WINDOWS, (0, -1), (-1, 5), (5, 5)])
def test_row35_window_off_by_one(
    window_size: tuple[int, int], causal: bool, lengths: tuple[int, int], device: str
) -> None:
    """Left and right, -1 against 0, causal together with a right window; skipping changes none."""
    case = Case(*lengths, head_dim=16, causal=causal, window_size=window_size)
    inputs = case.inputs(device)
    truth = oracle.truth(case, inputs)
    for negl_prob in (0.0, 1e-6):
        got = oracle.library(case, inputs, negl_prob)
        comparer.check_results(case, inputs, got, truth=truth)


def test_row35_window_by_hand(device: str) -> None:
    """The words of the contract as counting: with equal scores, out is the mean of seen values."""
    key_length = 6
    value = torch.arange(key_length, dtype=torch.float64, device=device)
    value = value[None, :, None, None].expand(1, key_length, 1, 8)
    zeros = torch.zeros_like(value)
    for query_length, causal, window_size, seen in [
        (6, False, (1, 0), [[0], [0, 1], [1, 2], [2, 3], [3, 4], [4, 5]]),
        (6, False, (0, 2), [[0, 1, 2], [1, 2, 3], [2, 3, 4], [3, 4, 5], [4, 5], [5]]),
        (6, True, (-1, 2), [[0], [0, 1], [0, 1, 2], [0, 1, 2, 3], [*range(5)], [*range(6)]]),
        (2, True, (-1, -1), [[0, 1, 2, 3, 4], [0, 1, 2, 3, 4, 5]]),
        (2, False, (0, 0), [[4], [5]]),
    ]:
        out, lse = attention(
            zeros[:, :query_length],
            zeros,
            value,
            causal=causal,
            window_size=window_size,
            return_softmax_lse=True,
        )
        means = torch.tensor([sum(keys) / len(keys) for keys in seen], dtype=torch.float64)
        counts = torch.tensor([float(len(keys)) for keys in seen], dtype=torch.float64)
        torch.testing.assert_close(out[0, :, 0, 0].cpu(), means)
        torch.testing.assert_close(lse[0, 0].cpu(), counts.log())


def _seconds(function: Callable[[], object]) -> float:
    """The best of several runs: on a busy machine the others measure the neighbours."""

    def once() -> float:
        start = time.perf_counter()
        function()
        return time.perf_counter() - start

    return min(once() for _ in range(5))


def _backward_seconds(case: Case, bits: Tensor | None = None) -> float:
    q, k, v, grad_out, _ = case.inputs()
    out, lse, _ = ops.forward(q, k, v, **case.options)
    return _seconds(lambda: ops.backward(grad_out, q, k, v, out, lse, bits, **case.options))


def test_row36_windowed_backward_does_the_full_work() -> None:
    """A tenth of the causal work must not take half of its time."""
    causal = Case(4096, 4096, causal=True)
    window = dataclasses.replace(causal, window_size=(128, -1))
    tiles = [int(reference.mask_tiles(**c.lengths, **c.mask).sum()) for c in (window, causal)]
    assert tiles[0] < 0.15 * tiles[1]
    assert _backward_seconds(window) < 0.5 * _backward_seconds(causal)


def test_row37_causal_alignment_of_fewer_queries(device: str) -> None:
    case = Case(100, 300, causal=True)
    check(case, case.inputs(device))


# ---- Speed ---------------------------------------------------------------------------------------


def test_row51_sparse_backward_slower_than_dense() -> None:
    """A tenth of the tiles must not take half of the dense time (the benchmark is stricter)."""
    case = Case(2048, 2048)
    shape = (1, 2, case.num_query_tiles, case.num_key_tiles)
    live = torch.rand(shape, generator=torch.Generator().manual_seed(0)) < 0.1
    assert _backward_seconds(case, back_lite.pack_tiles(live)) < 0.5 * _backward_seconds(case)
