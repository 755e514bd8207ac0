"""The subset of YAML that plan files and constraints files are written in: mappings, lists and scalars; no anchors,
aliases, tags or directives.

Every scalar is read as text: the schema knows which are numbers, so that no name turns into one.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NoReturn

import yaml

from ..errors import PlanFileError

MAX_DEPTH = 16
"""Mappings and lists inside each other; a plan needs seven, and two more for each loop inside a loop."""
MAX_NODES = 1_000_000
"""Scalars, mappings and lists of one file; a plan of a thousand lines has about ten thousand."""
MAX_KEY_CHARS = 1000
"""Characters of a key as written; YAML itself ends at 1024."""

Node = str | dict[str, "Node"] | list["Node"]
Path = tuple[str | int, ...]

_PLAIN = re.compile(r"[A-Za-z_](?:[\w./*+()-]|:(?=[\w]))*", re.ASCII)
_PLAIN_KEY = re.compile(r"[A-Za-z_][\w./*{},-]*", re.ASCII)
_RESERVED = frozenset(("true", "false", "yes", "no", "on", "off", "y", "n", "null"))
_ESCAPED = re.compile('["\\\\\x00-\x1f\x7f-\xa0\xad\u2028\u2029\ufeff\ufffe\uffff]')
_SURROGATE = re.compile("[\ud800-\udfff]")


def quote(text: str) -> str:
    """A scalar for any place: as it is where YAML reads it back as the same text, else in quotes."""
    return text if _PLAIN.fullmatch(text) and text.lower() not in _RESERVED else _quoted(text)


def quote_key(text: str) -> str:
    """A scalar for the key of a line.

    Raises:
        PlanFileError: the key is longer than YAML allows.
    """
    key = text if _PLAIN_KEY.fullmatch(text) and text.lower() not in _RESERVED else _quoted(text)
    if len(key) > MAX_KEY_CHARS:
        raise PlanFileError(f"the name {text[:60]!r}... is longer than the {MAX_KEY_CHARS} characters of a YAML key")
    return key


def quote_flow_key(text: str) -> str:
    """A scalar for a key between braces, where commas and braces mean something.

    Raises:
        PlanFileError: the key is longer than YAML allows.
    """
    key = quote_key(text)
    return _quoted(text) if key == text and set("{},") & set(text) else key


def _quoted(text: str) -> str:
    """In double quotes, or in single quotes where that saves escapes."""
    if _SURROGATE.search(text):
        raise PlanFileError(f"{text!r} cannot be written to a plan file: it holds half of a surrogate pair")
    escaped = set(_ESCAPED.findall(text))
    if escaped and escaped <= {'"', "\\"}:
        return "'" + text.replace("'", "''") + "'"
    return '"' + _ESCAPED.sub(lambda m: f"\\u{ord(m[0]):04x}" if m[0] not in '"\\' else "\\" + m[0], text) + '"'


def number(value: float) -> str:
    """A float as its shortest exact decimal, with the point that YAML 1.1 readers need to see a number."""
    text = repr(float(value))
    return text if "." in text or "e" not in text else text.replace("e", ".0e")


def shorten(text: str, chars: int = 500) -> str:
    """The beginning of a text that may be any part of a hostile file."""
    return text if len(text) <= chars else text[:chars] + "..."


def compose(text: str, source: str, noun: str = "plan") -> Node:
    """The one document of a text; ``noun`` is what errors say that the file should hold.

    Raises:
        PlanFileError: it is not YAML, has more or less than one document, uses what the subset leaves out, names a key
            twice, or is deeper or larger than the limits. The message names ``source`` and the line.
    """
    return _Composer(text, source, noun).document()


def line_of(text: str, path: Path) -> int | None:
    """The line of the deepest node on ``path``, from 1. Reads the text again: errors are rare."""
    composer = _Composer(text, "")
    composer.lines = {}
    try:
        composer.document()
    except PlanFileError:
        pass
    return next((composer.lines[path[:n]] for n in range(len(path), -1, -1) if path[:n] in composer.lines), None)


class _Composer:
    """Builds the document from PyYAML's events, which cost no recursion and no more memory than the text."""

    def __init__(self, text: str, source: str, noun: str = "plan") -> None:
        self.source = source
        self.noun = noun
        self.nodes = 0
        self.lines: dict[Path, int] | None = None
        self.events = self._events(text)

    def document(self) -> Node:
        self._expect(yaml.StreamStartEvent)
        start = next(self.events)
        if isinstance(start, yaml.StreamEndEvent):
            raise PlanFileError(f"{self.source} is empty; it should hold a {self.noun}")
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
            raise PlanFileError(f"{self.source}{place} is not YAML: {said}; {advice}") from None
        except (yaml.YAMLError, ValueError, OverflowError) as error:  # ReaderError, and bad escapes in the pure loader
            raise PlanFileError(f"{self.source} is not YAML: {shorten(str(error).partition(chr(10))[0])}") from None

    def _expect(self, kind: type[yaml.Event]) -> None:
        event = next(self.events)
        if not isinstance(event, kind):
            self._refuse(event, f"a second document starts here; a {self.noun} file has one")

    def _refuse(self, event: yaml.Event, why: str) -> NoReturn:
        raise PlanFileError(f"{self.source}, line {_line(event)}: {shorten(why)}")

    def _node(self, event: yaml.Event, path: Path) -> Node:
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
            return str(event.value)
        return self._mapping(path) if isinstance(event, yaml.MappingStartEvent) else self._sequence(path)

    def _mapping(self, path: Path) -> Node:
        mapping: dict[str, Node] = {}
        while not isinstance(event := next(self.events), yaml.MappingEndEvent):
            key = self._node(event, (*path, "?"))
            if not isinstance(key, str):
                self._refuse(event, "a key must be a name")
            if len(key) > MAX_KEY_CHARS:
                self._refuse(event, f"the name {key[:60]!r}... is longer than {MAX_KEY_CHARS} characters")
            if key in mapping:
                self._refuse(event, f"{key!r} stands here a second time; remove one of the two lines")
            if self.lines is not None:
                self.lines[(*path, key)] = _line(event)
            mapping[key] = self._node(next(self.events), (*path, key))
        return mapping

    def _sequence(self, path: Path) -> Node:
        sequence: list[Node] = []
        while not isinstance(event := next(self.events), yaml.SequenceEndEvent):
            sequence.append(self._node(event, (*path, len(sequence))))
        return sequence


def _line(event: yaml.Event) -> int:
    return event.start_mark.line + 1 if event.start_mark is not None else 0
