"""Sizes and times for people."""

from __future__ import annotations


def format_bytes(size_bytes: int) -> str:
    """``1.5 MiB``; whole numbers of bytes below one KiB."""
    size = float(size_bytes)
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if size < 1024 or unit == "TiB":
            break
        size /= 1024
    return f"{size_bytes} B" if unit == "B" else f"{size:.4g} {unit}" if size < 1000 else f"{size:.0f} {unit}"


def format_seconds(seconds: float) -> str:
    """``12.5 ms``; four digits, in s, ms or us."""
    for unit, per_second in (("s", 1.0), ("ms", 1e3)):
        if seconds * per_second >= 1:
            return f"{seconds * per_second:.4g} {unit}"
    return f"{seconds * 1e6:.4g} us"
