"""The best mesh for a model: every shape bounded, those that can still win planned.

1. The program of a shape is written; every operator at its cheapest strategy, with nothing sent, is a bound.
2. Where that is below the best plan, the program is solved without memory, as far as until its bound is above the best
   plan: the optimum is a bound for all plans that fit.
3. Of the shapes of the lowest bounds plans are made, within the memory there is, until no bound is below the best
   plan (:mod:`autoshard.mesh_search.branch_and_bound`).

Shapes of one axis and two come first, then those of three axes and of four, whose programs are larger, each against the
best plan so far. Bounds, and the plans of one round, are worked out side by side
(:mod:`autoshard.mesh_search.side_by_side`); what is found does not depend on in how many processes.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

import numpy as np

from solver import Problem, Solution

from ..capture import Ref
from ..constraints import Constraints
from ..errors import BudgetError, ConstraintError, InfeasibleError, LayoutError, MeshError
from ..mesh import Mesh
from ..planning import Formulation, NothingFitsError, Planner, against_experts
from ..plans import ShardingPlan
from ..plans.units import format_bytes, format_enough
from .branch_and_bound import Answer, Cut, best_first
from .shapes import MOST_AXES, Shape, shapes_of
from .side_by_side import DoAll, side_by_side

TOGETHER = 2
"""Up to how many axes shapes are searched together; then those of three axes, then those of four."""

AT_ONCE = 2
"""How many shapes are planned in a round, whatever works it out."""

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
    processes: int = 1,
    experts: bool | None = False,
    report: Callable[[str], None] = lambda said: None,
) -> MeshSearch:
    """Finds the mesh of so many devices, and the batch, on which a step takes least for a sample.

    Args:
        asked: the batches, each with its planner, all for one machine.
        constraints: what is decided already, on a mesh; a mesh on which it cannot be read has no plan.
        processes: how many work on it; more than one only where this process has run no solver yet
            (:mod:`autoshard.mesh_search.side_by_side`).
        experts: whether each plan says how far it is from the best one that experts make on its mesh; None: only where
            the memory does not bind, as schemes are searched as long as the plan itself where it does.
        report: called with the shape and the stage as they start, and with the costs and bounds that are known.

    Raises:
        MeshError: the number of devices is out of range, the machine has no mesh of so many, or the constraints can be
            read on none.
        BudgetError: no shape has a plan that fits; the message says what would be the least.
        InfeasibleError: no shape has a plan.
    """
    shapes = shapes_of(devices, asked[0].planner.profile, most_axes)
    _check_read([shape.mesh for shape in shapes], devices, constraints)
    _check_memory(asked, devices)
    starts = [_Start(shape, each, constraints, experts) for shape in shapes for each in asked]
    rounds: dict[int, list[int]] = defaultdict(list)
    for k, start in enumerate(starts):
        rounds[max(TOGETHER, start.shape.mesh.ndim)].append(k)
    found: list[Candidate] = []
    with side_by_side(_Work(starts), processes, report) as do_all:
        for _, entrants in sorted(rounds.items()):
            best = min((each.cost_per_sample for each in found if each.plan is not None), default=float("inf"))
            found += _candidates(starts, entrants, best, do_all, report)
    return MeshSearch(devices, _ranked(found, devices, asked[0].planner.limit.budget_bytes))


def _check_read(meshes: Sequence[Mesh], devices: int, constraints: Callable[[Mesh], Constraints]) -> None:
    """Refuses before the long work what is decided on no mesh.

    Raises:
        MeshError: the constraints can be read on none; says why on the first.
    """
    said = []
    for mesh in meshes:
        try:
            constraints(mesh)
            return
        except (MeshError, LayoutError, ConstraintError) as error:
            said.append(f"{mesh}: {error}")
    raise MeshError(f"the constraints can be read on no mesh of {devices} devices; on {said[0]}")


def _check_memory(asked: Sequence[Asked], devices: int) -> None:
    """Refuses before the long work what cannot fit on any mesh.

    Raises:
        BudgetError: what is held at the optimizer's step is too much for the devices together.
    """
    limit = asked[0].planner.limit
    if limit.allowed_bytes is None or limit.soft_ms_per_gib is not None:
        return
    least = min(held_bytes(each.planner) for each in asked) // devices
    if least > limit.allowed_bytes:
        raise BudgetError(
            f"no mesh of {devices} devices has a plan that fits {format_bytes(limit.budget_bytes or 0)} per rank: "
            f"parameters, gradients and the state of {limit.optimizer} alone take {format_bytes(least)} of each "
            f"({least} bytes) if every one of them is cut over all; use more devices, or an optimizer that holds less"
        )


def held_bytes(planner: Planner) -> int:
    """Bytes of all parameters, of the gradients of those that are trained, and of the optimizer's state, each once."""
    graph, policy = planner.graph, planner.limit.policy
    metas = {node.name: graph.meta(Ref(i)) for i, node in graph.of_kind("parameter")}
    sizes = {name: (math.prod(meta.shape), meta.dtype.itemsize) for name, meta in metas.items()}
    trained = [sizes[name] for name, _ in graph.gradients]
    held = sum(count * size for count, size in (*sizes.values(), *trained))
    return held + sum(policy.state_bytes(count, size) for count, size in trained)


def computation_ns(problem: Problem) -> int:
    """A bound of a program: every operator at its cheapest, and nothing is sent."""
    return sum(int(np.min(node.costs)) for node in problem.nodes)


def _candidates(
    starts: Sequence[_Start],
    entrants: Sequence[int],
    best: float,
    do_all: DoAll[_Job, _Bounded | Candidate],
    report: Callable[[str], None],
) -> Iterator[Candidate]:
    """What becomes of some of the starts, which the entrants number, where a cost for a sample is known."""
    bounded: list[_Bounded] = []
    for known, found in enumerate(do_all([_Job(k, best) for k in entrants])):
        report(f"bounds of {known} of {len(entrants)} meshes known")
        if isinstance(found, Candidate):
            yield found
        else:
            bounded.append(found)

    def planned(chosen: Sequence[_Bounded]) -> Iterator[Answer[Candidate]]:
        report(f"planning on {' and '.join(starts[each.number].named for each in chosen)}")
        for found in do_all([_Job(each.number, best, each) for each in chosen]):
            assert isinstance(found, Candidate)
            yield Answer(found, float("inf") if found.plan is None else found.cost_per_sample)

    for each in best_first(bounded, planned, AT_ONCE, best):
        yield starts[each.entrant.number].cut(each.entrant.bound_ns) if isinstance(each, Cut) else each.value


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
            f"budget found to work is {format_enough(least.least_bytes)} ({least.least_bytes} bytes), on "
            f"{least.shape.mesh}; use more devices, a smaller batch, or --micro-batches"
        )
    first = found[0]
    return InfeasibleError(f"no mesh of {devices} devices has a plan; of {first.shape.mesh}: {first.reason}")


@dataclass(frozen=True, eq=False)
class _Bounded:
    """A shape, by its number, of which a bound is known; and the solution of its program without memory, if needed."""

    number: int
    samples: int
    bound_ns: int
    solution: Solution | None = None

    @property
    def bound(self) -> float:
        """Nanoseconds of a sample that a plan of it takes at least."""
        return self.bound_ns / self.samples


@dataclass(frozen=True, eq=False)
class _Job:
    """To bound the shape of a number, where a cost for a sample is known; to plan on it once it is ``bounded``."""

    number: int
    best: float
    bounded: _Bounded | None = None


@dataclass(frozen=True, eq=False)
class _Work:
    """Does the jobs of some shapes, and says so."""

    starts: Sequence[_Start]

    def __call__(self, job: _Job, report: Callable[[str], None]) -> _Bounded | Candidate:
        start = replace(self.starts[job.number], report=report)
        return start.bounded(job.number, job.best) if job.bounded is None else start.planned(job.bounded)


@dataclass(frozen=True, eq=False)
class _Start:
    """A shape with one batch."""

    shape: Shape
    asked: Asked
    constraints: Callable[[Mesh], Constraints]
    experts: bool | None
    report: Callable[[str], None] = lambda said: None

    def bounded(self, number: int, best: float) -> _Bounded | Candidate:
        """Its bound; where there can be no plan, why not. What cannot be below ``best`` is not solved."""
        self.report(f"{self.named}: enumerating and pricing strategies")
        try:
            formulation = self._formulation()
            found = _Bounded(number, self.asked.samples, computation_ns(formulation.problem))
            if found.bound >= best:
                return found
            _, solution = self._planner.solved(formulation, best * self.asked.samples)
        except (ConstraintError, LayoutError, MeshError, InfeasibleError) as error:
            return self._lost("no plan", str(error))
        bound_ns = max(found.bound_ns, solution.bound or 0)
        return replace(found, bound_ns=bound_ns, solution=None if solution.choices is None else solution)

    def planned(self, bounded: _Bounded) -> Candidate:
        """Its plan, within the memory there is."""
        assert bounded.solution is not None
        try:
            plan = self._planner.fitted(self._formulation(), free=bounded.solution)
        except NothingFitsError as error:
            bound = max(bounded.bound_ns, error.bound_ns)
            return self._lost("does not fit", str(error), bound, error.least_bytes)
        except (BudgetError, InfeasibleError) as error:
            return self._lost("no plan", str(error), bounded.bound_ns)
        binds = plan.solver.cost_ns > (bounded.solution.cost or 0)
        if self.experts or (self.experts is None and not binds):
            plan = against_experts(self._planner, plan, self._say)
        bound = min(plan.solver.cost_ns, max(bounded.bound_ns, plan.solver.bound_ns))
        return Candidate(self.shape, self.asked.samples, "slower", bound, plan)

    def cut(self, bound_ns: int) -> Candidate:
        """What it is where it can be no better than another one."""
        return Candidate(self.shape, self.asked.samples, "cut", bound_ns)

    def _lost(self, verdict: Verdict, reason: str, bound_ns: int = 0, least_bytes: int | None = None) -> Candidate:
        return Candidate(self.shape, self.asked.samples, verdict, bound_ns, None, reason, least_bytes)

    def _formulation(self) -> Formulation:
        return self._planner.formulate(self.constraints(self.shape.mesh))

    @property
    def _planner(self) -> Planner:
        return replace(self.asked.planner, mesh=self.shape.mesh, report=self._say)

    @property
    def named(self) -> str:
        """The mesh, and the batch where there are several."""
        batch = f", {self.asked.samples} samples" if self.asked.samples > 1 else ""
        return f"{self.shape.mesh}{batch}"

    def _say(self, said: str) -> None:
        self.report(f"{self.named}: {said}")
