"""A text that two models share only if their capture is the same: what makes it is far cheaper than a capture.

No fingerprint sees all that a forward may depend on: a flag of another module, an environment variable, a file. What it
does with them shows when it runs. So the key holds, besides all that describes the model at rest, every operator that
its forward calls on tensors without memory, with its arguments (:mod:`autoshard.capture.fake_run`).

What does not show in that run is in the rest. Marks of ``torch.utils.checkpoint`` and source lines follow from the
code, which enters as the content of all files of the user's own that are loaded and of the files of libraries that
define the model's classes; and from attributes of modules, which enter by value. Custom backwards and hooks of
gradients, which do not run, follow from the code, too, and from the global variables that it reads, by value.
"""

from __future__ import annotations

import enum
import hashlib
import os
import sys
import warnings
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any
from weakref import ReferenceType

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_map_only

from .adapter import UsersBackward, global_hooks
from .by_numbers.representative import any_representative
from .fake_run import FakeRun, fake_run, seen
from .lines import is_installed
from .precise import dtype_of
from .stacks.blocks import FEWEST, stacks_of
from .stacks.repeat import NotPeriodicError

_MOST_VALUES = 300_000
"""How many values are looked at; a model with more attributes has no key."""
_MOST_NUMBERS = 1 << 20
"""The numbers of a tensor that is no parameter or buffer, beyond which a model has no key."""
_BY_VERSION = ("autoshard", "builtins", "cost_models", "solver", "torch")
"""Packages whose version is in the key of whatever is kept."""
_ENVIRONMENT = frozenset({"environ", "getenv"})
_TEXTS = (bool, int, float, complex, str, bytes, range, slice, enum.Enum)
_TEXTS_OF_TORCH = (torch.dtype, torch.device, torch.Size, torch.layout, torch.memory_format)


class _NoKeyError(Exception):
    """Something is part of the model of which nobody can say whether it is as it was."""


@dataclass(frozen=True, eq=False)
class KnownModel:
    """What is known of a model without a capture: ``key``, a text that two models share only if their capture is the
    same, and ``run``, what its forward does.
    """

    key: str
    run: FakeRun


def known_model(
    model: Any, args: tuple[Any, ...], kwargs: dict[str, Any], param_dtype: str | None = None
) -> KnownModel | None:
    """Describes all that a capture of a model depends on; None where there is something that cannot be told, or where
    it depends on numbers of arguments.

    The forward is run once on a copy of the model that shares its tensors, of which only shapes are read.

    Args:
        model, args, kwargs: as for :func:`autoshard.capture.capture`.
        param_dtype: what floating parameters and arguments are cast to, ``bfloat16``.
    """
    if not isinstance(model, nn.Module) or any_representative(model, args, kwargs):
        return None
    digest = hashlib.sha256()

    def note(part: object) -> None:
        digest.update(f"{part}\n".encode(errors="backslashreplace"))

    try:
        for part in _at_rest(model, args, kwargs):
            note(part)
        copy = _copy(model)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what the model warns of, it warns of when it is captured
            dtype = dtype_of(param_dtype) if param_dtype else None
            run = fake_run(copy, args, kwargs, dtype, tuple(stacks_of(copy, FEWEST)))
        for part in (*_of_run(run), *map(_of_backward, run.backwards)):
            note(part)
    except (_NoKeyError, NotPeriodicError, RecursionError):
        return None
    return KnownModel(digest.hexdigest(), run)


def model_key(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any], param_dtype: str | None = None) -> str | None:
    """The key of :func:`known_model`."""
    known = known_model(model, args, kwargs, param_dtype)
    return None if known is None else known.key


def _at_rest(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[object]:
    yield _settings()
    yield from _files(model)
    known = _Described(model)
    for path, module in model.named_modules(remove_duplicate=False):
        yield path, known.of(module)
    leaves, structure = tree_flatten((args, kwargs))
    yield structure, [known.of_argument(leaf) for leaf in leaves]


def _of_run(run: FakeRun) -> Iterator[object]:
    yield from map(seen, run.nodes)
    yield [(_tensor(value), _numbers(value)) for value in run.elsewhere]


def _of_backward(given: Any) -> object:
    """What a backward of the user's own or a hook of a gradient does, as far as its code does not say it."""
    known = _Described(None)
    if not isinstance(given, UsersBackward):
        return known.of(given), [known.of(value) for value in _read_by(given, set())]
    context = tree_map_only(torch.Tensor, _tensor, given.context)
    read = _read_by(given.function.backward, set())
    return known.of(given.function), known.of(context), [known.of(value) for value in read]


def described(value: object) -> str | None:
    """A text that equal values share, functions and what they enclose included; None where there is no telling."""
    try:
        return str(_Described(None).of(value))
    except (_NoKeyError, RecursionError):
        return None


def _copy(model: nn.Module) -> nn.Module:
    """A copy that a forward may change, with the same tensors."""
    memo: dict[int, Any] = {id(t): t for t in (*model.parameters(), *model.buffers())}
    try:
        return deepcopy(model, memo)
    except Exception as error:  # whatever the user's objects say to being copied
        raise _NoKeyError from error


def _settings() -> tuple[object, ...]:
    """What of torch's state decides what a forward does."""
    cudnn, sdp = torch.backends.cudnn, torch.backends.cuda
    return (
        sys.version,
        torch.__version__,
        torch.version.git_version,
        torch.get_default_dtype(),
        torch.get_default_device(),
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu"),
        torch.are_deterministic_algorithms_enabled(),
        torch.get_float32_matmul_precision(),
        (cudnn.enabled, sdp.flash_sdp_enabled(), sdp.mem_efficient_sdp_enabled(), sdp.math_sdp_enabled()),
        [_Described(None).of(hook) for hook in global_hooks()],
    )


class _Described:
    """Describes values: equal ones get equal descriptions, in one process or two; one that is met again its number."""

    def __init__(self, model: nn.Module | None) -> None:
        self._numbers: dict[int, int] = {}
        self._alive: list[object] = []  # so that no other object gets the identity of one that is known
        self._held = set(map(id, (*model.parameters(), *model.buffers()))) if model is not None else set()

    def of(self, value: Any) -> object:
        """A value and all that it holds.

        Raises:
            _NoKeyError: it holds something that cannot be described.
        """
        if value is None or isinstance(value, _TEXTS + _TEXTS_OF_TORCH):
            return f"{type(value).__name__} {value!r}"
        if isinstance(value, ModuleType):
            return "module", value.__name__
        if isinstance(value, type):
            return "class", value.__module__, value.__qualname__
        if isinstance(value, BuiltinFunctionType):
            return "builtin", value.__module__, value.__qualname__
        if id(value) in self._numbers:
            return self._numbers[id(value)]
        if len(self._alive) > _MOST_VALUES:
            raise _NoKeyError
        self._numbers[id(value)] = len(self._alive)
        self._alive.append(value)
        return self._inside(value)

    def of_argument(self, leaf: Any) -> object:
        """A leaf of the arguments: of a tensor only what a capture reads."""
        return _tensor(leaf) if isinstance(leaf, torch.Tensor) else self.of(leaf)

    def _inside(self, value: Any) -> object:
        match value:
            case torch.Tensor():
                return _tensor(value) if id(value) in self._held else (_tensor(value), _numbers(value))
            case nn.Module():
                return _class_of(value), self.of(vars(value))
            case list() | tuple():
                return type(value).__qualname__, [self.of(item) for item in value]
            case dict():
                return type(value).__qualname__, [(self.of(key), self.of(item)) for key, item in value.items()]
            case set() | frozenset():
                return "set", sorted(map(str, map(self.of, value)))
            case CodeType():
                inner = [self.of(constant) for constant in value.co_consts]
                return value.co_qualname, value.co_code.hex(), value.co_names, value.co_varnames, inner
            case FunctionType():
                cells = [_content(cell) for cell in value.__closure__ or ()]
                return self.of(value.__code__), [self.of(v) for v in (value.__defaults__, value.__kwdefaults__, *cells)]
            case MethodType():
                return self.of(value.__func__), self.of(value.__self__)
            case ReferenceType():
                return "reference", self.of(value())
            case partial():
                return [self.of(part) for part in (value.func, value.args, value.keywords)]
            case torch._ops.OpOverload() | torch._ops.OpOverloadPacket():
                return "operator", str(value)
        return self._as_pickled(value)

    def _as_pickled(self, value: Any) -> object:
        """Any other object as the class and the state that pickle would keep."""
        try:
            reduced = value.__reduce_ex__(2)
        except Exception as error:
            raise _NoKeyError from error
        if isinstance(reduced, str):
            return _class_of(value), reduced
        _, *state = reduced
        return _class_of(value), [self.of(list(part) if isinstance(part, Iterator) else part) for part in state]


def _read_by(function: Any, known: set[CodeType]) -> Iterator[object]:
    """The values of global variables that a function of the user's own reads, and of those that these call; the whole
    environment, where it reads that.

    Raises:
        _NoKeyError: it is no function of Python's.
    """
    while isinstance(function, (partial, MethodType)):
        function = function.func if isinstance(function, partial) else function.__func__
    if not isinstance(function, FunctionType):
        raise _NoKeyError
    code, named = function.__code__, function.__globals__
    if code in known or is_installed(code.co_filename):
        return
    known.add(code)
    names = frozenset(_names_in(code))
    if names & _ENVIRONMENT:
        yield sorted(os.environ.items())
    for name in sorted(names & named.keys()):
        value = named[name]
        if isinstance(value, FunctionType):
            yield from _read_by(value, known)
            continue
        if not isinstance(value, (ModuleType, type)):
            yield name, value
        for owner in filter(_is_own, _owners(value)):
            held = {key: vars(owner)[key] for key in sorted(names & vars(owner).keys())}
            yield name, {key: each for key, each in held.items() if isinstance(each, _TEXTS + (list, tuple, dict))}
            for each in held.values():
                yield from _read_by_own(getattr(each, "__func__", each), known)
    for cell in function.__closure__ or ():
        yield from _read_by_own(_content(cell), known)


def _owners(value: object) -> tuple[Any, ...]:
    """What has the attributes of a module, or those that a class or an object of it has of the class."""
    if isinstance(value, ModuleType):
        return (value,)
    return (value if isinstance(value, type) else type(value)).__mro__


def _read_by_own(value: object, known: set[CodeType]) -> Iterator[object]:
    if isinstance(value, (FunctionType, MethodType, partial)):
        yield from _read_by(value, known)


def _is_own(value: Any) -> bool:
    """Whether a module, or the one that a class is in, is the user's own."""
    module = value if isinstance(value, ModuleType) else sys.modules.get(value.__module__)
    path = getattr(module, "__file__", None)
    return path is not None and not is_installed(path)


def _names_in(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names_in(constant)


def _class_of(value: object) -> tuple[str, str]:
    return type(value).__module__, type(value).__qualname__


def _content(cell: Any) -> object:
    try:
        return cell.cell_contents
    except ValueError:  # not filled yet
        return None


def _tensor(value: torch.Tensor) -> tuple[object, ...]:
    return (*_class_of(value), tuple(value.shape), value.stride(), value.dtype, value.device.type, value.requires_grad)


def _numbers(value: torch.Tensor) -> str:
    if value.numel() > _MOST_NUMBERS or value.device.type != "cpu":
        raise _NoKeyError
    try:
        return hashlib.sha256(value.detach().reshape(-1).contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()
    except Exception as error:  # kinds of tensors that have none
        raise _NoKeyError from error


def _files(model: nn.Module) -> Iterator[tuple[str, str]]:
    """The files whose code the capture may depend on, with the digests of their content."""
    paths = set()
    for name, module in list(sys.modules.items()):
        path = getattr(module, "__file__", None)
        if path and name.partition(".")[0] not in _BY_VERSION and not is_installed(path):
            paths.add(path)
    for owner in {base for module in model.modules() for base in type(module).__mro__}:
        if owner.__module__.partition(".")[0] in _BY_VERSION:
            continue
        path = getattr(sys.modules.get(owner.__module__), "__file__", None)
        if path is None:
            raise _NoKeyError  # a class of a notebook
        paths.add(path)
    for path in sorted(paths):
        yield path, _content_digest(path)


def _content_digest(path: str) -> str:
    try:
        with open(path, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise _NoKeyError from error
