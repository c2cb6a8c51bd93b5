"""Exact attention: O, LSE, dQ, dK, dV at negl_prob = 0 against float64."""

from __future__ import annotations

import cases
import comparer
import hypothesis
import oracle
import pytest
import strategies
import torch
from back_lite import attention, ops
from cases import Case
from torch import Tensor


@pytest.mark.parametrize("case", cases.GRID, ids=cases.ids(cases.GRID))
def test_pairwise(case: Case, device: str) -> None:
    inputs = case.inputs(device)
    comparer.check_results(case, inputs, oracle.library(case, inputs))


@pytest.mark.parametrize("case", cases.LONG, ids=cases.ids(cases.LONG))
def test_long(case: Case, device: str) -> None:
    inputs = case.inputs(device)
    comparer.check_results(case, inputs, oracle.library(case, inputs))


@pytest.mark.parametrize("case", cases.SCALES, ids=cases.ids(cases.SCALES))
def test_scale(case: Case, device: str) -> None:
    inputs = case.inputs(device)
    comparer.check_results(case, inputs, oracle.library(case, inputs))


def test_grid_covers_all_pairs() -> None:
    """The generator is part of the claim: count the pairs by other means."""

    def factors(case: Case) -> tuple[object, ...]:
        return (
            case.query_length,
            case.key_length,
            (case.causal, case.window_size),
            case.head_dim,
            case.num_heads // case.num_key_heads,
            case.dtype,
            case.lse_grad,
        )

    sizes = [11, 11, len(cases.MASKS), 8, 4, 4, 2]
    seen = [factors(case) for case in cases.GRID]
    for a in range(len(sizes)):
        for b in range(a):
            assert len({(row[a], row[b]) for row in seen}) == sizes[a] * sizes[b]


GRADCHECK = [
    Case(5, 7, head_dim=8, batch=2, num_heads=2, num_key_heads=1),
    Case(5, 7, head_dim=8, causal=True),
    Case(7, 5, head_dim=8, causal=True, scale=0.5),  # two rows see no key
    Case(6, 9, head_dim=8, window_size=(2, 1)),
]


@pytest.mark.parametrize("case", GRADCHECK, ids=cases.ids(GRADCHECK))
def test_gradcheck(case: Case, device: str) -> None:
    """Against finite differences, which know nothing of any formula."""
    case = cases.dataclasses.replace(case, dtype=torch.float64)
    leaves = [t.requires_grad_() for t in case.inputs(device)[:3]]
    see = oracle.reference.visible(**case.lengths, **case.mask, device=leaves[0].device)
    sees_a_key = see.any(dim=-1)

    def function(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        out, lse = attention(q, k, v, return_softmax_lse=True, **case.options)
        return out, lse[..., sees_a_key]  # -inf elsewhere, which has no finite difference

    assert torch.autograd.gradcheck(function, leaves)


def test_gradcheck_across_tiles(device: str) -> None:
    case = Case(66, 130, head_dim=8, num_heads=1, num_key_heads=1, dtype=torch.float64, causal=True)
    leaves = [t.requires_grad_() for t in case.inputs(device)[:3]]

    def function(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return attention(q, k, v, return_softmax_lse=True, **case.options)

    assert torch.autograd.gradcheck(function, leaves, fast_mode=True)


@hypothesis.settings(max_examples=300)
@hypothesis.given(strategies.small_problems())
def test_any_small_problem(problem: tuple[Case, float]) -> None:
    case, negl_prob = problem
    inputs = case.inputs()
    live = None
    if negl_prob > 0.0:
        live, _ = oracle.live_tiles(case, inputs, negl_prob)
    comparer.check_results(case, inputs, oracle.library(case, inputs, negl_prob), live=live)


def test_stages_agree_with_autograd(device: str) -> None:
    """The stages one by one give bitwise what attention() gives."""
    case = Case(200, 300, num_heads=4, num_key_heads=2, causal=True, lse_grad=True)
    inputs = case.inputs(device)
    q, k, v, grad_out, grad_lse = inputs
    out, lse, stats = ops.forward(q, k, v, **case.options)
    assert stats is None
    grads = ops.backward(grad_out, q, k, v, out, lse, None, grad_lse, **case.options)
    for staged, whole in zip((out, lse, *grads), oracle.library(case, inputs), strict=True):
        assert torch.equal(staged, whole)
