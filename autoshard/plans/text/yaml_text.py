"""The text of a plan file: its scalars as they are written, and its document as it is read.

Every scalar is read as text: the schema knows which are numbers, so that no name turns into one. What of YAML is
allowed, :mod:`cost_models.safe_yaml` says.
"""

from __future__ import annotations

import re

from cost_models.safe_yaml import (
    MAX_KEY_CHARS,
    Path,
    YamlError,
    line_of,
    of_another_kind,
    read,
    shorten,
    text_scalar,
)

from ...errors import PlanFileError

__all__ = [
    "Node",
    "Path",
    "compose",
    "line_of",
    "number",
    "of_another_kind",
    "quote",
    "quote_flow_key",
    "quote_key",
    "shorten",
]

Node = str | dict[str, "Node"] | list["Node"]

_PLAIN = re.compile(r"[A-Za-z_](?:[\w./*+()-]|:(?=[\w]))*", re.ASCII)
_PLAIN_KEY = re.compile(r"[A-Za-z_][\w./*{},-]*", re.ASCII)
_RESERVED = frozenset(("true", "false", "yes", "no", "on", "off", "y", "n", "null"))
_ESCAPED = re.compile('["\\\\\x00-\x1f\x7f-\xa0\xad\u2028\u2029\ufeff\ufffe\uffff]')
_SURROGATE = re.compile("[\ud800-\udfff]")


def quote(text: str) -> str:
    """A text as a scalar of YAML: in quotes only where YAML would read it as something else without them.

    >>> quote("tokens"), quote("null"), quote("a: b")
    ('tokens', '"null"', '"a: b"')
    """
    return text if _PLAIN.fullmatch(text) and text.lower() not in _RESERVED else _quoted(text)


def quote_key(text: str) -> str:
    """A text as the key of a line: in quotes only where it must be.

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
    """A text in double quotes, or in single quotes where only double quotes and backslashes would need escapes."""
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


def compose(text: str, source: str, noun: str = "plan") -> Node:
    """The one document of a text; ``noun`` is what errors say that the file should hold.

    Raises:
        PlanFileError: :func:`~cost_models.safe_yaml.read` refuses it. The message names ``source`` and the line.
    """
    try:
        document: Node = read(text, noun, text_scalar)
    except YamlError as error:
        raise PlanFileError(f"{source}{error}") from None
    return document
