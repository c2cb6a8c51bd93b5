"""Sparse against exact gradients of the attention of a model, layer by layer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from back_lite import (
    BackLite,
    GradientComparison,
    compare_gradients,
    mask_tiles,
    ops,
    unpack_tiles,
)
from torch import Tensor, nn

from benchmarks.timing import alternate, median_ratio

from .report import GRADIENTS, LayerReport, Tiles


@dataclass
class Call:
    """What one layer's attention was given in a training step."""

    query: Tensor  # [B, S, H, D], as grad_out; key and value may have fewer heads
    key: Tensor
    value: Tensor
    options: dict[str, Any]  # causal, scale
    grad_out: Tensor = field(init=False)


def record_calls(
    model: nn.Module, text: Tensor, loss: Callable[[Tensor], Tensor] | None = None
) -> list[Call]:
    """Runs one forward and backward pass of a model; trains nothing.

    loss: what to call with text; by default the model itself.
    """
    calls: list[Call] = []

    def remember(
        _: nn.Module, inputs: tuple[Tensor, ...], options: dict[str, Any], out: Tensor
    ) -> None:
        # Under autocast they may come in another dtype, or several; attention takes out's.
        call = Call(*(t.detach().to(out.dtype) for t in inputs), options=options)
        out.register_hook(lambda grad: setattr(call, "grad_out", grad))
        calls.append(call)

    attentions = [module for module in model.modules() if isinstance(module, BackLite)]
    hooks = [a.register_forward_hook(remember, with_kwargs=True) for a in attentions]
    (loss or model)(text).backward()
    model.zero_grad()
    for hook in hooks:
        hook.remove()
    return calls


def compare_layers(
    calls: Iterable[Sequence[Call]], values: Sequence[float]
) -> list[GradientComparison]:
    """By layer; calls hold those of all layers for each batch, and the batches are added up."""
    sums: dict[int, GradientComparison] = {}
    for batch in calls:
        for layer, call in enumerate(batch):
            tensors = call.query, call.key, call.value, call.grad_out
            found = compare_gradients(*tensors, values, **call.options)
            sums[layer] = sums[layer] + found if layer in sums else found
    return list(sums.values())


def layer_errors(found: GradientComparison) -> list[dict[str, Any]]:
    """For each value, the whole layer: its heads as one long gradient."""
    sizes = (found.num_heads, found.num_key_heads, found.num_key_heads)
    exact = [part.sum() for part in found.exact.split(sizes)]
    rows = []
    for index, value in enumerate(found.negl_prob):
        row: dict[str, Any] = {"negl_prob": value, "cosine": {}, "relative_l2": {}}
        row["skipped"] = 1.0 - float(found.density[index].mean())
        columns = (t[index].split(sizes) for t in (found.sparse, found.dot, found.difference))
        for name, whole, parts in zip(GRADIENTS, exact, zip(*columns, strict=True), strict=True):
            sparse, dot, difference = (part.sum() for part in parts)
            row["cosine"][name] = float(dot / (whole * sparse).sqrt())
            row["relative_l2"][name] = float((difference / whole).sqrt())
        rows.append(row)
    return rows


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
