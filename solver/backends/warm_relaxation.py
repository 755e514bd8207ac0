"""The relaxation of a program that grows and in which ever other variables are held: HiGHS, from basis to basis.

The simplex method goes on from its last basis where bounds or rows were changed. A program that has grown is given to
HiGHS anew, with that basis: rows that are added to one that it has scaled it does not scale, and each solve of a deep
model (Llama with 126 layers, 405 billion parameters) then took ten times as long. On Llama-3-8B (8x8, all that may be
computed again) the first solve takes 0.4 CPU seconds, that with the first memory rows 1.3, and one with another
strategy held 0.1 to 1. HiGHS's presolve is off: it takes longer than it saves. OR-Tools' HiGHS keeps no basis.
"""

from __future__ import annotations

from collections.abc import Mapping

import highspy
import numpy as np

from .integer_program import FloatArray, Program
from .lazy import ProgramAnswer
from .mathopt import COST_UNITS

_OPTIMAL = highspy.HighsModelStatus.kOptimal
_NOTHING = (
    highspy.HighsModelStatus.kInfeasible,
    highspy.HighsModelStatus.kUnboundedOrInfeasible,
    highspy.HighsModelStatus.kObjectiveBound,
)


class WarmRelaxation:
    """Minimises a program whose variables are all continuous, again and again."""

    def __init__(self, program: Program, seed: int) -> None:
        self._highs = highspy.Highs()
        for option, value in (("output_flag", False), ("threads", 1), ("presolve", "off"), ("random_seed", seed)):
            self._highs.setOptionValue(option, value)
        self._scale = min(1.0, COST_UNITS / max(1.0, float(np.abs(program.costs).max(initial=0))))
        self._held: dict[int, float] = {}
        self._rows = self._columns = 0
        self._basis = highspy.HighsBasis()
        self.grow(program)

    def grow(self, program: Program) -> None:
        """Takes over what a program has more than the last one: variables and rows at the end."""
        scaled = program.scaled()
        rows, columns = len(scaled.upper), len(scaled.costs)
        costs = scaled.costs[self._columns :] * self._scale
        no_entries = np.zeros(0, np.int32)
        self._highs.addCols(
            len(costs), costs, np.zeros(len(costs)), np.ones(len(costs)), 0, no_entries, no_entries, np.zeros(0)
        )
        new = scaled.rows >= self._rows
        counts = np.bincount(scaled.rows[new] - self._rows, minlength=rows - self._rows)
        self._highs.addRows(
            rows - self._rows,
            scaled.lower[self._rows :],
            scaled.upper[self._rows :],
            int(new.sum()),
            (np.cumsum(counts) - counts).astype(np.int32),
            scaled.columns[new].astype(np.int32),
            scaled.values[new],
        )
        if self._rows:
            self._basis = self._highs.getBasis()
            self._highs.passModel(self._highs.getLp())
            self._go_on()
        self._rows, self._columns = rows, columns

    @property
    def basis(self) -> highspy.HighsBasis:
        """That of the last point."""
        return self._basis

    def minimise(
        self,
        held: Mapping[int, float],
        seconds: float | None,
        below: float = np.inf,
        basis: highspy.HighsBasis | None = None,
    ) -> ProgramAnswer:
        """The cheapest point at which some variables have given values, and its cost; neither where the time ended.

        Args:
            held: the value of every variable that is held; the others are between 0 and 1.
            seconds: how long it may take; None for no limit.
            below: what it must cost less than: a dearer one is as good as none, and not looked for to the end.
            basis: where to start from, perhaps of a smaller program: the last point by default.
        """
        if basis is not None and basis is not self._basis:
            self._basis = self._grown(basis)
            self._go_on()
        for column in self._held.keys() - held.keys():
            self._highs.changeColBounds(column, 0.0, 1.0)
        for column, value in held.items():
            if self._held.get(column) != value:
                self._highs.changeColBounds(column, value, value)
        self._held = dict(held)
        self._highs.setOptionValue("objective_bound", below * self._scale)
        if seconds is not None:
            self._highs.setOptionValue("time_limit", self._highs.getRunTime() + seconds)
        self._highs.run()
        status = self._highs.getModelStatus()
        if status in _NOTHING:
            self._go_on()  # from the last point there was: where there is none is far from any
            return ProgramAnswer(infeasible=True)
        if status != _OPTIMAL:
            return ProgramAnswer()
        self._basis = self._highs.getBasis()
        x: FloatArray = np.array(self._highs.getSolution().col_value)
        return ProgramAnswer(x, self._highs.getObjectiveValue() / self._scale)

    def _grown(self, basis: highspy.HighsBasis) -> highspy.HighsBasis:
        """A basis with what the program has more since then: variables at 0, rows that do not bind."""
        grown = highspy.HighsBasis()
        columns, rows = list(basis.col_status), list(basis.row_status)
        grown.col_status = columns + [highspy.HighsBasisStatus.kLower] * (self._columns - len(columns))
        grown.row_status = rows + [highspy.HighsBasisStatus.kBasic] * (self._rows - len(rows))
        grown.valid, grown.alien = basis.valid, False
        return grown

    def _go_on(self) -> None:
        """Starts the next solve from the last basis of a point, if there was any."""
        if self._basis.valid:
            self._highs.setBasis(self._basis)
