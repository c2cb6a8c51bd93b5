"""The controller: it finds the target, survives checkpoints and bad steps, and ranks agree."""

from __future__ import annotations

import copy
import dataclasses
import gc
import io
import math
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import back_lite
import child
import pytest
import torch
from back_lite import BackLite, Controller, Target, _dispatch
from test_calibration import Model
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

TARGET = Target(relative_l2=0.1)


def draw(step: int, batch: int = 2) -> Tensor:
    rng = torch.Generator().manual_seed(step)
    return torch.randn(batch, 400, 64, generator=rng).cumsum(1) * 0.1


class Training:
    """A model that trains, with a controller."""

    def __init__(self, batch: int = 2, **options: Any) -> None:
        self.batch = batch
        self.model = Model()
        self.model.dropout.eval()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)
        self.records: list[dict[str, Any]] = []
        arguments = {"target": TARGET, "every": 2, "warmup": 0, "log": self.records.append}
        self.controller = Controller(self.model, **{**arguments, **options})
        self.num_steps = 0

    def run(self, num_steps: int) -> Training:
        for _ in range(num_steps):
            self.optimizer.zero_grad()
            self.model(draw(self.num_steps, self.batch)).backward()
            self.optimizer.step()
            self.controller.step()
            self.num_steps += 1
        return self

    @property
    def thresholds(self) -> list[list[float]]:
        values = [torch.as_tensor(layer.negl_prob) for layer in self.model.layers]
        return [value.expand(4).tolist() for value in values]


def record_calls(layer: BackLite) -> list[tuple[Tensor, ...]]:
    """Return a list that receives query, key, value and grad_out of every call."""
    calls: list[tuple[Tensor, ...]] = []

    def keep(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], out: Tensor) -> None:
        tensors = args[0].detach(), kwargs["key"].detach(), kwargs["value"].detach()
        out.register_hook(lambda grad: calls.append((*tensors, grad)))

    layer.register_forward_hook(keep, with_kwargs=True)
    return calls


def test_it_finds_the_target() -> None:
    """The geometric mean of its last thresholds, over whole batches: one slice says little."""
    training = Training().run(40)
    seen = []
    for _ in range(40):
        training.run(1)
        seen.append(torch.tensor(training.thresholds))
    training.controller.close()
    means = torch.stack(seen).log().mean(dim=0).exp().tolist()
    calls = [record_calls(layer) for layer in training.model.layers]
    for step in range(40, 80):
        training.model(draw(step)).backward()
    errors = []
    for layer, thresholds in zip(calls, means, strict=True):
        found = [back_lite.compare_gradients(*call, [thresholds], causal=True) for call in layer]
        errors.append(sum(found[1:], found[0]).error[0])
    median = float(torch.cat(errors).median())
    assert abs(math.log(median / TARGET.error)) < math.log(1.2)


@pytest.mark.parametrize("batch", [1, 2])
def test_each_layer_and_head_has_its_turn(batch: int) -> None:
    """Four times as often in the first 16 steps, twice until 48; with one sequence, half of it."""
    training = Training(batch=batch, every=8).run(64)
    seen = [(record["step"], record["layer"], record["heads"]) for record in training.records]
    steps = [*range(1, 17), *range(18, 49, 2), *range(52, 65, 4)]
    halves = ([0, 1], [2, 3]) if batch == 1 else ([0, 1, 2, 3],) * 2
    assert seen == [
        (step, f"layers.{turn % 2}", halves[turn // 2 % 2]) for turn, step in enumerate(steps)
    ]


def test_a_layer_is_measured_once_in_a_step() -> None:
    training = Training(every=1).run(3)
    assert [(record["step"], record["layer"]) for record in training.records] == [
        (step, f"layers.{layer}") for step in (1, 2, 3) for layer in (0, 1)
    ]


@pytest.mark.parametrize(
    ("batch", "rows", "keys"),
    [
        (10, [slice(0, 4), slice(4, 8), slice(0, 4)], [slice(0, 2)] * 3),
        (6, [slice(0, 3), slice(3, 6), slice(0, 3)], [slice(0, 2)] * 3),
        (1, [slice(0, 1)] * 3, [slice(0, 1), slice(1, 2), slice(0, 1)]),
    ],
)
def test_it_measures_what_compare_gradients_does(
    batch: int, rows: list[slice], keys: list[slice]
) -> None:
    """Half of a batch: some sequences, or a key head and its query heads, as if nothing else."""
    training = Training(every=8, batch=batch)
    calls = record_calls(training.model.layers[1])
    training.run(6)
    thresholds, estimates = [0.01] * 4, dict[int, float]()
    # Layer 1 is due in steps 2, 4 and 6.
    for step, row, of_keys in zip((2, 4, 6), rows, keys, strict=True):
        query, key, value, grad_out = (tensor[row] for tensor in calls[step - 1])
        heads = slice(2 * of_keys.start, 2 * of_keys.stop)
        found = back_lite.compare_gradients(
            query[:, :, heads], key[:, :, of_keys], value[:, :, of_keys], grad_out[:, :, heads],
            [thresholds[heads]], causal=True,
        )  # fmt: skip
        record = training.records[step - 1]
        assert (record["step"], record["layer"]) == (step, "layers.1")
        assert record["heads"] == list(range(4))[heads]
        assert record["relative_l2"] == pytest.approx(found.error[0].tolist())
        assert record["density"] == found.density[0].tolist()
        for head, error, chosen in zip(
            record["heads"], record["relative_l2"], record["negl_prob"], strict=True
        ):
            square = (error / TARGET.error) ** 2
            if head in estimates:
                square = square / 3 + estimates[head] * 2 / 3
            factor = min(max(square**-0.5 if square else 2.0, 0.5), 2.0)
            assert chosen == pytest.approx(thresholds[head] * factor)
            estimates[head] = square * factor**1.4
        thresholds[heads] = record["negl_prob"]


def test_warmup_is_exact() -> None:
    training = Training(warmup=5)
    assert training.thresholds == [[0.0] * 4] * 2
    training.run(4)
    assert training.thresholds == [[0.0] * 4] * 2
    assert len(training.records) == 8
    training.run(1)
    assert all(value > 0 for layer in training.thresholds for value in layer)


def test_checkpoint_and_resume_is_the_same(tmp_path: Path) -> None:
    straight = Training(warmup=3).run(9)
    half = Training(warmup=3).run(5)
    path = tmp_path / "checkpoint.pt"
    parts = half.model, half.optimizer, half.controller
    torch.save([part.state_dict() for part in parts], path)
    resumed = Training(warmup=3)
    resumed.num_steps = 5
    states = torch.load(path, weights_only=True)
    for part, state in zip(
        (resumed.model, resumed.optimizer, resumed.controller), states, strict=True
    ):
        part.load_state_dict(state)
    assert resumed.thresholds == half.thresholds
    resumed.run(4)
    assert resumed.thresholds == straight.thresholds
    assert resumed.records == straight.records[len(half.records) :]


def test_bad_steps_change_nothing() -> None:
    training = Training().run(8)
    before = training.thresholds
    (training.model(draw(8)) * math.nan).backward()
    training.controller.step()
    assert training.records[-1]["relative_l2"] is None
    training.controller.step()  # without a backward
    assert training.records[-1]["relative_l2"] is None
    with torch.no_grad():
        training.model(draw(9))
    training.controller.step()
    assert training.thresholds == before
    training.run(2)
    assert training.records[-1]["relative_l2"] is not None


def test_out_of_reach_is_mostly_exact() -> None:
    """A single tile too many misses the target: most measurements skip none."""
    training = Training(target=Target(relative_l2=1e-7)).run(80)
    exact = [d == 1.0 for record in training.records[40:] for d in record["density"]]
    assert sum(exact) >= 0.6 * len(exact)
    values = [value for layer in training.thresholds for value in layer]
    assert max(values) < 0.05


def test_missed_even_at_the_least_is_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("back_lite._controller._LEAST", 0.3)
    training = Training(target=Target(relative_l2=1e-3)).run(12)
    assert training.thresholds == [[0.0] * 4] * 2


def test_closed_it_leaves_the_model_alone() -> None:
    training = Training().run(2)
    training.controller.close()
    before = training.thresholds
    training.model(draw(3)).backward()
    assert training.thresholds == before
    assert not any(layer._forward_hooks for layer in training.model.layers)


def test_deleted_it_leaves_the_model_alone() -> None:
    model = Model()
    controller = weakref.ref(Controller(model, TARGET, every=1))
    gc.collect()
    assert controller() is None
    assert not any(layer._forward_hooks for layer in model.layers)


def test_copies_of_the_model_are_not_watched() -> None:
    """Nor does the hook keep a model from being saved whole."""
    training = Training(every=1)
    torch.save(training.model, file := io.BytesIO())
    file.seek(0)
    copies = [copy.deepcopy(training.model), torch.load(file, weights_only=False)]
    for other in copies:
        other(draw(0)).backward()
    training.controller.step()
    assert [record["relative_l2"] for record in training.records] == [None, None]
    training.run(1)
    assert training.records[-1]["relative_l2"] is not None


def test_log_that_raises_changes_nothing() -> None:
    def log(record: dict[str, Any]) -> None:
        raise OSError(28, "No space left on device")

    quiet, loud = Training(every=1), Training(every=1, log=log)
    for training in (quiet, loud):
        for step in range(4):
            training.model(draw(step)).backward()
            try:
                training.controller.step()
            except OSError:
                assert training is loud
    assert loud.thresholds == quiet.thresholds
    assert loud.controller.state_dict() == quiet.controller.state_dict()


def test_without_a_gradient_a_head_does_not_move() -> None:
    class Half(Model):
        def forward(self, x: Tensor) -> Tensor:
            heads = self.project(x).unflatten(-1, (8, 16))
            query, key, value = 3 * heads[:, :, :4], heads[:, :, 4:6], heads[:, :, 6:]
            return self.layers[0](query, key, value, causal=True)[:, :, :2].square().mean()

    model = Half()
    controller = Controller(model, TARGET, every=1, warmup=0)
    for step in range(4):
        model(draw(step)).backward()
        controller.step()
    values = model.layers[0].negl_prob.tolist()
    assert min(values[:2]) > 0.0
    assert values[2:] == [0.0, 0.0]


def test_target_far_out_of_reach() -> None:
    """The square of error / target is beyond the largest float."""
    training = Training(target=Target(relative_l2=1e-300)).run(8)
    assert all(value < 0.01 for layer in training.thresholds for value in layer)
    assert all(
        math.isfinite(estimate)
        for layer in training.controller.state_dict()["layers"].values()
        for estimate in layer["estimates"]
    )


def attend(controlled: BackLite, length: int = 300, heads: int = 4) -> None:
    rng = torch.Generator().manual_seed(length)
    shape = 2, length, heads, 8
    query, key, value = (torch.randn(shape, generator=rng, requires_grad=True) for _ in range(3))
    controlled(3 * query, key, value, causal=True).square().sum().backward()


def test_closed_it_takes_no_more_steps() -> None:
    training = Training().run(2)
    training.controller.close()
    state = training.controller.state_dict()
    for call in (training.controller.step, lambda: training.controller.load_state_dict(state)):
        with pytest.raises(RuntimeError, match=r"closed: close\(\) was called"):
            call()
    assert not any(layer._forward_hooks for layer in training.model.layers)


def test_the_last_controller_owns_the_model() -> None:
    training = Training(every=1).run(1)
    second = Controller(training.model.layers[1], TARGET, every=1, warmup=0)
    with pytest.raises(RuntimeError, match="another Controller of the same model"):
        training.controller.step()
    training.model(draw(1)).backward()
    second.step()
    assert min(training.thresholds[1]) > 0.0
    third = Training(every=1)
    third.controller.close()
    assert Controller(third.model, TARGET).state_dict()["num_steps"] == 0


def test_ranks_that_cannot_agree_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    training = Training(every=1).run(3)
    before = training.controller.state_dict(), training.thresholds
    gathered = []

    def gather(slices: list[Any], mine: Any) -> None:
        gathered.append(mine)
        if len(gathered) == 1:
            raise ConnectionError("a rank is gone")
        theirs = copy.deepcopy(mine)
        if len(gathered) == 2:  # another negl_prob in the last layer: the first would have moved
            found = theirs["layers.1"].found
            values = (tuple(value / 2 for value in found.negl_prob[0]),)
            theirs["layers.1"] = theirs["layers.1"]._replace(
                found=dataclasses.replace(found, negl_prob=values)
            )
        slices[:] = [mine, theirs]

    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    monkeypatch.setattr(torch.distributed, "all_gather_object", gather)
    training.model(draw(3)).backward()
    for kind in (ConnectionError, ValueError):
        with pytest.raises(kind):
            training.controller.step()
        assert (training.controller.state_dict(), training.thresholds) == before
    training.controller.step()
    assert training.thresholds != before[1]


def test_a_sparse_gradient_that_overflows_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    training = Training(every=1).run(3)
    before = training.thresholds
    call_backward = _dispatch.call_backward

    def overflow(*arguments: Any) -> Any:
        dq, dk, dv = call_backward(*arguments)
        return (dq / 0 if arguments[6] is not None else dq), dk, dv

    with monkeypatch.context() as patch:
        patch.setattr(_dispatch, "call_backward", overflow)
        training.run(1)
    assert [record["relative_l2"] for record in training.records[-2:]] == [None, None]
    assert training.thresholds == before


@pytest.mark.parametrize("length", [0, 5, 128])
def test_where_nothing_can_be_skipped_nothing_moves(length: int) -> None:
    """An error of 0 would take the thresholds up, to be far too high for the next long text."""
    layer = BackLite()
    records: list[dict[str, Any]] = []
    controller = Controller(layer, TARGET, every=1, warmup=0, log=records.append)
    attend(layer, 300)
    controller.step()
    before = torch.as_tensor(layer.negl_prob).tolist()
    attend(layer, length)
    controller.step()
    assert torch.as_tensor(layer.negl_prob).tolist() == before
    assert [record["relative_l2"] is None for record in records] == [False, True]


def test_other_heads_than_in_the_state() -> None:
    """With one head the layer takes the threshold, as one for all."""
    layer = BackLite()
    controller = Controller(layer, TARGET, every=1, warmup=0)
    layers = {"": {"proposed": [0.1], "estimates": [1.0]}}
    controller.load_state_dict({"version": 1, "num_steps": 3, "layers": layers})
    with pytest.raises(ValueError, match="layer '' has 4 query heads: accepted are 1"):
        attend(layer)
    assert controller.state_dict()["layers"] == layers


def test_more_heads_than_a_module_takes() -> None:
    layer = BackLite()
    controller = Controller(layer, TARGET, every=1, warmup=0)
    with pytest.raises(ValueError, match="1025 entries"):
        attend(layer, 130, heads=1025)
    assert controller.state_dict() == {"version": 1, "num_steps": 0, "layers": {}}


@pytest.mark.skipif(
    not hasattr(torch.library, "register_fake"), reason="torch before 2.4 has no fake kernels"
)
def test_gradients_of_transforms_are_measured_or_not_seen() -> None:
    layer = BackLite()
    records: list[dict[str, Any]] = []
    controller = Controller(layer, TARGET, every=1, warmup=0, log=records.append)
    query = draw(0).unflatten(2, (4, 16))

    def loss(x: Tensor) -> Tensor:
        return layer(3 * x, x, x, causal=True).square().sum()

    torch.func.grad(loss)(query)
    controller.step()
    assert records[-1]["relative_l2"] is not None
    torch.func.vmap(torch.func.grad(loss))(query[:, None])
    controller.step()
    assert records[-1]["relative_l2"] is None
    with FakeTensorMode(allow_non_fake_inputs=True):
        attend(layer)
    controller.step()
    assert records[-1]["relative_l2"] is None
    # Of the gradient alone.
    torch.func.jacrev(lambda x: layer(3 * x, x, x)[0, :2, 0, 0])(query)
    controller.step()
    assert records[-1]["relative_l2"] is None
    leaf = query.clone().requires_grad_()
    for return_lse in (False, True):
        out = layer(3 * leaf, leaf, leaf, return_softmax_lse=return_lse)
        out = out if return_lse else (out,)
        batch = [torch.ones(2, *x.shape) for x in out]
        torch.autograd.grad(out, leaf, batch, is_grads_batched=True)
        controller.step()
        assert records[-1]["relative_l2"] is None


@pytest.mark.skipif(
    not hasattr(torch.library, "register_fake"), reason="torch before 2.4 has no fake kernels"
)
def test_compiled_layers_are_refused_unless_taken_out() -> None:
    """Not seen at some steps alone: hooks that compiled code saw would break it into pieces."""

    def train(take_out: bool, is_compiled: bool) -> tuple[Training, list[tuple[int, str]]]:
        torch._dynamo.reset()
        training, raised = Training(every=2), []
        if take_out:
            layers = training.model.layers
            for index, layer in enumerate(layers):
                layers[index] = torch.compiler.disable(layer)
        model = training.model
        called = torch.compile(model, backend="aot_eager") if is_compiled else model
        for step in range(6):
            called(draw(step)).backward()
            try:
                training.controller.step()
            except RuntimeError as error:
                raised.append((step, str(error)))
        return training, raised

    blind, ((step, words),) = train(take_out=False, is_compiled=True)
    assert step == 1
    assert "in 4 turns no BackLite module was called where the controller sees it" in words
    assert blind.thresholds == [[0.0] * 4] * 2
    assert all(record["relative_l2"] is None for record in blind.records)
    seeing, raised = train(take_out=True, is_compiled=True)
    eager, _ = train(take_out=False, is_compiled=False)
    assert not raised
    for one, other in zip(seeing.thresholds, eager.thresholds, strict=True):
        assert one == pytest.approx(other)


def test_a_measurement_makes_few_calls_of_torch() -> None:
    """On a GPU they are its time; 308 in benchmarks/controller.py, as it was once."""
    training = Training(every=1).run(1)
    training.controller.close()
    controller = Controller(training.model.layers[0], TARGET, every=1, warmup=0)

    def count() -> int:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiled:
            training.model(draw(1)).backward()
            if not controller._closed:
                controller.step()
        return sum(
            event.name.startswith(("aten::", "back_lite::")) and event.cpu_parent is None
            for event in profiled.events()
        )

    count()
    measured = count()
    controller.close()
    assert 20 < measured - count() < 140


@pytest.mark.parametrize(
    ("model", "options", "words"),
    [
        (nn.Linear(2, 2), {}, "has no BackLite module"),
        (BackLite(), {"target": 0.1}, "target = 0.1"),
        (BackLite(), {"every": 0}, "every = 0: accepted are ints from 1"),
        (BackLite(), {"every": 2.5}, "every = 2.5"),
        (BackLite(), {"warmup": -1}, "warmup = -1: accepted are ints from 0"),
        (BackLite(), {"log": "file"}, "log = 'file'"),
    ],
)
def test_it_refuses(model: nn.Module, options: dict[str, Any], words: str) -> None:
    with pytest.raises((TypeError, ValueError)) as error:
        Controller(model, **{"target": TARGET, **options})
    assert words in str(error.value)


def test_state_of_another_model_or_version_is_refused() -> None:
    state = Training().run(2).controller.state_dict()
    other = BackLite()
    controller = Controller(other, TARGET)
    with pytest.raises(ValueError, match=r"state of another model: it has layers \['layers.0'"):
        controller.load_state_dict(state)
    with pytest.raises(ValueError, match="version = 9: accepted is 1"):
        controller.load_state_dict({**state, "version": 9})


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda state: state.pop("layers"), "'layers'"),
        (lambda state: state.pop("num_steps"), "'num_steps'"),
        (lambda state: state.update(num_steps=-1), "num_steps = -1"),
        (lambda state: state.update(num_steps="3"), "num_steps = '3'"),
        (lambda state: state["layers"]["layers.1"].pop("estimates"), "'estimates'"),
        (lambda state: state["layers"]["layers.1"]["estimates"].pop(), "4 proposed and 3"),
        (lambda state: state["layers"]["layers.1"]["estimates"].__setitem__(2, "x"), "'x'"),
        (lambda state: state["layers"]["layers.1"]["proposed"].__setitem__(0, math.nan), "nan"),
        (lambda state: state["layers"]["layers.1"]["proposed"].__setitem__(0, 0.0), "[0.0"),
        (lambda state: state["layers"]["layers.1"]["proposed"].__setitem__(2, 3.0), "[2] = 3.0"),
        (lambda state: state["layers"]["layers.1"]["proposed"].__setitem__(2, 1e-320), "1e-320"),
        (lambda state: state["layers"]["layers.1"]["estimates"].__setitem__(2, 1e308), "1e+308"),
        (
            lambda state: state["layers"].update(
                {"layers.1": {"proposed": [0.1] * 6, "estimates": [1.0] * 6}}
            ),
            "one for each query head (4)",
        ),
    ],
)
def test_damaged_state_is_refused(change: Callable[[dict[str, Any]], object], words: str) -> None:
    training = Training().run(4)
    before = copy.deepcopy(training.controller.state_dict()), training.thresholds
    state = copy.deepcopy(before[0])
    change(state)
    with pytest.raises(ValueError, match=r"^state ") as error:
        training.controller.load_state_dict(state)
    assert words in str(error.value)
    assert (training.controller.state_dict(), training.thresholds) == before
    assert any(layer._forward_hooks for layer in training.model.layers), "it watches no more"


def test_state_of_another_kind_is_refused() -> None:
    with pytest.raises(ValueError, match="version = 'list': accepted is 1"):
        Training().controller.load_state_dict([])  # type: ignore[arg-type]


RANK = """
import gc
import sys
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from back_lite import Controller
from test_calibration_controller import TARGET, Model, draw

rank, path = int(sys.argv[1]), sys.argv[2]
torch.set_num_threads(1)
dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=2)


def train():
    model = Model()
    model.dropout.eval()
    wrapped = DistributedDataParallel(model)
    controller = Controller(wrapped, TARGET, every=2, warmup=2)
    assert list(controller._modules) == ["layers.0", "layers.1"]
    for step in range(6):
        more = rank == 1 and step == 4  # this rank alone measures all heads
        loss = wrapped(draw(2 * step + rank, batch=2 if more else 1))
        if rank == 1 and step == 3:
            loss = loss * float("nan")  # on one rank alone: the other's measurement counts
        loss.backward()
        model.zero_grad()
        controller.step()
    print([layer.negl_prob.tolist() for layer in model.layers])


train()
# Torch aborts at the exit of some processes that still have a DDP wrapper then.
gc.collect()
dist.destroy_process_group()
"""


def test_ranks_agree(tmp_path: Path) -> None:
    first, second = child.run_ranks("-c", RANK, folder=tmp_path)
    assert first == second
    assert "0.0," not in first, "a head was never measured"
