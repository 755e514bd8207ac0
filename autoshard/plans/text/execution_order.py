"""The order of execution in few lines: operators of one module run together, layers that run alike once.

``layers from 0 to 31`` is a loop; inside it ``layers.*`` is the layer of the round and ``layers.*+1`` the next one
(:mod:`autoshard.plans.text.layer_relative`). Backward loops run down: ``layers from 31 to 0``.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from decimal import Decimal
from itertools import groupby

from ..plan import Execution, OperatorEntry
from .layer_relative import Frame, absolute_names, relative_name
from .name_patterns import is_index, prefixes, split_name

MAX_NS = 10**18
"""The longest predicted time of an operator, 30 years."""

_LOOP = re.compile(r"(?P<prefix>.*) from (?P<first>\d{1,6}) to (?P<last>\d{1,6})", re.DOTALL | re.ASCII)


@dataclass(frozen=True)
class Run:
    """Operators of one module, one after the other: the module as its line names it, roles, nanoseconds."""

    module: str
    roles: tuple[tuple[str, int], ...]


@dataclass(frozen=True)
class Loop:
    """A body that runs once for each index after ``prefix``, from ``first`` to ``last``, up or down."""

    prefix: str
    first: int
    last: int
    body: tuple[Run | Loop, ...]

    @property
    def indices(self) -> range:
        """The index of each round."""
        step = 1 if self.last >= self.first else -1
        return range(self.first, self.last + step, step)


Block = tuple[Run | Loop, ...]


@dataclass(frozen=True)
class _Item:
    """An operator of the execution, with its name split into the components of its path and its role."""

    name: str
    ns: int
    components: tuple[str | None, ...]
    indices: tuple[int, ...]
    prefixes: tuple[str, ...]

    @classmethod
    def of(cls, name: str, ns: int) -> _Item:
        pattern, indices = split_name(name)
        return cls(name, ns, pattern.components, indices, prefixes(pattern))

    @property
    def role(self) -> str:
        return self.name.partition("/")[2]

    def likeness(self, level: int) -> tuple[object, ...]:
        """What is equal for this operator and the same operator of another layer: its name without the index at
        ``level``.
        """
        return self.components, self.role, self.ns, self.indices[:level], self.indices[level + 1 :]


@dataclass(frozen=True)
class _Rounds:
    """A :class:`Loop` in the making: its body are operators that are not put together to runs yet."""

    prefix: str
    first: int
    last: int
    body: tuple[_Item | _Rounds, ...]


def fold_execution(entries: Sequence[tuple[str, int]]) -> Block:
    """Names, each once, with their nanoseconds, in order; :func:`unfold_execution` gives them back."""
    return _written(_fold([_Item.of(name, ns) for name, ns in entries], 0), {})


def unfold_execution(block: Block, frame: Frame | None = None) -> Iterator[tuple[str, int]]:
    """The names and nanoseconds of a folded execution.

    Raises:
        ValueError: the name of a module cannot be read, or is more than one.
    """
    for part in block:
        if isinstance(part, Loop):
            for index in part.indices:
                yield from unfold_execution(part.body, {**(frame or {}), part.prefix: index})
        else:
            modules = absolute_names(part.module, frame or {}, {})
            if len(modules) != 1:
                raise ValueError(f"{part.module!r} names {len(modules)} modules; the order of execution needs one")
            yield from ((f"{modules[0]}/{role}", ns) for role, ns in part.roles)


def count_executed(block: Block) -> int:
    """How many operators a folded execution has, without unfolding it."""
    return sum(
        len(part.indices) * count_executed(part.body) if isinstance(part, Loop) else len(part.roles) for part in block
    )


def format_loop(loop: Loop) -> str:
    """The head of a loop: ``layers from 0 to 31``."""
    return f"{loop.prefix} from {loop.first} to {loop.last}"


def parse_loop(text: str, body: Block) -> Loop:
    """Reads the head of a loop.

    Raises:
        ValueError: it cannot be read, or a number has leading zeros.
    """
    match = _LOOP.fullmatch(text)
    if match is None or not (is_index(match["first"]) and is_index(match["last"])):
        raise ValueError(f"cannot read the loop {text!r}; write for example layers from 0 to 31")
    return Loop(match["prefix"], int(match["first"]), int(match["last"]), body)


def check_execution(execution: Sequence[Execution], operators: Sequence[OperatorEntry]) -> None:
    """Checks that an execution is empty, or runs every operator once, forward before backward.

    Raises:
        ValueError: it is not so, an operator's name has no slash, or a time is negative or endless.
    """
    if not execution:
        return

    def key(entry: Execution | OperatorEntry) -> tuple[str, str]:
        return entry.phase, entry.name

    run = Counter(map(key, execution))
    planned = set(map(key, operators))
    for said, names in (
        ("runs twice", {name for name, times in run.items() if times > 1}),
        ("runs, but has no strategy", run.keys() - planned),
        ("has a strategy, but never runs", planned - run.keys()),
        ("has no slash before its role", {name for name in run if "/" not in name[1]}),
        (
            "has a time below 0 or above 30 years",
            {(e.phase, e.name) for e in execution if not 0 <= e.predicted_ns <= MAX_NS},
        ),
    ):
        if names:
            phase, name = min(names)
            raise ValueError(f"the operator {name!r} of the {phase} {said}")


def format_ns(ns: int) -> str:
    """Nanoseconds as exact milliseconds: ``0.0231``."""
    return f"{Decimal(ns).scaleb(-6).normalize():f}"


def _fold(items: Sequence[_Item], level: int) -> list[_Item | _Rounds]:
    """Loops over the index at ``level`` of the names, and inside and between them over the next."""
    if all(len(item.indices) <= level for item in items):
        return list(items)
    places: dict[object, list[int]] = defaultdict(list)
    for place, item in enumerate(items):
        places[item.likeness(level)].append(place)
    parts: list[_Item | _Rounds] = []
    between: list[_Item] = []
    at = 0
    while at < len(items):
        length, rounds = _rounds_at(items, at, level, places)
        if rounds > 1:
            parts += _fold(between, level + 1)
            between = []
            first, last = (items[at + k * length].indices[level] for k in (0, rounds - 1))
            body = tuple(_fold(items[at : at + length], level + 1))
            parts.append(_Rounds(items[at].prefixes[level], first, last, body))
        else:
            between.append(items[at])
        at += length * rounds
    return parts + _fold(between, level + 1)


def _rounds_at(items: Sequence[_Item], at: int, level: int, places: dict[object, list[int]]) -> tuple[int, int]:
    """How long a body is that begins here, and how many rounds of it follow each other: (1, 1) if none repeats."""
    # Where 0.wq 0.wk 1.wq 1.wk 2.wq 2.wk run in this order and `at` is 0, the next operator like 0.wq is 1.wq, two
    # places on: the body may be two operators long, and the index rises by 1 from round to round. Another round follows
    # as long as the next two operators are like the last two and their index is one further: here there are three.
    later = [place for place in places[items[at].likeness(level)] if place > at][:1]
    if not later or len(items[at].indices) <= level:
        return 1, 1
    length = later[0] - at
    step = items[later[0]].indices[level] - items[at].indices[level]
    if abs(step) != 1 or any(
        len(item.indices) <= level or item.prefixes[level] != items[at].prefixes[level] for item in items[at : later[0]]
    ):
        return 1, 1
    rounds = 1
    while at + (rounds + 1) * length <= len(items) and all(
        items[place + length].likeness(level) == items[place].likeness(level)
        and items[place + length].indices[level] - items[place].indices[level] == step
        for place in range(at + (rounds - 1) * length, at + rounds * length)
    ):
        rounds += 1
    return (length, rounds) if rounds > 1 else (1, 1)


def _written(parts: Sequence[_Item | _Rounds], frame: Frame) -> Block:
    def module(part: _Item | _Rounds) -> str | None:
        return part.name.partition("/")[0] if isinstance(part, _Item) else None

    written: list[Run | Loop] = []
    for name, group in groupby(parts, key=module):
        if name is not None:
            roles = tuple((part.role, part.ns) for part in group if isinstance(part, _Item))
            written.append(Run(relative_name(name, frame), roles))
            continue
        for part in group:
            assert isinstance(part, _Rounds)
            body = _written(part.body, {**frame, part.prefix: part.first})
            written.append(Loop(part.prefix, part.first, part.last, body))
    return tuple(written)
