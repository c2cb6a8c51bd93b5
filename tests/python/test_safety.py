"""Threads, processes, memory, and refusals."""

from __future__ import annotations

import gc
import multiprocessing
import sys
import threading
import weakref
from collections.abc import Callable
from typing import Any

import back_lite
import cases
import child
import comparer
import memory_doc
import oracle
import pytest
import torch
from back_lite import BackLite, attention, ops
from back_lite._library import has_cuda
from cases import Case, Inputs
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

linux = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


# ---- Threads and processes -----------------------------------------------------------------------


def test_two_python_threads_at_once(device: str) -> None:
    """Each with its own problem and threshold; the results are those of one after the other."""
    work = [
        (Case(500, 700, topics=True, causal=True, lse_grad=True), 0.05),
        (Case(300, 900, num_heads=8, num_key_heads=2, dtype=torch.bfloat16), 0.0),
        (Case(640, 640, topics=True, head_dim=128), [0.3, 0.0]),
    ]
    inputs = [case.inputs(device) for case, _ in work]

    def compute(i: int) -> oracle.Results:
        case, negl_prob = work[i]
        return oracle.library(case, inputs[i], negl_prob)

    alone = [compute(i) for i in range(len(work))]
    start = threading.Barrier(len(work))
    together: list[list[oracle.Results]] = [[] for _ in work]

    def repeat(i: int) -> None:
        start.wait()
        together[i].extend(compute(i) for _ in range(5))

    threads = [threading.Thread(target=repeat, args=(i,)) for i in range(len(work))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for expected, results in zip(alone, together, strict=True):
        assert len(results) == 5
        for result in results:
            comparer.assert_same(expected, result)


@pytest.mark.parametrize("case", cases.SPARSE, ids=cases.ids(cases.SPARSE))
def test_results_do_not_depend_on_the_number_of_threads(case: Case, device: str) -> None:
    """Bitwise: forward, statistics, bits and gradients."""
    inputs = case.inputs(device)

    def everything() -> list[Tensor]:
        live, stats = oracle.live_tiles(case, inputs, 0.05)
        exact, sparse = oracle.library(case, inputs), oracle.library(case, inputs, 0.05)
        return [live, stats, *exact, *sparse]

    torch.set_num_threads(1)
    expected = everything()
    for num_threads in (2, 3, 7):
        torch.set_num_threads(num_threads)
        for a, b in zip(expected, everything(), strict=True):
            assert torch.equal(a, b), f"{num_threads} threads"


@linux
def test_set_num_threads_is_obeyed() -> None:
    """Counted by the operating system: workers appear as they are asked for, and none before."""
    code = """
import os, torch
from back_lite import ops
torch.set_num_threads(1)
q = torch.ones(1, 512, 8, 64)
def tasks():
    return len(os.listdir("/proc/self/task"))
def num_threads():
    out, lse, stats = ops.forward(q, q, q, record=True)
    bits = ops.select(stats, 0.05, query_length=512, key_length=512)
    ops.backward(q, q, q, q, out, lse, bits)  # and no operator of torch's, with threads of its own
    return tasks()
ops.forward(q[:, :1], q, q)
before = tasks()
one = num_threads()
torch.set_num_threads(3)
asked = tasks()  # older torches start threads of their own at once
print(one - before, num_threads() - asked)
"""
    with_one, with_three = map(int, child.run(code).split())
    assert with_one == 0
    assert with_three == 2


def _in_child(queue: Any, case: Case, inputs: Inputs) -> None:
    torch.set_num_threads(2)
    queue.put([t.tolist() for t in oracle.library(case, inputs, 0.05)])


@linux
def test_forked_child_works(device: str) -> None:
    """Also after the parent's threads exist, which a fork does not copy."""
    case = Case(200, 300, topics=True, num_heads=4)
    inputs = case.inputs(device)
    expected = oracle.library(case, inputs, 0.05)
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    process = context.Process(target=_in_child, args=(queue, case, inputs))
    process.start()
    try:
        results = queue.get(timeout=60)
    finally:
        process.join(timeout=10)
        process.kill()
    assert process.exitcode == 0
    for name, a, b in zip(expected._fields, expected, results, strict=True):
        assert a.tolist() == b, name
    comparer.assert_same(expected, oracle.library(case, inputs, 0.05))  # the parent still works


@linux
def test_row05_uninitialised_workspace() -> None:
    """As in test_faults.py, for memory that the library takes from malloc."""
    code = """
import hashlib, torch, cases, oracle
from cases import Case
for case in cases.SPARSE[:4] + [Case(65, 129, num_heads=4), Case(300, 70, causal=True)]:
    for negl_prob in (0.0, 0.05):
        for t in oracle.library(case, case.inputs(), negl_prob):
            print(case.id, hashlib.sha1(str(t.tolist()).encode()).hexdigest())
"""
    # glibc fills what malloc returns with the complement of the byte: 0xFE, huge as a float.
    assert child.run(code) == child.run(code, MALLOC_PERTURB_="1")


# ---- Memory --------------------------------------------------------------------------------------


def _saved(function: Callable[[], object]) -> list[Tensor]:
    """Everything that autograd saves while the function runs."""
    saved: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        function()
    return saved


def _bytes(tensors: list[Tensor]) -> int:
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values())


def _leaves(inputs: Inputs) -> list[Tensor]:
    return [t.detach().requires_grad_() for t in inputs[:3]]


@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize("negl_prob", [0.0, 0.05])
def test_row33_saved_is_q_k_v_out_lse_and_bits(
    negl_prob: float, dtype: torch.dtype, device: str
) -> None:
    case = Case(2112, 520, num_heads=4, num_key_heads=2, dtype=dtype)
    leaves = _leaves(case.inputs(device))
    outputs: list[Tensor] = []
    attn = BackLite(negl_prob)

    def call() -> None:
        outputs.extend(attn(*leaves, return_softmax_lse=True))

    saved = _saved(call)
    expected = _bytes([*leaves, *outputs])
    if negl_prob > 0.0:
        words = 2  # 33 query tiles
        expected += 4 * case.batch * case.num_heads * case.num_key_tiles * words
    assert _bytes(saved) == expected
    assert len({t.data_ptr() for t in saved}) == len(saved) == (6 if negl_prob > 0.0 else 5)


def test_row33_nothing_else_stays_alive(device: str) -> None:
    """Not by way of the graph's node either: the statistics are gone when the call returns."""
    case = Case(640, 1280, num_heads=3, num_key_heads=1)
    leaves = _leaves(case.inputs(device))
    out = attention(*leaves, 0.05)
    gc.collect()
    stats_shape = back_lite.tile_stats_shape(*leaves[:2])
    shapes = [tuple(t.shape) for t in gc.get_objects() if type(t) is Tensor]
    assert stats_shape not in shapes
    alive = weakref.ref(out)
    del out
    gc.collect()
    assert alive() is None, "a call's output outlives its last user"


def test_row33_no_grad_records_nothing(device: str) -> None:
    case = Case(256, 700, topics=True)
    inputs = case.inputs(device)
    attn = BackLite(0.5)

    def recorded(*tensors: Tensor) -> bool:
        saved = _saved(lambda: attn(*tensors))
        assert (attn.last_density < 1.0) == any(t.dtype == torch.int32 for t in saved)
        return attn.last_density < 1.0

    assert recorded(*_leaves(inputs))
    assert not recorded(*inputs[:3]), "no input needs a gradient"
    with torch.no_grad():
        assert not recorded(*_leaves(inputs))
    with torch.inference_mode():
        assert not recorded(*_leaves(inputs))
    attn.negl_prob = 0.0
    assert not recorded(*_leaves(inputs))
    assert _saved(lambda: attn(*inputs[:3])) == []


PEAK_CASES = [
    (Case(4096, 4096, num_heads=8, num_key_heads=8, dtype=torch.bfloat16, causal=True), 0.05),
    (Case(1024, 2048, num_heads=32, num_key_heads=1, dtype=torch.bfloat16), 0.0),  # row 32
]


@linux
@pytest.mark.parametrize(("case", "negl_prob"), PEAK_CASES, ids=["row31_causal", "row32_mqa"])
def test_peak_memory(case: Case, negl_prob: float) -> None:
    """Forward + backward stay within what docs/3-memory.md adds up to, seen from outside.

    The formula itself is compared with the library's own numbers in tests/tools.
    """
    code = f"""
import torch, cases
from back_lite import attention
from cases import Case
from test_safety import PEAK_CASES, peak_bytes, documented_bytes
case, negl_prob = PEAK_CASES[{PEAK_CASES.index((case, negl_prob))}]
torch.set_num_threads(2)
inputs = case.inputs()
leaves = [t.requires_grad_() for t in inputs[:3]]
def call():
    out = attention(*leaves, negl_prob, **case.options)
    torch.autograd.grad(out, leaves, inputs.grad_out)
call()  # code that is loaded at first use
print(peak_bytes(call), documented_bytes(case, negl_prob, threads=2))
"""
    # So that what is freed is given back, and taken anew in the call that is measured.
    environment = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
    measured, documented = map(int, child.run(code, **environment).split())
    outputs = 2 * (2 * case.query_length * case.num_heads) * case.head_dim  # out, dq: bfloat16
    outputs += 2 * (2 * case.key_length * case.num_key_heads) * case.head_dim
    slack = 4 << 20  # pages and arenas of the allocators
    assert measured <= outputs + documented + slack
    assert measured >= documented / 2, "the measurement sees nothing"


def peak_bytes(function: Callable[[], object]) -> int:
    """How far the resident memory of this process rises while the function runs."""

    def status(field: str) -> int:
        with open("/proc/self/status") as file:
            line = next(line for line in file if line.startswith(field))
        return int(line.split()[1]) * 1024

    gc.collect()
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # resets the high-water mark
    before = status("VmRSS")
    function()
    return status("VmHWM") - before


def documented_bytes(case: Case, negl_prob: float, threads: int) -> int:
    """The largest sum of what docs/3-memory.md says is held at the same time."""
    formulas = memory_doc.formulas()
    b, h, hk = case.batch, case.num_heads, case.num_key_heads
    sq, sk, d, element = case.query_length, case.key_length, case.head_dim, 4
    record = negl_prob > 0.0
    kept = formulas["lse_bytes"](b, h, sq, element)
    forward = formulas["forward_workspace_bytes"](b, hk, sk, d, element, record, threads)
    if record:
        kept += formulas["tile_bits_bytes"](b, h, sq, sk)
        forward += formulas["tile_stats_bytes"](b, h, sq, sk)
        forward += formulas["select_workspace_bytes"](sk, threads)
    backward = formulas["schedule_bytes"](b, hk, sk)
    backward += formulas["backward_workspace_bytes"](b, h, hk, sq, sk, d, element, threads)
    return int(kept + max(forward, backward))


# ---- Refusals: in the forward, one message that names the argument, its value, what is accepted --


def _tensors(**changes: Any) -> dict[str, Any]:
    q = torch.zeros(2, 10, 4, 16, requires_grad=True)
    return {"query": q, "key": q[:, :, :2], "value": q[:, :, :2], **changes}


def _zeros(*shape: int, **options: Any) -> Tensor:
    return torch.zeros(*shape, **options)


Q, K, STATS = (2, 10, 4, 16), (2, 10, 2, 16), (2, 4, 1, 1)
REFUSED: list[tuple[str, dict[str, Any], type[Exception], str]] = [
    ("query_rank", {"query": _zeros(10, 4, 16)}, ValueError, r"query.*\(10, 4, 16\).*four|4"),
    ("key_rank", {"key": _zeros(2, 10, 16)}, ValueError, r"key.*\(2, 10, 16\)"),
    ("batch", {"key": _zeros(3, 10, 2, 16)}, ValueError, r"key.*3.*2"),
    ("key_length", {"value": _zeros(2, 11, 2, 16)}, ValueError, r"value.*11"),
    ("head_dim", {"key": _zeros(2, 10, 2, 24)}, ValueError, r"key.*24.*16"),
    ("heads", {"key": _zeros(2, 10, 3, 16), "value": _zeros(2, 10, 3, 16)}, ValueError, r"key.*3"),
    ("no_heads", {"key": _zeros(2, 10, 0, 16), "value": _zeros(2, 10, 0, 16)}, ValueError, "key"),
    ("value_heads", {"value": _zeros(*Q)}, ValueError, r"value.*4"),
    ("dtype", {"query": _zeros(*Q, dtype=torch.int64)}, TypeError, r"query.*int64.*float"),
    ("complex", {"query": _zeros(*Q, dtype=torch.complex64)}, TypeError, "query.*complex"),
    ("mixed", {"key": _zeros(*K, dtype=torch.float64)}, TypeError, r"key.*float64.*float32"),
    ("not_a_tensor", {"value": [[0.0]]}, TypeError, r"value.*list.*tensor"),
    ("sparse", {"query": _zeros(*Q).to_sparse()}, ValueError, r"query.*sparse.*strided"),
    ("meta", {"query": _zeros(*Q, device="meta")}, NotImplementedError, "query.*meta.*CPU"),
    ("scale_type", {"scale": "1"}, TypeError, r"scale.*1"),
    ("scale_nan", {"scale": float("nan")}, ValueError, r"scale.*nan.*finite"),
    ("window_value", {"window_size": (-2, 0)}, ValueError, r"window_size.*-2"),
    ("window_length", {"window_size": (1, 2, 3)}, TypeError, r"window_size.*3.*pair"),
    ("window_type", {"window_size": (1.5, 0)}, TypeError, r"window_size.*1\.5.*int"),
    ("causal", {"causal": 1}, TypeError, r"causal.*1.*True"),
    ("lse_flag", {"return_softmax_lse": None}, TypeError, r"return_softmax_lse.*None"),
    ("stats_dtype", {"tile_stats": _zeros(*STATS).half()}, TypeError, r"tile_stats.*float16"),
    ("stats_shape", {"tile_stats": _zeros(2, 4, 1, 2)}, ValueError, r"tile_stats.*\(2, 4, 1, 1\)"),
    ("stats_strides", {"tile_stats": _zeros(2, 4, 1, 2)[..., :1]}, ValueError, "stats.*contig"),
    ("stats_device", {"tile_stats": _zeros(*STATS, device="meta")}, ValueError, "tile_stats.*meta"),
    ("stats_grad", {"tile_stats": _zeros(*STATS, requires_grad=True)}, ValueError, "tile_stats"),
    ("keyword", {"attn_mask": None}, TypeError, "attn_mask"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "error", "message"), [r[1:] for r in REFUSED], ids=[r[0] for r in REFUSED]
)
@pytest.mark.parametrize("negl_prob", [0.0, 0.05])
def test_refusal_in_the_forward(
    changes: dict[str, Any], error: type[Exception], message: str, negl_prob: float
) -> None:
    for function in (BackLite(negl_prob), lambda **kw: attention(**kw, negl_prob=negl_prob)):
        with pytest.raises(error, match=message):
            function(**_tensors(**changes))


BAD_NEGL_PROBS: list[tuple[Any, type[Exception], str]] = [
    (1.0, ValueError, r"negl_prob.*1\.0.*below 1"),
    (-0.1, ValueError, r"negl_prob.*-0\.1"),
    (float("nan"), ValueError, "negl_prob.*nan"),
    (float("inf"), ValueError, "negl_prob.*inf"),
    ("0.1", TypeError, "negl_prob.*0.1"),
    (None, TypeError, "negl_prob.*None"),
    (True, TypeError, "negl_prob.*True"),
    ([], ValueError, "negl_prob"),
    ([0.1, 1.5, 0.0, 0.0], ValueError, r"negl_prob.*1\.5"),
    (torch.tensor([[0.1]]), ValueError, r"negl_prob.*\(1, 1\)"),
]


@pytest.mark.parametrize(("negl_prob", "error", "message"), BAD_NEGL_PROBS, ids=str)
def test_refused_negl_prob(negl_prob: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        attention(**_tensors(), negl_prob=negl_prob)
    with pytest.raises(error, match=message):
        BackLite(negl_prob)
    attn = BackLite(0.25)
    with pytest.raises(error, match=message):
        attn.negl_prob = negl_prob
    assert attn.negl_prob == 0.25, "a refused value leaves the old one"


@pytest.mark.parametrize("num_thresholds", [2, 3, 5])
def test_refused_number_of_thresholds(num_thresholds: int) -> None:
    negl_prob = [0.1] * num_thresholds
    message = rf"negl_prob.*{num_thresholds}.*4"
    with pytest.raises(ValueError, match=message):
        attention(**_tensors(), negl_prob=negl_prob)
    with pytest.raises(ValueError, match=message):
        BackLite(negl_prob)(**_tensors())
    stats = torch.zeros(2, 4, 1, 1)
    with pytest.raises(ValueError, match=message):
        ops.select(stats, negl_prob, query_length=10, key_length=10)


def _fake_cuda(*shape: int, **options: Any) -> Tensor:
    """Without a GPU, a fake CUDA tensor stands for a real one; under a FakeTensorMode."""
    return torch.empty(*shape, **{"dtype": torch.bfloat16, "device": "cuda", **options})


@pytest.mark.skipif(has_cuda, reason="this build has the CUDA backend")
def test_refused_cuda_tensor_names_what_is_missing() -> None:
    with FakeTensorMode():
        q = _fake_cuda(1, 8, 2, 64)
        with pytest.raises(NotImplementedError, match=r"query.*cuda.*backend.*CPU"):
            attention(q, q, q)


G, GK = (2, 10, 4, 64), (2, 10, 2, 64)
no_driver_needed = pytest.mark.skipif(
    torch.version.cuda is not None and not torch.cuda.is_available(),
    reason="a torch with CUDA makes fake CUDA tensors only where there is a driver",
)

REFUSED_ON_CUDA: list[tuple[str, Callable[[], dict[str, Any]], type[Exception], str]] = [
    (
        "dtype",
        lambda: dict.fromkeys(("query", "key", "value"), _fake_cuda(*G, dtype=torch.float32)),
        NotImplementedError,
        r"query\.dtype.*float32.*float16 and bfloat16.*CPU",
    ),
    (
        "head_dim",
        lambda: dict.fromkeys(("query", "key", "value"), _fake_cuda(2, 10, 4, 80)),
        NotImplementedError,
        r"head_dim.*80.*64 and 128.*CPU",
    ),
    (
        "query_elsewhere",
        lambda: {"query": torch.empty(*G, dtype=torch.bfloat16)},
        ValueError,
        r"key\.device.*cuda.*query's, cpu",
    ),
    (
        "key_elsewhere",
        lambda: {"key": torch.empty(*GK, dtype=torch.bfloat16)},
        ValueError,
        r"key\.device.*cpu.*query's, cuda",
    ),
    (
        "value_on_another_gpu",
        lambda: {"value": _fake_cuda(*GK, device="cuda:1")},
        ValueError,
        r"value\.device.*cuda:1.*query's, cuda:0",
    ),
    (
        "stats_elsewhere",
        lambda: {"tile_stats": torch.empty(2, 4, 1, 1)},
        ValueError,
        r"tile_stats\.device.*cpu.*query's, cuda",
    ),
]


@pytest.mark.skipif(not has_cuda, reason="this build has no CUDA backend")
@no_driver_needed
@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [r[1:] for r in REFUSED_ON_CUDA],
    ids=[r[0] for r in REFUSED_ON_CUDA],
)
def test_refusal_on_cuda(
    changes: Callable[[], dict[str, Any]], error: type[Exception], message: str
) -> None:
    with FakeTensorMode():
        sound = {"query": _fake_cuda(*G), "key": _fake_cuda(*GK), "value": _fake_cuda(*GK)}
        assert attention(**sound).shape == G
        with pytest.raises(error, match=message):
            attention(**{**sound, **changes()})


@pytest.mark.skipif(not has_cuda, reason="this build has no CUDA backend")
@no_driver_needed
def test_refused_deterministic_gradient_on_cuda() -> None:
    """In the forward, where a gradient is wanted."""
    with FakeTensorMode():
        plain = [_fake_cuda(*G) for _ in range(3)]
        leaves = [_fake_cuda(*G, requires_grad=True) for _ in range(3)]
        attention(*plain, deterministic=True)
        message = r"deterministic.*CUDA.*deterministic=False.*CPU"
        with pytest.raises(NotImplementedError, match=message):
            attention(*leaves, deterministic=True)
        with pytest.raises(NotImplementedError, match=message):
            BackLite(deterministic=True)(*leaves)
        torch.use_deterministic_algorithms(True)
        with pytest.raises(NotImplementedError, match="use_" + message):
            attention(*leaves)
        with pytest.raises(NotImplementedError, match="use_" + message):
            ops.forward(*leaves)


def _stages() -> dict[str, Any]:
    q, k, v, grad_out, _ = Case(70, 130, num_heads=4, num_key_heads=2).inputs()
    out, lse, _ = ops.forward(q, k, v)
    return {"grad_out": grad_out, "query": q, "key": k, "value": v, "out": out, "lse": lse}


REFUSED_BY_BACKWARD: list[tuple[str, dict[str, Any], type[Exception], str]] = [
    ("grad_shape", {"grad_out": _zeros(1, 69, 4, 64)}, ValueError, r"grad_out.*69.*70"),
    ("grad_dtype", {"grad_out": _zeros(1, 70, 4, 64).half()}, TypeError, r"grad_out.*float16"),
    ("out_shape", {"out": _zeros(1, 70, 2, 64)}, ValueError, r"out.*\(1, 70, 2, 64\)"),
    ("lse_dtype", {"lse": _zeros(1, 4, 70).double()}, TypeError, r"lse.*float64.*float32"),
    ("lse_shape", {"lse": _zeros(1, 70, 4)}, ValueError, r"lse.*\(1, 70, 4\).*\(1, 4, 70\)"),
    ("grad_lse", {"grad_lse": _zeros(1, 4, 71)}, ValueError, r"grad_lse.*71"),
    ("bits_dtype", {"tile_bits": _zeros(1, 4, 2, 1)}, TypeError, r"tile_bits.*int32"),
    (
        "bits_shape",
        {"tile_bits": _zeros(1, 4, 1, 2, dtype=torch.int32)},
        ValueError,
        r"tile_bits.*\(1, 4, 1, 2\).*\(1, 4, 2, 1\)",
    ),
]


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [r[1:] for r in REFUSED_BY_BACKWARD],
    ids=[r[0] for r in REFUSED_BY_BACKWARD],
)
def test_refusal_by_the_backward_stage(
    changes: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        ops.backward(**{**_stages(), **changes})


@pytest.mark.parametrize(
    ("stats", "error", "message"),
    [
        (_zeros(1, 2, 2, 2).double(), TypeError, "tile_stats.*float64.*float32"),
        (_zeros(1, 2, 2, 3), ValueError, r"tile_stats.*\(1, 2, 2, 3\).*\(1, 2, 2, 2\)"),
        (_zeros(2, 2, 2), ValueError, r"tile_stats.*\(2, 2, 2\)"),
    ],
    ids=["dtype", "shape", "rank"],
)
def test_refusal_by_the_select_stage(stats: Tensor, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        ops.select(stats, 0.1, query_length=100, key_length=200)


def test_refusal_by_packing() -> None:
    with pytest.raises(TypeError, match=r"live.*int32.*bool"):
        back_lite.pack_tiles(torch.zeros(1, 1, 1, 1, dtype=torch.int32))
    with pytest.raises(ValueError, match=r"live.*\(1, 1\)"):
        back_lite.pack_tiles(torch.zeros(1, 1, dtype=torch.bool))
    with pytest.raises(TypeError, match=r"bits.*bool.*int32"):
        back_lite.unpack_tiles(torch.zeros(1, 1, 1, 1, dtype=torch.bool), 1)
    with pytest.raises(ValueError, match=r"bits.*\(1, 1, 1, 1\).*33"):
        back_lite.unpack_tiles(torch.zeros(1, 1, 1, 1, dtype=torch.int32), 33)
