"""Tensors in containers of modules, in a parallel module and against one process on simulated ranks."""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import autoshard
from autoshard.capture import capture
from autoshard.errors import PlanMismatchError
from autoshard.mesh import Mesh

from ..fuzz.random_plans import random_plan
from ..one_process import one_rank
from .as_before import check_as_before
from .sessions import is_parity, refusal


class Tables(nn.Module):
    """Rows of tables by name, masks in a list that change, and weights in a tuple."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.linear = nn.Embedding(16, 8), nn.Linear(8, 8)
        self.tables = {"a": torch.arange(8), "b": torch.arange(8, 16)}
        self.masks = [torch.rand(8) for _ in range(2)]
        self.weights = (torch.rand(8), (torch.rand(4, 8),))

    def forward(self, x: Tensor) -> Tensor:
        """(B, 8, 8) to ()."""
        x = x + self.embedding(self.tables["a"]) + self.embedding(self.tables["b"])
        for mask in self.masks:
            x = self.linear(x * mask.mul_(0.9)).relu()
        return (x * self.weights[0] @ self.weights[1][0].t()).square().mean()


def example() -> Tensor:
    return torch.randn(4, 8, 8, generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def mesh() -> Iterator[DeviceMesh]:
    with one_rank() as mesh:
        yield mesh


def test_they_are_what_they_are_in_one_process() -> None:
    model, args = Tables(), (example(),)
    plan = autoshard.plan(model, args, mesh="a=2", hardware="cpu-gloo", constraints=["baseline ddp"])
    drawn = random_plan(capture(model, args), Mesh.parse("a=2,b=2"), 0, model, args, {})
    for each in (plan, drawn):
        check_as_before(model, args, each, rtol=1e-4, atol=1e-6)


@pytest.fixture
def parallel(mesh: DeviceMesh) -> Any:
    return autoshard.auto_parallelize(Tables(), mesh, (example(),))


def test_the_containers_of_a_parallel_module_have_what_the_step_takes(mesh: DeviceMesh, parallel: Any) -> None:
    def session(module: Any) -> list[Any]:
        module(example()).backward()
        module.masks[0].mul_(2.0)
        module(example()).backward()
        seen = [*module.masks, *module.weights, *module.tables.values(), list(module.tables), list(module.state_dict())]
        return [value.clone() if isinstance(value, Tensor) else value for value in seen]

    reference = Tables()
    capture(reference, (example(),))  # has the buffers, too
    assert is_parity(session, (parallel, reference))
    assert type(parallel.weights) is tuple and parallel.weights[1][0] is parallel.get_buffer("weights-1-0")


def test_a_copy_has_tensors_of_its_own(parallel: Any) -> None:
    copy = deepcopy(parallel)
    copy.masks[0].zero_()
    assert copy(example()) != parallel(example())
    assert copy.masks[0] is copy.get_buffer("masks-0") is not parallel.masks[0]


def other_entry(m: Any) -> None:
    m.tables["a"] = torch.arange(8)


def other_dict(m: Any) -> None:
    m.tables = {"a": torch.arange(8), "b": m.tables["b"]}


def other_buffer(m: Any) -> None:
    m.register_buffer("tables-a", torch.arange(8), persistent=False)


def no_entry(m: Any) -> None:
    del m.tables["a"]


@pytest.mark.parametrize("change", [other_entry, other_dict, other_buffer, no_entry])
def test_another_tensor_is_refused(change: Any, parallel: Any) -> None:
    def session(module: Any) -> Any:
        change(module)
        return module(example())

    error = refusal(session, parallel)
    assert isinstance(error, PlanMismatchError) and "model.tables" in str(error)


def test_on_the_meta_device_they_are_filled_where_they_are(mesh: DeviceMesh) -> None:
    with torch.device("meta"):
        model: Any = Tables()
    parallel: Any = autoshard.auto_parallelize(model, mesh, (example(),))
    parallel.to_empty(device="cpu")
    filled = Tables()
    parallel.load_state_dict(filled.state_dict())
    for module in (parallel, filled):
        module.tables["a"].copy_(torch.arange(8))
        module.tables["b"].copy_(torch.arange(8))
        for tensor in (*module.masks, module.weights[0], module.weights[1][0]):
            tensor.fill_(0.5)
    torch.testing.assert_close(parallel(example()), filled(example()))
