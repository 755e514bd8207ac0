"""Where the constants of a profile come from, and how well they fit what was measured."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Residual:
    """Relative errors of a fit against measured seconds, ``abs(fit - measured) / measured``.

    Attributes:
        median: over the points.
        largest: over the points; at least the median.
        points: how many.
    """

    median: float
    largest: float
    points: int

    def __str__(self) -> str:
        return f"median {self.median:.0%}, largest {self.largest:.0%} of {self.points} points"


@dataclass(frozen=True)
class Provenance:
    """Where the constants of a profile come from. It is no part of any price, nor of the fingerprint.

    Attributes:
        sources: in words, where the constants come from.
        machine, date, command: what was measured, when (ISO, ``2026-11-20``) and how; empty where nothing was.
        versions: of the software that was measured, by name.
        collectives: residuals by mesh axis (or link) and kind of collective.
        kernels: residuals by kind of kernel (``matmul`` or ``matmul/bfloat16``).
        together: residuals of collectives beside kernels, by mesh axis and kind of collective.
        rows: residuals of different kernels in a row, ``alone`` and ``with a collective`` behind them.
    """

    sources: str
    machine: str = ""
    date: str = ""
    command: str = ""
    versions: Mapping[str, str] = field(default_factory=dict, hash=False)
    collectives: Mapping[str, Mapping[str, Residual]] = field(default_factory=dict, hash=False)
    kernels: Mapping[str, Residual] = field(default_factory=dict, hash=False)
    together: Mapping[str, Mapping[str, Residual]] = field(default_factory=dict, hash=False)
    rows: Mapping[str, Residual] = field(default_factory=dict, hash=False)

    def __str__(self) -> str:
        """A page for a reader: one fact a line, residuals last."""
        facts = [("sources", self.sources), ("machine", self.machine), ("date", self.date), ("command", self.command)]
        facts += [("versions", ", ".join(f"{name} {version}" for name, version in self.versions.items()))]
        facts += [(f"{axis} {kind}", str(r)) for axis, kinds in self.collectives.items() for kind, r in kinds.items()]
        facts += [(kind, str(residual)) for kind, residual in self.kernels.items()]
        together = [(f"{axis} {kind}", r) for axis, kinds in self.together.items() for kind, r in kinds.items()]
        facts += [(f"{name} beside kernels", str(residual)) for name, residual in together]
        facts += [(f"operators in a row, {name}", str(residual)) for name, residual in self.rows.items()]
        return "\n".join(f"{name}: {value}" for name, value in facts if value)

    def entries(self) -> dict[str, Any] | str:
        """As a profile file spells it: plain text where there is nothing but sources."""
        entries: dict[str, Any] = {
            "machine": self.machine,
            "versions": dict(self.versions),
            "date": self.date,
            "command": self.command,
            "residuals": {
                name: table
                for name, table in {
                    "collectives": _by_axis(self.collectives),
                    "kernels": _entries(self.kernels),
                    "together": _by_axis(self.together),
                    "rows": _entries(self.rows),
                }.items()
                if table
            },
        }
        entries = {name: value for name, value in entries.items() if value}
        return {"sources": self.sources} | entries if entries else self.sources


def _entries(residuals: Mapping[str, Residual]) -> dict[str, Any]:
    return {kind: vars(residual).copy() for kind, residual in residuals.items()}


def _by_axis(residuals: Mapping[str, Mapping[str, Residual]]) -> dict[str, Any]:
    return {axis: _entries(kinds) for axis, kinds in residuals.items()}
