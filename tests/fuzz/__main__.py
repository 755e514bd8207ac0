"""``python -m tests.fuzz --programs 5000 --processes 2``, or ``python -m tests.fuzz --run FILE`` for one program."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from .campaign import Progress, report, run_campaign
from .judge import judge


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--programs", type=int, default=200, help="how many")
    parser.add_argument("--seed", type=int, default=0, help="the seed of the first; each has its own")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--folder", type=Path, default=Path(".fuzz"), help="outcomes and findings; a run goes on there")
    parser.add_argument("--shrink-seconds", type=float, default=60.0, help="CPU seconds to make each finding smaller")
    parser.add_argument("--run", type=Path, help="judge the program in this file, and nothing else")
    chosen = parser.parse_args()
    if chosen.run:
        verdict = judge(chosen.run)
        print(f"{verdict.kind}: {verdict.detail}")
        return int(verdict.is_finding)
    seeds = range(chosen.seed, chosen.seed + chosen.programs)
    outcomes = run_campaign(
        seeds, chosen.folder, chosen.processes, shrink_s=chosen.shrink_seconds, progress=Progress(len(seeds))
    )
    print(report(outcomes))
    return int(any(outcome.verdict.is_finding for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main())
