"""Calibration on the GPU: the comparison is that of its gradients, and thresholds come of it."""

from __future__ import annotations

import back_lite
import pytest
import torch
from back_lite import BackLite, Controller, Target, ops
from cases import Case
from torch import Tensor, nn

CASE = Case(
    1000,
    1000,
    dtype=torch.bfloat16,
    head_dim=64,
    num_heads=4,
    num_key_heads=2,
    batch=2,
    causal=True,
    topics=True,
)
VALUES = [0.01, 0.1, 0.3]
# The sums of dQ come in another order at each run (tests/gpu/hopper.py: 2^-9 of the whole tensor).
NOISE = 2.0**-8


def test_comparison_is_that_of_the_gradients(device: str) -> None:
    query, key, value, grad_out, _ = CASE.inputs(device)
    found = back_lite.compare_gradients(query, key, value, grad_out, VALUES, causal=True)
    out, lse, stats = ops.forward(query, key, value, causal=True, record=True)
    exact = ops.backward(grad_out, query, key, value, out, lse, causal=True)
    allowed = 2 * int(back_lite.mask_tiles(1000, 1000, causal=True).sum())
    for row, threshold in enumerate(VALUES):
        bits = ops.select(stats, threshold, query_length=1000, key_length=1000, causal=True)
        live = back_lite.unpack_tiles(bits, stats.shape[2]).sum(dim=(0, 2, 3)).cpu()
        assert torch.equal(found.density[row], live.double() / allowed)
        sparse = ops.backward(grad_out, query, key, value, out, lse, bits, causal=True)
        for e, s, mine in zip(exact, sparse, found.relative_l2, strict=True):
            e, s = e.double(), s.double()
            squares = (s - e).square().sum(dim=(0, 1, 3)) / e.square().sum(dim=(0, 1, 3))
            torch.testing.assert_close(mine[row], squares.sqrt().cpu(), rtol=0.0, atol=NOISE)
    assert float(found.density[-1].max()) < 1.0, "the case skips nothing"
    assert all(tensor.device.type == "cpu" for tensor in (found.exact, found.live, found.seconds))


class Model(nn.Module):
    """Computes in bfloat16 through autocast; its weights are float32."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.project = nn.Linear(128, 8 * 64)
        self.attention = BackLite()

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast(x.device.type, torch.bfloat16):
            heads = self.project(x).unflatten(-1, (8, 64))
            out = self.attention(
                2 * heads[:, :, :4], heads[:, :, 4:6], heads[:, :, 6:], causal=True
            )
        return out.float().square().mean()


def make_batches(device: str) -> list[Tensor]:
    rng = torch.Generator().manual_seed(1)
    return [torch.randn(4, 1024, 128, generator=rng).cumsum(1).to(device) * 0.1 for _ in range(3)]


@pytest.mark.parametrize("per", ["head", "layer"])
def test_calibrated_gradients_meet_the_target(device: str, per: str) -> None:
    model, batches = Model().to(device), make_batches(device)
    target = Target(relative_l2=0.2)
    found = back_lite.calibrate(model, batches, target, per=per)
    (layer,) = found.layers
    assert layer.calls == 3
    assert max(layer.negl_prob) > 0.0
    errors = torch.tensor(layer.relative_l2)
    assert float(errors.square().mean().sqrt()) <= target.error
    found.apply(model)
    assert torch.as_tensor(model.attention.negl_prob).tolist() == pytest.approx(layer.negl_prob)


def test_controller_moves_every_head(device: str) -> None:
    model = Model().to(device)
    records: list[dict[str, object]] = []
    controller = Controller(model, Target(relative_l2=0.2), every=1, warmup=2, log=records.append)
    for batch in make_batches(device) + make_batches(device):
        model(batch).backward()
        model.zero_grad()
        controller.step()
    assert all(record["relative_l2"] is not None for record in records)
    values = torch.as_tensor(model.attention.negl_prob).tolist()
    assert len(values) == 4
    assert all(value not in (0.0, 0.01) for value in values)
