"""Cuts against circles: what a flow of the backward starts from has come from where the tensor was made.

A flow of the forward may run in a circle beside its way. Then copies are where nothing brought one, and where the way
there is dear, a circle is cheap: of Qwen3-MoE with 24 layers under 21.5 GiB what experts had made was kept so at a
twenty-sixth of its price, and no point could be rounded. For every set S of vertices, with the producer's choices x_u:

    sum over v in S of g_k[v]  <=  sum over s with makes[s] in S of x_u[s]  +  sum of what the forward brings into S

The set for which a point breaks that most is a minimum cut.
Source: the directed cuts of Steiner arborescences, in Chopra, Gorres and Rao, "Solving the Steiner tree problem on a
graph using branch and cut", ORSA Journal on Computing 4, 1992.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from ortools.graph.python.max_flow import SimpleMaxFlow

from ..networks import Network
from ..problem import IntArray, Problem
from .holdings import FlowColumns, Row
from .integer_program import FloatArray, Program, distinct

UNITS = 10**6
"""What 1 is for the minimum cut, whose capacities are integers."""
LEAST = 1000
"""By how much of that a cut has to be broken."""


def cuts(problem: Problem, program: Program, x: FloatArray) -> list[Row]:
    """Rows that a point breaks, and no plan does: one at most for each flow of the backward."""
    return list(_cuts(problem, program, np.maximum(0, np.rint(x * UNITS)).astype(np.int64)))


def _cuts(problem: Problem, program: Program, units: IntArray) -> Iterator[Row]:
    for index, (forward, backward) in program.phases.items():
        network = problem.networks[index]
        makers = np.arange(program.first[network.producer], program.first[network.producer + 1])
        arcs, columns = distinct(forward)
        for flow in backward:
            if units[flow.start_columns].sum() <= LEAST:
                continue
            inside = _not_reached(network, flow, units, (arcs, columns), makers)
            if inside is not None:
                starts = flow.start_columns[np.isin(flow.starts, inside)]
                enters = np.isin(network.heads[arcs], inside) & ~np.isin(network.tails[arcs], inside)
                brings = (*makers[np.isin(network.makes, inside)].tolist(), *columns[enters].tolist())
                yield (*((column, 1) for column in starts.tolist()), *((column, -1) for column in brings)), 0.0


def _not_reached(
    network: Network, flow: FlowColumns, units: IntArray, brought: tuple[IntArray, IntArray], makers: IntArray
) -> IntArray | None:
    """The vertices at which a flow starts with more than is made there and brought there; None where there are none."""
    source, sink = network.vertices, network.vertices + 1
    arcs, columns = brought
    tails = np.concatenate([network.tails[arcs], np.full(len(makers), source), flow.starts])
    heads = np.concatenate([network.heads[arcs], network.makes, np.full(len(flow.starts), sink)])
    capacities = units[np.concatenate([columns, makers, flow.start_columns])]
    some = capacities > 0
    graph = SimpleMaxFlow()
    graph.add_arcs_with_capacity(tails[some], heads[some], capacities[some])
    graph.solve(source, sink)
    if graph.optimal_flow() >= units[flow.start_columns].sum() - LEAST:
        return None
    there = np.zeros(sink + 1, np.bool_)
    there[graph.get_source_side_min_cut()] = True
    inside: IntArray = np.flatnonzero(~there[:source])
    return inside
