"""Three ways to the same results: float64 (the truth), plain PyTorch in the dtype (the yardstick of
the error) and the library."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from back_lite import attention, ops, reference, unpack_tiles
from cases import Case, Inputs, lse_dtype
from torch import Tensor


class Results(NamedTuple):
    out: Tensor
    lse: Tensor
    grad_query: Tensor
    grad_key: Tensor
    grad_value: Tensor


def truth(case: Case, inputs: Inputs, live: Tensor | None = None) -> Results:
    """Float64. live [B, H, Tm, Tn] restricts the gradients to live tiles."""
    q, k, v, grad_out, grad_lse = inputs
    out, lse = reference.attention(q, k, v, **case.options)
    grads = reference.backward(grad_out, q, k, v, live=live, grad_lse=grad_lse, **case.options)
    return Results(out, lse, *grads)


def uncancelled_grads(case: Case, inputs: Inputs, live: Tensor | None = None) -> tuple[Tensor, ...]:
    """dQ, dK, dV in float64 with |dO| |V|^T for dP and without delta: terms that cannot cancel.

    Where each row sees one key, dP equals delta: dQ and dK are zero, and what an implementation
    computes is the rounding of these terms.
    """
    q, k, v, grad_out, _ = inputs
    grad_out, v = grad_out.double().abs(), v.double().abs()
    out, _ = reference.attention(q, k, v, **case.options)
    grad_lse_that_cancels_delta = (grad_out * out).sum(dim=-1).transpose(1, 2)
    return reference.backward(
        grad_out, q, k, v, live=live, grad_lse=grad_lse_that_cancels_delta, **case.options
    )


def grads_of_delta(case: Case, inputs: Inputs, live: Tensor | None = None) -> tuple[Tensor, ...]:
    """dQ, dK, dV in float64 of |dO| |O| for delta and nothing for dP.

    delta comes from O as it is kept between the passes, rounded to the inputs' dtype, so it carries
    half an eps of these.
    """
    q, k, v, grad_out, _ = inputs
    out, _ = reference.attention(q, k, v, **case.options)
    delta = (grad_out.double() * out).abs().sum(dim=-1).transpose(1, 2)
    nothing = torch.zeros_like(grad_out)
    return reference.backward(nothing, q, k, v, live=live, grad_lse=delta, **case.options)


def largest_score_terms(case: Case, inputs: Inputs) -> float:
    """The largest scale * |q_i| . |k_j|: the products in a score, added up without signs."""
    q, k = (t.double().abs().transpose(1, 2) for t in inputs[:2])
    scale = 1.0 / math.sqrt(case.head_dim) if case.scale is None else abs(case.scale)
    scores = q @ k.repeat_interleave(q.shape[1] // k.shape[1], 1).mT
    return scale * float(scores.max()) if scores.numel() else 0.0


def _by_keys(rows: Tensor, keys: Tensor, order: int) -> Tensor:
    """rows @ keys.mT; order > 0 has at least 16 columns.

    With fewer, torch calls a routine that sums in lanes and is two to three times as accurate as
    its matrix products (128 terms in float32, one key: 7e-6 beside 24e-6): no yardstick for those.
    """
    spare = max(16 - keys.shape[-2], 0) if order > 0 else 0
    wide = torch.nn.functional.pad(keys, (0, 0, 0, spare))
    return (rows @ wide.mT)[..., : keys.shape[-2]]


def plain(case: Case, inputs: Inputs, live: Tensor | None = None, order: int = 0) -> Results:
    """The same numbered steps as reference.py, in the inputs' dtype (P is made in LSE's dtype).

    order > 0 shuffles keys and head dims: the same maths, summed in another order.
    """
    q, k, v, grad_out, grad_lse = (
        t.transpose(1, 2) if t is not None and t.dim() == 4 else t for t in inputs
    )
    num_heads, query_length, head_dim = q.shape[1:]
    key_length = k.shape[2]
    group = num_heads // k.shape[1]
    scale = 1.0 / math.sqrt(head_dim) if case.scale is None else case.scale
    keys, dims, value_dims = (
        _Shuffle(size, 3 * order + i, q.device)
        for i, size in enumerate((key_length, head_dim, head_dim))
    )
    q, k = q[..., dims.there], k[:, :, keys.there][..., dims.there]
    v, grad_out = v[:, :, keys.there][..., value_dims.there], grad_out[..., value_dims.there]
    k_of_head, v_of_head = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    see = reference.visible(**case.lengths, **case.mask, device=q.device)[:, keys.there]
    sees_a_key = see.any(dim=-1, keepdim=True)

    s = _by_keys(q * scale, k_of_head, order)  # (1)
    s.masked_fill_(~see, torch.finfo(s.dtype).min)  # not -inf: empty rows would become NaN
    s = s.to(lse_dtype(q.dtype))
    lse = torch.logsumexp(s, dim=-1)
    p = torch.exp(s - lse[..., None]).masked_fill(~see, 0.0).to(q.dtype)  # (2)
    lse = lse.masked_fill(~sees_a_key[:, 0], -math.inf)
    out = p @ v_of_head
    delta = (grad_out * out).sum(dim=-1, keepdim=True)
    if grad_lse is not None:
        delta -= grad_lse[..., None].to(delta.dtype)
    if live is not None:
        of_element = live.repeat_interleave(64, 2).repeat_interleave(128, 3)
        p = p * of_element[:, :, :query_length, :key_length][..., keys.there]
    dv = p.mT @ grad_out  # (3)
    dp = _by_keys(grad_out, v_of_head, order)  # (4)
    ds = p * (dp - delta)  # (5)
    dk = scale * (ds.mT @ q)  # (6)
    dq = scale * (ds @ k_of_head)  # (7)

    def over_group(grad: Tensor) -> Tensor:
        return grad.unflatten(1, (-1, group)).sum(dim=2)[:, :, keys.back]

    out, dv = out[..., value_dims.back], over_group(dv)[..., value_dims.back]
    dq, dk = dq[..., dims.back], over_group(dk)[..., dims.back]
    out, dq, dk, dv = (t.transpose(1, 2) for t in (out, dq, dk, dv))
    return Results(out, lse, dq, dk, dv)


class _Shuffle:
    """A permutation of a dimension and its inverse; seed < 3 keeps the order."""

    def __init__(self, size: int, seed: int, device: torch.device) -> None:
        rng = torch.Generator().manual_seed(seed)
        there = torch.arange(size) if seed < 3 else torch.randperm(size, generator=rng)
        self.there = there.to(device)
        self.back = there.argsort().to(device)


def library(case: Case, inputs: Inputs, negl_prob: Any = 0.0, **options: Any) -> Results:
    """What a user gets: attention() and autograd."""
    leaves = [t.detach().requires_grad_() for t in inputs[:3]]
    out, lse = attention(*leaves, negl_prob, return_softmax_lse=True, **case.options, **options)
    outputs, grads = [out], [inputs.grad_out]
    if inputs.grad_lse is not None:
        outputs.append(lse)
        grads.append(inputs.grad_lse)
    return Results(out.detach(), lse.detach(), *torch.autograd.grad(outputs, leaves, grads))


def live_tiles(
    case: Case, inputs: Inputs, negl_prob: float | Sequence[float] | Tensor
) -> tuple[Tensor, Tensor]:
    """The library's own live tiles (bool) and statistics (float32), both [B, H, Tm, Tn]."""
    _, _, stats = ops.forward(*inputs[:3], **case.options, record=True)
    assert stats is not None
    bits = ops.select(stats, negl_prob, **case.lengths, **case.mask)
    return unpack_tiles(bits, case.num_query_tiles), stats
