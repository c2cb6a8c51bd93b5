"""What every process of a distributed test does: python ranks.py SCENARIO DEVICE RANK FILE.

Two processes find each other through the file. Each compares with what one process alone computes
from the data of both.
"""

from __future__ import annotations

import copy
import gc
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from back_lite import BackLite
from composition import HEADS, LENGTHS, WIDTH, Block, assert_steps_alike, step
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

WORLD = 2


class Model(nn.Module):
    """Two layers, the second of them checkpointed."""

    def __init__(self, device: str, negl_prob: Any = 0.3) -> None:
        super().__init__()
        torch.manual_seed(0)
        head_dim = 64 if device == "cuda" else 8
        self.first, self.second = Block(negl_prob, head_dim), Block(negl_prob, head_dim)
        self.to(device)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = checkpoint(self.second, self.first(x), use_reentrant=False)
        return out


def data_of(rank: int, device: str) -> Tensor:
    rng = torch.Generator().manual_seed(rank)
    return torch.randn(2, LENGTHS[device], WIDTH, generator=rng).to(device)


def mean_over_ranks(model: nn.Module, device: str) -> list[Tensor]:
    """Gradients of the parameters, as one process computes them; two halves add without error."""
    of_ranks = [step(model, model, data_of(rank, device))[2:] for rank in range(WORLD)]
    return [a / 2 + b / 2 for a, b in zip(*of_ranks, strict=True)]


def has_fsdp2() -> bool:
    if not dist.is_available():
        return False
    from torch.distributed import fsdp

    return hasattr(fsdp, "fully_shard")


def ddp(rank: int, device: str) -> None:
    """Averaged gradients."""
    model = Model(device)
    expected = mean_over_ranks(model, device)
    x = data_of(rank, device)
    wrapped = DistributedDataParallel(model)
    for _ in range(2):
        assert_steps_alike(step(wrapped, model, x)[2:], expected)


def ddp_thresholds(rank: int, device: str) -> None:
    """DDP sends the buffers of rank 0 around; thresholds are each rank's own, compiled or not."""
    model = Model(device, negl_prob=[0.5, 0.02, 0.1, 0.3] if rank else 0.05)
    alone = copy.deepcopy(model)
    x = data_of(0, device)
    expected = step(alone, alone, x)[1]
    wrapped = DistributedDataParallel(model)
    functions = [wrapped]
    if hasattr(torch.library, "register_vmap"):  # before 2.5, DDP compiles no checkpoint
        functions.append(torch.compile(wrapped, backend="aot_eager"))
    for function in functions:
        assert_steps_alike([step(function, model, x)[1]], [expected])


def fsdp2(rank: int, device: str) -> None:
    """Sharded parameters, layer by layer, each layer compiled or not."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(device, (WORLD,))
    x = data_of(rank, device)
    for is_compiled in (False, True):
        model = Model(device)
        expected = mean_over_ranks(model, device)
        for module in (model.first, model.second, model):
            if is_compiled and module is not model:
                module.compile(backend="aot_eager", fullgraph=True)
            fully_shard(module, mesh=mesh)
        assert any(p.to_local().shape != p.shape for p in model.parameters()), "sharded"
        for negl_prob in (0.3, [0.3, 0.3, 0.3, 0.3]):
            for layer in (model.first, model.second):
                layer.attn.negl_prob = negl_prob
            grads = step(model, model, x)[2:]
            assert_steps_alike([grad.full_tensor() for grad in grads], expected)


class HeadsApart(nn.Module):
    """Projections that can be split by heads."""

    def __init__(self, device: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.head_dim = 64 if device == "cuda" else 8
        width = HEADS * self.head_dim
        self.query, self.key, self.value = (nn.Linear(WIDTH, width) for _ in range(3))
        self.attn = BackLite(0.3)
        self.join = nn.Linear(width, WIDTH)
        self.to(device)

    def forward(self, x: Tensor) -> Tensor:
        heads = (
            p(x).unflatten(-1, (-1, self.head_dim)) for p in (self.query, self.key, self.value)
        )
        out: Tensor = self.join(self.attn(*heads, causal=True).flatten(2))
        return out


def tensor_parallel(rank: int, device: str) -> None:
    """Every rank has half of the heads, as plain tensors; a DTensor is refused."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    model, x = HeadsApart(device), data_of(0, device)
    expected = step(model, model, x)
    mesh = init_device_mesh(device, (WORLD,))
    columns = {name: ColwiseParallel() for name in ("query", "key", "value")}
    parallelize_module(model, mesh, {**columns, "join": RowwiseParallel()})
    ours = step(model, model, x)
    grads = [t.full_tensor() if hasattr(t, "full_tensor") else t for t in ours[2:]]
    assert_steps_alike([*ours[:2], *grads], expected)

    heads = torch.randn(1, 64, HEADS, 64, device=device, dtype=torch.bfloat16)
    tensor = distribute_tensor(heads, mesh, [Shard(2)])
    with pytest.raises(NotImplementedError, match=r"back_lite\.attention"):
        model.attn(tensor, tensor, tensor)


SCENARIOS: dict[str, Callable[[int, str], None]] = {
    function.__name__: function for function in (ddp, ddp_thresholds, fsdp2, tensor_parallel)
}


def main() -> None:
    scenario, device, rank_word, path = sys.argv[1:]
    rank = int(rank_word)
    torch.set_num_threads(1)
    if device == "cuda":
        torch.cuda.set_device(rank)
    backend = "nccl" if device == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=f"file://{path}", rank=rank, world_size=WORLD)
    try:
        SCENARIOS[scenario](rank, device)
    finally:
        # Torch aborts at the exit of some processes that still have a DDP wrapper then.
        gc.collect()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
