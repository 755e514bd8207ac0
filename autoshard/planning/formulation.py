"""From a captured graph to the solver's problem.

One solver node for every graph node, plus one for every result that leaves the graph. An edge for every tensor
argument: rows are the layouts the producer can give the tensor, columns those its consumers in one phase want of it.
Consumers of one tensor form a group: each distinct layout is paid once, as the backward may read the copies that the
forward made. Identical layers are tied. Costs are integer nanoseconds, rounded here and nowhere else.

Under a memory budget :mod:`autoshard.planning.liveness` adds what every choice holds in memory and when.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cached_property
from typing import Literal

import numpy as np

from cost_models import Profile
from solver import INFEASIBLE, Edge, Group, Problem
from solver import Node as SolverNode

from ..capture import CapturedGraph, Node, Ref, TensorMeta, annotated
from ..constraints import Alike, AxisScheme, Constraint, check_constraints_match, check_specs_fit, parse_pin
from ..constraints.limits import Exactly, Limit, Limits, Taking
from ..constraints.schemes import limit_to_schemes
from ..errors import ConstraintError, LayoutError
from ..layout import Layout, format_layout, format_strategy
from ..mesh import Mesh
from ..redistribution import Banned
from ..strategies import Enumerator, Strategy
from .layer_ties import marks_of, tied_classes
from .pricing import Prices

Objective = Literal["step-time", "communication-time"]
OBJECTIVES: tuple[Objective, ...] = ("step-time", "communication-time")

MOST_SHOWN = 12
"""Layouts or strategies that an error lists."""

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
    results: tuple[tuple[str, Ref], ...]
    strategies: tuple[tuple[Strategy, ...], ...]
    demands: tuple[Demand, ...]
    keep_copies: bool
    problem: Problem
    copy_choices: tuple[CopyChoice, ...] = ()

    @cached_property
    def remade(self) -> frozenset[Ref]:
        """Tensors of which the backward must make copies of its own."""
        return frozenset(demand.ref for demand in self.demands if demand.remade)

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
    results = _results(graph)
    limits = _limits(graph, mesh, constraints, results)
    strategies = _Candidates(graph, mesh, limits).of_all(results)
    demands = _demands(graph, results, limits)
    terms = _Terms(graph, prices, strategies, objective)
    nodes = tuple(SolverNode(terms.name(i, results), terms.node_costs(i)) for i in range(len(strategies)))
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
    edges.extend(_equal_layouts(graph, mesh, constraints, results, strategies))
    ties = _ties(graph, strategies, results, limits, constraints) if tie_layers else ()
    problem = Problem(nodes, tuple(edges), groups, ties, name="sharding")
    return Formulation(
        graph, mesh, prices, objective, tuple(constraints), results, strategies, demands, keep_copies, problem
    )


def output_name(index: int) -> str:
    """The name of a leaf of the model's result, in pins and plans."""
    return f"output.{index}"


def _results(graph: CapturedGraph) -> tuple[tuple[str, Ref], ...]:
    tangents = {node.name for _, node in graph.of_kind("tangent")}
    outputs = [
        (output_name(k), ref) for k, ref in enumerate(graph.outputs) if ref is not None and f"grad.{k}" not in tangents
    ]
    return (*outputs, *((f"new {name}", ref) for name, ref in graph.mutations))


def _limits(
    graph: CapturedGraph, mesh: Mesh, constraints: Sequence[Constraint], results: tuple[tuple[str, Ref], ...]
) -> Limits:
    """What the constraints leave, by solver node and by tensor; every constraint must name something."""
    names = [pin_name(node) for node in graph.nodes] + [name for name, _ in results]
    tensors = [graph.tensor_name(Ref(i, k)) for i, node in enumerate(graph.nodes) for k in range(len(node.outputs))]
    check_constraints_match(constraints, names, tensors)
    metas = [node.outputs[0] for node in graph.nodes] + [graph.meta(ref) for _, ref in results]
    check_specs_fit(constraints, {name: meta.shape for name, meta in zip(names, metas) if meta is not None})
    limits = Limits(graph, names)
    for constraint in constraints:
        if not isinstance(constraint, AxisScheme | Alike):
            limits.add(constraint)
    for i, node, text in annotated(graph):
        limits.limit(i, _annotation(node, text, mesh))
    limit_to_schemes(limits, [c for c in constraints if isinstance(c, AxisScheme)], graph, mesh)
    return limits


def _annotation(node: Node, text: str, mesh: Mesh) -> Limit:
    """What ``autoshard.constrain`` says in the model."""
    assert node.outputs[0] is not None
    where = f"autoshard.constrain at {node.source or node.name}"
    try:
        pin = parse_pin(f"{node.name}={text}", mesh)
        check_specs_fit([pin], {node.name: node.outputs[0].shape})
    except (ConstraintError, LayoutError) as error:
        raise ConstraintError(f"{where}: {error}") from None
    return Exactly(pin.layout, f"{text} of {where}", "annotation")


class _Candidates:
    """The strategies of every solver node, under its limits."""

    def __init__(self, graph: CapturedGraph, mesh: Mesh, limits: Limits) -> None:
        self._graph, self._mesh, self._limits = graph, mesh, limits
        self._enumerator = Enumerator(graph, mesh)
        self._limited: dict[object, tuple[Strategy, ...]] = {}

    def of_all(self, results: tuple[tuple[str, Ref], ...]) -> tuple[tuple[Strategy, ...], ...]:
        names = [pin_name(node) for node in self._graph.nodes] + [name for name, _ in results]
        candidates = [self._enumerator.strategies(node) for node in self._graph.nodes]
        mutated = {ref for _, ref in self._graph.mutations}
        candidates += [self._enumerator.held(self._graph.meta(ref), cut=ref not in mutated) for _, ref in results]
        return tuple(
            self._under_limits(i, name, strategies) for i, (name, strategies) in enumerate(zip(names, candidates))
        )

    def _under_limits(self, index: int, name: str, strategies: tuple[Strategy, ...]) -> tuple[Strategy, ...]:
        """The same tuple for equal strategies under equal limits, so that prices are worked out once."""
        offered = strategies
        applied: list[Limit] = []
        for limit in self._limits.of(index):
            key = (id(strategies), limit)
            if key not in self._limited:
                self._limited[key] = _kept(limit, strategies)
            if not self._limited[key]:
                raise ConstraintError(self._impossible(limit, name, offered, applied))
            strategies = self._limited[key]
            applied.append(limit)
        return strategies

    def _impossible(self, limit: Limit, name: str, strategies: tuple[Strategy, ...], applied: list[Limit]) -> str:
        """Says what a tensor can have, and which constraint stands in the way where it is not the tensor itself."""
        alone = _kept(limit, strategies)
        if not alone:
            texts = [format_layout(layout, self._mesh) for layout in _layouts(strategies)]
            if isinstance(limit, Taking):
                texts = [format_strategy(s.inputs, s.outputs, self._mesh) for s in strategies]
            possible = "; ".join(texts[:MOST_SHOWN]) + (
                f"; and {len(texts) - MOST_SHOWN} more" * (len(texts) > MOST_SHOWN)
            )
            return f"the {limit.kind} {limit.text!r} cannot hold: on the mesh {self._mesh}, {name} can have {possible}"
        against = [other for other in applied if not _kept(other, alone)][:1] or applied
        others = " and ".join(f"the {other.kind} {other.text!r}" for other in against)
        return f"the {limit.kind} {limit.text!r} contradicts {others}: {name} cannot have a layout that suits both"


def _kept(limit: Limit, strategies: tuple[Strategy, ...]) -> tuple[Strategy, ...]:
    layouts = limit.keep(_layouts(strategies))
    kept = (s for s in strategies if s.outputs[0] in layouts or (isinstance(limit, Taking) and s.outputs[0] is None))
    return tuple(s for s in kept if not isinstance(limit, Taking) or limit.allows(s.inputs, s.outputs))


def _layouts(strategies: tuple[Strategy, ...]) -> tuple[Layout, ...]:
    """The distinct layouts of the first result."""
    return tuple(dict.fromkeys(s.outputs[0] for s in strategies if s.outputs[0] is not None))


def pin_name(node: Node) -> str:
    """The name of a node in pins and plans: a tangent goes by its output."""
    return output_name(int(node.name.removeprefix("grad."))) if node.kind == "tangent" else node.name


def _demands(graph: CapturedGraph, results: tuple[tuple[str, Ref], ...], limits: Limits) -> tuple[Demand, ...]:
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
    results: tuple[tuple[str, Ref], ...],
    strategies: tuple[tuple[Strategy, ...], ...],
) -> Iterator[Edge]:
    """For tensors that are to be alike: an edge from the first to each other that allows equal layouts only."""
    names = [pin_name(node) for node in graph.nodes] + [name for name, _ in results]
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

    def name(self, i: int, results: tuple[tuple[str, Ref], ...]) -> str:
        known = len(self._graph.nodes)
        return self._graph.nodes[i].name if i < known else results[i - known][0]

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
    results: tuple[tuple[str, Ref], ...],
    limits: Limits,
    constraints: Sequence[Constraint],
) -> tuple[tuple[int, ...], ...]:
    """Identical layers, as far as constraints do not tell them apart."""
    names = [pin_name(node) for node in graph.nodes] + [name for name, _ in results]
    made = {f"grad.{k}": ref.node for k, ref in enumerate(graph.outputs) if ref is not None}
    makers = [made.get(node.name, i) if node.kind == "tangent" else i for i, node in enumerate(graph.nodes)]
    makers += [ref.node for _, ref in results]
    marks = marks_of(graph, names, makers, limits, constraints)
    return tied_classes(graph, [(id(strategies[i]), mark) for i, mark in enumerate(marks)])
