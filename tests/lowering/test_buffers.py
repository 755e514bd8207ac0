"""Buffers that a forward changes have the values, and the identity, that they have in one process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import autoshard

from ..one_process import one_rank
from .sessions import SIZE, both, example, is_parity, loss_of


@pytest.fixture(scope="module")
def mesh() -> Iterator[DeviceMesh]:
    with one_rank() as mesh:
        yield mesh


def replaced(m: Any, x: Tensor) -> Tensor:
    m.scale = 0.9 * m.scale + 0.1 * x.mean(0)
    return (x @ m.w * m.scale).sum()


def old_and_new(m: Any, x: Tensor) -> Tensor:
    old, m.count = m.count, m.count + x.amax(0)
    return (x @ m.w * old + x @ m.v * m.count).sum()


def unread(m: Any, x: Tensor) -> Tensor:
    m.count = (x @ m.w).detach().mean(0)
    return (x @ m.w).sum()


def both_of_two(m: Any, x: Tensor) -> Tensor:
    m.scale, m.count = m.count + x.mean(0), m.scale * 2
    return (x @ m.w * m.scale * m.count).sum()


def in_place(m: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        m.scale.mul_(0.9).add_(x.mean(0))
        m.count[1:] += 1
    return (x @ m.w * m.count.clone()).sum()


def one_of_each(m: Any, x: Tensor) -> Tensor:
    m.count += 1
    m.scale = m.scale * 2
    return (x @ m.w).sum()


def given_back(m: Any, x: Tensor) -> Any:
    old, m.scale = m.scale, m.scale * 2
    return (x @ m.w).sum(), old, m.count


BODIES = [replaced, old_and_new, unread, both_of_two, in_place, one_of_each, given_back]


def one_step(module: nn.Module) -> Any:
    loss_of(module(example())).backward()


def several_forwards(module: nn.Module) -> Any:
    losses = [loss_of(module(k * example())) for k in (1, 2, 3)]
    sum(losses).backward()
    return losses


def without_gradients(module: nn.Module) -> Any:
    with torch.no_grad():
        return [module(example()), module(2 * example())]


def in_evaluation(module: nn.Module) -> Any:
    module.eval()
    return [one_step(module), module.train(), one_step(module)][0]


def kept_and_loaded(module: nn.Module) -> Any:
    state = deepcopy(module.state_dict())
    one_step(module)
    module.zero_grad()
    module.load_state_dict(state)
    return [module(example()), module(example())]


def held_by_the_caller(module: Any) -> Any:
    """A tensor that was the buffer before stays what it was if the buffer was replaced, and not if it was written."""
    held = dict(module.named_buffers())
    one_step(module)
    now = dict(module.named_buffers())
    return [[held[name].clone(), held[name] is now[name]] for name in held]


SESSIONS = [one_step, several_forwards, without_gradients, in_evaluation, kept_and_loaded, held_by_the_caller]


@pytest.fixture(scope="module", params=BODIES, ids=lambda body: body.__name__)
def made(request: pytest.FixtureRequest, mesh: DeviceMesh) -> tuple[nn.Module, nn.Module]:
    return both(request.param, mesh)


@pytest.mark.parametrize("session", SESSIONS, ids=lambda session: session.__name__)
def test_buffers_are_what_they_are_in_one_process(made: Any, session: Callable[[nn.Module], Any]) -> None:
    assert is_parity(session, (deepcopy(made[0]), deepcopy(made[1])))


class Normed(nn.Module):
    """A norm over the batch, whose statistics move with every forward."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.norm, self.head = nn.Linear(SIZE, SIZE), nn.BatchNorm1d(SIZE), nn.Linear(SIZE, 1)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.head(torch.tanh(self.norm(self.linear(x))))
        return result


def test_what_is_computed_again_reads_the_buffers_as_they_were(mesh: DeviceMesh) -> None:
    reference = Normed()
    parallel = autoshard.auto_parallelize(deepcopy(reference), mesh, (example(),), constraints=["recompute norm/*"])
    assert {name.rpartition("/")[0] for name in parallel.plan.recomputed} == {"norm"}
    for session in (one_step, several_forwards):
        assert is_parity(session, (parallel, reference))
