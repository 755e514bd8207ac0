"""Reads and writes problems in the IOPDDL format of the ASPLOS 2025 / EuroSys 2025 contest, and solution files.

    {"problem": {"name": text,
                 "nodes": {"intervals": [[lo, hi] ...], "costs": [[...] ...], "usages": [[...] ...]},
                 "edges": {"nodes": [[u, v] ...], "costs": [[flat, u-major] ...]},
                 "usage_limit": integer}}

Plain or gzipped. Integers fit int64, and a cost of 10^18 or more means infinite. Two edges may join the same nodes
(instances of the contest have such): both are paid. Lists of integers are parsed row by row
into numpy arrays, equal rows into one array object, so that a 250 MB file needs little more memory than its text.
Source: https://github.com/google/iopddl.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from .documents import FormatError, Rows, parse_document, read_document, write_document
from .problem import INFEASIBLE, Edge, IntArray, Node, Problem, ProblemError
from .solution import Solution


def read_problem(path: str | Path) -> Problem:
    """The problem in the file.

    Raises:
        FormatError: the file is not in the format, or an entry breaks an invariant; with the path in the text.
        OSError: the file cannot be read.
    """
    return read_document(path, problem_of)


def parse_problem(text: str) -> Problem:
    """The problem in the text; raises FormatError."""
    return problem_of(parse_document(text))


def problem_of(document: Any) -> Problem:
    """The problem that a parsed document holds; raises FormatError."""
    problem = _member(document, "problem", dict, "the document")
    nodes, edges = (_member(problem, key, dict, "problem") for key in ("nodes", "edges"))
    limit = problem.get("usage_limit")
    if not (limit is None or (isinstance(limit, int) and not isinstance(limit, bool))):
        raise FormatError(f"usage_limit must be an integer, found {limit!r}")
    made = _nodes(*(_rows(nodes, key, "nodes") for key in ("intervals", "costs", "usages")))
    joined = _edges(made, *(_rows(edges, key, "edges") for key in ("nodes", "costs")))
    return Problem(made, joined, usage_limit=limit, name=str(problem.get("name", "")))


def write_problem(problem: Problem, path: str | Path) -> None:
    """Writes the problem, gzipped where the path ends in .gz.

    Raises:
        ProblemError: the format cannot say it: ties, fixed choices, groups, networks, an offset, or several loads of
            a node.
    """
    beyond = [name for name in ("groups", "networks", "ties", "fixed", "offset") if getattr(problem, name)]
    if beyond or any(node.further_loads for node in problem.nodes):
        raise ProblemError(f"the IOPDDL format has no {', '.join(beyond) or 'second load of a node'}: reduce it first")
    document: dict[str, Any] = {
        "name": problem.name,
        "nodes": {
            "intervals": [list(node.interval) for node in problem.nodes],
            "costs": [node.costs.tolist() for node in problem.nodes],
            "usages": [
                [0] * len(node.costs) if node.usages is None else node.usages.tolist() for node in problem.nodes
            ],
        },
        "edges": {
            "nodes": [[edge.u, edge.v] for edge in problem.edges],
            "costs": [edge.costs[np.ix_(edge.rows, edge.cols)].ravel().tolist() for edge in problem.edges],
        },
    }
    if problem.usage_limit is not None:
        document["usage_limit"] = problem.usage_limit
    write_document(path, json.dumps({"problem": document}, separators=(",", ":")))


def write_solution(solution: Solution, path: str | Path) -> None:
    """Writes status, cost, bound, gap, seconds and choices as JSON, and routes of networks; what is unknown is null."""
    known_gap = None if solution.gap == float("inf") else solution.gap
    document: dict[str, Any] = {
        "status": solution.status.name.lower(),
        "cost": solution.cost,
        "bound": solution.bound,
        "gap": known_gap,
        "seconds": round(solution.report.seconds, 3),
        "choices": None if solution.choices is None else list(solution.choices),
    }
    if solution.routes:
        document["routes"] = [[list(arcs) for arcs in routes] for routes in solution.routes]
    write_document(path, json.dumps(document) + "\n")


def _nodes(intervals: Rows, costs: Rows, usages: Rows) -> tuple[Node, ...]:
    if not len(intervals) == len(costs) == len(usages):
        raise FormatError(
            f"nodes has {len(intervals)} intervals, {len(costs)} costs and {len(usages)} usages: one of each per node"
        )
    nodes = []
    for index, (interval, cost, usage) in enumerate(zip(intervals, costs, usages, strict=True)):
        if len(interval) != 2:
            raise FormatError(f"interval of node {index} has {len(interval)} numbers: expected [lo, hi]")
        nodes.append(Node(str(index), cost, usage, (int(interval[0]), int(interval[1]))))
    return tuple(nodes)


def _edges(nodes: tuple[Node, ...], ends: Rows, costs: Rows) -> tuple[Edge, ...]:
    if len(ends) != len(costs):
        raise FormatError(f"edges has {len(ends)} nodes and {len(costs)} costs: one of each per edge")
    edges = []
    shaped: dict[tuple[int, int, int], IntArray] = {}
    for index, (pair, flat) in enumerate(zip(ends, costs, strict=True)):
        if len(pair) != 2:
            raise FormatError(f"edge {index} joins {len(pair)} nodes: expected [u, v]")
        u, v = int(pair[0]), int(pair[1])
        if not (0 <= u < len(nodes) and 0 <= v < len(nodes)):
            raise FormatError(f"edge {index} ({u}, {v}) names a node that is not one of 0 .. {len(nodes) - 1}")
        shape = len(nodes[u].costs), len(nodes[v].costs)
        if len(flat) != shape[0] * shape[1]:
            raise FormatError(f"edge {index} ({u}, {v}) has {len(flat)} costs: expected {shape[0]} x {shape[1]}")
        edges.append(Edge.dense(u, v, shaped.setdefault((id(flat), *shape), flat.reshape(shape))))
    return tuple(edges)


def _member(document: Any, key: str, kind: type, where: str) -> Any:
    if not isinstance(document, dict) or not isinstance(document.get(key), kind):
        raise FormatError(f"{where} must have a member {key!r}")
    return document[key]


def _rows(document: dict[str, Any], key: str, where: str) -> Rows:
    rows = document.get(key)
    if rows == []:
        return []
    if not isinstance(rows, list) or not all(isinstance(row, np.ndarray) for row in rows):
        raise FormatError(f"{where} must have a member {key!r}, a list of lists of integers")
    if "costs" in key:
        return [np.minimum(row, INFEASIBLE) if row.size and row.max() > INFEASIBLE else row for row in rows]
    return rows
