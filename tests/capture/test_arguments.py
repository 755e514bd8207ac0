"""The arguments of a call: names, defaults, and which calls are the same call."""

from __future__ import annotations

import functools
from collections import OrderedDict, namedtuple
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from autoshard.capture import CallSignature, capture, differences
from autoshard.capture.arguments import same_constant
from autoshard.errors import CaptureError

X, Y = torch.ones(2, 3), torch.zeros(2, 3)
NAN = float("nan")
Point = namedtuple("Point", "x y")


def module(forward: Callable[..., Any]) -> nn.Module:
    """A module with a forward."""
    return type("Made", (nn.Module,), {"forward": forward})()


def plain(self: Any, x: Any, mask: Any = None, scale: Any = 1.0, *, flip: Any = False) -> Any:
    return x


def packed(self: Any, x: Any, *rest: Any, **named: Any) -> Any:
    return x


def decorated(forward: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(forward)
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        return forward(self, *args, **kwargs)

    return wrapper


Call = tuple[tuple[Any, ...], dict[str, Any]]


def call(*args: Any, **kwargs: Any) -> Call:
    return args, kwargs


def said(forward: Callable[..., Any], planned: Call, now: Call) -> list[str]:
    """How the second call differs from the first."""
    signature = CallSignature(module(forward))
    return list(differences(signature.bind(*planned), signature.bind(*now)))


SAME: list[tuple[Callable[..., Any], Call, Call]] = [
    (plain, call(X), call(x=Y)),
    (plain, call(X), call(X, None, 1.0, flip=False)),
    (plain, call(X, scale=2.0, mask=Y), call(Y, X, 2.0)),
    (plain, call(X, scale=NAN), call(X, scale=float("nan"))),
    (plain, call(X, scale=np.float64(2)), call(X, scale=np.float64(2))),
    (plain, call({"a": X, "b": [1, "s"]}), call({"a": Y, "b": [1, "s"]})),
    (plain, call(Point(X, 1)), call(Point(Y, 1))),
    (packed, call(X, Y, a=X, b=1), call(Y, X, a=Y, b=1)),
    (decorated(plain), call(X, scale=2.0), call(Y, scale=2.0)),
]


@pytest.mark.parametrize(("forward", "planned", "now"), SAME)
def test_calls_that_forward_cannot_tell_apart_but_for_tensors_are_the_same(forward, planned, now) -> None:
    assert said(forward, planned, now) == []


OTHER: list[tuple[Callable[..., Any], Call, Call, str]] = [
    (plain, call(X), call(X, flip=True), "flip was False when the model was captured and is True now"),
    (plain, call(X), call(X, Y), "mask was None when the model was captured and is a tensor of shape [2, 3] now"),
    (plain, call(X, Y), call(X), "mask was a tensor of shape [2, 3] when the model was captured and is None now"),
    (plain, call(X), call(X, scale=1), "scale was 1.0 when the model was captured and is 1 now"),
    (plain, call(X), call(X, scale=True), "is True now"),
    (plain, call(X), call(X, scale=torch.tensor(1.0)), "is a tensor of shape [] now"),
    (plain, call(X, scale=0.0), call(X, scale=-0.0), "was 0.0 when the model was captured and is -0.0 now"),
    (plain, call(X, scale=NAN), call(X), "was nan"),
    (plain, call(X), call(np.ones(3)), "x was a tensor"),
    (plain, call(X, scale=2.0), call(X, scale=np.float64(2)), "scale was 2.0"),
    (plain, call([X, 1]), call([X]), "x.0, x.1, mask, scale, flip; this call is without x.1"),
    (plain, call([X]), call((X,)), "other containers"),
    (plain, call({"a": X, "b": Y}), call({"b": Y, "a": X}), "x.a, x.b, mask, scale, flip in this order"),
    (plain, call({"a": X}), call(OrderedDict(a=X)), "other containers"),
    (packed, call(X, Y), call(X), "this call is without rest.0"),
    (packed, call(X, a=1), call(X, a=1, b=2), "this call is with b"),
    (packed, call(X, a=1, b=2), call(X, b=2, a=1), "in this order"),
    (decorated(plain), call(X), call(x=X), "other containers"),
    (decorated(plain), call(X), call(X, scale=1.0), "this call is with scale"),
]  # fmt: skip


@pytest.mark.parametrize(("forward", "planned", "now", "text"), OTHER)
def test_calls_that_forward_could_tell_apart_differ_and_the_difference_is_named(forward, planned, now, text) -> None:
    (difference,) = said(forward, planned, now)
    assert text in difference


@pytest.mark.parametrize("now", [call(), call(X, nonsense=3), call(X, None, 1.0, True), call(X, x=X)])
def test_arguments_that_forward_does_not_take_are_a_type_error(now: Call) -> None:
    with pytest.raises(TypeError):
        said(plain, call(X), now)


def test_a_default_that_changed_is_another_call() -> None:
    forward = type(plain)(plain.__code__, plain.__globals__, "forward", plain.__defaults__)
    forward.__kwdefaults__ = plain.__kwdefaults__
    signature = CallSignature(module(forward))
    before = signature.bind((X,), {})
    forward.__defaults__ = (None, 5.0)
    after = CallSignature(module(forward)).bind((X,), {})
    assert list(differences(before, after)) == ["scale was 1.0 when the model was captured and is 5.0 now"]


class Odd:
    """Equal to everything, and proud of it."""

    def __eq__(self, other: object) -> bool:
        raise RuntimeError("no")

    __hash__ = None  # type: ignore[assignment]


def test_objects_whose_comparison_may_say_anything_are_only_equal_to_themselves() -> None:
    odd, array = Odd(), np.ones(3)
    assert same_constant(odd, odd) and not same_constant(odd, Odd())
    assert same_constant(array, array) and not same_constant(array, np.ones(3))
    assert same_constant(torch.float32, torch.float32) and not same_constant(torch.float32, torch.float64)


@given(st.floats() | st.integers() | st.booleans() | st.text() | st.complex_numbers() | st.none() | st.binary())
def test_a_constant_is_the_same_as_its_copy_and_as_nothing_else(value: Any) -> None:
    other = type(value)(value) if value is not None else None
    assert same_constant(value, other)
    assert not same_constant(value, [value]) and not same_constant(value, "another text than any above")


NAMES: list[tuple[Callable[..., Any], Call, list[str]]] = [
    (plain, call(X, Y), ["x", "mask"]),
    (plain, call(scale=1.0, x=X), ["scale", "x"]),
    (packed, call(X, Y, X, a=X), ["x", "rest.0", "rest.1", "a"]),
    (decorated(plain), call(X, Y), ["x", "mask"]),
    (functools.partial(plain, None, flip=True), call({"k": [X]}), ["x.k.0"]),
]


@pytest.mark.parametrize(("forward", "given_call", "names"), NAMES)
def test_leaves_are_named_in_the_order_given(forward, given_call: Call, names: list[str]) -> None:
    signature = CallSignature(module(staticmethod(forward) if isinstance(forward, functools.partial) else forward))
    assert signature.names(*given_call) == names
    assert set(names) <= set(signature.bind(*given_call).names)


class Sum(nn.Module):
    def forward(self, grad: Any, other: Any = None) -> Tensor:
        leaves = torch.utils._pytree.tree_leaves((grad, other))
        return sum(leaf.sum() for leaf in leaves if isinstance(leaf, Tensor))


def test_one_tensor_given_twice_is_two_inputs() -> None:
    class Pair(nn.Module):
        def forward(self, a: Tensor, b: Tensor) -> Tensor:
            return (a * 2 - b).sum()

    expected = capture(Pair(), (X, Y))
    for args, kwargs in [((X, X), {}), ((), {"a": X, "b": X}), ((X, X.view(2, 3)), {}), ((X, X[:]), {})]:
        graph = capture(Pair(), args, kwargs)
        assert [node.name for _, node in graph.of_kind("input")] == ["a", "b"]
        assert graph.fingerprint == expected.fingerprint


def test_an_argument_that_is_a_parameter_or_a_buffer_of_the_model_is_an_input() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.ones(3))
            self.register_buffer("b", torch.ones(3))

        def forward(self, x: Tensor) -> Tensor:
            return (x * self.w * self.b).sum()

    model = Scaled()
    expected = capture(model, (torch.zeros(3),)).fingerprint
    assert capture(model, (model.b,)).fingerprint == expected
    assert capture(model, (model.w.detach(),)).fingerprint == expected
    with pytest.raises(CaptureError, match=r"the argument x requires a gradient.*detach it"):
        capture(model, (model.w,))


def test_inputs_do_not_take_the_names_of_the_graphs_own_tensors() -> None:
    graph = capture(Sum(), ([X, Y],))
    names = [node.name for node in graph.nodes]
    assert names[:2] == ["args.grad.0", "args.grad.1"] and len(set(names)) == len(names)


def test_two_arguments_of_one_name_are_refused() -> None:
    with pytest.raises(CaptureError, match=r"two arguments are both called args\.grad\.a\.b"):
        capture(Sum(), ({"a": {"b": X}, "a.b": Y},))


class Marked(torch.Tensor):
    """A tensor with a meaning of its own."""


UNUSUAL: dict[str, tuple[Tensor, str]] = {
    "of a class": (X.as_subclass(Marked), "is a Marked"),
    "sparse": (X.to_sparse(), "layout torch.sparse_coo"),
    "wants a gradient": (X.clone().requires_grad_(), "requires a gradient"),
}


@pytest.mark.parametrize("what", UNUSUAL)
def test_tensors_that_are_no_plain_block_of_numbers_are_refused(what: str) -> None:
    tensor, text = UNUSUAL[what]
    with pytest.raises(CaptureError, match=text):
        capture(Sum(), (tensor,))
