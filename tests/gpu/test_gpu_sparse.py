"""Statistics, selection and the sparse backward, on poisoned memory."""

from __future__ import annotations

import back_lite
import cases
import comparer
import hopper
import oracle
import pytest
import torch
from back_lite import ops, reference
from cases import Case
from test_sparse import SELECT_MASKS, check_tile_stats, crafted_stats

pytestmark = pytest.mark.usefixtures("poisoned")

SPARSE = cases.on_hopper(cases.SPARSE)
STATS = cases.on_hopper(cases.STATS)


@pytest.mark.parametrize("case", STATS, ids=cases.ids(STATS))
def test_tile_stats(case: Case, device: str) -> None:
    inputs = case.inputs(device)
    out, lse, stats = ops.forward(*inputs[:3], **case.options, record=True)
    plain_out, plain_lse, _ = ops.forward(*inputs[:3], **case.options)
    assert torch.equal(out, plain_out)
    assert torch.equal(lse, plain_lse)
    assert stats is not None
    check_tile_stats(case, inputs, stats)


@pytest.mark.parametrize("kind", ["uniform", "wide", "equal", "zero", "ties", "nan"])
@pytest.mark.parametrize(
    "case",
    [
        *SELECT_MASKS,
        Case(64, 128 * 300, num_heads=3, num_key_heads=1),
        Case(64, 128 * 5000, num_heads=3, num_key_heads=1),
        Case(64, 128 * 16384, num_heads=3, num_key_heads=1),
        Case(130, 300, batch=22000, num_heads=3, num_key_heads=1),  # more heads than 65535
    ],
    ids=lambda case: case.id,
)
def test_selection_is_the_cpu_s(case: Case, kind: str, device: str) -> None:
    stats = crafted_stats(case, kind)
    for negl_prob in (0.0, 2.0**-40, 1e-9, 0.0625, 0.125, 0.5, 1.0 - 2.0**-40, [0.3, 0.0, 0.0625]):
        on_cpu = ops.select(stats, negl_prob, **case.lengths, **case.mask)
        on_gpu = ops.select(stats.to(device), negl_prob, **case.lengths, **case.mask)
        assert torch.equal(on_gpu.cpu(), on_cpu), f"negl_prob = {negl_prob}"


@pytest.mark.parametrize("negl_prob", [0.01, 0.05, 0.2])
@pytest.mark.parametrize("case", SPARSE, ids=cases.ids(SPARSE))
def test_sparse_gradient(case: Case, negl_prob: float, device: str) -> None:
    """That of the library's own live tiles, which are the CPU's for the same statistics."""
    inputs = case.inputs(device)
    live, stats = oracle.live_tiles(case, inputs, negl_prob)
    allowed = reference.mask_tiles(**case.lengths, **case.mask).to(device)
    assert not (live & ~allowed).any()
    assert (live.any(dim=-1) == allowed.any(dim=-1)).all()
    bits = ops.select(stats.cpu(), negl_prob, **case.lengths, **case.mask)
    assert torch.equal(back_lite.unpack_tiles(bits, case.num_query_tiles), live.cpu())
    got = hopper.library(case, inputs, negl_prob)
    comparer.check_results(case, inputs, got, live=live)


@pytest.mark.parametrize("head_dim", cases.HOPPER_HEAD_DIMS)
@pytest.mark.parametrize("density", [0.0, 0.05, 0.5])
def test_any_choice_of_tiles(density: float, head_dim: int, device: str) -> None:
    """Rules other than ours: any live tiles, even none, or empty columns, or one long column."""
    case = Case(
        2600,
        2100,
        head_dim=head_dim,
        num_heads=4,
        num_key_heads=2,
        causal=True,
        window_size=(1700, -1),
        lse_grad=True,
        dtype=torch.bfloat16,
    )
    inputs = case.inputs(device)
    q, k, v, grad_out, grad_lse = inputs
    allowed = reference.mask_tiles(**case.lengths, **case.mask)
    rng = torch.Generator().manual_seed(3)
    shape = back_lite.tile_stats_shape(q, k)
    for long_column in (False, True):
        live = torch.rand(shape, generator=rng) < density
        live[..., 3] |= long_column
        live = (live & allowed).to(device)
        out, lse, _ = ops.forward(q, k, v, **case.options)
        bits = back_lite.pack_tiles(live)
        grads = ops.backward(grad_out, q, k, v, out, lse, bits, grad_lse, **case.options)
        comparer.check_results(case, inputs, oracle.Results(out, lse, *grads), live=live)


def test_all_tiles_live_is_the_dense_backward(device: str) -> None:
    case = Case(300, 700, num_heads=4, num_key_heads=2, causal=True, dtype=torch.bfloat16)
    q, k, v, grad_out, _ = case.inputs(device)
    out, lse, _ = ops.forward(q, k, v, **case.options)
    allowed = reference.mask_tiles(**case.lengths, **case.mask).to(device)
    bits = back_lite.pack_tiles(allowed.expand(back_lite.tile_stats_shape(q, k)))
    dense = ops.backward(grad_out, q, k, v, out, lse, **case.options)
    sparse = ops.backward(grad_out, q, k, v, out, lse, bits, **case.options)
    for a, b in zip(dense, sparse, strict=True):
        hopper.assert_near("gradient", a, b)


def test_per_head_thresholds_act_on_their_head_alone(device: str) -> None:
    case = SPARSE[0]
    inputs = case.inputs(device)
    negl_probs = [0.0, 0.3, 0.02, 0.6]
    live, _ = oracle.live_tiles(case, inputs, negl_probs)
    for h, negl_prob in enumerate(negl_probs):
        alone, _ = oracle.live_tiles(case, inputs, negl_prob)
        assert torch.equal(live[:, h], alone[:, h])
    assert not live[:, 1].all()
    for given in (torch.tensor(negl_probs).double(), torch.tensor(negl_probs).double().to(device)):
        as_tensor, _ = oracle.live_tiles(case, inputs, given)
        assert torch.equal(live, as_tensor)
        got = hopper.library(case, inputs, given)
        comparer.check_results(case, inputs, got, live=live)
