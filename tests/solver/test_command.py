"""`python -m solver`: exit codes, the solution file, and a clear line instead of a traceback for every mistake."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from solver import BACKENDS, INFEASIBLE, Edge, Node, Problem, evaluate
from solver.__main__ import BAD_INPUT, SOLVED, main
from solver.__main__ import INFEASIBLE as EXIT_INFEASIBLE
from solver.iopddl import read_problem, write_problem

AVAILABLE = [name for name, entry in BACKENDS.items() if entry.available]
COMPARE = np.array([[5, 1], [1, 6]])
APART = np.array([[INFEASIBLE, 0], [0, INFEASIBLE]])


def crowded(limit: int = 20) -> Problem:
    """Six nodes, every two joined: no reduction solves it. Strategy 0 is cheap and uses 7 bytes, so two may take it."""
    nodes = tuple(Node(str(k), np.array([0, 3]), np.array([7, 1]), (0, 2)) for k in range(6))
    return Problem(nodes, tuple(Edge.dense(u, v, COMPARE) for v in range(6) for u in range(v)), usage_limit=limit)


@pytest.fixture
def problem_path(tmp_path: Path) -> Path:
    path = tmp_path / "problem.json.gz"
    write_problem(crowded(), path)
    return path


def run_main(*arguments: object) -> int:
    """The exit code, also where argparse leaves by itself."""
    try:
        return main([str(argument) for argument in arguments])
    except SystemExit as left:
        assert isinstance(left.code, int)
        return left.code


@pytest.mark.parametrize("backend", AVAILABLE)
def test_the_solution_file_holds_an_answer_that_costs_what_it_says(backend: str, problem_path: Path) -> None:
    output = problem_path.with_name("solution.json")
    assert run_main(problem_path, "-o", output, "--backend", backend, "--time-limit", "3") == SOLVED
    solution = json.loads(output.read_text())
    assert list(solution) == ["status", "cost", "bound", "gap", "seconds", "choices"]
    judged = evaluate(read_problem(problem_path), solution["choices"])
    assert judged.feasible and judged.cost == solution["cost"]
    # Two nodes at strategy 0 and four at 1: 4 x 3, one pair (0, 0) at 5, eight unequal at 1, six (1, 1) at 6.
    assert solution["bound"] <= 61 <= solution["cost"]
    assert solution["seconds"] >= 0
    assert solution["gap"] == pytest.approx((solution["cost"] - solution["bound"]) / solution["cost"])
    if backend != "decomposition":
        assert (solution["status"], solution["bound"], solution["cost"], solution["gap"]) == ("optimal", 61, 61, 0)


def test_a_reduced_away_problem_still_has_one_choice_per_original_node(tmp_path: Path) -> None:
    nodes = tuple(Node(str(k), np.array([4, 0, 9])) for k in range(40))
    edges = tuple(Edge.dense(k, k + 1, np.where(np.eye(3, dtype=bool), 0, INFEASIBLE)) for k in range(39))
    write_problem(Problem(nodes, edges), tmp_path / "chain.json")
    output = tmp_path / "solution.json"
    assert run_main(tmp_path / "chain.json", "-o", output) == SOLVED
    solution = json.loads(output.read_text())
    assert (solution["choices"], solution["cost"], solution["status"]) == ([1] * 40, 0, "optimal")


def test_the_report_on_standard_output_names_sizes_cost_and_bound(
    problem_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_main(problem_path) == SOLVED
    shown = capsys.readouterr()
    assert shown.err == ""  # no progress where standard error is no terminal
    lines = shown.out.splitlines()
    assert "original" in lines[0] and "6 nodes" in lines[0] and "15 edges" in lines[0]
    assert {"cost     61", "bound    61", "gap      0"} <= set(lines)


def test_an_infeasible_problem_has_its_own_exit_code_reason_and_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_problem(crowded(limit=5), tmp_path / "full.json")
    output = tmp_path / "solution.json"
    assert run_main(tmp_path / "full.json", "-o", output) == EXIT_INFEASIBLE
    shown = capsys.readouterr()
    assert "Infeasible" in shown.out and "smallest usage limit found to work is 6, 1 more than 5" in shown.out
    assert shown.err == "" and {"cost     -", "bound    -", "gap      -"} <= set(shown.out.splitlines())
    solution = json.loads(output.read_text())
    assert solution["status"] == "infeasible"
    assert solution["choices"] is solution["cost"] is solution["gap"] is None


MISTAKES = {
    "unknown backend": (("{good}", "--backend", "gurobi"), "unknown backend 'gurobi'"),
    "zero time limit": (("{good}", "--time-limit", "0"), "time_limit_s is 0.0"),
    "negative time limit": (("{good}", "--time-limit=-3"), "time_limit_s is -3.0"),
    "time limit of NaN": (("{good}", "--time-limit", "nan"), "time_limit_s is nan"),
    "time limit of text": (("{good}", "--time-limit", "soon"), "--time-limit"),
    "negative gap": (("{good}", "--gap=-1"), "relative_gap is -1.0"),
    "infinite gap": (("{good}", "--gap", "inf"), "relative_gap is inf"),
    "negative seed": (("{good}", "--seed=-1"), "seed is -1"),
    "large seed": (("{good}", "--seed", "2147483648"), "seed is 2147483648"),
    "absent file": (("{absent}",), "absent: No such file"),
    "a directory": (("{directory}",), "Is a directory"),
    "no file": ((), "required: problem"),
    "not JSON": (("{bad}",), "bad: "),
    "truncated gzip": (("{truncated}",), "truncated: neither text nor gzipped text"),
    "unwritable output": (("{good}", "-o", "{directory}/none/solution.json"), "solution.json"),
    "output is a directory": (("{good}", "-o", "{directory}"), "/directory"),
    "output is the problem": (("{good}", "-o", "{directory}/../{good.name}"), "written over the problem"),
    "too many to try all": (("{many}", "--backend", "exhaustive"), "too many to try all"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_told_in_one_line(name: str, problem_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments, text = MISTAKES[name]
    folder = problem_path.parent
    paths = {name: folder / name for name in ("absent", "bad", "truncated", "many", "directory")}
    paths["directory"].mkdir()
    paths["bad"].write_text('{"problem": [1, ')
    paths["truncated"].write_bytes(problem_path.read_bytes()[:-20])
    rng = np.random.default_rng(0)
    many = tuple(Node(str(k), rng.integers(0, 99, 9)) for k in range(8))
    write_problem(
        Problem(many, tuple(Edge.dense(u, v, rng.integers(0, 99, (9, 9))) for v in range(8) for u in range(v))),
        paths["many"],
    )
    code = run_main(*(argument.format(good=problem_path, **paths) for argument in arguments))
    shown = capsys.readouterr()
    assert code == BAD_INPUT
    assert text in shown.err and "Traceback" not in shown.err
    assert "error: " in shown.err.splitlines()[-1]


@pytest.mark.parametrize("name", ["model.py", "profile.yaml", "other.json", "other.json.gz", "cut.json.gz"])
def test_a_file_that_holds_no_solution_is_not_written_over(
    name: str, problem_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = problem_path.with_name(name)
    if name.startswith("other"):
        write_problem(crowded(), path)
    else:
        path.write_bytes(problem_path.read_bytes()[:30] if name.startswith("cut") else b"import torch\n")
    before = path.read_bytes()
    assert run_main(problem_path, "-o", path) == BAD_INPUT
    assert f"{name} holds no solution and would be lost; name another file" in capsys.readouterr().err
    assert path.read_bytes() == before


@pytest.mark.parametrize("name", ["solution.json", "solution.json.gz"])
def test_an_earlier_solution_and_an_empty_file_are_written_over(name: str, problem_path: Path) -> None:
    output = problem_path.with_name(name)
    output.touch()
    assert run_main(problem_path, "-o", output) == run_main(problem_path, "-o", output) == SOLVED
    assert output.stat().st_size


@pytest.mark.parametrize("backend", [name for name in AVAILABLE if name != "decomposition"])
@pytest.mark.parametrize("limit", ["inf", "1e300"])
def test_a_time_limit_beyond_all_bounds_is_none(backend: str, limit: str, problem_path: Path) -> None:
    assert run_main(problem_path, "--backend", backend, "--time-limit", limit) == SOLVED


def test_an_error_without_a_file_name_is_told_as_it_is(
    problem_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(path: str) -> Problem:
        raise OSError("the disk is gone")

    monkeypatch.setattr("solver.__main__.read_problem", fail)
    assert run_main(problem_path) == BAD_INPUT
    assert capsys.readouterr().err == "error: the disk is gone\n"


def test_the_module_runs_as_a_program_with_its_exit_codes(tmp_path: Path) -> None:
    write_problem(crowded(), tmp_path / "good.json")
    nodes = tuple(Node(str(k), np.array([0, 0])) for k in range(3))
    triangle = Problem(nodes, tuple(Edge.dense(u, v, APART) for u, v in ((0, 1), (1, 2), (0, 2))))
    write_problem(triangle, tmp_path / "triangle.json")
    (tmp_path / "bad.json.gz").write_bytes(gzip.compress(b'{"problem": {}}'))
    for name, code in (("good.json", SOLVED), ("triangle.json", EXIT_INFEASIBLE), ("bad.json.gz", BAD_INPUT)):
        command = [sys.executable, "-m", "solver", str(tmp_path / name), "--time-limit", "30"]
        ended = subprocess.run(command, capture_output=True, text=True, check=False)
        assert ended.returncode == code
        assert "Traceback" not in ended.stderr
        assert ended.stderr.startswith("error: ") == (code == BAD_INPUT)
