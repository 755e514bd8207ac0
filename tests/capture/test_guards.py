"""The Python values that a forward reads: each change of one is noticed, and no other change is."""

from __future__ import annotations

import enum
import functools
import inspect
import json
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autoshard.capture import capture
from autoshard.capture.dynamo.guards import Guards, guards_again

from ..models import mlp

FACTOR = 2.0
NUMBERS = [1.0, 2.0]


class Kind(enum.Enum):
    ONE = 1
    TWO = 2


class Config:
    def __init__(self) -> None:
        self.scale = 2.0
        self.nested = {"a": 1.0}
        self.kind = Kind.ONE


def twice(x: Tensor) -> Tensor:
    return x * 2


def closure() -> tuple[Callable[[Tensor], Tensor], Callable[[float], None]]:
    value = 3.0

    def read(x: Tensor) -> Tensor:
        return x * value

    def write(new: float) -> None:
        nonlocal value
        value = new

    return read, write


read, write = closure()


class Shard(nn.Parameter):
    """A parameter of a class of its own, as a DTensor is."""


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.dropout = nn.Dropout(0.5)
        self.k = 3.0
        self.unread = 1

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(self.linear(x)) * self.k


class Reader(nn.Module):
    """Reads Python values of every kind."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer(), Layer()])
        self.config = Config()
        self.activation: Callable[[Tensor], Tensor] = F.relu
        self.leaky = functools.partial(F.leaky_relu, negative_slope=0.1)
        self.members = {1, 2}
        self.pair = (1, [2.0])
        self.limit: float | str = 1.0
        self._validate_args = 1.0  # what distributions call what a capture switches off

    def shift(self, x: Tensor) -> Tensor:
        return x + 1

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        x = x * self.config.scale * self.config.nested["a"] * FACTOR  # reads
        x = x * self._validate_args
        if self.config.kind is Kind.ONE:
            x = x * 2
        x = read(twice(self.leaky(self.activation(self.shift(x))))) * len(NUMBERS) * NUMBERS[0] * self.pair[1][0]
        if 1 in self.members and isinstance(self.limit, float) and not hasattr(self, "later"):
            x = x * 3
        return x.sum()


@pytest.fixture(scope="module", params=["captured", "kept"])
def guarded(request: pytest.FixtureRequest) -> tuple[Reader, Any]:
    """Guards of a capture, and those that are made again for another model of what was kept of them."""
    model = Reader()
    guards = capture(model, (torch.randn(2, 4),), guarded=True).guards
    assert isinstance(guards, Guards) and guards.document is not None
    if request.param == "captured":
        return model, guards
    other = Reader()
    return other, guards_again(json.loads(json.dumps(guards.document)), other)


@contextmanager
def changed(owner: Any, name: str, value: Any) -> Iterator[None]:
    """An attribute with another value."""
    before = vars(owner).copy()
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before[name]) if name in before else delattr(owner, name)


@contextmanager
def item(owner: Any, key: Any, value: Any) -> Iterator[None]:
    """An item with another value."""
    before = owner[key]
    owner[key] = value
    try:
        yield
    finally:
        owner[key] = before


@contextmanager
def written(value: float) -> Iterator[None]:
    """The variable of the closure with another value."""
    write(value)
    try:
        yield
    finally:
        write(3.0)


@contextmanager
def hooked(register: Callable[[Any], Any]) -> Iterator[None]:
    """A hook that does nothing."""
    handle = register(lambda *args: None)
    try:
        yield
    finally:
        handle.remove()


@contextmanager
def without(members: set[int], member: int) -> Iterator[None]:
    members.discard(member)
    try:
        yield
    finally:
        members.add(member)


HERE = inspect.getmodule(Reader)

# before 2.13, torch guards on the value where its type alone is read
BY_VALUE = torch.__version__ < "2.13"
CHANGES: dict[str, tuple[Callable[[Reader], Any], str]] = {
    "number": (lambda m: changed(m.layers[1], "k", 5.0), "model.layers.1.k == 3.0"),
    "type": (lambda m: changed(m.layers[0], "k", 3), "model.layers.0.k == 3.0"),
    "mode": (lambda m: changed(m.layers[1].dropout, "training", False), "model.layers.1.dropout.training == True"),
    "probability": (lambda m: changed(m.layers[0].dropout, "p", 0.1), "model.layers.0.dropout.p == 0.5"),
    "global": (lambda m: changed(HERE, "FACTOR", 3.0), "tests.capture.test_guards.FACTOR == 2.0"),
    "global list": (lambda m: item(NUMBERS, 0, 7.0), "NUMBERS[0] == 1.0"),
    "length": (lambda m: changed(HERE, "NUMBERS", [1.0]), "len(tests.capture.test_guards.NUMBERS) == 2"),
    "config": (lambda m: changed(m.config, "scale", 3.0), "model.config.scale == 2.0"),
    "config entry": (lambda m: item(m.config.nested, "a", 2.0), "model.config.nested['a'] == 1.0"),
    "enum": (lambda m: changed(m.config, "kind", Kind.TWO), "model.config.kind is what it was"),
    "function": (lambda m: changed(m, "activation", F.gelu), "model.activation"),
    "global function": (lambda m: changed(HERE, "twice", lambda x: x), "twice"),
    "partial": (lambda m: changed(m, "leaky", functools.partial(F.leaky_relu, negative_slope=0.2)), "== 0.1"),
    "closure": (lambda m: written(4.0), "cell_contents == 3.0"),
    "member": (lambda m: without(m.members, 1), "model.members"),
    "name of distributions": (lambda m: changed(m, "_validate_args", 2.0), "model._validate_args == 1.0"),
    "list in a tuple": (lambda m: item(m.pair[1], 0, 5.0), "model.pair == (1, [2.0])"),
    "isinstance": (
        lambda m: changed(m, "limit", "none"),
        "model.limit == 1.0" if BY_VALUE else "type(model.limit) is float",
    ),
    "hasattr": (lambda m: changed(m, "later", 1), "hasattr(model, 'later')"),
    "method of one": (lambda m: changed(m, "shift", lambda x: x), "'shift' not in model.__dict__"),
    "forward of one": (lambda m: changed(m.layers[0], "forward", lambda x: x), "'forward' not in model.layers.0"),
    "forward hook": (lambda m: hooked(m.layers[0].register_forward_hook), "not model.layers.0._forward_hooks"),
    "pre-hook": (lambda m: hooked(m.register_forward_pre_hook), "not model._forward_pre_hooks"),
    "backward hook": (lambda m: hooked(m.layers[1].linear.register_full_backward_hook), "linear._backward_hooks"),
}


@pytest.mark.parametrize("what", CHANGES)
def test_a_change_of_what_the_forward_reads_is_noticed_and_named(guarded: tuple[Reader, Guards], what: str) -> None:
    model, guards = guarded
    change, condition = CHANGES[what]
    assert guards.broken() is None
    with change(model):
        broken = guards.broken()
    assert broken is not None and condition in broken[0], broken
    assert guards.broken() is None


OTHERS: dict[str, Callable[[Reader], Any]] = {
    "unread attribute": lambda m: changed(m.layers[0], "unread", 2),
    "new attribute": lambda m: changed(m, "unknown", 2),
    "equal object": lambda m: changed(m, "config", Config()),
    "type alone is read": lambda m: changed(m, "limit", 2.0),
    "mode of a linear layer": lambda m: changed(m.layers[0].linear, "training", False),
}


@pytest.mark.parametrize("what", OTHERS)
def test_another_change_is_none_of_its_business(guarded: tuple[Reader, Guards], what: str) -> None:
    model, guards = guarded
    with OTHERS[what](model):
        assert (guards.broken() is None) is not (BY_VALUE and what == "type alone is read")


def test_the_line_that_reads_a_value_is_named(guarded: tuple[Reader, Guards]) -> None:
    model, guards = guarded
    lines, first = inspect.getsourcelines(Reader)
    number = first + next(k for k, line in enumerate(lines) if "# reads" in line)
    with changed(model.config, "scale", 3.0):
        broken = guards.broken()
    assert broken is not None and f"{__file__}:{number}" in broken[1]


def test_the_class_of_a_parameter_is_no_condition_as_shards_are_of_another() -> None:
    class Typed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4))
            self.scale: Any = 2.0

        def forward(self, x: Tensor) -> Tensor:
            x = x * (self.weight if type(self.weight) is nn.Parameter else 0.0)
            x = x * (2.0 if type(self.weight).__module__.startswith("torch.") else 0.0)
            return (x if type(self.scale) is float else 2 * x).sum()

    model = Typed()
    guards = capture(model, (torch.randn(2, 4),), guarded=True).guards
    assert guards is not None
    model._parameters["weight"] = Shard(torch.randn(4))
    assert type(model.weight) is Shard and guards.broken() is None
    model.scale = 2
    assert guards.broken() is not None


def test_what_is_named_is_what_changed() -> None:
    class Equal(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.linear, self.kinds = nn.LayerNorm(2), nn.Linear(2, 2), [Kind.ONE, Kind.ONE]
            self.function: Callable[[Tensor], Tensor] = F.relu

        def forward(self, x: Tensor) -> Tensor:
            return self.function(self.norm(self.linear(x))) * sum(kind is Kind.ONE for kind in self.kinds)

    model = Equal()
    guards = capture(model, (torch.ones(2, 2),), guarded=True).guards
    assert guards is not None
    same = "model.kinds[1] is what it was" if torch.__version__ < "2.12" else "model.kinds[0] is model.kinds[1]"
    for owner, name, value, condition in (
        (model.kinds, 1, Kind.TWO, same),
        (vars(model), "function", F.gelu, "model.function is what it was"),
    ):
        with item(owner, name, value):
            broken = guards.broken()
        assert broken is not None and broken[0] == condition


class Options:
    """Attributes that are read as a whole."""

    def __init__(self) -> None:
        self.a = 1.0


def scaled(a: float = 1.0, b: float = 1.0) -> float:
    return a * b


AS_A_WHOLE: dict[str, Callable[[Any], float]] = {
    "length": lambda m: float(len(vars(m.options))),
    "keywords": lambda m: scaled(**vars(m.options)),
    "copy": lambda m: float(m.options.__dict__.copy().get("b", 1.0)),
    "dict": lambda m: float(dict(vars(m.options)).get("b", 1.0)),
    "list of the model's own": lambda m: float(len([*vars(m)])),
    "items of the model's own": lambda m: float(sum(name == "b" for name, _ in vars(m).items())),
    "list of a dict": lambda m: float(len([*m.table])),
    "order": lambda m: float(next(iter(m.ordered.values()))),
}


@pytest.mark.skipif(BY_VALUE, reason="torch 2.13 on has a variable for the dict of an object")
@pytest.mark.parametrize("how", AS_A_WHOLE)
def test_which_names_there_are_and_their_order_are_conditions(how: str) -> None:
    class Whole(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.options, self.table, self.ordered = Options(), {"a": 1.0}, OrderedDict(a=1.0, b=2.0)

        def forward(self, x: Tensor) -> Tensor:
            return x * AS_A_WHOLE[how](self)

    model = Whole()
    guards = capture(model, (torch.ones(2),), guarded=True).guards
    assert isinstance(guards, Guards) and guards.document is not None
    vars(model)["_autoshard"] = None  # what a parallel module has beside the user's
    assert guards.broken() is None
    again = guards_again(json.loads(json.dumps(guards.document)), model)
    model.b = model.options.b = model.table["b"] = 3.0  # type: ignore[attr-defined]
    model.ordered.move_to_end("a")
    assert guards.broken() is not None and again is not None and again.broken() is not None


BY_DTYPE = {torch.float32: (2.0, [3.0]), torch.float64: (4.0, [5.0])}


def test_what_a_dtype_is_the_key_of_is_a_condition() -> None:
    class Tabled(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            scale, (shift,) = BY_DTYPE[x.dtype]
            return x * scale + shift

    guards = capture(Tabled(), (torch.ones(2),), guarded=True).guards
    assert guards is not None and guards.broken() is None
    with item(BY_DTYPE, torch.float32, (2.0, [4.0])):
        broken = guards.broken()
    assert broken is not None and "BY_DTYPE[torch.float32]" in broken[0] and guards.broken() is None


def test_a_copy_of_a_model_has_conditions_of_its_own(guarded: tuple[Reader, Guards]) -> None:
    model, guards = guarded
    memo: dict[int, Any] = {}
    copied, copied_guards = deepcopy(model, memo), deepcopy(guards, memo)
    with changed(copied.layers[0], "k", 4.0):
        assert guards.broken() is None and copied_guards.broken() is not None
    with changed(model.layers[0], "k", 4.0):
        assert guards.broken() is not None and copied_guards.broken() is None


def test_hooks_that_are_there_when_a_model_is_captured_are_part_of_the_graph() -> None:
    model, args = mlp()
    plain = capture(model, args).fingerprint
    model.up.register_forward_hook(lambda module, inputs, output: output * 3)
    model.register_forward_pre_hook(lambda module, inputs: (inputs[0] + 1,))
    graph = capture(model, args, guarded=True)
    assert graph.fingerprint != plain and graph.guards is not None and graph.guards.broken() is None
    with hooked(model.up.register_forward_hook):
        broken = graph.guards.broken()
    assert broken is not None and "len(model.up._forward_hooks) == 1" in broken[0]


def test_the_names_that_the_models_own_code_uses_are_known() -> None:
    def inner() -> bool:
        return (lambda: torch.is_grad_enabled())()

    class Asks(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * 2 if inner() else x

    x = torch.ones(2, 2)
    assert "is_grad_enabled" in capture(Asks(), (x,)).names
    model, args = mlp()
    assert "is_grad_enabled" not in capture(model, args).names and "relu" in capture(model, args).names
