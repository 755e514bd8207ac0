"""`python -m solver problem.json.gz`: solves a problem file, of this package or of the IOPDDL contest."""

from __future__ import annotations

import argparse
import gzip
import math
import os
import re
import signal
import sys
import threading
import time
import zlib
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

from .backends import BACKENDS, BackendUnavailable
from .iopddl import write_solution
from .problem import ProblemError
from .problem_file import read_problem
from .solution import Incumbent, Solution, Status
from .solve import solve

SOLVED: Final = 0
BAD_INPUT: Final = 2
INFEASIBLE: Final = 3
NO_ANSWER: Final = 4

LEAST_S: Final = 0.1
RESERVE_S: Final = 4.0
RESERVE_SHARE: Final = 0.05
RESERVE_OF_READING: Final = 0.5

HEAD_BYTES: Final = 4096
_GZIPPED: Final = b"\x1f\x8b"
_SOLUTION: Final = re.compile(rb'\s*\{\s*"status"\s*:')

_EXIT_CODES: Final = {
    Status.OPTIMAL: SOLVED,
    Status.FEASIBLE: SOLVED,
    Status.INFEASIBLE: INFEASIBLE,
    Status.CUT: NO_ANSWER,
    Status.TIME_LIMIT: NO_ANSWER,
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns the exit code (see --help)."""
    options = _parser().parse_args(arguments)
    started_s = time.monotonic()
    try:
        if options.output:
            _check_writable(Path(options.output), Path(options.problem))
        problem = read_problem(options.problem)
        solution = solve(
            problem,
            backend=options.backend,
            time_limit_s=_left_s(options.time_limit, time.monotonic() - started_s),
            seed=options.seed,
            relative_gap=options.gap,
            progress=_show if sys.stderr.isatty() else None,
        )
        if options.output:
            write_solution(solution, options.output)
    except (ProblemError, BackendUnavailable) as error:
        return _fail(str(error))
    except OSError as error:
        return _fail(str(error) if error.filename is None else f"{error.filename}: {error.strerror}")
    except KeyboardInterrupt:
        return _fail("interrupted before the problem was read", NO_ANSWER)
    if sys.stderr.isatty():
        print(file=sys.stderr)
    _report(solution)
    return _EXIT_CODES[solution.status]


def _left_s(time_limit_s: float | None, used_s: float) -> float | None:
    """What reading the file left of the limit, less what ending takes: the last native call, judging, writing.

    Reading tells how large the problem and how busy the machine is, so ending is expected to take a part of that. A
    limit that was no positive number stays, for `solve` to refuse.
    """
    if time_limit_s is None or not time_limit_s > 0:
        return time_limit_s
    reserve_s = max(min(RESERVE_S, RESERVE_SHARE * time_limit_s), RESERVE_OF_READING * used_s)
    return max(LEAST_S, time_limit_s - used_s - reserve_s)


def _check_writable(path: Path, problem: Path) -> None:
    """Refuses, before the long work, a solution file that cannot be written or whose place something else has."""
    if path.resolve() == problem.resolve():
        raise ProblemError(f"the solution would be written over the problem {problem}; name another file")
    if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ProblemError(f"cannot write the solution to {path}: give a file in a folder that exists and is writable")
    if path.is_file() and os.access(path, os.R_OK) and not _may_be_replaced(path):
        raise ProblemError(f"{path} holds no solution and would be lost; name another file, or remove it")


def _may_be_replaced(path: Path) -> bool:
    """Whether a file is empty, or begins as a solution does, gzipped or not."""
    with open(path, "rb") as file:
        head = file.read(len(_GZIPPED))
    if head == _GZIPPED:
        with gzip.open(path) as file, suppress(OSError, EOFError, zlib.error):
            return _SOLUTION.match(file.read(HEAD_BYTES)) is not None
        return False
    with open(path, "rb") as file:
        head = file.read(HEAD_BYTES)
    return not head or _SOLUTION.match(head) is not None


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m solver",
        description="Chooses one strategy per node of a problem, at least cost.",
        epilog="Exit codes: 0 solved, 2 bad input, 3 infeasible, 4 no answer in the time given. Ctrl-C ends the search "
        "with the best answer so far, like the time limit.",
    )
    parser.add_argument(
        "problem", help="problem file, plain or gzipped JSON, in the format of this package or of the IOPDDL contest"
    )
    parser.add_argument(
        "-o", "--output", help="solution file to write (status, cost, bound, gap, seconds, choices, routes)"
    )
    parser.add_argument(
        "--time-limit", type=float, metavar="SECONDS", help="wall-clock limit, reading the file included"
    )
    parser.add_argument(
        "--gap", type=float, default=0.0, help="stop at this (cost - bound) / cost (default: %(default)s)"
    )
    parser.add_argument("--backend", default="auto", help=f"one of {', '.join(BACKENDS)} (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="default: %(default)s")
    return parser


def _report(solution: Solution) -> None:
    for size in solution.report.sizes:
        print(
            f"{size.seconds:8.2f} s  {size.stage:28}{size.nodes:8} nodes {size.strategies:9} strategies "
            f"{size.edges:8} edges {size.pairs:10} pairs" + f" {size.arcs:9} arcs" * (solution.report.sizes[0].arcs > 0)
        )
    print(solution.status.value)
    if solution.report.explanation:
        print(f"why      {solution.report.explanation}")
    gap = f"{solution.gap:.3g}" if math.isfinite(solution.gap) else None
    for name, value in (("cost", solution.cost), ("bound", solution.bound), ("gap", gap)):
        print(f"{name:9}{'-' if value is None else value}")
    print(f"seconds  {solution.report.seconds:.2f}")


def _show(incumbent: Incumbent) -> None:
    print(f"\r{incumbent.seconds:8.1f} s   cost {incumbent.cost}   bound {incumbent.bound}   ", end="", file=sys.stderr)


def _fail(message: str, code: int = BAD_INPUT) -> int:
    print(f"error: {message}", file=sys.stderr)
    return code


if __name__ == "__main__":
    code = main()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # impatience comes too late now, and would change the exit code
    with suppress(BrokenPipeError):
        sys.stdout.flush()
    if threading.active_count() > 1:
        # A thread is still in native code that knows no interruption; the interpreter's own exit would crash in it.
        os._exit(code)
    sys.exit(code)
