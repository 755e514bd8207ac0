"""Cells of a table of published runs: what a row says, and what it does not, as reasons that name the column."""

from __future__ import annotations

import csv
import math
import re
from dataclasses import dataclass
from pathlib import Path

_NOT_SAID = re.compile(r"(not (stated|given|known|published|in the script)|unknown)\b.*|n/?a|[-?–—]*", re.I)
_AROUND_NUMBERS = re.compile(r"[,_~≈\s]")


class CannotBuild(Exception):
    """A row that is not predicted, and why."""


@dataclass(frozen=True)
class Row:
    """The cells of a row as they are written; a column that the file lacks is one that says nothing."""

    cells: dict[str, str]

    def text(self, column: str) -> str:
        """A cell without the blanks around it; empty where it says nothing.

        >>> Row({"recompute": " not stated"}).text("recompute"), Row({}).text("pp")
        ('', '')
        """
        said = self.cells.get(column)
        said = said.strip() if isinstance(said, str) else ""
        return "" if _NOT_SAID.fullmatch(said) else said

    def number(self, column: str) -> float | None:
        """A number above 0; None where there is none.

        >>> Row({"params": "8.03e9"}).number("params"), Row({"params": "many"}).number("params")
        (8030000000.0, None)
        """
        try:
            number = float(_AROUND_NUMBERS.sub("", self.text(column)))
        except ValueError:
            return None
        return number if 0 < number < math.inf else None

    def whole(self, column: str, default: int | None = None) -> int:
        """A whole number from 1 up.

        Raises:
            CannotBuild: it is none, or nothing is said and there is no default.
        """
        said, number = self.text(column), self.number(column)
        if not said:
            if default is None:
                raise CannotBuild(f"{column} is not stated")
            return default
        if number is None or number != int(number):
            raise CannotBuild(f"{column} is {said!r}, which is no whole number from 1 up")
        return int(number)


def read_rows(path: Path) -> list[Row]:
    """All rows of a file, each with an id: where it has none, or one that was there before, its number in the file."""
    with path.open(newline="", encoding="utf-8-sig") as file:
        rows = [{key.strip(): cell for key, cell in row.items() if key} for row in csv.DictReader(file)]
    seen = set[str]()
    for number, row in enumerate(rows, 1):
        name = (row.get("id") or "").strip() or f"row {number}"
        row["id"] = f"{name} (row {number})" if name in seen else name
        seen.add(row["id"])
    return [Row(row) for row in rows]
