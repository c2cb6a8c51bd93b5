"""O, LSE, dQ, dK, dV at negl_prob = 0 and random problems, on poisoned memory."""

from __future__ import annotations

import back_lite
import cases
import comparer
import hopper
import hypothesis
import oracle
import pytest
import strategies
import torch
from back_lite import _kernels, ops
from cases import Case

pytestmark = pytest.mark.usefixtures("poisoned")

EXACT = cases.on_hopper(cases.GRID + cases.LONG + cases.SCALES)


@pytest.mark.parametrize("case", EXACT, ids=cases.ids(EXACT))
def test_exact(case: Case, device: str) -> None:
    hopper.check(case, case.inputs(device))


@hypothesis.settings(max_examples=500)
@hypothesis.given(strategies.small_problems(cases.HOPPER_HEAD_DIMS, cases.HOPPER_DTYPES))
def test_any_small_problem(problem: tuple[Case, float]) -> None:
    case, negl_prob = problem
    hopper.check(case, case.inputs("cuda"), negl_prob)


@pytest.mark.parametrize("head_dim", cases.HOPPER_HEAD_DIMS)
@pytest.mark.parametrize("record", [False, True])
def test_forward_repeats_bit_by_bit(record: bool, head_dim: int, device: str) -> None:
    """200 launches, in turns on two streams, beside other work."""
    case = Case(1000, 1500, head_dim=head_dim, num_heads=8, causal=True, dtype=torch.bfloat16)
    query, key, value = case.inputs(device)[:3]
    expected = ops.forward(query, key, value, **case.options, record=record)
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    torch.cuda.synchronize()
    results = []
    for i in range(200):
        with torch.cuda.stream(streams[i % 2]):
            results.append(ops.forward(query, key, value, **case.options, record=record))
        query @ query.mT
    torch.cuda.synchronize()
    for result in results:
        for a, b in zip(result, expected, strict=True):
            assert (a is None and b is None) or torch.equal(a, b)


@pytest.mark.parametrize("negl_prob", [0.0, 0.05])
def test_gradients_repeat_up_to_rounding(negl_prob: float, device: str) -> None:
    """In turns on two streams, beside other work."""
    case = Case(1000, 1500, num_heads=8, topics=True, dtype=torch.bfloat16, head_dim=128)
    inputs = case.inputs(device)
    expected = hopper.library(case, inputs, negl_prob)
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    torch.cuda.synchronize()
    results = []
    for i in range(200):
        with torch.cuda.stream(streams[i % 2]):
            results.append(hopper.library(case, inputs, negl_prob))
        inputs.query @ inputs.query.mT
    torch.cuda.synchronize()
    for result in results:
        hopper.assert_alike(result, expected)


@pytest.mark.parametrize("negl_prob", [0.0, 0.05])
def test_scratch_memory_from_python(
    negl_prob: float, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with torch before 2.10."""
    case = Case(640, 1100, num_heads=4, num_key_heads=2, topics=True, dtype=torch.bfloat16)
    inputs = case.inputs(device)
    expected = hopper.library(case, inputs, negl_prob)
    monkeypatch.setattr(_kernels, "_library_allocates", False)
    hopper.assert_alike(hopper.library(case, inputs, negl_prob), expected)


def test_stages_agree_with_autograd(device: str) -> None:
    case = Case(
        200, 300, num_heads=4, num_key_heads=2, causal=True, lse_grad=True, dtype=torch.bfloat16
    )
    inputs = case.inputs(device)
    q, k, v, grad_out, grad_lse = inputs
    out, lse, stats = ops.forward(q, k, v, **case.options)
    assert stats is None
    grads = ops.backward(grad_out, q, k, v, out, lse, None, grad_lse, **case.options)
    hopper.assert_alike(oracle.Results(out, lse, *grads), hopper.library(case, inputs))


@pytest.mark.parametrize("negl_prob", [0.0, 0.05])
def test_row29_more_than_2_to_the_31_elements(negl_prob: float, device: str) -> None:
    """The last rows against a problem of their own; a window keeps them apart from the others."""
    torch.use_deterministic_algorithms(False)  # filling 60 GB adds nothing
    length, tail, num_heads = 600064, 1024, 32  # multiples of both tiles
    shape = (1, length, num_heads, 128)
    case = Case(tail, tail, 128, 1, 1, dtype=torch.bfloat16, causal=True, window_size=(127, 0))
    *tensors, grad_out = (torch.randn(shape, device=device, dtype=case.dtype) for _ in range(4))
    assert tensors[0].numel() > 2**31
    got = oracle.library(case, cases.Inputs(*tensors, grad_out, None), negl_prob)
    last_live = None
    if negl_prob:
        stats = ops.forward(*tensors, **case.mask, record=True)[2]
        assert stats is not None
        assert 4 * stats.numel() > 2**32
        lengths = {"query_length": length, "key_length": length}
        bits = ops.select(stats, negl_prob, **lengths, **case.mask)[:, -1:, -tail // 128 :]
        live = back_lite.unpack_tiles(bits, length // 64)
        last_live = live[:, :, -tail // 64 :]

    last = [t[:, -tail:, -1:].contiguous() for t in (*tensors, grad_out)]
    inputs = cases.Inputs(*last, None)
    truth = oracle.truth(case, inputs, last_live)
    plain = oracle.plain(case, inputs, last_live)
    for i, name in enumerate(got._fields):
        ours = got.lse[:, -1:] if name == "lse" else got[i][:, :, -1:]
        rows = (slice(None), slice(-tail // 2, None))  # the earlier ones miss keys or queries
        if name == "lse":
            rows = (slice(None), slice(None), rows[1])
        comparer.assert_close(
            name, ours[rows], truth[i][rows], lambda _, i=i, r=rows: plain[i][r], dtype=case.dtype
        )
