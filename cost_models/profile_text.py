"""The text of a profile file: read from disk within its size, parsed to plain data, and written from it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

from .errors import ProfileError
from .safe_yaml import BOOL, FLOAT, INT, NULL, YamlError, core_scalar, read

MAX_BYTES = 64 * 1024


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


def parse(text: str) -> Any:
    """What the text says: a mapping with numbers, booleans and text, where it is a profile.

    Raises:
        ProfileError: :func:`~cost_models.safe_yaml.read` refuses it; the message names the line.
    """
    try:
        return read(text, "profile", core_scalar)
    except YamlError as reason:
        raise ProfileError(f"the file{reason}") from None


def spell(value: dict[str, Any]) -> str:
    """The text of plain data: keys in their order, the innermost tables and lists on one line."""
    return str(yaml.dump(value, Dumper=_Dumper, sort_keys=False, width=110, default_flow_style=None))


class _Dumper(yaml.SafeDumper):
    """Writes what :func:`parse` reads back as the same value: no aliases, numbers as short as they are exact."""

    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}  # noqa: RUF012 (PyYAML's own table)

    def ignore_aliases(self, data: Any) -> bool:
        return True

    def represent_short(self, number: float) -> yaml.ScalarNode:
        short = f"{number:g}"
        text = short if float(short) == number else repr(number)
        return self.represent_scalar(_tag("float" if "." in text or "e" in text else "int"), text)


def _tag(kind: str) -> str:
    return f"tag:yaml.org,2002:{kind}"


# The dumper puts a text in quotes where it would be read as something else. PyYAML asks for the first characters that
# each kind can have, and matches from the beginning only.
for _kind, _pattern, _first in (
    ("null", NULL, ["~", "n", ""]),
    ("bool", BOOL, ["t", "f"]),
    ("int", INT, list("-+0123456789")),
    ("float", FLOAT, list("-+.0123456789")),
):
    _Dumper.add_implicit_resolver(_tag(_kind), re.compile(rf"(?:{_pattern.pattern})$"), _first)
_Dumper.add_representer(float, _Dumper.represent_short)
