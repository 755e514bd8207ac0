"""Problem and solution files: what is read and written, and what every malformed file is told."""

from __future__ import annotations

import gzip
import json
from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from solver import INFEASIBLE, Edge, Node, Problem, ProblemError, evaluate, solve
from solver.__main__ import BAD_INPUT, SOLVED, main
from solver.__main__ import INFEASIBLE as EXIT_INFEASIBLE
from solver.iopddl import FormatError, parse_problem, read_problem, write_problem

from .random_problems import random_problem

INSTANCES = Path(__file__).resolve().parents[3] / "shared" / "iopddl"

GOOD = """{"problem": {"name": "two", "usage_limit": 5,
  "nodes": {"intervals": [[0, 2], [1, 3]], "costs": [[1, 2], [3]], "usages": [[1, 0], [4]]},
  "edges": {"nodes": [[0, 1]], "costs": [[7, 1000000000000000000]]}}}"""


def with_(old: str, new: str) -> str:
    assert old in GOOD
    return GOOD.replace(old, new)


MALFORMED = {
    "empty": ("", "not JSON"),
    "not JSON": ("{]", "not JSON"),
    "text after the end": (GOOD + " {}", "text after the end"),
    "no problem": ('{"nodes": {}}', "'problem'"),
    "no edges": (with_('"edges"', '"hedges"'), "'edges'"),
    "no costs": (with_('"costs": [[1', '"prices": [[1'), "'costs'"),
    "wrong number of usages": (with_("[[1, 0], [4]]", "[[1, 0]]"), "2 intervals, 2 costs and 1 usages"),
    "wrong length of usages": (with_("[[1, 0], [4]]", "[[1], [4]]"), "2 costs and 1 usages"),
    "wrong length of an edge": (with_("[7, 1000000000000000000]", "[7]"), "has 1 costs: expected 2 x 1"),
    "negative interval": (with_("[[0, 2]", "[[-1, 2]"), "interval"),
    "backward interval": (with_("[[0, 2]", "[[3, 2]"), "interval"),
    "interval of three": (with_("[[0, 2]", "[[0, 2, 3]"), "expected \\[lo, hi\\]"),
    "overflow": (with_("[3]", "[9223372036854775808]"), "does not fit int64"),
    "NaN": (with_("[3]", "[NaN]"), "no integer"),
    "float": (with_("[3]", "[3.5]"), "no integer"),
    "leading zero": (with_("[1, 2]", "[01, 2]"), "no integer"),
    "two commas": (with_("[1, 2]", "[1,, 2]"), "no integer"),
    "self edge": (with_('"nodes": [[0, 1]]', '"nodes": [[0, 0]]').replace("[7, 1", "[7, 0, 0, 1"), "to itself"),
    "unknown node": (with_('"nodes": [[0, 1]]', '"nodes": [[0, 2]]'), "not one of 0 .. 1"),
    "no strategy": (with_("[3]", "[]"), "no strategy"),
    "negative usage": (with_("[4]", "[-4]"), "negative usage"),
    "negative limit": (with_(": 5", ": -5"), "usage_limit"),
    "limit of text": (with_(": 5", ': "5"'), "usage_limit must be an integer"),
    "member twice": (with_('"usage_limit": 5', '"name": "again"'), "there twice"),
}


@pytest.mark.parametrize("name", MALFORMED)
def test_a_malformed_file_is_told_what_and_where(name: str, tmp_path: Path) -> None:
    text, expected = MALFORMED[name]
    path = tmp_path / "bad.json"
    path.write_text(text)
    with pytest.raises(FormatError, match=rf"bad\.json.*{expected}"):
        read_problem(path)


def test_infinite_costs_and_limits_are_read() -> None:
    problem = parse_problem(GOOD)
    assert problem.edges[0].costs.tolist() == [[7], [INFEASIBLE]]
    assert (problem.name, problem.usage_limit) == ("two", 5)
    assert evaluate(problem, (0, 0)).cost == 1 + 3 + 7


def test_costs_above_the_infinite_one_are_infinite() -> None:
    assert parse_problem(with_("1000000000000000000", "2000000000000000000")).edges[0].costs.max() == INFEASIBLE


@settings(max_examples=100)
@given(seed=st.integers(0, 10**9))
def test_writing_and_reading_gives_the_same_problem(seed: int, tmp_path_factory: pytest.TempPathFactory) -> None:
    plain = random_problem(seed)
    problem = replace(plain, groups=(), ties=(), fixed={}, offset=0, budgets=(), usage_price=None, networks=())
    path = tmp_path_factory.mktemp("problem") / "problem.json.gz"
    write_problem(problem, path)
    again = read_problem(path)
    rng = np.random.default_rng(seed)
    for _ in range(5):
        choices = [int(rng.integers(len(node.costs))) for node in problem.nodes]
        assert evaluate(again, choices) == evaluate(problem, choices)


def test_what_the_format_cannot_say_is_not_written(tmp_path: Path) -> None:
    problem = replace(parse_problem(GOOD), fixed={0: 1})
    with pytest.raises(ProblemError, match="no fixed"):
        write_problem(problem, tmp_path / "problem.json")


def test_the_command_writes_a_solution(tmp_path: Path) -> None:
    (tmp_path / "problem.json.gz").write_bytes(gzip.compress(GOOD.encode()))
    code = main([str(tmp_path / "problem.json.gz"), "-o", str(tmp_path / "solution.json"), "--time-limit", "60"])
    assert code == SOLVED
    solution = json.loads((tmp_path / "solution.json").read_text())
    assert list(solution) == ["status", "cost", "bound", "gap", "seconds", "choices"]
    assert (solution["status"], solution["cost"], solution["choices"]) == ("optimal", 11, [0, 0])


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["{good}", "--backend", "gurobi"], BAD_INPUT),
        (["{good}", "--time-limit", "0"], BAD_INPUT),
        (["{good}", "--time-limit", "-3"], BAD_INPUT),
        (["{good}", "--gap", "nan"], BAD_INPUT),
        (["{absent}"], BAD_INPUT),
        (["{bad}"], BAD_INPUT),
        (["{full}"], EXIT_INFEASIBLE),
    ],
)
def test_exit_codes(arguments: list[str], code: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = {name: str(tmp_path / name) for name in ("good", "absent", "bad", "full")}
    Path(paths["good"]).write_text(GOOD)
    Path(paths["bad"]).write_text("{")
    Path(paths["full"]).write_text(with_(": 5", ": 3"))
    assert main([argument.format(**paths) for argument in arguments]) == code
    shown = capsys.readouterr()
    assert "Traceback" not in shown.err
    assert shown.err.startswith("error: ") == (code == BAD_INPUT)


@pytest.mark.skipif(not INSTANCES.is_dir(), reason=f"{INSTANCES} is absent")
def test_instance_g_is_solved_to_its_proven_optimum() -> None:
    problem = read_problem(INSTANCES / "asplos-2025-iopddl-G.json.gz")
    solution = solve(problem, time_limit_s=120)
    assert (solution.status.name, solution.cost) == ("OPTIMAL", 217_039)


@pytest.mark.skipif(not INSTANCES.is_dir(), reason=f"{INSTANCES} is absent")
def test_the_example_of_the_contest_is_solved() -> None:
    problem: Problem = read_problem(INSTANCES / "example.json")
    best = solve(problem, backend="exhaustive")
    assert solve(problem).cost == best.cost


@pytest.mark.parametrize("kept", [5, 15, 40, -9, -1])
def test_a_truncated_gzip_file_is_named(kept: int, tmp_path: Path) -> None:
    (tmp_path / "cut.json.gz").write_bytes(gzip.compress(GOOD.encode())[:kept])
    with pytest.raises(FormatError, match=r"cut\.json\.gz: neither text nor gzipped text"):
        read_problem(tmp_path / "cut.json.gz")


@pytest.mark.parametrize("noise", [b"\xff\xfe\x00", b"\x1f\x8b garbage", b"\x00" * 99])
def test_bytes_that_are_no_text_are_named(noise: bytes, tmp_path: Path) -> None:
    (tmp_path / "noise").write_bytes(noise)
    with pytest.raises(FormatError, match="noise: "):
        read_problem(tmp_path / "noise")


@pytest.mark.parametrize("text", ['{"problem":' * 5000, '{"problem":[1,' + "[" * 200_000, '{"n":' + "9" * 5000 + "}"])
def test_depth_and_length_without_end_are_no_traceback(text: str) -> None:
    with pytest.raises(FormatError):
        parse_problem(text)


def test_edges_that_join_the_same_nodes_are_all_paid() -> None:
    twice = with_("[[0, 1]]", "[[0, 1], [1, 0]]").replace("[[7, 1000000000000000000]]", "[[7, 8], [20, 30]]")
    assert [evaluate(parse_problem(twice), choices).cost for choices in ((0, 0), (1, 0))] == [4 + 27, 5 + 38]


@pytest.mark.parametrize("ending", [".json", ".json.gz"])
def test_costs_whose_sum_passes_int64_are_written_read_and_added_exactly(ending: str, tmp_path: Path) -> None:
    big = INFEASIBLE - 1
    nodes = tuple(Node(str(k), np.array([big - k])) for k in range(30))
    edges = tuple(Edge.dense(k, k + 1, np.array([[big]])) for k in range(29))
    write_problem(Problem(nodes, edges), tmp_path / f"big{ending}")
    assert ((tmp_path / f"big{ending}").read_bytes()[:2] == b"\x1f\x8b") == (ending == ".json.gz")
    cost = evaluate(read_problem(tmp_path / f"big{ending}"), (0,) * 30).cost
    assert cost == 59 * big - sum(range(30)) > 2**63


@pytest.mark.skipif(not INSTANCES.is_dir(), reason=f"{INSTANCES} is absent")
def test_the_example_of_the_contest_survives_a_round_trip_for_all_assignments(tmp_path: Path) -> None:
    problem = read_problem(INSTANCES / "example.json")
    write_problem(problem, tmp_path / "again.json.gz")
    again = read_problem(tmp_path / "again.json.gz")
    judged = {choices: evaluate(problem, choices) for choices in product(*(range(len(n.costs)) for n in problem.nodes))}
    assert judged == {choices: evaluate(again, choices) for choices in judged}
    # By hand: nodes 15 + 55 + 25 + 85 + 95, edges 30 + 50 + 90 + 60 + 70; 10 + 25 + 15 bytes from step 50.
    first = judged[0, 0, 0, 0, 0]
    assert (first.cost, first.feasible, first.peak_usage, first.peak_step) == (575, True, 50, 50)
