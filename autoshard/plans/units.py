"""Sizes and times for people."""

from __future__ import annotations

import re
from decimal import ROUND_CEILING, ROUND_HALF_EVEN, Context, Decimal
from fractions import Fraction

_UNITS = {"": 1, "B": 1}
_UNITS |= {
    f"{letter}{binary}B": base**power
    for power, letter in enumerate("KMGT", 1)
    for binary, base in (("i", 1024), ("", 1000))
}
_SHORT = ("B", "KiB", "MiB", "GiB", "TiB")
_SIZE = re.compile(r"(\d{1,15}(?:\.\d{1,9})?) ?([A-Za-z]*)", re.ASCII)


def parse_bytes(text: str) -> int:
    """``80GiB``, ``80 GB`` (1000s), ``512MiB``, or a number of bytes; parts of a byte are dropped.

    Raises:
        ValueError: it is none of these; the message lists the units.
    """
    match = _SIZE.fullmatch(text.strip())
    if re.fullmatch(r"-\s*[\d.].*", text.strip()):
        raise ValueError(f"cannot read the size {text!r}: a size is above zero, for example 80GiB")
    units = {name.lower(): size for name, size in _UNITS.items()}
    if match is None or match[2].lower() not in units:
        raise ValueError(
            f"cannot read the size {text!r}; write a number and a unit ({', '.join(filter(None, _UNITS))}), "
            "for example 80GiB"
        )
    return int(Fraction(match[1]) * units[match[2].lower()])


def format_bytes(size_bytes: int) -> str:
    """``1.5 MiB``, of four digits; whole numbers of bytes below one KiB."""
    return _short(size_bytes, ROUND_HALF_EVEN)


def format_enough(size_bytes: int) -> str:
    """The same rounded up: who gives a budget as it is written here gives no less."""
    return _short(size_bytes, ROUND_CEILING)


def _short(size_bytes: int, rounding: str) -> str:
    power = min(max(0, abs(size_bytes).bit_length() - 1) // 10, len(_SHORT) - 1)
    size = Context(prec=4, rounding=rounding).divide(Decimal(size_bytes), Decimal(1024**power))
    return f"{size.normalize():f} {_SHORT[power]}" if power else f"{size_bytes} B"


def format_seconds(seconds: float) -> str:
    """``12.5 ms``; four digits, in s, ms or us."""
    for unit, per_second in (("s", 1.0), ("ms", 1e3)):
        if seconds * per_second >= 1:
            return f"{seconds * per_second:.4g} {unit}"
    return f"{seconds * 1e6:.4g} us"


def format_gap(gap: float) -> str:
    """``0.13%``; of a gap that two digits do not show, the first one, such as ``0.0002%``."""
    return f"{gap:.2%}" if gap >= 5e-5 else f"{100 * gap:.1g}%"
