"""A layer that uses BackLite, training steps of it, and checks that the CPU and the GPU share."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from back_lite import BackLite
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint

HEADS, WIDTH = 4, 32
#: On the GPU so many keys that the order of sums over them changes from run to run.
LENGTHS = {"cpu": 300, "cuda": 2048}

#: All non-zero: a change between them needs no new compilation.
CHANGES = [0.1, 0.3, 0.02, [0.1, 0.2, 0.3, 0.4], [0.0, 0.0, 0.5, 0.0], torch.tensor(0.25), 0.9]


class Block(nn.Module):
    """A layer as models have them: projections around attention, and a use of LSE.

    On the GPU the head dim is 64, which the kernels serve.
    """

    def __init__(self, negl_prob: Any = 0.0, head_dim: int = 8) -> None:
        super().__init__()
        self.head_dim = head_dim
        self.project = nn.Linear(WIDTH, 3 * HEADS * head_dim)
        self.attn = BackLite(negl_prob)
        self.join = nn.Linear(HEADS * head_dim, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.project(x).unflatten(-1, (3, HEADS, self.head_dim)).unbind(2)
        out, lse = self.attn(q, k, v, causal=True, return_softmax_lse=True)
        return x + self.join(out.flatten(2)) * lse.transpose(1, 2).mean(dim=-1, keepdim=True).tanh()


def make_block(negl_prob: Any = 0.0, device: str = "cpu") -> tuple[Block, Tensor]:
    """The same numbers on every device."""
    torch.manual_seed(0)
    block = Block(negl_prob, head_dim=64 if device == "cuda" else 8)
    return block.to(device), torch.randn(2, LENGTHS[device], WIDTH).to(device)


def autocast_of(device: str) -> contextlib.AbstractContextManager[None]:
    """The kernels of the GPU take 16 bits."""
    return torch.autocast(device, dtype=torch.bfloat16, enabled=device == "cuda")


def step(
    function: Callable[[Tensor], Tensor],
    block: nn.Module,
    x: Tensor,
    backward: Callable[[Tensor], None] = Tensor.backward,
) -> list[Tensor]:
    """Loss and gradients of one training step, in x as well; under autocast on the GPU."""
    block.zero_grad()
    dynamic = getattr(x, "_dynamo_dynamic_indices", ())
    x = x.detach().requires_grad_()
    for dim in dynamic:
        torch._dynamo.mark_dynamic(x, dim)
    with autocast_of(x.device.type):
        loss = function(x).float().square().mean()
    backward(loss)
    assert x.grad is not None
    # Copies: with CUDA graphs, the next step writes its gradients to the same memory.
    return [loss.detach(), x.grad.clone(), *(p.grad.clone() for p in block.parameters())]


def assert_steps_alike(ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> None:
    """Where the same maths is rounded in other places: to bfloat16 on the GPU; in float32, sums
    over the rows of x go in another order."""
    assert_within(
        ours, theirs, 2.0**-6 if ours[0].is_cuda else 2.0**-23 * (2 * LENGTHS["cpu"]) ** 0.5
    )


def assert_within(ours: Sequence[Tensor], theirs: Sequence[Tensor], bound: float) -> None:
    """The norm of the difference is at most ``bound`` of theirs, for each result."""
    for i, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        difference, size = float((a - b).double().norm()), float(b.double().norm())
        assert difference <= bound * size, f"result {i}: {difference} of {size}"


# ---- torch.compile -------------------------------------------------------------------------------


def check_compiled_step(negl_prob: float, device: str, **options: Any) -> None:
    """No graph break, and what eager computes."""
    block, x = make_block(negl_prob, device)
    compiled = torch.compile(block, fullgraph=True, **options)
    for _ in range(4):  # mode="reduce-overhead" warms up, captures, replays
        assert_steps_alike(step(compiled, block, x), step(block, block, x))


def check_compiled_inference(device: str) -> None:
    """Nothing wants a gradient, though gradients are on."""
    block, x = make_block(0.3, device)
    block.requires_grad_(False)
    compiled = torch.compile(block, fullgraph=True, backend="aot_eager")
    with autocast_of(device):
        assert_steps_alike([compiled(x)], [block(x)])


def check_changes_of_negl_prob(
    device: str, compile_counts: Callable[[], int], **options: Any
) -> None:
    """Scalar or per head, any number of times, the code is compiled once and the numbers follow."""
    block, x = make_block(CHANGES[0], device)
    compiled = torch.compile(block, fullgraph=True, **options)
    for _ in range(4):
        step(compiled, block, x)
    before = compile_counts()
    seen = set()
    for negl_prob in CHANGES:
        block.attn.negl_prob = negl_prob
        results = step(compiled, block, x)
        assert_steps_alike(results, step(block, block, x))
        seen.add(float(results[1].double().sum()))
    assert compile_counts() == before
    assert len(seen) > len(CHANGES) // 2, "the changes have an effect"


def check_lengths(device: str, dynamic: bool | None) -> None:
    """20 lengths, one compilation: dynamic=True, or the dimension marked where that is None."""
    block, _ = make_block(0.3, device)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(block, fullgraph=True, backend=counter, dynamic=dynamic)
    for i in range(20):
        x = torch.randn(2, 150 + 37 * i, WIDTH, device=device)
        expected = step(block, block, x)
        if dynamic is None:
            torch._dynamo.mark_dynamic(x, 1)
        assert_steps_alike(step(compiled, block, x), expected)
    assert counter.frame_count == 1


def check_compiled_autograd(device: str) -> None:
    """The backward of eager code, traced and compiled while it runs."""
    block, x = make_block(0.3, device)
    expected = step(block, block, x)
    counter = CompileCounterWithBackend("aot_eager")

    def compiled_backward(loss: Tensor) -> None:
        with torch._dynamo.config.patch(compiled_autograd=True):
            torch.compile(lambda: loss.backward(), backend=counter)()

    assert_steps_alike(step(block, block, x, compiled_backward), expected)
    assert counter.frame_count == 1


def check_export(device: str) -> None:
    """A program for other lengths as well, and with its gradients; on the GPU in 16 bits."""
    block, x = make_block(0.3, device)
    if device == "cuda":
        block, x = block.bfloat16(), x.bfloat16()
    length = torch.export.Dim("length", min=2, max=4096)
    program = torch.export.export(block, (x,), dynamic_shapes={"x": {1: length}})
    shorter = x[:, :200].detach().requires_grad_()
    outputs = program.module()(shorter), block(shorter)
    ours, theirs = (
        (out.detach(), *torch.autograd.grad(out.float().sin().sum(), shorter)) for out in outputs
    )
    if device == "cuda":
        assert_steps_alike(ours, theirs)
    else:
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


# ---- Checkpointing -------------------------------------------------------------------------------


class Heard(NamedTuple):
    out: Tensor
    lse: Tensor
    tile_bits: Tensor | None  # None: that call recorded nothing


@contextlib.contextmanager
def listening(attn: BackLite) -> Iterator[list[Heard]]:
    """What every call of the module computes, also those that a checkpoint makes again."""
    heard: list[Heard] = []

    def listen(_: nn.Module, args: Any, outputs: tuple[Tensor, Tensor]) -> None:
        kept = attn._last_call.kept
        assert kept is not None
        heard.append(Heard(*(t.detach().clone() for t in outputs), kept[0]))

    handle = attn.register_forward_hook(listen)
    try:
        yield heard
    finally:
        handle.remove()


def check_checkpointing(use_reentrant: bool, negl_prob: float, device: str) -> None:
    """The recomputed output, LSE and tile bits are bitwise the same, and on the CPU all gradients.

    On the GPU gradients are sums in an order that changes from run to run, which may flip the last
    bit of a bfloat16: 2^-8 of it.
    """
    block, x = make_block(negl_prob, device)

    def checkpointed(x: Tensor) -> Tensor:
        return checkpoint(block, x, use_reentrant=use_reentrant)

    with listening(block.attn) as heard:
        plain = step(block, block, x)
        recomputed = step(checkpointed, block, x)
    of_plain, first, again = heard
    for call in (first, again):
        assert torch.equal(call.out, of_plain.out)
        assert torch.equal(call.lse, of_plain.lse)
    if negl_prob:
        assert torch.equal(again.tile_bits, of_plain.tile_bits)
        # A reentrant checkpoint runs first without gradients, and selects nothing.
        assert use_reentrant or torch.equal(first.tile_bits, of_plain.tile_bits)
    if device == "cpu":
        for a, b in zip(plain, recomputed, strict=True):
            assert torch.equal(a, b)
        return
    for _ in range(6):
        assert_within(step(checkpointed, block, x), plain, 2.0**-8)


def check_selective_checkpointing(negl_prob: float, device: str) -> None:
    """A policy sees the operator, can keep its outputs, bits included, and recompute the rest."""
    from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

    block, x = make_block(negl_prob, device)
    calls: list[bool] = []

    def checkpointed(x: Tensor, keep: bool) -> Tensor:
        def policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
            if operator is torch.ops.back_lite.attention.default:
                calls.append(context.is_recompute)
                if keep:
                    return CheckpointPolicy.MUST_SAVE
            return CheckpointPolicy.PREFER_RECOMPUTE

        return checkpoint(
            block,
            x,
            use_reentrant=False,
            context_fn=lambda: create_selective_checkpoint_contexts(policy),
        )

    expected = step(block, block, x)
    for keep in (True, False):
        calls.clear()
        # Saved tensors are kept by reference: who computes anew allocates anew.
        with counting_kernels() as kernels:
            results = step(lambda x, keep=keep: checkpointed(x, keep), block, x)
        assert False in calls, "the policy sees the operator"
        assert kernels.count("attention") == (1 if keep else 2)
        assert_steps_alike(results, expected)
        assert torch.equal(results[0], expected[0])


@contextlib.contextmanager
def counting_kernels() -> Iterator[list[str]]:
    """Which of the library's functions run."""
    from back_lite import _library

    called: list[str] = []
    names = {"forward": "attention", "backward": "backward"}
    kept = {name: getattr(_library, name) for name in names}

    def counted(name: str) -> Callable[..., None]:
        def call(*arguments: Any) -> None:
            called.append(names[name])
            kept[name](*arguments)

        return call

    for name in names:
        setattr(_library, name, counted(name))
    try:
        yield called
    finally:
        for name, function in kept.items():
            setattr(_library, name, function)
