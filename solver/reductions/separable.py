"""A separable matrix, costs[l, m] = a_l + b_m, is no coupling: a goes to the costs of u, b to those of v.

Exact because every pair of choices pays the same as before. Only for edges of no group; a matrix with an absent pair is
not separable.
"""

from __future__ import annotations

from dataclasses import replace

from ..problem import INFEASIBLE, Group, IntArray, Node, Problem, add_costs, identity
from .reduction import Outcome, Reduced, Substitution


def fold_separable(problem: Problem) -> Outcome:
    """The problem without edges that do not couple their ends."""
    terms_of: dict[int, tuple[IntArray, IntArray] | None] = {}
    extra: dict[int, list[IntArray]] = {}
    kept: list[int] = []
    for index, edge in enumerate(problem.edges):
        if index in problem.grouped:
            kept.append(index)
            continue
        if id(edge.costs) not in terms_of:
            terms_of[id(edge.costs)] = _terms(edge.costs)
        terms = terms_of[id(edge.costs)]
        if terms is None:
            kept.append(index)
        else:
            extra.setdefault(edge.u, []).append(terms[0][edge.rows])
            extra.setdefault(edge.v, []).append(terms[1][edge.cols])
    if not extra:
        return None
    nodes = list(problem.nodes)
    for index, costs in extra.items():
        node = nodes[index]
        nodes[index] = Node(node.name, add_costs([node.costs, *costs]), further_loads=node.loads)
    place = {index: position for position, index in enumerate(kept)}
    groups = tuple(Group(tuple(place[index] for index in group.edges)) for group in problem.groups)
    edges = tuple(problem.edges[index] for index in kept)
    tables = [identity(len(node.costs)) for node in nodes]
    smaller = replace(problem, nodes=tuple(nodes), edges=edges, groups=groups)
    return Reduced(smaller, Substitution(range(len(nodes)), tables, len(nodes)))


def _terms(costs: IntArray) -> tuple[IntArray, IntArray] | None:
    a = costs[:, 0]
    b = costs[0] - costs[0, 0]
    separable = costs.max() < INFEASIBLE and (costs == a[:, None] + b[None, :]).all()
    return (a, b) if separable else None
