"""The answer of a program that decides what is computed again, as one of the program in which that is decided.

A plan is written from a graph in which operators are computed again, or are not. So the answer's choices are read as
the names of those that are, and the same choices and routes are looked up in the program of the graph that has them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from solver import Routes, Solution

from ..capture import CapturedGraph, Ref, recomputed
from ..constraints.compile import compile_constraints
from .formulation import Formulation, assemble
from .tensor_networks import same_arcs


def decided(formulation: Formulation, solution: Solution) -> tuple[Formulation, Solution]:
    """The program in which it is decided what is computed again, and the solution with the choices and routes of that.

    Args:
        solution: of the formulation's problem; one that has choices.
    """
    if not formulation.seconds:
        return formulation, solution
    assert solution.choices is not None
    reader = _Reader(formulation, solution.choices)
    graph = recomputed(formulation.graph, reader.again())
    places = reader.places(graph)
    found = assemble(
        graph,
        formulation.mesh,
        formulation.prices.on(graph),
        compile_constraints(formulation.constraints, graph, formulation.mesh),
        (*(formulation.strategies[i] for i in places), *formulation.strategies[len(formulation.graph.nodes) :]),
        objective=formulation.objective,
        constraints=formulation.constraints,
        tie_layers=bool(formulation.problem.ties),
        keep_copies=formulation.keep_copies,
    )
    choices = tuple(reader.choices(places))
    routes = tuple(reader.routes(found, places, solution.routes))
    return replace(found, groups=formulation.groups), replace(solution, choices=choices, routes=routes)


class _Reader:
    def __init__(self, formulation: Formulation, choices: Sequence[int]) -> None:
        self._formulation, self._choices = formulation, choices
        self._strategies, self._seconds = formulation.strategies, formulation.seconds
        self._twice = formulation.twice

    def _is_again(self, first: int) -> bool:
        return self._choices[first] >= len(self._strategies[first])

    def again(self) -> list[str]:
        """The names of the operators that are computed again."""
        nodes = self._formulation.graph.nodes
        return [nodes[first].name for first in self._seconds.values() if self._is_again(first)]

    def places(self, graph: CapturedGraph) -> list[int]:
        """The node here of every node of a graph in which less is computed again."""
        number = {(node.phase, node.name): i for i, node in enumerate(self._formulation.graph.nodes)}
        return [number[node.phase, node.name] for node in graph.nodes]

    def choices(self, places: Sequence[int]) -> Iterator[int]:
        """Those of the nodes at these places, then those of the results."""
        for i in places:
            first = self._seconds.get(i, i)
            choice = self._choices[first]
            if first in self._twice:
                choice %= len(self._strategies[first])
            if self._strategies[i] is not self._strategies[first]:
                choice = self._strategies[i].index(self._strategies[first][choice])
            yield choice
        yield from self._choices[len(self._formulation.graph.nodes) :]

    def routes(self, other: Formulation, places: Sequence[int], routes: Sequence[Routes]) -> Iterator[Routes]:
        """Those of every network of another program, whose nodes stand at these places here."""
        number = {found.ref: k for k, found in enumerate(self._formulation.networks)}
        for found in other.networks:
            at = places[found.ref.node]
            first = self._seconds.get(at, at)
            k = number[Ref(first, found.ref.output)]
            here = self._formulation.networks[k]
            forward, backward = (same_arcs(here, found, arcs) for arcs in routes[k])
            if first != at:
                yield Routes((), backward)
            elif first in self._twice and self._is_again(first):
                yield Routes(forward, ())
            else:
                yield Routes(forward, backward)
