"""Parameters that change between two calls are found, whatever was checked before."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

import autoshard
from autoshard.errors import PlanMismatchError

from ..one_process import one_rank

X = torch.arange(12.0).reshape(4, 3)


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 5)
        self.register_buffer("scale", torch.tensor([2.0]))
        self.linear.bias.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.linear(x) * self.scale).square().sum()


@pytest.fixture(scope="module")
def mesh() -> Iterator[DeviceMesh]:
    with one_rank() as mesh:
        yield mesh


def parameter(module: nn.Module, name: str) -> nn.Parameter:
    return module.linear._parameters[name]  # type: ignore[operator, union-attr, index, return-value]


def data(name: str, made: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[nn.Module], None]:
    def change(module: nn.Module) -> None:
        held = parameter(module, name)
        held.data = made(held.data)

    return change


def as_plain(module: nn.Module) -> None:
    module.linear.weight = nn.Parameter(parameter(module, "weight").full_tensor())  # type: ignore[union-attr, operator]


def as_other_placement(module: nn.Module) -> None:
    held = parameter(module, "weight")
    assert isinstance(held, DTensor)
    other = DTensor.from_local(held.to_local(), held.device_mesh, [Shard(1)])
    module.linear.weight = nn.Parameter(other)  # type: ignore[union-attr]


CHANGES: dict[str, tuple[Callable[[nn.Module], object], str]] = {
    "converted": (lambda module: module.to(torch.float64), "is float64 now"),
    "one converted": (lambda module: module.linear.to(torch.bfloat16), "is bfloat16 now"),  # type: ignore[union-attr, operator]
    "dtype of data": (data("weight", lambda held: held.double()), "is float64 now"),
    "shape of data": (data("weight", lambda held: torch.cat([held, held])), "has shape"),
    "on meta": (lambda module: module.to("meta"), "is on the meta device now"),
    "trained": (lambda module: parameter(module, "bias").requires_grad_(), "requires a gradient now"),
    "plain": (as_plain, "is a plain tensor now"),
    "placed otherwise": (as_other_placement, "is placed"),
    "gone": (lambda module: module.linear.register_parameter("bias", None), "is gone now"),  # type: ignore[union-attr, operator]
    "another buffer": (lambda module: module.register_buffer("scale", torch.ones(1).double()), "is float64 now"),
}


@pytest.mark.parametrize("calls", [0, 2])
@pytest.mark.parametrize("what", CHANGES)
def test_a_tensor_that_is_not_what_the_plan_was_made_for_is_refused(what: str, calls: int, mesh: DeviceMesh) -> None:
    change, text = CHANGES[what]
    module = autoshard.auto_parallelize(Scaled(), mesh, (X,))
    for _ in range(calls):
        module(X).backward()
    change(module)
    with pytest.raises(PlanMismatchError, match=text):
        module(X)


def test_a_parameter_of_the_same_kind_may_take_the_place_of_another(mesh: DeviceMesh) -> None:
    module = autoshard.auto_parallelize(Scaled(), mesh, (X,))
    before = module(X).item()
    module.linear.weight = nn.Parameter(parameter(module, "weight").detach() * 0)
    changed = module(X).item()
    assert changed != before
    assert changed == pytest.approx((parameter(module, "bias").to_local() * 2).square().sum().item() * 4)  # type: ignore[operator]
