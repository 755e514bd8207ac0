"""Constraints: what the user decides before the solver does. Each is a frozen value with a text form.

==============================================  ==================================================================
text                                            meaning
==============================================  ==================================================================
``NAME=LAYOUT``                                 a pin: the tensor has this layout (axes left out are replicated)
``NAME=(dp, None)``                             the same as a partition spec: for every dim what cuts it
``NAME=*, dp:S(0) -> *``                        an operator takes and gives these layouts, ``*`` is any
``NAME!=LAYOUT``                                the tensor has another layout than this
``alike NAME NAME ...``                         all these tensors have one layout
``only NAME tp:S(0)``                           on one axis, one of the placements named
``forbid NAME tp:S(0) tp:P``                    on one axis, none of the placements named
``forbid KINDS over tp of TENSORS [NAME]``      these collectives do not run over the axis for these tensors
``family tp=SCHEME``                            the axis is used as one of the known schemes uses it
``family dp=SCHEME gathering NAME ...``         the same, but what these operators read is gathered, and what they make
                                                is cut again: operators that mix rows, under a scheme that cuts them
``family tp=SCHEME leaving NAME ...``           the same, but these parameters are left to the solver: matrices that the
                                                others have no pair for, under a scheme that cuts layers
``recompute NAME``                              these operators of the forward are computed again in the backward
``checkpoint MODULE``                           as ``torch.utils.checkpoint`` around these modules: their operators are,
                                                but for those whose results are read outside
``recomputation GRANULARITY``                   what people compute again by hand: ``selective``, the core attention
                                                alone, or ``full``, every layer
``keep NAME``                                   these are not, whatever the others say
==============================================  ==================================================================

NAME is a glob pattern for the name of a parameter, an input, the result of an operator (by its name in the plan) or
``output.0``. A placement is ``R``, ``S(dim)``, ``P(sum)``, or ``S`` and ``P`` for any of that kind. KINDS are
``all_gather``, ``reduce_scatter``, ``all_reduce`` and ``all_to_all``, separated by commas, or ``collectives`` for all
of them. TENSORS are ``parameters``, ``gradients`` (of parameters), ``activations`` (all the rest) or ``tensors``.
SCHEME is one of ``ddp`` (or ``dp-only``), ``fsdp``, ``tp``, ``sp``, ``cp`` and ``ep``.

Partition specs are those of PyTorch/XLA's ``mark_sharding``: one entry per dim of the tensor, an axis by name or
number, several axes in parentheses, or None for a dim that is whole (:mod:`autoshard.constraints.partition_spec`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Literal, TypeVar

from cost_models.collective_kinds import REDISTRIBUTION_KINDS
from cost_models.spelling import closest, did_you_mean

from ..errors import ConstraintError
from ..layout import Layout, Placement, parse_layout
from ..mesh import Mesh
from .partition_spec import is_partition_spec, parse_partition_spec

TensorClass = Literal["parameters", "gradients", "activations", "tensors"]
TENSOR_CLASSES: tuple[TensorClass, ...] = ("parameters", "gradients", "activations", "tensors")

Scheme = Literal["ddp", "fsdp", "tp", "sp", "cp", "ep"]
SCHEMES: tuple[Scheme, ...] = ("ddp", "fsdp", "tp", "sp", "cp", "ep")
CUT_OF_INPUTS: dict[Scheme, str] = {"ddp": "the batch", "fsdp": "the batch", "ep": "the batch", "cp": "the sequence"}
"""What schemes cut of every input; the others cut layers."""
CUT_THE_BATCH = frozenset(scheme for scheme, cut in CUT_OF_INPUTS.items() if cut == "the batch")
Granularity = Literal["selective", "full"]
GRANULARITIES: tuple[Granularity, ...] = ("selective", "full")
SCHEME_ALIASES: dict[str, Scheme] = {"dp-only": "ddp"}

_VERBS = ("family", "only", "forbid", "alike", "recompute", "checkpoint", "recomputation", "keep")

_GATHERING = "gathering"
_LEAVING = "leaving"

_T = TypeVar("_T", bound=str)

_ENTRY = re.compile(r"(?P<axis>[A-Za-z_]\w*):(?P<any>S|P|R\b|S\(\d{1,3}\)|P\((?:sum|max|min)\))")
_ANY = {"S": Placement("S"), "P": Placement("P")}


@dataclass(frozen=True)
class Pin:
    """A parameter, input or operator result (``pattern`` matches its name) must have this layout.

    ``dims`` is the number of dims that it must have, None where the pin does not say (it is no partition spec).
    """

    pattern: str
    layout: Layout
    text: str
    dims: int | None = None


@dataclass(frozen=True)
class StrategyPin:
    """An operator takes and gives these layouts; None stands for any."""

    pattern: str
    inputs: tuple[Layout | None, ...]
    outputs: tuple[Layout | None, ...]
    text: str


@dataclass(frozen=True)
class Exclusion:
    """A parameter, input or operator result must have another layout than this."""

    pattern: str
    layout: Layout
    text: str


@dataclass(frozen=True)
class Alike:
    """All tensors that one of the patterns matches have one layout."""

    patterns: tuple[str, ...]
    text: str


@dataclass(frozen=True)
class PlacementRule:
    """On one axis, tensors of a name have one of these placements, or, where not ``allowed``, none of them.

    ``S`` without a dim and ``P`` without a reduction stand for all of their kind.
    """

    pattern: str
    axis: int
    placements: tuple[Placement, ...]
    allowed: bool
    text: str


@dataclass(frozen=True)
class CollectiveRule:
    """These kinds of collectives do not run over an axis for tensors of a class; ``pattern`` matches their names."""

    kinds: frozenset[str]
    axis: int
    tensors: TensorClass
    pattern: str
    text: str


@dataclass(frozen=True)
class AxisScheme:
    """An axis is used as a known scheme uses it: see :mod:`autoshard.constraints.schemes`. What operators read that a
    pattern of ``gathering`` matches, and what they make, may be moved in any way. So may parameters that one of
    ``leaving`` matches, and what their products read and make.
    """

    axis: int
    scheme: Scheme
    text: str
    gathering: tuple[str, ...] = ()
    leaving: tuple[str, ...] = ()

    def having_also(self, patterns: Iterable[str]) -> AxisScheme:
        """The same scheme, gathering for more operators, or, where it cuts layers, leaving more parameters."""
        cuts_rows = self.scheme in CUT_OF_INPUTS
        had = self.gathering if cuts_rows else self.leaving
        known = tuple(dict.fromkeys((*had, *patterns)))
        if known == had:
            return self
        word = _GATHERING if cuts_rows else _LEAVING
        text = f"{self.text.partition(f' {word} ')[0].rstrip()} {word} {' '.join(known)}"
        return replace(self, text=text, gathering=known) if cuts_rows else replace(self, text=text, leaving=known)


@dataclass(frozen=True)
class Recompute:
    """Operators of the forward are computed again in the backward, or kept; ``pattern`` matches their names, or, for
    ``checkpoint``, those of modules.
    """

    pattern: str
    verb: Literal["recompute", "checkpoint", "keep"]
    text: str


@dataclass(frozen=True)
class Recomputation:
    """What is computed again is what people choose by hand: see :mod:`autoshard.constraints.recomputations`."""

    granularity: Granularity
    text: str


Constraint = (
    Pin | StrategyPin | Exclusion | Alike | PlacementRule | CollectiveRule | AxisScheme | Recompute | Recomputation
)


def parse_constraint(text: str, mesh: Mesh) -> Constraint:
    """Reads any of the text forms above.

    Raises:
        ConstraintError: it is none of them.
        LayoutError: the layout of a pin cannot be read.
        MeshError: an axis that the mesh does not have.
    """
    words = text.split()
    match words:
        case ["family", entry]:
            return _axis_scheme(entry, mesh, text)
        case ["family", entry, "gathering", *patterns] if patterns:
            return replace(_axis_scheme(entry, mesh, text), gathering=tuple(patterns))
        case ["family", entry, "leaving", *patterns] if patterns:
            return replace(_axis_scheme(entry, mesh, text), leaving=tuple(patterns))
        case ["only", pattern, *entries] if entries:
            return _placement_rule(pattern, entries, True, mesh, text)
        case ["forbid", kinds, "over", axis, "of", tensors, *pattern] if len(pattern) <= 1:
            return _collective_rule(kinds, axis, tensors, pattern, mesh, text)
        case ["forbid", pattern, *entries] if entries:
            return _placement_rule(pattern, entries, False, mesh, text)
        case ["recompute" | "checkpoint" | "keep" as verb, pattern] if "=" not in text:
            return Recompute(pattern, verb, text)
        case ["recomputation", granularity] if "=" not in text:
            return Recomputation(_one_of(granularity, GRANULARITIES, "recomputation", text), text)
        case ["alike", *patterns] if len(patterns) >= 1 and "=" not in text:
            return Alike(tuple(patterns), text)
    if words and words[0] in _VERBS and "=" not in words[0]:
        raise ConstraintError(
            f"cannot read the constraint {text!r}; write 'only NAME tp:S(0)', 'forbid NAME tp:S(0)', "
            "'forbid all_gather over tp of activations', 'alike NAME NAME', 'family dp=fsdp', "
            "'family dp=ddp gathering NAME', 'family tp=tp leaving NAME', 'recompute NAME', 'checkpoint MODULE', "
            "'recomputation full' or 'keep NAME'"
        )
    if len(words) > 1 and "=" not in words[0] and not words[1].startswith(("=", "!=")):
        if meant := closest(words[0], _VERBS):
            raise ConstraintError(
                f"the constraint {text!r} begins with {words[0]!r}, which is no verb; did you mean {meant!r}?"
            )
    return _parse_decision(text, mesh)


def _parse_decision(text: str, mesh: Mesh) -> Pin | StrategyPin | Exclusion:
    """Reads ``NAME=LAYOUT``, ``NAME=LAYOUTS -> LAYOUTS`` or ``NAME!=LAYOUT``."""
    pattern, _, said = text.partition("=")
    if "->" in said:
        inputs, _, outputs = said.partition("->")
        return StrategyPin(pattern.strip(), _parse_any(inputs, mesh), _parse_any(outputs, mesh), text)
    if pattern.endswith("!") and pattern.strip("! "):
        return Exclusion(pattern[:-1].strip(), parse_layout(said, mesh), text)
    return parse_pin(text, mesh)


def _parse_any(text: str, mesh: Mesh) -> tuple[Layout | None, ...]:
    items = [item.strip() for item in text.split(",")] if text.strip() else []
    return tuple(None if item in ("*", "-") else parse_layout(item, mesh) for item in items)


def parse_pin(text: str, mesh: Mesh) -> Pin:
    """Reads ``layers.*.attention.wq.weight=dp:R tp:S(0)``, or ``...=(tp, None)``.

    Raises:
        ConstraintError: there is no ``=``.
        LayoutError: the layout cannot be read.
    """
    pattern, equals, layout = text.partition("=")
    if not equals or not pattern.strip():
        raise ConstraintError(f"cannot read the pin {text!r}; write NAME=LAYOUT, for example tokens='dp:S(0) tp:R'")
    if is_partition_spec(layout):
        spec, dims = parse_partition_spec(layout, mesh)
        return Pin(pattern.strip(), spec, text, dims)
    return Pin(pattern.strip(), parse_layout(layout, mesh), text)


def _axis_scheme(entry: str, mesh: Mesh, text: str) -> AxisScheme:
    axis, _, scheme = entry.partition("=")
    return AxisScheme(mesh.index(axis), _one_of(SCHEME_ALIASES.get(scheme, scheme), SCHEMES, "scheme", text), text)


def _placement_rule(pattern: str, entries: Sequence[str], allowed: bool, mesh: Mesh, text: str) -> PlacementRule:
    axes: dict[int, None] = {}
    placements = []
    for entry in entries:
        found = _ENTRY.fullmatch(entry)
        if found is None:
            raise ConstraintError(
                f"cannot read {entry!r} in the constraint {text!r}; write axis:R, axis:S(dim), axis:P(sum), or axis:S "
                "and axis:P for any of the kind"
            )
        axis, placement = mesh.index(found["axis"]), found["any"]
        axes[axis] = None
        placements.append(_ANY.get(placement) or parse_layout(entry, mesh)[axis])
    if len(axes) > 1:
        raise ConstraintError(f"the constraint {text!r} names several axes; write one constraint for each axis")
    return PlacementRule(pattern, next(iter(axes)), tuple(placements), allowed, text)


def _collective_rule(
    kinds: str, axis: str, tensors: str, pattern: Sequence[str], mesh: Mesh, text: str
) -> CollectiveRule:
    named = (
        REDISTRIBUTION_KINDS
        if kinds == "collectives"
        else tuple(_one_of(kind, REDISTRIBUTION_KINDS, "collective", text) for kind in kinds.split(","))
    )
    of = _one_of(tensors, TENSOR_CLASSES, "class of tensors", text)
    return CollectiveRule(frozenset(named), mesh.index(axis), of, pattern[0] if pattern else "*", text)


def _one_of(given: str, known: tuple[_T, ...], what: str, text: str) -> _T:
    for name in known:
        if name == given:
            return name
    raise ConstraintError(
        f"unknown {what} {given!r} in the constraint {text!r}; the choices are {', '.join(known)}"
        f"{did_you_mean(given, known)}"
    )


def matches(placement: Placement, wanted: Iterable[Placement]) -> bool:
    """Whether a placement is one of those wanted; ``S`` and ``P`` without more stand for all of their kind."""
    return any(placement == w or (placement.kind == w.kind and w in _ANY.values()) for w in wanted)


def check_constraints_match(constraints: Iterable[Constraint], names: Iterable[str], tensors: Iterable[str]) -> None:
    """Checks that every constraint names something.

    Args:
        names: of what has a layout: parameters, inputs, operators, results.
        tensors: of what can be redistributed: as ``names``, and further results of operators (``name:1``).

    Raises:
        ConstraintError: a pattern matches no name; the message suggests the nearest.
    """
    names = list(names)
    redistributed = list(tensors)
    for constraint in constraints:
        known = redistributed if isinstance(constraint, CollectiveRule) else names
        for pattern in patterns_of(constraint):
            if not any(fnmatchcase(name, pattern) for name in known):
                what = "pin" if isinstance(constraint, Pin | StrategyPin) else "constraint"
                raise ConstraintError(
                    f"the {what} {constraint.text!r} matches no parameter, input or operator"
                    + nearest_name(pattern, known)
                )


def patterns_of(constraint: Constraint) -> tuple[str, ...]:
    """The patterns for names that a constraint has."""
    match constraint:
        case AxisScheme():
            return constraint.gathering + constraint.leaving
        case Recompute() | Recomputation():
            return ()
        case Alike():
            return constraint.patterns
    return (constraint.pattern,)


def nearest_name(pattern: str, known: Sequence[str]) -> str:
    """``; the nearest name is ...``, for a pattern that matches nothing; empty where nothing is known."""
    found = closest(pattern, known, alike=0.0)
    return "" if found is None else f"; the nearest name is {found}"


def check_specs_fit(constraints: Iterable[Constraint], shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Checks that a partition spec has an entry for every dim of the tensors it is for, and no more.

    Raises:
        ConstraintError: it has not.
    """
    for pin in constraints:
        if isinstance(pin, Pin) and pin.dims is not None:
            for name, shape in shapes.items():
                if fnmatchcase(name, pin.pattern) and len(shape) != pin.dims:
                    raise ConstraintError(
                        f"the partition spec of {pin.text!r} has {pin.dims} entries, but {name} has the shape "
                        f"{list(shape)}; write one entry for each of its {len(shape)} dims"
                    )
