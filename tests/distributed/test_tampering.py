"""A plan that does not communicate as its layouts need is refused before anything runs."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import autoshard
from autoshard.errors import VerificationError
from autoshard.layout import P_SUM, Layout, R, S
from autoshard.lowering import Rank, lower, verify
from autoshard.plans import Collective, Redistribution, ShardingPlan
from autoshard.redistribution import size_bytes, steps_along

from ..oracles import groups_of
from ..plans.synthetic import costed
from . import cases
from .harness import RankError, caught, run_ranks
from .parity import check_parity, device_mesh_of

CASE = "mlp odd"  # batch 7, width 9, hidden 13


@pytest.fixture(scope="module")
def plan() -> ShardingPlan:
    """One that gathers rows."""
    return cases.sharded_plan(CASE, "dp=2,tp=2", constraints=("forbid */mean dp:P(sum)",))


def _detour(plan: ShardingPlan, says_so: bool) -> ShardingPlan:
    """The plan with the gather of a tensor's rows led over a cut of its columns instead."""
    shapes = {node.name: node.outputs[0].shape for node in cases.graph(CASE).nodes if node.outputs[0]}
    index, moved = next(
        (i, r)
        for i, r in enumerate(plan.redistributions)
        if len(shapes[r.tensor]) == 2 and r.path == (Layout((S(0), R)), Layout((R, R))) and not r.kept
    )
    path = (moved.path[0], Layout((S(1), R)), moved.path[1])
    collectives = moved.collectives
    if says_so:
        pairs = zip(steps_along(path), path)
        sent = [
            (step, size_bytes(step, before, shapes[moved.tensor], 4, plan.mesh))
            for step, before in pairs
            if step.communicates
        ]
        collectives = tuple(
            Collective(step.kind, plan.mesh.named(step.axes), size, 1e-6)  # type: ignore[arg-type]
            for step, size in sent
        )
    changed = replace(moved, path=path, collectives=collectives)
    moved_all = (*plan.redistributions[:index], changed, *plan.redistributions[index + 1 :])
    return costed(replace(plan, redistributions=moved_all), sums=True)


def _tampered(plan: ShardingPlan, how: str) -> ShardingPlan:
    moving = [r for r in plan.redistributions if r.collectives]
    first, rest = moving[0], [r for r in plan.redistributions if r is not moving[0]]
    collective = first.collectives[0]
    other_axis = next(axis for axis in plan.mesh.axes if axis != collective.axis)
    changed = {
        "removed": [],
        "no collective": [replace(first, collectives=first.collectives[1:])],
        "extra collective": [replace(first, collectives=(*first.collectives, collective))],
        "other bytes": [replace(first, collectives=(replace(collective, size_bytes=4), *first.collectives[1:]))],
        "other kind": [replace(first, collectives=(replace(collective, kind="all_to_all"), *first.collectives[1:]))],
        "other axis": [replace(first, collectives=(replace(collective, axis=other_axis), *first.collectives[1:]))],
        "other phase": [replace(first, phase="backward" if first.phase == "forward" else "forward")],
        "leads nowhere": [replace(first, path=(first.path[0], first.path[0]))],
    }[how]
    return costed(replace(plan, redistributions=(*rest, *changed)), sums=True)


TAMPERED = (
    "removed",
    "no collective",
    "extra collective",
    "other bytes",
    "other kind",
    "other axis",
    "other phase",
    "leads nowhere",
)

CONTRADICTORY = ("no collective", "extra collective", "other kind", "other axis", "leads nowhere", "detour")
"""What a plan's own entries give away, without the model."""


def _refusals(plans: list[ShardingPlan]) -> list[tuple[str, str]]:
    mesh = device_mesh_of(plans[0])
    return [caught(lambda p=p: autoshard.parallelize(cases.make(CASE)[0], p, mesh)) for p in plans]


def test_tampered_plan_is_refused(plan: ShardingPlan):
    plans = [*(_tampered(plan, how) for how in TAMPERED), _detour(plan, says_so=False)]
    for refusals in run_ranks(4, _refusals, plans):
        assert [kind for kind, _ in refusals] == [VerificationError.__name__] * len(plans), refusals
        told = dict(zip((*TAMPERED, "detour"), (said for _, said in refusals), strict=True))
        assert all("contradicts itself" in told[how] for how in CONTRADICTORY), told


@pytest.mark.parametrize("how", ["no collective", "extra collective", "other bytes", "other kind", "other axis"])
def test_a_program_that_does_not_communicate_as_its_plan_says_is_refused(plan: ShardingPlan, how: str):
    """The last check, of the graph that runs: it looks at neither layouts nor paths."""
    groups = groups_of(plan.mesh)
    program = lower(cases.graph(CASE), plan, Rank((0, 1), torch.device("cpu"), groups))
    verify(program, plan, groups)
    with pytest.raises(VerificationError, match="does not communicate as planned"):
        verify(program, _tampered(plan, how), groups)


def test_another_path_that_the_plan_says_is_taken_and_right(plan: ShardingPlan):
    changed = autoshard.dump_plan(_detour(plan, says_so=True))
    assert all(seen.within(1e-4) for seen in run_ranks(4, check_parity, CASE, changed))


def test_plan_with_an_operator_strategy_that_is_no_rule_is_refused():
    """relu of a whole tensor said to give addends: the plan is consistent, and every rank computes twice the relu."""
    plan = cases.optimum("mlp", "tp=2", "cpu-gloo")
    addends = Layout((P_SUM,))
    (relu,) = (e for e in plan.operators if e.name.endswith("/relu"))
    operators = tuple(replace(e, outputs=(addends,)) if e is relu else e for e in plan.operators)
    summed = (Collective("all_reduce", "tp", 8 * 32 * 4, 1e-6),)
    path = (addends, Layout((R,)))
    moved = tuple(Redistribution(relu.name, phase, path, summed) for phase in ("forward", "backward"))
    with pytest.raises(RankError, match="VerificationError"):
        run_ranks(
            2,
            check_parity,
            "mlp",
            autoshard.dump_plan(costed(replace(plan, operators=operators, redistributions=moved), sums=True)),
        )
