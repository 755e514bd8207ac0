"""The answer of one program of a step as one of another: it stands for the same plan, at that program's prices."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from autoshard.capture import CapturedGraph, capture
from autoshard.constraints import gather_constraints
from autoshard.constraints.baselines import baseline
from autoshard.mesh import Mesh
from autoshard.ops import is_free
from autoshard.planning import Formulation, formulate, interpret, timeline_of
from autoshard.planning.decided import decided
from autoshard.planning.lives import with_lives
from autoshard.planning.moved import moved
from autoshard.plans import ShardingPlan
from solver import Assignment, Solution, evaluate, solve

from ..distributed import cases
from ..models import Blocks
from ..plans_of import profile_of
from ..thorough import some_thorough
from .test_lives import POLICY

MESH = Mesh.parse("dp=2,tp=2")


def operators(plan: ShardingPlan) -> dict[str, object]:
    """What every operator makes of what, but for those that compute one again, which do as the first one does."""
    kept = (each for each in plan.operators if not each.name.rpartition("/")[2].startswith("again."))
    return {each.name: (each.inputs, each.outputs) for each in kept}


def programs(graph: CapturedGraph, name: str, mesh: Mesh) -> tuple[Formulation, Solution, Formulation]:
    """The program of a baseline with its solution, and the one that decides everything."""
    schemes = gather_constraints(baseline(name, mesh).constraints(mesh), mesh).values
    theirs = formulate(graph, mesh, profile_of("slow"), constraints=schemes)
    solution = solve(theirs.problem)
    assert solution.choices is not None
    return theirs, solution, formulate(graph, mesh, profile_of("slow"), chooses_again=True)


@pytest.mark.parametrize("case", some_thorough(["llama of 1", "gpt2"], thorough=["gpt2"]))
@pytest.mark.parametrize("name", ["fsdp+tp", "fsdp+sp/full", "fsdp+tp/selective"])
def test_what_people_do_is_an_answer_of_the_program_that_decides_everything(case: str, name: str) -> None:
    graph, profile = cases.graph(case), profile_of("slow")
    theirs, solution, wide = programs(graph, name, MESH)
    assert solution.choices is not None
    answer = moved(wide, theirs, Assignment(solution.choices, solution.routes))
    assert answer is not None and evaluate(wide.problem, *answer).feasible
    here = replace(solution, choices=answer.choices, routes=answer.routes, bound=0)
    plan = interpret(*decided(wide, here), profile, "", "")
    before = interpret(theirs, replace(solution, bound=0), profile, "", "")
    assert operators(plan) == operators(before)
    if "/full" not in name:  # where a second operator may have another strategy than the first
        assert plan.solver.cost_ns == before.solver.cost_ns
    counted = evaluate(with_lives(wide, POLICY).problem, *answer).peak_usage
    assert counted <= timeline_of(graph, before, POLICY).peak.size_bytes
    assert bool(plan.recomputed) == bool(theirs.graph.again)
    assert set(plan.recomputed) <= set(before.recomputed)
    # and so it is among programs of one kind, and where nothing is to be decided
    assert moved(wide, wide, answer) == answer
    assert moved(theirs, theirs, Assignment(solution.choices, solution.routes)) is not None


def test_weights_that_are_let_go_are_gathered_anew() -> None:
    """Nearly all memory is parameters: with one that is kept whole over the turn it would hold more than the plan."""
    torch.manual_seed(0)
    graph, mesh = capture(Blocks((128,) * 6), (torch.randn(4, 8),)), Mesh.parse("dp=4")
    theirs, solution, wide = programs(graph, "fsdp/full", mesh)
    assert solution.choices is not None
    answer = moved(wide, theirs, Assignment(solution.choices, solution.routes))
    assert answer is not None
    plan = interpret(theirs, replace(solution, bound=0), profile_of("slow"), "", "")
    held = timeline_of(graph, plan, POLICY).peak.size_bytes
    assert evaluate(with_lives(wide, POLICY).problem, *answer).peak_usage <= held


def test_a_view_that_is_made_again_costs_more_than_one_that_is_there() -> None:
    """A weight is gathered before its view is made again, or behind the view: at one price every answer would be there
    several times, and searches under a budget took ten times as long.
    """
    wide = formulate(cases.graph("llama of 1"), MESH, profile_of("slow"), chooses_again=True)
    views = [first for first in wide.twice if is_free(wide.graph.nodes[first])]
    assert views
    for first in views:
        once, again = np.split(np.asarray(wide.problem.nodes[first].costs), 2)
        assert (again > once).all()
