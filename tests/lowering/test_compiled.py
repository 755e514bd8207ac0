"""A parallel module in a graph that ``torch.compile`` makes: what it gives is what it gives outside of one."""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.utils._pytree import tree_leaves, tree_map

import autoshard
from autoshard.lowering import compiled
from autoshard.plans import ShardingPlan

from ..one_process import one_rank
from .sessions import differences, full, state_of

TOKENS, FEW = (torch.arange(rows * 4).reshape(rows, 4) % 10 for rows in (8, 4))


class Tied(nn.Module):
    """A tied matrix, dropout, a buffer that counts, and results of every kind."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.middle, self.drop = nn.Embedding(10, 8), nn.Linear(8, 8), nn.Dropout(0.3)
        self.head = nn.Linear(8, 10, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("count", torch.zeros(3))

    def forward(self, tokens: Tensor, *, targets: Tensor, scale: int = 2) -> dict[str, Any]:
        self.count.add_(1)
        x = self.embedding(tokens)
        logits = self.head((x + self.drop(self.middle(x).relu())).exp())
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten()) * scale
        rest = {"again": logits, "view": logits[0], "weight": self.middle.weight, "tokens": tokens, "n": 3}
        return {"loss": loss, "logits": logits, "count": self.count, **rest}


@pytest.fixture(scope="module")
def mesh() -> Iterator[DeviceMesh]:
    with one_rank() as mesh:
        yield mesh


def _plans(model: nn.Module) -> list[ShardingPlan]:
    """Of two shapes, and one of evaluation."""
    options: dict[str, Any] = {"hardware": "cpu-gloo", "mesh": "dp=1"}
    first = autoshard.plan(model, (TOKENS,), {"targets": TOKENS}, **options)
    options["held_as"] = first
    evaluation = autoshard.plan(model, (TOKENS,), {"targets": TOKENS}, **options, evaluation=True)
    return [first, autoshard.plan(model, (FEW,), {"targets": FEW}, **options), evaluation]


def _loss(found: dict[str, Any]) -> Tensor:
    return found["loss"] + full(found["logits"].square().mean()) + full(found["view"]).sum()  # type: ignore[no-any-return]


def test_shapes_modes_dropout_and_results_of_every_kind_are_those_without_a_compiler(mesh: DeviceMesh) -> None:
    torch.manual_seed(0)
    model = Tied()
    ours = autoshard.parallelize(model, _plans(model), mesh)
    theirs = deepcopy(ours)
    calls = [torch.compile(ours, backend="aot_eager", fullgraph=True), theirs]
    placed = DTensor.from_local(TOKENS, mesh, (Replicate(),))
    for step, tokens in enumerate((TOKENS, TOKENS, FEW, placed)):
        for module in (ours, theirs):
            autoshard.manual_seed(module, 5, step)
        results = [call(tokens, targets=tokens) for call in calls]
        assert not list(differences(results[0], tree_map(full, results[1])))
        assert results[0]["again"] is results[0]["logits"] and results[0]["weight"] is model.middle.weight
        for result in results:
            _loss(result).backward()
        assert not list(differences(state_of(ours), state_of(theirs)))
    for module in (ours, theirs):
        module.eval()
    with torch.no_grad():
        mine, other = (call(TOKENS, targets=TOKENS)["logits"] for call in calls)
        assert not list(differences(mine, full(other)))
    with pytest.raises(
        torch._dynamo.exc.Unsupported, match=r"tokens has shape \[7, 4\]; the plan was made for \[8, 4\]"
    ):
        calls[0](TOKENS[:7], targets=TOKENS[:7])


class Chain(nn.Module):
    """A model whose backward reads its argument and its result."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.eye(4) / 2)

    def forward(self, x: Tensor) -> Tensor:
        return (x @ self.w).exp()


class Overwriting(fx.Interpreter):
    """Runs a graph, and then writes over all memory that is neither an input nor a result of it: a compiler may put
    other values there.
    """

    def run(self, *args: Any, **options: Any) -> Any:
        self.made: list[Tensor] = []
        results = super().run(*args, **options)
        outside = {x.untyped_storage().data_ptr() for x in tree_leaves((args, results)) if isinstance(x, Tensor)}
        for value in self.made:
            if value.is_floating_point() and value.untyped_storage().data_ptr() not in outside:
                value.fill_(torch.nan)
        self.made, self.env, self.args_iter = [], {}, iter(())  # holds nothing until it runs again
        return results

    def run_node(self, n: fx.Node) -> Any:
        result = super().run_node(n)
        self.made += [x for x in tree_leaves(result) if isinstance(x, Tensor)]
        return result


def _overwriting(graph: fx.GraphModule, example: list[Tensor]) -> Any:
    return make_boxed_func(Overwriting(graph, garbage_collect_values=False).run)


def test_what_a_step_keeps_is_its_own_and_goes_with_the_step(mesh: DeviceMesh) -> None:
    model, x = Chain(), torch.rand(4, 4)
    reference = deepcopy(model)
    parallel = autoshard.auto_parallelize(model, mesh, (x,))

    @torch.compile(backend=aot_autograd(fw_compiler=_overwriting), fullgraph=True)
    def loss(x: Tensor) -> Tensor:
        return full(parallel(3 * x)).mul(2).sum()

    loss(x)
    loss(x).backward()
    reference(3 * x).mul(2).sum().backward()
    assert not list(differences(state_of(parallel), state_of(reference)))
    assert not compiled._KEPT


class Loss(Chain):
    """A model whose result is a number."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).sum()


def test_what_is_added_to_a_loss_may_be_made_of_parameters(mesh: DeviceMesh) -> None:
    model, x = Loss(), torch.rand(4, 4)
    reference = deepcopy(model)
    parallel = autoshard.auto_parallelize(model, mesh, (x,))

    @torch.compile(backend="aot_eager", fullgraph=True)
    def loss(x: Tensor) -> Tensor:
        return parallel(x) + 0.1 * parallel.w.square().sum()

    full(loss(x)).backward()
    (reference(x) + 0.1 * reference.w.square().sum()).backward()
    assert not list(differences(state_of(parallel), state_of(reference)))


class Clamped(Chain):
    """A model that writes into its parameter."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.w.clamp_(-0.3, 0.3)
        return (x @ self.w).exp()


def test_parameters_are_written_into(mesh: DeviceMesh) -> None:
    model, x = Clamped(), torch.rand(4, 4)
    reference = deepcopy(model)
    parallel = autoshard.auto_parallelize(model, mesh, (x,))
    calls = [torch.compile(parallel, backend="aot_eager", fullgraph=True), reference]
    steps = [torch.optim.SGD(module.parameters(), lr=0.1) for module in (parallel, reference)]
    for _ in range(3):
        for call, step in zip(calls, steps):
            full(call(x)).sum().backward()
            step.step()
        assert not list(differences(state_of(parallel), state_of(reference)))
