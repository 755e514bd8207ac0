"""The format of whole problems: what is written is read back, in equal bytes, and mistakes are told where they are."""

from __future__ import annotations

import json
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from solver import Base, Consumer, Edge, Group, Life, Network, Node, Problem, Routes, evaluate
from solver.__main__ import BAD_INPUT, SOLVED, main
from solver.documents import FormatError
from solver.problem_file import dump_problem, parse_problem, read_problem, write_problem

from .random_problems import random_lives, random_problem

SCHEMA = Path(__file__).resolve().parents[2] / "docs" / "solver_problem.schema.json"
VALIDATOR = jsonschema.Draft202012Validator(json.loads(SCHEMA.read_text()))
SEEDS = st.integers(0, 10**9)
MAP = np.array([0, 1])


def example() -> Problem:
    """Everything that the format has."""
    nodes = (
        Node("u", np.array([3, 0]), np.array([1, 2]), (0, 4)),
        Node("v", np.array([0, 5])),
        Node("w", np.array([0, 5])),
    )
    edges = tuple(Edge(0, v, MAP, MAP, np.array([[0, 4, 9], [4, 0, 9]])) for v in (1, 2))
    network = Network("t", 2, MAP, 1 - MAP, np.array([5, 7]), 0, MAP, (Consumer(1, MAP),), (Consumer(2, 1 - MAP),))
    network = replace(network, sizes=MAP, lives=(Life(0, ((1, 2), (3, 4))),))
    none = np.zeros(0, np.int64)
    view = Network("view", 2, none, none, none, 1, MAP, backward=(Consumer(2, MAP),), held=True)
    view = replace(view, sizes=MAP, lives=(Life(1, ((3, 4),), Base(0, 0, 0)),))
    return Problem(nodes, edges, (Group((0, 1)),), ((1, 2),), {0: 1}, 9, "all of it", -3, networks=(network, view))


@settings(max_examples=150)
@given(seed=SEEDS)
def test_what_is_written_is_read_back(seed: int) -> None:
    problem = random_problem(seed)
    text = dump_problem(problem)
    again = parse_problem(text)
    assert dump_problem(again) == text
    choices = [seed % len(node.costs) for node in problem.nodes]
    routes = [Routes(tuple(range(len(network.costs)))) for network in problem.networks]
    assert evaluate(again, choices, routes) == evaluate(problem, choices, routes)


@pytest.mark.parametrize("seed", range(8))
def test_what_is_written_obeys_the_schema(seed: int) -> None:
    VALIDATOR.validate(json.loads(dump_problem(random_problem(seed))))


@settings(max_examples=50)
@given(seed=SEEDS)
def test_equal_problems_are_written_as_equal_bytes_whatever_arrays_they_share(seed: int) -> None:
    problem = random_problem(seed)
    apart = replace(
        problem,
        nodes=tuple(deepcopy(node) for node in problem.nodes),
        edges=tuple(deepcopy(edge) for edge in problem.edges),
        networks=tuple(deepcopy(network) for network in problem.networks),
    )
    assert dump_problem(apart) == dump_problem(problem)


def test_networks_of_version_1_hold_no_memory() -> None:
    document = changed(("solver_problem",), 1)
    for network in document["networks"]:
        del network["sizes"], network["held"], network["lives"], network["again"]
    again = parse_problem(json.dumps(document))
    assert all(network.sizes is None and not network.lives for network in again.networks)
    with pytest.raises(FormatError, match="unknown member"):
        parse_problem(json.dumps(changed(("solver_problem",), 1)))


@settings(max_examples=50)
@given(seed=SEEDS)
def test_lives_are_read_back(seed: int) -> None:
    problem = random_lives(seed)
    text = dump_problem(problem)
    VALIDATOR.validate(json.loads(text))
    assert dump_problem(parse_problem(text)) == text
    again = parse_problem(text).networks
    assert [n.lives for n in again] == [n.lives for n in problem.networks]
    assert [n.again and n.again.wants.tolist() for n in again] == [
        n.again and n.again.wants.tolist() for n in problem.networks
    ]


def test_networks_of_version_2_are_made_once() -> None:
    document = changed(("solver_problem",), 2)
    for network in document["networks"]:
        assert network.pop("again") is None
        for life in network["lives"]:
            assert life.pop("again") is None
            life["base"] = life["base"] and life["base"][:3]
    assert dump_problem(parse_problem(json.dumps(document))) == dump_problem(example())


def test_arrays_that_are_equal_are_one_object_after_reading() -> None:
    again = parse_problem(dump_problem(example()))
    assert again.edges[0].costs is again.edges[1].costs
    assert again.networks[0].makes is again.edges[0].rows


def test_a_gzipped_file_has_the_same_bytes_each_time(tmp_path: Path) -> None:
    paths = [tmp_path / name / "problem.json.gz" for name in ("one", "two")]
    for path in paths:
        path.parent.mkdir()
        write_problem(example(), path)
    assert paths[0].read_bytes() == paths[1].read_bytes()
    assert dump_problem(read_problem(paths[0])) == dump_problem(example())


def test_the_command_reads_the_file_and_writes_the_routes(tmp_path: Path) -> None:
    path, output = tmp_path / "problem.json", tmp_path / "solution.json"
    write_problem(example(), path)
    assert main([str(path), "-o", str(output)]) == SOLVED
    solution = json.loads(output.read_text())
    routes = [Routes(*(tuple(arcs) for arcs in phases)) for phases in solution["routes"]]
    judged = evaluate(example(), solution["choices"], routes)
    assert judged.feasible and judged.cost == solution["cost"]


def changed(place: tuple[str | int, ...], value: object) -> dict[str, Any]:
    """The example's document with one value changed; a value of `...` takes the member away."""
    document: dict[str, Any] = json.loads(dump_problem(example()))
    at: Any = document
    for key in place[:-1]:
        at = at[key]
    if value is ...:
        del at[place[-1]]
    else:
        at[place[-1]] = value
    return document


# The change, what is said of it, and whether the schema sees it too.
MALFORMED: dict[str, tuple[tuple[str | int, ...], object, str, bool]] = {
    "another version": (("solver_problem",), 4, "solver_problem is 4: this solver reads versions 1 to 3", True),
    "a base of two": (
        ("networks", 1, "lives", 0, "base"),
        [0, 0],
        "networks[1]: lives[0]: base must be 4 integers",
        True,
    ),
    "reads of three": (("networks", 0, "lives", 0, "reads", 0), [1, 2, 3], "lives[0]: reads[0] has 3 numbers", True),
    "sizes that are not there": (("networks", 0, "sizes"), 99, "networks[0]: sizes names array 99", False),
    "a missing member": (("networks",), ..., "member 'networks' is missing", True),
    "an unknown member": (("netwerks",), [], "unknown member 'netwerks'", True),
    "a member missing inside": (("networks", 0, "kept"), ..., "networks[0]: member 'kept' is missing", True),
    "an unknown member inside": (("nodes", 1, "usages"), 0, "nodes[1]: unknown member 'usages'", True),
    "no object": (("edges", 1), 7, "edges[1]: expected an object, found 7", True),
    "no list": (("nodes",), {}, "nodes must be a list of objects", True),
    "a limit of text": (("usage_limit",), "9", "usage_limit must be an integer that fits int64 or null", True),
    "a limit of true": (("usage_limit",), True, "usage_limit must be an integer", True),
    "a huge offset": (("offset",), 2**70, "offset must be an integer that fits int64", False),
    "a name of a number": (("name",), 3, "name must be text, found 3", True),
    "kept as a number": (("networks", 0, "kept"), 1, "networks[0]: kept must be true or false, found 1", True),
    "an array that is not there": (("networks", 0, "heads"), 99, "networks[0]: heads names array 99", False),
    "a consumer of three": (("networks", 0, "forward", 0), [1, 0, 0], "networks[0]: forward[0] has 3 numbers", True),
    "an unknown producer": (("networks", 0, "producer"), 8, "network 't' names node 8", False),
    "no vertices": (("networks", 0, "vertices"), 0, "networks[0]: network 't' has 0 vertices", True),
    "too many vertices": (("networks", 0, "vertices"), 10**9, "expected from 1 to 1000000", True),
    "a vertex out of range": (("networks", 0, "vertices"), 1, "tails of network 't' must lie in [0, 1)", False),
    "a shape that does not fit": (
        ("edges", 0, "shape"),
        [2, 2],
        "edges[0]: costs has 6 entries: expected 2 x 2",
        False,
    ),
    "a negative shape": (("edges", 0, "shape"), [-2, -3], "edges[0]: costs has 6 entries", True),
    "a backward interval": (("nodes", 0, "loads", 0, "interval"), [4, 0], "nodes[0]: loads[0]: interval", False),
    "an interval of one": (("nodes", 0, "loads", 0, "interval"), [4], "nodes[0]: loads[0]: interval must be two", True),
    "a fixed triple": (("fixed", 0), [0, 1, 1], "fixed[0] has 3 numbers: expected [node, strategy]", True),
    "a group of an unknown edge": (("groups", 0), [0, 7], "group 0 names edge 7", False),
    "an array of fractions": (("arrays", 0), [0.5], "no integer", True),
    "an array of text": (("arrays",), ["0"], "arrays[0] must be a list of integers", True),
}


@pytest.mark.parametrize("name", MALFORMED)
def test_a_malformed_file_is_told_what_and_where(name: str, tmp_path: Path) -> None:
    place, value, expected, seen_by_schema = MALFORMED[name]
    document = changed(place, value)
    path = tmp_path / "bad.json"
    path.write_text(json.dumps(document))
    with pytest.raises(FormatError) as caught:
        read_problem(path)
    assert str(caught.value).startswith(str(path)) and expected in str(caught.value)
    assert VALIDATOR.is_valid(document) != seen_by_schema
    assert main([str(path)]) == BAD_INPUT
