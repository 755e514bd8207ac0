"""From a captured graph to the solver's problem.

One solver node for every graph node, plus one for every result that leaves the graph; for every tensor a network of
its layouts (:mod:`autoshard.planning.tensor_networks`), on which it gets from whoever makes it to all who want it: each
step is paid once, as the backward may read the copies that the forward made. On a trained parameter stands the price of
the optimizer's step over it, so that of layouts that are as fast otherwise the one that holds less is taken. Identical
layers are tied. Costs are integer nanoseconds, rounded as the program is written and nowhere else.

What the backward computes again is decided before, or in the program: then the graph is the one in which all is
computed again that may be, and an operator of which there is a second has two choices for each strategy, to be computed
once and to be computed again. The second is no decision of its own: it is computed as the first is (the program is far
from integral where it may differ) and makes again what is in the network of the first operator's tensor.

Under a memory budget :mod:`autoshard.planning.lives` adds what every choice holds in memory and when.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from itertools import pairwise
from typing import Literal

import numpy as np

from cost_models import OptimizerPolicy, Profile
from solver import INFEASIBLE, Assignment, Edge, Problem, Routes, evaluate, routed
from solver import Node as SolverNode

from ..capture import CapturedGraph, Ref, annotated, recomputed
from ..constraints import Alike, Constraint
from ..constraints.compile import compile_constraints
from ..constraints.computed_again import again_under, may_be_again
from ..constraints.limits import Limits
from ..constraints.names import Results, is_meant, names_of, results_of
from ..errors import ConstraintError, ContradictionError
from ..layout import Layout
from ..mesh import Mesh
from ..micro_batches import operator_runs
from ..ops import is_free, known
from ..recomputation import again_name
from ..strategies import Asked, Rulebook, Strategy
from .candidates import candidates, what_it_can_have
from .layer_ties import in_groups, marks_of, tied_classes
from .pricing import NO_OPTIMIZER, Prices, is_looked_at_again
from .short_graph import ShortGraph, short_graphs, times_of
from .tensor_networks import HELD, Demand, TensorNetwork, layout_of, networks_of

Objective = Literal["step-time", "overlapped-step-time", "communication-time"]
OBJECTIVES: tuple[Objective, ...] = ("step-time", "overlapped-step-time", "communication-time")


@dataclass(frozen=True, eq=False)
class Formulation:
    """A problem, and what is needed to read its solution.

    ``strategies[i]`` are those of solver node ``i``. Solver nodes up to the number of graph nodes are the graph's; the
    others hold the ``results``: tensors that leave the graph and have no tangent, by name. ``networks`` are those of
    ``free``, the problem without memory, of which ``problem`` may have more to say: what is held, and the limit.

    ``asked`` are cuts in parts that the constraints ask for, beside those of the graph. ``groups`` names the groups of
    layers where identical layers are not all decided alike (:meth:`in_groups`).

    ``shorts`` say how the graph was shortened, where identical layers are left out, and ``times`` for how many nodes of
    the ``whole`` one each of its nodes stands, and is paid.

    ``seconds`` has for every second operator of a program that decides what is computed again the first one, whose
    choices are its strategies and then the same with the second operator.
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
    seconds: Mapping[int, int]
    asked: Asked = ()
    groups: tuple[str, ...] = ()
    shorts: tuple[ShortGraph, ...] = ()

    @property
    def times(self) -> tuple[int, ...]:
        """For how many nodes of the whole graph each node of the graph stands; empty where that is itself."""
        return self.prices.times

    @property
    def whole(self) -> CapturedGraph:
        """The graph of the whole step."""
        return self.shorts[0].longer if self.shorts else self.graph

    def in_groups(self, share: float, fewest: int = 2) -> Formulation:
        """The same program in which identical layers are decided alike in two groups: the first ones, and the others.

        Args:
            share: which part of the layers the first group is, rounded up.
            fewest: how many identical layers there are at least where they are two groups.
        """
        ties, groups = in_groups(self.graph, self.problem.ties, share, fewest)
        free, problem = (replace(given, ties=ties) for given in (self.free, self.problem))
        return replace(self, free=free, problem=problem, groups=groups)

    @cached_property
    def twice(self) -> frozenset[int]:
        """The operators that may be computed again, whose strategies are two choices each."""
        return frozenset(self.seconds.values())

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
    chooses_again: bool = False,
    policy: OptimizerPolicy = NO_OPTIMIZER,
    bucket_bytes: int = 0,
    gathers_ahead: bool = True,
    rulebook: Rulebook | None = None,
    asked: Asked = (),
    shortens: bool = False,
) -> Formulation:
    """Builds the integer program of a graph on a mesh of a machine.

    Args:
        objective: ``step-time`` adds compute, communication and the optimizer's step; in ``overlapped-step-time`` what
            may travel beside computation costs the profile's ``contention`` of that, as if all of it did;
            ``communication-time`` counts communication alone, under which full replication is free: it is meant for use
            with pins.
        graph: as captured; the program's is the one in which what the constraints want is computed again.
        constraints: what is decided already.
        tie_layers: decide identical layers once.
        keep_copies: let the backward read copies that the forward made, which is free where memory is; otherwise it
            makes its own.
        chooses_again: let the program decide what is computed again, beside what constraints want.
        policy: of the optimizer whose step is priced; by default of none.
        bucket_bytes, gathers_ahead: how much travels together, and whether ahead (:mod:`autoshard.plans.schedule`).
        rulebook: the rules of operators that are known already; left out, those that were checked in this process.
        asked: cuts in parts that are to be choices, beside those that the graph and the constraints ask for.
        shortens: leave out identical layers, but for a few that stand for them, where nothing tells them apart and all
            are decided once: the same program, but that it has no lives (:mod:`autoshard.planning.lives`).

    Raises:
        ConstraintError: a constraint names nothing, or leaves its tensor or operator no layout that it can have.
        ProfileError: the profile does not cover the mesh.
    """
    graph = graph.original or graph if chooses_again else graph
    wanted = again_under(constraints, graph)
    open_ones = _worth_it(graph, may_be_again(constraints, graph) | wanted) if chooses_again else frozenset[str]()
    graph = recomputed(graph, wanted | open_ones)
    contention = profile.contention if objective == "overlapped-step-time" else 1.0
    is_open = not (constraints or asked or chooses_again) and next(annotated(graph), None) is None
    shorts = short_graphs(graph) if shortens and is_open and tie_layers else []
    whole, graph = graph, shorts[-1].graph if shorts else graph
    how = (policy, bucket_bytes, contention, gathers_ahead)
    prices = Prices(graph, mesh, profile, *how, times_of(shorts), whole if shorts else None)
    limits = compile_constraints(constraints, graph, mesh)
    for ref, placement in asked:
        limits.ask(ref, placement)
    return assemble(
        graph,
        mesh,
        prices,
        limits,
        candidates(graph, mesh, limits, rulebook),
        objective=objective,
        constraints=constraints,
        tie_layers=tie_layers,
        keep_copies=keep_copies,
        seconds=_seconds(graph) if chooses_again else {},
        wanted=wanted,
        shorts=shorts,
    )


def assemble(
    graph: CapturedGraph,
    mesh: Mesh,
    prices: Prices,
    limits: Limits,
    strategies: tuple[tuple[Strategy, ...], ...],
    *,
    objective: Objective,
    constraints: Sequence[Constraint],
    tie_layers: bool,
    keep_copies: bool,
    seconds: Mapping[int, int] = {},
    wanted: Collection[str] = (),
    shorts: Sequence[ShortGraph] = (),
) -> Formulation:
    """The integer program of a graph whose strategies are known.

    Args:
        shorts: how the graph was shortened, where it was.
        limits: what the constraints say of the graph.
        seconds: operators that may compute another one again, and which; those of the operators ``wanted`` do.
    """
    results = results_of(graph)
    demands = _demands(graph, results, limits, seconds)
    times = prices.times
    costs = _Costs(graph, prices, strategies, objective, times)
    named = [*(node.name for node in graph.nodes), *(name for name, _ in results)]
    nodes = tuple(_nodes(named, _node_costs(graph, costs, seconds, wanted)))
    networks = tuple(
        networks_of(graph, prices, strategies, demands, keep_copies=keep_copies, seconds=seconds, times=times)
    )
    edges = (
        *_equal_layouts(graph, mesh, constraints, limits, strategies, seconds),
        *_views_as_made(graph, strategies, seconds),
        *_parts_as_wholes(graph, strategies, seconds),
        *_first_readers(graph, prices, strategies, demands, seconds, times),
    )
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
        seconds=seconds,
        asked=limits.asked,
        shorts=tuple(shorts),
    )


def _worth_it(graph: CapturedGraph, names: Collection[str]) -> frozenset[str]:
    """Those of the operators that are worth computing again: of views only those of what may be, too, and those of
    parameters, which are gathered anew so. Others share the memory of what is there anyway.
    """
    makers = {i for i, _ in graph.of_kind("parameter")}
    found: list[str] = []
    for i, node in graph.of_kind("operator"):
        shares = is_free(node) and bool(node.inputs) and node.inputs[0].node not in makers
        if node.name in names and node.phase == "forward" and not shares:
            makers.add(i)
            found.append(node.name)
    return frozenset(found)


def _views_as_made(
    graph: CapturedGraph, strategies: tuple[tuple[Strategy, ...], ...], seconds: Mapping[int, int]
) -> Iterator[Edge]:
    """Edges by which views are made again where what they look at is, and else are not: it is there or is not."""
    twice = frozenset(seconds.values())
    for i in sorted(twice):
        node = graph.nodes[i]
        if is_free(node) and node.inputs and node.inputs[0].node in twice:
            looked_at = node.inputs[0].node
            rows, columns = (_is_again(len(strategies[k])) for k in (looked_at, i))
            yield Edge(looked_at, i, rows, columns, _BOTH_OR_NEITHER)


def _parts_as_wholes(
    graph: CapturedGraph, strategies: tuple[tuple[Strategy, ...], ...], seconds: Mapping[int, int]
) -> Iterator[Edge]:
    """Edges by which an operator and its parts take the tensor that they share in one layout."""
    twice = frozenset(seconds.values())
    for i, node in graph.of_kind("operator"):
        makers = [node.inputs[position].node for position in known(node.op).parts]
        joined = [seconds.get(maker, maker) for maker in makers] + [i]
        for u, v in pairwise(joined) if i not in seconds else ():
            number: dict[Layout, int] = {}
            rows, columns = (
                [number.setdefault(strategy.inputs[0], len(number)) for strategy in strategies[k]] for k in (u, v)
            )
            costs = np.where(np.eye(len(number), dtype=bool), 0, INFEASIBLE)
            yield Edge(u, v, np.tile(rows, 1 + (u in twice)), np.tile(columns, 1 + (v in twice)), costs)


def _first_readers(
    graph: CapturedGraph,
    prices: Prices,
    strategies: tuple[tuple[Strategy, ...], ...],
    demands: Sequence[Demand],
    seconds: Mapping[int, int],
    times: Sequence[int],
) -> Iterator[Edge]:
    """Edges that pay for what does not hide of an activation's way to a reader right behind its maker."""
    twice = frozenset(seconds.values())
    banned = {demand.ref: demand.banned for demand in reversed(demands)}
    known: dict[object, tuple[np.ndarray, np.ndarray, np.ndarray]] = {}
    for ref, reader, position in prices.read_at_once():
        ends = (ref.node, None, ref.output), (reader, position, 0)
        runs = times[ref.node] if times else 1
        key = graph.meta(ref), banned[ref], runs, *((id(strategies[i]), at, k, i in twice) for i, at, k in ends)
        if key not in known:
            numbers: list[dict[Layout, int]] = [{}, {}]
            rows, columns = (
                np.tile([number.setdefault(layout_of(s, at, k), len(number)) for s in strategies[i]], 1 + (i in twice))
                for number, (i, at, k) in zip(numbers, ends)
            )
            more_s = prices.unhidden_s(graph.meta(ref), tuple(numbers[0]), tuple(numbers[1]), banned[ref])
            known[key] = rows, columns, runs * np.floor(more_s * 1e9).astype(np.int64)
        rows, columns, costs = known[key]
        if costs.any():
            yield Edge(ref.node, reader, rows, columns, costs)


@cache
def _is_again(strategies: int) -> np.ndarray:
    """Per choice of an operator that may be computed again, whether it is."""
    return np.repeat(np.arange(2, dtype=np.int64), strategies)


_BOTH_OR_NEITHER = np.array([[0, INFEASIBLE], [INFEASIBLE, 0]], np.int64)


def _seconds(graph: CapturedGraph) -> dict[int, int]:
    """For every operator that computes another one again, that one."""
    first = {node.name: i for i, node in graph.of_kind("operator") if node.phase == "forward"}
    second = {again_name(name): first[name] for name in graph.again}
    return {i: second[node.name] for i, node in graph.of_kind("operator") if node.name in second}


def _demands(graph: CapturedGraph, results: Results, limits: Limits, seconds: Mapping[int, int]) -> tuple[Demand, ...]:
    """Every tensor with those who want it, by phase, in graph order; what ``seconds`` make again is the tensor itself.

    A parameter wants its gradient in its own layout, in the backward, and in the forward what is written into it; a
    tangent stands for the output it belongs to.
    """
    wanted: dict[tuple[Ref, str], list[tuple[int, int]]] = defaultdict(list)
    for i, node in enumerate(graph.nodes):
        for position, ref in enumerate(node.inputs):
            wanted[Ref(seconds.get(ref.node, ref.node), ref.output), node.phase].append((i, position))
    number = {node.name: i for i, node in enumerate(graph.nodes) if node.kind != "operator"}
    for name, ref in graph.gradients:
        if ref.node != number[name]:
            wanted[ref, "backward"].append((number[name], HELD))
    for name, ref in graph.mutations:
        if graph.nodes[number[name]].kind == "parameter":
            wanted[ref, "forward"].append((number[name], HELD))
    for k, output in enumerate(graph.outputs):
        if output is not None and f"grad.{k}" in number:
            wanted[output, "forward"].append((number[f"grad.{k}"], HELD))
    for k, (_, ref) in enumerate(results):
        wanted[ref, "forward"].append((len(graph.nodes) + k, HELD))
    again = {first: second for second, first in seconds.items()}

    def demand(ref: Ref, phase: str, consumers: list[tuple[int, int]]) -> Demand:
        banned, remade = limits.banned(ref), limits.remade(ref)
        if ref.node in again:
            other = Ref(again[ref.node], ref.output)
            banned, remade = banned | limits.banned(other), remade or limits.remade(other)
        return Demand(ref, phase, tuple(consumers), banned, remade)

    return tuple(demand(ref, phase, consumers) for (ref, phase), consumers in wanted.items())


def _equal_layouts(
    graph: CapturedGraph,
    mesh: Mesh,
    constraints: Sequence[Constraint],
    limits: Limits,
    strategies: tuple[tuple[Strategy, ...], ...],
    seconds: Mapping[int, int],
) -> Iterator[Edge]:
    """For tensors that are to be alike: an edge from the first to each other that allows equal layouts only."""
    names, twice = names_of(graph), set(seconds.values())
    for alike in (constraint for constraint in constraints if isinstance(constraint, Alike)):
        members = [i for i, name in enumerate(names) if is_meant(name, graph, alike.patterns)]
        members = [i for i in members if i not in seconds]
        for other in members[1:]:
            rows, columns = ([s.outputs[0] for s in strategies[i]] for i in (members[0], other))
            if not set(rows) & set(columns):
                said = (what_it_can_have(names[i], strategies[i], limits.of(i), mesh) for i in (members[0], other))
                is_limited = any(limits.of(i) for i in (members[0], other))
                raise (ContradictionError if is_limited else ConstraintError)(
                    f"the constraint {alike.text!r} cannot hold: no layout is one that both {names[members[0]]} and "
                    f"{names[other]} can have on the mesh {mesh}: {', and '.join(said)}"
                )
            costs = np.array([[0 if row == column else INFEASIBLE for column in columns] for row in rows], np.int64)
            yield Edge.dense(members[0], other, np.tile(costs, [1 + (i in twice) for i in (members[0], other)]))


def _node_costs(
    graph: CapturedGraph, costs: _Costs, seconds: Mapping[int, int], wanted: Collection[str]
) -> list[np.ndarray]:
    """Of every choice of every node; of operators whose seconds are ``wanted`` only to be computed again."""
    found = [costs.of(i) for i in range(len(costs))]
    known: dict[object, np.ndarray] = {}
    nothing = np.zeros(1, np.int64)
    for second, first in seconds.items():
        is_wanted = graph.nodes[first].name in wanted
        key = id(found[first]), costs.is_offered(first, second), is_wanted, is_looked_at_again(graph.nodes[second])
        if key not in known:
            again = np.where(costs.is_offered(first, second), found[first] + costs.of(first, second), INFEASIBLE)
            once = np.full_like(again, INFEASIBLE) if is_wanted else found[first]
            known[key] = np.concatenate([once, again])
        found[first], found[second] = known[key], nothing
    return found


def _nodes(names: Sequence[str], costs: Sequence[np.ndarray]) -> Iterator[SolverNode]:
    """The decisions of the program; those of equal costs are checked once."""
    known: dict[int, SolverNode] = {}
    for name, cost in zip(names, costs):
        if id(cost) not in known:
            known[id(cost)] = SolverNode(name, cost)
        yield known[id(cost)].named(name)


class _Costs:
    """Costs of nodes in integer nanoseconds, those of equal strategies once."""

    def __init__(
        self,
        graph: CapturedGraph,
        prices: Prices,
        strategies: tuple[tuple[Strategy, ...], ...],
        objective: Objective,
        times: Sequence[int],
    ) -> None:
        self._graph, self._prices, self._strategies, self._times = graph, prices, strategies, times
        self._computes = objective != "communication-time"
        self._trained = frozenset(name for name, _ in graph.gradients) if self._computes else frozenset[str]()
        self._known: dict[object, np.ndarray] = {}

    def __len__(self) -> int:
        return len(self._strategies)

    def is_offered(self, first: int, second: int) -> tuple[bool, ...]:
        """Which strategies of a node another one has too."""
        if self._strategies[first] is self._strategies[second]:
            return (True,) * len(self._strategies[first])
        return tuple(strategy in self._strategies[second] for strategy in self._strategies[first])

    def of(self, i: int, second: int | None = None) -> np.ndarray:
        """Those of the strategies of a node; or of the operator that computes it again, under the same."""
        node = i if second is None else second
        strategies, steps, runs = self._strategies[i], self._steps(node), self._runs(node)
        is_again = node < len(self._graph.nodes) and is_looked_at_again(self._graph.nodes[node])
        # tensors of all dtypes share strategies
        key = id(strategies), self._graph.meta(Ref(node)) if steps else None, runs, is_again
        if key not in self._known:
            self._known[key] = runs * np.rint(self._seconds(node, strategies, steps) * 1e9).astype(np.int64)
        return self._known[key]

    def _runs(self, i: int) -> int:
        """How often in a step a node costs what it costs."""
        node = self._graph.nodes[i] if i < len(self._graph.nodes) else None
        is_operator = node is not None and node.kind == "operator"
        runs = operator_runs(node.name, self._graph.micro_batches) if node is not None and is_operator else 1
        return runs * self._times[i] if self._times and node is not None else runs

    def _seconds(self, i: int, strategies: tuple[Strategy, ...], steps: bool) -> np.ndarray:
        if steps:
            return self._prices.optimizer_s(self._graph.meta(Ref(i)), (layout_of(each, None) for each in strategies))
        if self._computes and i < len(self._graph.nodes):
            return self._prices.compute_s(self._graph.nodes[i], strategies)
        return np.zeros(len(strategies))

    def _steps(self, i: int) -> bool:
        """Whether an optimizer steps what a node stands for."""
        node = self._graph.nodes[i] if i < len(self._graph.nodes) else None
        return node is not None and node.kind == "parameter" and node.name in self._trained


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
