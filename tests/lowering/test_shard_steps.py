"""An optimizer that steps shards does what it does on DTensors, and nobody can tell but by the time it takes."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Iterator
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode

import autoshard
from autoshard.lowering.shard_steps import ELEMENTWISE

from ..one_process import one_rank

STEPS = 3
FUSED = {optim.Adam, optim.AdamW}  # the kernels that torch has a rule for
KERNELS = [
    (made, options)
    for made, options in product(ELEMENTWISE, ({"foreach": False}, {"foreach": True}, {"fused": True}))
    if "fused" not in options or made in FUSED
]
OPTIONS: dict[type[optim.Optimizer], dict[str, Any]] = {
    optim.SGD: {"momentum": 0.9, "weight_decay": 0.1},
    optim.RMSprop: {"momentum": 0.5, "centered": True},
    optim.AdamW: {"amsgrad": True},
}


class DTensorOperators(TorchDispatchMode):
    """Counts operators that are given a DTensor."""

    def __init__(self) -> None:
        super().__init__()
        self.found = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.found += any(issubclass(kind, DTensor) for kind in types)
        return func(*args, **kwargs or {})


@pytest.fixture(scope="module")
def mesh() -> Iterator[DeviceMesh]:
    with one_rank() as mesh:
        yield mesh


def example(step: int) -> Tensor:
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(step))


@pytest.fixture
def module(mesh: DeviceMesh) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.GELU(), nn.Linear(5, 3))
    return autoshard.auto_parallelize(model, mesh, (example(0),))


def made_for(module: nn.Module, kind: type[optim.Optimizer] = optim.AdamW, **options: Any) -> optim.Optimizer:
    return kind(module.parameters(), lr=0.1, **OPTIONS.get(kind, {}), **options)  # type: ignore[call-arg]


def train(module: nn.Module, optimizer: optim.Optimizer, *closure: Any) -> None:
    for step in range(STEPS):
        optimizer.zero_grad()
        module(example(step)).square().sum().backward()
        optimizer.step(*closure)


def values(module: nn.Module, optimizer: optim.Optimizer) -> list[Tensor]:
    states = [value for p in module.parameters() for _, value in sorted(optimizer.state[p].items())]
    return [t.full_tensor() if isinstance(t, DTensor) else torch.as_tensor(t) for t in (*module.parameters(), *states)]


def dtensor_operators(optimizer: optim.Optimizer, *closure: Any) -> int:
    with DTensorOperators() as operators:
        optimizer.step(*closure)
    return operators.found


@pytest.mark.parametrize(("kind", "options"), [(optim.SGD, {}), (optim.SGD, {"momentum": 0.9}), (optim.Adagrad, {})])
def test_kernels_that_torch_has_no_rule_for_step_shards_from_the_first_step_on(
    module: nn.Module, kind: type[optim.Optimizer], options: dict[str, Any]
) -> None:
    other = copy.deepcopy(module)
    ours, theirs = (kind(m.parameters(), lr=0.1, **options, fused=m is module) for m in (module, other))  # type: ignore[call-arg]
    train(module, ours)
    train(other, theirs, lambda: None)
    torch.testing.assert_close(values(module, ours), values(other, theirs))
    assert all(isinstance(v, DTensor) or v.dim() == 0 for s in ours.state.values() for v in s.values())
    assert len(ours.state) == len(theirs.state)


@pytest.mark.parametrize(("kind", "options"), KERNELS)
def test_every_optimizer_does_to_shards_what_it_does_to_dtensors(
    module: nn.Module, kind: type[optim.Optimizer], options: dict[str, Any]
) -> None:
    other = copy.deepcopy(module)
    ours, theirs = made_for(module, kind, **options), made_for(other, kind, **options)
    train(module, ours)
    train(other, theirs, lambda: None)  # a closure has torch step the DTensors themselves

    found, expected = values(module, ours), values(other, theirs)
    assert all(isinstance(v, DTensor) or v.dim() == 0 for s in ours.state.values() for v in s.values() if v is not None)
    assert len(found) == len(expected) > len(list(module.parameters()))
    assert all(torch.equal(a, b) for a, b in zip(found, expected))
    assert dtensor_operators(ours) == 0 < dtensor_operators(theirs, lambda: None)


def test_subclasses_and_optimizers_of_others_step_as_they_did(module: nn.Module, mesh: DeviceMesh) -> None:
    class Mine(optim.AdamW):
        pass

    foreign = nn.Linear(6, 5)
    for name, parameter in list(foreign.named_parameters()):
        setattr(foreign, name, nn.Parameter(distribute_tensor(parameter.data, mesh, [Replicate()])))
    foreign_example = distribute_tensor(example(0), mesh, [Replicate()])
    for trained, optimizer, x in (
        (module, Mine(module.parameters()), example(0)),
        (foreign, made_for(foreign), foreign_example),
    ):
        trained(x).sum().backward()
        optimizer.step()  # makes the state
        assert dtensor_operators(optimizer) > 0


def test_gradients_that_are_placed_otherwise_are_left_to_torch(module: nn.Module) -> None:
    optimizer = made_for(module)
    train(module, optimizer)
    weight = next(module.parameters())
    weight.grad = weight.grad.redistribute(placements=[Shard(0)])  # type: ignore[union-attr]
    assert dtensor_operators(optimizer) > 0


def test_parameters_without_a_gradient_and_schedules_keep_their_meaning(module: nn.Module) -> None:
    other = copy.deepcopy(module)
    outcomes = []
    for trained, closure in ((module, ()), (other, (lambda: None,))):
        optimizer = made_for(trained)
        schedule = optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        for step in range(STEPS):
            optimizer.zero_grad()
            trained(example(step)).square().sum().backward()
            if step == 1:
                trained.get_parameter("0.weight").grad = None
            optimizer.step(*closure)
            schedule.step()
        outcomes.append(values(trained, optimizer))
    assert all(torch.equal(a, b) for a, b in zip(*outcomes))


def test_hooks_are_called_with_the_optimizer_itself(module: nn.Module) -> None:
    optimizer = made_for(module)
    seen: list[Any] = []
    optimizer.register_step_pre_hook(lambda o, args, kwargs: seen.append((o, o.param_groups[0]["params"])))
    optimizer.register_step_post_hook(lambda o, args, kwargs: seen.append((o, o.param_groups[0]["params"])))
    train(module, optimizer)
    assert len(seen) == 2 * STEPS
    assert all(o is optimizer and all(isinstance(p, DTensor) for p in params) for o, params in seen)


def test_what_hooks_change_before_a_step_counts(module: nn.Module) -> None:
    """Hooks of the optimizer and of all optimizers; whichever were registered before the first step, or behind it."""

    def change(optimizer: optim.Optimizer, args: Any, kwargs: Any) -> None:
        for group in optimizer.param_groups:
            group["lr"] /= 2
        first, *_, last = (p for group in optimizer.param_groups for p in group["params"])
        first.grad = first.grad * 3
        last.grad = None if args[0].param_groups[0]["lr"] < 0.02 else last.grad

    def outcome(trained: nn.Module, *closure: Any) -> list[Tensor]:
        optimizer = made_for(trained)
        train(trained, optimizer, *closure)
        optimizer.register_step_pre_hook(change)
        with_all = register_optimizer_step_pre_hook(change)
        try:
            train(trained, optimizer, *closure)
        finally:
            with_all.remove()
        added = nn.Parameter(torch.ones(2))
        added.grad = torch.ones(2)
        optimizer.register_step_pre_hook(lambda o, args, kwargs: o.add_param_group({"params": [added]}))
        optimizer.step(*closure)
        assert added.tolist() != [1.0, 1.0]
        return values(trained, optimizer)

    other = copy.deepcopy(module)
    found, expected = outcome(module), outcome(other, lambda: None)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_hooks_after_a_step_are_given_the_optimizers_own(module: nn.Module) -> None:
    optimizer = made_for(module)
    seen: list[Any] = []
    optimizer.register_step_post_hook(lambda o, args, kwargs: seen.append((args[0].param_groups, args[0].state)))
    train(module, optimizer)
    assert len(seen) == STEPS
    assert all(groups is optimizer.param_groups and state is optimizer.state for groups, state in seen)


def test_state_that_is_not_there_yet_is_made(module: nn.Module) -> None:
    """A run without momentum may have written ``None`` down."""

    def outcome(trained: nn.Module, *closure: Any) -> list[Tensor]:
        optimizer = made_for(trained, optim.SGD)
        for parameter in trained.parameters():
            optimizer.state[parameter]["momentum_buffer"] = None
        train(trained, optimizer, *closure)
        return values(trained, optimizer)

    other = copy.deepcopy(module)
    assert all(torch.equal(a, b) for a, b in zip(outcome(module), outcome(other, lambda: None), strict=True))


def test_a_step_that_fails_leaves_the_optimizer_as_it_was(module: nn.Module) -> None:
    optimizer = made_for(module)
    train(module, optimizer)
    optimizer.param_groups[0]["betas"] = None
    before = {p: dict(state) for p, state in optimizer.state.items()}
    with pytest.raises(TypeError):
        optimizer.step()
    assert list(optimizer.param_groups[0]["params"]) == list(module.parameters())
    assert {p: dict(state) for p, state in optimizer.state.items()} == before


def test_a_step_holds_on_to_no_gradient(module: nn.Module) -> None:
    optimizer = made_for(module)
    train(module, optimizer)
    gradients = [weakref.ref(p.grad.to_local()) for p in module.parameters() if isinstance(p.grad, DTensor)]
    storages = [p.grad._local_tensor.untyped_storage() for p in module.parameters() if isinstance(p.grad, DTensor)]
    watched = [weakref.ref(storage) for storage in storages]
    del storages
    optimizer.zero_grad()
    assert gradients
    assert all(ref() is None for ref in (*gradients, *watched))


def test_a_backward_after_a_step_is_refused_as_ever(module: nn.Module) -> None:
    optimizer = made_for(module)
    train(module, optimizer)
    late = module(example(0)).sum()
    optimizer.step()
    with pytest.raises(autoshard.AutoshardError, match="in place after the forward"):
        late.backward()
