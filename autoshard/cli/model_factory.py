"""Models from the command line: ``FILE.py:factory`` names a function that returns a module and its example inputs."""

from __future__ import annotations

import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from cost_models.spelling import did_you_mean

from ..errors import CaptureError


class FactoryError(CaptureError):
    """There is no model to capture: the factory cannot be found, fails, or returns something else."""


ModelAndInputs = tuple[Any, tuple[Any, ...], dict[str, Any]]
"""The module, its positional and its keyword arguments."""


def load_factory(spec: str, **given: object) -> ModelAndInputs:
    """Runs the file of ``FILE.py:factory``, calls the function and gives what it returned.

    The function takes no arguments, or those ``given``, and returns ``(module, args)`` or ``(module, args, kwargs)``.
    The file runs as ``python FILE.py`` would run it: its folder is put in front of ``sys.path`` (and stays there, for
    imports inside the model), but ``__name__`` is not ``"__main__"``. A factory that wants the meta device enters it
    itself.

    Raises:
        FactoryError: the text has no colon, there is no such file or function, either raises (the message quotes the
            error and its line), or the value returned is neither of the two.
    """
    path_text, colon, name = spec.rpartition(":")
    if not colon or not path_text or not name:
        raise FactoryError(
            f"cannot read the model {spec!r}; write FILE.py:FUNCTION, for example examples/llama.py:demo"
        )
    path = Path(path_text)
    if not path.is_file():
        found = f"{path} is a folder" if path.is_dir() else f"there is no file {path}"
        raise FactoryError(f"cannot load the model {spec!r}: {found}")
    factory = _find(_run(path), name, path)
    for parameter in given:
        if parameter not in inspect.signature(factory).parameters:
            raise FactoryError(
                f"{name} in {path} takes no argument {parameter!r}; give it one: def {name}({parameter}=1)"
            )
    called = ", ".join(f"{parameter}={value!r}" for parameter, value in given.items())
    return _check(_guarded(lambda: factory(**given), f"{name}({called})", path), spec)


def _run(path: Path) -> ModuleType:
    """The file, run as a module."""
    module_spec = importlib.util.spec_from_file_location(f"autoshard_model_{path.stem}", path)
    if module_spec is None or module_spec.loader is None:
        raise FactoryError(f"cannot load {path}: it is not a Python file; its name must end in .py")
    module = importlib.util.module_from_spec(module_spec)
    folder = str(path.resolve().parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)
    sys.modules[module_spec.name] = module  # dataclasses and pickle look a class's module up there
    loader = module_spec.loader
    _guarded(lambda: loader.exec_module(module), str(path), path)
    return module


def _find(module: ModuleType, name: str, path: Path) -> Callable[[], object]:
    """The function of that name."""
    factory = vars(module).get(name)
    if callable(factory):
        return factory  # type: ignore[no-any-return]
    functions = sorted(
        key
        for key, value in vars(module).items()
        if inspect.isfunction(value) and value.__module__ == module.__name__ and not key.startswith("_")
    )
    found = f"{name!r} in {path} is no function" if factory is not None else f"{path} has no function {name!r}"
    raise FactoryError(f"{found}; it has {', '.join(functions) or 'none'}{did_you_mean(name, functions)}")


def _guarded(call: Callable[[], object], what: str, path: Path) -> object:
    """Calls the user's code; its failure becomes one sentence with the user's line."""
    try:
        return call()
    except (Exception, SystemExit) as error:
        raise FactoryError(f"{what} failed{_line(error, path)}: {type(error).__name__}: {error}") from error


def _line(error: BaseException, path: Path) -> str:
    """`` at FILE.py:12 (code)``: the innermost frame in the user's file, or the place of a syntax error."""
    if isinstance(error, SyntaxError) and error.lineno is not None:
        return f" at {error.filename}:{error.lineno}"
    frames = [f for f in traceback.extract_tb(error.__traceback__) if Path(f.filename).resolve() == path.resolve()]
    if not frames:
        return ""
    code = f" ({frames[-1].line})" if frames[-1].line else ""
    return f" at {path}:{frames[-1].lineno}{code}"


def _check(returned: object, spec: str) -> ModelAndInputs:
    """Checks the shape of what a factory returned; whether the module is one of torch, capture checks."""
    expected = "a factory returns (module, args) or (module, args, kwargs), for example model, (tokens,)"
    if not isinstance(returned, tuple) or len(returned) not in (2, 3):
        found = f"a tuple of {len(returned)}" if isinstance(returned, tuple) else _described(returned)
        raise FactoryError(f"{spec} returned {found}; {expected}")
    module, args, *rest = returned
    kwargs = rest[0] if rest else {}
    if not callable(module) or inspect.isclass(module):
        raise FactoryError(f"{spec} returned {_described(module)} in the place of the module; {expected}")
    if not isinstance(args, tuple | list):
        raise FactoryError(f"{spec} returned {_described(args)} in the place of args, a tuple; {expected}")
    if not isinstance(kwargs, Mapping) or not all(isinstance(key, str) for key in kwargs):
        raise FactoryError(f"{spec} returned {_described(kwargs)} in the place of kwargs, a dict by names; {expected}")
    return module, tuple(args), dict(kwargs)


def _described(value: object) -> str:
    return f"the class {value.__name__}" if inspect.isclass(value) else f"a value of type {type(value).__name__}"
