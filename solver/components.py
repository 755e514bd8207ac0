"""Components: parts of a problem that share no edge, network or memory are solved apart, their answers side by side.

Exact because the objective is a sum over the parts and no constraint spans two of them: all nodes with loads and
all networks with lives are in one part where there is a usage limit. The offset goes to the last, largest part.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import TypeVar

from .backends import Answer, Request
from .evaluate import evaluate
from .networks import Assignment, Routes, rebased
from .problem import Edge, Group, Problem
from .reductions.reduction import renumbered
from .solution import Mixture

T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class Part:
    """Some nodes and networks of a problem, ascending, and the problem of them."""

    nodes: tuple[int, ...]
    problem: Problem
    networks: tuple[int, ...] = ()

    def restricted(self, assignment: Assignment) -> Assignment:
        """The choices of the part's nodes and the routes of its networks."""
        choices = tuple(assignment.choices[node] for node in self.nodes)
        return Assignment(choices, tuple(assignment.routes[network] for network in self.networks))


def solve_parts(run: Callable[[Problem, Request], Answer], problem: Problem, request: Request) -> Answer:
    """Runs `run` on every component, smallest first, each with its share of the time by number of strategies."""
    parts = split(problem)
    left = sum(part.problem.strategies for part in parts)
    costs: list[int | None] = []
    answers: list[Answer] = []
    for part in parts:
        own = replace(request, on_progress=lambda cost, bound: None, cutoff=None)
        if part is parts[-1]:
            others = _total([answer.bound for answer in answers])
            cutoff = None if request.cutoff is None or others is None else request.cutoff - others
            own = replace(request, on_progress=partial(_on_top, request, _total(costs), others), cutoff=cutoff)
        elif (left_s := request.seconds_left()) is not None:
            own = replace(own, deadline_s=time.monotonic() + left_s * part.problem.strategies / left)
        start = None if request.start is None else part.restricted(request.start)
        answer = run(part.problem, replace(own, start=start))
        answers.append(answer)
        costs.append(None if answer.assignment is None else evaluate(part.problem, *answer.assignment).cost)
        left -= part.problem.strategies
    return join(parts, answers)


def _total(values: Sequence[int | None]) -> int | None:
    return None if None in values else sum(value or 0 for value in values)


def _on_top(request: Request, costs: int | None, bounds: int | None, cost: int | None, bound: int | None) -> None:
    """Reports a cost and bound of the whole problem: those of the last part plus those of the other parts."""
    request.on_progress(_total([costs, cost]), _total([bounds, bound]))


def split(problem: Problem) -> list[Part]:
    """The components, smallest first. Ties, fixed choices and budgets must have been reduced away."""
    labels = _labels(problem)
    members: dict[int, list[int]] = {}
    for node, label in enumerate(labels):
        members.setdefault(label, []).append(node)
    if len(members) <= 1:
        return [Part(tuple(range(len(labels))), problem, tuple(range(len(problem.networks))))]
    place = {node: position for nodes in members.values() for position, node in enumerate(nodes)}
    edges: dict[int, list[Edge]] = {label: [] for label in members}
    position: list[int] = []
    for edge in problem.edges:
        own = edges[labels[edge.u]]
        position.append(len(own))
        own.append(Edge(place[edge.u], place[edge.v], edge.rows, edge.cols, edge.costs))
    groups: dict[int, list[Group]] = {label: [] for label in members}
    for group in problem.groups:
        label = labels[problem.edges[group.edges[0]].u]
        groups[label].append(Group(tuple(position[index] for index in group.edges)))
    networks: dict[int, list[int]] = {label: [] for label in members}
    for index, network in enumerate(problem.networks):
        networks[labels[network.producer]].append(index)
    parts = [
        Part(
            tuple(nodes),
            replace(
                problem,
                nodes=tuple(problem.nodes[node] for node in nodes),
                edges=tuple(edges[label]),
                groups=tuple(groups[label]),
                networks=rebased(
                    renumbered([problem.networks[index] for index in networks[label]], place),
                    lambda base, own=networks[label]: base._replace(network=own.index(base.network)),  # type: ignore[misc]
                ),
                offset=0,
            ),
            tuple(networks[label]),
        )
        for label, nodes in members.items()
    ]
    parts.sort(key=lambda part: part.problem.strategies)
    parts[-1] = replace(parts[-1], problem=replace(parts[-1].problem, offset=problem.offset))
    return parts


def join(parts: Sequence[Part], answers: Sequence[Answer]) -> Answer:
    """The answer of the whole problem: known only as far as those of all parts are."""
    if any(answer.infeasible for answer in answers):
        return Answer(infeasible=True)
    bounds = [answer.bound for answer in answers]
    found = Answer(bound=_total(bounds), mixtures=tuple(_mixtures(parts, answers)))
    return found.with_assignment(_whole(parts, [answer.assignment for answer in answers]))


def _mixtures(parts: Sequence[Part], answers: Sequence[Answer]) -> Iterator[Mixture]:
    """What the relaxation of one part mixes (of the one with memory), beside the answers of the others."""
    mixed = next((answer for answer in answers if answer.mixtures), None)
    for found in () if mixed is None else mixed.mixtures:
        main, other = (
            _whole(parts, [chosen if answer is mixed else answer.assignment for answer in answers])
            for chosen in (found.main, found.other)
        )
        if main is not None and other is not None:
            yield replace(found, main=main, other=other)


def _whole(parts: Sequence[Part], assignments: Sequence[Assignment | None]) -> Assignment | None:
    """The assignment of the whole problem; None where that of a part is not known."""
    choices: dict[int, int] = {}
    routes: dict[int, Routes] = {}
    for part, assignment in zip(parts, assignments, strict=True):
        if assignment is None:
            return None
        choices.update(zip(part.nodes, assignment.choices, strict=True))
        routes.update(zip(part.networks, assignment.routes, strict=True))
    return Assignment(_in_order(choices), _in_order(routes))


def _in_order(values: Mapping[int, T]) -> tuple[T, ...]:
    return tuple(values[key] for key in sorted(values))


def _labels(problem: Problem) -> list[int]:
    """Per node the smallest node that it is connected with, by edges, networks or memory."""
    parent = list(range(len(problem.nodes)))

    def root(node: int) -> int:
        while parent[node] != node:
            parent[node] = parent[parent[node]]
            node = parent[node]
        return node

    pairs = [(edge.u, edge.v) for edge in problem.edges]
    pairs += [(network.producer, node) for network in problem.networks for node, _ in network.ends]
    if problem.usage_limit is not None:
        loaded = [node for node, of in enumerate(problem.nodes) if of.loads]
        loaded += [network.producer for network in problem.networks if network.lives]
        pairs += pairwise(loaded)
    for u, v in pairs:
        low, high = sorted((root(u), root(v)))
        parent[high] = low
    return [root(node) for node in range(len(parent))]
