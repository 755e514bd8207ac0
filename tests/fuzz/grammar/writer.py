"""Writes a program statement by statement, and runs each as it is written: one that raises is left out.

So a template need not know shapes: it may ask for what often fits, and what does not fit is dropped.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from torch import nn
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

import autoshard

from ..parts import Reversed
from ..session import Maker

T = TypeVar("T")
Accepts = Callable[[torch.Tensor], bool]

LARGEST = 1e5
"""No number of a program is larger, but for the infinities of a mask."""

MOST_ELEMENTS = 2000
_ORDER = ("float64", "float32", "float16", "bfloat16")


class Unsuited(Exception):
    """A template finds no operand that it could take."""


class Writer:
    """The lines written so far, and a world in which they have been run."""

    def __init__(self, draw: Callable[[Any], Any], dtype: torch.dtype, lengths: Sequence[int]) -> None:
        self.draw, self.dtype, self.lengths = draw, dtype, tuple(lengths)
        self.setup: list[str] = []
        self.forward: list[str] = []
        self.arguments: list[str] = []
        self.locals: list[str] = []
        self.inputs: list[str] = []
        self.parameters: list[str] = []
        self.buffers: list[str] = []
        self.modules: list[str] = []
        self.world: dict[str, Any] = {
            "torch": torch,
            "F": F,
            "nn": nn,
            "checkpoint": checkpoint,
            "autoshard": autoshard,
            "Reversed": Reversed,
            "make": Maker(7),
            "self": nn.Module(),
        }
        self._count = 0
        self._seen_dtypes = {dtype}
        self._read: set[str] = set()

    # -- drawing

    def integer(self, low: int, high: int) -> int:
        return int(self.draw(st.integers(low, high)))

    def pick(self, options: Sequence[T]) -> T:
        if not options:
            raise Unsuited
        return options[self.integer(0, len(options) - 1)]

    def chance(self, percent: int) -> bool:
        """True that often; False in the smallest program."""
        return self.integer(0, 99) >= 100 - percent

    def length(self) -> int:
        return self.pick(self.lengths)

    def shape(self, low: int = 0, high: int = 4) -> tuple[int, ...]:
        return tuple(self.length() for _ in range(self.integer(low, high)))

    def number(self) -> str:
        return self.pick(("2.0", "0.5", "-1.5", "3", "0.1"))

    # -- names and values

    def value(self, name: str) -> Any:
        return eval(name, self.world)

    def fresh(self, prefix: str) -> str:
        self._count += 1
        return f"{prefix}{self._count}"

    def names(self, accepts: Accepts) -> list[str]:
        """The tensors that fit, the newest first."""
        pools = (self.locals[::-1], self.inputs, self.parameters, self.buffers)
        return [name for pool in pools for name in pool if accepts(self.value(name))]

    def tensor(self, accepts: Accepts = lambda t: True) -> str:
        """One that fits: any, or, more often, one that nothing has read yet."""
        fitting = self.names(accepts)
        unread = [name for name in fitting if name in self.sinks()]
        return self.pick(unread if unread and self.chance(70) else fitting)

    def sinks(self) -> list[str]:
        """The locals that no statement reads, the newest first."""
        return [name for name in self.locals[::-1] if name not in self._read]

    def floating(self, low: int = 0, high: int = 9) -> str:
        return self.tensor(lambda t: t.is_floating_point() and low <= t.dim() <= high)

    def like(self, name: str) -> str:
        """One of the same shape and type: there already, or a new parameter."""
        value = self.value(name)
        if self.chance(40):
            return self.parameter(tuple(value.shape), value.dtype)
        return self.tensor(lambda t: t.shape == value.shape and t.dtype == value.dtype)

    def broadcastable(self, name: str) -> str:
        """One of the same type that broadcasts with it."""
        value = self.value(name)

        def fits(other: torch.Tensor) -> bool:
            pairs = zip(reversed(value.shape), reversed(other.shape))
            return other.dtype == value.dtype and all(a == b or 1 in (a, b) for a, b in pairs)

        if self.chance(30):
            kept = self.integer(0, value.dim())
            shape = [size if self.chance(80) else 1 for size in value.shape[value.dim() - kept :]]
            return self.parameter(tuple(shape), value.dtype)
        return self.tensor(fits)

    def dim(self, name: str) -> int:
        """A dim of a tensor, counted from either end."""
        dims = self.value(name).dim()
        if not dims:
            raise Unsuited
        return self.integer(0, dims - 1) - (dims if self.chance(40) else 0)

    def dims(self, name: str) -> tuple[int, ...]:
        """Some dims of a tensor, at least one."""
        dims = self.value(name).dim()
        chosen = tuple(d for d in range(dims) if self.chance(50)) or (self.dim(name),)
        return chosen

    # -- writing

    def parameter(self, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> str:
        """A parameter of a shape: a new one, or, now and then, one that is there."""
        dtype = dtype or self.dtype
        if not (dtype.is_floating_point or dtype.is_complex):
            raise Unsuited
        there = [n for n in self.parameters if (tuple(self.value(n).shape), self.value(n).dtype) == (shape, dtype)]
        if there and self.chance(40):
            return self.pick(there)
        if len(self.parameters) > 6 or torch.Size(shape).numel() > MOST_ELEMENTS:
            raise Unsuited
        name = self.fresh("self.p")
        frozen = ", requires_grad=False" if self.chance(8) else ""
        self.prepare(f"{name} = nn.Parameter({made(shape, dtype)}{frozen})")
        self.parameters.append(name)
        return name

    def buffer(self, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> str:
        if len(self.buffers) > 3 or torch.Size(shape).numel() > MOST_ELEMENTS:
            raise Unsuited
        key = self.fresh("s")
        hidden = ", persistent=False" if self.chance(25) else ""
        self.prepare(f'self.register_buffer("{key}", {made(shape, dtype or self.dtype)}{hidden})')
        self.buffers.append(f"self.{key}")
        return f"self.{key}"

    def module(self, expression: str) -> str:
        """A submodule, its parameters in the program's type.

        Raises:
            Unsuited: there is none of these sizes.
        """
        name = self.fresh("self.m")
        suffix = "" if self.dtype is torch.float32 or self.dtype.is_complex else f".to({self.dtype})"
        try:
            self.prepare(f"{name} = {expression}{suffix}")
        except Exception as error:
            raise Unsuited from error
        self.modules.append(name)
        return name

    def prepare(self, line: str) -> None:
        """Adds a line to ``__init__``."""
        self.run(line)
        self.setup.append(line)

    def run(self, text: str) -> None:
        exec(text, self.world)

    def let(self, expression: str) -> str:
        """Adds a local variable; its name.

        Raises:
            Unsuited: the expression cannot be evaluated, or gives numbers that no comparison could be made with.
        """
        name = self.fresh("v")
        self.say(f"{name} = {expression}")
        return name

    def say(self, text: str) -> None:
        """Adds statements to ``forward``. What they assign to is known from here on."""
        before = dict(self.world)
        try:
            self.run(text)
        except Exception as error:
            self.world = before
            raise Unsuited from error
        assigned = [name for name in re.findall(r"^\s*(v\d+)\b", text, re.MULTILINE) if name in self.world]
        for name in dict.fromkeys(assigned):
            if not self._is_tame(self.world[name]):
                self.world = before
                raise Unsuited
        self.forward.append(text)
        self._read |= set(re.findall(r"\bv\d+\b", text)) - set(assigned)
        for name in dict.fromkeys(assigned):
            if isinstance(self.world[name], torch.Tensor) and name not in self.locals:
                self.locals.append(name)

    def argument(self, shape: tuple[int, ...], dtype: torch.dtype | None = None, bound: int = 5) -> str:
        """A new tensor that the caller gives."""
        name = self.fresh("x")
        return self.given(name, made(shape, dtype or self.dtype, bound))

    def given(self, name: str, expression: str) -> str:
        line = f"{name} = {expression}"
        self.run(line)
        self.arguments.append(line)
        self.inputs.append(name)
        return name

    @property
    def precision(self) -> str:
        """The coarsest floating-point type of all that was computed."""
        for value in self.world.values():
            self._note(value)
        for value in (*self.world["self"].parameters(), *self.world["self"].buffers()):
            self._note(value)
        real = {str(torch.empty(0, dtype=d).real.dtype).removeprefix("torch.") for d in self._seen_dtypes}
        return max((name for name in real if name in _ORDER), key=_ORDER.index, default="float64")

    def _note(self, value: Any) -> None:
        for leaf in tree_leaves(value) if isinstance(value, torch.Tensor | tuple | list | dict) else ():
            if isinstance(leaf, torch.Tensor):
                self._seen_dtypes.add(leaf.dtype)

    def _is_tame(self, value: Any) -> bool:
        self._note(value)
        for leaf in tree_leaves(value):
            if isinstance(leaf, torch.Tensor):
                if leaf.numel() > MOST_ELEMENTS:
                    return False
                if leaf.is_floating_point() or leaf.is_complex():
                    known = leaf.detach()[leaf.detach() != -float("inf")]
                    if known.numel() and not bool((known.abs() < LARGEST).all()):
                        return False
        return True


def made(shape: tuple[int, ...], dtype: torch.dtype, bound: int = 5) -> str:
    """The text that makes a tensor."""
    sizes = ", ".join(map(str, shape))
    options = "" if dtype is torch.float64 else f"dtype={dtype}"
    if not (dtype.is_floating_point or dtype.is_complex or dtype is torch.bool):
        options += f", bound={bound}"
    return f"make({', '.join(part for part in (sizes, options) if part)})"
