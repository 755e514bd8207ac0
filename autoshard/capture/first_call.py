"""What a model sets up at its first call and leaves alone from then on: settings filled in, hooks put on under a lock.

A captured step changes no Python state, so a forward that does is refused. One that does so once only is run once
before, on tensors without memory, as its first call would do: of the arguments it knows the numbers of those that are
representative. If it still cannot be captured, the model is as it was.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from ..errors import CaptureError
from .adapter import has_memory
from .checks.effects import ChangesModelError
from .dynamo.side_effects import first_call_made
from .fake_run import FakeRun, fake_run, seen
from .graph import CapturedGraph
from .left import put_back
from .stacks.repeat import NotPeriodicError


def with_first_call_done(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    dtype: torch.dtype | None,
    attempt: Callable[[], CapturedGraph],
    again: Callable[[], CapturedGraph],
) -> CapturedGraph:
    """What an attempt to capture a model gives or, where its first call changes the model, another one ``again`` behind
    that call.

    Raises:
        CaptureError: that of the first attempt, where no second one can be made or it finds a change, too; that of the
            second where something else stands in its way. It says why no first call could be made, where that is so.
    """
    try:
        return attempt()
    except ChangesModelError as error:
        before, modes = _Namespaces(model), _modes(model)
        try:
            with put_back(model, error.left):
                first = fake_run(model, args, kwargs, dtype)
            is_as_it_was = before.same_as(_Namespaces(model))
            if (is_as_it_was and not error.left) or modes != _modes(model):
                raise error
            if is_as_it_was:
                raise NotPeriodicError("it leaves a tensor behind that it reads before")
            if _keeps_results(model):
                raise NotPeriodicError("it leaves a tensor behind that it has computed")
            if first.fills and not _is_every_call(first, model, args, kwargs, dtype):
                raise NotPeriodicError("it fills parameters or buffers, as later calls do not")
            with first_call_made():
                graph = again()
            if not set(error.left) <= set(graph.left):
                raise NotPeriodicError("it leaves a tensor behind that it has computed, as later calls do not")
            return graph
        except NotPeriodicError as reason:
            before.restore()
            raise ChangesModelError(f"{error}. {_not_made(reason)}") from None
        except CaptureError as reason:
            before.restore()
            raise (error if isinstance(reason, ChangesModelError) else reason) from None


def _is_every_call(
    first: FakeRun, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], dtype: torch.dtype | None
) -> bool:
    """Whether the next call runs the operators that the first one ran, on whatever way of Python's."""
    try:
        return _operators(fake_run(model, args, kwargs, dtype)) == _operators(first)
    except NotPeriodicError:  # without what the first one has filled
        return False


def _operators(run: FakeRun) -> list[tuple[object, ...]]:
    return [seen(node) for node in run.nodes if node.op is not None]


def _not_made(reason: NotPeriodicError) -> str:
    first = str(reason).strip().partition("\n")[0].rstrip(".")
    return (
        f"Its first call could not be made in advance, on tensors without memory: {first}; where only the first call "
        "changes the model, call it once before planning"
    )


class _Namespaces:
    """The attributes of all modules, and of plain objects in these (a configuration), as they are now; of dicts among
    them (hooks, say), and of lists, the items.
    """

    def __init__(self, model: nn.Module) -> None:
        lists = (value for module in model.modules() for value in vars(module).values() if type(value) is list)
        self._lists = [(value, list(value)) for value in lists]
        self._dicts = {id(namespace): (namespace, dict(namespace)) for namespace in _namespaces(model)}

    def same_as(self, other: _Namespaces) -> bool:
        """Whether the same names stand for the same objects in both."""
        return self._dicts.keys() == other._dicts.keys() and all(
            items.keys() == other._dicts[key][1].keys()
            and all(value is other._dicts[key][1][name] for name, value in items.items())
            for key, (_, items) in self._dicts.items()
        )

    def restore(self) -> None:
        """Makes the attributes what they were."""
        for namespace, items in self._dicts.values():
            namespace.clear()
            namespace.update(items)
        for listed, values in self._lists:
            listed[:] = values


def _namespaces(model: nn.Module) -> Iterator[dict[Any, Any]]:
    for module in model.modules():
        yield vars(module)
        for value in list(vars(module).values()):
            if isinstance(value, dict):
                yield value
            elif hasattr(value, "__dict__") and not isinstance(value, (nn.Module, torch.Tensor, type)):
                yield from (space for space in [vars(value)] if isinstance(space, dict))


def _modes(model: nn.Module) -> list[bool]:
    """Training or evaluation, which the user switches between calls, is nothing to set up."""
    return [module.training for module in model.modules()]


def _keeps_results(model: nn.Module) -> bool:
    """Whether the call left a tensor without memory behind, as in a model that keeps what it computes."""
    values = (value for space in _namespaces(model) for value in space.values())
    return any(isinstance(value, torch.Tensor) and not has_memory(value) for value in values)
