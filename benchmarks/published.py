"""Predictions held against published training runs, on machines that we do not own (``docs/validation.md``).

    python benchmarks/published.py --data training.csv                  # every row: minutes to an hour
    python benchmarks/published.py --data training.csv --rows 'mpt-7b*' --picture predicted.svg
    python benchmarks/published.py --collectives collectives.csv        # the links of the profiles

Each run's model is planned on the meta device with the scheme, mesh and recomputation that it was run with, on the
profile of its machine. What is compared is the simulated step (:mod:`autoshard.plans.simulation`), in which gathers and
reductions hide behind computation as they do in the frameworks that published; what hides costs the profile's
``contention`` of its time still. Of several micro-batches each gathers and reduces anew, as FSDP does, so that a step
is so many simulated forwards and backwards and one optimizer's step. Memory is what the allocator reserves: in use, and
its margin.

``--plans FOLDER`` keeps the plans, and reads those that are there.
"""

from __future__ import annotations

import argparse
import fnmatch
import hashlib
import re
import statistics
import sys
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import autoshard
from autoshard.errors import AutoshardError
from autoshard.measure.calibration_report import svg
from autoshard.measure.chart import COLOURS, Mark, Panel, Picture, Scale
from autoshard.plans import ShardingPlan, dump_plan, parse_plan
from autoshard.plans.memory_outcome import reserved_bytes
from autoshard.plans.simulation import simulate
from cost_models import load_profile
from published_collectives import report as report_collectives
from published_runs import CannotBuild, Run, read_runs

FITTING = (
    *("tt24-8b-128-eager", "tt24-8b-128-compile", "ttA-L2-13B-64-selectivelayer-b2"),
    *("mpt-70b-h100-256-ac", "mpt-30b-h100-512-ac", "mpt-30b-h100-128-ac", "mpt-13b-h100-128-ac"),
    *("mpt-70b-h100-32-ac", "mpt-30b-h100-32-ac", "mpt-13b-h100-64", "mpt-3b-h100-64"),
    *("mpt-70b-a10040-128-ac", "mpt-30b-a10040-128-ac"),
    *("kor-22b-8-full", "kor-22b-layer-sp", "kor-22b-layer-full", "kor-22b-layer-spsel"),
)
"""The rows to which constants of the profiles are fitted: those that can be built of the ids whose SHA-256 is divisible
by 3 (its first 8 digits), which was settled before anything was predicted. All other rows are validation.
"""

FUSED = 0.5
"""The part of the time of small operators (all but products and attention) that is left when a compiler fuses them.
Fitted to the fitting rows on ``h100-500w-hbm2e``.
"""

CLEAR = 0.05
"""Two runs whose published times per token differ by more than this have a clear order."""


@dataclass(frozen=True)
class Prediction:
    """What is predicted of a run: seconds of a step, and bytes that a rank's allocator reserves."""

    run: Run
    step_s: float
    reserved_bytes: float

    @property
    def error(self) -> float:
        """Of the step time, relative to what was published; above 0 where it was predicted too slow."""
        return self.step_s / (self.run.published_s or float("nan")) - 1

    @property
    def memory_error(self) -> float | None:
        """Of the memory; None where none was published."""
        published = self.run.published_bytes
        return None if published is None else self.reserved_bytes / published - 1

    @property
    def per_token_s(self) -> tuple[float, float]:
        """Predicted and published GPU seconds of a token."""
        batch, sequence = self.run.batch
        share = int(self.run.row["gpus"]) / (batch * sequence * self.run.accumulated)
        return self.step_s * share, (self.run.published_s or float("nan")) * share

    @property
    def is_fitting(self) -> bool:
        """Whether constants were fitted to it."""
        return self.run.name in FITTING


def predict(run: Run, plans: Plans) -> Prediction:
    """The prediction of a run.

    Raises:
        CannotBuild: it cannot be built.
        AutoshardError: it cannot be planned.
    """
    layers = int(run.row["layers"])
    if run.is_one_layer:  # what a second layer adds
        one, two = (plans.of(run, layers + more) for more in range(2))
        seconds = _phases_s(two, run) - _phases_s(one, run)
        return Prediction(run, seconds, _reserved(two) - _reserved(one))
    plan = plans.of(run, layers)
    optimizer_s = plan.optimizer_s or 0.0
    return Prediction(run, run.accumulated * _phases_s(plan, run) + optimizer_s, _reserved(plan))


def _phases_s(plan: ShardingPlan, run: Run) -> float:
    """Seconds of one forward and backward."""
    if run.compiled:
        plan = replace(plan, execution=tuple(replace(e, predicted_ns=_fused_ns(e)) for e in plan.execution))
    simulated = simulate(plan)
    return (simulated.step_ns + plan.contention * simulated.hidden_ns) / 1e9 - (plan.optimizer_s or 0.0)


def _fused_ns(entry: object) -> int:
    name, took_ns = entry.name, entry.predicted_ns  # type: ignore[attr-defined]
    return took_ns if is_product(name) else round(took_ns * FUSED)


def is_product(operator: str) -> bool:
    """Whether an operator, by its name in a plan, is a product of matrices or attention."""
    role = operator.rpartition("/")[2].removeprefix("bwd.").removeprefix("again.")
    return bool(re.match(r"(mm|addmm|bmm|matmul|linear|attention)", role))


def _reserved(plan: ShardingPlan) -> float:
    assert plan.memory is not None
    return float(reserved_bytes(plan.memory.peak.size_bytes, plan.memory.allocator_margin))


class Plans:
    """Plans of runs, each made once: runs that differ in what a compiler does have the same."""

    def __init__(self, folder: Path | None = None) -> None:
        self._folder, self._made = folder, dict[str, ShardingPlan]()

    def of(self, run: Run, layers: int) -> ShardingPlan:
        """The plan of a run with so many layers."""
        profile = load_profile(run.hardware)
        asked = (run.mesh, run.constraints, run.precision, run.batch, layers, profile.fingerprint)
        dims = [run.row[name] for name in ("model", "d_model", "heads", "kv_heads", "ffn", "vocab")]
        key = hashlib.sha256(repr((asked, dims)).encode()).hexdigest()[:16]
        if key not in self._made:
            path = self._folder and self._folder / f"{key}.yaml"
            if path and path.exists():
                plan = parse_plan(path.read_text(), str(path))
            else:
                plan = _plan(run, layers)
                if path:
                    path.parent.mkdir(parents=True, exist_ok=True)
                    path.write_text(dump_plan(plan))
            self._made = {key: plan}  # rows of one plan stand one after the other: it need not stay in memory
        return self._made[key]


def _plan(run: Run, layers: int) -> ShardingPlan:
    model, arguments = run.model(layers)
    largest = max(sum(p.numel() for p in layer.parameters()) for layer in _layers(model))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a plan is good enough whose gap is not closed
        return autoshard.plan(
            model,
            arguments,
            mesh=run.mesh,
            hardware=run.hardware,
            constraints=run.constraints,
            checkpointing="none",
            bucket=4 * largest,  # FSDP moves a layer at a time
            **run.precision,  # type: ignore[arg-type]
        )


def _layers(model: object) -> Iterable[object]:
    return next(child for child in model.children() if len(list(child.children())) and hasattr(child, "append"))  # type: ignore[attr-defined]


def pairs(found: Sequence[Prediction]) -> list[tuple[Prediction, Prediction]]:
    """Pairs of one source, model and machine whose order is clear; what differs is how they were run."""
    alike = defaultdict(list)
    for one in found:
        cells = (one.run.row[name] for name in ("source", "model", "layers", "gpu", "seq"))
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
    parser.add_argument("--plans", type=Path, help="a folder that keeps the plans")
    parser.add_argument("--picture", type=Path, help="an SVG file: predicted against published")
    parser.add_argument("--collectives", type=Path, help="measured collectives, held against the profiles instead")
    options = parser.parse_args(given)
    if options.collectives:
        return report_collectives(options.collectives)
    if not options.data:
        parser.error("--data FILE, or --collectives FILE")
    patterns = options.rows.split(",")
    runs = [run for run in read_runs(options.data) if any(fnmatch.fnmatch(run.name, each) for each in patterns)]
    found, left_out = _predict_all(runs, Plans(options.plans))
    print("\nNot predicted")
    for name, why in left_out:
        print(f"  {name:42} {why}")
    if found:
        _summary(found)
    if found and options.picture:
        options.picture.write_text(svg(_picture(found)))
    return 0


def _predict_all(runs: Sequence[Run], plans: Plans) -> tuple[list[Prediction], list[tuple[str, str]]]:
    found, left_out = list[Prediction](), list[tuple[str, str]]()
    print(f"{'':42} {'step, s':>17} {'':>6} {'MFU, %':>11} {'memory, GiB':>14}\n{'':42} predicted published  error")
    for run in runs:
        started = time.monotonic()
        try:
            found.append(predict(run, plans))
        except (CannotBuild, AutoshardError) as reason:
            left_out.append((run.name, str(reason).partition("\n")[0]))
            continue
        print(f"{_line(found[-1])}   {time.monotonic() - started:4.0f} s of planning", flush=True)
    return found, left_out


def _line(one: Prediction) -> str:
    run, gib = one.run, 2**30
    speed = run.mfu_flops / run.peak_flops_per_s * 100
    mfu = "" if run.is_one_layer else f"{speed / one.step_s:5.1f} {speed / (run.published_s or 1):5.1f}"
    of = f"{run.published_bytes / gib:5.1f} {one.memory_error:+4.0%}" if run.published_bytes else ""
    memory = "" if run.is_one_layer else f"{one.reserved_bytes / gib:6.1f} {of}"
    mark = "fitting" if one.is_fitting else ""
    head = f"{run.name:42} {one.step_s:9.4g} {run.published_s or 0:9.4g} {one.error:+6.1%}"
    return f"{head} {mfu:>11} {memory:18} {mark:7}"


def _summary(found: Sequence[Prediction]) -> None:
    print(f"\n{'absolute error of the step time':42} {'rows':>5} {'median':>7} {'largest':>8}")
    held_out = [one for one in found if not one.is_fitting]
    groups: list[tuple[str, Callable[[Prediction], bool]]] = [
        (f"{source}, {what}", lambda one, s=source, f=fit: one.run.source == s and one.is_fitting == f)  # type: ignore[misc]
        for source in dict.fromkeys(one.run.source for one in found)
        for what, fit in (("validation", False), ("fitting", True))
    ]
    groups += [("all, fitting", lambda one: one.is_fitting), ("all, validation", lambda one: not one.is_fitting)]
    for name, belongs in groups:
        errors = [abs(one.error) for one in found if belongs(one)]
        if errors:
            print(f"{name:42} {len(errors):5} {statistics.median(errors):7.1%} {max(errors):8.1%}")
    memory = [abs(one.memory_error) for one in held_out if one.memory_error is not None]
    if memory:
        print(f"{'memory, validation':42} {len(memory):5} {statistics.median(memory):7.1%} {max(memory):8.1%}")
    for name, rows in (("all rows", found), ("validation rows", held_out)):
        clear = pairs(rows)
        if clear:
            right = sum(map(in_order, clear))
            print(f"pairs in the published order, {name}: {right} of {len(clear)} ({right / len(clear):.0%})")
    for a, b in pairs(found):
        if not in_order((a, b)):
            print(f"  not in order: {a.run.name} and {b.run.name}")


def _picture(found: Sequence[Prediction]) -> Picture:
    """Predicted over published seconds of a step, dots filled where constants were fitted; lines at 15% either way."""
    times = [s for one in found for s in (one.step_s, one.run.published_s or one.step_s)]
    low, high = min(times) / 1.5, max(times) * 1.5
    panel = Panel(Scale(low, high, 70.0, 490.0), Scale(low, high, 466.0, 46.0))
    colours = dict(zip(dict.fromkeys(one.run.source for one in found), COLOURS))
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
    raise SystemExit(main())
