"""Many sparse backwards of the same problem, on two streams and beside other kernels."""

from __future__ import annotations

import os

import back_lite
import cases
import comparer
import hopper
import oracle
import pytest
import torch
from back_lite import ops, reference
from cases import Case
from torch import Tensor

REPEATS = int(os.environ.get("BACK_LITE_REPEATS", "2000"))


def backwards(case: Case, density: float) -> tuple[list[Tensor], list[Tensor]]:
    """The arguments of a sparse backward, and its gradients, which are right."""
    inputs = case.inputs("cuda")
    q, k, v, grad_out, _ = inputs
    allowed = reference.mask_tiles(**case.lengths, **case.mask)
    rng = torch.Generator().manual_seed(7)
    live = torch.rand(back_lite.tile_stats_shape(q, k), generator=rng) < density
    live[..., 1] = True  # a long column, which is split
    live = (live & allowed).cuda()
    out, lse, _ = ops.forward(q, k, v, **case.options)
    arguments = [grad_out, q, k, v, out, lse, back_lite.pack_tiles(live)]
    grads = ops.backward(*arguments, **case.options)
    comparer.check_results(case, inputs, oracle.Results(out, lse, *grads), live=live)
    return arguments, list(grads)


@pytest.mark.parametrize("head_dim", cases.HOPPER_HEAD_DIMS)
def test_repeated_sparse_backwards_are_near_the_first(head_dim: int) -> None:
    """Few live tiles and many: dQ is stored, stored and added to, or added to zeros."""
    case = Case(
        1500,
        1900,
        batch=2,
        head_dim=head_dim,
        num_heads=4,
        num_key_heads=2,
        dtype=torch.bfloat16,
    )
    problems = [backwards(case, density) for density in (0.03, 0.15, 0.6)]
    streams = [torch.cuda.Stream() for _ in range(3)]
    matrix = torch.randn(1024, 1024, dtype=torch.bfloat16, device="cuda")
    worst = torch.zeros(2, len(problems), 3, device="cuda")
    torch.cuda.synchronize()
    for i in range(REPEATS):
        which = i // 2 % len(problems)
        arguments, first = problems[which]
        with torch.cuda.stream(streams[i % 2]):
            grads = ops.backward(*arguments, **case.options)
            errors = torch.stack(
                [(a.float() - b.float()).norm() for a, b in zip(grads, first, strict=True)]
            )
            # A NaN stays.
            worst[i % 2, which] = torch.maximum(worst[i % 2, which], errors)
        if i % 5 == 0:
            with torch.cuda.stream(streams[2]):
                torch.mm(matrix, matrix)
    torch.cuda.synchronize()
    for which, (_, first) in enumerate(problems):
        for stream in range(2):
            for name, error, gradient in zip(
                ("dQ", "dK", "dV"), worst[stream, which].tolist(), first, strict=True
            ):
                bound = hopper.NEAR * float(gradient.double().norm())
                assert error <= bound, f"{name}, choice {which}, stream {stream}: {error}"
