"""Many programs in child processes, so that one that ends its process is a finding and not the end.

The outcomes are appended to ``outcomes.jsonl`` in a folder; seeds that are in there already are not run again.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from queue import Empty, Queue

from .batch import SHRINK_S, Outcome, kind_of

BATCH = 100
"""Programs for one process: starting one takes seconds, and dynamo remembers all that it has traced."""

ROOT = Path(__file__).parents[2]


def run_campaign(
    seeds: Sequence[int],
    folder: Path,
    processes: int = 1,
    mutant: str = "",
    shrink_s: float = SHRINK_S,
    progress: Callable[[list[Outcome]], None] = lambda outcomes: None,
) -> list[Outcome]:
    """Runs the seeds that the folder has no outcome of; the outcomes of all of them, in order.

    Args:
        mutant: a bug to plant, by its name in :mod:`tests.fuzz.mutants`. The program that finds it is the last one of
            its process.
        shrink_s: CPU seconds to make each finding smaller.
        progress: called with all outcomes so far whenever there is another one.
    """
    folder.mkdir(parents=True, exist_ok=True)
    log = folder / "outcomes.jsonl"
    known = {outcome.seed: outcome for outcome in _read(log)}
    todo: Queue[list[int]] = Queue()
    missing = [seed for seed in seeds if seed not in known]
    for start in range(0, len(missing), BATCH):
        todo.put(missing[start : start + BATCH])
    lock = threading.Lock()

    def note(outcome: Outcome) -> None:
        with lock:
            known[outcome.seed] = outcome
            with log.open("a") as file:
                file.write(json.dumps(asdict(outcome)) + "\n")
            progress(list(known.values()))

    def work() -> None:
        while True:
            try:
                batch = todo.get_nowait()
            except Empty:
                return
            while batch:
                batch = _run_batch(batch, folder, mutant, shrink_s, note)

    workers = [threading.Thread(target=work, daemon=True) for _ in range(processes)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return [known[seed] for seed in seeds if seed in known]


def _run_batch(
    seeds: list[int], folder: Path, mutant: str, shrink_s: float, note: Callable[[Outcome], None]
) -> list[int]:
    """Runs seeds in one child; what is left of them where it died, the seed that it died of noted."""
    command = [sys.executable, "-m", "tests.fuzz.batch", str(folder), mutant, str(shrink_s), *map(str, seeds)]
    errors = folder / f"errors-{seeds[0]}.txt"
    left = list(seeds)
    with (
        errors.open("w") as stderr,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stderr, cwd=ROOT) as child,
    ):
        assert child.stdout is not None
        for line in child.stdout:
            if line.startswith(b"{"):
                outcome = Outcome(**json.loads(line))
                left.remove(outcome.seed)
                note(outcome)
        child.wait()
    told = errors.read_text(errors="replace")
    errors.unlink()
    if child.returncode == 0 and (mutant or not left):
        return []
    died_of, *rest = left
    kind = "hang" if "Timeout (" in told else "crash"
    running, kept = folder / f"running-{died_of}.py", folder / f"finding-{died_of}.py"
    if running.exists():
        kept.write_text(f'"""{kind}: the process ended with code {child.returncode}"""\n\n{running.read_text()}')
        running.unlink()
    fatal = told[max(told.find("Fatal Python error"), 0) :]
    note(Outcome(died_of, kind, f"exit code {child.returncode}: {fatal[:3000]}", 0.0, str(kept)))
    return rest


def report(outcomes: Sequence[Outcome]) -> str:
    """How many programs ended how, refusals by their texts, and every finding with its file."""
    kinds = Counter(outcome.kind for outcome in outcomes)
    total = max(len(outcomes), 1)
    lines = [f"{len(outcomes)} programs, {sum(outcome.seconds for outcome in outcomes):.0f} CPU s"]
    lines += [f"{count:6} {count / total:6.1%}  {kind}" for kind, count in kinds.most_common()]
    for kind in ("refused", "both raise"):
        alike = Counter(kind_of(outcome.verdict) for outcome in outcomes if outcome.kind == kind)
        lines += (
            ["", f"{kind}, by text:", *(f"{count:6}  {text}" for text, count in alike.most_common())] if alike else []
        )
    findings = [outcome for outcome in outcomes if outcome.verdict.is_finding]
    lines += ["", f"findings: {len(findings)}"]
    for text, count in Counter(kind_of(outcome.verdict) for outcome in findings).most_common():
        files = [outcome.file for outcome in findings if kind_of(outcome.verdict) == text]
        lines += [f"{count:6}  {text}", *(f"          {file}" for file in files)]
    return "\n".join(lines)


class Progress:
    """One line that is written anew, on a terminal only."""

    def __init__(self, wanted: int) -> None:
        self._wanted, self._start = wanted, time.monotonic()

    def __call__(self, outcomes: list[Outcome]) -> None:
        if sys.stderr.isatty():
            kinds = Counter(outcome.kind for outcome in outcomes)
            text = ", ".join(f"{count} {kind}" for kind, count in kinds.most_common())
            print(f"\r{len(outcomes)}/{self._wanted}: {text}\033[K", end="", file=sys.stderr, flush=True)


def _read(log: Path) -> list[Outcome]:
    if not log.exists():
        return []
    lines = log.read_text().splitlines()
    return [Outcome(**json.loads(line)) for line in lines if line.endswith("}")]
