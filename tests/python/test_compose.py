"""With the rest of PyTorch: compile, checkpointing, autocast, copies, transforms, fake tensors.

Numbers of rows go on from those of test_faults.py.
"""

from __future__ import annotations

import copy
import io
import logging
import pickle
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import back_lite
import cases
import comparer
import composition
import oracle
import pytest
import torch
from back_lite import BackLite, attention, ops
from cases import Case
from composition import Block, make_block, step
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import (
    FlopCounterMode,
    sdpa_backward_flop_count,
    sdpa_flop_count,
)

CASE = Case(200, 300, num_heads=4, num_key_heads=2, topics=True, lse_grad=True, causal=True)

needs_operators = pytest.mark.skipif(
    not hasattr(torch.library, "register_fake"),
    reason="torch before 2.4: eager mode alone, without operators",
)


def leaves_of(case: Case, device: str) -> list[Tensor]:
    return [t.detach().requires_grad_() for t in case.inputs(device)[:3]]


@pytest.fixture(autouse=True)
def _forget_compiled_code() -> Iterator[None]:
    torch._dynamo.reset()
    logging.getLogger("torch.__trace").propagate = False  # or it buries the message of a failure
    yield
    torch._dynamo.reset()


# ---- torch.compile -------------------------------------------------------------------------------


@pytest.mark.parametrize("negl_prob", [0.0, 0.3])
@needs_operators
def test_row38_compiled_training_step(negl_prob: float) -> None:
    composition.check_compiled_step(negl_prob, "cpu", backend="aot_eager")


@needs_operators
def test_row38_compiled_inference() -> None:
    composition.check_compiled_inference("cpu")


@pytest.mark.needs_compiler
@needs_operators
@pytest.mark.skipif(
    not hasattr(torch.library, "register_vmap"),
    reason="what torch before 2.5 compiles switches subnormals off in the whole process",
)
def test_row38_inductor() -> None:
    """The mode is one of GPUs; here it must not be in the way."""
    composition.check_compiled_step(0.3, "cpu", mode="reduce-overhead")


@needs_operators
def test_row38_compiled_function_and_stages(device: str) -> None:
    inputs = CASE.inputs(device)

    def whole(*leaves: Tensor) -> Tensor:
        return attention(*leaves, 0.3, causal=True)

    def staged(q: Tensor, k: Tensor, v: Tensor, grad_out: Tensor) -> tuple[Tensor, ...]:
        out, lse, stats = ops.forward(q, k, v, causal=True, record=True)
        bits = ops.select(stats, 0.3, **CASE.lengths, causal=True)
        return ops.backward(grad_out, q, k, v, out, lse, bits, causal=True)

    no_lse = cases.Inputs(*inputs[:4], None)
    expected = oracle.library(CASE, no_lse, 0.3)
    leaves = leaves_of(CASE, device)
    out = torch.compile(whole, fullgraph=True, backend="aot_eager")(*leaves)
    assert torch.equal(out, expected.out)
    grads = torch.autograd.grad(out, leaves, inputs.grad_out)
    grads_of_stages = torch.compile(staged, fullgraph=True, backend="aot_eager")(*inputs[:4])
    for a, b, c in zip(grads, grads_of_stages, expected[2:], strict=True):
        assert torch.equal(a, c)
        assert torch.equal(b, c)


@needs_operators
def test_row38_density_of_compiled_calls(device: str) -> None:
    """Documented: they do not count, and leave what the last eager call told."""
    attn = BackLite(0.3)
    compiled = torch.compile(attn, fullgraph=True, backend="aot_eager")
    leaves = leaves_of(CASE, device)
    compiled(*leaves, causal=True)
    assert attn.last_density is None
    attn(*leaves, causal=True)
    eager = attn.last_density
    compiled(*leaves_of(Case(640, 1100, num_heads=4, topics=True), device), causal=True)
    assert attn.last_density == eager


@needs_operators
def test_row40_no_recompile_when_negl_prob_changes() -> None:
    counter = CompileCounterWithBackend("aot_eager")
    composition.check_changes_of_negl_prob("cpu", lambda: counter.frame_count, backend=counter)
    assert counter.frame_count == 1


@needs_operators
def test_row40_recompiles_between_zero_and_non_zero_alone() -> None:
    block, x = make_block(0.1)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(block, fullgraph=True, backend=counter)
    for negl_prob in (0.1, 0.0, 0.3, [0.0, 0.0, 0.0, 0.0], [0.0, 0.1, 0.0, 0.0]):
        block.attn.negl_prob = negl_prob
        composition.assert_steps_alike(step(compiled, block, x), step(block, block, x))
    assert counter.frame_count == 2


@pytest.mark.parametrize("dynamic", [None, True])
@needs_operators
def test_row40_no_recompile_per_length(dynamic: bool | None) -> None:
    composition.check_lengths("cpu", dynamic)


@needs_operators
def test_row40_no_recompile_per_key_length(device: str) -> None:
    """Sq and Sk on their own, as in prefilling a cache."""
    counter = CompileCounterWithBackend("aot_eager")
    attn = BackLite(0.3)
    compiled = torch.compile(attn, fullgraph=True, backend=counter, dynamic=True)
    for query_length, key_length in [(100, 130), (129, 500), (64, 1000), (333, 200)]:
        leaves = leaves_of(Case(query_length, key_length, topics=True), device)
        out = compiled(*leaves, causal=True)
        assert torch.equal(out, attn(*leaves, causal=True))
    assert counter.frame_count == 1


@pytest.mark.skipif(
    not hasattr(torch.library, "register_vmap"),
    reason="compiled autograd of torch before 2.5 takes no operators of others",
)
def test_row38_compiled_autograd() -> None:
    composition.check_compiled_autograd("cpu")


@pytest.mark.skipif(
    torch.__version__ < (2, 11), reason="transforms compiled by torch before 2.11 are exact"
)
def test_row38_compiled_transform(device: str) -> None:
    """It skips what eager code skips."""
    query, key, value = CASE.inputs(device)[:3]
    negl_prob = torch.tensor(0.3)

    def gradient(query: Tensor) -> Tensor:
        def loss(query: Tensor) -> Tensor:
            return attention(query, key, value, negl_prob, causal=True).sin().sum()

        return torch.func.grad(loss)(query)

    compiled = torch.compile(gradient, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(query), gradient(query))


@needs_operators
def test_row38_export() -> None:
    composition.check_export("cpu")


# ---- Checkpointing -------------------------------------------------------------------------------


class _DispatchedOperators(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


class _CalledFunctions(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("listener", [_DispatchedOperators, _CalledFunctions])
@needs_operators
def test_who_listens_hears_the_operator(listener: Any, device: str) -> None:
    """Calls skip the dispatcher only where nobody would notice."""
    with listener() as heard:
        out = attention(*leaves_of(CASE, device), 0.05)
    assert "back_lite.attention.default" in heard.names
    with _DispatchedOperators() as heard:
        out.sum().backward()
    assert "back_lite.backward.default" in heard.names


@needs_operators
def test_a_profile_names_the_operator(device: str) -> None:
    with torch.profiler.profile() as profile:
        attention(*leaves_of(CASE, device), 0.05).sum().backward()
    names = {event.key for event in profile.key_averages()}
    assert {"back_lite::attention", "back_lite::backward"} <= names


@pytest.mark.parametrize("negl_prob", [0.0, 0.3])
@needs_operators
@pytest.mark.skipif(
    not hasattr(torch.library, "register_vmap"),
    reason="torch before 2.5 does not find the formulas of operators that are not its own",
)
def test_flops_are_counted_as_those_of_torchs_attention(negl_prob: float, device: str) -> None:
    case = Case(300, 200, batch=2, num_heads=4, num_key_heads=4)
    q, k, v = leaves_of(case, device)
    with FlopCounterMode(display=False) as counter:
        BackLite(negl_prob=negl_prob)(q, k, v).sum().backward()
    shapes = [t.transpose(1, 2).shape for t in (q, k, v)]
    expected = sdpa_flop_count(*shapes) + sdpa_backward_flop_count(shapes[0], *shapes)
    assert counter.get_total_flops() == expected > 0


def _zeros_without_memory(like: Tensor) -> tuple[Tensor, Tensor]:
    return torch._efficientzerotensor(like.shape, device=like.device), torch.zeros_like(like)


#: Tensors that are more than memory, which the dispatcher acts upon, and their plain twins.
MARKED: dict[str, Callable[[Tensor], tuple[Tensor, Tensor]]] = {
    "signs still to be changed": lambda like: (torch._neg_view(-like), like),
    "imaginary part of a conjugate": lambda like: (torch.complex(like, -like).conj().imag, like),
    "zeros without memory": _zeros_without_memory,
}


@pytest.mark.parametrize("marked", MARKED.values(), ids=MARKED)
def test_marks_of_tensors_are_seen(
    marked: Callable[[Tensor], tuple[Tensor, Tensor]], device: str
) -> None:
    inputs = [t.detach() for t in leaves_of(CASE, device)]
    for i in range(3):
        results = []
        for tensor in marked(inputs[i]):
            tensors = [*inputs[:i], tensor, *inputs[i + 1 :]]
            others = [t.detach().requires_grad_() for t in tensors if t is not tensor]
            called = [*others[:i], tensor, *others[i:]]
            out = attention(*called)
            with torch.no_grad():
                assert torch.equal(attention(*called), out)
            results.append((out, *torch.autograd.grad(out.sum(), others)))
        assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    leaves = leaves_of(CASE, device)
    ours, theirs = (
        torch.autograd.grad(attention(*leaves), leaves, grad)
        for grad in marked(torch.ones_like(inputs[0]))
    )
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


@needs_operators
@pytest.mark.skipif(
    torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
    != torch._C.DispatchKeySet(torch._C.DispatchKey.CPU),
    reason="an older torch (2.4) does not compare dispatch keys: every call is dispatched",
)
def test_a_tensor_that_is_only_memory_takes_the_short_way(device: str) -> None:
    from back_lite._operators import is_plain

    tensor = torch.ones(1, device=device, requires_grad=True)
    with torch.inference_mode():
        inference = torch.ones(1, device=device)
    assert all(is_plain(t) for t in (tensor, tensor * 2, tensor.detach(), inference))
    assert not any(is_plain(t) for t in (tensor.to_sparse(), tensor.to("meta")))


@needs_operators
def test_a_call_below_autograd_builds_no_graph(device: str) -> None:
    with torch._C._AutoDispatchBelowAutograd():
        assert attention(*leaves_of(CASE, device), 0.05).grad_fn is None


@pytest.mark.parametrize("negl_prob", [0.0, 0.3])
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_row42_checkpointing_is_bitwise(use_reentrant: bool, negl_prob: float) -> None:
    composition.check_checkpointing(use_reentrant, negl_prob, "cpu")


def test_row42_checkpointing_sees_a_new_negl_prob() -> None:
    block, x = make_block(0.3)
    out = checkpoint(block, x, use_reentrant=False)
    block.attn.negl_prob = 0.0
    with pytest.raises(torch.utils.checkpoint.CheckpointError, match="number of tensors"):
        out.sum().backward()


@needs_operators
def test_row42_checkpointing_compiled() -> None:
    block, x = make_block(0.3)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def checkpointed(x: Tensor) -> Tensor:
        return checkpoint(block, x, use_reentrant=False)

    for a, b in zip(step(block, block, x), step(checkpointed, block, x), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("negl_prob", [0.0, 0.3])
@needs_operators
@pytest.mark.skipif(
    not hasattr(torch.utils.checkpoint, "CheckpointPolicy"),
    reason="torch before 2.5 has no policies of selective checkpointing",
)
def test_row42_selective_checkpointing_saves_the_attention(negl_prob: float) -> None:
    composition.check_selective_checkpointing(negl_prob, "cpu")


# ---- Autograd and transforms ---------------------------------------------------------------------


@pytest.mark.parametrize("negl_prob", [0.0, 0.3])
def test_row43_double_backward_is_refused(negl_prob: float, device: str) -> None:
    leaves = leaves_of(CASE, device)
    out = attention(*leaves, negl_prob, causal=True)
    first = torch.autograd.grad(out.square().sum(), leaves, create_graph=True)
    expected = oracle.library(
        CASE, cases.Inputs(*CASE.inputs(device)[:3], 2.0 * out.detach(), None), negl_prob
    )
    for a, b in zip(first, expected[2:], strict=True):
        assert torch.equal(a, b)
    with pytest.raises(NotImplementedError, match="second derivative"):
        torch.autograd.grad(first[0].square().sum(), leaves)


@pytest.mark.parametrize("negl_prob", [0.0, 0.3])
@needs_operators
def test_row44_func_grad(negl_prob: float, device: str) -> None:
    leaves = leaves_of(CASE, device)

    def loss(*tensors: Tensor) -> Tensor:
        out, lse = attention(*tensors, negl_prob, causal=True, return_softmax_lse=True)
        return out.sin().sum() + lse.sum()

    expected = torch.autograd.grad(loss(*leaves), leaves)
    got = torch.func.grad(loss, argnums=(0, 1, 2))(*(t.detach() for t in leaves))
    for a, b in zip(got, expected, strict=True):
        assert torch.equal(a, b)


@pytest.mark.skipif(
    not hasattr(torch.library, "register_vmap"), reason="torch before 2.5 has no rules for vmap"
)
@pytest.mark.parametrize("negl_prob", [0.0, 0.3])
def test_row44_vmap(negl_prob: float, device: str) -> None:
    """Maps over any inputs; the results are those of a loop."""
    q, k, v = CASE.inputs(device)[:3]
    queries = torch.stack([q, -q, 2.0 * q])

    def gradient(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        def loss(*tensors: Tensor) -> Tensor:
            return attention(*tensors, negl_prob, causal=True).sin().sum()

        return torch.func.grad(loss, argnums=(0, 1, 2))(q, k, v)

    mapped = torch.func.vmap(gradient, in_dims=(0, None, None))(queries, k, v)
    for i, query in enumerate(queries):
        for a, b in zip(mapped, gradient(query, k, v), strict=True):
            torch.testing.assert_close(a[i], b)


@pytest.mark.skipif(
    not hasattr(torch.library, "register_vmap"), reason="torch before 2.5 has no rules for vmap"
)
def test_row44_vmap_of_the_stages(device: str) -> None:
    q, k, v = CASE.inputs(device)[:3]

    def gradient(q: Tensor) -> tuple[Tensor, ...]:
        out, lse, stats = ops.forward(q, k, v, causal=True, record=True)
        bits = ops.select(stats, 0.3, **CASE.lengths, causal=True)
        return bits, *ops.backward(out, q, k, v, out, lse, bits, causal=True)

    mapped = torch.func.vmap(gradient)(torch.stack([q, 2.0 * q]))
    for a, b in zip(mapped, gradient(2.0 * q), strict=True):
        assert torch.equal(a[1], b)


@pytest.mark.skipif(
    not hasattr(torch.library, "register_vmap"), reason="torch before 2.5 has no rules for vmap"
)
@pytest.mark.parametrize("sizes", [(0, 1), (3, 0)], ids=str)
def test_row44_vmap_over_nothing(sizes: tuple[int, int], device: str) -> None:
    _, *shape = CASE.inputs(device)[0].shape
    queries = torch.empty(*sizes, *shape, device=device)
    k, v = (t[: sizes[1]] for t in CASE.inputs(device)[1:3])
    gradient = torch.func.grad(lambda q: attention(q, k, v, 0.3, causal=True).sum())
    assert torch.func.vmap(lambda q: attention(q, k, v))(queries).shape == queries.shape
    assert torch.func.vmap(gradient)(queries).shape == queries.shape


def test_row44_vmap_over_thresholds_is_refused(device: str) -> None:
    q, k, v = CASE.inputs(device)[:3]
    with pytest.raises(NotImplementedError, match="negl_prob is mapped over"):
        torch.func.vmap(lambda p: attention(q, k, v, p))(torch.tensor([0.1, 0.2], device=device))


@pytest.mark.skipif(
    not hasattr(torch.library, "register_vmap"), reason="torch before 2.5 has no rules for vmap"
)
def test_row44_jacrev(device: str) -> None:
    """Row by row, what one backward of that row gives."""
    q, k, v = CASE.inputs(device)[:3]
    q = q.detach().requires_grad_()

    def some(query: Tensor) -> Tensor:
        return attention(query, k, v, 0.3, causal=True)[0, 100:103, 1, 2]

    jacobian = torch.func.jacrev(some)(q.detach())
    for row, element in zip(jacobian, some(q), strict=True):
        assert torch.equal(row, torch.autograd.grad(element, q, retain_graph=True)[0])


@needs_operators
@pytest.mark.parametrize("negl_prob", [0.0, 0.3])
def test_row44_gradients_of_a_batch_of_outputs(negl_prob: float, device: str) -> None:
    """torch maps over them by a mark of the tensor, not by torch.func."""
    leaves = leaves_of(CASE, device)
    out, lse = attention(*leaves, negl_prob, causal=True, return_softmax_lse=True)
    grads = torch.randn(2, *out.shape, device=device), torch.randn(2, *lse.shape, device=device)
    mapped = torch.autograd.grad(
        [out, lse], leaves, grads, retain_graph=True, is_grads_batched=True
    )
    for i in range(2):
        one = torch.autograd.grad([out, lse], leaves, [g[i] for g in grads], retain_graph=True)
        assert all(torch.equal(a[i], b) for a, b in zip(mapped, one, strict=True))


@pytest.mark.parametrize("fast_mode", [False, True])
def test_row44_gradcheck(fast_mode: bool, device: str) -> None:
    """With everything that torch checks of reverse mode: batched and undefined gradients too."""
    case = Case(9, 12, num_heads=2, num_key_heads=1, head_dim=8, causal=True, dtype=torch.float64)
    torch.autograd.gradcheck(
        lambda *tensors: attention(*tensors, causal=True, return_softmax_lse=True),
        leaves_of(case, device),
        check_batched_grad=hasattr(torch.library, "register_fake"),
        fast_mode=fast_mode,
    )


class _GradientIs(torch.autograd.Function):
    """The identity; its gradient is what a function makes of it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, function: Callable[[Tensor], Tensor | None]) -> Tensor:
        ctx.function = function
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return ctx.function(grad), None


def test_row44_no_gradient_of_the_outputs_is_none_of_the_inputs(device: str) -> None:
    """As after torch's own attention."""
    leaves = leaves_of(CASE, device)
    _GradientIs.apply(attention(*leaves, 0.3), lambda grad: None).sum().backward()
    assert [leaf.grad for leaf in leaves] == [None] * 3


def test_row44_forward_mode_is_refused(device: str) -> None:
    tensors = CASE.inputs(device)[:3]
    with pytest.raises((NotImplementedError, RuntimeError), match=r"forward-mode|forward AD|jvp"):
        torch.func.jvp(lambda q: attention(q, *tensors[1:]), (tensors[0],), (tensors[0],))


OPCHECK_CASES = [
    CASE,
    Case(1000, 72, head_dim=72, batch=2),
    Case(0, 5),
    Case(5, 0, causal=True),
    Case(65, 129, batch=0, dtype=torch.bfloat16, window_size=(31, 0)),
]


@pytest.mark.parametrize("case", OPCHECK_CASES, ids=cases.ids(OPCHECK_CASES))
@needs_operators
def test_row39_opcheck_of_every_operator(case: Case, device: str) -> None:
    """Schema, fake against real (shapes, strides, dtypes), autograd registration, AOT dispatch."""
    operators = torch.ops.back_lite
    inputs = case.inputs(device)
    threshold = torch.tensor([1 << 38], device=device)
    scale, mask = 0.1, (case.causal, *case.window_size)

    strided = [t.transpose(1, 2).contiguous().transpose(1, 2) for t in inputs[:3]]
    for tensors in (inputs[:3], strided):
        leaves = [t.detach().requires_grad_() for t in tensors]
        for negl_prob in (None, threshold):
            for record in (False, True):
                arguments = (*leaves, negl_prob, scale, *mask, record)
                torch.library.opcheck(operators.attention.default, arguments)

    out, lse, stats = ops.forward(*inputs[:3], scale=scale, **case.mask, record=True)
    assert stats is not None
    arguments = (stats, threshold, *case.lengths.values(), *mask)
    torch.library.opcheck(operators.select.default, arguments)
    bits = ops.select(stats, 0.3, **case.lengths, **case.mask)
    for tile_bits in (None, bits):
        for grad_lse in (None, torch.ones_like(lse)):
            arguments = (inputs.grad_out, *inputs[:3], out, lse, tile_bits, grad_lse, scale, *mask)
            torch.library.opcheck(operators.backward.default, arguments)


@needs_operators
def test_every_operator_is_checked() -> None:
    names = torch._C._dispatch_get_all_op_names()
    assert {n.split("::")[1] for n in names if n.startswith("back_lite::")} == {
        "attention",
        "select",
        "backward",
    }


# ---- Autocast ------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_row45_autocast(dtype: torch.dtype, device: str) -> None:
    """Float32 in, computed in the autocast dtype, float32 gradients out."""
    case = Case(130, 200, topics=True)
    inputs = case.inputs(device)
    leaves = leaves_of(case, device)
    with torch.autocast(device, dtype=dtype):
        out = attention(*leaves, 0.3)
    assert out.dtype == dtype
    low = cases.Inputs(*(t.to(dtype) for t in inputs[:4]), None)
    expected = oracle.library(case, low, 0.3)
    assert torch.equal(out, expected.out)
    grads = torch.autograd.grad(out, leaves, low.grad_out)
    for a, b in zip(grads, expected[2:], strict=True):
        assert a.dtype == torch.float32
        assert torch.equal(a, b.float())


def test_row45_autocast_of_mixed_dtypes(device: str) -> None:
    q, k, v = Case(130, 200).inputs(device)[:3]
    mixed = (q, k.bfloat16(), v.half())
    with torch.autocast(device, dtype=torch.bfloat16):
        out = attention(*mixed)
    assert torch.equal(out, attention(*(t.bfloat16() for t in mixed)))
    with pytest.raises(TypeError, match="key"):
        attention(*mixed)
    with torch.autocast(device, dtype=torch.bfloat16, enabled=False), pytest.raises(TypeError):
        attention(*mixed)


def test_row45_autocast_leaves_float64_alone(device: str) -> None:
    tensors = Case(13, 20, dtype=torch.float64).inputs(device)[:3]
    with torch.autocast(device, dtype=torch.bfloat16):
        assert torch.equal(attention(*tensors), attention(*tensors))
        assert attention(*tensors).dtype == torch.float64


@needs_operators
def test_row45_autocast_compiled(device: str) -> None:
    """Attention itself casts: no layer before it has."""
    attn = BackLite(0.3)
    compiled = torch.compile(attn, fullgraph=True, backend="aot_eager")
    leaves = leaves_of(CASE, device)
    results = []
    for function in (attn, compiled):
        with torch.autocast(device, dtype=torch.bfloat16):
            out = function(*leaves, causal=True)
        assert out.dtype == torch.bfloat16
        results.append((out, *torch.autograd.grad(out.float().sin().sum(), leaves)))
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)


# ---- Copies --------------------------------------------------------------------------------------


@pytest.mark.parametrize("negl_prob", [0.0, 0.05, [0.1, 0.2, 0.3, 0.4]])
@pytest.mark.parametrize(
    "copied",
    [
        copy.deepcopy,
        copy.copy,
        lambda module: pickle.loads(pickle.dumps(module)),
        lambda module: _saved_and_loaded(module),
    ],
    ids=["deepcopy", "copy", "pickle", "save"],
)
def test_copies_keep_negl_prob(copied: Callable[[Any], Any], negl_prob: Any, device: str) -> None:
    attn = BackLite(negl_prob)
    leaves = leaves_of(CASE, device)
    out = attn(*leaves, causal=True)  # so that there is a last call that must not be copied
    twin = copied(attn)
    assert torch.equal(torch.as_tensor(twin.negl_prob), torch.as_tensor(attn.negl_prob))
    grads = torch.autograd.grad(out.sum(), leaves)
    twin_grads = torch.autograd.grad(twin(*leaves, causal=True).sum(), leaves)
    for a, b in zip(grads, twin_grads, strict=True):
        assert torch.equal(a, b)


def _saved_and_loaded(module: nn.Module) -> Any:
    buffer = io.BytesIO()
    torch.save(module, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


def test_a_deep_copy_is_independent(device: str) -> None:
    attn = BackLite(0.1)
    attn(*leaves_of(CASE, device))
    twin = copy.deepcopy(attn)
    twin.negl_prob = 0.4
    assert attn.negl_prob == 0.1
    assert twin.negl_prob == 0.4
    assert twin.last_density is None, "the last call of the original is not the copy's"


def test_pickle_is_small(device: str) -> None:
    """Neither bits nor outputs of the last call travel with the module."""
    attn = BackLite(0.1)
    before = len(pickle.dumps(attn))
    attn(*leaves_of(Case(2000, 2000, topics=True), device))
    assert len(pickle.dumps(attn)) == before


def test_state_dict_is_empty() -> None:
    block, _ = make_block(0.1)
    assert not BackLite([0.1, 0.2]).state_dict()
    assert all(name.startswith(("project.", "join.")) for name in block.state_dict())
    other = Block(0.3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        other.load_state_dict(block.state_dict())
    assert other.attn.negl_prob == 0.3


def test_meta_then_to_empty_keeps_negl_prob(device: str) -> None:
    """As large models are built."""
    with torch.device("meta"):
        block = Block(0.25)
    block.to_empty(device=device)
    assert block.attn.negl_prob == 0.25
    leaves = leaves_of(CASE, device)
    grads = torch.autograd.grad(block.attn(*leaves).sum(), leaves)
    expected = torch.autograd.grad(attention(*leaves, 0.25).sum(), leaves)
    for a, b in zip(grads, expected, strict=True):
        assert torch.equal(a, b)


def test_train_and_eval_are_alike(device: str) -> None:
    """Skipping depends on gradients being wanted, not on the mode."""
    attn = BackLite(0.3).eval()
    attn(*leaves_of(CASE, device), causal=True)
    assert attn.last_density < 1.0


def test_calls_before_their_backwards_keep_their_own_tiles(device: str) -> None:
    """Two calls of one module before either backward: each keeps its own tiles."""
    attn = BackLite(0.3)
    first, second = leaves_of(CASE, device), leaves_of(Case(300, 200, topics=True), device)
    out_first = attn(*first, causal=True)
    attn.negl_prob = 0.01
    out_second = attn(*second)
    for out, leaves, negl_prob, causal in [
        (out_second, second, 0.01, False),
        (out_first, first, 0.3, True),
    ]:
        grads = torch.autograd.grad(out.sum(), leaves)
        fresh = attention(*leaves, negl_prob, causal=causal)
        for a, b in zip(grads, torch.autograd.grad(fresh.sum(), leaves), strict=True):
            assert torch.equal(a, b)


@needs_operators
def test_compiled_results_meet_the_bound(device: str) -> None:
    case = Case(300, 700, topics=True, causal=True, lse_grad=True, dtype=torch.bfloat16)
    inputs = case.inputs(device)
    live, _ = oracle.live_tiles(case, inputs, 0.05)
    leaves = leaves_of(case, device)
    attn = torch.compile(BackLite(0.05), fullgraph=True, backend="aot_eager")
    out, lse = attn(*leaves, causal=True, return_softmax_lse=True)
    grads = torch.autograd.grad([out, lse], leaves, [inputs.grad_out, inputs.grad_lse])
    got = oracle.Results(out.detach(), lse.detach(), *grads)
    comparer.check_results(case, inputs, got, live=live)


# ---- changes of negl_prob that meet a call -----------------------------------------------------


def test_negl_prob_set_by_another_thread_is_never_torn(device: str) -> None:
    """A call sees all of the old thresholds or all of the new."""
    case = Case(200, 300, num_heads=4, topics=True)
    leaves = leaves_of(case, device)

    def gradient(out: Tensor) -> Tensor:
        return torch.autograd.grad(out.sum(), leaves[0])[0]

    settings = ([0.05] * 4, [0.5] * 4, 0.2)
    expected = [gradient(attention(*leaves, setting)) for setting in settings]
    module = BackLite(settings[0])
    done = threading.Event()

    def change() -> None:
        while not done.is_set():
            for setting in settings:
                module.negl_prob = setting

    thread = threading.Thread(target=change)
    thread.start()
    try:
        for _ in range(200):
            actual = gradient(module(*leaves))
            assert any(torch.equal(actual, one) for one in expected)
    finally:
        done.set()
        thread.join()


def test_an_interrupted_change_of_negl_prob_leaves_the_module_sound(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    leaves = leaves_of(Case(200, 300, num_heads=4), device)
    module = BackLite([0.05] * 4)

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(back_lite._thresholds, "fill_table", interrupted)
        with pytest.raises(KeyboardInterrupt):
            module.negl_prob = [0.5] * 4
    assert module.negl_prob.tolist() == [0.05] * 4
    module(*leaves)


# ---- where the tiles cannot be read ------------------------------------------------------------


@needs_operators
@pytest.mark.skipif(
    not hasattr(torch.library, "register_vmap"), reason="torch before 2.5 has no rules for vmap"
)
def test_verbose_and_density_under_transforms(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, device: str
) -> None:
    """Logging does not make a call fail, and nothing is said that is not known."""
    monkeypatch.setenv("BACK_LITE_VERBOSE", "1")
    caplog.set_level(logging.INFO, logger="back_lite")
    module = BackLite(0.3)
    query, key, value = (t.detach() for t in leaves_of(CASE, device))

    def loss(x: Tensor) -> Tensor:
        return module(x, key, value, causal=True).sum()

    torch.vmap(torch.func.grad(loss))(torch.stack([query, query]))
    assert module.last_density is None
    with FakeTensorMode():
        fake = torch.empty(1, 100, 2, 8, device=device, requires_grad=True)
        attention(fake, fake, fake, 0.1)
    assert sum("cannot be read" in record.message for record in caplog.records) == 2
