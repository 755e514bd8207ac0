"""One set of parameters under several plans: a call runs the plan of its shapes and its mode, or is refused."""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.functional import cross_entropy

import autoshard
from autoshard.errors import InputError, MeshError, PlanMismatchError
from autoshard.lowering import module
from autoshard.planning import held_pins
from autoshard.plans import ShardingPlan

from ..one_process import one_rank
from .sessions import is_parity, refusal


@pytest.fixture(scope="module")
def mesh() -> Iterator[DeviceMesh]:
    with one_rank() as mesh:
        yield mesh


def numbers(rows: int) -> Tensor:
    return torch.randn(rows, 4, generator=torch.Generator().manual_seed(rows))


class Net(nn.Module):
    """Does something else in evaluation, has a head that only training takes, and a dropout that drops nothing."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.norm = nn.BatchNorm1d(4)
        self.drop = nn.Dropout(0.0)
        self.head = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).relu()
        x = self.drop(self.norm(x))
        return self.head(x).square().mean() if self.training else x


def plan(model: nn.Module, rows: int, mesh: str = "dp=1", **options: Any) -> ShardingPlan:
    return autoshard.plan(model, (numbers(rows),), mesh=mesh, hardware="cpu-gloo", **options)


@pytest.fixture(scope="module")
def plans() -> list[ShardingPlan]:
    """For training, for evaluation, and for a last batch of training."""
    training = plan(Net(), 6)
    with torch.no_grad():
        evaluation = plan(Net().eval(), 6, held_as=training)
    return [training, evaluation, plan(Net(), 3, held_as=training)]


@pytest.fixture
def pair(mesh: DeviceMesh, plans: list[ShardingPlan]) -> tuple[nn.Module, nn.Module]:
    model = Net()
    return autoshard.parallelize(deepcopy(model), plans, mesh), model


def steps(model: nn.Module) -> list[Tensor]:
    """Two batches, an evaluation of each kind, and the last, shorter batch."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = []
    for rows in (6, 3, 6):
        optimizer.zero_grad()
        loss = model(numbers(rows))
        loss.backward()
        optimizer.step()
        model.eval()
        with torch.no_grad() if rows == 3 else torch.inference_mode():
            found += [loss.detach(), model(numbers(6)).clone()]
        model.train()
    return found


def test_one_set_of_parameters_trains_and_evaluates_under_the_plan_of_each_call(
    pair: tuple[nn.Module, nn.Module],
) -> None:
    parallel, reference = pair
    assert parallel.training
    copies = deepcopy(parallel), deepcopy(reference)
    assert is_parity(steps, pair) and is_parity(steps, copies)


def test_a_call_that_no_plan_was_made_for_says_what_each_was_made_for_and_how_to_make_one(
    pair: tuple[nn.Module, nn.Module],
) -> None:
    parallel = pair[0]
    error = refusal(lambda m: m(numbers(5)), parallel)
    assert isinstance(error, InputError) and "none of the 3 plans" in str(error)
    assert "[6, 4] in all" in str(error) and "[3, 4] in all" in str(error) and "the other mode" in str(error)
    assert "autoshard plan FILE.py:FACTORY --mesh dp=1 --hardware cpu-gloo --held-as PLAN.yaml" in str(error)
    parallel.eval()
    assert "captured under torch.no_grad" in str(refusal(lambda m: m(numbers(6)), parallel))


def test_one_call_plans_for_evaluation_and_serves_other_sizes_too(mesh: DeviceMesh) -> None:
    reference = Net()
    pins = ["head.weight=dp:R"]  # evaluation has no head: what is said of the step is not said of it
    options: dict[str, Any] = {"and_evaluation": True, "batches": [3], "pins": pins, "micro_batches": 1}
    parallel = autoshard.auto_parallelize(deepcopy(reference), mesh, (numbers(6),), hardware="cpu-gloo", **options)
    assert is_parity(steps, (parallel, reference))


class Attends(nn.Module):
    """Layers that torch computes by one operator each in evaluation, or that do then what they do in training."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True)
        self.last = nn.MultiheadAttention(4, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x[:, None])
        return self.last(y, y, y, need_weights=False)[0].square().mean()


def test_layers_that_evaluate_as_they_train_are_planned_operator_by_operator_for_both(mesh: DeviceMesh) -> None:
    reference = Attends()
    evaluation = plan(reference, 6, evaluation=True)
    assert any("addmm" in entry.name for entry in evaluation.operators)
    assert not any("_transformer_encoder_layer_fwd" in entry.name for entry in evaluation.operators)
    options: dict[str, Any] = {"and_evaluation": True, "batches": [3]}
    parallel = autoshard.auto_parallelize(deepcopy(reference), mesh, (numbers(6),), hardware="cpu-gloo", **options)
    assert is_parity(steps, (parallel, reference))


class NextWord(nn.Module):
    """Copies targets that do not lie contiguous in memory."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words, self.head = nn.Embedding(9, 4), nn.Linear(4, 9)

    def forward(self, words: Tensor, targets: Tensor) -> Tensor:
        return cross_entropy(self.head(self.words(words)).transpose(1, 2), targets)


@pytest.mark.parametrize("batches", [(), (2,)])
def test_a_plan_does_not_depend_on_how_its_example_lies_in_memory(mesh: DeviceMesh, batches: tuple[int, ...]) -> None:
    words = torch.randint(0, 9, (4, 6))
    shifted = words[:, :-1], words[:, 1:]
    made = [
        autoshard.plan(NextWord(), args, mesh="dp=1", hardware="cpu-gloo", cache=False)
        for args in (shifted, tuple(x.contiguous() for x in shifted))
    ]
    assert autoshard.dump_plan(made[0]) == autoshard.dump_plan(made[1])
    calls = [(words[:rows, :-1], words[:rows, 1:]) for rows in (4, *batches)]
    for args in (None, shifted):
        reference = NextWord()
        parallel = autoshard.parallelize(deepcopy(reference), made[0], mesh, args, batches=batches)
        assert is_parity(lambda m: [m(*call).detach() for call in calls], (parallel, reference))


def test_a_forward_alone_is_not_planned_beside_a_step(mesh: DeviceMesh) -> None:
    with pytest.raises(InputError, match="give one of them"):
        autoshard.auto_parallelize(Net(), mesh, (numbers(6),), evaluation=True, and_evaluation=True)


def test_the_wrong_mode_and_the_wrong_size_say_how_one_call_plans_both(mesh: DeviceMesh) -> None:
    parallel = autoshard.auto_parallelize(Net(), mesh, (numbers(6),), hardware="cpu-gloo")
    with pytest.raises(InputError, match=r"A batch of 3 wants .*batches=\[3\]\).*shard_inputs\(..., batch=3\)"):
        autoshard.shard_inputs(autoshard.plan_of(parallel), mesh, numbers(3))
    assert "and_evaluation=True" in str(refusal(lambda m: m.eval()(numbers(6)), parallel))


MISTAKEN: dict[str, tuple[Any, str]] = {
    "the text of a mesh": (
        lambda plan, mesh: autoshard.auto_parallelize(Net(), "dp=1", (numbers(6),)),
        "the mesh of a job is a DeviceMesh, got 'dp=1'; make one",
    ),
    "a second input": (
        lambda plan, mesh: autoshard.auto_parallelize(Net(), mesh, numbers(6), numbers(6)),
        r"are a Tensor, and no mapping .* give the inputs as a tuple: \(x, t\)",
    ),
    "a second input of a plan": (
        lambda plan, mesh: autoshard.plan(Net(), numbers(6), numbers(6), mesh="dp=1"),
        "a tuple",
    ),
    "a baseline": (
        lambda plan, mesh: autoshard.auto_parallelize(Net(), mesh, (numbers(6),), baseline="fsdp"),
        r'constraints=\["baseline fsdp"\]',
    ),
    "a misspelt option": (
        lambda plan, mesh: autoshard.auto_parallelize(Net(), mesh, (numbers(6),), memroy="1GiB"),
        "no option 'memroy'; did you mean 'memory'",
    ),
    "a size for a mesh": (lambda plan, mesh: autoshard.plan(Net(), (numbers(6),), mesh=2), "the mesh is 2, which does"),
    "a mesh for parallelize": (lambda plan, mesh: autoshard.parallelize(Net(), plan, "dp=1"), "is a DeviceMesh"),
    "plan and mesh exchanged": (lambda plan, mesh: autoshard.shard_inputs(mesh, plan, numbers(6)), "is a DeviceMesh"),
    "a class": (lambda plan, mesh: autoshard.plan(Net, (numbers(6),), mesh="dp=1"), r"class Net; .* Net\(\.\.\.\)"),
    "a plan for the model": (
        lambda plan, mesh: autoshard.parallelize(plan, Net(), mesh),
        "a ShardingPlan, and no nn.M",
    ),
    "one size": (lambda plan, mesh: autoshard.parallelize(Net(), plan, mesh, batches=4), r"a list of sizes, \[4\]"),
    "a path": (
        lambda plan, mesh: autoshard.plan(Net(), (numbers(6),), mesh="dp=1", held_as="p.yaml"),
        r"read_plan\('p.yaml'\)",
    ),
}


@pytest.mark.parametrize("what", MISTAKEN)
def test_an_argument_of_another_kind_is_named_with_what_to_give(
    mesh: DeviceMesh, plans: list[ShardingPlan], what: str
) -> None:
    call, said = MISTAKEN[what]
    with pytest.raises((InputError, MeshError), match=said):
        call(plans[0], mesh)


def test_a_plan_for_evaluation_alone_is_captured_in_that_mode(mesh: DeviceMesh, plans: list[ShardingPlan]) -> None:
    reference = Net()
    parallel = autoshard.parallelize(deepcopy(reference), plans[1], mesh)
    assert parallel.training and "in the other mode" in str(refusal(lambda m: m(numbers(6)), parallel))
    with torch.no_grad():
        assert is_parity(lambda m: m.eval()(numbers(6)), (parallel, reference))


def test_a_model_that_evaluates_as_it_is_parallelized_trains(mesh: DeviceMesh, plans: list[ShardingPlan]) -> None:
    reference = Net().eval()
    pair = autoshard.parallelize(deepcopy(reference), plans[0], mesh).train(), reference.train()
    assert is_parity(lambda m: m(numbers(6)).detach(), pair)


def test_another_plan_holds_parameters_as_the_first_by_few_pins() -> None:
    first = plan(Net(), 6, mesh="dp=2", pins=["layers.1.weight=dp:S(0)", "*.bias=dp:S(0)"])
    shapes = {e.name: e.shape for e in first.parameters if e.name != "head.weight"}
    pins = list(held_pins(first, shapes, first.mesh))
    assert "layers.1.weight=dp:S(0)" in pins and "layers.*.bias=dp:S(0)" in pins and len(set(pins)) == len(pins)
    assert not any(pin.startswith(("head.weight", "layers.0.bias", "layers.*.weight")) for pin in pins)
    with torch.no_grad():
        other = plan(Net().eval(), 4, mesh="dp=2", held_as=first)
    layouts = {e.name: e.layout for e in first.parameters}
    assert all(e.layout == layouts[e.name] for e in other.parameters if "head" not in e.name)
    with pytest.raises(MeshError, match="held as in a plan for dp=2 on a mesh dp=4"):
        plan(Net(), 4, mesh="dp=4", held_as=first)
    wider = Net()
    wider.head = nn.Linear(4, 6)
    with pytest.raises(PlanMismatchError, match=r"another model .*head\.\w+ is \[4.* there and \[6.* here"):
        plan(wider, 4, mesh="dp=2", held_as=first)
    shallow = Net()
    shallow.layers = shallow.layers[:1]
    with pytest.raises(
        PlanMismatchError, match=r"the plan has layers.1.bias, which the model does not have; give a plan"
    ):
        plan(shallow, 4, mesh="dp=2", held_as=first)
    with pytest.raises(
        PlanMismatchError, match=r"the model has layers.1.bias, which the plan does not have; give a plan"
    ):
        plan(Net(), 4, mesh="dp=2", held_as=plan(shallow, 4, mesh="dp=2"))
    with pytest.raises(
        PlanMismatchError, match=r"the plan has head.bias, which the model does not have; did you mean 'bias'"
    ):
        plan(nn.Linear(4, 4), 4, mesh="dp=2", held_as=first)


def test_ranks_that_would_run_different_plans_say_so(pair: tuple[nn.Module, nn.Module], monkeypatch) -> None:
    monkeypatch.setattr(module, "is_same_everywhere", lambda numbers, mesh: False)
    error = refusal(lambda m: m(numbers(3)), pair[0])
    assert "rank 0 is called with what plan 3 of 3 was made for" in str(error)
