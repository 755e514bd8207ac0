"""Captures, plans and runs models that people train, and says what of it works: ``make zoo``.

    python -m benchmarks.zoo                                  # all of them
    python -m benchmarks.zoo llama dit --mesh a=2,b=4         # some, on one mesh
    python -m benchmarks.zoo llama --no-budget                # without the plan for a tight budget
    python -m benchmarks.zoo --write docs/coverage.md         # the page from what was found, run now or before
    python -m benchmarks.zoo --only-write --write docs/coverage.md

Weights are random and models tiny: nothing is downloaded. Each model runs in a process of its own, so that a failure,
or the end of the process, costs this model alone. Results are kept in ``benchmarks/zoo/found``, which is committed: a
file for each model and mesh, with the commit that was run, and one for the operators of each model. A run of some
models on one mesh replaces these and leaves the others, and the page is of all that were run. What the processes say is
in ``.zoo``.

Exit codes: 0 all checks passed, 1 one failed.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

from autoshard.atomic_write import write_whole

from .found import FOUND, Found, commit_of_code, file_of, keep_cells, keep_operators, read_found
from .page import page, summary

LIMIT_S = 3600
LOGS = Path(".zoo")


def main() -> int:
    """Runs the members that are asked for."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.zoo", description="See the head of this file.")
    parser.add_argument("names", nargs="*", help="members; all by default")
    parser.add_argument("--mesh", action="append", default=[], help="in place of the member's own; repeatable")
    parser.add_argument("--no-budget", action="store_true", help="leave out the plan for 60%% of the free peak")
    parser.add_argument("--folder", type=Path, default=FOUND, help="where results are kept")
    parser.add_argument("--write", type=Path, metavar="FILE", help="write the page docs/coverage.md")
    parser.add_argument("--only-write", action="store_true", help="run nothing")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.here:
        _run(options)
        return 0
    from .members import MEMBERS

    if unknown := [name for name in options.names if name not in MEMBERS]:
        parser.error(f"no member {', '.join(unknown)}; there are {', '.join(MEMBERS)}")
    options.folder.mkdir(exist_ok=True)
    LOGS.mkdir(exist_ok=True)
    asked = {name: tuple(options.mesh) or MEMBERS[name].meshes for name in options.names or MEMBERS}
    if options.only_write:
        found = [read_found(options.folder, name) for name in asked]
    else:
        found = [_in_a_process(name, meshes, options) for name, meshes in asked.items()]
    if options.write:
        write_whole(options.write, page([read_found(options.folder, name) for name in MEMBERS]).encode())
    return int(any(each.failed for each in found))


def _in_a_process(name: str, meshes: tuple[str, ...], options: argparse.Namespace) -> Found:
    """What a member's process wrote of these meshes; its last words of those of which it wrote nothing."""
    command = [sys.executable, "-m", "benchmarks.zoo", name, "--here", "--folder", str(options.folder)]
    command += ["--no-budget"] * options.no_budget + [word for mesh in meshes for word in ("--mesh", mesh)]
    log = LOGS / f"{name}.log"
    for mesh in meshes:
        file_of(options.folder, name, mesh).unlink(missing_ok=True)
    with log.open("w") as file:
        try:
            subprocess.run(command, stdout=file, stderr=file, timeout=LIMIT_S)
        except subprocess.TimeoutExpired:
            print(f"no end after {LIMIT_S} s", file=file)
    found = read_found(options.folder, name, meshes, log.read_text().strip().splitlines()[-1:])
    print("\n".join(summary(found)), flush=True)
    return found


def _run(options: argparse.Namespace) -> None:
    """One member, in this process; what is found on a mesh is written after each check."""
    import torch

    from .checks import Checks
    from .members import MEMBERS

    torch.set_num_threads(1)
    (name,) = options.names

    commit = commit_of_code()

    def keep(checks: Checks, mesh: str) -> None:
        cells = [vars(cell) for cell in checks.cells if cell.mesh in ("", mesh)]
        keep_cells(options.folder, name, mesh, commit, cells)
        if checks.operators:
            keep_operators(options.folder, name, commit, checks.operators)

    Checks(replace(MEMBERS[name], meshes=tuple(options.mesh)), not options.no_budget, keep).run()


if __name__ == "__main__":
    sys.exit(main())
