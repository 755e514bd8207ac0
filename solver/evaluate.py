"""The only judge of an assignment. Shares no code with any reduction or backend, and counts in Python integers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from .networks import Network, Routes
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
    peak_usage, peak_step = _peak(problem, choices)
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


def usage_timeline(problem: Problem, choices: Sequence[int]) -> list[tuple[int, int]]:
    """Bytes in use as steps: (t, usage) means that usage from t up to the next entry's t. Ends with usage 0."""
    changes: Counter[int] = Counter()
    for node, choice in zip(problem.nodes, choices, strict=True):
        for (lo, hi), usages in node.loads:
            used = int(usages[choice])
            changes[lo] += used
            changes[hi] -= used
    steps = sorted(changes)
    return list(zip(steps, accumulate(changes[step] for step in steps), strict=True))


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
            if any(later <= arc for arc, later in pairwise(arcs)) or any(not 0 <= a < len(network.costs) for a in arcs):
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
    again = _follow(network, there if network.kept else made, taken.backward)
    cost = sum(int(network.costs[arc]) for arcs in taken for arc in arcs)
    for phase, consumers, reached in (("forward", network.forward, there), ("backward", network.backward, again)):
        for node, wants in consumers:
            vertex = int(wants[choices[node]])
            if vertex not in reached:
                violations.append(
                    f"no {phase} route of network {network.name!r} reaches vertex {vertex}, where node {node} wants it"
                )
                cost += INFEASIBLE
    return cost


def _follow(network: Network, start: set[int], arcs: Sequence[int]) -> set[int]:
    """The vertices that the arcs reach from the start, itself included."""
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


def _peak(problem: Problem, choices: Sequence[int]) -> tuple[int, int | None]:
    timeline = usage_timeline(problem, choices)
    if not timeline:
        return 0, None
    peak = max(usage for _, usage in timeline)
    return peak, next(step for step, usage in timeline if usage == peak)
