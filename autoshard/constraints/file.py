"""Constraints from files and from Python: what the user decides, gathered, each with the place where it stands.

A file is YAML of the same safe subset as a plan (no anchors, aliases or tags; every scalar is text), for example::

    autoshard_constraints: 1
    mesh: "dp=2,tp=2"                        # optional: another mesh is then refused at once
    families: {tp: sp}                       # or a baseline of the whole mesh: families: fsdp+tp
    pins:
      tokens: "dp:S(0) tp:R"
      "layers.*.wq.weight": [tp, null]       # a partition spec: one entry per dim
    not: {output.0: "dp:R tp:R"}
    only: {"*.wo.weight": "tp:S"}
    forbid: {"*.norm.weight": "tp:S"}
    forbid_collectives: ["all_gather over tp of activations"]
    alike: [[embed.weight, head.weight]]
    checkpoint: ["layers.*"]                 # and recompute, keep: what the backward computes again
    recomputation: selective                 # or full: what people compute again by hand
    constraints: ["forbid layers.0.* dp:S"]  # any text form of autoshard.constraints
    memory: 60GiB                            # and memory_soft, optimizer: as for autoshard.plan

``docs/constraints.md`` explains it to people.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ..errors import AutoshardError, ConstraintError, InfeasibleError, LayoutError, MeshError, PlanFileError
from ..mesh import Mesh
from ..plans.text.yaml_text import Path, compose, line_of, of_another_kind, shorten
from .baselines import baseline
from .values import SCHEME_ALIASES, Constraint, parse_constraint

VERSION = "1"
MAX_FILE_BYTES = 4 << 20

Given = str | os.PathLike[str]
"""A constraint as text, or the path of a constraints file: a path object, or a text that ends in .yaml or .yml.

Beside the text forms of :mod:`autoshard.constraints` there is ``baseline NAME``: the families of a baseline,
and what it computes again.
"""


@dataclass(frozen=True)
class Constraints:
    """Constraints in the order given, and where those from files stand (``file.yaml, line 3``), by their text.

    ``budgets`` are what files say of ``memory``, ``memory_soft`` and ``optimizer``, as :func:`autoshard.plan` takes it.
    """

    values: tuple[Constraint, ...] = ()
    places: Mapping[str, str] = field(default_factory=dict)
    budgets: Mapping[str, str] = field(default_factory=dict)

    @property
    def texts(self) -> tuple[str, ...]:
        """Every constraint as :func:`parse_constraint` reads it, for example ``wq.weight=tp:S(0)``."""
        return tuple(constraint.text for constraint in self.values)

    @contextmanager
    def located(self) -> Iterator[None]:
        """Adds to what an error inside says the places of the constraints that it quotes."""
        try:
            yield
        except (ConstraintError, InfeasibleError) as error:
            message = str(error)
            found = dict.fromkeys(place for text, place in self.places.items() if repr(text) in message)
            places = f" ({'; '.join(found)})" if found else ""
            raise type(error)(message + places) from None


def gather_constraints(given: Given | Sequence[Given], mesh: Mesh) -> Constraints:
    """Reads constraints from texts and files; one that is given twice counts once.

    Raises:
        ConstraintError, LayoutError, MeshError: one cannot be read or names an axis that the mesh does not have; for a
            file the message says where.
    """
    found: dict[str, Constraint] = {}
    places: dict[str, str] = {}
    budgets: dict[str, str] = {}
    for item in [given] if isinstance(given, str | os.PathLike) else given:
        if _is_file(item):
            path = os.fspath(item)
            document, text = _document(path, mesh)
            for constraint, place in _constraints(document, text, path, mesh):
                found.setdefault(constraint.text, constraint)
                places.setdefault(constraint.text, place)
            for key, value in document.budgets.items():
                if budgets.setdefault(key, value) != value:
                    raise ConstraintError(f"{path} says {key}: {value}, another file says {budgets[key]}; give one")
        else:
            found.update((constraint.text, constraint) for constraint in _parse(str(item), mesh))
    return Constraints(tuple(found.values()), places, budgets)


def _parse(text: str, mesh: Mesh) -> tuple[Constraint, ...]:
    """One constraint, or for ``baseline fsdp+tp/full`` the family of every axis and what is computed again."""
    word, _, name = text.strip().partition(" ")
    if word != "baseline":
        try:
            return (parse_constraint(text, mesh),)
        except (LayoutError, MeshError) as error:
            raise type(error)(f"{error} (in the constraint {text!r})") from None
    schemes, *recomputation = name.strip().split("/")
    known = "+".join(SCHEME_ALIASES.get(part, part) for part in schemes.split("+"))
    found = baseline("/".join((known, *recomputation)), mesh)
    return tuple(parse_constraint(written, mesh) for written in found.constraints(mesh))


def _is_file(item: Given) -> bool:
    return not isinstance(item, str) or item.endswith((".yaml", ".yml"))


def _document(path: str, mesh: Mesh) -> tuple[_Document, str]:
    """A file as checked values, and as text."""
    text = _text(path)
    try:
        composed = compose(text, path, "constraints")
        if kind := of_another_kind(composed, "constraints"):
            raise ConstraintError(f"{path} holds no constraints: it is {kind}; name a file of constraints")
        document = _Document.model_validate(composed)
    except PlanFileError as error:
        raise ConstraintError(str(error)) from None
    except ValidationError as error:
        raise _explained(error, text, path) from None
    _check_mesh(document, mesh, text, path)
    return document, text


def _constraints(document: _Document, text: str, path: str, mesh: Mesh) -> Iterator[tuple[Constraint, str]]:
    """The constraints of a file with their places."""
    for where, entry in document.entries():
        line = line_of(text, where)
        place = f"{path}, line {line}" if line else path
        try:
            for written in entry if isinstance(entry, tuple) else (entry,):
                yield from ((constraint, place) for constraint in _parse(written, mesh))
        except (ConstraintError, LayoutError, MeshError) as error:
            raise type(error)(f"{place}: {error}") from None


def _text(path: str) -> str:
    try:
        with open(path, "rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
        if len(data) > MAX_FILE_BYTES:
            raise ConstraintError(f"{path} is larger than the {MAX_FILE_BYTES >> 20} MiB a constraints file may have")
        return data.decode()
    except UnicodeDecodeError as error:
        raise ConstraintError(f"{path} is not UTF-8 text ({error.reason} at byte {error.start})") from None
    except (OSError, ValueError) as error:
        if isinstance(error, AutoshardError):
            raise
        said = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise ConstraintError(f"cannot read the constraints {path}: {said}; check the path") from None


SpecEntry = str | tuple[str, ...]


class _Document(BaseModel):
    """A constraints file."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    autoshard_constraints: Literal["1"]
    mesh: str | None = None
    families: dict[str, str] | str = Field(default_factory=dict)
    pins: dict[str, str | tuple[SpecEntry, ...]] = Field(default_factory=dict)
    excluded: Annotated[dict[str, str], Field(alias="not")] = Field(default_factory=dict)
    only: dict[str, str] = Field(default_factory=dict)
    forbid: dict[str, str] = Field(default_factory=dict)
    forbid_collectives: tuple[str, ...] = ()
    alike: tuple[Annotated[tuple[str, ...], Field(min_length=1)], ...] = ()
    checkpoint: tuple[str, ...] = ()
    recompute: tuple[str, ...] = ()
    recomputation: str | None = None
    keep: tuple[str, ...] = ()
    constraints: tuple[str, ...] = ()
    memory: str | None = None
    memory_soft: Annotated[str | None, Field(pattern=r"^\d+(\.\d+)?$")] = None
    optimizer: str | None = None

    @property
    def budgets(self) -> dict[str, str]:
        """What the file says of ``memory``, ``memory_soft`` and ``optimizer``; keys that it lacks are absent."""
        given = {"memory": self.memory, "memory_soft": self.memory_soft, "optimizer": self.optimizer}
        return {key: value for key, value in given.items() if value is not None}

    def entries(self) -> Iterator[tuple[Path, str | tuple[str, ...]]]:
        """Every entry with its place: a text form, or several."""
        if isinstance(self.families, str):
            yield ("families",), f"baseline {self.families}"
        else:
            for axis, scheme in self.families.items():
                yield ("families", axis), f"family {axis}={scheme}"
        for name, layout in self.pins.items():
            yield ("pins", name), f"{name}={layout if isinstance(layout, str) else _spec(layout)}"
        for name, layout in self.excluded.items():
            yield ("not", name), f"{name}!={layout}"
        for section in ("only", "forbid"):
            for name, placements in getattr(self, section).items():
                yield (section, name), tuple(f"{section} {name} {entries}" for entries in _by_axis(placements))
        for i, text in enumerate(self.forbid_collectives):
            yield ("forbid_collectives", i), f"forbid {text}"
        for i, names in enumerate(self.alike):
            yield ("alike", i), f"alike {' '.join(names)}"
        for verb in ("checkpoint", "recompute", "keep"):
            for i, name in enumerate(getattr(self, verb)):
                yield (verb, i), f"{verb} {name}"
        if self.recomputation is not None:
            yield ("recomputation",), f"recomputation {self.recomputation}"
        for i, text in enumerate(self.constraints):
            yield ("constraints", i), text


def _spec(entries: tuple[SpecEntry, ...]) -> str:
    """A list of axes as the text of a partition spec."""
    written = [entry if isinstance(entry, str) else f"({', '.join(entry)})" for entry in entries]
    words = [{"null": "None", "~": "None", "": "None"}.get(entry, entry) for entry in written]
    return f"({', '.join(words)}{',' * (len(words) == 1)})"


def _by_axis(placements: str) -> list[str]:
    """Placements of several axes, each axis for itself."""
    axes: dict[str, list[str]] = {}
    for entry in placements.split():
        axes.setdefault(entry.partition(":")[0], []).append(entry)
    return [" ".join(entries) for entries in axes.values()] or [""]


def _check_mesh(document: _Document, mesh: Mesh, text: str, path: str) -> None:
    if document.mesh is None:
        return
    try:
        made_for = Mesh.parse(document.mesh)
    except MeshError as error:
        raise ConstraintError(f"{path}, line {line_of(text, ('mesh',))}: {error}") from None
    if made_for != mesh:
        raise MeshError(
            f"{path}, line {line_of(text, ('mesh',))}: the constraints are for the mesh {made_for}, but the plan is "
            f"for {mesh}; use others, or remove this line where they mean the same on both"
        )


def _explained(error: ValidationError, text: str, path: str) -> ConstraintError:
    """The first defect pydantic found, as a sentence with its place."""
    defects = error.errors(include_url=False)
    first = next((defect for defect in defects if defect["type"] == "extra_forbidden"), defects[0])
    keys = [field.alias or name for name, field in _Document.model_fields.items()]
    where = _existing(first["loc"], text)
    line = line_of(text, where)
    place = f"{path}, line {line}" if line else path
    if first["type"] == "model_type" or first["loc"] == ("autoshard_constraints",):
        return ConstraintError(
            f"{path} is no constraints file of this version: it has no line 'autoshard_constraints: {VERSION}'"
        )
    if first["type"] == "extra_forbidden":
        return ConstraintError(f"{place}: {first['loc'][-1]!r} is not known here; expected {', '.join(keys)}")
    found: Any = first["input"]
    shown = shorten(repr(found)) if isinstance(found, str) else f"a {'list' if isinstance(found, list) else 'mapping'}"
    expected = _EXPECTED.get(str(first["loc"][0]), first["msg"])
    return ConstraintError(f"{place}: found {shown} in {first['loc'][0]}; expected {expected}")


_EXPECTED = {
    "pins": "one line NAME: LAYOUT or NAME: [dp, null] for each",
    "not": "one line NAME: LAYOUT for each",
    "only": "one line NAME: PLACEMENTS for each, for example tp:S(0) tp:R",
    "forbid": "one line NAME: PLACEMENTS for each, for example tp:S(0)",
    "forbid_collectives": "a list of texts such as 'all_gather over tp of activations'",
    "alike": "a list of lists of names",
    "families": "{AXIS: SCHEME}, or the name of a baseline",
    "constraints": "a list of texts",
    "recomputation": "selective or full",
    "mesh": "axes and sizes, for example dp=2,tp=2",
    "memory": "a size, for example 60GiB",
    "memory_soft": "milliseconds per GiB above the budget, from 0 up",
    "optimizer": "the name of a policy, for example adamw",
}


def _existing(location: tuple[str | int, ...], text: str) -> Path:
    """The longest beginning of pydantic's location that is a place in the file (it adds the names of types)."""
    return next((location[:n] for n in range(len(location), 0, -1) if line_of(text, location[:n])), ())
