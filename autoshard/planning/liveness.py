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
alive in between) or makes its own (:class:`~autoshard.planning.formulation.CopyChoice`). For activations all copies are
kept, or none: two programs.

This is an estimate: it knows the layout in which a tensor is made and the one in which it is read, but for activations
not both at once. :mod:`autoshard.planning.timeline` knows everything once the choices are made, and decides whether a
plan fits (:mod:`autoshard.planning.budget`).
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

from cost_models import OptimizerPolicy
from solver import Group, Problem
from solver.problem import Load

from ..capture import Ref
from .formulation import Formulation
from .liveness_copies import Copies, EdgeNumbers, copies_of
from .liveness_moments import course_of
from .liveness_sizes import Sizes, with_loads
from .liveness_storages import lasting_loads, storage_loads
from .pairs import demand_edges, pair_problem

SMALL = 1000
"""A copy of a parameter smaller than one SMALL-th of the budget has no node of its own, and is kept where it can be."""


def with_memory_loads(
    formulation: Formulation, policy: OptimizerPolicy, budget_bytes: int, *, keep_activations: bool = True
) -> Formulation:
    """The same program with what its choices hold in memory; the limit itself is ``problem.usage_limit``.

    Args:
        formulation: one that keeps copies.
        policy: of the optimizer, whose state counts.
        budget_bytes: what a rank may hold; it only decides how small a copy must be to be left out.
        keep_activations: the backward reads the copies of activations that the forward made; otherwise it makes its own
            from what was made, which is smaller where the copy was gathered.
    """
    course, sizes = course_of(formulation.graph, formulation.demands), Sizes(formulation)
    loads: dict[int, list[Load]] = defaultdict(list)
    for node, load in lasting_loads(course, policy, sizes):
        loads[node].append(load)
    for node, load in storage_loads(course, formulation.demands, sizes, keep_activations):
        loads[node].append(load)
    pairs, numbers = pair_problem(formulation), _edge_numbers(formulation)
    copies = copies_of(replace(formulation, problem=pairs), course, sizes, numbers, budget_bytes // SMALL)
    groups = [group.edges for group in pairs.groups] if keep_activations else _by_phase(numbers)
    return replace(
        formulation,
        problem=_assembled(pairs, loads, copies, groups),
        keep_copies=formulation.keep_copies and keep_activations,
        copy_choices=copies.choices,
    )


def _assembled(
    problem: Problem, loads: dict[int, list[Load]], copies: Copies, groups: list[tuple[int, ...]]
) -> Problem:
    """The problem with loads, and with the nodes, edges and ties of copies; ``groups`` are of the problem's edges."""
    kept = [k for k in range(len(problem.edges)) if k not in copies.replaced]
    number = {old: new for new, old in enumerate(kept)}
    left = (tuple(number[edge] for edge in group if edge in number) for group in groups)
    return replace(
        problem,
        nodes=(*(with_loads(node, loads[i]) for i, node in enumerate(problem.nodes)), *copies.nodes),
        edges=(*(problem.edges[k] for k in kept), *copies.edges),
        groups=tuple(Group(edges) for edges in left if len(edges) > 1),
        ties=(*problem.ties, *copies.ties),
    )


def _edge_numbers(formulation: Formulation) -> EdgeNumbers:
    """The number of the edge for every tensor and who wants it."""
    return {(d.ref, d.phase, node, position): edge for d, node, position, edge in demand_edges(formulation)}


def _by_phase(numbers: EdgeNumbers) -> list[tuple[int, ...]]:
    """The edges that pay a layout together where the backward makes its own copies: those of a tensor in one phase."""
    members: dict[tuple[Ref, str], list[int]] = defaultdict(list)
    for (ref, phase, _, _), edge in numbers.items():
        members[ref, phase].append(edge)
    return [tuple(edges) for edges in members.values()]
