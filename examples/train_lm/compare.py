"""Sparse against exact gradients of the attention of a model, layer by layer."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from back_lite import BackLite, mask_tiles, ops, unpack_tiles
from torch import Tensor, nn

from benchmarks.timing import alternate, median_ratio

from .plots import Tiles
from .report import GRADIENTS, LayerReport


@dataclass
class Call:
    """What one layer's attention was given in a training step."""

    query: Tensor  # [B, S, H, D], as key, value and grad_out
    key: Tensor
    value: Tensor
    grad_out: Tensor = field(init=False)


def record_calls(model: nn.Module, text: Tensor) -> list[Call]:
    """Runs one forward and backward pass of a model that returns its loss; trains nothing."""
    calls: list[Call] = []

    def remember(_: nn.Module, inputs: tuple[Tensor, ...], out: Tensor) -> None:
        call = Call(*(t.detach() for t in inputs))
        out.register_hook(lambda grad: setattr(call, "grad_out", grad))
        calls.append(call)

    attentions = [module for module in model.modules() if isinstance(module, BackLite)]
    hooks = [attention.register_forward_hook(remember) for attention in attentions]
    model(text).backward()
    model.zero_grad()
    for hook in hooks:
        hook.remove()
    return calls


def compare_layer(call: Call, negl_prob: float) -> tuple[LayerReport, Tiles]:
    """Exact and sparse backward on the same tensors."""
    tensors = call.query, call.key, call.value
    length = call.query.shape[1]
    out, lse, stats = ops.forward(*tensors, causal=True, record=True)
    assert stats is not None
    bits = ops.select(stats, negl_prob, query_length=length, key_length=length, causal=True)

    def backward(tile_bits: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        return ops.backward(call.grad_out, *tensors, out, lse, tile_bits, causal=True)

    times = alternate(
        {"exact": lambda: backward(None), "sparse": lambda: backward(bits)},
        rounds=15,
        synchronize=torch.cuda.synchronize if out.is_cuda else lambda: None,
    )
    errors, cosines = {}, {}
    for name, exact, sparse in zip(GRADIENTS, backward(None), backward(bits), strict=True):
        exact, sparse = exact.double().flatten(), sparse.double().flatten()
        errors[name] = ((sparse - exact).norm() / exact.norm()).item()
        cosines[name] = torch.cosine_similarity(exact, sparse, dim=0).item()
    allowed = mask_tiles(length, length, causal=True)
    live = unpack_tiles(bits, allowed.shape[0]).cpu()
    return LayerReport(
        density=live.sum().item() / allowed.expand_as(live).sum().item(),
        cosine=cosines,
        relative_l2=errors,
        exact_ms=1e3 * times["exact"].median,
        sparse_ms=1e3 * times["sparse"].median,
        speedup=median_ratio(times["exact"], times["sparse"]),
    ), Tiles(stats[0].cpu().numpy(), live[0].numpy(), allowed.numpy())
