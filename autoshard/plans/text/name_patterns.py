"""Names of identical layers folded to one pattern, and patterns unfolded to the names again.

A name is a path of components joined by dots, and for operators a role after the first slash
(``layers.3.attention/mul.2``). Purely numeric components of the path are *indices*; the role is never folded.

A *pattern* is a name in which an index may be a choice of several:

``layers.*.w``
    every index of ``layers``; the file's ``repeats`` says how many there are, counted from 0;
``layers.{1-31}.w``, ``layers.{0,3-5}.w``
    the indices listed.

A component that contains ``*``, ``{``, ``}`` or a backslash itself is written with a backslash before it, so that
every name has a pattern and ``parse_pattern(format_pattern(p, r), r) == p``.
"""

from __future__ import annotations

import math
import re
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain, groupby, product
from typing import Generic, TypeVar

from ..natural_order import MOST_KEPT, natural_key

_INDEX = re.compile(r"0|[1-9][0-9]{0,5}")
_RUN = r"(?:0|[1-9][0-9]{0,5})"
_CHOICE = re.compile(rf"\{{{_RUN}(?:-{_RUN})?(?:,{_RUN}(?:-{_RUN})?)*\}}")
_SPECIAL = re.compile(r"[*{}\\]")

MAX_INDICES = 8
"""Indices of one name that can be folded; numeric components after these are taken literally."""

V = TypeVar("V", bound=Hashable)
Repeats = Mapping[str, int]
"""How many indices ``*`` stands for, by the path before it: ``{"layers": 32}``."""
Runs = tuple[range, ...]
"""A choice of indices: ascending ranges that do not overlap or touch."""


@dataclass(frozen=True)
class Pattern:
    """A set of names: ``components`` with None for each index, ``choices`` with the values of each, and the role.

    Invariant: one non-empty choice per None.
    """

    components: tuple[str | None, ...]
    choices: tuple[Runs, ...]
    role: str

    @property
    def count(self) -> int:
        """The number of names."""
        return math.prod(sum(len(run) for run in runs) for runs in self.choices)

    def names(self) -> list[str]:
        """The names, the last index running fastest."""
        text = ".".join("{}" if c is None else c.replace("{", "{{").replace("}", "}}") for c in self.components)
        return [text.format(*indices) + self.role for indices in product(*(chain(*runs) for runs in self.choices))]


@dataclass(frozen=True)
class Line(Generic[V]):
    """One line of a plan file: a pattern of names, and the value that all of them have, for example their layout."""

    pattern: Pattern
    value: V


def is_index(component: str) -> bool:
    """Whether a component of a path is a number that can be folded."""
    return _INDEX.fullmatch(component) is not None


@lru_cache(MOST_KEPT)
def split_name(name: str) -> tuple[Pattern, tuple[int, ...]]:
    """A name as a pattern of one name, and its indices."""
    path, slash, role = name.partition("/")
    components: list[str | None] = []
    indices: list[int] = []
    for component in path.split("."):
        if len(indices) < MAX_INDICES and is_index(component):
            indices.append(int(component))
            components.append(None)
        else:
            components.append(component)
    return Pattern(tuple(components), tuple((range(i, i + 1),) for i in indices), slash + role), tuple(indices)


def count_repeats(names: Iterable[str]) -> dict[str, int]:
    """How many layers there are after each path: one more than the largest index found there.

    >>> count_repeats(["layers.0.w", "layers.1.w"])
    {'layers': 2}
    """
    counts: dict[str, int] = {}
    for name in names:
        pattern, indices = split_name(name)
        for prefix, index in zip(prefixes(pattern), indices):
            counts[prefix] = max(counts.get(prefix, 0), index + 1)
    return counts


def fold(entries: Iterable[tuple[str, V]]) -> list[Line[V]]:
    """Names with their values, in as few lines as there can be: one line for each set of layers that share a value.

    The lines are in the natural order of their first names. The same set of entries gives the same lines.
    """
    groups: dict[tuple[tuple[str | None, ...], str, V], set[tuple[int, ...]]] = {}
    for name, value in entries:
        pattern, indices = split_name(name)
        groups.setdefault((pattern.components, pattern.role, value), set()).add(indices)
    lines = [
        Line(Pattern(components, box, role), value)
        for (components, role, value), indices in groups.items()
        for box in _boxes(indices)
    ]
    return sorted(lines, key=lambda line: natural_key(_first(line.pattern)))


def fold_names(names: Iterable[str]) -> str:
    """Names as one text of patterns.

    >>> fold_names(["layers.0", "layers.1", "head"])
    'head layers.{0-1}'
    """
    return " ".join(format_pattern(line.pattern, {}) for line in fold((name, None) for name in names))


def fold_in_order(entries: Sequence[tuple[str, V]]) -> list[Line[V]]:
    """As :func:`fold`, for entries whose order means something: the lines' names, one after the other, keep it."""

    def alike(entry: tuple[str, V]) -> Hashable:
        pattern, _ = split_name(entry[0])
        return pattern.components, pattern.role, entry[1]

    lines: list[Line[V]] = []
    for _, group in groupby(entries, key=alike):
        run = list(group)
        folded = fold(run)
        kept = [name for line in folded for name in line.pattern.names()] == [name for name, _ in run]
        lines += folded if kept else [Line(split_name(name)[0], value) for name, value in run]
    return lines


def format_pattern(pattern: Pattern, repeats: Repeats) -> str:
    """The text of a pattern; ``*`` where a choice is all of the ``repeats`` of its path."""
    written: list[str] = []
    choices = iter(zip(pattern.choices, prefixes(pattern)))
    for component in pattern.components:
        if component is not None:
            written.append(_escape(component))
            continue
        runs, prefix = next(choices)
        if len(runs) == 1 and len(runs[0]) == 1:
            written.append(str(runs[0].start))
        elif runs == (range(repeats.get(prefix, 0)),):
            written.append("*")
        else:
            written.append("{" + ",".join(_format_run(run) for run in runs) + "}")
    return ".".join(written) + pattern.role


def starred(pattern: Pattern, repeats: Repeats) -> list[str]:
    """The paths of which a pattern names all indices, so that they are written ``*``: ``layers`` for
    ``layers.{0-31}.w`` in a model of 32 layers.
    """
    return [
        prefix
        for runs, prefix in zip(pattern.choices, prefixes(pattern))
        if runs == (range(repeats.get(prefix, 0)),) and len(runs[0]) > 1
    ]


def parse_pattern(text: str, repeats: Repeats) -> Pattern:
    """Reads what :func:`format_pattern` writes.

    Raises:
        ValueError: a component cannot be read, or ``*`` follows a path that ``repeats`` does not have.
    """
    path, slash, role = text.partition("/")
    components: list[str | None] = []
    choices: list[Runs] = []
    for written in path.split("."):
        folds = written == "*" or _CHOICE.fullmatch(written) is not None
        if folds and len(choices) == MAX_INDICES:
            raise ValueError(f"{text!r} has more than {MAX_INDICES} indices")
        if written == "*":
            prefix = prefix_of(components)
            if prefix not in repeats:
                raise ValueError(f"{text!r} has * after {prefix!r}, and the section repeats has no {prefix!r}")
            choices.append((range(repeats[prefix]),))
        elif folds:
            choices.append(_parse_runs(written))
        elif len(choices) < MAX_INDICES and is_index(written):
            choices.append((range(int(written), int(written) + 1),))
        else:
            if not written.startswith("\\") and _SPECIAL.search(written):
                raise ValueError(f"cannot read {written!r} in {text!r}; write *, {{1-31}} or {{0,3-5}} for an index")
            components.append(written.removeprefix("\\"))
            continue
        components.append(None)
    return Pattern(tuple(components), tuple(choices), slash + role)


def _parse_runs(text: str) -> Runs:
    runs: list[range] = []
    for part in text[1:-1].split(","):
        first, _, last = part.partition("-")
        run = range(int(first), int(last or first) + 1)
        if not run or (runs and run.start < runs[-1].stop):
            raise ValueError(f"the indices {text!r} are not in ascending order")
        runs.append(run)
    return tuple(runs)


def _format_run(run: range) -> str:
    return str(run.start) if len(run) == 1 else f"{run.start}-{run.stop - 1}"


def _escape(component: str) -> str:
    return "\\" + component if _SPECIAL.search(component) else component


def prefix_of(components: Iterable[str | None]) -> str:
    """A path as ``repeats`` names it, with ``*`` for each index: ``layers.*.experts`` for (``layers``, None,
    ``experts``).
    """
    return ".".join("*" if c is None else _escape(c) for c in components)


def prefixes(pattern: Pattern) -> tuple[str, ...]:
    """The path before each index, indices in it written ``*``."""
    return _prefixes(pattern.components)


@lru_cache(MOST_KEPT)
def _prefixes(components: tuple[str | None, ...]) -> tuple[str, ...]:
    """Those of all layers, which have their components in common."""
    return tuple(prefix_of(components[:i]) for i, c in enumerate(components) if c is None)


def _first(pattern: Pattern) -> str:
    indices = iter(pattern.choices)
    return ".".join(str(next(indices)[0].start) if c is None else c for c in pattern.components) + pattern.role


def _boxes(indices: Iterable[tuple[int, ...]]) -> list[tuple[Runs, ...]]:
    """A set of index tuples as disjoint products of choices: heads with the same tails go together."""
    # Of (0, 0), (0, 1), (1, 0), (1, 1), (2, 0) the heads 0 and 1 have the same tails, 0 and 1; the head 2 has the tail
    # 0: two boxes, {0-1} x {0-1} and {2} x {0}.
    tails: dict[int, set[tuple[int, ...]]] = {}
    for index in indices:
        if not index:
            return [()]
        tails.setdefault(index[0], set()).add(index[1:])
    heads: dict[tuple[tuple[Runs, ...], ...], list[int]] = {}
    for head in sorted(tails):
        heads.setdefault(tuple(_boxes(tails[head])), []).append(head)
    return [(runs_of(group), *box) for boxes, group in heads.items() for box in boxes]


def runs_of(ascending: Iterable[int]) -> Runs:
    """Ascending indices as a choice."""
    runs: list[range] = []
    for index in ascending:
        if runs and runs[-1].stop == index:
            runs[-1] = range(runs[-1].start, index + 1)
        else:
            runs.append(range(index, index + 1))
    return tuple(runs)
