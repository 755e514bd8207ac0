"""What a pinned tensor or operator can have in a plan, where the pin is of what its rules allow and no way leads to."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from dataclasses import replace

from solver import Status

from ..layout import format_layout, format_strategy
from ..mesh import Mesh
from ..strategies import Strategy
from .blocking import ANY_PLAN
from .candidates import listed
from .formulation import Formulation
from .solving import solve

LISTED_S = 10.0
"""Seconds for finding that out."""


def said_of_possible(free: Formulation, pinned: Formulation, mesh: Mesh, by_inputs: bool, backend: str) -> str:
    """``NAME can have A; B``, of the first name for which none of what a pin leaves is in a plan; empty where none is
    found in time.

    Args:
        free, pinned: the programs without constraints, and with the pin alone.
        by_inputs: whether what is taken is said, too.
    """
    until_s = time.monotonic() + LISTED_S
    for node, (offered, left) in enumerate(zip(free.strategies, pinned.strategies)):
        if len(left) < len(offered) and next(_in_a_plan(free, node, left, until_s, backend), None) is None:
            texts = dict.fromkeys(
                format_strategy(each.inputs, each.outputs, mesh) if by_inputs else format_layout(each.outputs[0], mesh)
                for each in _in_a_plan(free, node, offered, until_s, backend)
                if each.outputs[0] is not None
            )
            return f"{free.names[node]} can have {listed(list(texts))}" if texts else ""
    return ""


def _in_a_plan(
    program: Formulation, node: int, wanted: Iterable[Strategy], until_s: float, backend: str
) -> Iterator[Strategy]:
    """Those of the strategies of a node with which there is a plan."""
    number = {strategy: k for k, strategy in enumerate(program.strategies[node])}
    for each in wanted:
        left_s = until_s - time.monotonic()
        if left_s <= 0:
            return
        fixed = replace(program.problem, fixed=dict(program.problem.fixed) | {node: number[each]})
        found = solve(fixed, backend=backend, time_limit_s=left_s, relative_gap=ANY_PLAN, explains=False)
        if found.status is not Status.INFEASIBLE:
            yield each
