"""Predictions held against published training runs, on machines that we do not own (``docs/validation.md``).

    python benchmarks/published.py --data training.csv                  # every row: about 20 minutes of two busy cores
    python benchmarks/published.py --data training.csv --rows 'mpt-7b*' --picture predicted.svg
    python benchmarks/published.py --collectives collectives.csv        # the links of the profiles

Each run's model is planned on the meta device with the scheme, mesh and recomputation that it was run with, on the
profile of its machine. What is compared is the simulated step (:mod:`autoshard.plans.simulation`), in which gathers and
reductions hide behind computation as they do in the frameworks that published; what hides costs the profile's
``contention`` of its time still. Of several micro-batches each gathers and reduces anew, as FSDP does, so that a step
is so many simulated forwards and backwards and one optimizer's step. Memory is what the allocator of that software
reserves (``published_memory.py``).

A row is predicted in a process of its own and printed as it comes. One that cannot be built, or takes more than
``--seconds``, is named at the end with the reason. ``--plans FOLDER`` keeps the plans, and reads those that are there.
"""

from __future__ import annotations

import argparse
import csv
import fnmatch
import functools
import signal
import statistics
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import combinations
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from autoshard.measure.calibration_report import svg
from autoshard.measure.chart import COLOURS, Mark, Panel, Picture, Scale
from published_collectives import report as report_collectives
from published_jobs import Outcome, outcomes
from published_predictions import Plans, Prediction, predict
from published_runs import Run, read_runs

CLEAR = 0.05
"""Two runs whose published times per token differ by more than this have a clear order."""

SECONDS = 900.0
"""What a row may take by default: several times what the largest here does."""


def predict_in(folder: Path, run: Run) -> Prediction:
    """The prediction of a run, whose plan is kept in a folder."""
    return predict(run, Plans(folder))


def pairs(found: Iterable[Prediction]) -> list[tuple[Prediction, Prediction]]:
    """Pairs of one source, model and machine whose order is clear; what differs is how they were run."""
    alike = defaultdict(list)
    for one in found:
        if one.error is not None:
            cells = (one.run.row.text(name) for name in ("source", "model", "layers", "gpu", "seq"))
            alike[tuple(cells)].append(one)
    every = (pair for group in alike.values() for pair in combinations(group, 2))
    return [(a, b) for a, b in every if abs(a.per_token_s[1] / b.per_token_s[1] - 1) > CLEAR]


def in_order(pair: tuple[Prediction, Prediction]) -> bool:
    """Whether the faster of a pair is predicted to be faster."""
    (mine, theirs), (other, others) = pair[0].per_token_s, pair[1].per_token_s
    return (mine < other) == (theirs < others)


def main(given: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="training runs, with the columns of docs/validation.md")
    parser.add_argument("--rows", default="*", help="patterns of ids, with commas: 'mpt-7b*,tt24*'")
    parser.add_argument("--seconds", type=float, default=SECONDS, help=f"what a row may take ({SECONDS:g})")
    parser.add_argument("--plans", type=Path, help="a folder that keeps the plans")
    parser.add_argument("--picture", type=Path, help="an SVG file: predicted against published")
    parser.add_argument("--tables", type=Path, help="a Markdown file: the tables of docs/validation.md")
    parser.add_argument("--collectives", type=Path, help="measured collectives, held against the profiles instead")
    options = parser.parse_args(given)
    if not (options.collectives or options.data):
        parser.error("--data FILE, or --collectives FILE")
    try:
        if options.collectives:
            return report_collectives(options.collectives)
        runs = read_runs(options.data)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        parser.error(f"cannot read {options.collectives or options.data}: {error}")
    patterns = options.rows.split(",")
    chosen = [run for run in runs if any(fnmatch.fnmatch(run.name, each) for each in patterns)]
    with tempfile.TemporaryDirectory() as own:
        ended = _print_each(chosen, options.plans or Path(own), options.seconds)
    found = [each.found for each in ended if isinstance(each.found, Prediction)]
    print("\nNot predicted")
    for each in ended:
        if isinstance(each.found, str):
            print(f"  {each.run.name:42} {each.found}")
    for run in chosen[len(ended) :]:
        print(f"  {run.name:42} interrupted")
    held = [one for one in found if one.error is not None]
    if held:
        _summary(held)
        if options.picture:
            options.picture.write_text(svg(_picture(held)))
        if options.tables:
            options.tables.write_text(_tables(held))
    return 0


def _print_each(runs: Sequence[Run], plans: Path, seconds: float) -> list[Outcome]:
    ended = list[Outcome]()
    print(f"{'':42} {'step, s':>17} {'':>6} {'MFU, %':>11} {'memory, GiB':>14}\n{'':42} predicted published  error")
    try:
        for each in outcomes(runs, functools.partial(predict_in, plans.resolve()), seconds):
            ended.append(each)
            line = _line(each.found) if isinstance(each.found, Prediction) else f"{each.run.name:42} {each.found}"
            print(f"{line}   {each.took_s:4.0f} s", flush=True)
    except KeyboardInterrupt:
        print("interrupted: the summary is of the rows above")
    return ended


def _line(one: Prediction) -> str:
    run, gib = one.run, 2**30
    speed = run.mfu_flops / run.peak_flops_per_s * 100
    against = "not stated       " if one.error is None else f"{run.published_s:9.4g} {one.error:+6.1%}"
    theirs = "" if one.error is None else f" {speed / (run.published_s or 1):5.1f}"
    mfu = "" if run.is_one_layer else f"{speed / one.step_s:5.1f}{theirs}"
    error = one.memory_error
    of = "" if error is None else f"{(run.published_bytes or 0) / gib:5.1f} {error:+4.0%}"
    memory = "" if run.is_one_layer else f"{one.reserved_bytes / gib:6.1f} {of}"
    mark = "fitting" if one.is_fitting else ""
    return f"{run.name:42} {one.step_s:9.4g} {against} {mfu:>11} {memory:18} {mark:7}"


def _summary(found: Sequence[Prediction]) -> None:
    """Prints the errors of runs with a published step time, by source."""
    print(f"\n{'absolute error of the step time':42} {'rows':>5} {'median':>7} {'largest':>8}")
    held_out = [one for one in found if not one.is_fitting]
    groups: list[tuple[str, Callable[[Prediction], bool]]] = [
        (f"{source}, {what}", lambda one, s=source, f=fit: one.run.source == s and one.is_fitting == f)  # type: ignore[misc]
        for source in dict.fromkeys(one.run.source for one in found)
        for what, fit in (("validation", False), ("fitting", True))
    ]
    groups += [("all, fitting", lambda one: one.is_fitting), ("all, validation", lambda one: not one.is_fitting)]
    for name, belongs in groups:
        _print_errors(name, [abs(one.error or 0.0) for one in found if belongs(one)])
    for what, rows in (("validation", held_out), ("fitting", [one for one in found if one.is_fitting])):
        _print_errors(f"memory, {what}", [abs(one.memory_error) for one in rows if one.memory_error is not None])
    for name, rows in (("all rows", found), ("validation rows", held_out)):
        clear = pairs(rows)
        if clear:
            right = sum(map(in_order, clear))
            print(f"pairs in the published order, {name}: {right} of {len(clear)} ({right / len(clear):.0%})")
    for a, b in pairs(found):
        if not in_order((a, b)):
            print(f"  not in order: {a.run.name} and {b.run.name}")


def _print_errors(name: str, errors: Sequence[float]) -> None:
    if errors:
        print(f"{name:42} {len(errors):5} {statistics.median(errors):7.1%} {max(errors):8.1%}")


def _tables(found: Sequence[Prediction]) -> str:
    """Validation rows in Markdown: by source, and each."""
    held_out = [one for one in found if not one.is_fitting]
    by_source = defaultdict(list)
    for one in held_out:
        by_source[f"`{one.run.source}-*`"].append(abs(one.error or 0.0))
        by_source["**all**"].append(abs(one.error or 0.0))
    by_source["**all**"] = by_source.pop("**all**")
    lines = ["| source | validation rows | median | largest |", "|---|--:|--:|--:|"]
    lines += [f"| {k} | {len(v)} | {statistics.median(v):.1%} | {max(v):.1%} |" for k, v in by_source.items()]
    lines += ["", "| run | predicted, s | published, s | error | memory, GiB: predicted / published |"]
    lines += ["|---|--:|--:|--:|--:|"]
    for one in held_out:
        theirs = one.run.published_bytes
        against = "not stated" if theirs is None else f"{theirs / 2**30:.1f} ({one.memory_error:+.0%})"
        memory = "" if one.run.is_one_layer else f"{one.reserved_bytes / 2**30:.1f} / {against}"
        lines.append(
            f"| `{one.run.name}` | {one.step_s:.4g} | {one.run.published_s:.4g} | {one.error:+.1%} | {memory} |"
        )
    return "\n".join(lines) + "\n"


def _picture(found: Sequence[Prediction]) -> Picture:
    """Predicted over published seconds of a step, dots filled where constants were fitted; lines at 15% either way."""
    times = [s for one in found for s in (one.step_s, one.run.published_s or one.step_s)]
    low, high = min(times) / 1.5, max(times) * 1.5
    panel = Panel(Scale(low, high, 70.0, 490.0), Scale(low, high, 466.0, 46.0))
    sources = list(dict.fromkeys(one.run.source for one in found))
    colours = {source: COLOURS[k % len(COLOURS)] for k, source in enumerate(sources)}
    marks: tuple[Mark, Mark] = ("held out", "fitted")
    dots = tuple(
        panel.dot(one.run.published_s or 0.0, one.step_s, marks[one.is_fitting], colours[one.run.source])
        for one in found
    )
    lines = [panel.line([(low, low), (high, high)], "#888", "as published")]
    lines += [panel.line([(low, low * 1.15), (high / 1.15, high)], "#ccc", "15% off")]
    lines += [panel.line([(low * 1.15, low), (high, high / 1.15)], "#ccc")]
    lines += [panel.line([(low, low)], colour, source) for source, colour in colours.items()]
    drawn = replace(panel, dots=dots, lines=tuple(lines), x_label="published step, s", y_label="predicted step, s")
    return Picture("published", "Predicted against published step times", 640.0, 510.0, (drawn,))


if __name__ == "__main__":
    for ends in (signal.SIGINT, signal.SIGTERM):  # a run in the background is told to ignore the first
        signal.signal(ends, signal.default_int_handler)
    raise SystemExit(main())
