"""Selection and the sparse backward: statistics, the rule, and gradients of the live tiles."""

from __future__ import annotations

import math

import back_lite
import cases
import comparer
import hypothesis
import oracle
import pytest
import torch
from back_lite import ops, reference
from cases import Case
from hypothesis import strategies as st
from torch import Tensor

STATS_FROM = 1e-6  # lighter tiles have no bound on their relative error


def stats_bound(case: Case, inputs: cases.Inputs) -> float:
    """Largest relative error of a tile's probability."""
    if case.dtype in (torch.bfloat16, torch.float16):
        return 1e-2
    return 1e-5 * max(1.0, largest_score(case, inputs))


def largest_score(case: Case, inputs: cases.Inputs) -> float:
    """Of |S|, over the keys that a query sees."""
    group = case.num_heads // case.num_key_heads
    q = inputs.query.double().transpose(1, 2)
    k = inputs.key.double().transpose(1, 2).repeat_interleave(group, 1)
    scale = 1.0 / math.sqrt(case.head_dim) if case.scale is None else case.scale
    see = reference.visible(**case.lengths, **case.mask, device=q.device)
    return float((scale * (q @ k.mT)).masked_fill(~see, 0.0).abs().max())


def fixed(prob: Tensor) -> Tensor:
    """floor(p * 2^40) as int64."""
    return (prob.double() * 2.0**40).floor().to(torch.int64)


def check_tile_stats(case: Case, inputs: cases.Inputs, stats: Tensor) -> None:
    """Statistics within bound of float64's, and none outside the mask."""
    truth = reference.tile_stats(*inputs[:2], **case.options)
    bound = stats_bound(case, inputs)
    allowed = reference.mask_tiles(**case.lengths, **case.mask).to(stats.device)
    heavy = truth > STATS_FROM
    error = ((stats.double() - truth).abs() / truth)[heavy]
    assert error.max() <= bound, f"relative error {float(error.max()):.3g} > {bound:.3g}"
    assert (stats[~heavy] <= STATS_FROM * (1.0 + bound)).all()
    assert (stats >= 0.0).all()
    assert (stats[..., ~allowed] == 0.0).all(), "probability outside the mask"


@pytest.mark.parametrize("case", cases.STATS, ids=cases.ids(cases.STATS))
def test_tile_stats(case: Case, device: str) -> None:
    inputs = case.inputs(device)
    _, _, stats = ops.forward(*inputs[:3], **case.options, record=True)
    assert stats is not None
    assert stats.dtype == torch.float32
    assert tuple(stats.shape) == back_lite.tile_stats_shape(inputs.query, inputs.key)
    check_tile_stats(case, inputs, stats)
    bound = stats_bound(case, inputs)
    allowed = reference.mask_tiles(**case.lengths, **case.mask).to(device)
    sums, expected = stats.double().sum(dim=-1), allowed.any(dim=-1).double()
    assert ((sums - expected).abs() <= bound).all(), "the probabilities of a row add up to one"


def test_recording_changes_nothing(device: str) -> None:
    case = Case(300, 500, causal=True, dtype=torch.bfloat16)
    query, key, value = case.inputs(device)[:3]
    out, lse, _ = ops.forward(query, key, value, **case.options)
    recorded_out, recorded_lse, stats = ops.forward(query, key, value, **case.options, record=True)
    again = ops.forward(query, key, value, **case.options, record=True)[2]
    assert torch.equal(out, recorded_out)
    assert torch.equal(lse, recorded_lse)
    assert torch.equal(stats, again)


# ---- The rule ------------------------------------------------------------------------------------

SELECT_MASKS = [
    Case(640, 1100, num_heads=3, num_key_heads=1),
    Case(640, 1100, num_heads=3, num_key_heads=1, causal=True),
    Case(1100, 640, num_heads=3, num_key_heads=1, causal=True),  # query tiles that see no key
    Case(640, 1100, num_heads=3, num_key_heads=1, window_size=(300, 40)),
    Case(2113, 130, num_heads=3, num_key_heads=1),  # two words of bits
    Case(64, 20000, num_heads=3, num_key_heads=1),  # a row of 157 tiles
]
# Dyadic numbers add up exactly, so thresholds hit sums; some are below the fixed point's 2^-40.
TIE_VALUES = [0.0, 2.0**-45, 2.0**-40, 3 * 2.0**-41, 2.0**-20, 0.03125, 0.0625, 0.0625, 0.125, 0.5]


def crafted_stats(case: Case, kind: str) -> Tensor:
    shape = reference.tile_stats_shape(case.batch, case.num_heads, *case.lengths.values())
    rng = torch.Generator().manual_seed(7)
    if kind == "uniform":
        return torch.rand(shape, generator=rng) / shape[3]
    if kind == "wide":
        return 10.0 ** (-14.0 * torch.rand(shape, generator=rng))
    if kind == "equal":
        return torch.full(shape, 1.0 / max(shape[3], 1))
    if kind == "zero":
        return torch.zeros(shape)
    ties = torch.tensor(TIE_VALUES)
    stats = ties[torch.randint(len(TIE_VALUES), shape, generator=rng)]
    if kind == "nan":
        stats[torch.rand(shape, generator=rng) < 0.2] = math.nan
    return stats


@pytest.mark.parametrize("kind", ["uniform", "wide", "equal", "zero", "ties", "nan"])
@pytest.mark.parametrize("case", SELECT_MASKS, ids=cases.ids(SELECT_MASKS))
def test_selection_is_the_rule(case: Case, kind: str, device: str) -> None:
    stats = crafted_stats(case, kind)
    for negl_prob in (0.0, 2.0**-40, 1e-9, 0.0625, 0.125, 0.5, 1.0 - 2.0**-40, [0.3, 0.0, 0.0625]):
        bits = ops.select(stats.to(device), negl_prob, **case.lengths, **case.mask)
        assert bits.dtype == torch.int32
        live = back_lite.unpack_tiles(bits, case.num_query_tiles)
        expected = reference.select(stats, negl_prob, **case.lengths, **case.mask)
        assert torch.equal(live.cpu(), expected), f"negl_prob = {negl_prob}"
        assert torch.equal(bits, back_lite.pack_tiles(live)), "bits beyond the last query tile"


@hypothesis.settings(max_examples=100)
@hypothesis.given(
    st.lists(
        st.one_of(st.sampled_from([*TIE_VALUES, math.nan]), st.floats(0.0, 1.0, width=32)),
        min_size=1,
        max_size=12,
    ),
    st.one_of(st.sampled_from(TIE_VALUES), st.floats(0.0, 1.0, exclude_max=True)),
)
def test_selection_of_any_row(row: list[float], negl_prob: float) -> None:
    """Against a search over all prefixes, written without regard to reference.select."""
    stats = torch.tensor(row, dtype=torch.float32)[None, None, None]
    num_tiles = len(row)
    bits = ops.select(stats, negl_prob, query_length=64, key_length=128 * num_tiles)
    mass = [2**40 if math.isnan(p) else int(p * 2**40) for p in stats.flatten().tolist()]
    order = sorted(range(num_tiles), key=lambda n: (mass[n], n))
    prefixes = [order[:length] for length in range(num_tiles)]  # not all: the heaviest stays
    budget = int(negl_prob * 2**40)
    skipped = max((p for p in prefixes if sum(mass[n] for n in p) < budget), key=len, default=[])
    live = back_lite.unpack_tiles(bits, 1)[0, 0, 0]
    assert live.tolist() == [n not in skipped for n in range(num_tiles)]


def test_per_head_thresholds_act_on_their_head_alone(device: str) -> None:
    case = cases.SPARSE[0]
    inputs = case.inputs(device)
    negl_probs = [0.0, 0.3, 0.02, 0.6]
    live, _ = oracle.live_tiles(case, inputs, negl_probs)
    for h, negl_prob in enumerate(negl_probs):
        alone, _ = oracle.live_tiles(case, inputs, negl_prob)
        assert torch.equal(live[:, h], alone[:, h])
    assert live[:, 0].all()
    assert not live[:, 1].all()
    as_tensor, _ = oracle.live_tiles(case, inputs, torch.tensor(negl_probs, dtype=torch.float64))
    assert torch.equal(live, as_tensor)
    got = oracle.library(case, inputs, negl_probs)
    comparer.check_results(case, inputs, got, live=live)


# ---- What the backward makes of it ---------------------------------------------------------------


@pytest.mark.parametrize("negl_prob", cases.SPARSE_NEGL_PROBS)
@pytest.mark.parametrize("case", cases.SPARSE, ids=cases.ids(cases.SPARSE))
def test_sparse_gradient(case: Case, negl_prob: float, device: str) -> None:
    """Equals float64's with the library's own live tiles, and those keep what is promised."""
    inputs = case.inputs(device)
    live, stats = oracle.live_tiles(case, inputs, negl_prob)
    allowed = reference.mask_tiles(**case.lengths, **case.mask).to(device)
    assert not (live & ~allowed).any(), "a live tile outside the mask"
    assert (live.any(dim=-1) == allowed.any(dim=-1)).all(), "a live tile where a row sees a key"
    skipped = allowed & ~live
    assert skipped.any(), "nothing is skipped: the case shows nothing"
    assert (fixed(stats * skipped).sum(dim=-1) < math.floor(negl_prob * 2**40)).all()
    true_mass = (reference.tile_stats(*inputs[:2], **case.options) * skipped).sum(dim=-1)
    assert (true_mass < negl_prob * (1.0 + stats_bound(case, inputs))).all()

    comparer.check_results(case, inputs, oracle.library(case, inputs, negl_prob), live=live)


@pytest.mark.parametrize("case", cases.SPARSE, ids=cases.ids(cases.SPARSE))
def test_forward_stays_exact(case: Case, device: str) -> None:
    inputs = case.inputs(device)
    exact, sparse = oracle.library(case, inputs), oracle.library(case, inputs, 0.3)
    assert torch.equal(exact.out, sparse.out)
    assert torch.equal(exact.lse, sparse.lse)


@pytest.mark.parametrize("case", cases.SPARSE, ids=cases.ids(cases.SPARSE))
def test_tiny_negl_prob_changes_nothing_but_rounding(case: Case, device: str) -> None:
    inputs = case.inputs(device)
    comparer.check_results(case, inputs, oracle.library(case, inputs, 1e-9))


@pytest.mark.parametrize("density", [0.0, 0.05, 0.5])
def test_any_choice_of_tiles(density: float, device: str) -> None:
    """Rules other than ours: the backward takes any live tiles, even none, or empty columns."""
    case = Case(
        650, 1100, num_heads=4, num_key_heads=2, causal=True, window_size=(700, -1), lse_grad=True
    )
    inputs = case.inputs(device)
    q, k, v, grad_out, grad_lse = inputs
    allowed = reference.mask_tiles(**case.lengths, **case.mask)
    rng = torch.Generator().manual_seed(3)
    shape = back_lite.tile_stats_shape(q, k)
    live = ((torch.rand(shape, generator=rng) < density) & allowed).to(device)
    bits = back_lite.pack_tiles(live)
    out, lse, _ = ops.forward(q, k, v, **case.options)
    grads = ops.backward(grad_out, q, k, v, out, lse, bits, grad_lse, **case.options)
    comparer.check_results(case, inputs, oracle.Results(out, lse, *grads), live=live)
    if density == 0.0:
        assert not any(grad.any() for grad in grads)


def test_all_tiles_live_is_bitwise_exact(device: str) -> None:
    """The dense and the sparse backward differ in the source of tiles alone."""
    case = Case(300, 700, num_heads=4, num_key_heads=2, causal=True)
    q, k, v, grad_out, _ = case.inputs(device)
    out, lse, _ = ops.forward(q, k, v, **case.options)
    allowed = reference.mask_tiles(**case.lengths, **case.mask).to(device)
    bits = back_lite.pack_tiles(allowed.expand(back_lite.tile_stats_shape(q, k)))
    dense = ops.backward(grad_out, q, k, v, out, lse, **case.options)
    sparse = ops.backward(grad_out, q, k, v, out, lse, bits, **case.options)
    for a, b in zip(dense, sparse, strict=True):
        assert torch.equal(a, b)


# ---- Packing -------------------------------------------------------------------------------------


@hypothesis.settings(max_examples=100)
@hypothesis.given(
    st.tuples(st.integers(0, 2), st.integers(0, 3), st.integers(0, 70), st.integers(0, 5)),
    st.integers(0, 2**32 - 1),
)
def test_pack_unpack_round_trip(shape: tuple[int, int, int, int], seed: int) -> None:
    live = torch.rand(shape, generator=torch.Generator().manual_seed(seed)) < 0.5
    bits = back_lite.pack_tiles(live)
    batch, num_heads, num_query_tiles, num_key_tiles = shape
    assert bits.dtype == torch.int32
    assert bits.shape == (batch, num_heads, num_key_tiles, -(-num_query_tiles // 32))
    assert torch.equal(back_lite.unpack_tiles(bits, num_query_tiles), live)
    for b, h, m, n in live.nonzero().tolist()[:10]:
        assert int(bits[b, h, n, m // 32]) >> (m % 32) & 1


def _mask_cases() -> list[Case]:
    lengths = [(0, 5), (5, 0), (64, 128), (65, 129), (200, 1000), (1000, 200), (640, 640)]
    return [
        Case(*pair, causal=causal, window_size=window_size)
        for pair in lengths
        for causal, window_size in [*cases.MASKS, (True, (0, 0)), (False, (2000, 2000))]
    ]


@pytest.mark.parametrize("case", _mask_cases(), ids=cases.ids(_mask_cases()))
def test_mask_tiles(case: Case) -> None:
    """Also the tiles that the selection takes for allowed."""
    tiles = back_lite.mask_tiles(**case.lengths, **case.mask)
    assert torch.equal(tiles, reference.mask_tiles(**case.lengths, **case.mask))
    stats = torch.zeros(1, 1, case.num_query_tiles, case.num_key_tiles)
    bits = ops.select(stats, 0.0, **case.lengths, **case.mask)
    assert torch.equal(back_lite.unpack_tiles(bits, case.num_query_tiles)[0, 0], tiles)
