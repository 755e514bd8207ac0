"""The one reader of YAML: a document of mappings, lists and scalars, and nothing else of the language.

Plan files, constraints files and hardware profiles are read here, wherever they come from. What they never need and
what a hostile file would use is refused: anchors and aliases (by which a few lines stand for gigabytes), tags (which
name Python classes), directives, a second document, a key that stands twice, and more than ``MAX_DEPTH`` levels or
``MAX_NODES`` values. What a scalar is, the caller says: a plan's schema knows which are numbers, so that no name turns
into one; a profile has scalars of the core schema.

>>> read("bytes: 3.35e12", "plan", text_scalar)
{'bytes': '3.35e12'}
>>> read("bytes: 3.35e12", "profile", core_scalar)
{'bytes': 3350000000000.0}
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any, NoReturn, TypeAlias

import yaml

MAX_DEPTH = 16
"""Mappings and lists inside each other; a plan needs seven, and two more for each loop inside a loop."""
MAX_NODES = 1_000_000
"""Scalars, mappings and lists of one file; a plan of a thousand lines has about ten thousand."""
MAX_KEY_CHARS = 1000
"""Characters of a key as written; YAML itself ends at 1024."""

_KINDS = {
    "plan": ("a plan", frozenset({"autoshard_plan"})),
    "constraints": ("a file of constraints", frozenset({"autoshard_constraints"})),
    "profile": ("a hardware profile", frozenset({"version", "provenance"})),
}
"""What errors call each kind of file, and the keys that only files of it have together."""

Path: TypeAlias = tuple[str | int, ...]
"""The keys and positions that lead from the document to one of its values."""

Scalar: TypeAlias = Callable[[yaml.ScalarEvent], Any]

# The YAML 1.2 core schema. PyYAML's own reads 1.1: there 3.35e12 is text, 1:30 is 90 and 2026-11-20 is a date.
NULL = re.compile(r"~|null|")
BOOL = re.compile(r"true|false")
INT = re.compile(r"[-+]?[0-9]{1,30}")
FLOAT = re.compile(r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?|[-+]?\.inf|\.nan")


class YamlError(ValueError):
    """A text that :func:`read` refuses. It goes on where the name of the file ends: ``, line 3: the alias ...``, or
    `` is empty ...``.
    """


def text_scalar(event: yaml.ScalarEvent) -> str:
    """A scalar as the text that it is, whether in quotes or not."""
    return str(event.value)


def core_scalar(event: yaml.ScalarEvent) -> str | int | float | bool | None:
    """A scalar by the YAML 1.2 core schema: null, a boolean, a number, else text; text wherever it is in quotes."""
    text = str(event.value)
    if not event.implicit[0]:  # in quotes
        return text
    if NULL.fullmatch(text):
        return None
    if BOOL.fullmatch(text):
        return text == "true"
    if INT.fullmatch(text):
        return int(text)
    return float(text.replace(".inf", "inf").replace(".nan", "nan")) if FLOAT.fullmatch(text) else text


def shorten(text: str, chars: int = 500) -> str:
    """The beginning of a text that may be any part of a hostile file."""
    return text if len(text) <= chars else text[:chars] + "..."


def read(text: str, noun: str, scalar: Scalar) -> Any:
    """The one document of a text, as dicts, lists and what ``scalar`` makes of the scalars.

    Args:
        noun: what errors say that the file should hold: ``plan``, ``constraints`` or ``profile``.

    Raises:
        YamlError: it is not YAML, has more or less than one document, uses what is refused here, or is deeper or larger
            than the limits; the message names the line.
    """
    return _Reader(text, noun, scalar, None).document()


def of_another_kind(document: Any, noun: str) -> str:
    """Which file of ours a document is, where it is not the kind that was asked for: ``a plan``; else nothing.

    >>> of_another_kind({"autoshard_plan": "8"}, "profile"), of_another_kind({"autoshard_plan": "8"}, "plan")
    ('a plan', '')
    """
    keys = document.keys() if isinstance(document, dict) else frozenset()
    return next((said for kind, (said, own) in _KINDS.items() if kind != noun and own <= keys), "")


def line_of(text: str, path: Path) -> int | None:
    """The line, from 1, of the deepest value on ``path`` that the text has. Reads it again: errors are rare."""
    lines: dict[Path, int] = {}
    try:
        _Reader(text, "", text_scalar, lines).document()
    except YamlError:
        pass  # what stands before the fault has its lines
    return next((lines[path[:n]] for n in range(len(path), -1, -1) if path[:n] in lines), None)


class _Reader:
    """Builds the document from PyYAML's events, which cost no recursion and no more memory than the text.

    ``lines``, where it is given, is filled with the line of every value.
    """

    def __init__(self, text: str, noun: str, scalar: Scalar, lines: dict[Path, int] | None) -> None:
        self.noun = noun
        self.scalar = scalar
        self.lines = lines
        self.nodes = 0
        self.events = self._events(text)

    def document(self) -> Any:
        self._expect(yaml.StreamStartEvent)
        start = next(self.events)
        if isinstance(start, yaml.StreamEndEvent):
            raise YamlError(f" is empty; it should hold {'' if self.noun.endswith('s') else 'a '}{self.noun}")
        if isinstance(start, yaml.DocumentStartEvent) and (start.version or start.tags):
            self._refuse(start, f"YAML directives (%...) are not allowed in a {self.noun} file; remove them")
        node = self._node(next(self.events), ())
        self._expect(yaml.DocumentEndEvent)
        self._expect(yaml.StreamEndEvent)
        return node

    def _events(self, text: str) -> Iterator[yaml.Event]:
        loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
        try:
            yield from yaml.parse(text, Loader=loader)
        except yaml.MarkedYAMLError as error:
            mark = error.problem_mark or error.context_mark
            place = f", line {mark.line + 1}" if mark else ""
            said = ", ".join(part for part in (error.context, error.problem) if part)
            advice = f"if the file was cut short, make the {self.noun} again"
            if error.context == "while scanning an alias":
                advice = "put a name that begins with * in quotes"
            raise YamlError(f"{place} is not YAML: {said}; {advice}") from None
        except (yaml.YAMLError, ValueError, OverflowError) as error:  # ReaderError, and bad escapes in the pure loader
            raise YamlError(f" is not YAML: {shorten(str(error).partition(chr(10))[0])}") from None

    def _expect(self, kind: type[yaml.Event]) -> None:
        event = next(self.events)
        if not isinstance(event, kind):
            self._refuse(event, f"a second document starts here; a {self.noun} file has one")

    def _refuse(self, event: yaml.Event, why: str) -> NoReturn:
        raise YamlError(f", line {_line(event)}: {shorten(why)}")

    def _node(self, event: yaml.Event, path: Path) -> Any:
        if isinstance(event, yaml.AliasEvent):
            self._refuse(event, f"the alias *{event.anchor} is not allowed; put a name that begins with * in quotes")
        if not isinstance(event, yaml.ScalarEvent | yaml.MappingStartEvent | yaml.SequenceStartEvent):
            self._refuse(event, "a value is missing here")
        if event.anchor is not None:
            self._refuse(event, f"the anchor &{event.anchor} is not allowed in a {self.noun} file; remove it")
        if event.tag is not None:
            self._refuse(event, f"the tag {event.tag} is not allowed in a {self.noun} file; remove it")
        self.nodes += 1
        if self.nodes > MAX_NODES:
            self._refuse(event, f"the file has more than {MAX_NODES} values; it is no {self.noun}")
        if len(path) > MAX_DEPTH:
            self._refuse(event, f"the file is nested more than {MAX_DEPTH} deep; it is no {self.noun}")
        if self.lines is not None:
            self.lines.setdefault(path, _line(event))
        if isinstance(event, yaml.ScalarEvent):
            return self.scalar(event)
        return self._mapping(path) if isinstance(event, yaml.MappingStartEvent) else self._sequence(path)

    def _mapping(self, path: Path) -> dict[Any, Any]:
        mapping: dict[Any, Any] = {}
        written: set[str] = set()
        while not isinstance(event := next(self.events), yaml.MappingEndEvent):
            key = self._node(event, (*path, "?"))
            if not isinstance(event, yaml.ScalarEvent):
                self._refuse(event, "a key must be a name")
            text = str(event.value)
            if len(text) > MAX_KEY_CHARS:
                self._refuse(event, f"the name {text[:60]!r}... is longer than {MAX_KEY_CHARS} characters")
            if text in written:
                self._refuse(event, f"{text!r} stands here a second time; remove one of the two lines")
            written.add(text)
            if self.lines is not None:
                self.lines[(*path, text)] = _line(event)
            mapping[key] = self._node(next(self.events), (*path, text))
        return mapping

    def _sequence(self, path: Path) -> list[Any]:
        sequence: list[Any] = []
        while not isinstance(event := next(self.events), yaml.SequenceEndEvent):
            sequence.append(self._node(event, (*path, len(sequence))))
        return sequence


def _line(event: yaml.Event) -> int:
    return event.start_mark.line + 1 if event.start_mark is not None else 0
