"""Writes and judges the programs of some seeds, in this process: ``python -m tests.fuzz.batch FOLDER SEED...``.

A program is what a seed says: the seed makes bytes, and hypothesis reads them as the choices of the grammar. A finding
is made small by hypothesis, and written down as a file that runs.
"""

from __future__ import annotations

import faulthandler
import gc
import json
import logging
import random
import re
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.database import InMemoryExampleDatabase

from .grammar import programs
from .judge import Verdict, judge
from .mutants import mutated
from .program import Program

CHOICES_BYTES = 20_000
DEADLINE_S = 120
SHRINK_S = 60.0


@dataclass(frozen=True)
class Outcome:
    """What became of one seed: the verdict, and the file of the smallest program that is judged alike."""

    seed: int
    kind: str
    detail: str
    seconds: float
    file: str = ""

    @property
    def verdict(self) -> Verdict:
        return Verdict(self.kind, self.detail)


class _Found(Exception):
    """What hypothesis is to make small."""


class _Enough(BaseException):
    """The time to make it small is over."""


def program_of(seed: int) -> Program:
    """The program that a seed stands for."""
    taken: list[Program] = []

    @settings(database=None, deadline=None)
    @given(programs())
    def take(program: Program) -> None:
        taken.append(program)

    take.hypothesis.fuzz_one_input(_choices(seed))  # type: ignore[attr-defined]
    return taken[0]


def run_seed(seed: int, folder: Path, shrink_s: float = SHRINK_S) -> Outcome:
    """Judges the program of a seed; where it is a finding, writes the smallest one like it to ``folder``."""
    start = time.process_time()
    with tempfile.TemporaryDirectory() as scratch:
        running = folder / f"running-{seed}.py"
        judged = _Judged(seed, Path(scratch), running)
        program = program_of(seed)
        verdict = judged.of(program)
        file = ""
        if verdict.is_finding:
            program, verdict = _shrunk(seed, program, verdict, judged, shrink_s)
            file = str(folder / f"finding-{seed}.py")
            Path(file).write_text(f'"""{verdict.kind}: {_printable(verdict.detail)}"""\n\n{program.source}')
        running.unlink()
    return Outcome(seed, verdict.kind, verdict.detail, time.process_time() - start, file)


class _Judged:
    """Verdicts by source: each program is run once. The one that runs is in a file, should it end the process."""

    def __init__(self, seed: int, scratch: Path, running: Path) -> None:
        self._seed, self._scratch, self._running = seed, scratch, running
        self._known: dict[str, Verdict] = {}

    def of(self, program: Program) -> Verdict:
        source = program.source
        if source not in self._known:
            path = self._scratch / f"fuzz_{self._seed}_{len(self._known)}.py"
            path.write_text(source)
            self._running.write_text(source)
            self._known[source] = _judge_or_fail(path)
            sys.modules.pop(path.stem, None)
        return self._known[source]


def _judge_or_fail(path: Path) -> Verdict:
    faulthandler.dump_traceback_later(DEADLINE_S, exit=True)
    try:
        return judge(path)
    except Exception:
        return Verdict("foreign", f"the fuzzer itself failed: {traceback.format_exc()[-1500:]}")
    finally:
        faulthandler.cancel_dump_traceback_later()


def _shrunk(seed: int, program: Program, verdict: Verdict, judged: _Judged, seconds: float) -> tuple[Program, Verdict]:
    """The smallest program found in that time with the same kind of verdict."""
    wanted = kind_of(verdict)
    until = time.process_time() + seconds
    best = [(program, verdict)]

    def check(smaller: Program) -> None:
        if time.process_time() > until:
            raise _Enough
        found = judged.of(smaller)
        if kind_of(found) == wanted:
            if len(smaller.source) <= len(best[0][0].source):
                best[0] = smaller, found
            raise _Found

    test = _test(check)
    for run in (lambda: test.hypothesis.fuzz_one_input(_choices(seed)), test):  # the first puts it into the database
        try:
            run()
        except (_Found, _Enough):
            continue
    return best[0]


def _test(check: Callable[[Program], None]) -> Callable[[], None]:
    @settings(
        database=InMemoryExampleDatabase(),
        deadline=None,
        phases=[Phase.reuse, Phase.shrink],
        suppress_health_check=list(HealthCheck),
        report_multiple_bugs=False,
        print_blob=False,
    )
    @given(programs())
    def test(program: Program) -> None:
        check(program)

    return test


def kind_of(verdict: Verdict) -> str:
    """What makes two verdicts alike: the kind, and the text but for names, numbers and places."""
    text = verdict.detail
    if verdict.kind == "wrong":  # the name of what was seen, without the names of parameters
        text = text.split(":")[0]
        text = "a gradient" if text.endswith(".grad") else text.split(" TreeSpec")[0].split(" self")[0]
    text = re.sub(r"\S*\.py:\d+(: [^(]*)?", "PLACE", text)
    text = re.sub(r"'[^']*'|\"[^\"]*\"|\[[^\]]*\]|\b[a-z]*\d[\w.]*", "_", text)
    return f"{verdict.kind}: {' '.join(text.split())[:110]}"


def _choices(seed: int) -> bytes:
    return random.Random(seed).randbytes(CHOICES_BYTES)


def _printable(text: str) -> str:
    return text.replace("\\", "/").replace('"""', "'''")


def main(arguments: Sequence[str]) -> None:
    """One line of JSON on standard output for each seed; with a mutant, up to the one that finds it."""
    folder, mutant, shrink_s, *seeds = arguments
    faulthandler.enable()
    logging.disable(logging.ERROR)  # torch tells of what it catches
    torch.set_num_threads(1)
    gc.freeze()  # what is imported stays
    with mutated(mutant):
        for seed in seeds:
            outcome = run_seed(int(seed), Path(folder), float(shrink_s))
            print(json.dumps(vars(outcome)), flush=True)
            if mutant and outcome.kind == "wrong":
                break


if __name__ == "__main__":
    main(sys.argv[1:])
