"""Settings of torch, and tensors of a module that were converted or replaced after it was made."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor

import autoshard
from autoshard.capture import capture
from autoshard.errors import CaptureError, InputError, PlanMismatchError
from autoshard.lowering.settings import Settings

from ..one_process import one_rank
from .sessions import Model, both, example, full, is_parity, loss_of, refusal


@pytest.fixture(scope="module")
def mesh() -> Iterator[DeviceMesh]:
    with one_rank() as mesh:
        yield mesh


@pytest.fixture(scope="module")
def made(mesh: DeviceMesh) -> tuple[nn.Module, Model]:
    return both(lambda m, x: ((x @ m.v + m.frozen) @ m.w * m.scale).sum(), mesh)


@pytest.fixture
def pair(made: tuple[nn.Module, nn.Module]) -> tuple[nn.Module, nn.Module]:
    return deepcopy(made[0]), deepcopy(made[1])


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextmanager
def _deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def _autocast(dtype: torch.dtype = torch.bfloat16) -> AbstractContextManager[Any]:
    return torch.autocast("cpu", dtype)


AROUND: dict[str, tuple[AbstractContextManager[Any], AbstractContextManager[Any], str]] = {
    "into autocast": (nullcontext(), _autocast(), "captured outside of torch.autocast and is called under torch.auto"),
    "out of autocast": (_autocast(), nullcontext(), "under torch.autocast to torch.bfloat16 and is called outside"),
    "another autocast": (_autocast(), _autocast(torch.float16), "is called under torch.autocast to torch.float16"),
    "another default dtype": (nullcontext(), _default_dtype(torch.float64), "with torch.float64"),
    "a plan without backward": (torch.no_grad(), nullcontext(), "captured under torch.no_grad"),
}


@pytest.mark.parametrize("what", AROUND)
def test_a_module_is_called_under_the_settings_it_was_captured_under(mesh: DeviceMesh, what: str) -> None:
    captured, called, text = AROUND[what]
    with captured:
        parallel, _ = both(lambda m, x: (x @ m.w).sum(), mesh)
    with called:
        error = refusal(lambda m: m(example()), parallel)
    assert isinstance(error, InputError) and text in str(error)


@pytest.mark.parametrize("around", [_autocast, torch.no_grad, _deterministic])
def test_under_the_same_settings_it_gives_what_the_model_gives(mesh: DeviceMesh, around: Any) -> None:
    """Under autocast, a region without it is left in float32, in the backward too, which runs outside."""

    def body(m: Any, x: Tensor) -> Tensor:
        y = x @ m.w
        with torch.autocast("cpu", enabled=False):
            return (y.float() @ m.v).square().mean()

    def session(m: nn.Module) -> Any:
        with around():
            loss = m(example())
        if loss.requires_grad:
            loss.backward()
        return loss

    with around():
        pair = both(body, mesh)
    assert is_parity(session, pair)


@pytest.mark.filterwarnings("ignore:.*CUDA is not available")
def test_autocast_of_another_device_is_refused_where_nothing_would_see_it() -> None:
    def inside(m: Any, x: Tensor) -> Tensor:
        with torch.autocast("cuda", torch.bfloat16):
            return x @ m.w

    def off(m: Any, x: Tensor) -> Tensor:
        with torch.autocast("cuda", enabled=False):
            return x @ m.w

    with pytest.raises(CaptureError, match=r"torch\.autocast for cuda at .*test_surroundings.py:\d+"):
        capture(Model(inside), (example(),))
    capture(Model(off), (example(),))
    torch.set_autocast_enabled("xpu", True)
    try:
        with pytest.raises(CaptureError, match=r"torch\.autocast for xpu around"):
            capture(Model(off), (example(),))
    finally:
        torch.set_autocast_enabled("xpu", False)
    with _autocast(), pytest.raises(InputError, match="not those of cuda"):
        Settings.of_capture("cuda")


def _assigned(m: nn.Module) -> Any:
    return m._parameters.__setitem__("w", nn.Parameter(full(m.w).detach().clone()))


def _placed_otherwise(m: Any) -> None:
    there = m.w.device_mesh
    m.w = nn.Parameter(distribute_tensor(full(m.w).detach(), there, [Shard(0)]))


CHANGES: dict[str, tuple[Callable[[Any], Any], str]] = {
    "bfloat16": (lambda m: m.to(torch.bfloat16), "the parameter v is bfloat16 now"),
    "half": (lambda m: m.half(), "is float16 now"),
    "double": (lambda m: m.double(), "convert the model before it is planned"),
    "one": (lambda m: m._parameters.__setitem__("w", nn.Parameter(m.w.detach().half())), "parameter w is float16 now"),
    "meta": (lambda m: m.to("meta"), "is on the meta device now"),
    "plain tensors": (_assigned, "is a plain tensor now"),
    "placements": (_placed_otherwise, "redistribute it"),
    "shape": (lambda m: setattr(m, "scale", torch.ones(1)), "the buffer scale has shape [1] now"),
    "none": (lambda m: setattr(m, "w", None), "the parameter w is gone now"),
    "deleted": (lambda m: delattr(m, "w"), "the parameter w is gone now"),
    "frozen parameter trained": (lambda m: m.frozen.requires_grad_(), "and may be frozen for a while after it"),
    "trained buffer": (lambda m: m.scale.requires_grad_(), "the buffer scale requires a gradient now"),
}


@pytest.mark.parametrize("what", CHANGES)
def test_tensors_that_no_longer_fit_the_plan_are_named(what: str, pair: tuple[nn.Module, nn.Module]) -> None:
    change, text = CHANGES[what]
    change(pair[0])
    error = refusal(lambda m: m(example()), pair[0])
    assert isinstance(error, PlanMismatchError) and text in str(error), error


def _loaded(m: nn.Module) -> None:
    m.load_state_dict({name: value * 2 for name, value in m.state_dict().items()})


HARMLESS: dict[str, Callable[[Any], Any]] = {
    "to the dtype it has": lambda m: m.float(),
    "loaded": _loaded,
    "another buffer": lambda m: setattr(m, "scale", torch.full((4,), 3.0)),
    "frozen": lambda m: m.v.requires_grad_(False),
    "all frozen": lambda m: m.requires_grad_(False),
}


@pytest.mark.parametrize("what", HARMLESS)
def test_changes_that_fit_the_plan_count(what: str, pair: tuple[nn.Module, nn.Module]) -> None:
    def session(m: nn.Module) -> Any:
        HARMLESS[what](m)
        loss = m(example())
        if any(p.requires_grad for p in m.parameters()):
            loss.backward()
        return loss.detach()

    assert is_parity(session, pair)


def test_a_model_on_the_meta_device_has_to_be_filled(mesh: DeviceMesh) -> None:
    with torch.device("meta"):
        model, x = nn.Linear(4, 4), torch.empty(4, 4)
    parallel = autoshard.auto_parallelize(model, mesh, (x,))
    error = refusal(lambda m: m(example()), parallel)
    assert "on the meta device now" in str(error) and "to_empty" in str(error)
    parallel.to_empty(device="cpu")
    with torch.no_grad():
        for parameter in parallel.parameters():
            parameter.fill_(1.0)
    assert torch.allclose(full(parallel(example())), example().sum(1, keepdim=True) + 1.0)


def test_parameters_of_another_call_are_used(pair: tuple[nn.Module, nn.Module]) -> None:
    """``torch.func.functional_call`` puts other tensors in the place of parameters, for one call."""

    def session(m: nn.Module) -> Any:
        others = {name: (2 * p.detach()).requires_grad_(p.requires_grad) for name, p in m.named_parameters()}
        loss_of(torch.func.functional_call(m, others, (example(),))).backward()
        return [None if other.grad is None else full(other.grad) for other in others.values()]

    assert is_parity(session, pair)
