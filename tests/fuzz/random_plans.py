"""Plans in which every operator has a strategy drawn at random: no solver, and no reason to leave a rule out."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from itertools import count

import numpy as np
from torch import nn

import cost_models
from autoshard.capture import CapturedGraph, call_text, recomputed
from autoshard.layout import Layout
from autoshard.mesh import Mesh
from autoshard.planning import Formulation, formulate, interpret, pair_problem
from autoshard.plans import ShardingPlan
from autoshard.plans.schedule import BUCKET_BYTES
from autoshard.strategies import Strategy
from solver import INFEASIBLE, Edge, Solution, Status
from solver.solution import SolveReport

PROFILE = cost_models.load_profile("cpu-gloo")

BUCKETS = (BUCKET_BYTES, 64, 0)
"""How much travels together at most."""
WHOLE = 0.1
"""How often an operator that could be sharded runs whole on every rank."""


def random_plan(
    graph: CapturedGraph, mesh: Mesh, seed: int, model: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]
) -> ShardingPlan:
    """A plan drawn at random, and what its backward computes again.

    ``model``, ``args`` and ``kwargs`` are those that the graph was captured from.
    """
    return next(random_plans(graph, mesh, seed, model, args, kwargs))


def random_plans(
    graph: CapturedGraph, mesh: Mesh, seed: int, model: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]
) -> Iterator[ShardingPlan]:
    """One such plan after the other, without end. All compute the same again, which is drawn once."""
    draw = np.random.default_rng(seed)
    again = float(draw.choice([0.0, 0.0, 0.3, 1.0]))
    names = [node.name for _, node in graph.of_kind("operator") if node.phase == "forward"]
    graph = recomputed(graph, {name for name in names if draw.random() < again})
    formulation = formulate(graph, mesh, PROFILE, tie_layers=False, keep_copies=bool(draw.integers(2)))
    for k in count(seed):
        choices = _choices(formulation, draw)
        solution = Solution(Status.FEASIBLE, choices, None, 0, 1.0, SolveReport("random", 0.0, (), ()))
        plan = interpret(formulation, solution, PROFILE, type(model).__name__, call_text(model, args, kwargs))
        yield replace(plan, bucket_bytes=BUCKETS[k % len(BUCKETS)])


def _choices(formulation: Formulation, draw: np.random.Generator) -> tuple[int, ...]:
    """A strategy for every node in turn, among those that the nodes chosen before can be joined up with.

    Whole on every rank is always among them: a layout can always be gathered or reduced.
    """
    problem = pair_problem(formulation)
    touching: dict[int, list[Edge]] = defaultdict(list)
    for edge in problem.edges:
        touching[edge.u].append(edge)
        touching[edge.v].append(edge)
    chosen: dict[int, int] = {}
    for i, node in enumerate(problem.nodes):
        allowed = node.costs < INFEASIBLE
        for edge in touching[i]:
            if edge.u == i and edge.v in chosen:
                allowed &= edge.costs[edge.rows, edge.cols[chosen[edge.v]]] < INFEASIBLE
            elif edge.v == i and edge.u in chosen:
                allowed &= edge.costs[edge.rows[chosen[edge.u]], edge.cols] < INFEASIBLE
        candidates = np.flatnonzero(allowed)
        assert len(candidates), f"no strategy of {node.name} can be joined up with those of its neighbours"
        sharded = [k for k in candidates if not _is_whole(formulation.strategies[i][k])]
        kept = sharded if sharded and draw.random() >= WHOLE else candidates
        chosen[i] = int(draw.choice(kept))
    return tuple(chosen[i] for i in range(len(problem.nodes)))


def _is_whole(strategy: Strategy) -> bool:
    return all(layout.is_replicated for layout in _layouts(strategy))


def _layouts(strategy: Strategy) -> Iterator[Layout]:
    yield from strategy.inputs
    yield from (layout for layout in strategy.outputs if layout is not None)
