"""Numbers of a column in one unit and with the same digits, so that a reader can add them up."""

from __future__ import annotations

from dataclasses import dataclass

SECONDS = (("s", 1.0), ("ms", 1e-3), ("us", 1e-6))
BYTES = tuple((unit, 1024.0**power) for power, unit in reversed(list(enumerate(("B", "KiB", "MiB", "GiB", "TiB")))))


@dataclass(frozen=True)
class Column:
    """How the numbers of a column are written: in ``unit``, of ``size`` seconds or bytes, with ``digits`` decimals."""

    unit: str
    size: float
    digits: int

    def __call__(self, value: float) -> str:
        """The number without its unit; what is there but too small to be seen is ``<0.01``.

        >>> [seconds_column(0.4355)(value) for value in (0.4355, 0.0672, 0.000001)]
        ['435.50', '67.20', '<0.01']
        """
        least = 10.0**-self.digits
        shown = value / self.size
        return f"<{least:.{self.digits}f}" if 0 < shown < least / 2 else f"{shown:.{self.digits}f}"


def seconds_column(whole_s: float) -> Column:
    """For times that add up to ``whole_s``: five digits of that."""
    return _column(whole_s, SECONDS, 5)


def bytes_column(whole_bytes: float) -> Column:
    """For sizes that add up to ``whole_bytes``: four digits of that."""
    return _column(whole_bytes, BYTES, 4)


def _column(whole: float, units: tuple[tuple[str, float], ...], digits: int) -> Column:
    unit, size = next((each for each in units if whole >= each[1]), units[-1])
    return Column(unit, size, 0 if unit == "B" else max(0, digits - len(str(int(whole / size)))))
