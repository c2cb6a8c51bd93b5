"""Peak memory on the GPU, as torch's allocator counts it, against docs/3-memory.md."""

from __future__ import annotations

import cases
import memory_doc
import pytest
import torch
from back_lite import BackLite
from cases import Case

BF16 = torch.bfloat16
CASES = [
    (Case(8192, 8192, 128, 8, 8, causal=True, dtype=BF16), 0.0),
    (Case(8192, 8192, 128, 8, 8, causal=True, dtype=BF16), 0.05),
    (Case(8192, 8192, 64, 16, 16, dtype=BF16), 0.05),
    (Case(2048, 4096, 128, 64, 1, dtype=BF16), 0.0),  # row 32: keys are not expanded
]


def documented(case: Case, negl_prob: float) -> int:
    """Beyond inputs: out, gradients, and the largest sum of what is held at the same time."""
    formulas = memory_doc.formulas()
    b, h, hk = case.batch, case.num_heads, case.num_key_heads
    sq, sk, d = case.query_length, case.key_length, case.head_dim
    processors = torch.cuda.get_device_properties(0).multi_processor_count
    record = negl_prob > 0.0
    kept = 2 * b * sq * h * d + formulas["lse_bytes"](b, h, sq, 4)
    forward = formulas["cuda_forward_workspace_bytes"](sk, d, record, processors)
    if record:
        kept += formulas["tile_bits_bytes"](b, h, sq, sk)
        forward += formulas["tile_stats_bytes"](b, h, sq, sk)
    backward = 2 * b * (sq * h + 2 * sk * hk) * d
    backward += formulas["cuda_schedule_bytes"](b, hk, sk, processors)
    backward += formulas["cuda_backward_workspace_bytes"](b, h, hk, sq, sk, d, processors)
    return int(kept + max(forward, backward))


@pytest.mark.parametrize(
    ("case", "negl_prob"), CASES, ids=[f"{case.id}-{negl_prob}" for case, negl_prob in CASES]
)
def test_row31_to_33_peak_is_the_documented_sum(case: Case, negl_prob: float) -> None:
    inputs = case.inputs("cuda")
    leaves = [t.detach().requires_grad_() for t in inputs[:3]]
    attn = BackLite(negl_prob)

    def call() -> None:
        torch.autograd.grad(attn(*leaves, **case.options), leaves, inputs.grad_out)

    call()  # the table of thresholds
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    call()
    attn._last_call.kept = None
    measured = torch.cuda.max_memory_allocated() - before
    allowed = documented(case, negl_prob)
    rounding = 16 * 512  # blocks of the allocator
    assert measured <= allowed + rounding
    assert measured >= 0.95 * allowed
    assert torch.cuda.memory_allocated() <= before, "nothing is left behind"


def test_row33_without_gradients_only_outputs_remain() -> None:
    case = cases.Case(8192, 8192, 128, 8, 8, dtype=BF16)
    inputs = case.inputs("cuda")
    attn = BackLite(0.05)
    with torch.no_grad():
        attn(*inputs[:3])  # the table of thresholds
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    with torch.no_grad():
        out, lse = attn(*inputs[:3], return_softmax_lse=True)
    assert torch.cuda.max_memory_allocated() - before <= out.nbytes + lse.nbytes + 4 * 512
