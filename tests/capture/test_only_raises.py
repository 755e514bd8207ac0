"""Conditions on numbers that decide whether an error is raised, and nothing else: captured as if none were."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn

from autoshard.capture import capture
from autoshard.errors import CaptureError

Body = Callable[[Tensor], Tensor]


class Model(nn.Module):
    def __init__(self, body: Body) -> None:
        super().__init__()
        self.linear, self.body = nn.Linear(4, 4), body

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.body(x)).square().mean()


def _any(x: Tensor) -> Tensor:
    if (x > 100).any():
        raise ValueError(f"too large: {'one' if len(x) == 1 else 'some'}")
    return x


def _number(x: Tensor) -> Tensor:
    if int(x.max()) > 100:
        message = "too large"
        raise ValueError(message)
    return x


def _unless(x: Tensor) -> Tensor:
    if x.max() < 100:
        x = x * 1
    else:
        raise ValueError
    return x


def _and(x: Tensor) -> Tensor:
    if x.max() > 100 and x.min() < -100 and x.sum() > 0:
        raise ValueError("both")
    return x


def _or(x: Tensor) -> Tensor:
    if x.sum().item() > 100 or not torch.isfinite(x).all():
        raise ValueError("either")
    return x


def _counted(x: Tensor) -> Tensor:
    if len(torch.unique_consecutive((x > 0).sum(1))) > 1 or x[x > 0].shape[0] == 1000:
        raise ValueError("not as many in each row")
    return x


def _in_loop(x: Tensor) -> Tensor:
    for k in range(len(x)):
        if x[k].sum() > 100:
            raise ValueError(k)
    return x


def _look(x: Tensor) -> None:
    assert x.min() > -100, f"too small for {len(x)}"
    if x.sum() > 100:
        raise ValueError("too large")


def _within(x: Tensor) -> Tensor:
    with torch.no_grad():
        _look(x)
    return x


def _tidied(x: Tensor) -> Tensor:
    try:
        _look(x)
    finally:
        x = x * 1
    return x


def _in_other_words(x: Tensor) -> Tensor:
    try:
        _look(x)
    except ValueError as error:
        raise RuntimeError("of the model") from error
    return x


@contextlib.contextmanager
def _timed() -> Iterator[None]:
    begin = 0
    try:
        yield
    finally:
        begin += 1


class Context:
    def __init__(self, catches: bool) -> None:
        self.catches = catches

    def __enter__(self) -> None: ...

    def __exit__(self, *error: object) -> bool:
        return self.catches


class Plain(Context):
    def __exit__(self, *error: object) -> None:  # type: ignore[override]
        self.catches = False


def _within_others(x: Tensor) -> Tensor:
    with _timed(), Plain(True), contextlib.nullcontext():
        _look(x)
    return x


@pytest.mark.parametrize(
    "body",
    [
        _any,
        _number,
        _unless,
        _and,
        _or,
        _counted,
        _in_loop,
        _within,
        _tidied,
        _in_other_words,
        _within_others,
    ],
)
def test_the_graph_is_that_without_the_condition(body: Body) -> None:
    args = (torch.zeros(3, 4),)
    found, expected = (
        capture(Model(body), args),
        capture(Model(lambda x: x * 1 if body in (_unless, _tidied) else x), args),
    )
    assert [(node.op, node.args, node.outputs) for node in found.nodes] == [
        (node.op, node.args, node.outputs) for node in expected.nodes
    ]


def _caught(x: Tensor) -> Tensor:
    try:
        if x.sum() > 100:
            raise ValueError("too large")
    except ValueError:
        x = x / 2
    return x


def _caught_outside(x: Tensor) -> Tensor:
    try:
        _look(x)
    except ValueError:
        x = x / 2
    return x


def _caught_at_once(x: Tensor) -> Tensor:
    if x.sum() > 100:
        with contextlib.suppress(KeyError):
            try:
                raise ValueError("too large")
            except ValueError:
                x = x / 2
    return x


def _suppressed(x: Tensor) -> Tensor:
    with contextlib.suppress(ValueError), torch.no_grad():
        _look(x)
        x = x / 2
    return x


def _suppressed_at_once(x: Tensor) -> Tensor:
    with torch.no_grad():
        if x.sum() > 100:
            with contextlib.suppress(ValueError):
                raise ValueError("too large")
            x = x / 2
    return x


@contextlib.contextmanager
def _catching() -> Iterator[None]:
    try:
        yield
    except ValueError:
        pass


def _caught_by_generator(x: Tensor) -> Tensor:
    with _catching():
        _look(x)
        x = x / 2
    return x


def _caught_by_class(x: Tensor) -> Tensor:
    with Context(True):
        _look(x)
        x = x / 2
    return x


def _changed_first(x: Tensor) -> Tensor:
    if x.sum() > 100:
        x = x / 2
        if x.sum() > 100:
            raise ValueError("too large")
    return x


def _returns(x: Tensor) -> Tensor:
    if x.sum() > 100:
        return x / 2
    return x


@pytest.mark.parametrize(
    "body",
    [
        _caught,
        _caught_outside,
        _caught_at_once,
        _suppressed,
        _suppressed_at_once,
        _caught_by_generator,
        _caught_by_class,
        _changed_first,
        _returns,
    ],
)
def test_what_decides_something_else_is_refused(body: Body) -> None:
    with pytest.raises(CaptureError, match="which way Python goes here, or a shape, depends on numbers"):
        capture(Model(body), (torch.zeros(3, 4),))
