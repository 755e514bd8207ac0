"""Captures, plans and runs models that people train, and says what of it works: ``make zoo``.

    python -m benchmarks.zoo                                  # all of them
    python -m benchmarks.zoo llama dit --mesh a=2,b=4         # some, on one mesh
    python -m benchmarks.zoo llama --no-budget                # without the plan for a tight budget
    python -m benchmarks.zoo --write docs/coverage.md         # the page from what was found, run now or before
    python -m benchmarks.zoo --only-write --write docs/coverage.md

Weights are random and models tiny: nothing is downloaded. Each model runs in a process of its own, whose results are
kept in ``--folder``, so that a failure, or the end of the process, costs this model alone.

Exit codes: 0 all checks passed, 1 one failed.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

from autoshard.atomic_write import write_whole

from .page import Found, page, read_found, summary

LIMIT_S = 3600


def main() -> int:
    """Runs the members that are asked for."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.zoo", description="See the head of this file.")
    parser.add_argument("names", nargs="*", help="members; all by default")
    parser.add_argument("--mesh", action="append", default=[], help="in place of the member's own; repeatable")
    parser.add_argument("--no-budget", action="store_true", help="leave out the plan for 60%% of the free peak")
    parser.add_argument("--folder", type=Path, default=Path(".zoo"), help="where results are kept")
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
    names = options.names or list(MEMBERS)
    found = [read_found(options.folder, name) if options.only_write else _in_a_process(name, options) for name in names]
    if options.write:
        whole = [read_found(options.folder, name) for name in MEMBERS]
        write_whole(options.write, page(whole).encode())
    return int(any(each.failed for each in found))


def _in_a_process(name: str, options: argparse.Namespace) -> Found:
    """What a member's process wrote; its last words where it wrote nothing."""
    command = [sys.executable, "-m", "benchmarks.zoo", name, "--here", "--folder", str(options.folder)]
    command += ["--no-budget"] * options.no_budget + [word for mesh in options.mesh for word in ("--mesh", mesh)]
    log = options.folder / f"{name}.log"
    (options.folder / f"{name}.json").unlink(missing_ok=True)
    with log.open("w") as file:
        try:
            subprocess.run(command, stdout=file, stderr=file, timeout=LIMIT_S)
        except subprocess.TimeoutExpired:
            print(f"no end after {LIMIT_S} s", file=file)
    found = read_found(options.folder, name, log.read_text().strip().splitlines()[-1:])
    print("\n".join(summary(found)), flush=True)
    return found


def _run(options: argparse.Namespace) -> None:
    """One member, in this process; what is found is written after each check."""
    import torch

    from .checks import Checks
    from .members import MEMBERS

    torch.set_num_threads(1)
    (name,) = options.names
    member = MEMBERS[name]
    if options.mesh:
        member = replace(member, meshes=tuple(options.mesh))

    def keep(checks: Checks) -> None:
        text = json.dumps({"cells": [vars(cell) for cell in checks.cells], "operators": checks.operators}, indent=1)
        write_whole(options.folder / f"{name}.json", text.encode())

    Checks(member, not options.no_budget, keep).run()


if __name__ == "__main__":
    sys.exit(main())
