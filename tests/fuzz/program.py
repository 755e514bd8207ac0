"""A program of the fuzzer as a value: a module, its arguments and a training, that print as one Python file."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType


@dataclass(frozen=True)
class Program:
    """Lines of Python, without their indentation.

    Attributes:
        setup: the end of the model's ``__init__``, where ``make`` makes tensors of fixed values.
        signature: the parameters of ``forward`` behind ``self``.
        forward: its body, the return included.
        arguments: makes the tensors of one call, again with ``make``.
        call: the positional and keyword arguments, ``(x0,), {"k": 2.0}``.
        train: what is done with the model; ``run`` is a :class:`tests.fuzz.session.Session`.
        mesh: the mesh it is run on.
        seed: what decides the strategy of every operator.
        precision: the coarsest floating-point type that takes part.
    """

    setup: tuple[str, ...]
    signature: str
    forward: tuple[str, ...]
    arguments: tuple[str, ...]
    call: str
    train: tuple[str, ...]
    mesh: str
    seed: int
    precision: str

    def __str__(self) -> str:
        return self.source

    @property
    def source(self) -> str:
        """The file."""
        return f"""\
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import autoshard
from tests.fuzz.parts import *

MESH = "{self.mesh}"
SEED = {self.seed}
PRECISION = "{self.precision}"


class Model(nn.Module):
    def __init__(self, make):
        super().__init__()
{_indented(self.setup, 8)}
    def forward(self{", " * bool(self.signature)}{self.signature}):
{_indented(self.forward, 8)}

def arguments(make):
{_indented(self.arguments, 4)}    return {self.call}


def train(run):
{_indented(self.train, 4)}"""


def load(path: Path) -> ModuleType:
    """A program's file as an imported module, so that errors can quote its lines and dynamo finds its names."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


def _indented(lines: Iterable[str], by: int) -> str:
    return "".join(f"{' ' * by}{line}\n" for text in lines for line in text.splitlines())
