"""One model on one mesh of one machine: formulated, solved and written as a plan, under whatever constraints."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeAlias

from torch import nn

from cost_models import Profile, load_profile
from solver import Assignment, Solution, Status

from ..capture import CapturedGraph, annotated, as_arguments, call_text, capture, marked, micro_batched, recomputed
from ..constraints import CUT_OF_INPUTS, CUT_THE_BATCH, AxisScheme, Constraint, Constraints, Pin, StrategyPin
from ..errors import BudgetError, ConstraintError, InfeasibleError, StrategyWarning
from ..lowering import Results
from ..mesh import HybridMesh, Mesh
from ..plans import ShardingPlan
from ..plans.schedule import BUCKET_BYTES
from ..plans.simulation import overlapped_s
from ..plans.units import format_gap
from ..precision import AS_IT_IS, Precision
from ..strategies import Asked, Rulebook
from .blocking import ANY_PLAN, gathered_for, why_not
from .budget import SolverOptions, plan_within_budget, said_by
from .decided import decided
from .formulation import Formulation, Objective, formulate
from .interpretation import interpret
from .ladder import Hints, Search, on_any_schedule
from .limit import MemoryLimit
from .lone_matrices import lone_matrices, said_of_lone
from .mixing import mixers, said_of_mixers
from .possible import said_of_possible
from .solving import solve
from .whole import said_of_whole

BLAME_S = 20.0
"""Seconds for finding out which constraints contradict each other."""

MOST_RELAXED = 5
"""How many constraints are left out in turn to see what each of them costs in memory."""

UNPROVEN = 1e-6
"""The gap from which on a plan counts as not proven."""

Checkpointing: TypeAlias = Literal["free", "as-marked", "none"]
CHECKPOINTING: tuple[Checkpointing, ...] = ("free", "as-marked", "none")

MeshGiven: TypeAlias = Mesh | HybridMesh | str | Mapping[str, int]


def profile_of(hardware: str | Profile) -> Profile:
    """A profile, given as one or by the name of a shipped one or of a file.

    Raises:
        ProfileError: it cannot be read.
    """
    return hardware if isinstance(hardware, Profile) else load_profile(hardware)


@dataclass(frozen=True, eq=False)
class Planner:
    """What stays the same from one plan of a model to the next.

    ``model`` is the name that plans give it, ``call`` how it is called (:mod:`autoshard.capture.calls`); where it
    ``chooses_again``, a budget that binds lets the program decide what is computed again. ``report`` is told of better
    costs while it solves, from any thread, and of bounds where it ``says_bounds``. ``rulebook`` fills with the rules
    that its programs want, ``results`` with what operators make where plans are lowered, ``mixing`` with the operators
    that mix what a scheme cuts over so many ranks. ``asked`` are cuts in parts that are to be choices, beside those
    that the graph asks for. The other options are those of :func:`autoshard.plan`.
    """

    graph: CapturedGraph
    mesh: Mesh
    profile: Profile
    model: str
    call: str
    objective: Objective = "step-time"
    backend: str = "auto"
    time_limit_s: float | None = None
    tie_layers: bool = True
    chooses_again: bool = False
    limit: MemoryLimit = field(default_factory=MemoryLimit)
    bucket_bytes: int = BUCKET_BYTES
    gathers_ahead: bool = True
    report: Callable[[str], None] = lambda said: None
    says_bounds: bool = True
    rulebook: Rulebook = field(default_factory=Rulebook.of_process)
    results: Results = field(default_factory=Results)
    asked: Asked = ()
    mixing: dict[object, tuple[str, ...]] = field(default_factory=dict)

    @classmethod
    def of_model(
        cls,
        model: nn.Module,
        args: Any,
        kwargs: dict[str, Any] | None,
        mesh: MeshGiven,
        profile: Profile,
        *,
        name: str | None = None,
        checkpointing: Checkpointing = "free",
        micro_batches: int = 1,
        precision: Precision = AS_IT_IS,
        report: Callable[[str], None] = lambda stage: None,
        **options: Any,
    ) -> Planner:
        """A planner for a model, which is captured.

        Args:
            args, kwargs, mesh, name, checkpointing, micro_batches: as for :func:`autoshard.plan`.
            precision: the dtypes in which the step computes and reduces.
            report: called with the name of the stage as it starts.
            options: the planner's own.

        Raises:
            CaptureError, MeshError: the model is not one static graph, the mesh cannot be read.
            ValueError: an unknown checkpointing.
            InputError: a number of micro-batches that cannot be.
        """
        if checkpointing not in CHECKPOINTING:
            raise ValueError(f"unknown checkpointing {checkpointing!r}; choose one of {', '.join(CHECKPOINTING)}")
        args = as_arguments(args)
        report("capturing the training step")
        captured = capture(model, args, kwargs, precision=precision)
        call = call_text(model, args, kwargs or {})
        graph = micro_batched(captured, micro_batches)
        if checkpointing != "none":
            graph = recomputed(graph, marked(graph))
        options |= {
            "report": report,
            "model": name or type(model).__name__,
            "call": call,
            "chooses_again": checkpointing == "free",
        }
        if micro_batches > 1:
            options["bucket_bytes"] = 0  # whose schedule there is none of yet
        return cls(graph, Mesh.of(mesh), profile, **options)

    def having(self, **changes: Any) -> Planner:
        """The same planner with other options."""
        return replace(self, **changes)

    def plan(self, constraints: Constraints, report: Callable[[str], None] = lambda stage: None) -> ShardingPlan:
        """The cheapest plan that fits the memory there is, with what it needs of it.

        Args:
            report: called with the name of each stage as it starts.

        Raises:
            ConstraintError: a constraint names nothing, or cannot hold.
            InfeasibleError: the constraints leave no plan, or none was found in the time given.
            BudgetError: they do, but none that fits.
            StrategyWarning: a scheme cuts rows that an operator mixes, for which they are gathered, leaves matrices to
                the solver, or leaves some, or attention, whole on every rank.
        """
        while True:
            report("enumerating and pricing strategies")
            formulation = self.formulate(constraints, shortens=self.limit.allowed_bytes is None)
            for given, held in zip(constraints.values, formulation.constraints, strict=True):
                if isinstance(given, AxisScheme) and isinstance(held, AxisScheme) and given != held:
                    said = said_of_mixers if given.scheme in CUT_OF_INPUTS else said_of_lone
                    warnings.warn(said(self.graph, given, held), StrategyWarning, stacklevel=4)
            report("solving")
            try:
                with constraints.located():
                    found = on_any_schedule(self, formulation, Planner._planned, asks_experts=True)
            except _AsksLessError:
                continue
            plan = self._or_as_if_nothing_hid(found, constraints.values, Planner._planned)
            for scheme in formulation.constraints:
                if isinstance(scheme, AxisScheme):
                    if whole := said_of_whole(self.graph, scheme, plan, self.profile, self.rulebook):
                        warnings.warn(whole, StrategyWarning, stacklevel=4)
            return plan

    def _planned(self, formulation: Formulation, hints: Hints) -> ShardingPlan:
        options = SolverOptions(
            self.backend,
            self.time_limit_s,
            known=hints.known,
            bound=hints.bound_ns,
            leanest=hints.leanest,
            ask=hints.ask,
            settle=hints.settle,
            explains=hints.is_last,
            is_thorough=hints.is_last,
            report=self.report,
            says_bounds=self.says_bounds,
            results=self.results,
        )
        try:
            return plan_within_budget(
                formulation,
                self.limit,
                options,
                self.write,
                lambda: self._relaxed(formulation.constraints),
                self._wider(formulation.constraints),
            )
        except InfeasibleError as error:
            if str(error).startswith(Status.INFEASIBLE.value) and self._asks_less(formulation.constraints):
                raise _AsksLessError from None
            raise InfeasibleError(self._no_plan(formulation, str(error))) from None

    def fitted(
        self,
        formulation: Formulation,
        start: tuple[int, ...] | None = None,
        free: Solution | None = None,
        asks_experts: bool = False,
    ) -> ShardingPlan:
        """The cheapest plan of a program that fits.

        Args:
            start: a known assignment; what is found without memory is never worse.
            free: the solution of the program without memory, where that is known.
            asks_experts: whether baselines are looked at where nothing good is found.

        Raises:
            InfeasibleError, BudgetError: there is none; the message names no other budget or constraint that would do.
        """

        def search(planner: Planner, program: Formulation, hints: Hints) -> ShardingPlan:
            options = SolverOptions(
                planner.backend,
                planner.time_limit_s,
                start,
                free if program is formulation else None,
                hints.known,
                hints.bound_ns,
                hints.leanest,
                settle=hints.settle,
                explains=False,
                is_thorough=hints.is_last,
                report=planner.report,
                says_bounds=planner.says_bounds,
                results=planner.results,
            )
            wider = planner._wider(program.constraints)
            return plan_within_budget(program, planner.limit, options, planner.write, wider=wider)

        found = on_any_schedule(self, formulation, search, asks_experts)
        return self._or_as_if_nothing_hid(found, formulation.constraints, search)

    def _or_as_if_nothing_hid(
        self, found: ShardingPlan, constraints: Sequence[Constraint], search: Search[Planner]
    ) -> ShardingPlan:
        """Where what hides has a share of its price, the shorter of the plan that counts on all of it to hide, and of
        the one that counts on none: what hides depends on the schedule, which no program knows. The bound is the
        first's.
        """
        if self.objective != "overlapped-step-time" or self.profile.contention == 1 or not self.bucket_bytes:
            return found
        other = self.having(objective="step-time")
        try:
            plan = on_any_schedule(
                other, other.program(constraints, shortens=self.limit.allowed_bytes is None), search, asks_experts=False
            )
        except (InfeasibleError, BudgetError):
            return found
        plan = self._judged(replace(plan, objective=self.objective), found.solver.bound_ns)
        return min(found, plan, key=lambda each: each.solver.cost_ns)

    def _relaxed(self, constraints: Sequence[Constraint]) -> Iterator[tuple[str, Formulation]]:
        for k, constraint in enumerate(constraints[:MOST_RELAXED]):
            yield constraint.text, self.program([*constraints[:k], *constraints[k + 1 :]], self.chooses_again)

    def _wider(self, constraints: Sequence[Constraint]) -> Callable[[], Formulation] | None:
        return (lambda: self.program(constraints, chooses_again=True)) if self.chooses_again else None

    def formulate(self, constraints: Constraints, shortens: bool = False) -> Formulation:
        """The program under constraints; one that ``shortens`` may lack identical layers, and has no lives.

        Raises:
            ConstraintError: one names nothing, or cannot hold, alone or beside another; the message says where it
                stands.
        """
        with constraints.located():
            return self.program(constraints.values, shortens=shortens)

    def program(
        self, constraints: Sequence[Constraint], chooses_again: bool = False, shortens: bool = False
    ) -> Formulation:
        """The program under constraints that hold together; one that ``chooses_again`` decides what is computed again,
        one that ``shortens`` may lack identical layers. Its schemes gather for the operators that mix what they cut of
        every input.

        Raises:
            ConstraintError: one names nothing, or cannot hold, alone or beside another.
        """
        return formulate(
            self.graph,
            self.mesh,
            self.profile,
            objective=self.objective,
            constraints=self._gathering(constraints),
            tie_layers=self.tie_layers,
            chooses_again=chooses_again,
            policy=self.limit.policy,
            bucket_bytes=self.bucket_bytes,
            gathers_ahead=self.gathers_ahead,
            rulebook=self.rulebook,
            asked=self.asked,
            shortens=shortens,
        )

    def _gathering(self, constraints: Sequence[Constraint]) -> list[Constraint]:
        """Constraints, whose schemes gather for the operators that mix what they cut of every input."""
        found: dict[AxisScheme, AxisScheme] = {}
        schemes = [each for each in constraints if isinstance(each, AxisScheme)]
        for scheme in sorted(schemes, key=lambda each: each.scheme == "cp"):  # of what rows a rank has
            cut_rows = [each for each in found.values() if each.scheme in CUT_THE_BATCH]
            others = cut_rows if scheme.scheme == "cp" else []
            key = tuple(map(self._key, (scheme, *others)))
            if key not in self.mixing:
                self.mixing[key] = mixers(self.graph, scheme, others, self.mesh, self.rulebook)
            found[scheme] = scheme.having_also(self.mixing[key])
            while more := self.mixing.get((self._key(found[scheme]),)):
                found[scheme] = found[scheme].having_also(more)
        return [found[each] if isinstance(each, AxisScheme) else each for each in constraints]

    def _asks_less(self, constraints: Sequence[Constraint]) -> bool:
        """Whether a scheme of constraints under which there is no plan has one where it leaves matrices to the solver
        that have no other to go with, or gathers for more operators; then its programs do so from here on.
        """
        schemes = [each for each in constraints if isinstance(each, AxisScheme)]
        for scheme in schemes:
            look = gathered_for if scheme.scheme in CUT_OF_INPUTS else lone_matrices
            self.mixing[self._key(scheme),] = look(self.graph, scheme, self.mesh, self.profile, self.rulebook)
        return any(self.mixing[self._key(scheme),] for scheme in schemes)

    def _key(self, scheme: AxisScheme) -> object:
        return self.mesh.shape[scheme.axis], scheme.scheme, scheme.gathering, scheme.leaving

    def solve(
        self,
        formulation: Formulation,
        start: Assignment | Sequence[int] | None = None,
        cutoff_ns: float = math.inf,
    ) -> Solution:
        """The cheapest assignment; one that has choices, unless it is proved that it costs no less than the cutoff.

        Args:
            start: a known assignment; what is found is never worse.
            cutoff_ns: what costs no less is of no interest.

        Raises:
            InfeasibleError: there is none, or none was found in the time given; the message names the constraints that
                contradict each other.
        """
        solution = self.solution(formulation, start, cutoff_ns=cutoff_ns)
        if solution.choices is None and solution.status is not Status.CUT:
            said = f"{solution.status.value} {solution.report.explanation}".rstrip()
            raise InfeasibleError(self._no_plan(formulation, said))
        return solution

    def solved(self, formulation: Formulation, cutoff_ns: float = math.inf) -> tuple[Formulation, Solution]:
        """A program and its cheapest assignment, as :meth:`solve` gives it; where there is proved to be none and a
        scheme has a plan that leaves some matrices to the solver, the program whose schemes do.

        Raises:
            InfeasibleError: neither has one.
        """
        solution = self.solution(formulation, explains=False, cutoff_ns=cutoff_ns)
        if solution.choices is not None or solution.status is Status.CUT:
            return formulation, solution
        if solution.status is Status.INFEASIBLE and self._asks_less(formulation.constraints):
            formulation = self.program(formulation.constraints)
        return formulation, self.solve(formulation, cutoff_ns=cutoff_ns)

    def solution(
        self,
        formulation: Formulation,
        start: Assignment | Sequence[int] | None = None,
        explains: bool = True,
        cutoff_ns: float = math.inf,
    ) -> Solution:
        """What the solver says of a program, which may be that there is no answer; why there is none is looked for
        where it ``explains``.
        """
        return solve(
            formulation.problem,
            backend=self.backend,
            time_limit_s=self.time_limit_s,
            start=start,
            explains=explains,
            cutoff=None if math.isinf(cutoff_ns) else math.ceil(cutoff_ns),
            progress=said_by(self.report, self.says_bounds),
        )

    def write(self, formulation: Formulation, solution: Solution) -> ShardingPlan:
        """The plan of a solution."""
        plan = interpret(*decided(formulation, solution), self.profile, self.model, self.call)
        return self._judged(plan, plan.solver.bound_ns) if self.objective == "overlapped-step-time" else plan

    def _judged(self, plan: ShardingPlan, bound_ns: int) -> ShardingPlan:
        """The plan at the cost of its step as its schedule runs it."""
        cost_ns = round(overlapped_s(plan) * 1e9)
        return replace(plan, solver=plan.solver.having(cost_ns, min(cost_ns, bound_ns)))

    def _no_plan(self, formulation: Formulation, reason: str) -> str:
        """What the solver said of a program without an answer, and the constraints that are to blame."""
        texts = [constraint.text for constraint in formulation.constraints]
        under = f" under the constraints {', '.join(texts)}" if texts else ""
        infeasible = Status.INFEASIBLE.value
        said = f"no plan{under}: {infeasible}"
        if reason.startswith(infeasible) and texts:
            # what an axis alone cannot have no mesh with that axis has, and it is found without a solver
            schemes = (each for each in formulation.constraints if isinstance(each, AxisScheme))
            if why := next(filter(None, (self._blocking(scheme, solves=False) for scheme in schemes)), ""):
                return f"no plan{under}: {why}"
            blamed = self.contradiction(formulation.constraints)
            if len(blamed) == 1:
                if isinstance(blamed[0], AxisScheme) and (why := self._blocking(blamed[0], solves=True)):
                    return f"no plan{under}: {why}"
                if isinstance(blamed[0], Pin | StrategyPin) and (why := self._possible(blamed[0])):
                    return f"no plan{under}: {blamed[0].text!r} leaves none, whatever the others say; in a plan {why}"
                return f"{said} The constraint {blamed[0].text!r} leaves none, whatever the others say."
            if blamed:
                named = " and ".join(repr(constraint.text) for constraint in blamed)
                return f"{said} The constraints {named} contradict each other; without any one of them there is a plan."
        marks = [f"{text!r} at {node.source}" for _, node, text in annotated(self.graph)]
        also = f" The annotations in the model count too: {'; '.join(marks)}." if marks else ""
        return f"no plan{under}: {reason}{also}"

    def _blocking(self, scheme: AxisScheme, solves: bool) -> str:
        """The operator that stands in the way of a scheme; empty where none is found."""
        return why_not(self.graph, scheme, self.mesh, self.profile, self.rulebook, solves)

    def _possible(self, pin: Pin | StrategyPin) -> str:
        """What a pin can have that leaves no plan; empty where that is not found."""
        programs = self.program(()), self.program([pin])
        return said_of_possible(*programs, self.mesh, isinstance(pin, StrategyPin), self.backend)

    def contradiction(self, constraints: Sequence[Constraint]) -> tuple[Constraint, ...]:
        """Of constraints under which there is no plan a minimal part under which there is none.

        Empty where that is not found out in the time there is for it, or where no constraint is to blame.
        """
        deadline_s = time.monotonic() + BLAME_S
        blamed = list(constraints)
        # only what a model is marked with can leave none by itself: whole tensors everywhere are a plan of any other
        if next(annotated(self.graph), None) is not None and not self._has_plan(()):
            return ()
        for constraint in constraints:
            fewer = [other for other in blamed if other is not constraint]
            if time.monotonic() > deadline_s:
                return ()
            if not self._has_plan(fewer):
                blamed = fewer
        return tuple(blamed)

    def _has_plan(self, constraints: Sequence[Constraint]) -> bool:
        try:
            problem = self.program(constraints).problem
        except ConstraintError:
            return False
        solution = solve(problem, backend=self.backend, time_limit_s=BLAME_S, relative_gap=ANY_PLAN)
        return solution.status is not Status.INFEASIBLE


class _AsksLessError(Exception):
    """There is no plan, but one whose schemes leave more to the solver, as those of programs do from here on."""


def is_proven(plan: ShardingPlan) -> bool:
    """Whether a plan is proven optimal, but for what double precision leaves open."""
    return plan.solver.status == "optimal" or plan.solver.gap <= UNPROVEN


def warn_if_unproven(plan: ShardingPlan, time_limit_s: float | None, took_s: float) -> None:
    """Warns of a plan that is not proven optimal, and says so where the time limit has ended the search, as far as the
    seconds tell that planning took.
    """
    if is_proven(plan):
        return
    cut = ""
    if time_limit_s is not None and took_s >= time_limit_s:
        cut = f"; the time limit of {time_limit_s:g} s ended the search, so another run may find another plan"
    warnings.warn(f"the plan is not proven optimal: its gap is {format_gap(plan.solver.gap)}{cut}", stacklevel=3)
