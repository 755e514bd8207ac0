"""The best mesh for a model: every shape bounded, those that can still win planned.

A shape takes up to three stages (:mod:`autoshard.mesh_search.branch_and_bound`):

1. its program is written; every operator at its cheapest strategy, with nothing sent, is a bound;
2. the program is solved without memory: the optimum is a bound for all plans that fit;
3. the plan is made, within the memory there is.

Shapes of one axis and two are searched together, best first. Those of more axes have large programs: they come one by
one, against the best plan so far.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

import numpy as np

from solver import Problem, Solution

from ..constraints import Constraints
from ..errors import BudgetError, ConstraintError, InfeasibleError, LayoutError, MeshError
from ..mesh import Mesh
from ..planning import Formulation, NothingFitsError, Planner
from ..plans import ShardingPlan
from ..plans.units import format_bytes
from .branch_and_bound import Answer, Cut, best_first
from .shapes import MOST_AXES, Shape, shapes_of

TOGETHER = 2
"""Up to how many axes shapes are searched together."""

Verdict: TypeAlias = Literal["best", "slower", "cut", "does not fit", "no plan"]
VERDICTS: tuple[Verdict, ...] = ("best", "slower", "cut", "does not fit", "no plan")


@dataclass(frozen=True, eq=False)
class Asked:
    """One batch of a model: a planner for it, on any mesh, and how many samples it has (1 where there is one batch)."""

    planner: Planner
    samples: int = 1


@dataclass(frozen=True, eq=False)
class Candidate:
    """A shape with one batch, and what became of it.

    Attributes:
        samples: of the batch, as :class:`Asked` has it.
        bound_ns: every plan of it takes at least that.
        plan: where it was planned.
        reason: why it has no plan.
        least_bytes: of one that does not fit, the smallest budget that was found to work.
    """

    shape: Shape
    samples: int
    verdict: Verdict
    bound_ns: int
    plan: ShardingPlan | None = None
    reason: str = ""
    least_bytes: int | None = None

    @property
    def cost_per_sample(self) -> float:
        """Nanoseconds of a sample: of its plan, or at least."""
        return (self.bound_ns if self.plan is None else self.plan.solver.cost_ns) / self.samples


@dataclass(frozen=True, eq=False)
class MeshSearch:
    """What became of every shape of so many devices: the best first, then those with a plan, those cut, the others."""

    devices: int
    candidates: tuple[Candidate, ...]

    @property
    def winner(self) -> Candidate:
        """The candidate whose plan takes least for a sample; of equal ones that of fewer axes."""
        return self.candidates[0]

    @property
    def plan(self) -> ShardingPlan:
        """The winner's plan."""
        assert self.winner.plan is not None
        return self.winner.plan


def search_meshes(
    asked: Sequence[Asked],
    devices: int,
    constraints: Callable[[Mesh], Constraints],
    *,
    most_axes: int = MOST_AXES,
    report: Callable[[str], None] = lambda said: None,
) -> MeshSearch:
    """Finds the mesh of so many devices, and the batch, on which a step takes least for a sample.

    Args:
        asked: the batches, each with its planner, all for one machine.
        constraints: what is decided already, on a mesh; a mesh on which it cannot be read has no plan.
        report: called with the shape and the stage as they start.

    Raises:
        MeshError: the number of devices is out of range, or the machine has no mesh of so many.
        BudgetError: no shape has a plan that fits; the message says what would be the least.
        InfeasibleError: no shape has a plan.
    """
    shapes = shapes_of(devices, asked[0].planner.profile, most_axes)
    starts = [_Start(shape, each, constraints, report) for shape in shapes for each in asked]
    together = [start for start in starts if start.shape.mesh.ndim <= TOGETHER]
    alone = [[start] for start in starts if start.shape.mesh.ndim > TOGETHER]
    found: list[Candidate] = []
    for entrants in (together, *alone):
        best = min((each.cost_per_sample for each in found if each.plan is not None), default=float("inf"))
        found += _candidates(entrants, best)
    return MeshSearch(devices, _ranked(found, devices, asked[0].planner.limit.budget_bytes))


def computation_ns(problem: Problem) -> int:
    """A bound of a program: every operator at its cheapest, and nothing is sent."""
    return sum(int(np.min(node.costs)) for node in problem.nodes)


def _candidates(entrants: Iterable[_Start], best: float) -> Iterator[Candidate]:
    for found in best_first(entrants, best):
        if isinstance(found, Answer):
            yield found.value
        else:
            assert isinstance(found, Cut) and isinstance(found.entrant, _Start | _Written | _Solved)
            yield found.entrant.cut()


def _ranked(found: Sequence[Candidate], devices: int, budget_bytes: int | None) -> tuple[Candidate, ...]:
    planned = [each for each in found if each.plan is not None]
    if not planned:
        raise _nothing(found, devices, budget_bytes)
    best = min(planned, key=lambda each: (each.cost_per_sample, each.shape.mesh.ndim))
    judged = [replace(each, verdict="best") if each is best else each for each in found]
    return tuple(sorted(judged, key=lambda each: (VERDICTS.index(each.verdict), each.cost_per_sample)))


def _nothing(found: Sequence[Candidate], devices: int, budget_bytes: int | None) -> Exception:
    short = [each for each in found if each.least_bytes is not None]
    if short and budget_bytes is not None:
        least = min(short, key=lambda each: each.least_bytes or 0)
        assert least.least_bytes is not None
        return BudgetError(
            f"no mesh of {devices} devices has a plan that fits {format_bytes(budget_bytes)} per rank: the smallest "
            f"budget found to work is {format_bytes(least.least_bytes)} ({least.least_bytes} bytes), on "
            f"{least.shape.mesh}; use more devices, a smaller batch, or --micro-batches"
        )
    first = found[0]
    return InfeasibleError(f"no mesh of {devices} devices has a plan; of {first.shape.mesh}: {first.reason}")


@dataclass(frozen=True, eq=False)
class _Start:
    """A shape of which nothing is known."""

    shape: Shape
    asked: Asked
    constraints: Callable[[Mesh], Constraints]
    report: Callable[[str], None]
    bound_ns: int = 0

    @property
    def bound(self) -> float:
        return self.bound_ns / self.asked.samples

    def cut(self) -> Candidate:
        return Candidate(self.shape, self.asked.samples, "cut", self.bound_ns)

    def lost(self, verdict: Verdict, reason: str, least_bytes: int | None = None) -> Answer[Candidate]:
        lost = Candidate(self.shape, self.asked.samples, verdict, self.bound_ns, None, reason, least_bytes)
        return Answer(lost, float("inf"))

    def next_stage(self) -> _Written | Answer[Candidate]:
        self.report(f"{self._named}: enumerating and pricing strategies")
        planner = replace(self.asked.planner, mesh=self.shape.mesh, report=self._say)
        try:
            formulation = planner.formulate(self.constraints(self.shape.mesh))
        except (ConstraintError, LayoutError, MeshError) as error:
            return self.lost("no plan", str(error))
        return _Written(self.bounded(computation_ns(formulation.problem)), planner, formulation)

    def bounded(self, bound_ns: int | None) -> _Start:
        """The same with a bound that is no lower."""
        return replace(self, bound_ns=max(self.bound_ns, bound_ns or 0))

    @property
    def _named(self) -> str:
        batch = f", {self.asked.samples} samples" if self.asked.samples > 1 else ""
        return f"{self.shape.mesh}{batch}"

    def _say(self, said: str) -> None:
        self.report(f"{self._named}: {said}")


@dataclass(frozen=True, eq=False)
class _Written:
    """A shape whose program is written."""

    start: _Start
    planner: Planner
    formulation: Formulation

    @property
    def bound(self) -> float:
        return self.start.bound

    def cut(self) -> Candidate:
        return self.start.cut()

    def next_stage(self) -> _Solved | Answer[Candidate]:
        try:
            solution = self.planner.solve(self.formulation)
        except InfeasibleError as error:
            return self.start.lost("no plan", str(error))
        return _Solved(self.start.bounded(solution.bound), self.planner, self.formulation, solution)


@dataclass(frozen=True, eq=False)
class _Solved:
    """A shape whose program without memory is solved."""

    start: _Start
    planner: Planner
    formulation: Formulation
    solution: Solution

    @property
    def bound(self) -> float:
        return self.start.bound

    def cut(self) -> Candidate:
        return self.start.cut()

    def next_stage(self) -> Answer[Candidate]:
        try:
            plan = self.planner.fitted(self.formulation, self.solution.choices)
        except NothingFitsError as error:
            return self.start.bounded(error.bound_ns).lost("does not fit", str(error), error.least_bytes)
        except (BudgetError, InfeasibleError) as error:
            return self.start.lost("no plan", str(error))
        bound = min(plan.solver.cost_ns, max(self.start.bound_ns, plan.solver.bound_ns))
        found = Candidate(self.start.shape, self.start.asked.samples, "slower", bound, plan)
        return Answer(found, found.cost_per_sample)
