"""The program decides what is computed again: against every set of operators tried, and against timelines."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import combinations
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import autoshard
from autoshard.capture import CapturedGraph, capture, recomputable, recomputed
from autoshard.errors import BudgetError
from autoshard.mesh import Mesh
from autoshard.ops import is_free
from autoshard.planning import Formulation, formulate, interpret, timeline_of
from autoshard.planning.decided import decided
from autoshard.planning.lives import _Course, with_lives
from autoshard.planning.moved import as_choices
from autoshard.plans import ShardingPlan
from autoshard.recomputation import again_name, first_name
from cost_models import optimizer_policy
from solver import Assignment, evaluate, routed, solve

from ..distributed import cases
from ..lowering.test_what_mixes_rows import MODELS, UNLIKE, WHOLE
from ..models import Block, blocks
from ..plans_of import profile_of
from ..thorough import some_thorough
from .test_lives import POLICY, at_steps


def plan(memory: int | None = None, mesh: str = "dp=1", **options: Any) -> ShardingPlan:
    return autoshard.plan(*blocks(), mesh=mesh, hardware="cpu-gloo", memory=memory, optimizer="sgd", **options)


class Few(nn.Module):
    """Few operators, so that all sets of them can be tried: a layer that makes much of little, and one wide result."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = Block(32), nn.Linear(8, 48)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.gelu(self.last(self.first(x))).mean()


def test_it_is_the_best_of_all_sets_of_operators_on_one_rank() -> None:
    """There every operator has one strategy, so that a set of operators is a plan."""
    model, args = Few(), blocks()[1]

    def plan(memory: int) -> ShardingPlan:
        return autoshard.plan(
            model, args, mesh="dp=1", hardware="cpu-gloo", memory=memory, optimizer="sgd", checkpointing="free"
        )

    graph, mesh, profile = capture(model, args), Mesh.parse("dp=1"), profile_of("cpu-gloo")
    names = [name for name in sorted(recomputable(graph)) if not name.endswith("/t")]  # those of parameters are held
    known: dict[frozenset[str], tuple[int, int]] = {}
    for chosen in (frozenset(each) for count in range(len(names) + 1) for each in combinations(names, count)):
        formulation = formulate(recomputed(graph, chosen), mesh, profile, policy=optimizer_policy("sgd"))
        made = interpret(formulation, solve(formulation.problem), profile, "", "")
        peak = timeline_of(graph, made, optimizer_policy("sgd")).peak.size_bytes
        known[chosen] = made.solver.cost_ns, peak
    assert len(known) >= 2**6
    most, least = known[frozenset()][1], min(peak for _, peak in known.values())
    assert least < 0.9 * most
    budgets = {peak for _, peak in known.values()}
    assert len(budgets) >= 4
    for budget in sorted(budgets):
        found = plan(budget)
        assert found.memory is not None
        assert found.memory.peak.size_bytes <= budget
        assert found.solver.cost_ns == min(cost for cost, peak in known.values() if peak <= budget)
        assert found.solver.status == "optimal"
    with pytest.raises(BudgetError, match=f"{least} bytes"):
        plan(least - 1)


@pytest.mark.thorough
def test_modules_need_no_number_to_be_computed_again() -> None:
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = Block(32), Block(48)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.second(self.first(x)).square().mean()

    names = {"layers.0": "first", "layers.1": "second"}
    (_, args), found = blocks(), 0
    free = plan(checkpointing="free")
    assert free.memory is not None
    for share in (0.95, 0.9, 0.85):
        budget = int(share * free.memory.peak.size_bytes)
        numbered = plan(budget)
        named = autoshard.plan(Named(), args, mesh="dp=1", hardware="cpu-gloo", memory=budget, optimizer="sgd")
        assert named.solver.cost_ns == numbered.solver.cost_ns
        renamed = [names[name[: len("layers.0")]] + name[len("layers.0") :] for name in numbered.recomputed]
        assert sorted(named.recomputed) == sorted(renamed)
        found += len(renamed)
    assert found


def test_nothing_is_computed_again_where_it_need_not_be() -> None:
    free = plan(checkpointing="free", mesh="dp=2")
    assert free.memory is not None and not free.recomputed
    assert plan(free.memory.peak.size_bytes, checkpointing="free", mesh="dp=2").recomputed == ()


@pytest.mark.filterwarnings(*WHOLE)
@pytest.mark.parametrize("name", some_thorough(MODELS, set(MODELS) - UNLIKE))
def test_operators_have_the_same_strategies_whatever_is_computed_again(name: str) -> None:
    """Cuts in parts too, which come to the backward by way of what is computed again."""
    make, shape = MODELS[name]
    graph, mesh, profile = capture(make(), (torch.randn(shape),)), Mesh.parse("a=2,b=2"), profile_of("cpu-gloo")
    again = recomputed(graph, recomputable(graph))

    def strategies(graph: CapturedGraph) -> dict[str, Any]:
        return dict(zip((node.name for node in graph.nodes), formulate(graph, mesh, profile).strategies))

    without, found = strategies(graph), strategies(again)
    assert {again_name(name) for name in again.again} == found.keys() - without.keys()
    for name, options in found.items():
        assert options == without[first_name(name) or name], name


def test_what_is_to_be_kept_is_kept_and_what_is_to_be_computed_again_is() -> None:
    free = plan().memory
    assert free is not None
    budget = int(0.85 * free.peak.size_bytes)
    made = autoshard.plan(
        *blocks(),
        mesh="dp=1",
        hardware="cpu-gloo",
        memory=budget,
        optimizer="sgd",
        checkpointing="free",
        constraints=("keep layers.0/tanh", "recompute layers.1/gelu"),
    )
    assert "layers.1/gelu" in made.recomputed and "layers.0/tanh" not in made.recomputed


@pytest.mark.thorough
def test_where_nothing_fits_the_error_names_the_choice_that_was_not_left_to_the_planner() -> None:
    def said(**options: Any) -> str:
        with pytest.raises(BudgetError, match="no plan fits") as caught:
            plan(1000, **options)
        return str(caught.value)

    remedy = "--checkpointing free"
    assert remedy in said(checkpointing="as-marked") and remedy in said(checkpointing="none")
    assert remedy not in said()
    assert remedy not in said(checkpointing="as-marked", constraints=("recomputation full",))  # there is no more


def some(formulation: Formulation, draws: random.Random) -> list[str]:
    """Operators to be computed again; a view where what it looks at is."""
    nodes, firsts = formulation.graph.nodes, sorted(formulation.seconds.values())
    again: set[int] = set()
    for i in firsts:
        looks_at = nodes[i].inputs[0].node if is_free(nodes[i]) else None
        if looks_at in again or (looks_at not in firsts and draws.random() < 0.5):
            again.add(i)
    return [nodes[i].name for i in again]


@pytest.mark.filterwarnings("ignore::autoshard.errors.StrategyWarning")
@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.thorough)])
@pytest.mark.parametrize("case", some_thorough(["llama of 1", "llama odd", "gpt2"], ["llama odd"]))
def test_it_prices_and_counts_as_the_program_in_which_the_same_is_decided(case: str, seed: int) -> None:
    """That program never counts more than a timeline, says `test_lives`."""
    graph = cases.graph(case)
    mesh, profile = Mesh.parse("dp=2,tp=2"), profile_of("slow")
    wide = formulate(graph, mesh, profile, tie_layers=False, chooses_again=True)
    names = some(wide, random.Random(seed))
    plain = formulate(recomputed(graph, names), mesh, profile, tie_layers=False)
    solution = solve(plain.problem, relative_gap=1e9)
    assert solution.choices is not None
    choices = as_choices(wide, plain, solution.choices)
    assert choices is not None
    assignment = routed(wide.free, choices)
    assert assignment is not None
    judged = evaluate(wide.free, *assignment)
    assert judged.feasible

    found, answer = decided(wide, replace(solution, choices=assignment.choices, routes=assignment.routes))
    assert 0 < len(found.graph.again) < len(wide.seconds)
    assert set(found.graph.again) <= set(names)
    assert answer.choices is not None
    again = evaluate(found.free, answer.choices, answer.routes)
    assert again.feasible and again.cost <= judged.cost  # less where nobody reads what is computed again
    plan = interpret(found, replace(answer, bound=0), profile, "", "")
    assert plan.solver.cost_ns == again.cost and set(plan.recomputed) == set(found.graph.again)
    assert counted(wide, assignment).items() >= counted(found, Assignment(answer.choices, answer.routes)).items()


def counted(formulation: Formulation, assignment: Assignment) -> dict[str, int]:
    """Bytes in use while each operator runs."""
    graph = formulation.graph
    steps = {graph.nodes[i].name: step for i, step in _Course.of(graph).step.items()}
    problem = with_lives(formulation, POLICY).problem
    return dict(zip(steps, at_steps(problem, assignment, list(steps.values()))))
