"""A search that is cut short, by the clock or by Ctrl-C, still ends with an answer, and leaves no process behind."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from solver import (
    BACKENDS,
    Assignment,
    Consumer,
    Edge,
    Network,
    Node,
    Problem,
    Routes,
    Status,
    evaluate,
    solve,
)
from solver.backends import Answer, Request
from solver.backends.integer_program import Program
from solver.backends.lazy import ProgramAnswer, run_lazily
from solver.problem_file import write_problem

from ..thorough import some_thorough

AVAILABLE = [name for name, entry in BACKENDS.items() if entry.available]
SEARCHING = [name for name in AVAILABLE if name != "exhaustive"]
LIKE_OTHERS = {"auto", "pulp-highs", "scip"}
"""Backends whose searches end as that of another one does: in `make test-all`."""


def web(nodes: int, strategies: int, edges: int, limit: int | None) -> Problem:
    """Random costs on random edges: no reduction helps, and no proof is near."""
    rng = np.random.default_rng(0)
    made = (
        Node(f"n{k}", rng.integers(0, 100, strategies), rng.integers(0, 9, strategies), (0, 1)) for k in range(nodes)
    )
    ends = {tuple(sorted(rng.choice(nodes, 2, replace=False).tolist())) for _ in range(edges)}
    joined = (Edge.dense(u, v, rng.integers(0, 100, (strategies, strategies))) for u, v in sorted(ends))
    return Problem(tuple(made), tuple(joined), usage_limit=limit)


def net(nodes: int, strategies: int, networks: int, limit: int | None) -> Problem:
    """Random networks of three consumers between the nodes of a web: no proof is near."""
    rng = np.random.default_rng(1)
    vertices, arcs = 12, 50
    made = []
    for k in range(networks):
        ends = rng.choice(nodes, 4, replace=False).tolist()
        maps = rng.integers(0, vertices, (4, strategies))
        tails, heads = (np.concatenate([rng.integers(0, vertices, arcs), range(vertices)]) for _ in range(2))
        heads[arcs:] = np.roll(heads[arcs:], 1)  # a ring, so that everything is reached
        consumers = tuple(Consumer(node, wants) for node, wants in zip(ends[1:], maps[1:], strict=True))
        costs = rng.integers(1, 60, arcs + vertices)
        kept = bool(k % 2)
        made.append(
            Network(f"t{k}", vertices, tails, heads, costs, ends[0], maps[0], consumers[:2], consumers[2:], kept)
        )
    return replace(web(nodes, strategies, 0, limit), networks=tuple(made))


@pytest.mark.parametrize("backend", SEARCHING)
@pytest.mark.parametrize("limit", [None, 80])
def test_no_time_at_all_still_gives_routes_and_a_bound(backend: str, limit: int | None) -> None:
    problem = net(60, 6, 60, limit)
    solution = solve(problem, backend=backend, time_limit_s=1e-9)
    assert solution.status is Status.FEASIBLE and solution.choices is not None
    judged = evaluate(problem, solution.choices, solution.routes)
    assert judged.feasible and judged.cost == solution.cost
    assert solution.bound is not None and solution.bound <= judged.cost


def test_no_time_at_all_gives_a_feasible_start_back_with_its_routes() -> None:
    problem = net(60, 6, 60, 150)
    known = solve(problem, time_limit_s=0.5)
    assert known.choices is not None
    for start in (known.choices, Assignment(known.choices, known.routes)):
        assert solve(problem, time_limit_s=1e-9, start=start).cost == known.cost


@pytest.mark.parametrize("backend", SEARCHING)
@pytest.mark.parametrize("limit", [None, 150, 80])
def test_no_time_at_all_still_gives_a_feasible_answer_and_a_bound(backend: str, limit: int | None) -> None:
    problem = web(60, 6, 200, limit)
    solution = solve(problem, backend=backend, time_limit_s=1e-9)
    assert solution.status is Status.FEASIBLE and solution.choices is not None
    judged = evaluate(problem, solution.choices)
    assert judged.feasible and judged.cost == solution.cost
    assert solution.bound is not None and solution.bound <= judged.cost


def test_no_time_at_all_gives_a_feasible_start_back() -> None:
    problem = web(60, 6, 200, 150)
    start = solve(problem, time_limit_s=0.5).choices
    assert start is not None
    again = solve(problem, time_limit_s=1e-9, start=start)
    assert again.cost == evaluate(problem, start).cost


class Stubborn:
    """Says that every node takes its cheapest strategy, whatever rows there are."""

    def minimise(self, program: Program, request: Request) -> ProgramAnswer:
        """See `ProgramSolver.minimise`."""
        x = np.zeros(program.choices)
        for lo, hi in zip(program.first[:-1], program.first[1:], strict=True):
            x[lo + program.costs[lo:hi].argmin()] = 1.0
        return ProgramAnswer(x, 0.0)


@pytest.mark.parametrize("price", [None, 2])
def test_an_answer_over_the_limit_is_repaired_when_time_ends(price: int | None) -> None:
    nodes = tuple(Node(f"n{k}", np.array([0, 3]), np.array([7, 1]), (0, 2)) for k in range(6))
    problem = Problem(nodes, (), usage_limit=20, usage_price=price)
    answer = run_lazily(Stubborn(), problem, Request(deadline_s=time.monotonic()))
    assert answer.choices is not None and evaluate(problem, answer.choices).feasible


def test_what_was_known_before_is_the_answer_of_a_backend_that_does_not_end() -> None:
    known: list[Answer] = []
    nodes = tuple(Node(f"n{k}", np.array([0, 3]), np.array([7 + k, 1]), (3 * k, 3 * k + 2)) for k in range(12))
    soft = Problem(nodes, (), usage_limit=5, usage_price=2)
    run_lazily(Stubborn(), soft, Request(on_answer=known.append))
    assert known and known[0].choices == (0,) * 12


DRIVER = """
import sys
from solver import solve
from solver.backends import load_backend
from solver.iopddl import write_solution
from solver.problem_file import read_problem
problem = read_problem(sys.argv[1])
load_backend(sys.argv[2])
print("ready", flush=True)
write_solution(solve(problem, backend=sys.argv[2], time_limit_s=60), sys.argv[3])
import os
os._exit(0)
"""


@pytest.mark.slow
@pytest.mark.parametrize("backend", some_thorough(SEARCHING, LIKE_OTHERS))
@pytest.mark.parametrize(
    "problem",
    [
        pytest.param(web(60, 6, 200, 150), marks=pytest.mark.thorough, id="web"),
        pytest.param(net(90, 8, 160, 200), id="net"),
    ],
)
def test_ctrl_c_gives_every_backends_best_answer_and_leaves_no_process(
    backend: str, problem: Problem, tmp_path: Path
) -> None:
    write_problem(problem, tmp_path / "web.json")
    output = tmp_path / "solution.json"
    command = [sys.executable, "-c", DRIVER, str(tmp_path / "web.json"), backend, str(output)]
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    time.sleep(2)  # no answer can be proven by then, and every solver is at work
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=40)
    solution = json.loads(output.read_text())
    assert (process.returncode, solution["status"]) == (0, "feasible")
    routes = [Routes(*map(tuple, phases)) for phases in solution.get("routes", [])]
    assert evaluate(problem, solution["choices"], routes).cost == solution["cost"]
    assert _running_in(tmp_path) == []


@pytest.mark.parametrize("backend", SEARCHING)
def test_ctrl_c_that_is_to_have_no_answer_is_raised_at_once(backend: str) -> None:
    begun_s = time.monotonic()
    threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        solve(net(60, 6, 90, 150), backend=backend, time_limit_s=10, answers_interrupt=False)
    assert time.monotonic() - begun_s < 6


def _running_in(folder: Path) -> list[str]:
    """Processes whose command line names the folder."""
    named = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if str(folder).encode() in path.read_bytes():
                named.append(path.parent.name)
        except OSError:
            continue  # it has ended meanwhile
    return named


def test_ctrl_c_ends_the_command_after_it_showed_an_answer(tmp_path: Path) -> None:
    write_problem(web(100, 8, 400, 300), tmp_path / "hard.json")
    output = tmp_path / "solution.json"
    command = [sys.executable, "-m", "solver", str(tmp_path / "hard.json"), "-o", str(output)]
    terminal, inside = pty.openpty()
    process = subprocess.Popen([*command, "--backend", "decomposition"], stdout=subprocess.PIPE, stderr=inside)
    os.close(inside)
    shown = b""
    while b"cost " not in shown.replace(b"cost None", b""):
        shown += os.read(terminal, 1000)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=40)
    os.close(terminal)
    assert process.returncode == 0
    assert json.loads(output.read_text())["status"] == "feasible"


def test_an_interpreter_that_ends_waits_for_a_search_in_native_code() -> None:
    """Which it would abort in, with exit code 134."""
    program = (
        "import time\nfrom solver.backends.backend import start_thread\n"
        "start_thread(lambda: (time.sleep(1.0), print('done')))\nprint('ending')\n"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "ending\ndone\n", "")
