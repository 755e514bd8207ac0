"""The result of ``autoshard compare``: the optimal plan of a training step beside the schemes that people use."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from ...layout import format_layout
from ...mesh import Mesh
from ..plan import ShardingPlan, TensorEntry
from ..text.notation import format_strategy
from .summary import summary_json


@dataclass(frozen=True)
class Contender:
    """The optimum or a baseline. ``title`` is its name in words; ``reason`` says why it has no plan, or for which plans
    the optimum's bound holds where these are not all.
    """

    name: str
    title: str
    plan: ShardingPlan | None
    reason: str = ""

    @property
    def file_name(self) -> str:
        """The file for its plan, ``fsdp+tp-full.yaml`` for ``fsdp+tp/full``; names of contenders have no dashes."""
        return f"{self.name.replace('/', '-')}.yaml"


@dataclass(frozen=True)
class Contest:
    """The optimum, and the baselines from the fastest on, those without a plan last.

    Invariant (held by how it is made): no baseline's predicted cost is below the optimum's.
    """

    optimum: Contender
    baselines: tuple[Contender, ...]

    @property
    def best(self) -> Contender | None:
        """The fastest baseline, None where no baseline has a plan."""
        return next((contender for contender in self.baselines if contender.plan), None)

    @property
    def ratio(self) -> float | None:
        """Predicted step time of the optimum over that of the fastest baseline, as the plans' objective counts it."""
        if self.best is None or self.best.plan is None or self.optimum.plan is None:
            return None
        return self.optimum.plan.solver.cost_ns / self.best.plan.solver.cost_ns


@dataclass(frozen=True)
class Difference:
    """The first decision that two plans take differently: parameters come first, then inputs, then operators.

    ``differing`` of ``total`` decisions of that section differ. A decision that one of the two alone has (an operator
    that it computes again) differs; the other has ``-`` for it.
    """

    name: str
    ours: str
    theirs: str
    section: str
    differing: int
    total: int

    def __str__(self) -> str:
        return f"{self.name}: {self.ours} (there {self.theirs}); {self.differing} of {self.total} {self.section}"


def first_difference(ours: ShardingPlan, theirs: ShardingPlan) -> Difference | None:
    """Where two plans for one graph and mesh first differ; None where they decide everything alike."""
    for section, mine, other in _sections(ours, theirs):
        names = dict.fromkeys((*mine, *other))
        differing = [name for name in names if mine.get(name) != other.get(name)]
        if differing:
            name = differing[0]
            return Difference(name, mine.get(name, "-"), other.get(name, "-"), section, len(differing), len(names))
    return None


def contest_json(contest: Contest) -> dict[str, object]:
    """A contest as JSON-ready values: for each contender its summary, or the reason why it has none.

    The keys are stable: later versions add some and change none. ``docs/experts.md`` lists them.
    """
    return {
        "autoshard_contest": 1,
        "ratio": contest.ratio,
        "best": contest.best.name if contest.best else None,
        "contenders": [_contender_json(contender, contest) for contender in (contest.optimum, *contest.baselines)],
    }


def _contender_json(contender: Contender, contest: Contest) -> dict[str, object]:
    if contender.plan is None:
        return {"name": contender.name, "title": contender.title, "plan": None, "reason": contender.reason}
    assert contest.optimum.plan is not None
    difference = first_difference(contest.optimum.plan, contender.plan)
    return {
        "name": contender.name,
        "title": contender.title,
        "plan": summary_json(contender.plan),
        "reason": contender.reason,
        "first_difference": None if difference is None else vars(difference),
    }


def _sections(ours: ShardingPlan, theirs: ShardingPlan) -> Iterator[tuple[str, dict[str, str], dict[str, str]]]:
    mesh = ours.mesh
    yield "parameters", _layouts(ours.parameters, mesh), _layouts(theirs.parameters, mesh)
    yield "inputs", _layouts(ours.inputs, mesh), _layouts(theirs.inputs, mesh)
    yield "operators", _strategies(ours), _strategies(theirs)


def _layouts(entries: Iterable[TensorEntry], mesh: Mesh) -> dict[str, str]:
    return {entry.name: format_layout(entry.layout, mesh) for entry in entries}


def _strategies(plan: ShardingPlan) -> dict[str, str]:
    return {entry.name: format_strategy(entry, plan.mesh) for entry in plan.operators}
