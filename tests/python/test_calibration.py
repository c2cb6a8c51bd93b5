"""Calibration: the comparison, the choice, its file, the command line, and what they refuse."""

from __future__ import annotations

import dataclasses
import errno
import json
import math
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import back_lite
import pytest
import torch
from back_lite import BackLite, Calibration, Target, ops, reference
from back_lite._calibrate import LayerMeasurement, Measurement
from cases import Case
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.checkpoint import checkpoint

VALUES = [0.01, 0.03, 0.1, 0.3]
COMPARED = [
    Case(300, 300, head_dim=16, num_heads=4, num_key_heads=2, causal=True, topics=True),
    Case(200, 330, head_dim=16, batch=2, window_size=(100, 50), lse_grad=True, scale=0.3),
]


# ------------------------------------------------------------------------------- comparison


def by_hand(case: Case, value: Any) -> dict[str, list[Tensor]]:
    """Cosine and relative L2 by head of dq, dk, dv, with the reference's gradients."""
    query, key, value_, grad_out, grad_lse = (
        None if t is None else t.double() for t in case.inputs()
    )
    tensors = query, key, value_
    _, _, stats = ops.forward(*tensors, **case.options, record=True)
    live = reference.select(stats, value, **case.lengths, **case.mask)
    options = {"grad_lse": grad_lse, **case.options}
    exact = reference.backward(grad_out, *tensors, **options)
    sparse = reference.backward(grad_out, *tensors, live=live, **options)
    found: dict[str, list[Tensor]] = {"cosine": [], "relative_l2": []}
    for e, s in zip(exact, sparse, strict=True):
        e, s = (t.transpose(1, 2).transpose(0, 1).flatten(1) for t in (e, s))
        found["cosine"].append(torch.cosine_similarity(e, s, dim=1))
        found["relative_l2"].append((s - e).norm(dim=1) / e.norm(dim=1))
    allowed = reference.mask_tiles(**case.lengths, **case.mask)
    found["density"] = [live.double().sum(dim=(0, 2, 3)) / (case.batch * allowed.sum())]
    return found


def compare(case: Case, values: list[Any]) -> back_lite.GradientComparison:
    query, key, value, grad_out, grad_lse = (
        None if t is None else t.double() for t in case.inputs()
    )
    options = {"grad_lse": grad_lse, **case.options}
    return back_lite.compare_gradients(query, key, value, grad_out, values, **options)


@pytest.mark.parametrize("case", COMPARED, ids=lambda case: case.id)
def test_comparison_is_that_of_the_reference(case: Case) -> None:
    found = compare(case, VALUES)
    for row, value in enumerate(VALUES):
        truth = by_hand(case, value)
        for name in ("cosine", "relative_l2"):
            for mine, true in zip(getattr(found, name), truth[name], strict=True):
                torch.testing.assert_close(mine[row], true, rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(found.density[row], truth["density"][0])
        group = case.num_heads // case.num_key_heads
        dq, dk, dv = truth["relative_l2"]
        worst = [
            max(float(dq[h]), float(dk[h // group]), float(dv[h // group]))
            for h in range(case.num_heads)
        ]
        assert found.error[row].tolist() == pytest.approx(worst)
    assert (found.density < 1.0).any(), "the case skips nothing"


def test_each_head_is_compared_alone() -> None:
    case = Case(300, 300, head_dim=16, causal=True, topics=True)
    uniform = compare(case, [0.02, 0.2])
    mixed = compare(case, [[0.02, 0.2]])
    for name in ("relative_l2", "cosine"):
        for one, two in zip(getattr(mixed, name), getattr(uniform, name), strict=True):
            torch.testing.assert_close(one[0], torch.stack([two[0, 0], two[1, 1]]))
    assert mixed.density[0].tolist() == [uniform.density[0, 0], uniform.density[1, 1]]


def test_sums_of_two_calls_are_those_of_both_together() -> None:
    case = Case(200, 200, head_dim=16, batch=2, causal=True, topics=True)
    query, key, value, grad_out, _ = case.inputs()
    both = back_lite.compare_gradients(query, key, value, grad_out, VALUES, causal=True)
    one, two = (
        back_lite.compare_gradients(
            query[b : b + 1], key[b : b + 1], value[b : b + 1], grad_out[b : b + 1], VALUES,
            causal=True,
        )
        for b in range(2)
    )  # fmt: skip
    added = one + two
    torch.testing.assert_close(added.error, both.error)
    assert torch.equal(added.density, both.density)
    for mine, true in zip(added.cosine, both.cosine, strict=True):
        torch.testing.assert_close(mine, true)


@pytest.mark.parametrize("case", COMPARED, ids=lambda case: case.id)
def test_sums_do_not_depend_on_blocks(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = compare(case, VALUES)
    for elements in (1, 20_000):
        monkeypatch.setattr("back_lite._compare._BLOCK_ELEMENTS", elements)
        parts = compare(case, VALUES)
        for name in ("exact", "sparse", "dot", "difference"):
            torch.testing.assert_close(
                getattr(parts, name), getattr(whole, name), rtol=1e-12, atol=0
            )


def test_zero_gradients_have_no_error() -> None:
    query, key, value, grad_out, _ = Case(130, 130, head_dim=16, topics=True).inputs()
    found = back_lite.compare_gradients(query, key, value, 0 * grad_out, [0.3])
    assert found.error.tolist() == [[0.0, 0.0]]
    assert found.cosine.dq.tolist() == [[1.0, 1.0]]


def test_cosine_of_tiny_gradients() -> None:
    """Of float64; the product of their sums of squares is below the least number."""
    query, key, value, grad_out, _ = Case(200, 200, dtype=torch.float64, topics=True).inputs()
    large, tiny = (
        back_lite.compare_gradients(query, key, value, factor * grad_out, VALUES)
        for factor in (1.0, 1e-100)
    )
    for one, two in zip(large.cosine, tiny.cosine, strict=True):
        torch.testing.assert_close(one, two)


def test_16_bit_gradients_are_summed_in_float64() -> None:
    query, key, value, grad_out, _ = Case(200, 200, dtype=torch.bfloat16, topics=True).inputs()
    found = back_lite.compare_gradients(query, key, value, grad_out, VALUES)
    out, lse, stats = ops.forward(query, key, value, record=True)
    exact = ops.backward(grad_out, query, key, value, out, lse)
    bits = ops.select(stats, 0.3, query_length=200, key_length=200)
    sparse = ops.backward(grad_out, query, key, value, out, lse, bits)
    for e, s, mine in zip(exact, sparse, found.relative_l2, strict=True):
        exact_sum = e.double().square().sum(dim=(0, 1, 3))
        error = ((s.double() - e.double()).square().sum(dim=(0, 1, 3)) / exact_sum).sqrt()
        torch.testing.assert_close(mine[3], error)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ([], "negl_prob = []"),
        (0.1, "negl_prob = 0.1"),
        ([0.1, 1.0], "negl_prob = 1.0"),
        ([[0.1, 0.1, 0.1]], "3 entries"),
    ],
)
def test_comparison_refuses_values(values: Any, words: str) -> None:
    query, key, value, grad_out, _ = Case(64, 64, head_dim=16).inputs()
    with pytest.raises((TypeError, ValueError)) as error:
        back_lite.compare_gradients(query, key, value, grad_out, values)
    assert words in str(error.value)


@pytest.mark.parametrize("name", ["query", "grad_out"])
def test_comparison_refuses_nan(name: str) -> None:
    tensors = Case(64, 64, head_dim=16).inputs()._asdict()
    tensors.pop("grad_lse")
    tensors[name][0, 3, 0, 2] = math.nan
    with pytest.raises(ValueError, match=f"^{name} holds NaN"):
        back_lite.compare_gradients(**tensors, negl_prob=[0.1])


# ----------------------------------------------------------------------------------- target


def test_target_of_a_cosine_is_a_relative_l2() -> None:
    assert Target(cosine=0.99).error == pytest.approx(math.sqrt(1 - 0.99**2))
    assert Target(relative_l2=0.1).error == 0.1


@pytest.mark.parametrize("name", ["cosine", "relative_l2"])
@pytest.mark.parametrize("value", [0, 2, 1.0, -0.1, math.nan, "high", True])
def test_target_refuses(name: str, value: Any) -> None:
    with pytest.raises((TypeError, ValueError), match=f"^{name} = "):
        Target(**{name: value})


@pytest.mark.parametrize("given", [{}, {"cosine": 0.9, "relative_l2": 0.1}])
def test_target_is_one_number(given: dict[str, float]) -> None:
    with pytest.raises(TypeError, match="exactly one"):
        Target(**given)


# ---------------------------------------------------------------------------------- calibrate


class Model(nn.Module):
    """Two layers of grouped attention over inputs with a structure of tiles."""

    def __init__(self, scale: float = 1.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.project = nn.Linear(64, 8 * 16)
        self.layers = nn.ModuleList([BackLite(0.25), BackLite([0.0, 0.1, 0.0, 0.2])])
        self.dropout = nn.Dropout(0.1)
        self.register_buffer("calls", torch.zeros(()))
        self.gain = scale

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        for layer in self.layers:
            heads = self.dropout(self.project(x)).unflatten(-1, (8, 16))
            query, key, value = heads[:, :, :4], heads[:, :, 4:6], heads[:, :, 6:]
            x = x + layer(self.gain * 3 * query, key=key, value=value, causal=True).flatten(2)
        return x.square().mean()


def make_batches(count: int = 2) -> list[Tensor]:
    rng = torch.Generator().manual_seed(1)
    return [torch.randn(1, 400, 64, generator=rng).cumsum(1) * 0.1 for _ in range(count)]


def calibrate(model: nn.Module, batches: Any = None, **options: Any) -> Calibration:
    arguments = {"target": Target(relative_l2=0.15), "values": VALUES, **options}
    return back_lite.calibrate(model, make_batches() if batches is None else batches, **arguments)


def test_chosen_is_the_largest_that_meets_the_target() -> None:
    """Against errors found another way: as gradients of query, key and value in the model."""
    model = Model().eval()
    target = Target(relative_l2=0.15)
    found = calibrate(model, target=target, margin=0.0)

    def gradients(layer_idx: int, value: float) -> list[Tensor]:
        """(3, heads, elements) of one layer, where all others are exact."""
        leaves: list[tuple[Tensor, ...]] = []
        for i, layer in enumerate(model.layers):
            layer.negl_prob = value if i == layer_idx else 0.0

        def keep(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            tensors = args[0], kwargs["key"], kwargs["value"]
            for t in tensors:
                t.retain_grad()
            leaves.append(tensors)

        handle = model.layers[layer_idx].register_forward_pre_hook(keep, with_kwargs=True)
        for batch in make_batches():
            model(batch).backward()
        handle.remove()
        grads = [[t.grad for t in tensors] for tensors in leaves]
        return [
            torch.cat([g.double().transpose(1, 2).flatten(2)[0] for g in part], dim=1)
            for part in zip(*grads, strict=True)
        ]

    for layer_idx, layer in enumerate(found.layers):
        exact = gradients(layer_idx, 0.0)
        meets = []
        for value in VALUES:
            sparse = gradients(layer_idx, value)
            dq, dk, dv = (
                (s - e).norm(dim=1) / e.norm(dim=1) for s, e in zip(sparse, exact, strict=True)
            )
            worst = torch.stack([dq, dk.repeat_interleave(2), dv.repeat_interleave(2)]).amax(dim=0)
            meets.append(worst <= target.error)
        for head, chosen in enumerate(layer.negl_prob):
            good = [v for v, ok in zip(VALUES, meets, strict=True) if ok[head]]
            assert chosen == max(good, default=0.0)
    chosen = {value for layer in found.layers for value in layer.negl_prob}
    assert len(chosen) > 1, "all heads alike: the test shows little"


def test_groups_share_one_threshold() -> None:
    model = Model().eval()
    heads = calibrate(model)
    errors = [torch.tensor(layer.curves.error()) for layer in heads.layers]  # (V, H) each
    errors.append(torch.cat(errors, dim=1))
    for error in errors:
        rms = error.square().mean(dim=1).sqrt()
        # Between the mean and the root mean square, which thus are told apart.
        target = Target(relative_l2=float(error[2].mean() + rms[2]) / 2)
        layers, whole = (
            calibrate(model, target=target, per=per, margin=0.0) for per in ("layer", "model")
        )
        found = [set(layer.negl_prob) for layer in layers.layers]
        found.append({value for layer in whole.layers for value in layer.negl_prob})
        for values, other in zip(found, errors, strict=True):
            other_rms = other.square().mean(dim=1).sqrt().tolist()
            good = [v for v, e in zip(VALUES, other_rms, strict=True) if e <= target.error]
            assert values == {max(good, default=0.0)}


def test_bound_is_the_error_and_its_spread_between_batches() -> None:
    """Standard error of a ratio of sums, from the residual of each batch."""
    measurement = Measurement(["layer"], [0.03, 0.3], 1.0)
    parts = []
    for batch in range(6):
        length = 300 + 20 * batch  # other numbers in each batch
        case = Case(length, length, head_dim=16, num_heads=4, num_key_heads=2, topics=True)
        query, key, value, grad_out, _ = case.inputs()
        grad_out = grad_out * (1 + batch)  # batches of different weight
        part = back_lite.compare_gradients(query, key, value, grad_out, [0.03, 0.3], causal=True)
        measurement.add({"layer": LayerMeasurement.of_batch(part, 1)})
        parts.append(part)
    d = torch.stack([part.difference for part in parts])
    e = torch.stack([part.exact for part in parts])[:, None]
    squared = d.sum(0) / e.sum(0)
    residuals = d - squared * e
    deviation = (6 / 5 * residuals.square().sum(0)).sqrt() / e.sum(0)
    by_gradient = squared.sqrt() + 2.5 * deviation / (2 * squared.sqrt())
    dq, dk, dv = by_gradient.split([4, 2, 2], dim=1)
    worst = torch.maximum(dq, torch.maximum(dk, dv).repeat_interleave(2, dim=1))
    layer = measurement.layers["layer"]
    torch.testing.assert_close(layer.bound(2.5), worst, rtol=1e-9, atol=0.0)
    assert torch.equal(layer.bound(0.0), layer.sums.error)


def test_chosen_keeps_the_margin() -> None:
    model, batches = Model().eval(), make_batches(4)
    plain, careful = (calibrate(model, batches, margin=margin) for margin in (0.0, 2.0))
    found = [[v for layer in c.layers for v in layer.negl_prob] for c in (plain, careful)]
    assert all(a >= b for a, b in zip(*found, strict=True))
    assert found[0] != found[1], "the margin changed nothing: the test shows little"
    for layer in careful.layers:
        pairs = zip(layer.relative_l2, layer.bound, strict=True)
        assert all(error < bound <= 0.15 for error, bound in pairs if bound)


def test_one_batch_has_no_margin_and_says_so() -> None:
    model, batches = Model().eval(), make_batches(1)
    found = calibrate(model, batches)
    assert timeless(found) == timeless(calibrate(model, batches, margin=0.0))
    assert "no margin is kept" in str(found)


class Sparing(Model):
    """A gradient reaches the first two heads of the first layer; the second runs now and then."""

    def forward(self, x: Tensor) -> Tensor:
        heads = self.project(x).unflatten(-1, (8, 16))
        query, key, value = 3 * heads[:, :, :4], heads[:, :, 4:6], heads[:, :, 6:]
        loss = self.layers[0](query, key, value, causal=True)[:, :, :2].square().mean()
        if x.shape[1] != 400:
            loss = loss + self.layers[1](query, key, value, causal=True).square().mean()
        return loss


@pytest.mark.parametrize("per", ["head", "layer"])
def test_without_a_gradient_a_head_tells_nothing(per: Any) -> None:
    found = calibrate(Sparing().eval(), per=per, target=Target(relative_l2=0.3)).layers[0]
    assert found.curves is not None
    assert {row[1] for row in found.curves.dk} == {0.0}, "a gradient reached the last heads"
    if per == "head":
        assert found.negl_prob[2:] == [0.0, 0.0]
        assert min(found.negl_prob[:2]) > 0.0
        return
    errors = torch.tensor(found.curves.error())[:, :2]
    found = calibrate(
        Sparing().eval(), per=per, margin=0.0,
        target=Target(relative_l2=0.99 * float(errors[2].square().mean().sqrt())),
    ).layers[0]  # fmt: skip
    assert set(found.negl_prob) == {VALUES[1]}


def test_layer_seen_in_one_of_several_batches_has_no_margin_and_says_so() -> None:
    batches = make_batches(3)
    batches[1] = batches[1][:, :390]
    found = calibrate(Sparing().eval(), batches)
    assert [layer.batches for layer in found.layers] == [3, 1]
    assert found.layers[1].bound == found.layers[1].relative_l2
    assert "1 of 2 layers were seen in one batch" in str(found)
    batches[2] = batches[2][:, :380]
    layer = calibrate(Sparing().eval(), batches).layers[1]
    # As if the batch in which it did not run were not there.
    assert layer.bound == calibrate(Sparing().eval(), batches[1:]).layers[1].bound


def test_target_out_of_reach_ends_at_exact_and_says_so() -> None:
    found = calibrate(Model(), target=Target(relative_l2=1e-6), values=[0.3, 0.5])
    assert all(value == 0.0 for layer in found.layers for value in layer.negl_prob)
    assert len(found.exact_heads) == 8
    assert "8 heads stay exact" in str(found)
    assert found.skipped == 0.0


def test_never_beyond_what_was_measured() -> None:
    found = calibrate(Model(), target=Target(relative_l2=0.999), margin=0.0)
    assert {value for layer in found.layers for value in layer.negl_prob} == {VALUES[-1]}


def test_model_is_left_as_it_was() -> None:
    model = Model()
    model.dropout.eval()
    model(make_batches()[0]).backward()
    before = {name: p.grad for name, p in model.named_parameters()}
    values = {name: grad.clone() for name, grad in before.items()}
    calls, state = model.calls.clone(), torch.random.get_rng_state()

    def step(model: nn.Module, batch: Tensor) -> None:
        model.train()
        model(batch).backward()

    calibrate(model, step=step)
    assert model.layers[0].negl_prob == 0.25
    assert model.layers[1].negl_prob.tolist() == [0.0, 0.1, 0.0, 0.2]
    for name, parameter in model.named_parameters():
        assert parameter.grad is before[name]
        assert torch.equal(parameter.grad, values[name])
    assert torch.equal(model.calls, calls)
    assert model.training
    assert not model.dropout.training
    assert torch.equal(torch.random.get_rng_state(), state)
    assert not model.layers[0]._forward_hooks


def test_buffers_are_left_as_they_were() -> None:
    """Those that a step replaces, and those of which several elements share memory."""

    class Counting(Model):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("places", torch.arange(3).expand(2, 3))
            self.register_buffer("mean", None)

        def forward(self, x: Tensor) -> Tensor:
            self.calls = self.calls + 1
            self.mean = x.mean()
            return super().forward(x)

    model = Counting()
    before = model.calls
    calibrate(model)
    assert model.calls is before
    assert before == 0
    assert model.mean is None
    assert model.layers[0].negl_prob == 0.25


def test_model_is_left_as_it_was_after_an_error() -> None:
    model = Model()

    def step(model: nn.Module, batch: Tensor) -> None:
        model(batch).backward()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        calibrate(model, step=step)
    assert model.layers[0].negl_prob == 0.25
    assert model.project.weight.grad is None
    assert not model.layers[0]._forward_hooks


def test_lse_autocast_and_checkpointing_are_seen() -> None:
    class Other(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.project = nn.Linear(64, 3 * 64)
            self.attention = BackLite()

        def attend(self, x: Tensor) -> Tensor:
            q, k, v = self.project(x).unflatten(-1, (3, 4, 16)).unbind(2)
            out, lse = self.attention(3 * q, k, v, window_size=(200, 0), return_softmax_lse=True)
            return out.float().square().mean() + lse.mean()

        def forward(self, x: Tensor, reentrant: bool | None) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                if reentrant is None:
                    return self.attend(x)
                return checkpoint(self.attend, x, use_reentrant=reentrant)

    model = Other()
    found = []
    for reentrant in (None, True, False):
        batches = [(batch.requires_grad_(), reentrant) for batch in make_batches()]
        found.append(calibrate(model, batches))
        assert found[-1].layers[0].calls == 2
    assert found[0].layers[0].relative_l2 == found[1].layers[0].relative_l2
    assert found[0].layers[0].relative_l2 == found[2].layers[0].relative_l2


def test_layer_without_a_gradient_stays_exact() -> None:
    model = Model()
    model.unused = BackLite(0.1)
    found = calibrate(model)
    assert found.unseen_layers == ["unused"]
    found.apply(model)
    assert model.unused.negl_prob == 0.0


def nan_step(model: nn.Module, batch: Tensor) -> None:
    (model(batch) * math.nan).backward()


def training_step(model: nn.Module, batch: Tensor) -> None:
    model(batch).backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()


def training_step_past_autograd(model: nn.Module, batch: Tensor) -> None:
    model(batch).backward()
    model.project.weight.data.sub_(model.project.weight.grad)


def other_heads_step(model: nn.Module, batch: Tensor) -> None:
    heads = model.project(batch).unflatten(-1, (-1, 16 if batch.shape[1] == 400 else 32))
    model.layers[0](heads, heads, heads).sum().backward()


@pytest.mark.parametrize(
    ("model", "options", "words"),
    [
        (nn.Linear(2, 2), {}, "has no BackLite module"),
        ("model", {}, "model = str"),
        (Model(), {"batches": []}, "batches is empty"),
        (Model(), {"batches": 3}, "batches = int: accepted is an iterable"),
        (Model(), {"target": 0.1}, "target = 0.1"),
        (Model(), {"per": "batch"}, "per = 'batch'"),
        (Model(), {"step": "loss"}, "step = 'loss': accepted is a function"),
        (Model(), {"margin": -1}, "margin = -1: accepted are finite numbers from 0"),
        (Model(), {"margin": math.nan}, "margin = nan"),
        (Model(), {"margin": "wide"}, "margin = 'wide'"),
        (Model(), {"values": [0.2, 0.1]}, "values = [0.2, 0.1]"),
        (Model(), {"values": [0.0, 0.1]}, "values = [0.0, 0.1]"),
        (Model(), {"values": "high"}, "values = 'high'"),
        (Model(), {"step": nan_step}, "layer 'layers.1': grad_out holds NaN"),
        (Model(), {"step": training_step}, "step changed the parameter 'project.weight'"),
        (Model(), {"step": training_step_past_autograd}, "step changed the weights"),
        (
            Model(),
            {"step": other_heads_step, "batches": [x[:, i:] for i, x in enumerate(make_batches())]},
            "layer 'layers.0': 4 query and 4 key heads",
        ),
        (Model(), {"batches": {"x": 1}}, "batches = dict: accepted is an iterable"),
        (Model(), {"batches": "text"}, "batches = str: accepted is an iterable"),
        (Model(), {"step": lambda *_: None}, "no gradient reached a BackLite module"),
        (nn.Sequential(Model(), nn.Identity()), {"batches": [[torch.ones(1, 9, 64)]] * 2}, None),
        (BackLite(), {"batches": [(torch.ones(1, 9, 2, 8, requires_grad=True),) * 3]}, "shape (1,"),
    ],
)
def test_calibrate_refuses(model: Any, options: dict[str, Any], words: str | None) -> None:
    options = {"batches": make_batches(1), **options}
    if words is None:  # a control: this one is accepted
        assert calibrate(model, **options).layers[0].name == "0.layers.0"
        return
    with pytest.raises((TypeError, ValueError, RuntimeError)) as error:
        calibrate(model, **options)
    assert words in str(error.value)
    assert "accepted" in str(error.value)


def test_inference_mode_is_refused() -> None:
    with torch.inference_mode(), pytest.raises(RuntimeError, match=r"^torch.inference_mode\(\) is"):
        calibrate(Model())


# ----------------------------------------------------------------------------------- resuming


def interrupted_after(count: int) -> Iterator[Tensor]:
    yield from make_batches(4)[:count]
    raise KeyboardInterrupt


def test_interrupted_and_resumed_is_the_same(tmp_path: Path) -> None:
    partial = tmp_path / "partial.json"
    model = Model().eval()
    seen: list[int] = []

    def step(model: nn.Module, batch: Tensor) -> None:
        seen.append(1)
        model(batch).backward()

    with pytest.raises(KeyboardInterrupt):
        calibrate(model, interrupted_after(3), step=step, partial=partial)
    resumed = calibrate(model, make_batches(4), step=step, partial=partial)
    assert len(seen) == 4, "batches were run again"
    assert timeless(resumed) == timeless(calibrate(model, make_batches(4)))
    assert os.listdir(tmp_path) == ["partial.json"]


def timeless(calibration: Calibration) -> list[Any]:
    return [
        (layer.negl_prob, layer.bound, layer.density, layer.calls, layer.curves.dv)
        for layer in calibration.layers
    ]


def test_partial_file_of_other_weights_or_values_is_refused(tmp_path: Path) -> None:
    partial = tmp_path / "partial.json"
    calibrate(Model(), partial=partial)
    with pytest.raises(ValueError, match=r"values = \[0.01"):
        calibrate(Model(), partial=partial, values=[0.1])
    other = Model()
    with torch.no_grad():
        other.project.weight *= 1.001
    with pytest.raises(ValueError, match="weights_norm"):
        calibrate(other, partial=partial)
    partial.write_text(partial.read_text()[:100])
    with pytest.raises(ValueError, match="not JSON"):
        calibrate(Model(), partial=partial)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda c: c["layers"]["layers.0"].pop("live"), "'live'"),
        (lambda c: c["layers"]["layers.0"]["exact"].pop(), "layers.0: "),
        (lambda c: c["layers"]["layers.0"]["seconds"].pop(), "layers.0: seconds is (4,)"),
        (lambda c: c["layers"]["layers.0"]["live"][1].pop(), "expected sequence"),
        (lambda c: c["layers"]["layers.0"].update(num_heads=8), "layers.0: "),
        (lambda c: c["layers"]["layers.0"].update(calls=0), "layers.0: calls = 0"),
        (lambda c: c["layers"].update(other=c["layers"]["layers.0"]), "other: "),
        (lambda c: c.update(batches="2"), "batches = '2'"),
    ],
)
def test_damaged_partial_file_is_refused(
    tmp_path: Path, change: Callable[[dict[str, Any]], object], words: str
) -> None:
    partial = tmp_path / "partial.json"
    calibrate(Model(), partial=partial)
    content = json.loads(partial.read_text())
    change(content)
    partial.write_text(json.dumps(content))
    with pytest.raises(ValueError, match=r"partial\.json: damaged: ") as error:
        calibrate(Model(), partial=partial)
    assert words in str(error.value)


# ----------------------------------------------------------------------------------- the file


@pytest.fixture(scope="module")
def calibration() -> Calibration:
    return calibrate(Model().eval())


def test_saved_and_loaded_is_the_same(calibration: Calibration, tmp_path: Path) -> None:
    path = tmp_path / "calibration.json"
    calibration.save(path)
    model = Model()
    assert back_lite.load_calibration(model, path) == calibration
    for layer, module in zip(calibration.layers, model.layers, strict=True):
        assert module.negl_prob.tolist() == layer.negl_prob
    content = json.loads(path.read_text())
    assert content["schema_version"] == 3
    assert content["target"] == {"relative_l2": 0.15}
    assert max(map(len, path.read_text().splitlines())) < 200, "not for people"


def test_tile_map_is_that_of_its_threshold(calibration: Calibration) -> None:
    tiles = calibration.tile_map
    assert tiles is not None
    live, allowed = torch.tensor(tiles.live, dtype=torch.bool), torch.tensor(tiles.allowed)
    assert torch.equal(allowed.bool(), reference.mask_tiles(400, 400, causal=True))
    stats = torch.tensor(tiles.probability)
    lengths = {"query_length": 400, "key_length": 400}
    expected = reference.select(stats[None, None], tiles.negl_prob, **lengths, causal=True)
    assert torch.equal(live, expected[0, 0])


def edit(change: Callable[[dict[str, Any]], None]) -> Callable[[str], str]:
    def apply(text: str) -> str:
        content = json.loads(text)
        change(content)
        return json.dumps(content)

    return apply


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda text: text[:-20], "not JSON"),
        (lambda _: "[]", "schema = 'list'"),
        (edit(lambda c: c.update(schema="other")), "schema = 'other'"),
        (edit(lambda c: c.update(schema_version=1)), "schema_version = 1: accepted is 3"),
        (edit(lambda c: c.pop("layers")), "damaged"),
        (edit(lambda c: c["layers"][0].update(name="x")), "lacks ['x'] and the calibration lacks"),
        (edit(lambda c: c["layers"].pop()), "calibration lacks ['layers.1']"),
        (edit(lambda c: c["layers"][1]["negl_prob"].pop()), "negl_prob has 3 entries"),
        (edit(lambda c: c["layers"][1]["negl_prob"].__setitem__(2, 1.5)), "negl_prob[2] = 1.5"),
        (edit(lambda c: c["target"].update(relative_l2=2)), "relative_l2 = 2"),
        (edit(lambda c: c.update(layers=[])), "layers = []"),
        (edit(lambda c: c["layers"].append(c["layers"][0])), "['layers.0'] twice"),
        (edit(lambda c: c["layers"][0].update(name=["x"])), "name = ['x']"),
        (edit(lambda c: c["layers"][0].update(density=[0, 1, 1, None])), "density[3] = None"),
        (edit(lambda c: c["layers"][0].update(relative_l2=[0, 0, 0, "x"])), "relative_l2[3] = 'x'"),
        (edit(lambda c: c["layers"][0].update(num_key_heads=3)), "num_key_heads = 3"),
        (edit(lambda c: c["layers"][0].update(curves=None)), "num_heads = 4"),
        (edit(lambda c: c["layers"][0]["curves"]["dk"][1].pop()), "curves.dk[1] has 1 entries"),
        (edit(lambda c: c["layers"][0]["curves"]["dv"].pop()), "curves.dv has 3 entries"),
        (edit(lambda c: c["layers"][0]["curves"].update(exact_seconds=math.nan)), "seconds = nan"),
        (edit(lambda c: c.update(per="<b>")), "per = '<b>'"),
        (edit(lambda c: c.update(margin="2")), "margin = '2'"),
        (edit(lambda c: c.update(batches=True)), "batches = True"),
        (edit(lambda c: c.update(complete="no")), "complete = 'no'"),
        (edit(lambda c: c["values"].reverse()), "ascending"),
        (edit(lambda c: c["tile_map"]["live"].pop()), "tile_map.live has 6 entries"),
        (edit(lambda c: c["tile_map"]["allowed"][2].pop()), "tile_map.allowed[2] has 3 entries"),
        (lambda _: "[" * 100_000, "not JSON"),
    ],
)
def test_other_files_are_refused(
    calibration: Calibration, tmp_path: Path, change: Callable[[str], str], words: str
) -> None:
    path = tmp_path / "calibration.json"
    calibration.save(path)
    path.write_text(change(path.read_text()))
    model = Model()
    with pytest.raises(ValueError) as error:  # noqa: PT011
        back_lite.load_calibration(model, path)
    assert words in str(error.value)
    assert str(path) in str(error.value)
    assert model.layers[0].negl_prob == 0.25, "half applied"


@pytest.mark.parametrize(
    "wrap",
    [
        nn.DataParallel,  # DistributedDataParallel: test_calibration_controller.py
        lambda model: torch.compile(model, backend="eager"),
        lambda model: torch.compile(nn.DataParallel(model), backend="eager"),
        lambda model: model.layers.__setitem__(1, checkpoint_wrapper(model.layers[1])) or model,
    ],
    ids=["parallel", "compiled", "both", "checkpointed"],
)
def test_wrapped_the_model_is_the_same(
    calibration: Calibration, wrap: Callable[[nn.Module], nn.Module]
) -> None:
    model = Model()
    calibration.apply(wrap(model))
    modules = [module for module in model.modules() if isinstance(module, BackLite)]
    for layer, module in zip(calibration.layers, modules, strict=True):
        assert module.negl_prob.tolist() == layer.negl_prob


def test_names_are_kept_to_the_letter(calibration: Calibration, tmp_path: Path) -> None:
    first, second = calibration.layers
    layers = [dataclasses.replace(first, name="a[ 1,  2 ]"), dataclasses.replace(second, name="")]
    odd = dataclasses.replace(calibration, layers=layers)
    odd.save(tmp_path / "calibration.json")
    assert Calibration.load(tmp_path / "calibration.json") == odd


def test_another_head_count_is_refused(calibration: Calibration, tmp_path: Path) -> None:
    path = tmp_path / "calibration.json"
    calibration.save(path)
    model = Model()
    model.layers[1] = BackLite()
    query = torch.zeros(1, 8, 6, 16)
    model.layers[1](query, query, query)
    with pytest.raises(ValueError, match=r"'layers.1' has 6 query heads; accepted are the 4"):
        back_lite.load_calibration(model, path)
    assert model.layers[0].negl_prob == 0.25, "half applied"


def test_full_disk_leaves_the_old_file(
    calibration: Calibration, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "calibration.json"
    path.write_text("old")

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match=r"cannot write: No space left.*calibration.json"):
        calibration.save(path)
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["calibration.json"]


@pytest.mark.parametrize("device", [False, True])
def test_links_and_devices_stay_what_they_are(
    device: bool, calibration: Calibration, tmp_path: Path
) -> None:
    target = Path("/dev/null") if device else tmp_path / "elsewhere.json"
    link = tmp_path / "calibration.json"
    link.symlink_to(target)
    calibration.save(link)
    assert link.readlink() == target
    assert device or Calibration.load(target) == calibration
    assert target.is_char_device() == device


# ------------------------------------------------------------------------------- command line

SCRIPT = """
import sys
sys.path.insert(0, {here!r})
from test_calibration import Model, make_batches, interrupted_after
model = Model().eval()
batches = {batches}
"""


def command(tmp_path: Path, batches: str, *more: str) -> subprocess.CompletedProcess[str]:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(here=str(Path(__file__).parent), batches=batches))
    arguments = ["calibrate", "--script", str(script), *more]
    return subprocess.run(
        [sys.executable, "-m", "back_lite", *arguments, "--out", str(tmp_path / "found.json")],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


def test_command_line_goes_on_after_ctrl_c(tmp_path: Path) -> None:
    target = ("--relative-l2", "0.15", "--per", "layer")
    first = command(tmp_path, "interrupted_after(1)", *target)
    assert first.returncode == 130, first.stderr
    kept = Calibration.load(tmp_path / "found.json")
    assert (kept.complete, kept.batches) == (False, 1)
    second = command(tmp_path, "make_batches(2)", *target)
    assert second.returncode == 0, second.stderr
    assert "Going on from" in second.stderr
    found = back_lite.load_calibration(Model(), tmp_path / "found.json")
    assert (found.complete, found.batches) == (True, 2)
    assert sorted(os.listdir(tmp_path)) == ["found.json", "script.py"]


def test_interrupted_command_line_leaves_a_whole_file(tmp_path: Path) -> None:
    """Whatever it is, another version's say, but not one that was interrupted itself."""
    path = tmp_path / "found.json"
    assert command(tmp_path, "make_batches(1)", "--cosine", "0.99").returncode == 0
    for content in (path.read_text(), "{}"):
        path.write_text(content)
        process = command(tmp_path, "interrupted_after(1)", "--cosine", "0.9")
        assert process.returncode == 130, process.stderr
        assert "found.json is still that of before" in process.stdout
        assert path.read_text() == content
    path.unlink()
    for count in (1, 2):
        process = command(tmp_path, f"interrupted_after({count})", "--cosine", "0.9")
        assert "found.json is of the batches so far" in process.stdout
        assert Calibration.load(path).batches == count


def test_command_line_says_what_is_wrong(tmp_path: Path) -> None:
    for batches, more, words in (
        ("[]", ("--cosine", "0.99"), "error: batches is empty"),
        ("None", ("--cosine", "0.99"), "\nerror: batches = NoneType: accepted is an iterable"),
        ("[1]; model = model.dropout", ("--cosine", "0.99"), "\nerror: model = Dropout has no"),
        ("[]", ("--cosine", "2"), "error: cosine = 2.0"),
        ("[]; del model", ("--cosine", "0.9"), "defines no model"),
        ("1 / 0", ("--cosine", "0.9"), "ZeroDivisionError"),
    ):
        process = command(tmp_path, batches, *more)
        assert process.returncode == 1
        assert words in "\n" + process.stderr
        assert os.listdir(tmp_path) == ["script.py"]


# ------------------------------------------------------------------------------------- report


def report(folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "back_lite", "report", "found.json", "--out", "report"],
        cwd=folder,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


def test_report_is_one_page_without_network(calibration: Calibration, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    calibration.save(tmp_path / "found.json")
    process = report(tmp_path)
    assert process.returncode == 0, process.stderr
    pictures = ["density.png", "error.png", "tiles.png", "time.png"]
    assert sorted(os.listdir(tmp_path / "report")) == sorted([*pictures, "report.html"])
    page = (tmp_path / "report" / "report.html").read_text()
    assert page.count("<img ") == page.count('src="data:image/png;base64,') == len(pictures)
    assert not re.search(r"(?:src|href)=\"(?!data:|#)|url\(|@import|<script", page)
    for target in re.findall(r'href="#(\w+)"', page):
        assert f'id="{target}"' in page
    for layer in calibration.layers:
        values = " ".join(f"{value:g}" if value else "exact" for value in layer.negl_prob)
        assert f"<td>{values}</td>" in page


def test_report_shows_names_as_they_are(calibration: Calibration, tmp_path: Path) -> None:
    """Neither as HTML nor as formulas, which matplotlib finds between dollars."""
    pytest.importorskip("matplotlib")
    from back_lite._report import write_report

    names = "<script>1</script>", "$\\frac{$"
    layers = [
        dataclasses.replace(layer, name=name)
        for layer, name in zip(calibration.layers, names, strict=True)
    ]
    assert calibration.tile_map is not None
    tiles = dataclasses.replace(calibration.tile_map, layer=names[0])
    write_report(dataclasses.replace(calibration, layers=layers, tile_map=tiles), tmp_path)
    page = (tmp_path / "report.html").read_text()
    assert "<script" not in page
    assert page.count("&lt;script&gt;1&lt;/script&gt;") == 2


def test_report_expects_a_time_between_those_measured(calibration: Calibration) -> None:
    pytest.importorskip("matplotlib")
    from back_lite._report import expected_seconds

    layer = calibration.layers[0]
    curves = dataclasses.replace(
        layer.curves,
        density=[[0.8] * 4, [0.6] * 4, [0.4] * 4, [0.2] * 4],
        seconds=[8.0, 6.0, 4.0, 2.0],
        exact_seconds=11.0,
    )
    layer = dataclasses.replace(
        layer, curves=curves, negl_prob=[0.1, 0.1, 0.3, 0.3], density=[0.4, 0.6, 0.4, 0.6]
    )
    assert expected_seconds(layer) == pytest.approx(5.0)
    exact = dataclasses.replace(layer, negl_prob=[0.0] * 4, density=[1.0] * 4)
    assert expected_seconds(exact) == 11.0


def test_report_on_a_full_disk_leaves_nothing(
    calibration: Calibration, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib")
    from back_lite._report import write_report

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match=r"cannot write: No space left.*report.html"):
        write_report(calibration, tmp_path)
    assert os.listdir(tmp_path) == []
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match=r"cannot make: File exists: '.*file'"):
        write_report(calibration, tmp_path / "file")


def test_report_says_what_is_wrong(calibration: Calibration, tmp_path: Path) -> None:
    assert "error: [Errno 2] cannot read: No such file" in report(tmp_path).stderr
    calibration.save(tmp_path / "found.json")
    hidden = tmp_path / "hidden" / "matplotlib"
    hidden.mkdir(parents=True)
    (hidden / "__init__.py").write_text("raise ModuleNotFoundError(name='matplotlib')")
    paths = [str(hidden.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    process = report(tmp_path, PYTHONPATH=os.pathsep.join(paths))
    assert (process.returncode, process.stderr) == (
        1,
        "error: the report needs matplotlib (pip install matplotlib)\n",
    )
    (tmp_path / "found.json").write_text("{}")
    assert "schema = None: accepted is" in report(tmp_path).stderr
    assert sorted(os.listdir(tmp_path)) == ["found.json", "hidden"]
