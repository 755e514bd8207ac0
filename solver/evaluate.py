"""The only judge of an assignment. Shares no code with any reduction or backend, and counts in Python integers."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, pairwise
from operator import itemgetter

from .networks import NOWHERE, Network, Routes
from .problem import INFEASIBLE, Problem, ProblemError


@dataclass(frozen=True)
class Evaluation:
    """What an assignment costs and whether it may be used.

    Attributes:
        cost: the objective, exact; every forbidden strategy, absent pair and consumer that no route reaches adds
            INFEASIBLE (10^18).
        feasible: nothing is violated.
        violations: one sentence per broken constraint, in the order strategies, pairs, routes, fixed, ties, usage,
            budgets.
        peak_usage: largest number of bytes in use at a time step.
        peak_step: the first step at which it is reached; None where no load is ever live.
    """

    cost: int
    feasible: bool
    violations: tuple[str, ...]
    peak_usage: int
    peak_step: int | None


def evaluate(problem: Problem, choices: Sequence[int], routes: Sequence[Routes] = ()) -> Evaluation:
    """Judges `choices`, one strategy index per node, and `routes`, the arcs used by each network.

    Raises:
        ProblemError: there is not one choice per node and one pair of routes per network, a choice is not a strategy of
            its node, or a route does not name arcs of its network in ascending order.
    """
    _check(problem, choices, routes)
    violations: list[str] = []
    cost = problem.offset + _nodes_cost(problem, choices, violations) + _edges_cost(problem, choices, violations)
    for network, taken in zip(problem.networks, routes, strict=True):
        cost += _network_cost(network, choices, taken, violations)
    for node, strategy in sorted(problem.fixed.items()):
        if choices[node] != strategy:
            violations.append(f"node {node} is fixed to strategy {strategy} and chose {choices[node]}")
    for tie in problem.ties:
        if len({choices[node] for node in tie}) > 1:
            violations.append(f"the tied nodes {', '.join(map(str, tie[:8]))} chose different strategies")
    peak_usage, peak_step = _peak(problem, choices, routes)
    over = 0 if problem.usage_limit is None else max(0, peak_usage - problem.usage_limit)
    if problem.usage_price is not None:
        cost += problem.usage_price * over
    elif over:
        violations.append(f"usage is {peak_usage} at step {peak_step}, over the limit {problem.usage_limit}")
    for budget in problem.budgets:
        used = sum(int(usages[choices[node]]) for node, usages in budget.usages.items())
        if used > budget.limit:
            violations.append(f"budget {budget.name!r} uses {used}, over its limit {budget.limit}")
    return Evaluation(cost, not violations, tuple(violations), peak_usage, peak_step)


def usage_timeline(problem: Problem, choices: Sequence[int], routes: Sequence[Routes] = ()) -> list[tuple[int, int]]:
    """Bytes in use as steps: (t, usage) means that usage from t up to the next entry's t. Ends with usage 0.

    routes: one pair per network, for what networks hold.
    """
    loads = (
        (lo, hi, int(usages[choice]))
        for node, choice in zip(problem.nodes, choices, strict=True)
        for (lo, hi), usages in node.loads
    )
    return added_up(chain(loads, _held(problem, choices, routes)))


def added_up(held: Iterable[tuple[int, int, int]]) -> list[tuple[int, int]]:
    """A timeline as that of `usage_timeline`, of the bytes that are held from one step to another: (lo, hi, bytes)."""
    changes: Counter[int] = Counter()
    for lo, hi, used in held:
        changes[lo] += used
        changes[hi] -= used
    steps = sorted(changes)
    return list(zip(steps, accumulate(changes[step] for step in steps), strict=True))


def usage_at(timeline: Sequence[tuple[int, int]], step: int) -> int:
    """Bytes in use at a step of a `usage_timeline`."""
    position = bisect_right(timeline, step, key=itemgetter(0))
    return timeline[position - 1][1] if position else 0


def _check(problem: Problem, choices: Sequence[int], routes: Sequence[Routes]) -> None:
    if len(choices) != len(problem.nodes):
        raise ProblemError(f"there are {len(choices)} choices for {len(problem.nodes)} nodes: expected one per node")
    for index, (node, choice) in enumerate(zip(problem.nodes, choices, strict=True)):
        if not 0 <= choice < len(node.costs):
            raise ProblemError(f"node {index} has {len(node.costs)} strategies, {choice} is not one of them")
    if len(routes) != len(problem.networks):
        raise ProblemError(
            f"there are {len(routes)} pairs of routes for {len(problem.networks)} networks: expected one per network "
            "(solver.routing.routed finds cheapest ones)"
        )
    for network, taken in zip(problem.networks, routes, strict=True):
        for phase, arcs in zip(("forward", "backward"), taken, strict=True):
            if arcs and (
                any(later <= arc for arc, later in pairwise(arcs))
                or not 0 <= min(arcs) <= max(arcs) < len(network.costs)
            ):
                raise ProblemError(
                    f"the {phase} routes of network {network.name!r} are {list(arcs)[:8]}: expected arcs in "
                    f"[0, {len(network.costs)}), ascending"
                )


def _nodes_cost(problem: Problem, choices: Sequence[int], violations: list[str]) -> int:
    total = 0
    for index, (node, choice) in enumerate(zip(problem.nodes, choices, strict=True)):
        cost = int(node.costs[choice])
        total += cost
        if cost >= INFEASIBLE:
            violations.append(f"node {index} chose its forbidden strategy {choice}")
    return total


def _edges_cost(problem: Problem, choices: Sequence[int], violations: list[str]) -> int:
    group_of = {edge: index for index, group in enumerate(problem.groups) for edge in group.edges}
    paid: set[tuple[int, int]] = set()
    total = 0
    for index, edge in enumerate(problem.edges):
        column = int(edge.cols[choices[edge.v]])
        cost = int(edge.costs[edge.rows[choices[edge.u]], column])
        if cost >= INFEASIBLE:
            pair = f"({choices[edge.u]}, {choices[edge.v]})"
            violations.append(f"edge {index} ({edge.u}, {edge.v}) has no pair {pair}")
        if index in group_of:
            if (group_of[index], column) in paid:
                continue
            paid.add((group_of[index], column))
        total += cost
    return total


def _network_cost(network: Network, choices: Sequence[int], taken: Routes, violations: list[str]) -> int:
    """Follows the arcs of both phases from where the producer makes the tensor, and adds up what they cost."""
    made = {int(network.makes[choices[network.producer]])}
    there = _follow(network, made, taken.forward)
    start = there if network.kept else made
    if network.made_again(choices) != NOWHERE:
        start = {network.made_again(choices)}
    again = _follow(network, start, taken.backward)
    cost = sum(int(network.costs[arc]) for arcs in taken for arc in arcs)
    for phase, consumers, reached in (("forward", network.forward, there), ("backward", network.backward, again)):
        for node, wants in consumers:
            vertex = int(wants[choices[node]])
            if vertex != NOWHERE and vertex not in reached:
                violations.append(
                    f"no {phase} route of network {network.name!r} reaches vertex {vertex}, where node {node} wants it"
                )
                cost += INFEASIBLE
    return cost


class _Walk:
    """The ways of one network: for every consumer the copies it goes through, from the one it reads back to the source.

    A copy is (phase, vertex): what the backward makes again is another one than what the forward made. Who wants
    nothing goes no way.
    """

    def __init__(self, network: Network, choices: Sequence[int], taken: Routes) -> None:
        made = int(network.makes[choices[network.producer]])
        self.source = 0, made
        there = _parents(network, [made], taken.forward)
        kept = [made, *there] if network.kept else [made]
        again = {int(network.heads[arc]) for arc in taken.backward}
        new = [vertex for vertex in kept if vertex == made or vertex not in again]
        remade = network.made_again(choices)
        self.again = None if remade == NOWHERE else (1, remade)
        before = {(0, head): (0, tail) for head, tail in there.items()}
        parents = _parents(network, new if self.again is None else [remade], taken.backward)
        of_backward = {*parents, remade}
        for head, tail in parents.items():
            before[1, head] = (int(tail in of_backward), tail)
        wanted = [int(wants[choices[node]]) for node, wants in network.consumers]
        of_forward = len(network.forward)
        self.ways = [
            self._back((int(k >= of_forward and vertex in of_backward), vertex), before)
            for k, vertex in enumerate(wanted)
        ]

    def _back(self, copy: tuple[int, int], before: dict[tuple[int, int], tuple[int, int]]) -> list[tuple[int, int]]:
        way = [] if copy[1] == NOWHERE else [copy]
        while way and way[-1] in before and way[-1] not in (self.source, self.again):
            way.append(before[way[-1]])
        return way


def _held(problem: Problem, choices: Sequence[int], routes: Sequence[Routes]) -> Iterator[tuple[int, int, int]]:
    """(lo, hi, bytes) for every copy that networks hold."""
    alive = [
        (life.made, index, number)
        for index, network in enumerate(problem.networks)
        for number, life in enumerate(network.lives)
    ]
    walks = {index: _Walk(problem.networks[index], choices, routes[index]) for index in {i for _, i, _ in alive}}
    # (network, life) -> consumers that views are made of, and until when these are held
    views: dict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
    for _, index, number in sorted(alive, reverse=True):  # a view before what it is a view of
        network, walk = problem.networks[index], walks[index]
        life = network.lives[number]
        first: dict[tuple[int, int], int] = {walk.source: life.made}
        last: Counter[tuple[int, int]] = Counter({walk.source: life.made + 1})
        if walk.again is not None:
            assert life.again is not None
            first[walk.again], last[walk.again] = life.again, life.again + 1
        read = [(read, way) for read, way in zip(life.reads, walk.ways, strict=True) if way]
        for (at, until), way in sorted(read, key=lambda each: each[0][0]):
            last[way[0]] = max(last[way[0]], until)
            for copy, before in pairwise(way):
                if copy in first:
                    break
                first[copy] = at
                last[before] = max(last[before], at)
        for consumer, end in views[index, number]:
            copy = walk.ways[consumer][0]
            last[copy] = max(last[copy], end)
        if life.base is not None:
            views[life.base[:2]].append((life.base.consumer, last[walk.source]))
            if walk.again is not None:
                assert life.base.again is not None
                views[life.base[:2]].append((life.base.again, last[walk.again]))
        assert network.sizes is not None
        for copy, since in first.items():
            elsewhere = copy in (walk.source, walk.again) and (network.held or life.base is not None)
            if not elsewhere and since < last[copy]:
                yield since, last[copy], int(network.sizes[copy[1]])


def _parents(network: Network, start: Sequence[int], arcs: Sequence[int]) -> dict[int, int]:
    """For every vertex that the arcs lead to from the start, and is none of it, the one before it."""
    leaving: dict[int, list[int]] = {}
    for arc in arcs:
        leaving.setdefault(int(network.tails[arc]), []).append(int(network.heads[arc]))
    parents: dict[int, int] = {}
    waiting = list(start)
    for vertex in waiting:
        for head in leaving.get(vertex, ()):
            if head not in parents and head not in start:
                parents[head] = vertex
                waiting.append(head)
    return parents


def _follow(network: Network, start: set[int], arcs: Sequence[int]) -> set[int]:
    """The vertices that the arcs reach from the start, itself included."""
    if not arcs:
        return start
    leaving: dict[int, list[int]] = {}
    for arc in arcs:
        leaving.setdefault(int(network.tails[arc]), []).append(int(network.heads[arc]))
    reached, waiting = set(start), list(start)
    while waiting:
        for vertex in leaving.get(waiting.pop(), ()):
            if vertex not in reached:
                reached.add(vertex)
                waiting.append(vertex)
    return reached


def _peak(problem: Problem, choices: Sequence[int], routes: Sequence[Routes]) -> tuple[int, int | None]:
    timeline = usage_timeline(problem, choices, routes)
    if not timeline:
        return 0, None
    peak = max(usage for _, usage in timeline)
    return peak, next(step for step, usage in timeline if usage == peak)
