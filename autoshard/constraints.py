"""Pins: layouts that the user decides, written ``NAME=LAYOUT`` with a glob pattern for the name."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase

from .errors import ConstraintError
from .layout import Layout, parse_layout
from .mesh import Mesh


@dataclass(frozen=True)
class Pin:
    """A parameter, input or operator result (``pattern`` matches its name) must have this layout."""

    pattern: str
    layout: Layout
    text: str


def parse_pin(text: str, mesh: Mesh) -> Pin:
    """Reads ``layers.*.attention.wq.weight=dp:R tp:S(0)``.

    Raises:
        ConstraintError: there is no ``=``.
        LayoutError: the layout cannot be read.
    """
    pattern, equals, layout = text.partition("=")
    if not equals or not pattern.strip():
        raise ConstraintError(f"cannot read the pin {text!r}; write NAME=LAYOUT, for example tokens='dp:S(0) tp:R'")
    return Pin(pattern.strip(), parse_layout(layout, mesh), text)


def check_pins_match(pins: Iterable[Pin], names: list[str]) -> None:
    """Checks that every pin names something.

    Raises:
        ConstraintError: a pattern matches no name; the message suggests the nearest.
    """
    for pin in pins:
        if not any(fnmatchcase(name, pin.pattern) for name in names):
            near = difflib.get_close_matches(pin.pattern, names, n=1, cutoff=0.0)
            raise ConstraintError(
                f"the pin {pin.text!r} matches no parameter, input or operator"
                + (f"; the nearest name is {near[0]}" if near else "")
            )


def layouts_pinned(pins: Iterable[Pin], name: str) -> list[Pin]:
    """The pins that apply to a name."""
    return [pin for pin in pins if fnmatchcase(name, pin.pattern)]
