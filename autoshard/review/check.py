"""Whether a plan is still good: does it fit model, mesh, profile and budget, and is it still the best?"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from itertools import zip_longest
from typing import Any, Literal

from torch import nn

from cost_models import Profile

from ..constraints import Constraints
from ..errors import BudgetError, ConstraintError, VerificationError
from ..lowering import check_redistributions
from ..mesh import HybridMesh, Mesh
from ..planning import Formulation, Planner
from ..plans import Execution, MemoryOutcome, ShardingPlan, SolverOutcome
from ..plans.text.contradictions import Contradiction, check_decisions
from ..plans.units import format_bytes, format_seconds
from .file_slips import PUT_BACK, slips_of
from .model_changes import CONNECTIONS, model_changes
from .session import Priced, constraints_of, is_within_budget, limit_of, planner_of, priced, with_memory

Part = Literal["model", "mesh", "hardware", "decisions", "record", "memory", "optimality"]

MOST_SHOWN = 20
"""Changes of the model that a finding lists."""


@dataclass(frozen=True)
class Finding:
    """What was found of one part; ``details`` are further lines."""

    part: Part
    fits: bool
    said: str
    details: tuple[str, ...] = ()


@dataclass(frozen=True)
class Review:
    """What a check found.

    Costs are integer nanoseconds: ``recorded_ns`` as the file says, ``now_ns`` of the same decisions under the profile
    of today, ``best_ns`` the best that was found today and ``bound_ns`` what no plan costs less than; None where the
    plan does not fit well enough to be priced.
    """

    findings: tuple[Finding, ...]
    recorded_ns: int
    now_ns: int | None = None
    best_ns: int | None = None
    bound_ns: int | None = None

    @property
    def fits(self) -> bool:
        """Whether nothing is wrong."""
        return all(finding.fits for finding in self.findings)

    @property
    def distance(self) -> float | None:
        """How much longer the step takes than with the best plan found: 0.01 is one percent."""
        if self.now_ns is None or self.best_ns is None:
            return None
        return (self.now_ns - self.best_ns) / max(1, self.best_ns)


def check(
    plan: ShardingPlan,
    model: nn.Module,
    args: Any = (),
    kwargs: dict[str, Any] | None = None,
    *,
    mesh: Mesh | HybridMesh | str | None = None,
    hardware: str | Profile | None = None,
    memory_bytes: int | None = None,
    within: float = 0.01,
    backend: str = "auto",
    time_limit_s: float | None = None,
    progress: Callable[[str], None] | None = None,
    text: str = "",
) -> Review:
    """Checks a plan against a model as it is now.

    Args:
        model, args, kwargs: as for :func:`autoshard.plan`.
        mesh: the mesh of the job, where it should be compared with the plan's. For a plan that does not say what its
            axes run on, its order of ranks decides prices.
        hardware: the profile to price with, by default the one that the plan names, as it is now.
        memory_bytes: the budget of one rank, by default the one that the plan was made under.
        within: how far from the best plan it may be, as a share of the best plan's cost.
        text: the file, so that a finding can say in which line a name, shape or dtype is not the model's.

    Raises:
        CaptureError, ProfileError, MeshError, ConstraintError: the model, profile, mesh or the plan's constraints
            cannot be read.
    """
    planner = planner_of(
        plan,
        model,
        args,
        kwargs,
        mesh=None if mesh is None or plan.network or Mesh.of(mesh) != plan.mesh else mesh,
        hardware=hardware,
        backend=backend,
        time_limit_s=time_limit_s,
        progress=progress,
    )
    if memory_bytes is not None:
        planner = replace(planner, limit=replace(planner.limit, budget_bytes=memory_bytes, soft_ms_per_gib=None))
    report = progress or (lambda stage: None)
    findings = [_model(plan, planner, text), _mesh(plan, mesh), _hardware(plan, planner)]
    if not (findings[0].fits and findings[1].fits):
        return Review(tuple(findings), plan.solver.cost_ns)
    report("pricing the plan again")
    constraints = constraints_of(plan)
    formulation = planner.formulate(constraints)
    try:
        now = priced(plan, planner, formulation)
    except ConstraintError as error:
        findings.append(Finding("decisions", False, str(error)))
        return Review(tuple(findings), plan.solver.cost_ns)
    findings += _decisions(plan, now, planner)
    findings += _record(plan, now, planner)
    findings.append(_memory(now, planner))
    report("solving from the plan on")
    cost = now.plan.solver.cost_ns
    try:
        best = _best(planner, formulation, now, constraints)
    except BudgetError as error:
        findings.append(Finding("optimality", False, str(error)))
        return Review(tuple(findings), plan.solver.cost_ns, now.plan.solver.cost_ns)
    findings += _bound(plan, best, planner)
    findings.append(_optimality(now, best, within))
    if all(finding.fits for finding in findings):
        findings += _contradiction(plan)
    return Review(tuple(findings), plan.solver.cost_ns, cost, min(best.cost_ns, cost), best.bound_ns)


def _model(plan: ShardingPlan, planner: Planner, text: str) -> Finding:
    if plan.fingerprint == planner.graph.fingerprint:
        slips = slips_of(plan, planner.graph, text)
        if slips:
            return Finding("model", False, f"the file lists what the model does not have. {PUT_BACK}", _listed(slips))
        return Finding("model", True, "the one that the plan was made for")
    changes = [str(change) for change in model_changes(plan, planner.graph)] or [CONNECTIONS]
    return Finding("model", False, "another than the plan was made for; make the plan again", _listed(changes))


def _listed(changes: Sequence[str]) -> tuple[str, ...]:
    left = len(changes) - MOST_SHOWN
    return (*changes[:MOST_SHOWN], *([f"and {left} more"] if left > 0 else []))


def _mesh(plan: ShardingPlan, mesh: Mesh | HybridMesh | str | None) -> Finding:
    if mesh is not None and plan.network and Mesh.of(mesh).order != plan.mesh.order and Mesh.of(mesh) == plan.mesh:
        said = f"{plan.mesh} in another order of ranks than the plan was made for, so that its axes run on other links"
        return Finding("mesh", False, f"{said}; make the plan again")
    if mesh is None or Mesh.of(mesh) == plan.mesh:
        return Finding("mesh", True, str(plan.mesh))
    return Finding("mesh", False, f"{Mesh.of(mesh)}, but the plan is for {plan.mesh}; make the plan again")


def _hardware(plan: ShardingPlan, planner: Planner) -> Finding:
    """A profile that has changed is no fault: what matters is what the plan costs under it."""
    profile = planner.profile
    if profile.fingerprint == plan.hardware_fingerprint:
        return Finding("hardware", True, f"{profile.name}, as when the plan was made")
    if profile.name == plan.hardware:
        return Finding("hardware", True, f"{profile.name} has changed since: priced again")
    return Finding("hardware", True, f"priced again for {profile.name}; the plan was made for {plan.hardware}")


def _decisions(plan: ShardingPlan, now: Priced, planner: Planner) -> Iterator[Finding]:
    """The redistributions of the file against those that its layouts need; another profile may choose other ways, but
    the bytes of a way are the same under all.
    """
    said, same = "", _same_prices(plan, planner)
    if not same:
        try:
            check_redistributions(plan, planner.graph)
        except VerificationError as error:
            said = str(error)
    elif now.plan.redistributions != plan.redistributions:
        said = "the redistributions in the file are not those that its layouts need"
    if said:
        advice = "it was edited by hand or written by another version: `autoshard replan` writes them anew"
        yield Finding("decisions", False, f"{said}; {advice}")


def _same_prices(plan: ShardingPlan, planner: Planner) -> bool:
    """Whether a plan was priced as it is now; one from before the optimizer's step had a price was not."""
    return planner.profile.fingerprint == plan.hardware_fingerprint and plan.optimizer_s is not None


def _record(plan: ShardingPlan, now: Priced, planner: Planner) -> Iterator[Finding]:
    """What the file says of cost, times and memory against what its own layouts come to, under the same prices."""
    if not _same_prices(plan, planner) or now.plan.redistributions != plan.redistributions:
        return
    known = with_memory(replace(planner, limit=limit_of(plan)), now.plan) if plan.memory else now.plan
    times = {entry.name: entry.predicted_ns for entry in now.plan.execution}
    pairs: list[tuple[str, object, object]] = [
        ("cost_ns", plan.solver.cost_ns, now.plan.solver.cost_ns),
        ("compute_s", plan.compute_s, now.plan.compute_s),
        ("communication_s", plan.communication_s, now.plan.communication_s),
        ("optimizer_s", plan.optimizer_s, now.plan.optimizer_s),
        *([] if plan.at_peak_s is None else [("at_peak_s", plan.at_peak_s, now.plan.at_peak_s)]),
        *((f"the time of {e.name} in ns", e.predicted_ns, times[e.name]) for e in plan.execution),
        ("the order of execution", *_orders(plan.execution, now.plan.execution)),
    ]
    if plan.memory is not None and known.memory is not None:
        pairs += _memories(plan.memory, known.memory)
    wrong = [f"{what}: {said} in the file, {right} found" for what, said, right in pairs if not _equal(said, right)]
    if wrong:
        yield Finding("record", False, "the file does not say what its own layouts come to", tuple(wrong[:MOST_SHOWN]))


def _contradiction(plan: ShardingPlan) -> Iterator[Finding]:
    """What every other command would refuse the file for, where nothing else says it."""
    try:
        check_decisions(plan)
    except Contradiction as error:
        yield Finding("record", False, f"{error}; `autoshard replan` writes it anew")


def _memories(said: MemoryOutcome, right: MemoryOutcome) -> Iterator[tuple[str, object, object]]:
    """Every number of memory, by what it is called; the points of the course and the tenants by their names."""
    for field in fields(said):
        pair = getattr(said, field.name), getattr(right, field.name)
        if isinstance(pair[0], tuple):
            differing = [(a, b) for a, b in zip_longest(*pair) if a != b][:1]
            yield from ((f"{field.name} of memory", *_shown(one)) for one in differing)
        else:
            yield (f"{field.name} of memory", *_shown(pair))


def _shown(pair: tuple[object, object]) -> tuple[object, object]:
    shown = [" ".join(map(str, vars(one).values())) if is_dataclass(one) else one for one in pair]
    return shown[0], shown[1]


def _equal(said: object, right: object) -> bool:
    if isinstance(said, float) and isinstance(right, float):
        return math.isclose(said, right, rel_tol=1e-9)
    return said == right


def _orders(said: Sequence[Execution], right: Sequence[Execution]) -> tuple[str, str]:
    """The first operators that two orders of execution do not share; equal texts where there are none."""
    pairs = zip((entry.name for entry in said), (entry.name for entry in right))
    return next((pair for pair in pairs if pair[0] != pair[1]), ("", ""))


def _bound(plan: ShardingPlan, best: SolverOutcome, planner: Planner) -> Iterator[Finding]:
    """A finding if the file claims that no plan costs less than its bound, and one that was found now, with identical
    layers decided in the same groups, does.
    """
    is_alike = best.layer_groups == plan.solver.layer_groups
    if is_alike and _same_prices(plan, planner) and best.cost_ns < plan.solver.bound_ns:
        said = (
            f"the file says that no plan costs less than {plan.solver.bound_ns} ns, but one of {best.cost_ns} ns does"
        )
        yield Finding("record", False, said)


def _memory(now: Priced, planner: Planner) -> Finding:
    memory = with_memory(planner, now.plan).memory
    assert memory is not None
    said = f"{memory.peak_words} on the fullest rank, with {memory.optimizer}"
    if memory.budget_bytes is None:
        return Finding("memory", True, f"{said}; there is no budget")
    over, budget = memory.over_bytes, format_bytes(memory.budget_bytes)
    if not over:
        return Finding("memory", True, f"{said}, within the budget of {budget}")
    soft = memory.soft_ms_per_gib is not None
    return Finding("memory", soft, f"{said}: {over} bytes over the {'soft ' * soft}budget of {budget}")


def _best(planner: Planner, formulation: Formulation, now: Priced, constraints: Constraints) -> SolverOutcome:
    """The best plan now: the optimum from the plan on or, where that does not fit the budget, the best found that does.

    Raises:
        BudgetError: none fits the budget.
    """
    solution = planner.solve(formulation, start=now.choices)
    optimum = with_memory(planner, planner.write(formulation, solution))
    return optimum.solver if is_within_budget(optimum) else planner.plan(constraints).solver


def _proof(cost_ns: int, best: SolverOutcome) -> str:
    """In words, how far from the optimum the plan can be at most, where no better one was found."""
    if cost_ns < best.bound_ns:
        return "better than every plan that decides identical layers alike"
    gap = (cost_ns - best.bound_ns) / max(1, cost_ns)
    return f"none better found, gap {gap:.2%}" if gap else replace(best, status="optimal").verdict


def _optimality(now: Priced, best: SolverOutcome, within: float) -> Finding:
    cost = now.plan.solver.cost_ns
    better = cost - best.cost_ns
    price = format_seconds(cost / 1e9)
    if better <= 0:
        return Finding("optimality", True, f"{price}: {_proof(cost, best)}")
    share = better / max(1, best.cost_ns)
    said = f"{price}: {share:.2%} more than the {format_seconds(best.cost_ns / 1e9)} of the best plan now"
    return Finding("optimality", share <= within, f"{said}, {'within' if share <= within else 'over'} {within:.2%}")
