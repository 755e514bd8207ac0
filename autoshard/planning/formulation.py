"""From a captured graph to the solver's problem.

One solver node for every graph node, plus one for every result that leaves the graph. An edge for every tensor
argument: rows are the layouts the producer can give the tensor, columns those its consumers in one phase want of it.
Consumers of one tensor form a group: each distinct layout is paid once, as the backward may read the copies that the
forward made. Identical layers are tied. Costs are integer nanoseconds, rounded here and nowhere else.

Under a memory budget :mod:`autoshard.planning.liveness` adds what every choice holds in memory and when.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import cached_property
from typing import Literal

import numpy as np

from cost_models import Profile
from solver import INFEASIBLE, Edge, Group, Problem
from solver import Node as SolverNode

from ..capture import CapturedGraph, Ref, TensorMeta
from ..constraints import Alike, Constraint
from ..constraints.compile import compile_constraints
from ..constraints.limits import Limits
from ..constraints.names import Results, names_of, results_of
from ..errors import ConstraintError
from ..layout import Layout
from ..mesh import Mesh
from ..redistribution import Banned
from ..strategies import Strategy
from .candidates import candidates
from .layer_ties import marks_of, tied_classes
from .pricing import Prices

Objective = Literal["step-time", "communication-time"]
OBJECTIVES: tuple[Objective, ...] = ("step-time", "communication-time")

HELD = -1
"""The position of a consumer that wants a tensor in the layout it holds it in: a gradient, or a result."""


@dataclass(frozen=True)
class Demand:
    """A tensor and those who want it in one phase: (solver node, position among its tensor arguments, or HELD).

    ``banned`` are the steps that constraints keep from moving it; where it is ``remade``, they have the backward make
    copies of its own.
    """

    ref: Ref
    phase: str
    consumers: tuple[tuple[int, int], ...]
    banned: Banned = frozenset()
    remade: bool = False


@dataclass(frozen=True)
class CopyChoice:
    """A solver node that decides whether the backward reads a tensor's copy, strategy by strategy."""

    ref: Ref
    node: int
    keeps: tuple[bool, ...]


@dataclass(frozen=True, eq=False)
class Formulation:
    """A problem, and what is needed to read its solution.

    ``strategies[i]`` are those of solver node ``i``. Solver nodes up to the number of graph nodes are the graph's; the
    others hold the ``results``: tensors that leave the graph and have no tangent, by name. A problem with a memory
    budget has further nodes; those that decide about copies are the ``copy_choices``.
    """

    graph: CapturedGraph
    mesh: Mesh
    prices: Prices
    objective: Objective
    constraints: tuple[Constraint, ...]
    results: Results
    strategies: tuple[tuple[Strategy, ...], ...]
    demands: tuple[Demand, ...]
    keep_copies: bool
    problem: Problem
    copy_choices: tuple[CopyChoice, ...] = ()

    @cached_property
    def remade(self) -> frozenset[Ref]:
        """Tensors of which the backward must make copies of its own."""
        return frozenset(demand.ref for demand in self.demands if demand.remade)

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

    def demand_edges(self) -> Iterator[tuple[Demand, int, int, int]]:
        """Every demand with each of its consumers: the solver node, its position, and the number of the edge between.

        The edges of demands come first in the problem, in this order; those of tensors that are to be alike follow.
        """
        consumers = ((demand, *consumer) for demand in self.demands for consumer in demand.consumers)
        return ((demand, node, position, k) for k, (demand, node, position) in enumerate(consumers))

    def making_again(self, tensors: Collection[str]) -> Formulation:
        """The same, in which the backward makes copies of these tensors of its own, whatever is chosen."""
        again = {demand.ref for demand in self.demands if not demand.remade}
        never = (False,) * len(self.strategies[0])
        found = sorted(ref for ref in again if self.graph.tensor_name(ref) in tensors)
        return replace(self, copy_choices=tuple(CopyChoice(ref, 0, never) for ref in found))

    def keeps(self, ref: Ref, choices: Sequence[int]) -> bool:
        """Whether the backward reads a tensor's copies that the forward made, rather than make them again."""
        if ref in self.remade:
            return False
        decided = (choice.keeps[choices[choice.node]] for choice in self.copy_choices if choice.ref == ref)
        return next(decided, self.keep_copies)


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
        constraints: what is decided already.
        tie_layers: decide identical layers once.
        keep_copies: let the backward read copies that the forward made, which is free where memory is; otherwise it
            makes its own.

    Raises:
        ConstraintError: a constraint names nothing, or leaves its tensor or operator no layout that it can have.
        ProfileError: the profile does not cover the mesh.
    """
    prices = Prices(graph, mesh, profile)
    results = results_of(graph)
    limits = compile_constraints(constraints, graph, mesh)
    strategies = candidates(graph, mesh, limits)
    demands = _demands(graph, results, limits)
    terms = _Terms(graph, prices, strategies, objective)
    named = [*(node.name for node in graph.nodes), *(name for name, _ in results)]
    nodes = tuple(SolverNode(name, terms.node_costs(i)) for i, name in enumerate(named))
    edges: list[Edge] = []
    sharing: dict[object, list[Demand]] = defaultdict(list)
    members: dict[object, list[int]] = defaultdict(list)
    for demand in demands:
        sharing[demand.ref if keep_copies and not demand.remade else demand].append(demand)
    for demand in demands:
        key = demand.ref if keep_copies and not demand.remade else demand
        added = terms.edges(demand, sharing[key])
        members[key].extend(range(len(edges), len(edges) + len(added)))
        edges.extend(added)
    groups = tuple(Group(tuple(found)) for found in members.values() if len(found) > 1)
    edges.extend(_equal_layouts(graph, mesh, constraints, strategies))
    ties = _ties(graph, strategies, results, limits, constraints) if tie_layers else ()
    problem = Problem(nodes, tuple(edges), groups, ties, name="sharding")
    return Formulation(
        graph, mesh, prices, objective, tuple(constraints), results, strategies, demands, keep_copies, problem
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


def distinct_layouts(
    strategies: Sequence[Strategy], position: int | None, output: int
) -> tuple[tuple[Layout, ...], np.ndarray]:
    """The distinct layouts of a result (position None) or of what a consumer wants, and each strategy's index."""
    if position is None or position == HELD:
        layouts = [strategy.outputs[output] for strategy in strategies]
    else:
        layouts = [strategy.inputs[position] for strategy in strategies]
    index: dict[Layout, int] = {}
    indices = [index.setdefault(layout, len(index)) for layout in layouts]  # type: ignore[arg-type]
    return tuple(index), np.array(indices, dtype=np.int64)


class _Terms:
    """Costs of nodes and edges as integer arrays, each made once and shared."""

    def __init__(
        self, graph: CapturedGraph, prices: Prices, strategies: tuple[tuple[Strategy, ...], ...], objective: Objective
    ) -> None:
        self._graph, self._prices, self._strategies = graph, prices, strategies
        self._computes = objective == "step-time"
        self._cache: dict[object, np.ndarray] = {}
        self._columns: dict[object, tuple[tuple[Layout, ...], np.ndarray]] = {}

    def node_costs(self, i: int) -> np.ndarray:
        strategies = self._strategies[i]
        key = ("node", id(strategies))
        if key not in self._cache:
            priced = self._computes and i < len(self._graph.nodes)
            seconds = self._prices.compute_s(self._graph.nodes[i], strategies) if priced else np.zeros(len(strategies))
            self._cache[key] = _nanoseconds(seconds)
        return self._cache[key]

    def edges(self, demand: Demand, sharing: Sequence[Demand]) -> list[Edge]:
        """One edge per consumer, on one matrix with a column for every layout that some consumer may want among the
        demands that share what is made.
        """
        before, rows = self._choices(demand.ref.node, None, demand.ref.output)
        after: dict[Layout, None] = {}
        for node, position in (consumer for each in sharing for consumer in each.consumers):
            after.update(dict.fromkeys(self._choices(node, position, 0)[0]))
        columns = tuple(after)
        costs = self._matrix(self._graph.meta(demand.ref), before, columns, demand.banned)
        return [
            Edge(demand.ref.node, node, rows, self._column_indices(node, position, columns), costs)
            for node, position in demand.consumers
        ]

    def _choices(self, node: int, position: int | None, output: int) -> tuple[tuple[Layout, ...], np.ndarray]:
        key = (id(self._strategies[node]), position, output)
        if key not in self._columns:
            self._columns[key] = distinct_layouts(self._strategies[node], position, output)
        return self._columns[key]

    def _column_indices(self, node: int, position: int, columns: tuple[Layout, ...]) -> np.ndarray:
        key = (id(self._strategies[node]), position, columns)
        if key not in self._cache:
            layouts, indices = self._choices(node, position, 0)
            place = {layout: k for k, layout in enumerate(columns)}
            self._cache[key] = np.array([place[layout] for layout in layouts], dtype=np.int64)[indices]
        return self._cache[key]

    def _matrix(
        self, meta: TensorMeta, before: tuple[Layout, ...], after: tuple[Layout, ...], banned: Banned
    ) -> np.ndarray:
        key = (meta, before, after, banned)
        if key not in self._cache:
            self._cache[key] = _nanoseconds(self._prices.matrix_s(meta, before, after, banned))
        return self._cache[key]


def _nanoseconds(seconds: np.ndarray) -> np.ndarray:
    finite = np.isfinite(seconds)
    return np.where(finite, np.rint(np.where(finite, seconds, 0.0) * 1e9), INFEASIBLE).astype(np.int64)


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
