"""The problem as a mixed-integer program in arrays, with memory rows for some steps only.

    x_i[s]     1 if node i chooses strategy s; these and the w and g of networks are the integer variables
    z_e[l,m]   the choice of (row l, column m) by edge e, over the finite pairs only
    w_g[l,m]   group g pays for (row l, column m)
    f, w, g    the flows of a network, the arcs it uses, where flows start; see `solver.backends.flows`
    alive      the copies of networks that are in memory at a step; see `solver.backends.holdings`

    minimise   sum costs_i[s] x_i[s] + sum costs_e[l,m] z_e[l,m] + sum costs_g[l,m] w_g[l,m] + arcs
    subject to sum_s x_i[s] = 1
               sum over s with rows[s] = l of x_u[s]  =  sum_m z_e[l,m]          for every edge and row l
               sum over s with cols[s] = m of x_v[s]  =  sum_l z_e[l,m]          for every edge and column m
               z_e[l,m] <= w_g[l,m]                                              for every edge of a group
               sum over the loads live at t of usages[s] x_i[s] + sum of sizes[v] alive[v] <= usage_limit
                                                                                 for the asked steps t

With a usage_price the limit of the last rows grows by a variable, in [0, 1] of the largest usage, that pays the price.

An edge of a group pays nothing itself where w pays. A pair that costs nothing, or that only one edge of the group can
choose, needs no w. Given x in {0, 1} the least z and w are integral, and the relaxation is as tight as the one with a
variable per pair of strategies. Source: Kim et al., "A structure-preserving ILP formulation of auto-sharding"; sizes of
both forms in docs/solver.md.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from ..networks import NOWHERE, BoolArray, Consumer, Network, Routes
from ..problem import INFEASIBLE, Edge, IntArray, Problem
from ..usages import largest_usage
from .flows import Flow, ReadAgain, Stage, stages
from .holdings import FlowColumns, Holdings, Row, Written

FloatArray = npt.NDArray[np.float64]

USAGE_UNITS = 2.0**20
"""Where `Program.scaled` brings a memory limit: a solver's tolerance of 1e-6 is then a 1e-12 part of the limit."""


INTEGRAL = 1e-6
"""How near a value is to 0 or 1 that counts as either."""


@dataclass(frozen=True, eq=False)
class Program:
    """Minimise costs @ x subject to lower <= A x <= upper, 0 <= x <= 1, x[integers] integer.

    A holds values[k] at (rows[k], columns[k]), sorted by row and then column. Node i chooses with the variables
    first[i] .. first[i + 1] - 1, so that choices = first[-1]. Memory rows are in bytes, exact in integers. Where the
    usage limit is soft, overflow is (the variable of the bytes over it, how many bytes its value 1 stands for). The
    flows of network i over arcs flows[i][0] are the variables flows[i][1]; in `phases`, for networks with lives under a
    limit, those of the forward and of the backward apart. `written` are the variables of memory rows.
    """

    costs: IntArray
    lower: FloatArray
    upper: FloatArray
    rows: IntArray
    columns: IntArray
    values: FloatArray
    first: IntArray
    integers: BoolArray
    overflow: tuple[int, int] | None = None
    flows: tuple[tuple[IntArray, IntArray], ...] = ()
    phases: Mapping[int, tuple[list[FlowColumns], list[FlowColumns]]] = field(default_factory=dict)
    written: Written = field(default_factory=dict)

    @property
    def choices(self) -> int:
        """How many variables are strategies; they come first."""
        return int(self.first[-1])

    def with_usage_rows(self, problem: Problem, steps: Iterable[int]) -> Program:
        """The program with a memory row for every step."""
        assert problem.usage_limit is not None
        program, holdings = self, Holdings(problem, self.first, self.phases)
        for step in steps:
            held = holdings.at(step, len(program.costs), program.written)
            program = replace(program.extended(held.variables, held.rows), written=held.written)
            bytes_of = _live_usages(problem, len(program.costs), self.first, step)
            for column, used in held.terms.items():
                bytes_of[column] += used
            if self.overflow is not None:
                bytes_of[self.overflow[0]] -= self.overflow[1]
            columns = np.flatnonzero(bytes_of)
            program = program.with_row(columns, bytes_of[columns], problem.usage_limit)
        return program

    def extended(self, variables: int, rows: Sequence[Row]) -> Program:
        """The program with further variables without a price, and rows sum of coefficient * variable <= upper."""
        if not variables and not rows:
            return self
        entries: dict[tuple[int, int], int] = defaultdict(int)
        for number, (parts, _) in enumerate(rows, len(self.upper)):
            for column, coefficient in parts:
                entries[number, column] += coefficient
        places = np.array(sorted(entries), np.int64).reshape(-1, 2)
        values = np.array([entries[place] for place in sorted(entries)], np.float64)
        return replace(
            self,
            costs=np.concatenate([self.costs, np.zeros(variables, np.int64)]),
            integers=np.concatenate([self.integers, np.zeros(variables, np.bool_)]),
            lower=np.concatenate([self.lower, np.full(len(rows), -np.inf)]),
            upper=np.concatenate([self.upper, [upper for _, upper in rows]]),
            rows=np.concatenate([self.rows, places[:, 0]]),
            columns=np.concatenate([self.columns, places[:, 1]]),
            values=np.concatenate([self.values, values]),
        )

    def scaled(self) -> Program:
        """The program with its memory rows divided so that no limit is above USAGE_UNITS."""
        scales = np.minimum(1.0, USAGE_UNITS / np.maximum(self.upper, 1.0))
        return replace(
            self, lower=self.lower * scales, upper=self.upper * scales, values=self.values * scales[self.rows]
        )

    def relaxed(self) -> Program:
        """The program with all variables continuous."""
        return replace(self, integers=np.zeros_like(self.integers))

    def with_row(self, columns: IntArray, values: FloatArray, upper: float) -> Program:
        """The program with one more row, values @ x[columns] <= upper."""
        rows = np.full(len(columns), len(self.upper), np.int64)
        return replace(
            self,
            lower=np.append(self.lower, -np.inf),
            upper=np.append(self.upper, upper),
            rows=np.concatenate([self.rows, rows]),
            columns=np.concatenate([self.columns, columns]),
            values=np.concatenate([self.values, values]),
        )

    def choices_of(self, x: FloatArray) -> tuple[int, ...]:
        """The strategy with the largest variable, per node."""
        return tuple(
            int(np.argmax(x[lo:hi])) for lo, hi in zip(self.first[:-1].tolist(), self.first[1:].tolist(), strict=True)
        )

    def arcs_of(self, x: FloatArray) -> list[tuple[int, ...]]:
        """The arcs over which something flows, per network."""
        return [_used(x, arcs, columns) for arcs, columns in self.flows]

    def routes_of(self, x: FloatArray, anew: float = 0.5) -> dict[int, Routes]:
        """The arcs over which something flows in each phase, for the networks whose phases are apart: in the forward
        more than a half, in the backward, which makes copies `anew` there, more than so much.
        """

        def used(flows: Sequence[FlowColumns], least: float) -> tuple[int, ...]:
            return tuple(sorted({arc for flow in flows for arc in _used(x, flow.arcs, flow.columns, least)}))

        return {index: Routes(used(first, 0.5), used(second, anew)) for index, (first, second) in self.phases.items()}


def _used(x: FloatArray, arcs: IntArray, columns: IntArray, least: float = 0.5) -> tuple[int, ...]:
    return tuple(np.unique(arcs[x[columns] > least]).tolist())


def build(problem: Problem) -> Program:
    """The program of the problem, without memory rows. Ties and fixed choices must have been reduced away."""
    sizes = np.array([len(node.costs) for node in problem.nodes], np.int64)
    first = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
    parts = _Parts(first)
    parts.choose(problem, sizes)
    for index, edge in enumerate(problem.edges):
        if index not in problem.grouped:
            parts.edge(edge)
    for group in problem.groups:
        parts.group([problem.edges[index] for index in group.edges])
    read_again = ReadAgain(problem)
    for index, network in enumerate(problem.networks):
        holds = problem.usage_limit is not None and bool(network.lives)
        parts.network(index, network, read_again, apart=holds or network.is_optional)
    if problem.usage_price is not None:
        parts.soften(problem)
    return parts.program()


@dataclass(frozen=True, eq=False)
class _Pairs:
    """The finite pairs of an edge over the rows and columns that its strategies use.

    row_of, col_of: per strategy of u and v the position of its row and column. rows, cols: per pair the positions.
    keys: per pair its flat index in the edge matrix. prices: per pair its cost.
    """

    row_of: IntArray
    col_of: IntArray
    rows: IntArray
    cols: IntArray
    keys: IntArray
    prices: IntArray
    shape: tuple[int, int]
    free: bool


def _pairs(edge: Edge) -> _Pairs:
    used_rows, row_of = np.unique(edge.rows, return_inverse=True)
    used_cols, col_of = np.unique(edge.cols, return_inverse=True)
    costs = edge.costs[np.ix_(used_rows, used_cols)]
    rows, cols = np.nonzero(costs < INFEASIBLE)
    keys = used_rows[rows] * edge.costs.shape[1] + used_cols[cols]
    return _Pairs(row_of, col_of, rows, cols, keys, costs[rows, cols], costs.shape, not costs.any())


def distinct(flows: Sequence[FlowColumns]) -> tuple[IntArray, IntArray]:
    """Arcs and variables of flows; what two flows have in common once."""
    none = np.zeros(0, np.int64)
    columns, first = np.unique(np.concatenate([none, *(flow.columns for flow in flows)]), return_index=True)
    return np.concatenate([none, *(flow.arcs for flow in flows)])[first], columns


class _Parts:
    """Variables and rows collected block by block."""

    def __init__(self, first: IntArray) -> None:
        self.first = first
        self.variables = int(first[-1])
        self.row_count = 0
        self.overflow: tuple[int, int] | None = None
        self.flows: list[tuple[IntArray, IntArray]] = []
        self.phases: dict[int, tuple[list[FlowColumns], list[FlowColumns]]] = {}
        self.decided: list[IntArray] = []
        self.costs: list[IntArray] = []
        self.upper: list[FloatArray] = []
        self.lower: list[FloatArray] = []
        self.entries: list[tuple[IntArray, IntArray, float]] = []
        self.cache: dict[tuple[int, int, int], _Pairs] = {}

    def choose(self, problem: Problem, sizes: IntArray) -> None:
        """One strategy per node; a forbidden one is priced at 0 and held at 0 by a row of its own."""
        costs = np.concatenate([node.costs for node in problem.nodes]) if problem.nodes else np.zeros(0, np.int64)
        forbidden = np.flatnonzero(costs >= INFEASIBLE)
        self.costs.append(np.where(costs >= INFEASIBLE, 0, costs))
        rows = self._rows(len(sizes), 1.0, 1.0)
        self._enter(np.repeat(rows, sizes), np.arange(len(costs), dtype=np.int64), 1.0)
        self._enter(self._rows(len(forbidden), 0.0, 0.0), forbidden, 1.0)

    def edge(self, edge: Edge) -> None:
        pairs = self._pairs(edge)
        if not pairs.free:
            self._transport(edge, pairs, pairs.prices)

    def group(self, edges: Sequence[Edge]) -> None:
        """Shared prices: w for the priced pairs that two edges can choose, else the price stays on z."""
        # Each consumer c has its own z_c[l, m] of moving the tensor from row l to column m. Where several consumers can
        # choose the pair, z_c costs nothing but is at most the one w[l, m] of the pair, which has the price: two
        # consumers that both choose (l, m) set w to 1 once. A pair that only one can choose keeps its price on z.
        members = [(edge, self._pairs(edge)) for edge in edges]
        priced = [pairs.keys[pairs.prices > 0] for _, pairs in members]
        keys, counts = np.unique(np.concatenate(priced), return_counts=True)
        shared = keys[counts > 1]
        w = self._variables(edges[0].costs.ravel()[shared])
        for edge, pairs in members:
            if pairs.free:
                continue
            linked = np.flatnonzero(np.isin(pairs.keys, shared))
            prices = pairs.prices.copy()
            prices[linked] = 0
            z = self._transport(edge, pairs, prices)
            rows = self._rows(len(linked), -np.inf, 0.0)
            self._enter(rows, z[linked], 1.0)
            self._enter(rows, w[np.searchsorted(shared, pairs.keys[linked])], -1.0)

    def network(self, index: int, network: Network, read_again: ReadAgain, *, apart: bool) -> None:
        """The flows to every consumer, and w for the arcs that several of them may pay for together.

        read_again: which consumers read only what is made again.
        apart: each phase has its own, and what the backward starts from is said by variables.
        """
        none = np.zeros(0, np.int64)
        arcs, columns = [none], [none]
        phases: list[list[FlowColumns]] = []
        used: tuple[IntArray, IntArray] = none, none
        for stage in stages(network, apart=apart):
            together = self._variables(network.costs[stage.shared])
            self.decided.append(together)
            keeps = network.kept and bool(network.forward)
            starts = apart and bool(phases) and (keeps or network.is_optional)
            may_start = (used if keeps else (none, none)) if starts else None
            flows = [
                self._flow(network, stage, flow, together, may_start, read_again.by(network, flow.consumer))
                for flow in stage.flows
            ]
            for flow in flows:
                arcs.append(flow.arcs)
                columns.append(flow.columns)
            arcs.append(stage.shared)
            columns.append(together)
            phases.append(flows)
            used = distinct(flows)
        self.flows.append((np.concatenate(arcs), np.concatenate(columns)))
        if apart:
            self.phases[index] = phases[0], phases[1]
            self._keep_or_make_again(network, phases[1])
            producer = Consumer(network.producer, network.makes)
            if network.again is None:
                self._keep_source(network, producer, [flow for flows in phases for flow in flows])
            else:
                self._keep_source(network, producer, phases[0])
                self._keep_source(network, producer, phases[1], unless=network.again)
                self._keep_source(network, network.again, phases[1])

    def _keep_source(
        self, network: Network, maker: Consumer, flows: Sequence[FlowColumns], unless: Consumer | None = None
    ) -> None:
        """Nothing flows to where the tensor is made: dropped there and made again is what no plan can say. What is made
        there does not count if the tensor is made again.
        """
        columns = distinct(flows)
        into = np.flatnonzero(np.isin(network.heads[columns[0]], maker.wants))
        vertices, at = np.unique(network.heads[columns[0][into]], return_inverse=True)
        most = float(max(1, len(flows)))
        rows = self._rows(len(vertices), -np.inf, most)
        self._enter(rows[at], columns[1][into], 1.0)
        here = np.flatnonzero(np.isin(maker.wants, vertices))
        made = rows[np.searchsorted(vertices, maker.wants[here])]
        self._enter(made, self._choices(maker.node)[here], most)
        if unless is not None:
            again = self._choices(unless.node)[unless.wants != NOWHERE]
            self._enter(np.repeat(rows, len(again)), np.tile(again, len(rows)), -most)

    def _keep_or_make_again(self, network: Network, flows: Sequence[FlowColumns]) -> None:
        """Where a flow of the backward starts from a copy that is kept, no other flow brings one."""
        for flow in flows if len(flows) > 1 else ():
            columns, arcs = distinct([other for other in flows if other is not flow])[::-1]
            into = np.flatnonzero(np.isin(network.heads[arcs], flow.starts))
            most = float(len(flows))
            rows = self._rows(len(flow.starts), -np.inf, most)
            self._enter(rows, flow.start_columns, most)
            at = np.searchsorted(flow.starts, network.heads[arcs[into]])
            own = ~np.isin(columns[into], flow.columns)  # what two flows have in common starts nowhere
            self._enter(rows[at][own], columns[into][own], 1.0)

    def _flow(
        self,
        network: Network,
        stage: Stage,
        flow: Flow,
        together: IntArray,
        used: tuple[IntArray, IntArray] | None,
        read_again: bool,
    ) -> FlowColumns:
        """The variables of one flow; `used`: arcs of flows of the forward, at whose heads it may start, unless the
        consumer reads only what is made again.
        """
        f = self._variables(flow.priced)
        rows = self._rows(len(flow.vertices), 0.0, 0.0)
        none = np.zeros(0, np.int64)
        starts, made, again = (none, none), (none, none), (none, none)
        if used is None:
            self._balance(network, flow, rows)
        else:
            makes, choices = network.makes, self._choices(network.producer)
            if network.again is not None and network.again.node == network.producer:
                once = network.again.wants == NOWHERE
                makes, choices = makes[once], choices[once]
            if not read_again:
                made = self._starts(flow, rows, makes, choices)
                starts = self._starts(flow, rows, network.heads[used[0]], used[1])
            wanted = flow.consumer.wants != NOWHERE
            at = np.searchsorted(flow.vertices, flow.consumer.wants[wanted])
            self._enter(rows[at], self._choices(flow.consumer.node)[wanted], -1.0)
            if network.again is not None:
                node, wants = network.again
                is_made = wants != NOWHERE
                again = self._starts(flow, rows, wants[is_made], self._choices(node)[is_made])
                from_first = self._rows(1, -np.inf, 0.0)
                for column in (made[1], starts[1]):
                    self._enter(np.repeat(from_first, len(column)), column, 1.0)
                is_not = self._choices(node)[~is_made]
                self._enter(np.repeat(from_first, len(is_not)), is_not, -1.0)
        self._carry(network, flow, rows, flow.arcs, f)
        arcs, columns = [flow.arcs], [f]
        if stage.of_two:
            shared = flow.arcs[flow.shared]
            self._carry(network, flow, rows, shared, together[flow.links])
            arcs.append(shared)
            columns.append(together[flow.links])
        else:
            links = self._rows(len(flow.shared), -np.inf, 0.0)
            self._enter(links, f[flow.shared], 1.0)
            self._enter(links, together[flow.links], -1.0)
        return FlowColumns(
            flow.consumer,
            np.concatenate(arcs),
            np.concatenate(columns),
            *starts,
            *made,
            *again,
            starts_at_producer=used is None,
        )

    def _starts(self, flow: Flow, rows: IntArray, vertices: IntArray, variables: IntArray) -> tuple[IntArray, IntArray]:
        """Variables of where a flow starts, at most the sum of the `variables` at each of the `vertices`."""
        at = np.intersect1d(vertices, flow.vertices)
        columns = self._variables(np.zeros(len(at), np.int64))
        self.decided.append(columns)
        self._enter(rows[np.searchsorted(flow.vertices, at)], columns, 1.0)
        limits = self._rows(len(at), -np.inf, 0.0)
        self._enter(limits, columns, 1.0)
        among = np.flatnonzero(np.isin(vertices, at))
        self._enter(limits[np.searchsorted(at, vertices[among])], variables[among], -1.0)
        return at, columns

    def _balance(self, network: Network, flow: Flow, rows: IntArray) -> None:
        """In the row of each vertex of the flow: what is made there, less what is wanted there."""
        node, wants = flow.consumer
        made, wanted = self._choices(network.producer), self._choices(node)
        makes = network.makes
        if node == network.producer:  # a strategy that makes it where it wants it has no part in the balance
            differs = makes != wants
            made, wanted, makes, wants = made[differs], wanted[differs], makes[differs], wants[differs]
        self._enter(rows[np.searchsorted(flow.vertices, makes)], made, 1.0)
        self._enter(rows[np.searchsorted(flow.vertices, wants)], wanted, -1.0)

    def _carry(self, network: Network, flow: Flow, rows: IntArray, arcs: IntArray, variables: IntArray) -> None:
        """In the balance of its vertices what flows over an arc comes in at its head and goes out at its tail."""
        loops = network.tails[arcs] == network.heads[arcs]
        for ends, sign in ((network.heads, 1.0), (network.tails, -1.0)):
            at = np.searchsorted(flow.vertices, ends[arcs[~loops]])
            self._enter(rows[at], variables[~loops], sign)

    def soften(self, problem: Problem) -> None:
        """The variable of the bytes over the usage limit, as a part of the largest possible number."""
        assert problem.usage_price is not None
        largest = max(1, largest_usage(problem))
        column = int(self._variables(np.array([problem.usage_price * largest], np.int64))[0])
        self.overflow = column, largest

    def program(self) -> Program:
        rows = np.concatenate([rows for rows, _, _ in self.entries])
        columns = np.concatenate([columns for _, columns, _ in self.entries])
        values = np.concatenate([np.full(len(rows), value) for rows, _, value in self.entries])
        rows, columns, values = _summed(rows, columns, values)
        integers = np.zeros(self.variables, np.bool_)
        integers[: int(self.first[-1])] = True
        for decided in self.decided:
            integers[decided] = True
        return Program(
            np.concatenate(self.costs),
            np.concatenate(self.lower),
            np.concatenate(self.upper),
            rows,
            columns,
            values,
            self.first,
            integers,
            self.overflow,
            tuple(self.flows),
            self.phases,
        )

    def _transport(self, edge: Edge, pairs: _Pairs, prices: IntArray) -> IntArray:
        """The z of one edge and the rows that join them to the choices of both ends."""
        z = self._variables(prices)
        rows = self._rows(pairs.shape[0], 0.0, 0.0)
        cols = self._rows(pairs.shape[1], 0.0, 0.0)
        self._enter(rows[pairs.row_of], self._choices(edge.u), 1.0)
        self._enter(cols[pairs.col_of], self._choices(edge.v), 1.0)
        self._enter(rows[pairs.rows], z, -1.0)
        self._enter(cols[pairs.cols], z, -1.0)
        return z

    def _choices(self, node: int) -> IntArray:
        return np.arange(self.first[node], self.first[node + 1], dtype=np.int64)

    def _pairs(self, edge: Edge) -> _Pairs:
        key = (id(edge.rows), id(edge.cols), id(edge.costs))
        if key not in self.cache:
            self.cache[key] = _pairs(edge)
        return self.cache[key]

    def _variables(self, costs: IntArray) -> IntArray:
        self.costs.append(costs)
        self.variables += len(costs)
        return np.arange(self.variables - len(costs), self.variables, dtype=np.int64)

    def _rows(self, count: int, lower: float, upper: float) -> IntArray:
        self.lower.append(np.full(count, lower))
        self.upper.append(np.full(count, upper))
        self.row_count += count
        return np.arange(self.row_count - count, self.row_count, dtype=np.int64)

    def _enter(self, rows: IntArray, columns: IntArray, value: float) -> None:
        self.entries.append((rows, columns, value))


def _summed(rows: IntArray, columns: IntArray, values: FloatArray) -> tuple[IntArray, IntArray, FloatArray]:
    """Entries by row and column, those at the same place added up."""
    order = np.lexsort((columns, rows))
    rows, columns, values = rows[order], columns[order], values[order]
    is_first = np.ones(len(rows), np.bool_)
    is_first[1:] = (rows[1:] != rows[:-1]) | (columns[1:] != columns[:-1])
    if is_first.all():
        return rows, columns, values
    totals = np.add.reduceat(values, np.flatnonzero(is_first))
    return rows[is_first], columns[is_first], totals


def _live_usages(problem: Problem, variables: int, first: IntArray, step: int) -> FloatArray:
    """Per variable the bytes that nodes hold with it at the step."""
    bytes_of = np.zeros(variables)
    for index, node in enumerate(problem.nodes):
        for (lo, hi), usages in node.loads:
            if lo <= step < hi:
                bytes_of[first[index] : first[index + 1]] += usages
    return bytes_of
