"""Forwards that write into parameters where no gradient flows, against one process, on simulated ranks."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import autoshard
from autoshard.capture import capture
from autoshard.errors import CaptureError, InputError
from autoshard.mesh import Mesh

from ..fuzz.random_plans import random_plan
from ..thorough import some_thorough
from .as_before import check_as_before


class Around(nn.Module):
    """A scale, two layers of which the second is the first one transposed, and one that nothing reads."""

    def __init__(self, body: Callable[[Around, Tensor], Tensor]) -> None:
        super().__init__()
        self.scale, self.body = nn.Parameter(torch.tensor(3.0)), body
        self.enter, self.leave = nn.Linear(8, 16), nn.Linear(16, 8, bias=False)
        self.alone = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        return self.body(self, x).square().mean()


def clamped(s: Around, x: Tensor) -> Tensor:
    with torch.no_grad():
        s.scale.clamp_(0.01, 0.5)
    return s.leave(s.enter(x)) / s.scale


def clipped_data(s: Around, x: Tensor) -> Tensor:
    """As Gemma 3n does while it trains."""
    s.enter.weight.data.clamp_(-0.1, 0.1)
    return s.leave(s.enter(x).tanh())


def of_norm_one(s: Around, x: Tensor) -> Tensor:
    with torch.no_grad():
        s.leave.weight.div_(s.leave.weight.norm(dim=1, keepdim=True))
    return s.leave(s.enter(x).relu())


def read_before(s: Around, x: Tensor) -> Tensor:
    hidden = s.enter(x)
    with torch.no_grad():
        s.enter.bias.add_(hidden.mean((0, 1)))
        s.alone.mul_(0.5)
    return s.leave(hidden + s.enter.bias)


def moved(s: Around, x: Tensor) -> Tensor:
    """As MoCo's second encoder follows the first one."""
    with torch.no_grad():
        s.leave.weight.data = s.leave.weight.data * 0.9 + s.enter.weight.mT * 0.1
        s.alone.data = 0.5 * s.alone
    return s.leave(s.enter(x)) * s.alone.sum()


BODIES = {"clamped": clamped, "data": clipped_data, "norm": of_norm_one, "before": read_before, "moved": moved}


def example(name: str) -> tuple[nn.Module, tuple[Tensor]]:
    torch.manual_seed(0)
    return Around(BODIES[name]).double(), (torch.randn(8, 2, 8, dtype=torch.float64),)


@pytest.mark.parametrize("name", BODIES)
@pytest.mark.parametrize("scheme", ["ddp", "fsdp"])
def test_parameters_are_what_one_process_writes(name: str, scheme: str) -> None:
    model, args = example(name)
    plan = autoshard.plan(model, args, mesh="a=2", hardware="cpu-gloo", constraints=[f"baseline {scheme}"])
    check_as_before(model, args, plan, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("name", some_thorough(BODIES, thorough=["clamped"]))
def test_whatever_is_cut(name: str) -> None:
    model, args = example(name)
    for seed in range(3):
        plan = random_plan(capture(model, args), Mesh.parse("a=2,b=2"), seed, model, args, {})
        check_as_before(model, args, plan, rtol=1e-9, atol=1e-11)


def test_of_several_micro_batches_it_is_refused() -> None:
    model, args = example("clamped")
    with pytest.raises(InputError, match="writes into the parameter scale, and a step of 2 micro-batches"):
        autoshard.plan(model, args, mesh="a=2", hardware="cpu-gloo", micro_batches=2)


def used_elsewhere(s: Around, x: Tensor) -> Tensor:
    moved = s.alone.detach() * 0.5
    s.alone.data = moved
    return s.leave(s.enter(x)) * moved.sum()


def read_afterwards(s: Around, x: Tensor) -> Tensor:
    before = s.alone.data
    s.alone.data = s.alone.data * 0.5
    return s.leave(s.enter(x)) * before.sum()


def of_another(s: Around, x: Tensor) -> Tensor:
    s.leave.weight.data = s.enter.weight.data.t()
    return s.leave(s.enter(x))


def read_with_a_gradient(s: Around, x: Tensor) -> Tensor:
    hidden = s.enter(x)
    s.enter.weight.data = s.enter.weight.data * 0.5
    return s.leave(hidden)


@pytest.mark.parametrize("body", [used_elsewhere, read_afterwards, of_another, read_with_a_gradient])
def test_other_memory_is_refused_where_it_is_not_as_a_write(body: Callable[[Around, Tensor], Tensor]) -> None:
    model, args = Around(body).double(), (torch.randn(8, 2, 8, dtype=torch.float64),)
    with pytest.raises(CaptureError, match=r"gives a tensor other memory at .*\.data = .*copy_\(value\)"):
        capture(model, args)


def test_a_move_of_modules_to_where_they_are_is_nothing() -> None:
    """As mixtures of experts move those that a rank may lack."""

    def moved_to_where_it_is(s: Around, x: Tensor) -> Tensor:
        s.enter.to(x.device).to(x)
        return s.leave.to(x.dtype)(s.enter(x))

    args = (torch.randn(8, 2, 8),)
    as_it_is = capture(Around(lambda s, x: s.leave(s.enter(x))), args)
    assert capture(Around(moved_to_where_it_is), args).fingerprint == as_it_is.fingerprint
