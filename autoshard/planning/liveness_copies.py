"""Copies of parameters, and gradients on their way: solver nodes that know two layouts, the one a tensor has and the
one that is wanted.

What a copy holds depends on both layouts, which are choices of two nodes. So a tensor and one of its readers get a node
of their own between the two, whose choices are the ways in which the reader gets the tensor.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from solver import INFEASIBLE, Edge
from solver import Node as SolverNode
from solver.problem import Load, identity

from ..capture import Ref
from ..layout import Layout
from ..redistribution.paths import transient_bytes
from .formulation import CopyChoice, Formulation
from .liveness_moments import Course, Interval
from .liveness_sizes import Sizes, with_loads
from .tensor_networks import HELD, Demand

MOST_KEEPERS = 2
"""Readers of a parameter in the forward whose copy the backward may keep: the first ones."""

EdgeNumbers = Mapping[tuple[Ref, str, int, int], int]
"""The number of the edge for a tensor, a phase, who wants it, and the position there."""


@dataclass(frozen=True, eq=False)
class Copies:
    """What is added to a problem.

    Attributes:
        nodes, edges: with the numbers that follow those of the problem.
        ties: nodes, by their numbers, that are decided alike because what they stand between is.
        replaced: edges of the problem whose price the new nodes pay.
        choices: the nodes that decide whether the backward reads a copy that the forward made.
    """

    nodes: tuple[SolverNode, ...]
    edges: tuple[Edge, ...]
    ties: tuple[tuple[int, ...], ...]
    replaced: frozenset[int]
    choices: tuple[CopyChoice, ...]


def copies_of(
    formulation: Formulation, course: Course, sizes: Sizes, edge_numbers: EdgeNumbers, least_bytes: int
) -> Copies:
    """Nodes for every parameter and its readers, and for every gradient and its parameter.

    Args:
        least_bytes: tensors smaller than this get none.
    """
    tie_of = {i: ("tie", k) for k, tie in enumerate(formulation.problem.ties) for i in tie}
    book = _WaysBook(formulation, sizes, edge_numbers)
    pairs = list(_pairs(formulation, course, least_bytes))
    alike: dict[object, list[int]] = defaultdict(list)
    nodes: list[SolverNode] = []
    edges: list[Edge] = []
    choices: list[CopyChoice] = []
    for number, pair in enumerate(pairs, len(formulation.problem.nodes)):
        ways = book.ways(pair)
        nodes.append(_node(pair, ways, formulation, course))
        edges += _edges(pair, ways, number, sizes, book)
        if pair.keepers:
            choices.append(CopyChoice(pair.demand.ref, number, tuple(bool(k >= 0) for k in ways.keeper)))
        ends = (tie_of.get(end, end) for end in pair.ends)
        alike[id(ways), pair.position, *ends].append(number)
    return Copies(
        nodes=tuple(nodes),
        edges=tuple(edges),
        ties=tuple(tuple(numbers) for numbers in alike.values() if len(numbers) > 1),
        replaced=frozenset(pair.edge(edge_numbers) for pair in pairs if pair.keepers),
        choices=tuple(choices),
    )


@dataclass(frozen=True)
class _Pair:
    """A tensor and one of its readers.

    Attributes:
        moving: while the tensor moves to the layout wanted.
        life: while a copy in that layout lives.
        keepers: readers in the forward, with their positions, whose copy this reader may find again.
    """

    demand: Demand
    reader: int
    position: int
    moving: Interval
    life: Interval
    keepers: tuple[tuple[int, int], ...] = ()

    @property
    def ends(self) -> tuple[int, ...]:
        """The solver nodes that the pair's node is joined to."""
        return (self.demand.ref.node, self.reader, *(keeper for keeper, _ in self.keepers))

    def edge(self, numbers: EdgeNumbers) -> int:
        """The problem's own edge between the two."""
        return numbers[self.demand.ref, self.demand.phase, self.reader, self.position]


def _pairs(formulation: Formulation, course: Course, least_bytes: int) -> Iterator[_Pair]:
    forward = {demand.ref: demand for demand in formulation.demands if demand.phase == "forward"}
    for demand in formulation.demands:
        if formulation.graph.meta(demand.ref).size_bytes < least_bytes:
            continue
        of_parameter = course.kind(course.root(demand.ref).node) == "parameter"
        made_by_operator = course.kind(demand.ref.node) == "operator"
        for reader, position in demand.consumers:
            if position == HELD and course.kind(reader) == "parameter" and made_by_operator:
                at = course.delivers(demand.ref.node)
                yield _Pair(demand, reader, position, (at, at + 1), (at, at))
            elif position != HELD and of_parameter:
                at = course.moves(reader)
                life = (at + 1, course.last_read(reader))
                yield _Pair(demand, reader, position, (at, at + 1), life, _keepers(demand, forward, course))


def _keepers(demand: Demand, forward: Mapping[Ref, Demand], course: Course) -> tuple[tuple[int, int], ...]:
    """The readers in the forward whose copy of a parameter its only reader in the backward may find again."""
    alone = demand.phase == "backward" and len(demand.consumers) == 1 and not demand.remade
    if not alone or course.kind(demand.ref.node) != "parameter" or demand.ref not in forward:
        return ()
    readers = forward[demand.ref].consumers
    return tuple((reader, position) for reader, position in readers if position != HELD)[:MOST_KEEPERS]


def _node(pair: _Pair, ways: _Ways, formulation: Formulation, course: Course) -> SolverNode:
    loads = [Load(pair.moving, ways.transient), Load(pair.life, ways.copy)]
    for k, (keeper, _) in enumerate(pair.keepers):  # a copy that is kept lives from its reader in the forward on
        kept = (min(course.last_read(keeper), pair.life[0]), pair.life[0])
        loads.append(Load(kept, np.where(ways.keeper == k, ways.copy, 0)))
    name = f"{formulation.graph.tensor_name(pair.demand.ref)} for {formulation.problem.nodes[pair.reader].name}"
    return with_loads(SolverNode(name, ways.costs), loads)


def _edges(pair: _Pair, ways: _Ways, number: int, sizes: Sizes, book: _WaysBook) -> Iterator[Edge]:
    """The edges to the node that makes the tensor, to the one that wants it, and to each whose copy may be kept."""
    ref, options = pair.demand.ref, identity(len(ways.costs))
    yield Edge(ref.node, number, sizes.layouts(ref.node, None, ref.output)[1], options, ways.from_source)
    yield Edge(number, pair.reader, options, sizes.layouts(pair.reader, pair.position, 0)[1], ways.to_reader)
    for k, (keeper, position) in enumerate(pair.keepers):
        layouts, columns = sizes.layouts(keeper, position, 0)
        yield Edge(number, keeper, options, columns, book.to_keeper(ways, k, layouts))


@dataclass(frozen=True, eq=False)
class _Ways:
    """The ways in which a reader gets a tensor, each a choice of the pair's node.

    W ways, H layouts that the tensor can have, L layouts that the reader can want.

    Attributes:
        costs: (W,), nanoseconds of moving it.
        transient: (W,), bytes that moving holds beside the tensor and the copy.
        copy: (W,), bytes of the copy; 0 where the reader reads the tensor itself.
        keeper: (W,), the number of the keeper whose copy is read again, -1 for none.
        serves: for each way the layouts wanted that it gives.
        from_source: (H, W), 0 where the way starts at that layout, else INFEASIBLE.
        to_reader: (W, L), 0 where the way serves that layout, else INFEASIBLE.
    """

    costs: np.ndarray
    transient: np.ndarray
    copy: np.ndarray
    keeper: np.ndarray
    serves: tuple[frozenset[Layout], ...]
    from_source: np.ndarray
    to_reader: np.ndarray


@dataclass(frozen=True, eq=False)
class _WaysBook:
    """Ways and their matrices, each made once: pairs of identical layers share them."""

    formulation: Formulation
    sizes: Sizes
    edge_numbers: EdgeNumbers
    _known: dict[object, _Ways] = field(default_factory=dict)
    _known_to_keeper: dict[object, np.ndarray] = field(default_factory=dict)

    def ways(self, pair: _Pair) -> _Ways:
        """The ways in which the copies of a pair can be made and held, each with what it adds to memory and when."""
        strategies, demand = self.formulation.strategies, pair.demand
        kept_for = tuple(id(strategies[keeper]) for keeper, _ in pair.keepers)
        ends = (id(strategies[demand.ref.node]), demand.ref.output, id(strategies[pair.reader]), pair.position)
        key = (*ends, self.formulation.graph.meta(demand.ref), kept_for, demand.banned)
        if key not in self._known:
            self._known[key] = self._new_ways(pair)
        return self._known[key]

    def to_keeper(self, ways: _Ways, k: int, layouts: tuple[Layout, ...]) -> np.ndarray:
        """(W, len(layouts)): a way that reads the k-th keeper's copy needs it to have wanted a layout that serves."""
        key = (id(ways), k, layouts)
        if key not in self._known_to_keeper:
            possible = [
                [keeper != k or layout in serves for layout in layouts]
                for keeper, serves in zip(ways.keeper, ways.serves)
            ]
            self._known_to_keeper[key] = _infeasible_unless(possible)
        return self._known_to_keeper[key]

    def _new_ways(self, pair: _Pair) -> _Ways:
        # For every layout that the tensor can have (h) and every one that the reader can want (w) there is one way:
        # move it, at the price of the problem's own edge; and for each keeper that can want w too, another one: read
        # its copy, at no price. Example: a weight has S(0) and is wanted as R, in the forward and in the backward. The
        # backward gathers it anew (price p, and a copy while it is read) or keeps the forward's copy (price 0, and the
        # copy lives all the time in between).
        # Ways that start at the same layout and cost and hold the same are one choice that serves several layouts. An
        # edge of a pair without keepers pays its price itself, so its ways cost nothing here.
        demand, graph, banned = pair.demand, self.formulation.graph, pair.demand.banned
        meta = graph.meta(demand.ref)
        made = self.sizes.layouts(demand.ref.node, None, demand.ref.output)[0]
        wanted, columns = self.sizes.layouts(pair.reader, pair.position, 0)
        edge = self.formulation.problem.edges[pair.edge(self.edge_numbers)]
        column_of = {int(column): int(edge.cols[k]) for k, column in enumerate(columns)}
        keepers = [self.sizes.layouts(keeper, position, 0)[0] for keeper, position in pair.keepers]
        moved: dict[tuple[int, int, int, int, int], set[int]] = defaultdict(set)
        found: list[tuple[tuple[int, int, int, int, int], set[int]]] = []
        for h, have in enumerate(made):
            for w, want in enumerate(wanted):
                price = int(edge.costs[h, column_of[w]])
                if price >= INFEASIBLE:
                    continue
                copy = 0 if have == want else self.sizes.bytes(meta, want)
                path = self.formulation.prices.path(meta, have, want, banned)
                transient = transient_bytes(path, meta.shape, meta.dtype.itemsize, self.formulation.mesh)
                moved[h, price if keepers else 0, transient, copy, -1].add(w)
                for k, kept in enumerate(keepers):
                    if have != want and want in kept:
                        found.append(((h, 0, 0, copy, k), {w}))  # the very layout that the keeper wants
        ways = [*moved.items(), *found]
        start, costs, transients, copies, keeper = np.array([way for way, _ in ways], dtype=np.int64).T
        return _Ways(
            costs=costs.copy(),
            transient=transients.copy(),
            copy=copies.copy(),
            keeper=keeper.copy(),
            serves=tuple(frozenset(wanted[w] for w in served) for _, served in ways),
            from_source=_infeasible_unless(np.arange(len(made))[:, None] == start[None, :]),
            to_reader=_infeasible_unless([[w in served for w in range(len(wanted))] for _, served in ways]),
        )


def _infeasible_unless(possible: npt.ArrayLike) -> np.ndarray:
    return np.where(np.asarray(possible), 0, INFEASIBLE).astype(np.int64)
