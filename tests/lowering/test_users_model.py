"""A parallel module is the user's model: its class, attributes, methods, names and hooks are those that it had."""

from __future__ import annotations

import inspect
from abc import ABCMeta
from collections.abc import Callable, Iterator
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import autoshard
from autoshard.errors import CaptureError, InputError, PlanMismatchError

from ..one_process import one_rank
from .sessions import full, is_parity, refusal

X = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def mesh() -> Iterator[DeviceMesh]:
    with one_rank() as mesh:
        yield mesh


class Base(nn.Module):
    """What models have beside a forward."""

    kind = "classifier"

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.config = {"width": 4}
        self.layers = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
        self.register_buffer("table", torch.ones(4), persistent=False)
        self.register_buffer("count", torch.zeros(4))

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x * self.table * scale

    @property
    def width(self) -> int:
        return int(self.config["width"])

    @torch.no_grad()
    def init_weights(self) -> None:
        for layer in self.layers:
            layer.weight.fill_(0.5)
            layer.bias.zero_()

    @torch.no_grad()
    def generate(self, x: Tensor, steps: int) -> Tensor:
        for _ in range(steps):
            x = full(self(x)) + full(self.forward(x))
        return x


class Named(Base):
    """Has attributes of names that autoshard could want for itself."""

    plan = "monthly"

    def __init__(self) -> None:
        super().__init__()
        self._step, self._graph, self._model, self._held, self.mesh = 1, "g", [2], {}, None
        self._program = nn.Linear(4, 4)

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        return self._program(super().forward(x, scale)) * self._step


class Delegating(Base):
    """Looks for attributes elsewhere."""

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("layers")[0], name)


class Called(Base):
    """Does more in a call than its forward."""

    def __call__(self, x: Tensor, scale: float = 1.0) -> Tensor:
        return super().__call__(x, scale) * 3


MADE: list[str] = []


class Registered(Base, metaclass=ABCMeta):
    """Knows of its subclasses, and wants them to have a tag."""

    def __init_subclass__(cls, *, tag: str, **options: Any) -> None:
        super().__init_subclass__(**options)
        MADE.append(tag)


class Slotted(Base):
    __slots__ = ("gain",)

    def __init__(self) -> None:
        super().__init__()
        self.gain = 2.0


def patched() -> nn.Module:
    """Has a forward of its own, set on the object, and hooks on the model itself."""
    model = Base()
    plain = model.forward
    model.forward = lambda x, scale=1.0: plain(x, scale) + 1  # type: ignore[method-assign]
    model.register_forward_hook(lambda module, inputs, output: output * 3)
    return model


def sequential() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "plain": Base,
    "names of autoshard": Named,
    "getattr": Delegating,
    "call": Called,
    "metaclass and registry": Registered,
    "slots": Slotted,
    "patched": patched,
    "sequential": sequential,
}


def trained(module: nn.Module) -> Tensor:
    loss: Tensor = module(X).square().mean()
    loss.backward()
    return loss.detach()


@pytest.mark.parametrize("what", MODELS)
def test_a_parallel_module_is_the_model_it_was_made_from(mesh: DeviceMesh, what: str) -> None:
    model: Any = MODELS[what]()
    reference: Any = MODELS[what]()
    parallel: Any = autoshard.auto_parallelize(model, mesh, (X,))
    assert parallel is model and isinstance(parallel, type(reference)) and repr(parallel) == repr(reference)
    assert type(parallel).__name__ == type(reference).__name__ and type(parallel).__doc__ == type(reference).__doc__
    for names in ("named_modules", "named_parameters", "named_buffers", "state_dict"):
        assert list(dict(getattr(parallel, names)())) == list(dict(getattr(reference, names)()))
    if "forward" not in reference.__dict__:
        assert inspect.signature(parallel.forward) == inspect.signature(reference.forward)
        assert parallel.forward.__wrapped__ is type(reference).forward
    assert set(parallel.__dict__) - set(reference.__dict__) == {"_autoshard"}
    assert autoshard.plan_of(parallel).mesh.axes == ("dp",)
    assert is_parity(lambda module: [trained(module), trained(module)], (parallel, reference))
    if "forward" not in reference.__dict__:  # a function stays that of the first model, in a copy of any module
        assert is_parity(trained, (deepcopy(parallel), deepcopy(reference)))
    assert not MADE


def test_methods_properties_and_attributes_are_the_users(mesh: DeviceMesh) -> None:
    reference = Base()
    parallel: Any = autoshard.auto_parallelize(deepcopy(reference), mesh, (X,))
    assert (parallel.config, parallel.width, parallel.kind) == ({"width": 4}, 4, "classifier")
    assert parallel.plan is autoshard.plan_of(parallel)
    torch.testing.assert_close(parallel.generate(X, 3), reference.generate(X, 3))
    for module in (parallel, reference):
        module.init_weights()
        module.apply(lambda part: part.weight.data.mul_(2) if type(part) is nn.Linear else None)
    assert is_parity(trained, (parallel, reference))
    parallel.plan = "of mine"
    assert parallel.plan == "of mine" and is_parity(trained, (parallel, reference))
    named: Any = autoshard.auto_parallelize(Named(), mesh, (X,))
    assert named.plan == "monthly" and named._step == 1 and autoshard.plan_of(named).operators
    with pytest.raises(InputError, match=r"Base runs no plan"):
        autoshard.plan_of(reference)


def test_the_class_of_a_parallel_module_makes_models_of_the_users(mesh: DeviceMesh) -> None:
    parallel = autoshard.auto_parallelize(Base(), mesh, (X,))
    teacher = type(parallel)()  # as averages of weights and targets of distillation are made
    assert type(teacher) is Base
    teacher.load_state_dict({name: full(value).detach() for name, value in parallel.state_dict().items()})
    assert torch.equal(teacher(X), full(parallel(X)))
    assert type(deepcopy(parallel)) is type(parallel)


def test_a_forward_that_is_wrapped_later_wraps_the_parallel_one(mesh: DeviceMesh) -> None:
    pair: tuple[Any, Any] = (autoshard.auto_parallelize(Base(), mesh, (X,)), Base())
    for module in pair:
        inner = module.forward
        module.forward = lambda x, inner=inner: inner(x) * 2
    assert is_parity(trained, pair)


def test_a_submodule_called_by_itself_is_refused_and_one_without_parameters_is_not(mesh: DeviceMesh) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Sequential(nn.Linear(4, 2)))
    parallel: Any = autoshard.auto_parallelize(model, mesh, (X,))
    for module in (parallel, deepcopy(parallel)):
        assert "the submodule 2.0 of a parallel module was called by itself" in str(
            refusal(lambda m: m[2][0](X), module)
        )
        assert torch.equal(module[1](X), X.relu())


def nothing(*args: Any, **kwargs: Any) -> None:
    pass


REGISTER: dict[str, Callable[[nn.Module], Any]] = {
    "pre-forward": lambda m: m.register_forward_pre_hook(nothing),
    "pre-forward with keywords": lambda m: m.register_forward_pre_hook(nothing, with_kwargs=True),
    "forward": lambda m: m.register_forward_hook(nothing),
    "forward, always": lambda m: m.register_forward_hook(nothing, always_call=True),
    "backward": lambda m: m.register_full_backward_hook(nothing),
    "pre-backward": lambda m: m.register_full_backward_pre_hook(nothing),
}


class Blocks(nn.Module):
    """Containers in containers, the same module twice, and one that has no tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleDict({"first": nn.Sequential(nn.Linear(4, 4), nn.ReLU()), "norm": nn.LayerNorm(4)})
        self.again = self.parts["first"]

    def forward(self, x: Tensor) -> Tensor:
        return self.parts["norm"](self.again(self.parts["first"](x)))


def test_a_hook_of_any_kind_on_any_submodule_that_is_called_is_refused_until_it_is_removed(mesh: DeviceMesh) -> None:
    parallel = autoshard.auto_parallelize(Blocks(), mesh, (X,))
    called = [module for name, module in parallel.named_modules() if name and name != "parts"]
    assert len(called) == 4
    for module in called:
        for register in REGISTER.values():
            handle = register(module)
            error = refusal(trained, parallel)
            assert isinstance(error, PlanMismatchError) and "the hooks of a module changed" in str(error)
            handle.remove()
    trained(parallel)


@pytest.mark.parametrize("what", REGISTER)
@pytest.mark.filterwarnings("ignore:Full backward hook is firing")
def test_a_hook_of_any_kind_on_the_module_itself_fires(mesh: DeviceMesh, what: str) -> None:
    seen: dict[int, list[str]] = {}
    pair = (autoshard.auto_parallelize(patched() if "forward" in what else Base(), mesh, (X,)), Base())
    for k, module in enumerate(pair):
        seen[k] = fired = []
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(globals(), "nothing", lambda *args, fired=fired, **kwargs: fired.append(what))
            handle = REGISTER[what](module)
        trained(module)
        handle.remove()
        trained(module)
    assert seen[0] == seen[1] == [what]


def test_a_module_is_parallelized_once_and_classes_without_subclasses_are_refused(mesh: DeviceMesh) -> None:
    parallel = autoshard.auto_parallelize(Base(), mesh, (X,))
    with pytest.raises((InputError, CaptureError), match="already"):
        autoshard.parallelize(parallel, autoshard.plan_of(parallel), mesh, (X,))

    class Final(type):
        def __new__(cls, name: str, bases: tuple[type, ...], body: Any) -> Any:
            if any(isinstance(base, Final) for base in bases):
                raise TypeError("closed")
            return super().__new__(cls, name, bases, body)

    class Closed(Base, metaclass=Final):
        pass

    with pytest.raises(InputError, match=r"Closed cannot have one \(closed\)"):
        autoshard.auto_parallelize(Closed(), mesh, (X,))
