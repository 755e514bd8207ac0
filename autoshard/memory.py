"""What every choice of the integer program holds in memory, and when.

The program counts by operator, in three moments each: its inputs move to the layouts it wants, it runs, what it made
for the world outside moves there. Loads are bytes on the rank with the largest shards:

==========================  =================================================================================
load of                     bytes, while
==========================  =================================================================================
a parameter's layout        the shard and the optimizer's state: always; its gradient: from the operator that
                            makes it; the copies of its step: at a moment of its own in the optimizer
a buffer, an input          the shard: always
an operator                 each result that is no view: until its first reader has moved it; each tensor it
                            reads, in the layout it wants: since the reader before it, over the phases
a parameter and a reader    the copy in the layout wanted, while it is read, and what moving it takes besides
a gradient and its          what moving it takes
parameter
==========================  =================================================================================

Views share the storage of what they view, so a storage is read by whoever reads a view of it. Where a parameter is
wanted in another layout in both phases, the program decides whether the backward keeps the forward's copy (free, but
alive in between) or makes its own (:class:`~autoshard.formulation.CopyChoice`). For activations all copies are kept, or
none: two programs.

This is an estimate: it knows the layout in which a tensor is made and the one in which it is read, but for activations
not both at once. :mod:`autoshard.timeline` knows everything once the choices are made, and decides whether a plan fits
(:mod:`autoshard.fitting`).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial

import numpy as np

from cost_models import OptimizerPolicy
from solver import INFEASIBLE, Edge, Group
from solver import Node as SolverNode
from solver.problem import Load, identity

from .capture import CapturedGraph, Ref, TensorMeta
from .formulation import HELD, CopyChoice, Demand, Formulation, distinct_layouts
from .layout import Layout, largest_local_shape
from .pricing import is_free
from .redistribution import transient_bytes

SMALL = 1000
"""A copy of a parameter smaller than one SMALL-th of the budget has no node of its own, and is kept where it can be."""

MOST_KEEPERS = 2
"""Readers of a parameter in the forward whose copy the backward may keep: the first ones."""

Interval = tuple[int, int]


def with_memory(
    formulation: Formulation, policy: OptimizerPolicy, budget_bytes: int, *, keep_activations: bool = True
) -> Formulation:
    """The same program with what its choices hold in memory; the limit itself is ``problem.usage_limit``.

    Args:
        formulation: one that keeps copies.
        keep_activations: the backward reads the copies of activations that the forward made; otherwise it makes its own
            from what was made, which is smaller where the copy was gathered.
    """
    return _Program(formulation, policy, budget_bytes, keep_activations).formulation()


class _Moments:
    """Time steps: three for each operator in the order of execution, then one for each parameter's step."""

    def __init__(self, graph: CapturedGraph) -> None:
        operators = [i for i, _ in graph.of_kind("operator")]
        operators.sort(key=lambda i: (graph.nodes[i].phase != "forward", i))
        self._first = {i: 3 * k for k, i in enumerate(operators)}
        self.optimizer = 3 * len(operators)
        self.end = self.optimizer + max(1, len(graph.gradients))

    def moves(self, operator: int) -> int:
        """The inputs of an operator move to the layouts it wants."""
        return self._first[operator]

    def runs(self, operator: int) -> int:
        """It runs."""
        return self._first[operator] + 1

    def delivers(self, operator: int) -> int:
        """Its results for the world outside move there."""
        return self._first[operator] + 2


class _Program:
    def __init__(
        self, formulation: Formulation, policy: OptimizerPolicy, budget_bytes: int, keep_activations: bool
    ) -> None:
        self._keep_activations = keep_activations
        self._base = formulation
        self._graph, self._strategies = formulation.graph, formulation.strategies
        self._policy = policy
        self._least_bytes = budget_bytes // SMALL
        self._moments = _Moments(formulation.graph)
        self._loads: dict[int, list[Load]] = defaultdict(list)
        self._nodes: list[SolverNode] = []
        self._edges: list[Edge] = []
        self._added: dict[object, list[int]] = defaultdict(list)
        self._choices: list[CopyChoice] = []
        self._replaced: set[int] = set()
        self._known: dict[object, np.ndarray] = {}
        self._known_layouts: dict[object, tuple[tuple[Layout, ...], np.ndarray]] = {}
        self._known_ways: dict[object, _Ways] = {}
        self._local = lru_cache(maxsize=None)(
            lambda shape, layout: math.prod(largest_local_shape(shape, layout, formulation.mesh))
        )
        self._tie_of = {i: ("tie", k) for k, tie in enumerate(formulation.problem.ties) for i in tie}
        self._views = self._roots_of_views()
        self._consumers: dict[tuple[int, str], list[tuple[int, int]]] = defaultdict(list)
        self._outside: dict[Ref, list[int]] = defaultdict(list)
        self._forward = {demand.ref: demand for demand in formulation.demands if demand.phase == "forward"}
        self._edge_of: dict[tuple[Ref, str, int, int], int] = {}
        for demand in formulation.demands:
            self._consumers[demand.ref.node, demand.phase] += demand.consumers
            for node, position in demand.consumers:
                self._edge_of[demand.ref, demand.phase, node, position] = len(self._edge_of)
                if position == HELD:
                    self._outside[self._root(demand.ref)].append(node)

    def formulation(self) -> Formulation:
        """The program with loads, further nodes and edges."""
        self._add_held()
        for storage, readers in self._storages().items():
            self._add_storage(storage, readers)
        for demand in self._base.demands:
            self._add_copies(demand)
        problem = self._base.problem
        nodes = [self._loaded(node, self._loads[i]) for i, node in enumerate(problem.nodes)] + self._nodes
        kept = [k for k in range(len(problem.edges)) if k not in self._replaced]
        number = {old: new for new, old in enumerate(kept)}
        groups = (tuple(number[edge] for edge in group if edge in number) for group in self._groups())
        ties = (*problem.ties, *(tuple(alike) for alike in self._added.values() if len(alike) > 1))
        changed = replace(
            problem,
            nodes=tuple(nodes),
            edges=(*(problem.edges[k] for k in kept), *self._edges),
            groups=tuple(Group(edges) for edges in groups if len(edges) > 1),
            ties=ties,
        )
        return replace(
            self._base,
            problem=changed,
            keep_copies=self._base.keep_copies and self._keep_activations,
            copy_choices=tuple(self._choices),
        )

    def _groups(self) -> Iterator[tuple[int, ...]]:
        """The edges that pay a layout together: those of a tensor, or those of a tensor in one phase."""
        if self._keep_activations:
            yield from (group.edges for group in self._base.problem.groups)
            return
        members: dict[tuple[Ref, str], list[int]] = defaultdict(list)
        for (ref, phase, _, _), edge in self._edge_of.items():
            members[ref, phase].append(edge)
        yield from (tuple(edges) for edges in members.values())

    @staticmethod
    def _loaded(node: SolverNode, loads: Sequence[Load]) -> SolverNode:
        loads = [load for load in loads if load.interval[0] < load.interval[1] and load.usages.any()]
        return SolverNode(node.name, node.costs, further_loads=tuple(loads)) if loads else node

    # What is held whatever runs

    def _add_held(self) -> None:
        end = self._moments.end
        for kind in ("buffer", "input", "parameter"):
            for i, _ in self._graph.of_kind(kind):
                self._load(i, (0, end), self._sizes(i, None, Ref(i)))
        parameters = {node.name: i for i, node in self._graph.of_kind("parameter")}
        for step, (name, ref) in enumerate(self._graph.gradients):
            i = parameters[name]
            maker = self._graph.nodes[ref.node]
            made = self._moments.delivers(ref.node) + 1 if maker.kind == "operator" else self._moments.optimizer
            at = self._moments.optimizer + step
            self._load(i, (made, end), self._sizes(i, None, Ref(i)))
            self._load(i, (0, end), self._of_elements(i, self._policy.state_bytes))
            self._load(i, (at, at + 1), self._of_elements(i, self._policy.step_bytes))

    def _of_elements(self, i: int, rule: Callable[[int, int], int]) -> np.ndarray:
        meta = self._graph.meta(Ref(i))
        layouts = (strategy.outputs[0] for strategy in self._strategies[i])
        return np.array([rule(self._local(meta.shape, layout), meta.dtype.itemsize) for layout in layouts], np.int64)

    # What operators make and read

    def _roots_of_views(self) -> dict[int, Ref]:
        """The storage that each operator which only looks at its input looks at."""
        roots: dict[int, Ref] = {}
        for i, node in self._graph.of_kind("operator"):
            if is_free(node) and node.inputs:
                roots[i] = roots.get(node.inputs[0].node, node.inputs[0])
        return roots

    def _root(self, ref: Ref) -> Ref:
        return self._views.get(ref.node, ref)

    def _storages(self) -> dict[Ref, list[tuple[int, int, Ref]]]:
        """Every storage that an operator makes with its readers in order: solver node, position among its inputs, and
        the tensor it reads.
        """
        operators = [(i, node) for i, node in self._graph.of_kind("operator") if i not in self._views]
        readers: dict[Ref, list[tuple[int, int, Ref]]] = {
            Ref(i, k): [] for i, node in operators for k, meta in enumerate(node.outputs) if meta is not None
        }
        for i, node in sorted(operators, key=lambda operator: self._moments.runs(operator[0])):
            first: dict[Ref, tuple[int, Ref]] = {}
            for position, ref in enumerate(node.inputs):
                first.setdefault(self._root(ref), (position, ref))
            for root, (position, ref) in first.items():
                if root in readers:
                    readers[root].append((i, position, ref))
        return readers

    def _add_storage(self, storage: Ref, readers: list[tuple[int, int, Ref]]) -> None:
        moments, maker = self._moments, storage.node
        holders = self._outside[storage]
        results = [node for node in holders if self._kind(node) != "parameter"]
        until = moments.delivers(maker) + 1 if holders else moments.runs(maker) + 1
        if readers:
            until = max(until, moments.moves(readers[0][0]) + 1)
        self._load(maker, (moments.runs(maker), until), self._sizes(maker, None, storage))
        for node in results:
            self._load(node, (moments.delivers(maker) + 1, moments.end), self._sizes(node, HELD, storage))
        since: int | None = None
        phase = self._graph.nodes[maker].phase
        for reader, position, ref in readers:
            runs, crosses = moments.runs(reader), self._graph.nodes[reader].phase != phase
            first = runs if since is None or results else since
            if crosses and not self._keep_activations and since is not None and not results:
                self._load(ref.node, (since, moments.moves(reader) + 1), self._sizes(ref.node, None, ref))
                first = runs
            self._load(reader, (first, runs + 1), self._sizes(reader, position, ref))
            since, phase = runs + 1, self._graph.nodes[reader].phase

    # Copies of parameters, and gradients on their way

    def _add_copies(self, demand: Demand) -> None:
        meta, root = self._graph.meta(demand.ref), self._root(demand.ref)
        if meta.size_bytes < self._least_bytes:
            return
        of_parameter = self._kind(root.node) == "parameter"
        for reader, position in demand.consumers:
            if position == HELD and self._kind(reader) == "parameter" and self._kind(demand.ref.node) == "operator":
                at = self._moments.delivers(demand.ref.node)
                self._add(_Pair(demand, reader, position, (at, at + 1), (at, at)))
            elif position != HELD and of_parameter:
                moves = self._moments.moves(reader)
                life = (moves + 1, self._last_read(reader))
                pair = _Pair(demand, reader, position, (moves, moves + 1), life)
                keepers = self._keepers(demand)
                self._add(pair, keepers)

    def _keepers(self, demand: Demand) -> list[tuple[int, int]]:
        """The readers in the forward whose copy of a parameter its only reader in the backward may find again."""
        alone = demand.phase == "backward" and len(demand.consumers) == 1 and not demand.remade
        if not alone or self._kind(demand.ref.node) != "parameter" or demand.ref not in self._forward:
            return []
        readers = self._forward[demand.ref].consumers
        return [(reader, position) for reader, position in readers if position != HELD][:MOST_KEEPERS]

    def _last_read(self, reader: int) -> int:
        """The moment after the last operator that reads what a reader took, itself or a view that the reader makes."""
        last = self._moments.runs(reader) + 1
        if is_free(self._graph.nodes[reader]):
            for node, position in self._consumers[reader, self._graph.nodes[reader].phase]:
                if position != HELD:
                    last = max(last, self._last_read(node))
        return last

    def _add(self, pair: _Pair, keepers: Sequence[tuple[int, int]] = ()) -> None:
        """A node for a tensor and a reader, joined to both so that it knows the layouts of both."""
        demand, number = pair.demand, len(self._base.problem.nodes) + len(self._nodes)
        source, reader = demand.ref.node, pair.reader
        ways = self._ways(pair, keepers)
        made, wanted = self._layouts(source, None, demand.ref.output), self._layouts(reader, pair.position, 0)
        loads = [Load(pair.moving, ways.transient), Load(pair.life, ways.copy)]
        for k, (keeper, _) in enumerate(keepers):
            gap = (min(self._last_read(keeper), pair.life[0]), pair.life[0])
            loads.append(Load(gap, np.where(ways.keeper == k, ways.copy, 0)))
        name = f"{self._graph.tensor_name(demand.ref)} for {self._name(reader)}"
        self._nodes.append(self._loaded(SolverNode(name, ways.costs), loads))
        options = identity(len(ways.costs))
        self._edges.append(Edge(source, number, made[1], options, ways.from_source))
        self._edges.append(Edge(number, reader, options, wanted[1], ways.to_reader))
        for k, (keeper, position) in enumerate(keepers):
            layouts, columns = self._layouts(keeper, position, 0)
            possible = self._cached(("keeper", id(ways), k, layouts), partial(ways.to_keeper, k, layouts))
            self._edges.append(Edge(number, keeper, options, columns, possible))
        if keepers:
            self._replaced.add(self._edge_of[demand.ref, demand.phase, reader, pair.position])
            self._choices.append(CopyChoice(demand.ref, number, tuple(bool(k >= 0) for k in ways.keeper)))
        ends = (self._tie_of.get(end, end) for end in (source, reader, *(keeper for keeper, _ in keepers)))
        self._added[id(ways), pair.position, *ends].append(number)

    def _ways(self, pair: _Pair, keepers: Sequence[tuple[int, int]]) -> _Ways:
        demand, reader = pair.demand, pair.reader
        source = self._strategies[demand.ref.node]
        kept_for = tuple(id(self._strategies[keeper]) for keeper, _ in keepers)
        meta = self._graph.meta(demand.ref)
        choices = (id(source), demand.ref.output, id(self._strategies[reader]), pair.position)
        key = (*choices, meta, kept_for, demand.banned)
        if key not in self._known_ways:
            self._known_ways[key] = self._new_ways(pair, keepers)
        return self._known_ways[key]

    def _new_ways(self, pair: _Pair, keepers: Sequence[tuple[int, int]]) -> _Ways:
        demand, meta = pair.demand, self._graph.meta(pair.demand.ref)
        made = self._layouts(demand.ref.node, None, demand.ref.output)[0]
        wanted, columns = self._layouts(pair.reader, pair.position, 0)
        edge = self._base.problem.edges[self._edge_of[demand.ref, demand.phase, pair.reader, pair.position]]
        column_of = {int(column): int(edge.cols[k]) for k, column in enumerate(columns)}
        ways: dict[tuple[int, int, int, int, int], set[int]] = defaultdict(set)
        kept: list[tuple[int, int, int, int, int, frozenset[int]]] = []
        for h, have in enumerate(made):
            for w, want in enumerate(wanted):
                price = int(edge.costs[h, column_of[w]])
                if price >= INFEASIBLE:
                    continue
                copy = 0 if have == want else self._bytes(meta, want)
                path = self._base.prices.path(meta, have, want, demand.banned)
                transient = transient_bytes(path, meta.shape, meta.dtype.itemsize, self._base.mesh)
                ways[h, price if keepers else 0, transient, copy, -1].add(w)
                for k, (keeper, position) in enumerate(keepers):
                    if have != want and want in self._layouts(keeper, position, 0)[0]:
                        kept.append((h, 0, 0, copy, k, frozenset({w})))  # the very layout that the keeper wants
        return _Ways(made, wanted, (*((*way, frozenset(columns)) for way, columns in ways.items()), *kept))

    # What is looked up

    def _load(self, node: int, interval: Interval, usages: np.ndarray) -> None:
        self._loads[node].append(Load(interval, usages))

    def _kind(self, node: int) -> str:
        return self._graph.nodes[node].kind if node < len(self._graph.nodes) else "result"

    def _name(self, node: int) -> str:
        return self._base.problem.nodes[node].name

    def _bytes(self, meta: TensorMeta, layout: Layout) -> int:
        return meta.dtype.itemsize * int(self._local(meta.shape, layout))

    def _sizes(self, node: int, position: int | None, ref: Ref) -> np.ndarray:
        """Bytes of a tensor in the layout that each strategy of a node gives it (position None), holds or wants."""
        output = ref.output if position is None and node == ref.node else 0
        key = ("sizes", id(self._strategies[node]), position, output, self._graph.meta(ref))
        return self._cached(key, lambda: self._sizes_anew(node, position, output, self._graph.meta(ref)))

    def _sizes_anew(self, node: int, position: int | None, output: int, meta: TensorMeta) -> np.ndarray:
        layouts, index = self._layouts(node, position, output)
        sizes = np.array([self._bytes(meta, layout) for layout in layouts], dtype=np.int64)
        return np.asarray(sizes[index])

    def _layouts(self, node: int, position: int | None, output: int) -> tuple[tuple[Layout, ...], np.ndarray]:
        key = (id(self._strategies[node]), position, output)
        if key not in self._known_layouts:
            self._known_layouts[key] = distinct_layouts(self._strategies[node], position, output)
        return self._known_layouts[key]

    def _cached(self, key: object, make: Callable[[], np.ndarray]) -> np.ndarray:
        if key not in self._known:
            self._known[key] = make()
        return self._known[key]


@dataclass(frozen=True)
class _Pair:
    """A tensor and one of its readers: when it moves to the layout wanted, and how long a copy lives from then on."""

    demand: Demand
    reader: int
    position: int
    moving: Interval
    life: Interval


@dataclass(frozen=True, eq=False)
class _Ways:
    """How a reader gets a tensor: (layout it has, price, bytes while moving, bytes of the copy, whose copy it is or -1,
    layouts wanted that this way serves).
    """

    made: tuple[Layout, ...]
    wanted: tuple[Layout, ...]
    ways: tuple[tuple[int, int, int, int, int, frozenset[int]], ...]

    def __post_init__(self) -> None:
        columns = list(zip(*self.ways, strict=True))
        served = [[0 if w in way[5] else INFEASIBLE for w in range(len(self.wanted))] for way in self.ways]
        found = {
            "costs": np.array(columns[1], dtype=np.int64),
            "transient": np.array(columns[2], dtype=np.int64),
            "copy": np.array(columns[3], dtype=np.int64),
            "keeper": np.array(columns[4], dtype=np.int64),
            "from_source": np.where(
                np.arange(len(self.made))[:, None] == np.array(columns[0])[None, :], 0, INFEASIBLE
            ).astype(np.int64),
            "to_reader": np.array(served, dtype=np.int64),
        }
        for field, value in found.items():
            object.__setattr__(self, field, value)

    costs: np.ndarray = None  # type: ignore[assignment]
    transient: np.ndarray = None  # type: ignore[assignment]
    copy: np.ndarray = None  # type: ignore[assignment]
    keeper: np.ndarray = None  # type: ignore[assignment]
    from_source: np.ndarray = None  # type: ignore[assignment]
    to_reader: np.ndarray = None  # type: ignore[assignment]

    def to_keeper(self, k: int, layouts: tuple[Layout, ...]) -> np.ndarray:
        """A copy that is kept for the k-th keeper has the layout that the keeper wants."""
        served = [{self.wanted[w] for w in way[5]} for way in self.ways]
        possible = [[way[4] != k or layout in serves for layout in layouts] for way, serves in zip(self.ways, served)]
        found: np.ndarray = np.where(possible, 0, INFEASIBLE).astype(np.int64)
        return found
