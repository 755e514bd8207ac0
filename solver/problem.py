"""The problem as a value: nodes that choose one strategy each, edges and networks that price how choices meet, usage.

Legend of shapes: N nodes, E edges, S strategies of a node, R rows and C columns of an edge matrix.

    minimise    offset + sum_i costs_i[x_i] + sum_e cost_e(x_u, x_v) + sum_n cost of the routes of network n
    subject to  x_i in {0 .. S_i - 1}
                for every time step t:  sum of usages_i[x_i] over the loads live at t
                                        + sizes of the copies that networks hold at t  <=  usage_limit
                the routes of every network lead from where its producer makes the tensor to where consumers want it

Everything is an integer, so that every backend and the evaluator agree exactly.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import NamedTuple

import numpy as np

from .integers import INFEASIBLE, IntArray, ProblemError, as_costs, as_integers
from .networks import NOWHERE, Life, Network


class Load(NamedTuple):
    """Bytes held while live: `usages[s]` under strategy s at every step of the half-open `interval`."""

    interval: tuple[int, int]
    usages: IntArray


@dataclass(frozen=True, eq=False, slots=True)
class Node:
    """One decision.

    Invariants: at least one strategy; `usages` and the usages of `further_loads` have the length of `costs` and are not
    negative; intervals are (lo, hi) with 0 <= lo <= hi.

    Attributes:
        name: for messages only.
        costs: int64 (S,); INFEASIBLE forbids the strategy.
        usages: int64 (S,), bytes under each strategy while the node is live; None for a node that uses nothing.
        interval: half-open live interval [lo, hi) in time steps; an empty one never counts.
        further_loads: the other loads of a node that stands for several (tied or contracted) ones.
    """

    name: str
    costs: IntArray
    usages: IntArray | None = None
    interval: tuple[int, int] = (0, 0)
    further_loads: tuple[Load, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "costs", as_costs(self.costs, 1, f"costs of node {self.name!r}"))
        if self.usages is not None:
            object.__setattr__(self, "usages", as_integers(self.usages, 1, f"usages of node {self.name!r}"))
        if not len(self.costs):
            raise ProblemError(f"node {self.name!r} has no strategy: give it at least one")
        lo, hi = self.interval
        if not 0 <= lo <= hi:
            raise ProblemError(f"node {self.name!r} has interval ({lo}, {hi}): expected 0 <= lo <= hi")
        for _, usages in self.loads:
            if usages.shape != self.costs.shape:
                raise ProblemError(
                    f"node {self.name!r} has {len(self.costs)} costs and {len(usages)} usages: one of each per strategy"
                )
            if usages.min() < 0:
                raise ProblemError(f"node {self.name!r} has the negative usage {usages.min()}")

    def named(self, name: str) -> Node:
        """The same decision under another name: nothing needs to be checked again."""
        made = object.__new__(Node)
        object.__setattr__(made, "name", name)
        for each in _UNNAMED:
            object.__setattr__(made, each, getattr(self, each))
        return made

    @property
    def loads(self) -> tuple[Load, ...]:
        """All loads that are live at some step."""
        if self.usages is None or self.interval[0] == self.interval[1]:
            return self.further_loads
        return (Load(self.interval, self.usages), *self.further_loads)


_UNNAMED = tuple(each for each in Node.__slots__ if each != "name")


@dataclass(frozen=True, eq=False, slots=True)
class Edge:
    """What a pair of choices costs: `costs[rows[x_u], cols[x_v]]`, with INFEASIBLE for an absent pair.

    The factored form says that the price depends on classes of strategies only, such as the layout that the producer's
    strategy gives a tensor (rows) and the layout that the consumer's strategy wants (cols). Arrays may be, and for
    speed should be, shared between edges.

    Invariants: u != v; rows in [0, R), cols in [0, C), costs (R, C).
    """

    u: int
    v: int
    rows: IntArray
    cols: IntArray
    costs: IntArray

    def __post_init__(self) -> None:
        where = f"edge ({self.u}, {self.v})"
        if self.u == self.v:
            raise ProblemError(f"{where} joins a node to itself: add its diagonal to the node's costs instead")
        object.__setattr__(self, "costs", as_costs(self.costs, 2, f"costs of {where}"))
        for side, size in zip(("rows", "cols"), self.costs.shape, strict=True):
            indices = as_integers(getattr(self, side), 1, f"{side} of {where}")
            object.__setattr__(self, side, indices)
            if not len(indices) or indices.min() < 0 or indices.max() >= size:
                raise ProblemError(f"{side} of {where} must lie in [0, {size}), the shape of its costs")

    @staticmethod
    def dense(u: int, v: int, costs: IntArray) -> Edge:
        """The edge whose matrix has one row per strategy of u and one column per strategy of v."""
        return Edge(u, v, identity(costs.shape[0]), identity(costs.shape[1]), costs)


@dataclass(frozen=True, slots=True)
class Group:
    """Edges that pay a (row, column) pair once: consumers of one tensor that want the same layout share it.

    cost = sum of costs[row, c] over the distinct columns c that the consumers chose.

    Invariants: the edges have the same u, equal rows and equal costs, no negative cost; an edge is in at most one
    group.
    """

    edges: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Budget:
    """At most `limit` units together: sum over the nodes of usages[node][x_node] <= limit.

    Attributes:
        name: for messages.
        limit: the units that there are.
        usages: node -> int64 (S,), units under each of its strategies; other nodes use none.
    """

    name: str
    limit: int
    usages: Mapping[int, IntArray]


@dataclass(frozen=True, eq=False)
class Problem:
    """A whole problem; see the module's docstring for the objective.

    Attributes:
        ties: classes of nodes that choose the same strategy index; all of a class have the same S.
        fixed: node -> strategy that it must choose.
        usage_limit: bytes that may be in use at any time step; None for no limit.
        offset: a constant of the objective (reductions move costs there).
        usage_price: makes the usage limit soft: the objective pays this for every byte that the peak over time is above
            the limit. None: the limit is hard.
        budgets: further limits, each on a sum without intervals. Not together with a usage_price.
        networks: tensors that get from where they are made to where they are wanted by single steps; see
            `solver.networks`.

    Raises:
        ProblemError: an index is out of range or a shape, tie, group, limit or network breaks its invariant.
    """

    nodes: tuple[Node, ...]
    edges: tuple[Edge, ...]
    groups: tuple[Group, ...] = ()
    ties: tuple[tuple[int, ...], ...] = ()
    fixed: Mapping[int, int] = field(default_factory=dict)
    usage_limit: int | None = None
    name: str = ""
    offset: int = 0
    usage_price: int | None = None
    budgets: tuple[Budget, ...] = ()
    networks: tuple[Network, ...] = ()

    def __post_init__(self) -> None:
        sizes = [len(node.costs) for node in self.nodes]
        for index, edge in enumerate(self.edges):
            self._check_node(edge.u, f"edge {index}")
            self._check_node(edge.v, f"edge {index}")
            if len(edge.rows) != sizes[edge.u] or len(edge.cols) != sizes[edge.v]:
                raise ProblemError(
                    f"edge {index} ({edge.u}, {edge.v}) maps {len(edge.rows)} and {len(edge.cols)} strategies, "
                    f"but its nodes have {sizes[edge.u]} and {sizes[edge.v]}"
                )
        self._check_groups()
        self._check_ties(sizes)
        for node, strategy in self.fixed.items():
            self._check_node(node, "fixed")
            if not 0 <= strategy < sizes[node]:
                raise ProblemError(f"fixed: node {node} has {sizes[node]} strategies, {strategy} is not one of them")
        if self.usage_limit is not None and self.usage_limit < 0:
            raise ProblemError(f"usage_limit is {self.usage_limit}: expected a number of bytes, or None for no limit")
        if self.usage_price is not None and (self.usage_price < 0 or self.usage_limit is None):
            raise ProblemError(
                f"usage_price is {self.usage_price}: expected a cost from 0 up, and a usage_limit with it"
            )
        self._check_budgets(sizes)
        self._check_networks(sizes)

    @property
    def strategies(self) -> int:
        """How many strategies the nodes have together."""
        return sum(len(node.costs) for node in self.nodes)

    @cached_property
    def grouped(self) -> frozenset[int]:
        """The edges that belong to a group; each of the others pays for itself."""
        return frozenset(edge for group in self.groups for edge in group.edges)

    @property
    def limits_copies(self) -> bool:
        """Whether what the copies of networks hold counts towards a usage limit."""
        return self.usage_limit is not None and any(network.lives for network in self.networks)

    @property
    def arcs(self) -> int:
        """How many arcs the networks have together."""
        return sum(len(network.tails) for network in self.networks)

    def _check_node(self, node: int, where: str) -> None:
        if not 0 <= node < len(self.nodes):
            raise ProblemError(f"{where} names node {node}, but the nodes are 0 .. {len(self.nodes) - 1}")

    def _check_groups(self) -> None:
        member_of: dict[int, int] = {}
        for index, group in enumerate(self.groups):
            if not group.edges:
                raise ProblemError(f"group {index} has no edge")
            for edge in group.edges:
                if not 0 <= edge < len(self.edges):
                    raise ProblemError(f"group {index} names edge {edge}, but the edges are 0 .. {len(self.edges) - 1}")
                if edge in member_of:
                    raise ProblemError(f"edge {edge} is in group {member_of[edge]} and in group {index}")
                member_of[edge] = index
            self._check_members([self.edges[edge] for edge in group.edges], index)

    @staticmethod
    def _check_members(members: list[Edge], index: int) -> None:
        first = members[0]
        for edge in members[1:]:
            if edge.u != first.u:
                raise ProblemError(f"group {index} has edges of the producers {first.u} and {edge.u}: expected one")
            if not _same(edge.rows, first.rows) or not _same(edge.costs, first.costs):
                raise ProblemError(f"group {index} has edges with different rows or costs: they must be equal")
        if first.costs.min() < 0:
            raise ProblemError(f"group {index} has the negative cost {first.costs.min()}")

    def _check_budgets(self, sizes: list[int]) -> None:
        if self.budgets and self.usage_price is not None:
            raise ProblemError("budgets are hard and cannot be combined with a usage_price")
        for budget in self.budgets:
            if budget.limit < 0:
                raise ProblemError(f"budget {budget.name!r} has the negative limit {budget.limit}")
            for node, usages in budget.usages.items():
                self._check_node(node, f"budget {budget.name!r}")
                units = as_integers(usages, 1, f"usages of node {node} in budget {budget.name!r}")
                if len(units) != sizes[node] or units.min() < 0:
                    raise ProblemError(
                        f"budget {budget.name!r} must give one usage from 0 up for each of the {sizes[node]} "
                        f"strategies of node {node}"
                    )

    def _check_networks(self, sizes: list[int]) -> None:
        for network in self.networks:
            for node, vertices in network.ends:
                if not 0 <= node < len(sizes):
                    self._check_node(node, f"network {network.name!r}")
                if len(vertices) != sizes[node]:
                    raise ProblemError(
                        f"network {network.name!r} gives node {node} {len(vertices)} vertices, but it has "
                        f"{sizes[node]} strategies: one vertex for each"
                    )
            for life in network.lives:
                self._check_base(network, life)

    def _check_base(self, network: Network, life: Life) -> None:
        """A view is made of a consumer of another network, which is the view's own producer, later than that was."""
        if life.base is None:
            return
        where = f"a life of network {network.name!r} shares the memory of {life.base}"
        if not 0 <= life.base.network < len(self.networks):
            raise ProblemError(f"{where}, but the networks are 0 .. {len(self.networks) - 1}")
        base = self.networks[life.base.network]
        if not (0 <= life.base.life < len(base.lives) and 0 <= life.base.consumer < len(base.consumers)):
            raise ProblemError(f"{where}, which network {base.name!r} does not have")
        of = base.lives[life.base.life]
        at, until = of.reads[life.base.consumer]
        if base.consumers[life.base.consumer].node != network.producer or not max(at, of.made + 1) <= life.made < until:
            raise ProblemError(
                f"{where}: expected a consumer that is its producer, which reads while it makes the view"
            )
        again = life.base.again
        if (again is None) != (life.again is None):
            raise ProblemError(f"{where}: expected a consumer that makes it again if a node does, and none else")
        if again is not None and life.again is not None:
            assert network.again is not None
            is_late = len(base.forward) <= again < len(base.consumers)
            if (
                not is_late
                or base.consumers[again].node != network.again.node
                or not (of.reads[again][0] <= life.again < of.reads[again][1])
            ):
                raise ProblemError(
                    f"{where}: expected a consumer of the backward that makes it again, and reads while it does"
                )
            if ((base.consumers[again].wants == NOWHERE) & (network.again.wants != NOWHERE)).any():
                raise ProblemError(f"{where}: the one that makes it again does so where it reads nothing")
        if (base.consumers[life.base.consumer].wants == NOWHERE).any():
            raise ProblemError(f"{where}: its producer makes it where it reads nothing")

    def _check_ties(self, sizes: list[int]) -> None:
        seen: set[int] = set()
        for index, tie in enumerate(self.ties):
            for node in tie:
                self._check_node(node, f"tie {index}")
                if node in seen:
                    raise ProblemError(f"tie {index} names node {node}, which is tied already")
                seen.add(node)
                if sizes[node] != sizes[tie[0]]:
                    raise ProblemError(
                        f"tie {index} joins node {tie[0]} with {sizes[tie[0]]} strategies "
                        f"and node {node} with {sizes[node]}: expected equal counts"
                    )


@lru_cache(maxsize=4096)
def identity(size: int) -> IntArray:
    """0 .. size - 1, the same array object for the same size."""
    indices = np.arange(size, dtype=np.int64)
    indices.flags.writeable = False
    return indices


def add_costs(terms: Iterable[IntArray]) -> IntArray:
    """Elementwise sum in which INFEASIBLE absorbs."""
    terms = list(terms)
    if len(terms) == 1:
        return terms[0]
    stacked = np.stack(terms)
    infeasible = stacked >= INFEASIBLE
    return np.where(infeasible.any(axis=0), INFEASIBLE, np.where(infeasible, 0, stacked).sum(axis=0))


def _same(a: IntArray, b: IntArray) -> bool:
    return a is b or np.array_equal(a, b)
