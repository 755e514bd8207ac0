from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from autoshard.cli.model_factory import FactoryError, load_factory
from autoshard.errors import AutoshardError

SOURCE = '''\
"""A model file."""

import sys
from dataclasses import dataclass

import beside

WIDTH = 3


@dataclass
class Model:
    width: int

    def __call__(self, x):
        return x


def two():
    return Model(WIDTH), (1, 2)


def three():
    return Model(beside.WIDTH), [1], {"mask": 2}


def _hidden():
    return two()


def failing():
    width = WIDTH
    raise RuntimeError("no weights here")


def failing_elsewhere():
    return beside.fail()


def leaving():
    sys.exit("bye")


def with_arguments(width):
    return two()


def nothing(): return None
def one(): return (Model(1),)
def four(): return Model(1), (), {}, 4
def no_module(): return 3, ()
def module_class(): return Model, ()
def no_args(): return Model(1), 5
def no_kwargs(): return Model(1), (), [1]
def bad_kwargs(): return Model(1), (), {1: 2}
'''


@pytest.fixture
def model_file(tmp_path: Path) -> Iterator[Path]:
    path, modules = list(sys.path), set(sys.modules)
    (tmp_path / "beside.py").write_text("WIDTH = 4\n\n\ndef fail():\n    raise KeyError('lost')\n")
    (tmp_path / "model.py").write_text(SOURCE)
    yield tmp_path / "model.py"
    sys.path[:] = path
    for name in set(sys.modules) - modules:
        del sys.modules[name]


def test_a_factory_gives_module_arguments_and_keywords(model_file: Path) -> None:
    module, args, kwargs = load_factory(f"{model_file}:two")
    assert (module.width, args, kwargs) == (3, (1, 2), {})
    module, args, kwargs = load_factory(f"{model_file}:three")
    assert (module.width, args, kwargs) == (4, (1,), {"mask": 2})


def test_the_file_is_not_run_as_the_main_program(model_file: Path) -> None:
    model_file.write_text(SOURCE + "\n\nif __name__ == '__main__':\n    raise SystemExit(1)\n")
    load_factory(f"{model_file}:two")


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("tow", "has no function 'tow'; it has bad_kwargs, failing"),
        ("tow", "did you mean 'two'?"),
        ("WIDTH", "'WIDTH' in"),
        ("failing", 'model.py:33 (raise RuntimeError("no weights here")): RuntimeError: no weights here'),
        ("failing_elsewhere", "model.py:37 (return beside.fail()): KeyError: 'lost'"),
        ("leaving", "SystemExit: bye"),
        ("with_arguments", "TypeError: with_arguments() missing 1 required positional argument"),
        ("nothing", "returned a value of type NoneType; a factory returns (module, args) or (module, args, kwargs)"),
        ("one", "returned a tuple of 1; a factory returns"),
        ("four", "returned a tuple of 4; a factory returns"),
        ("no_module", "returned a value of type int in the place of the module"),
        ("module_class", "returned the class Model in the place of the module"),
        ("no_args", "returned a value of type int in the place of args"),
        ("no_kwargs", "returned a value of type list in the place of kwargs"),
        ("bad_kwargs", "returned a value of type dict in the place of kwargs, a dict by names"),
    ],
)
def test_a_factory_that_gives_no_model_says_why(model_file: Path, name: str, said: str) -> None:
    with pytest.raises(FactoryError, match=re.escape(said)):
        load_factory(f"{model_file}:{name}")


def test_names_with_underscore_are_found_but_not_listed(model_file: Path) -> None:
    load_factory(f"{model_file}:_hidden")
    with pytest.raises(FactoryError) as caught:
        load_factory(f"{model_file}:x")
    assert "_hidden" not in str(caught.value)


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("def broken(:\n", "model.py:1: SyntaxError"),
        ("import no_such_module_at_all\n", "model.py:1 (import no_such_module_at_all): ModuleNotFoundError"),
        ("x = 1\nx / 0\n", "model.py:2 (x / 0): ZeroDivisionError"),
    ],
)
def test_a_file_that_cannot_run_says_where(model_file: Path, source: str, said: str) -> None:
    model_file.write_text(source)
    with pytest.raises(FactoryError, match=re.escape(said)):
        load_factory(f"{model_file}:two")


@pytest.mark.parametrize("spec", ["", "model.py", ":two", "model.py:", ":"])
def test_a_text_that_names_no_function_says_how_to_write_one(spec: str) -> None:
    with pytest.raises(FactoryError, match=r"write FILE\.py:FUNCTION"):
        load_factory(spec)


def test_a_file_that_is_not_there_or_no_python_says_so(tmp_path: Path) -> None:
    with pytest.raises(FactoryError, match="there is no file"):
        load_factory(f"{tmp_path}/none.py:two")
    with pytest.raises(FactoryError, match="is a folder"):
        load_factory(f"{tmp_path}:two")
    (tmp_path / "model.txt").write_text("x")
    with pytest.raises(FactoryError, match=r"its name must end in \.py"):
        load_factory(f"{tmp_path}/model.txt:two")


def test_the_error_is_a_mistake_of_the_user() -> None:
    assert issubclass(FactoryError, AutoshardError)
    assert issubclass(FactoryError, ValueError)
