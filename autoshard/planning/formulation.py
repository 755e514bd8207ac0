"""From a captured graph to the solver's problem.

One solver node for every graph node, plus one for every result that leaves the graph; for every tensor a network of
its layouts (:mod:`autoshard.planning.tensor_networks`), on which it gets from whoever makes it to all who want it: each
step is paid once, as the backward may read the copies that the forward made. Identical layers are tied. Costs are
integer nanoseconds, rounded as the program is written and nowhere else.

Under a memory budget :mod:`autoshard.planning.lives` adds what every choice holds in memory and when.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import cached_property
from typing import Literal

import numpy as np

from cost_models import Profile
from solver import INFEASIBLE, Assignment, Edge, Problem, Routes, evaluate, routed
from solver import Node as SolverNode

from ..capture import CapturedGraph, Ref, recomputed
from ..constraints import Alike, Constraint
from ..constraints.compile import compile_constraints
from ..constraints.computed_again import again_under
from ..constraints.limits import Limits
from ..constraints.names import Results, names_of, results_of
from ..errors import ConstraintError
from ..mesh import Mesh
from ..strategies import Strategy
from .candidates import candidates
from .layer_ties import marks_of, tied_classes
from .pricing import Prices
from .tensor_networks import HELD, Demand, TensorNetwork, networks_of

Objective = Literal["step-time", "communication-time"]
OBJECTIVES: tuple[Objective, ...] = ("step-time", "communication-time")


@dataclass(frozen=True, eq=False)
class Formulation:
    """A problem, and what is needed to read its solution.

    ``strategies[i]`` are those of solver node ``i``. Solver nodes up to the number of graph nodes are the graph's; the
    others hold the ``results``: tensors that leave the graph and have no tangent, by name. ``networks`` are those of
    ``free``, the problem without memory, of which ``problem`` may have more to say: what is held, and the limit.
    """

    graph: CapturedGraph
    mesh: Mesh
    prices: Prices
    objective: Objective
    constraints: tuple[Constraint, ...]
    results: Results
    strategies: tuple[tuple[Strategy, ...], ...]
    demands: tuple[Demand, ...]
    networks: tuple[TensorNetwork, ...]
    keep_copies: bool
    free: Problem
    problem: Problem

    @cached_property
    def names(self) -> tuple[str, ...]:
        """What constraints and plans call every solver node; empty for one that is no decision of its own."""
        named = names_of(self.graph)
        return (*named, *[""] * (len(self.strategies) - len(named)))

    def consumer_name(self, node: int) -> str:
        """What a plan calls who wants a tensor: an operator, a parameter (for its gradient), an output, or a buffer
        (for its new value).
        """
        return self.names[node].removeprefix("new ")

    def routed(self, choices: Sequence[int], routes: Sequence[Routes] = ()) -> tuple[Assignment, int] | None:
        """The choices of all strategies with routes, and what both cost in nanoseconds; None where they break a
        constraint, or no way leads where a tensor is wanted.

        Identical layers may choose differently: a plan of old, or one edited by hand, need not have decided them once.

        Args:
            routes: of every network, taken where they lead to what is wanted; else, and without them, the cheapest.
        """
        problem = replace(self.free, ties=())
        arcs = [(*taken.forward, *taken.backward) for taken in routes] or None
        assignment = routed(problem, choices, arcs, dict(enumerate(routes)))
        if assignment is None:
            return None
        judged = evaluate(problem, assignment.choices, assignment.routes)
        return (assignment, judged.cost) if judged.feasible else None


def formulate(
    graph: CapturedGraph,
    mesh: Mesh,
    profile: Profile,
    *,
    objective: Objective = "step-time",
    constraints: Sequence[Constraint] = (),
    tie_layers: bool = True,
    keep_copies: bool = True,
) -> Formulation:
    """Builds the integer program of a graph on a mesh of a machine.

    Args:
        objective: ``step-time`` adds compute and communication; ``communication-time`` counts communication alone,
            under which full replication is free: it is meant for use with pins.
        graph: as captured; the program's is the one in which what the constraints want is computed again.
        constraints: what is decided already.
        tie_layers: decide identical layers once.
        keep_copies: let the backward read copies that the forward made, which is free where memory is; otherwise it
            makes its own.

    Raises:
        ConstraintError: a constraint names nothing, or leaves its tensor or operator no layout that it can have.
        ProfileError: the profile does not cover the mesh.
    """
    graph = recomputed(graph, again_under(constraints, graph))
    prices = Prices(graph, mesh, profile)
    results = results_of(graph)
    limits = compile_constraints(constraints, graph, mesh)
    strategies = candidates(graph, mesh, limits)
    demands = _demands(graph, results, limits)
    costs = _Costs(graph, prices, strategies, objective)
    named = [*(node.name for node in graph.nodes), *(name for name, _ in results)]
    nodes = tuple(SolverNode(name, costs.of(i)) for i, name in enumerate(named))
    networks = tuple(networks_of(graph, prices, strategies, demands, keep_copies=keep_copies))
    edges = tuple(_equal_layouts(graph, mesh, constraints, strategies))
    ties = _ties(graph, strategies, results, limits, constraints) if tie_layers else ()
    found = tuple(tensor.network for tensor in networks)
    problem = Problem(nodes, edges, ties=ties, name="sharding", networks=found)
    return Formulation(
        graph=graph,
        mesh=mesh,
        prices=prices,
        objective=objective,
        constraints=tuple(constraints),
        results=results,
        strategies=strategies,
        demands=demands,
        networks=networks,
        keep_copies=keep_copies,
        free=problem,
        problem=problem,
    )


def _demands(graph: CapturedGraph, results: Results, limits: Limits) -> tuple[Demand, ...]:
    """Every tensor with those who want it, by phase, in graph order.

    A parameter wants its gradient in its own layout, in the backward; a tangent stands for the output it belongs to.
    """
    wanted: dict[tuple[Ref, str], list[tuple[int, int]]] = defaultdict(list)
    for i, node in enumerate(graph.nodes):
        for position, ref in enumerate(node.inputs):
            wanted[ref, node.phase].append((i, position))
    number = {node.name: i for i, node in enumerate(graph.nodes) if node.kind != "operator"}
    for name, ref in graph.gradients:
        if ref.node != number[name]:
            wanted[ref, "backward"].append((number[name], HELD))
    for k, output in enumerate(graph.outputs):
        if output is not None and f"grad.{k}" in number:
            wanted[output, "forward"].append((number[f"grad.{k}"], HELD))
    for k, (_, ref) in enumerate(results):
        wanted[ref, "forward"].append((len(graph.nodes) + k, HELD))
    return tuple(
        Demand(ref, phase, tuple(consumers), limits.banned(ref), limits.remade(ref))
        for (ref, phase), consumers in wanted.items()
    )


def _equal_layouts(
    graph: CapturedGraph,
    mesh: Mesh,
    constraints: Sequence[Constraint],
    strategies: tuple[tuple[Strategy, ...], ...],
) -> Iterator[Edge]:
    """For tensors that are to be alike: an edge from the first to each other that allows equal layouts only."""
    names = names_of(graph)
    for alike in (constraint for constraint in constraints if isinstance(constraint, Alike)):
        members = [i for i, name in enumerate(names) if any(fnmatchcase(name, p) for p in alike.patterns)]
        for other in members[1:]:
            rows, columns = ([s.outputs[0] for s in strategies[i]] for i in (members[0], other))
            if not set(rows) & set(columns):
                raise ConstraintError(
                    f"the constraint {alike.text!r} cannot hold: no layout is one that both {names[members[0]]} and "
                    f"{names[other]} can have on the mesh {mesh}"
                )
            costs = [[0 if row == column else INFEASIBLE for column in columns] for row in rows]
            yield Edge.dense(members[0], other, np.array(costs, dtype=np.int64))


class _Costs:
    """Costs of nodes in integer nanoseconds, those of equal strategies once."""

    def __init__(
        self, graph: CapturedGraph, prices: Prices, strategies: tuple[tuple[Strategy, ...], ...], objective: Objective
    ) -> None:
        self._graph, self._prices, self._strategies = graph, prices, strategies
        self._computes = objective == "step-time"
        self._known: dict[int, np.ndarray] = {}

    def of(self, i: int) -> np.ndarray:
        strategies = self._strategies[i]
        if id(strategies) not in self._known:
            priced = self._computes and i < len(self._graph.nodes)
            seconds = self._prices.compute_s(self._graph.nodes[i], strategies) if priced else np.zeros(len(strategies))
            self._known[id(strategies)] = np.rint(seconds * 1e9).astype(np.int64)
        return self._known[id(strategies)]


def _ties(
    graph: CapturedGraph,
    strategies: tuple[tuple[Strategy, ...], ...],
    results: Results,
    limits: Limits,
    constraints: Sequence[Constraint],
) -> tuple[tuple[int, ...], ...]:
    """Identical layers, as far as constraints do not tell them apart."""
    made = {f"grad.{k}": ref.node for k, ref in enumerate(graph.outputs) if ref is not None}
    makers = [made.get(node.name, i) if node.kind == "tangent" else i for i, node in enumerate(graph.nodes)]
    makers += [ref.node for _, ref in results]
    marks = marks_of(graph, names_of(graph), makers, limits, constraints)
    return tied_classes(graph, [(id(strategies[i]), mark) for i, mark in enumerate(marks)])
