"""The answer of one program of a step as one of another: it stands for the same plan, at that program's prices."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autoshard.constraints import gather_constraints
from autoshard.constraints.baselines import baseline
from autoshard.mesh import Mesh
from autoshard.planning import formulate, interpret
from autoshard.planning.decided import decided
from autoshard.planning.moved import moved
from autoshard.plans import ShardingPlan
from solver import Assignment, evaluate, solve

from ..distributed import cases
from ..plans_of import profile_of
from ..thorough import some_thorough

MESH = Mesh.parse("dp=2,tp=2")


def operators(plan: ShardingPlan) -> dict[str, object]:
    """What every operator makes of what, those that compute one again left out: they do as the first one does."""
    return {each.name: (each.inputs, each.outputs) for each in plan.operators if "/again." not in each.name}


@pytest.mark.parametrize("case", some_thorough(["llama of 1", "gpt2"], thorough=["gpt2"]))
@pytest.mark.parametrize("name", ["fsdp+tp", "fsdp+sp/full", "fsdp+tp/selective"])
def test_what_people_do_is_an_answer_of_the_program_that_decides_everything(case: str, name: str) -> None:
    graph, profile = cases.graph(case), profile_of("slow")
    schemes = gather_constraints(baseline(name, MESH).constraints(MESH), MESH).values
    theirs = formulate(graph, MESH, profile, constraints=schemes)
    solution = solve(theirs.problem)
    assert solution.choices is not None
    wide = formulate(graph, MESH, profile, chooses_again=True)

    answer = moved(wide, theirs, Assignment(solution.choices, solution.routes))
    assert answer is not None and evaluate(wide.problem, *answer).feasible
    here = replace(solution, choices=answer.choices, routes=answer.routes, bound=0)
    plan = interpret(*decided(wide, here), profile, "", "")
    before = interpret(theirs, replace(solution, bound=0), profile, "", "")
    assert operators(plan) == operators(before)
    assert plan.solver.cost_ns <= before.solver.cost_ns  # views of what is there are not made again
    assert bool(plan.recomputed) == bool(theirs.graph.again)
    assert set(plan.recomputed) <= set(before.recomputed)
    # and so it is among programs of one kind, and where nothing is to be decided
    assert moved(wide, wide, answer) == answer
    assert moved(theirs, theirs, Assignment(solution.choices, solution.routes)) is not None
