"""The Python side of a model, which a captured step took for granted: attributes, submodules, methods, hooks, modes."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from typing import Any

import torch
from torch import nn

from ..capture import CapturedGraph, Contained, contained_in, global_hooks
from ..errors import PlanMismatchError

_MODES = frozenset({"is_grad_enabled", "is_inference_mode_enabled", "is_inference", "requires_grad", "is_leaf"})
_DETERMINISM = frozenset(
    {
        "are_deterministic_algorithms_enabled",
        "is_deterministic_algorithms_warn_only_enabled",
        "get_deterministic_debug_mode",
    }
)
_ENVIRONMENT = frozenset({"environ", "getenv"})
_DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)
_AGAIN = "set it back, or plan and parallelize the model as it is now"


class ModelState:
    """Notices what changed in a model, or around it, since it was captured.

    Args:
        taken: the parameters and buffers (FQNs) that somebody else checks, as a step takes their numbers.
        training: in which mode each module was when the model was captured.
    """

    def __init__(
        self, model: nn.Module, graph: CapturedGraph, taken: Collection[str], training: Sequence[bool]
    ) -> None:
        self._model = model
        self._guards = graph.guards and graph.guards.without(taken)
        self._tied = tuple(_tied(model, graph.aliases))
        self._modules = tuple(_modules(model))
        modes = zip(model.modules(), training, strict=True)
        self._idle = tuple((module, mode) for module, mode in modes if _drops_nothing(module))
        self._contained = tuple(_contained(model, frozenset(node.name for _, node in graph.of_kind("buffer"))))
        self._methods = tuple(_methods(model))
        self._grad_mode = torch.is_grad_enabled() if graph.names & _MODES else None
        self._determinism = torch.get_deterministic_debug_mode() if graph.names & _DETERMINISM else None
        self._trained = _trained(model) if "requires_grad" in graph.names else None
        self._strides = tuple(_strides(model)) if graph.asks_for_strides else ()
        self._environment = dict(os.environ) if graph.names & _ENVIRONMENT else None

    def __deepcopy__(self, memo: dict[int, Any]) -> ModelState:
        copy = object.__new__(ModelState)
        memo[id(self)] = copy
        copy.__dict__.update(self.__dict__)  # classes and their methods are those of the original
        for name in ("_model", "_guards", "_modules", "_tied", "_contained", "_idle", "_strides"):
            copy.__dict__[name] = deepcopy(self.__dict__[name], memo)
        return copy

    def check(self) -> None:
        """Checks that the model would still do what was captured.

        Raises:
            PlanMismatchError: it would not; the message says what changed, and which line reads it.
        """
        for path, table, key, module in self._modules:
            if table.get(key) is not module:
                raise PlanMismatchError(f"the module {path} is another one than when the model was captured; {_AGAIN}")
        for name, table, key, first in self._tied:
            if table.get(key) is not first[0].get(first[1]):
                raise PlanMismatchError(
                    f"{name} was one tensor with {first[2]} when the model was captured, and is another now; {_AGAIN}"
                )
        for place, table, key in self._contained:
            if place.now() is not table.get(key):
                raise PlanMismatchError(
                    f"{place} is another tensor than when the model was captured; write into the one that was there "
                    "(copy_), or plan and parallelize the model as it is now"
                )
        for owner, name, method, code in self._methods:
            found = owner.__dict__.get(name)
            if found is not method or getattr(found, "__code__", None) is not code:
                raise PlanMismatchError(f"{owner.__name__}.{name} was replaced after the model was captured; {_AGAIN}")
        for name, table, key, strides in self._strides:
            buffer = table.get(key)
            if isinstance(buffer, torch.Tensor) and buffer.stride() != strides:
                raise PlanMismatchError(
                    f"the forward asks how tensors lie in memory, and {name}, which had strides {strides}, has "
                    f"{buffer.stride()} now; {_AGAIN}"
                )
        if self._grad_mode not in (None, torch.is_grad_enabled()):
            raise PlanMismatchError(
                f"the forward asks whether gradients are computed, and was captured where they "
                f"{_are(self._grad_mode)}; now they {_are(torch.is_grad_enabled())}: make another plan for that"
            )
        if self._determinism not in (None, torch.get_deterministic_debug_mode()):
            raise PlanMismatchError(
                f"the forward asks whether torch is to use deterministic algorithms, which was switched since; {_AGAIN}"
            )
        if self._environment not in (None, dict(os.environ)):
            raise PlanMismatchError(f"the forward reads the environment, which has changed since; {_AGAIN}")
        if self._trained is not None and self._trained != _trained(self._model):
            raise PlanMismatchError(f"the forward asks which parameters require gradients, and these changed; {_AGAIN}")
        hooks = [hook for hook in global_hooks() if not str(getattr(hook, "__module__", "")).startswith("torch.")]
        if hooks:
            raise PlanMismatchError(
                "a hook on all modules was registered, which the parallel module cannot call; remove it"
            )
        with self._idle_as_captured():
            broken = None if self._guards is None else self._guards.broken()
        if broken is not None:
            raise PlanMismatchError(_sentence(*broken))

    @contextmanager
    def _idle_as_captured(self) -> Iterator[None]:
        """Inside, dropouts of nothing are in the mode in which they were captured: they do the same in both. (That they
        drop nothing still is a condition of its own.)
        """
        modes = [module.training for module, _ in self._idle]
        for module, mode in self._idle:
            module.training = mode
        try:
            yield
        finally:
            for (module, _), mode in zip(self._idle, modes):
                module.training = mode


def _sentence(condition: str, line: str) -> str:
    at = f" (read at {line})" if line else ""
    if "_hooks" in condition:
        return (
            f"the hooks of a module changed after the model was captured: `{condition}` no longer holds{at}; the "
            "captured step calls none but those it was captured with. Register hooks on the parallel module itself, or "
            "before the model is captured"
        )
    if ".training ==" in condition:
        return (
            f"the model was captured when `{condition}`{at}, and is in the other mode (training or evaluation) now; "
            "make another plan for that mode (autoshard.plan(..., evaluation=True, held_as=PLAN)) and give parallelize "
            "both, or have auto_parallelize make both (and_evaluation=True)"
        )
    return f"the model was captured when `{condition}`{at}, which no longer holds; {_AGAIN}"


def _drops_nothing(module: nn.Module) -> bool:
    return isinstance(module, _DROPOUTS) and module.p == 0.0


def _trained(model: nn.Module) -> list[bool]:
    return [parameter.requires_grad for parameter in model.parameters()]


def _are(enabled: bool | None) -> str:
    return "are" if enabled else "are not"


def _modules(model: nn.Module) -> Iterator[tuple[str, dict[str, Any], str, nn.Module]]:
    """Each submodule with its path, and the table and key under which its parent keeps it."""
    for path, parent in model.named_modules():
        for key, module in parent._modules.items():
            if module is not None:
                yield f"{path}.{key}" if path else key, parent._modules, key, module


def _tied(
    model: nn.Module, aliases: Iterable[tuple[str, str]]
) -> Iterator[tuple[str, dict[str, Any], str, tuple[dict[str, Any], str, str]]]:
    """Each other name of a parameter, with the table and key where its module keeps it, and those of the first name."""
    for name, first in aliases:
        (table, key), (first_table, first_key) = (_kept_at(model, each) for each in (name, first))
        yield name, table, key, (first_table, first_key, first)


def _strides(model: nn.Module) -> Iterator[tuple[str, dict[str, Any], str, tuple[int, ...]]]:
    """Each buffer with the table and key where its module keeps it, and its strides."""
    for path, module in model.named_modules():
        for key, buffer in module._buffers.items():
            if buffer is not None:
                yield f"{path}.{key}".removeprefix("."), module._buffers, key, buffer.stride()


def _kept_at(model: nn.Module, name: str) -> tuple[dict[str, Any], str]:
    path, _, key = name.rpartition(".")
    return model.get_submodule(path)._parameters, key


def _contained(model: nn.Module, names: frozenset[str]) -> Iterator[tuple[Contained, dict[str, Any], str]]:
    """Where buffers of these names stand in containers of modules: the place, and the table and key of the buffer."""
    tables = {}
    for path, module in model.named_modules():
        for key, buffer in module._buffers.items():
            if f"{path}.{key}".removeprefix(".") in names:
                tables[id(buffer)] = module._buffers, key
    for place, tensor in contained_in(model):
        if id(tensor) in tables:
            yield place, *tables[id(tensor)]


def _methods(model: nn.Module) -> Iterator[tuple[type, str, Any, Any]]:
    """What the classes of the user's modules define: owner, name, value and, of a function, its code."""
    classes = {base for module in model.modules() for base in type(module).__mro__}
    for owner in sorted(classes, key=lambda owner: (owner.__module__, owner.__qualname__)):
        if owner is not object and not owner.__module__.startswith("torch."):
            for name, value in owner.__dict__.items():
                if callable(value) or isinstance(value, (property, staticmethod, classmethod)):
                    yield owner, name, value, getattr(value, "__code__", None)
