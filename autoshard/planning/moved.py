"""The answer of one program of a step as one of another program of it, at whose prices it is weighed again.

Programs of a step differ in the schedule that they price, in constraints, and in whether they decide what is computed
again. Operators are the same by phase and name, and their strategies, of which there may be others, by what they are.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress

from solver import Assignment, Routes, evaluate, routed

from ..capture import Ref
from ..recomputation import again_name
from ..strategies import Strategy
from .formulation import Formulation
from .tensor_networks import same_arcs


def moved(formulation: Formulation, other: Formulation, answer: Assignment) -> Assignment | None:
    """The answer of another program as one of this program; None where it is none here, as identical layers are not all
    decided alike in it, or a strategy is not offered. Where it takes steps that are not, the cheapest way is taken.

    Args:
        other: one that decides what is computed again only where this one does.
    """
    choices = None if other.groups else as_choices(formulation, other, answer.choices)
    if choices is None:
        return None
    found = routed(formulation.problem, choices, given=dict(_ways(formulation, other, answer)))
    return found if found is not None and evaluate(formulation.free, *found).feasible else None


def as_choices(formulation: Formulation, other: Formulation, choices: Sequence[int]) -> tuple[int, ...] | None:
    """Choices of another program as choices of this one; None where a strategy is not offered."""
    places, again = _places(formulation, other), frozenset(other.graph.again)
    number: dict[tuple[int, int], list[int | None]] = {}
    found: list[int] = []
    for i, k in enumerate(places):
        if k is None:  # a second operator, which is no decision of its own
            found.append(0)
            continue
        here, there = formulation.strategies[i], other.strategies[k]
        if (id(here), id(there)) not in number:
            number[id(here), id(there)] = _numbers(here, there)
        choice = number[id(here), id(there)][choices[k] % len(there)]
        if choice is None:
            return None
        if i in formulation.twice:
            is_again = choices[k] >= len(there) if k in other.twice else formulation.graph.nodes[i].name in again
            choice += is_again * len(here)
        found.append(choice)
    return tuple(found)


def _places(formulation: Formulation, other: Formulation) -> list[int | None]:
    """For every solver node here the one there; None for a second operator that is no decision here."""
    nodes = formulation.graph.nodes
    place = _by_name(other)
    named = [None if i in formulation.seconds else place[node.phase, node.name] for i, node in enumerate(nodes)]
    return [*named, *range(len(other.graph.nodes), len(other.strategies))]


def _by_name(formulation: Formulation) -> dict[tuple[str, str], int]:
    """The solver node of every node of the graph, by phase and name."""
    return {(node.phase, node.name): k for k, node in enumerate(formulation.graph.nodes)}


def _numbers(here: tuple[Strategy, ...], there: tuple[Strategy, ...]) -> list[int | None]:
    """For each strategy there its number here."""
    number = {strategy: i for i, strategy in enumerate(here)}
    return [number.get(strategy) for strategy in there]


def _ways(formulation: Formulation, other: Formulation, answer: Assignment) -> Iterator[tuple[int, Routes]]:
    """The routes of the other program's answer, as far as all their steps are offered here."""
    place = _by_name(other)
    number = {found.ref: k for k, found in enumerate(other.networks)}
    again = frozenset(other.graph.again) if formulation.seconds and not other.seconds else frozenset[str]()
    for k, here in enumerate(formulation.networks):
        node = formulation.graph.nodes[here.ref.node]
        makers = [place.get((node.phase, node.name))]
        if node.phase == "forward" and node.name in again:  # whose second operator has a network of its own there
            makers.append(place.get(("backward", again_name(node.name))))
        at = [None if maker is None else number.get(Ref(maker, here.ref.output)) for maker in makers]
        with suppress(KeyError):
            phases = [
                () if n is None else same_arcs(other.networks[n], here, answer.routes[n][phase])
                for phase, n in enumerate((at[0], at[-1]))
            ]
            yield k, Routes(*phases)
