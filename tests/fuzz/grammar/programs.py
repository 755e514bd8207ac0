"""The strategy that writes a whole program."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st
from torch.utils._pytree import tree_leaves

from ..program import Program
from . import tables
from .effects import EFFECTS, REFUSED
from .layers import LAYERS
from .templates import fill
from .training import training
from .writer import Unsuited, Writer, made

MESHES = ("a=2", "a=3", "a=4", "a=2,b=2", "a=2,b=3")
_LENGTHS = (4, 2, 3, 6, 5, 1, 8, 7, 12, 17)
_DTYPES = (torch.float64,) * 12 + (torch.float32, torch.float32, torch.bfloat16, torch.float16, torch.complex128)


def _from(table: tuple[str, ...]) -> Callable[[Writer], None]:
    def write(w: Writer) -> None:
        w.let(fill(w, w.pick(table)))

    return write


def _one_of(writes: tuple[Callable[[Writer], Any], ...]) -> Callable[[Writer], None]:
    def write(w: Writer) -> None:
        w.pick(writes)(w)

    return write


def _nothing(w: Writer) -> None:
    """The first choice, so that hypothesis can take a statement away."""


_STATEMENTS: tuple[tuple[int, Callable[[Writer], None]], ...] = (
    (1, _nothing),
    (18, _from(tables.POINTWISE)),
    (24, _one_of(LAYERS)),
    (12, _from(tables.REDUCTIONS)),
    (13, _from(tables.VIEWS)),
    (9, _from(tables.REARRANGED)),
    (8, _from(tables.PRODUCTS)),
    (7, _from(tables.MASKS)),
    (4, _from(tables.NETWORKS)),
    (4, _from(tables.LOSSES)),
    (7, _one_of(EFFECTS)),
)
_KINDS = tuple(write for weight, write in _STATEMENTS for _ in range(weight))


@st.composite
def programs(draw: Any) -> Program:
    """Programs that run in one process: every statement has been run once as it was written."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with torch.random.fork_rng():  # what modules of the library are made with decides which statements fit
            torch.manual_seed(0)
            return _write(draw)


def _write(draw: Callable[[Any], Any]) -> Program:
    mesh, seed = draw(st.sampled_from(MESHES)), draw(st.integers(0, 2**16))
    dtype = draw(st.sampled_from(_DTYPES))
    lengths = tuple(draw(st.sampled_from(_LENGTHS)) for _ in range(draw(st.integers(1, 3))))
    w = Writer(draw, dtype, (*lengths, 0) if draw(st.integers(0, 99)) >= 97 else lengths)
    call = _calling(w)
    if w.chance(75):
        _attempt(w, _reading_a_parameter)
    for _ in range(draw(st.integers(1, 10))):
        _attempt(w, w.pick(_KINDS))
    if w.chance(7):
        _attempt(w, w.pick(REFUSED))
    result = _result(w)
    lines = training(w, _trains(w, result))
    return Program(
        setup=tuple(w.setup),
        signature=call.signature(),
        forward=(*call.unpacked(), *w.forward, f"return {result}"),
        arguments=tuple(w.arguments),
        call=call.arguments(),
        train=lines,
        mesh=mesh,
        seed=seed,
        precision="bfloat16" if any("bfloat16" in line for line in lines) else w.precision,
    )


def _attempt(w: Writer, write: Callable[[Writer], Any], times: int = 4) -> None:
    for _ in range(times):
        try:
            write(w)
            return
        except Unsuited:
            continue


@dataclass(frozen=True)
class _Call:
    """How the arguments are passed; read once they are all known.

    ``style`` is one of ``positional``, ``keywords``, ``keywords only``, ``defaults``, ``dict``, ``list``,
    ``starred`` and ``double starred``; ``twice`` is a parameter that gets the first argument again, ``scalar`` one that
    is a number, a text or a type, which the caller gives or leaves to its default.
    """

    inputs: list[str]
    style: str
    twice: str
    scalar: str
    number: str
    says_scalar: bool

    def _pairs(self) -> list[tuple[str, str]]:
        """Parameter and argument."""
        return [(name, name) for name in self.inputs] + [(self.twice, self.inputs[0])] * bool(self.twice)

    def signature(self) -> str:
        names = [name for name, _ in self._pairs()]
        last = [f"{self.scalar}={self.number}"] * bool(self.scalar)
        match self.style:
            case "dict" | "list":
                names = ["given"]
            case "starred":
                names = ["*given"]
            case "double starred":
                names, last = [names[0]], [*last, "**given"]
            case "keywords only":
                names = [names[0], *["*"] * (len(names) > 1), *names[1:]]
            case "defaults":
                names = [names[0], *(f"{name}=None" for name in names[1:])]
        return ", ".join((*names, *last))

    def unpacked(self) -> tuple[str, ...]:
        names = [name for name, _ in self._pairs()]
        match self.style:
            case "dict":
                return tuple(f'{name} = given["{name}"]' for name in names)
            case "list" | "starred":
                return (f"{', '.join(names)}, = given",)
            case "double starred":
                return tuple(f'{name} = given["{name}"]' for name in names[1:])
        return ()

    def arguments(self) -> str:
        pairs = self._pairs()
        last = [f'"{self.scalar}": {self.number}'] * (bool(self.scalar) and self.says_scalar)
        values = [value for _, value in pairs]
        match self.style:
            case "dict":
                values = ["{" + ", ".join(f'"{name}": {value}' for name, value in pairs) + "}"]
            case "list":
                values = [f"[{', '.join(values)}]"]
            case "keywords" | "keywords only" | "defaults" | "double starred":
                last = [f'"{name}": {value}' for name, value in pairs[1:]] + last
                values = values[:1]
        return f"({', '.join(values)},), {{{', '.join(last)}}}"


_STYLES = ("keywords", "keywords", "keywords only", "defaults", "dict", "list", "starred", "double starred")
_NUMBERS = ("2.5", "2", "True", "0.0", "-1", "'tanh'", "torch.float64")


def _calling(w: Writer) -> _Call:
    """The first arguments, and how they are passed."""
    w.argument(w.shape(1, 3))
    for _ in range(w.integer(0, 2)):
        if w.chance(12):
            _alias(w, w.pick(w.inputs))
        else:
            w.argument(w.shape(0, 3), w.pick((w.dtype, torch.bool, torch.int64)))
    number = ""
    style = w.pick(("positional",) * 14 + _STYLES)
    twice = w.fresh("x") if w.chance(4) else ""
    scalar = w.fresh("x") if w.chance(10) else ""
    if twice:
        w.world[twice] = w.world[w.inputs[0]]
        w.locals.append(twice)
    if scalar:
        number = w.pick(_NUMBERS)
        w.run(f"{scalar} = {number}")
        read = {"'": f"getattr(torch, {scalar})(%s)", "t": f"(%s).to({scalar})"}.get(number[0], f"%s * {scalar}")
        _attempt(w, lambda writer: writer.let(read % writer.tensor()))
    return _Call(w.inputs, style, twice, scalar, number, w.chance(50))


def _alias(w: Writer, name: str) -> str:
    """An argument that is another one, or a view of it."""
    of = w.pick((name, f"{name}.t()", f"{name}[:1]", f"{name}.view(-1)", f"{name}[..., 0]"))
    try:
        return w.given(w.fresh("x"), of)
    except Exception:
        return w.given(w.fresh("x"), name)


def _result(w: Writer) -> str:
    """What ``forward`` returns: a loss, or tensors in some container, views and repetitions among them."""
    _attempt(w, _reading_a_parameter)
    for _ in range(3):
        try:
            text = _returned(w)
            w.value(text)
            return text
        except Exception:  # a view that does not fit
            continue
    return _leaf(w)


def _returned(w: Writer) -> str:
    kind = w.integer(0, 99)
    if kind < 40:
        return w.let(_sum_of_all(w))
    if kind < 50:
        try:
            return w.let(fill(w, w.pick(tables.LOSSES)))
        except Unsuited:
            return _leaf(w)
    if kind < 54:
        return f"{_leaf(w)}{w.pick(('.max(0)', '.sort(-1)', '.chunk(2)', '.unbind(0)'))}"
    leaves = [_leaf(w) for _ in range(w.integer(1, 4))]
    if kind < 58:
        leaves.append(w.pick((f"{leaves[0]}.detach()", leaves[0], "3", "None", "'text'", "2.5")))
    elif kind < 66:
        leaves.append(_view_of(w, leaves[0]))
    elif kind < 71:
        leaves.append(w.pick((*w.inputs, *w.buffers)))
    elif kind < 74 and w.parameters:
        leaves.append(w.pick(w.parameters))
    style = w.integer(0, 99)
    if len(leaves) == 1 and style < 80:
        return leaves[0]
    if style < 60:
        return f"({', '.join(leaves)},)"
    if style < 75:
        return f"[{', '.join(leaves)}]"
    if style < 90:
        return "{" + ", ".join(f'"r{k}": {leaf}' for k, leaf in enumerate(leaves)) + "}"
    return f"({leaves[0]}, [{', '.join(leaves[1:])}])"


def _sum_of_all(w: Writer) -> str:
    """A loss into which everything flows that nothing else has read."""
    terms = []
    for name in w.sinks()[:5] or w.inputs[:1]:
        value = w.value(name)
        real = f"{name}.abs()" if value.is_complex() else name
        masked = f"{real}.clamp(min=-9)" if value.is_floating_point() and value.isinf().any() else real
        terms.append(f"{masked}.sum()" if value.is_floating_point() else f"{masked}.double().sum() * 0.1")
    return " + ".join(terms)


def _reading_a_parameter(w: Writer) -> None:
    """Lets something be trained."""
    if not any(_trainable(w)(w.value(name)) for name in w.locals):
        x = w.tensor(lambda t: t.dtype == w.dtype)
        w.let(f"{x} * {w.parameter(tuple(w.value(x).shape))}")


def _trainable(w: Writer) -> Callable[[torch.Tensor], bool]:
    return lambda t: t.is_floating_point() and t.requires_grad and not t.is_leaf


def _trains(w: Writer, result: str) -> bool:
    leaves = [leaf for leaf in tree_leaves(w.value(result)) if isinstance(leaf, torch.Tensor)]
    return any(leaf.requires_grad and (leaf.is_floating_point() or leaf.is_complex()) for leaf in leaves)


def _leaf(w: Writer) -> str:
    trained = [name for name in w.locals[::-1] if _trainable(w)(w.value(name))]
    unread = [name for name in w.sinks() if name in trained or w.chance(40)]
    if unread and w.chance(70):
        return w.pick(unread)
    if trained and w.chance(75):
        return w.pick(trained)
    return w.pick(w.locals[::-1] or w.inputs)


def _view_of(w: Writer, name: str) -> str:
    for _ in range(3):
        view = name + w.pick(("[0]", ".t()", ".view(-1)", ".unsqueeze(0)", "[..., :1]", ".flatten()"))
        try:
            w.value(view)
            return view
        except Exception:
            continue
    return name


__all__ = ["made", "programs"]
