"""YAML as data: the safe loader without what a profile never needs.

At most ``MAX_BYTES`` and ``MAX_DEPTH``; no anchors, aliases, tags or repeated keys. Scalars are read by the YAML 1.2
core schema, so that ``3.35e12`` is a number and a date is text.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from .errors import ProfileError

MAX_BYTES = 64 * 1024
MAX_DEPTH = 8


def text_of(path: Path) -> str:
    """The file as text.

    Raises:
        ProfileError: it is missing, not a plain file, unreadable, too large, or not UTF-8.
    """
    try:
        if not path.is_file():
            raise ProfileError("this is not a plain file" if path.exists() else "there is no such file")
        with path.open("rb") as file:
            content = file.read(MAX_BYTES + 1)
        if len(content) > MAX_BYTES:
            raise ProfileError(f"the file is larger than {MAX_BYTES} bytes; it should be a page of text")
        return content.decode("utf-8")
    except UnicodeDecodeError as reason:
        raise ProfileError(f"the file is not UTF-8 text ({reason.reason} at byte {reason.start})") from None
    except OSError as reason:
        raise ProfileError(f"the file cannot be read: {reason}") from None


class _Loader(yaml.SafeLoader):
    """The safe loader, without what a profile never needs: anchors, aliases, tags, repeated keys, deep nesting."""

    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}  # noqa: RUF012 (PyYAML's own table)
    _depth = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        peek: Callable[[], yaml.Event] = self.peek_event
        event = peek()
        line = event.start_mark.line + 1 if event.start_mark else 0
        if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None) is not None:
            raise ProfileError(f"line {line}: anchors and aliases (& and *) are not allowed")
        if getattr(event, "tag", None) is not None:
            raise ProfileError(f"line {line}: tags (!) are not allowed")
        if self._depth == MAX_DEPTH:
            raise ProfileError(f"line {line}: nested deeper than {MAX_DEPTH} levels")
        self._depth += 1
        node = super().compose_node(parent, index)
        self._depth -= 1
        return node

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise ProfileError(f"line {key.start_mark.line + 1}: a key must be a word")
            if key.value in seen:
                raise ProfileError(f"line {key.start_mark.line + 1}: the key {key.value!r} is there twice")
            seen.add(key.value)
        return super().construct_mapping(node, deep)


# The YAML 1.2 core schema. PyYAML's own reads 1.1: there 3.35e12 is text, 1:30 is 90 and 2026-11-20 is a date.
_Loader.add_implicit_resolver("tag:yaml.org,2002:null", re.compile(r"^(?:~|null|)$"), ["~", "n", ""])
_Loader.add_implicit_resolver("tag:yaml.org,2002:bool", re.compile(r"^(?:true|false)$"), ["t", "f"])
_Loader.add_implicit_resolver("tag:yaml.org,2002:int", re.compile(r"^[-+]?[0-9]{1,30}$"), list("-+0123456789"))
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^(?:[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?|[-+]?\.inf|\.nan)$"),
    list("-+.0123456789"),
)


def parse(text: str) -> Any:
    """What the text says.

    Raises:
        ProfileError: it is not one YAML document, or it uses what is not allowed here; the message names the line.
    """
    try:
        return yaml.load(text, Loader=_Loader)
    except ProfileError:
        raise
    except (yaml.YAMLError, ValueError, OverflowError) as reason:  # the last two: an escape beyond Unicode
        raise ProfileError(f"the file is not valid YAML: {' '.join(str(reason).split())}") from None


class _Dumper(yaml.SafeDumper):
    """Writes what the loader above reads back as the same value: no aliases, numbers as short as they are exact."""

    yaml_implicit_resolvers = _Loader.yaml_implicit_resolvers

    def ignore_aliases(self, data: Any) -> bool:
        return True

    def represent_short(self, number: float) -> yaml.ScalarNode:
        short = f"{number:g}"
        text = short if float(short) == number else repr(number)
        return self.represent_scalar("tag:yaml.org,2002:float" if "." in text or "e" in text else _INT, text)


_INT = "tag:yaml.org,2002:int"
_Dumper.add_representer(float, _Dumper.represent_short)


def spell(value: dict[str, Any]) -> str:
    """The text of plain data: keys in their order, the innermost tables and lists on one line."""
    return str(yaml.dump(value, Dumper=_Dumper, sort_keys=False, width=110, default_flow_style=None))
