"""Finds the line of a plan file in which the layout of a tensor or operator stands, for error messages."""

from __future__ import annotations

from collections.abc import Iterator

from .name_patterns import parse_pattern
from .yaml_text import Node, Path, compose, line_of


def line_of_decision(text: str, name: str) -> int | None:
    """The line, counted from 1, in which a parameter, buffer, input, output or operator has its layout.

    None where it has none, or the text is of an older format whose sections are others.
    """
    document = compose(text, "the plan file")
    if not isinstance(document, dict):
        return None
    given = document.get("repeats")
    repeats = {path: int(count) for path, count in given.items()} if isinstance(given, dict) else {}  # type: ignore[arg-type]
    for pattern, path in _patterns(document):
        try:
            if name in parse_pattern(pattern, repeats).names():
                return line_of(text, path)
        except ValueError:
            continue
    return None


def _patterns(document: dict[str, Node]) -> Iterator[tuple[str, Path]]:
    """Every name or pattern that a line of the file decides, with the keys that lead to the line."""
    for section in ("parameters", "buffers", "inputs", "outputs"):
        yield from ((key, (section, key)) for key in _mapping(document.get(section)))
    for phase in ("forward", "backward"):
        yield from (
            (key, ("operators", phase, key)) for key in _mapping(_mapping(document.get("operators")).get(phase))
        )
        lines = _mapping(document.get("followers")).get(phase)
        for i, line in enumerate(lines if isinstance(lines, list) else []):
            module, roles = _mapping(line).get("module"), _mapping(line).get("roles")
            for role in roles if isinstance(roles, list) else []:
                yield f"{module}/{role}", ("followers", phase, i)


def _mapping(node: Node | None) -> dict[str, Node]:
    return node if isinstance(node, dict) else {}
