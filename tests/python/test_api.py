"""What users call: the module, the function, the stages, density, logging, statistics buffers."""

from __future__ import annotations

import inspect
import re
from typing import Any

import back_lite
import cases
import child
import oracle
import pytest
import torch
from back_lite import BackLite, _kernels, attention, ops, reference
from cases import Case

CASE = Case(640, 1100, num_heads=4, num_key_heads=2, topics=True, causal=True)


def leaves_of(case: Case, device: str) -> list[torch.Tensor]:
    return [t.detach().requires_grad_() for t in case.inputs(device)[:3]]


def gradients(out: torch.Tensor, leaves: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    return torch.autograd.grad(out.float().sin().sum(), leaves)


def test_exported_names() -> None:
    assert set(back_lite.__all__) >= {
        "BackLite",
        "attention",
        "ops",
        "pack_tiles",
        "unpack_tiles",
        "tile_stats_shape",
        "mask_tiles",
        "__version__",
    }
    assert all(hasattr(back_lite, name) for name in back_lite.__all__)
    assert re.fullmatch(r"\d+\.\d+\.\d+", back_lite.__version__)


def test_options_after_the_first_are_keyword_only() -> None:
    def keyword_only(function: Any) -> set[str]:
        parameters = inspect.signature(function).parameters.values()
        return {p.name for p in parameters if p.kind is p.KEYWORD_ONLY}

    of_call = {"scale", "return_softmax_lse", "tile_stats", "causal", "window_size"}
    assert keyword_only(attention) == {*of_call, "deterministic"}
    assert keyword_only(BackLite.forward) == of_call
    assert keyword_only(BackLite) == {"deterministic"}


@pytest.mark.parametrize("with_statistics", [False, True])
def test_out_alone_is_out_beside_the_lse(with_statistics: bool, device: str) -> None:
    tensors = CASE.inputs(device)[:3]
    shape = back_lite.tile_stats_shape(*tensors[:2])
    runs = []
    for options in ({}, {"return_softmax_lse": True}):
        stats = torch.zeros(shape, device=device)
        given = {"tile_stats": stats} if with_statistics else {}
        runs.append((BackLite()(*tensors, causal=True, **given, **options), stats))
    (alone, stats), ((beside, _), other_stats) = runs
    assert torch.equal(alone, beside)
    assert torch.equal(stats, other_stats)


@pytest.mark.skipif(
    not hasattr(torch.library, "register_fake"), reason="before torch 2.4 every call has an LSE"
)
def test_only_who_wants_the_lse_has_one(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    counts: list[int] = []
    run = _kernels.attention

    def counted(*arguments: Any) -> list[torch.Tensor]:
        outputs = run(*arguments)
        counts.append(len(outputs))
        return outputs

    monkeypatch.setattr(_kernels, "attention", counted)
    leaves = leaves_of(CASE, device)
    tensors = [t.detach() for t in leaves]
    BackLite()(*tensors)
    attention(*tensors, return_softmax_lse=True)
    ops.forward(*tensors)
    BackLite()(*leaves)
    assert counts == [1, 2, 2, 2]


@pytest.mark.parametrize("negl_prob", [0.0, 0.3, [0.0, 0.1, 0.2, 0.3]])
def test_module_is_the_function(negl_prob: Any, device: str) -> None:
    leaves = leaves_of(CASE, device)
    options = {"scale": 0.2, "causal": True, "window_size": (500, -1)}
    out, lse = attention(*leaves, negl_prob, return_softmax_lse=True, **options)
    module_out, module_lse = BackLite(negl_prob)(*leaves, return_softmax_lse=True, **options)
    alone = BackLite(negl_prob)(*leaves, **options)
    assert torch.equal(out, module_out)
    assert torch.equal(out, alone)
    assert torch.equal(lse, module_lse)
    for a, b in zip(gradients(out, leaves), gradients(alone, leaves), strict=True):
        assert torch.equal(a, b)


def test_results_are_contiguous_and_typed(device: str) -> None:
    for dtype in cases.DTYPES:
        case = Case(70, 130, num_heads=4, num_key_heads=2, dtype=dtype)
        results = oracle.library(case, case.inputs(device))
        assert all(t.is_contiguous() for t in results)
        assert results.out.dtype == dtype
        assert results.lse.dtype == cases.lse_dtype(dtype)


def test_only_needed_gradients_are_given(device: str) -> None:
    """Whichever of the three inputs needs a gradient gets the one it would get with the others."""
    tensors = CASE.inputs(device)[:3]
    expected = oracle.library(CASE, CASE.inputs(device), 0.3)[2:]
    for which in range(3):
        leaves = [t.detach().requires_grad_(i == which) for i, t in enumerate(tensors)]
        attention(*leaves, 0.3, **CASE.options).backward(CASE.inputs(device).grad_out)
        assert [leaf.grad is not None for leaf in leaves] == [i == which for i in range(3)]
        assert torch.equal(leaves[which].grad, expected[which])


def test_same_tensor_as_query_key_and_value(device: str) -> None:
    case = Case(200, 200)
    x = case.inputs(device).query.requires_grad_()
    grad_out = case.inputs(device).grad_out
    attention(x, x, x).backward(grad_out)
    parts = oracle.library(case, cases.Inputs(x, x, x, grad_out, None))[2:]
    assert x.grad is not None
    torch.testing.assert_close(x.grad, parts[0] + parts[1] + parts[2])


def test_backward_twice_with_retained_graph(device: str) -> None:
    leaves = leaves_of(CASE, device)
    out = attention(*leaves, 0.3, causal=True)
    first = torch.autograd.grad(out.sum(), leaves, retain_graph=True)
    second = torch.autograd.grad(out.sum(), leaves)
    for a, b in zip(first, second, strict=True):
        assert torch.equal(a, b)
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(out.sum(), leaves)


def test_input_changed_before_the_backward_is_noticed(device: str) -> None:
    leaves = leaves_of(CASE, device)
    key = leaves[1] * 1.0
    out = attention(leaves[0], key, leaves[2], 0.3, causal=True)
    key.add_(1.0)
    with pytest.raises(RuntimeError, match="inplace"):
        out.sum().backward()


# ---- negl_prob -----------------------------------------------------------------------------------


def test_negl_prob_may_change_at_any_time(device: str) -> None:
    attn = BackLite()
    assert attn.negl_prob == 0.0
    leaves = leaves_of(CASE, device)
    for negl_prob in (0.0, 0.3, [0.0, 0.1, 0.2, 0.3], 0.02, torch.tensor(0.5), 0.0):
        attn.negl_prob = negl_prob
        fresh = attention(*leaves, negl_prob, causal=True)
        for a, b in zip(
            gradients(attn(*leaves, causal=True), leaves), gradients(fresh, leaves), strict=True
        ):
            assert torch.equal(a, b)


def test_negl_prob_reads_back() -> None:
    attn = BackLite(0.05)
    assert attn.negl_prob == 0.05
    attn.negl_prob = [0.0, 0.1]
    assert isinstance(attn.negl_prob, torch.Tensor)
    assert attn.negl_prob.dtype == torch.float64
    assert attn.negl_prob.tolist() == [0.0, 0.1]
    attn.negl_prob = torch.tensor([0.25, 0.5])
    assert attn.negl_prob.tolist() == [0.25, 0.5]


@pytest.mark.parametrize(
    "cast", [torch.nn.Module.half, torch.nn.Module.double, lambda m: m.to("cpu")]
)
def test_negl_prob_survives_module_casts(cast: Any) -> None:
    attn = cast(BackLite([0.1, 1e-9]))
    assert attn.negl_prob.tolist() == [0.1, 1e-9]


def test_module_says_what_it_is() -> None:
    assert "negl_prob=0.05" in repr(BackLite(0.05))


# ---- Density -------------------------------------------------------------------------------------


@pytest.mark.parametrize("negl_prob", [0.02, 0.3])
def test_last_density(negl_prob: float, device: str) -> None:
    attn = BackLite(negl_prob)
    assert attn.last_density is None
    leaves = leaves_of(CASE, device)
    attn(*leaves, causal=True)
    live, _ = oracle.live_tiles(CASE, CASE.inputs(device), negl_prob)
    allowed = reference.mask_tiles(**CASE.lengths, **CASE.mask)
    expected = int(live.sum()) / (int(allowed.sum()) * CASE.num_heads)
    assert expected < 1.0
    assert attn.last_density == pytest.approx(expected, rel=1e-12)


def test_last_density_of_an_exact_call(device: str) -> None:
    attn = BackLite(0.3)
    attn(*leaves_of(CASE, device), causal=True)
    assert attn.last_density < 1.0
    with torch.no_grad():
        attn(*leaves_of(CASE, device), causal=True)
    assert attn.last_density == 1.0
    attn.negl_prob = 0.0
    attn(*leaves_of(CASE, device), causal=True)
    assert attn.last_density == 1.0
    attn.negl_prob = 0.1
    attn(*leaves_of(Case(0, 0), device))
    assert attn.last_density == 1.0, "no tiles at all"


# ---- Statistics buffer ---------------------------------------------------------------------------


@pytest.mark.parametrize("needs_grad", [False, True])
@pytest.mark.parametrize("negl_prob", [0.0, 0.3])
def test_tile_stats_buffer(negl_prob: float, needs_grad: bool, device: str) -> None:
    """Filled always, also where nothing would be recorded, and changes no result."""
    inputs = CASE.inputs(device)
    tensors = leaves_of(CASE, device) if needs_grad else list(inputs[:3])
    buffer = torch.full(back_lite.tile_stats_shape(*tensors[:2]), float("nan"), device=device)
    out = attention(*tensors, negl_prob, tile_stats=buffer, causal=True)
    expected_out, _, expected = ops.forward(*inputs[:3], **CASE.options, record=True)
    assert expected is not None
    assert torch.equal(buffer, expected)
    assert torch.equal(out, expected_out)
    if needs_grad:
        without = attention(*tensors, negl_prob, causal=True)
        for a, b in zip(gradients(out, tensors), gradients(without, tensors), strict=True):
            assert torch.equal(a, b)


# ---- Logging -------------------------------------------------------------------------------------

LOGGING_CODE = """
import logging, sys, torch, cases
from back_lite import BackLite
from test_api import CASE
logging.basicConfig(stream=sys.stdout, level=logging.INFO, format="%(name)s|%(message)s")
leaves = [t.requires_grad_() for t in CASE.inputs()[:3]]
for negl_prob in (0.3, 0.0):
    attn = BackLite(negl_prob)
    attn(*leaves, causal=True)
    print("density", attn.last_density)
"""


def test_verbose_logs_every_call() -> None:
    lines = child.run(LOGGING_CODE, BACK_LITE_VERBOSE="1").splitlines()
    logged = [line for line in lines if line.startswith("back_lite|")]
    assert len(logged) == 2
    assert all("mask density" in line for line in logged)
    assert "tile stats" in logged[0]
    sparsity = [float(re.search(r"sparsity ([\d.]+)", line)[1]) for line in logged]
    densities = [float(line.split()[1]) for line in lines if line.startswith("density")]
    assert sparsity == pytest.approx([1.0 - density for density in densities], abs=1e-4)
    assert 0.0 < sparsity[0] < 1.0
    assert sparsity[1] == 0.0


@pytest.mark.parametrize("value", ["", "0"])
def test_silent_without_verbose(value: str) -> None:
    assert "back_lite|" not in child.run(LOGGING_CODE, BACK_LITE_VERBOSE=value)


def test_verbose_changes_no_result() -> None:
    code = """
import hashlib, cases, oracle
from test_api import CASE
for t in oracle.library(CASE, CASE.inputs(), 0.3):
    print(hashlib.sha1(str(t.tolist()).encode()).hexdigest())
"""
    assert child.run(code) == child.run(code, BACK_LITE_VERBOSE="1")


# ---- Instruction sets ----------------------------------------------------------------------------


@pytest.mark.parametrize("isa", ["baseline", "avx2", "avx512"])
def test_every_instruction_set_is_exact_and_sparse(isa: str) -> None:
    """One set serves the other tests; the others must meet the same bound."""
    with open("/proc/cpuinfo") as file:
        flags = file.read()
    needed = {"baseline": "sse2", "avx2": "avx2", "avx512": "avx512f"}[isa]
    if needed not in flags:
        pytest.skip(f"this CPU has no {isa}")
    code = """
import cases, comparer, oracle, torch
from back_lite import _library
torch.set_num_threads(2)
print(_library.cpu_isa)
for case in cases.SPARSE[:6] + cases.SCALES[:2] + cases.GRID[::8]:
    inputs = case.inputs()
    for negl_prob in (0.0, 0.3):
        live = oracle.live_tiles(case, inputs, negl_prob)[0] if negl_prob else None
        comparer.check_results(case, inputs, oracle.library(case, inputs, negl_prob), live=live)
"""
    assert child.run(code, BACK_LITE_CPU_ISA=isa).strip() == isa
