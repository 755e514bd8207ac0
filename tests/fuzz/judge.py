"""Runs a program in one process and on all ranks of a mesh under a random plan, and compares what was seen.

The law: equal, or an autoshard error. Anything else is a finding.
"""

from __future__ import annotations

import threading
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.utils.parametrize import is_parametrized

import autoshard.apply
from autoshard.capture import CapturedGraph, capture
from autoshard.errors import AutoshardError
from autoshard.lowering import LocalProgram, Results, lower
from autoshard.mesh import Mesh
from autoshard.plans import ShardingPlan, dump_plan, parse_plan

from .program import load
from .random_plans import random_plan
from .ranks import PeerFailed, run_ranks
from .session import ABSENT, NO_NOISE, Maker, Noise, Session, ShardedSession

TOLERANCE = {"float64": 1e-9, "float32": 1e-4, "bfloat16": 3e-2, "float16": 1e-2}
"""The largest difference, as a share of a tensor's largest number or of 1, by the coarsest type that takes part."""

NOISE = {"float64": 1e-14, "float32": 1e-6, "bfloat16": 1e-2, "float16": 1e-3}
"""What is added to all numbers to see how much rounding may change a result: a few times the rounding of a number."""

UNSTABLE = 20.0
"""How many times what noise changes may be put down to rounding."""

SHAKES = 5
"""How often noise is added."""


FINDINGS = ("wrong", "accepted", "foreign", "crash", "hang")


@dataclass(frozen=True)
class Verdict:
    """How a program ended.

    ``kind`` is one of

    * ``equal``: all ranks saw what one process saw;
    * ``both raise``: and all of them raised an exception, which one process raised, too;
    * ``refused``: an autoshard error said that this cannot be done; ``detail`` is the error;
    * ``spared``: one process refuses, as a tensor that it saved for the backward was written to; the ranks saw what it
      sees where a write leaves what is saved alone;
    * ``unstable``: a difference that noise of the size of rounding makes in one process, too; or one process has sums
      that are too large for float16, whose parts may be too large elsewhere;
    * a finding: ``wrong`` (another number), ``accepted`` (one process refuses), ``foreign`` (an exception that is not
      autoshard's), ``crash`` and ``hang`` of the process.
    """

    kind: str
    detail: str = ""

    @property
    def is_finding(self) -> bool:
        return self.kind in FINDINGS


@dataclass(frozen=True)
class Seen:
    """What one run saw, and the exception that ended it."""

    records: list[tuple[str, Any]]
    error: BaseException | None


def judge(path: Path) -> Verdict:
    """Runs the program in a file both ways."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        names = load(path)
        expected = eager(names)
        try:
            found = sharded(names)
        except AutoshardError as error:
            return _refusal(error)
        except Exception as error:
            return Verdict("foreign", f"planning raised {_text(error)}")
        verdicts = [_compare(expected, seen, TOLERANCE[names.PRECISION]) for seen in found]
        worst = max(verdicts, key=lambda verdict: (verdict.is_finding, verdict.kind == "refused", verdict.kind != ""))
        if worst.kind == "wrong" and (_overflows(names, expected) or _is_unstable(names, expected, found)):
            return Verdict("unstable", worst.detail)
        if worst.kind == "accepted" and "has been modified by an inplace operation" in str(expected.error):
            with torch.autograd.graph.allow_mutation_on_saved_tensors():
                spared = eager(names)
            if all(_compare(spared, seen, TOLERANCE[names.PRECISION]).kind == "equal" for seen in found):
                return Verdict("spared", worst.detail)
        return worst


def eager(names: Any, noise: Noise = NO_NOISE) -> Seen:
    """The program in one process."""
    return _run(names, Session(names, _model(names, noise), noise))


def sharded(names: Any) -> list[Seen]:
    """The program on every rank of its mesh."""
    mesh = Mesh.parse(names.MESH)
    args, kwargs = names.arguments(Maker(100))
    models = [(_model(names), _model(names)) for _ in range(mesh.size)]
    model = models[0][0]
    graph = capture(model, args, kwargs, guarded=True)
    drawn = random_plan(graph, mesh, names.SEED, model, args, kwargs)
    plan = parse_plan(dump_plan(drawn))  # as a job gets it

    def one(rank: int) -> Seen:
        device_mesh = init_device_mesh("cpu", mesh.shape, mesh_dim_names=mesh.axes)
        given, original = models[rank]
        with warnings.catch_warnings():
            parallel = autoshard.parallelize(given, plan, device_mesh, args, kwargs)
        return _run(names, ShardedSession(names, parallel, original, plan, device_mesh))

    with capturing_once(None if names.SEED % 4 == 0 else graph):
        results = run_ranks(mesh.size, one)
    return [Seen([], result) if isinstance(result, BaseException) else result for result in results]


def _model(names: Any, noise: Noise = NO_NOISE) -> Any:
    torch.manual_seed(0)
    return names.Model(Maker(7, noise))


def _run(names: Any, session: Session) -> Seen:
    try:
        names.train(session)
    except Exception as error:
        return Seen(session.seen, error)
    return Seen(session.seen, None)


@contextmanager
def capturing_once(graph: CapturedGraph | None) -> Iterator[None]:
    """One rank checks the plan's strategies for all and, where there is no graph yet, captures: both are slow, and
    dynamo knows no threads. What operators make is asked once for all ranks, which write their programs one after
    another: a mode without values knows no threads either. A model with parametrizations every rank captures itself,
    one after another: torch makes a class for each such module, which the model of another rank does not have.
    """
    lock = threading.Lock()
    captured: list[CapturedGraph | Exception] = [] if graph is None else [graph]
    checked: list[Exception | None] = []
    real_check, known = autoshard.apply.check_strategies, Results()

    def capture_once(model: Any, *args: Any, **options: Any) -> CapturedGraph:
        with lock:
            if any(map(is_parametrized, model.modules())):
                return capture(model, *args, **options)
            if not captured:
                try:
                    captured.append(capture(model, *args, **options))
                except Exception as error:
                    captured.append(error)
        graph = captured[0]
        if isinstance(graph, Exception):
            raise graph
        assert graph.guards is not None
        return replace(graph, guards=graph.guards.on(model))

    def check_once(plan: ShardingPlan, graph: CapturedGraph) -> None:
        with lock:
            if not checked:
                try:
                    real_check(plan, graph)
                    checked.append(None)
                except Exception as error:
                    checked.append(error)
        if checked[0] is not None:
            raise checked[0]

    def lower_knowing(*given: Any, **options: Any) -> LocalProgram:
        with lock:
            return lower(*given, **options, known=known)

    with (
        patch("autoshard.apply.capture", capture_once),
        patch("autoshard.apply.check_strategies", check_once),
        patch("autoshard.apply.lower", lower_knowing),
        patch("autoshard.lowering.backwards.lower", lower_knowing),
    ):
        yield


@contextmanager
def one_after_another() -> Iterator[None]:
    """Ranks capture, check and write programs as they are, where several plans are to be: one rank at a time."""
    lock = threading.Lock()

    def locked(function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*given: Any, **options: Any) -> Any:
            with lock:
                return function(*given, **options)

        return run

    with ExitStack() as stack:
        for name in ("apply.capture", "apply.check_strategies", "apply.lower", "lowering.backwards.lower"):
            where, _, what = name.rpartition(".")
            function = getattr(import_module(f"autoshard.{where}"), what)
            stack.enter_context(patch(f"autoshard.{name}", locked(function)))
        yield


def _compare(expected: Seen, found: Seen, tolerance: float) -> Verdict:
    if isinstance(found.error, PeerFailed):
        return Verdict("", "another rank says more")
    difference = _first_difference(expected, found, tolerance)
    if difference:
        return Verdict("wrong", difference)
    if isinstance(found.error, AutoshardError):
        return _refusal(found.error)
    if expected.error is not None:
        if found.error is None:
            return Verdict("accepted", f"one process raises {_text(expected.error)}, the ranks do not")
        if isinstance(found.error, RuntimeError | type(expected.error)):
            return Verdict("both raise", _text(expected.error))
    if found.error is not None:
        kind = "torch" if _is_of_an_optimizer(found.error) else "foreign"
        return Verdict(kind, f"a rank raised {_text(found.error)}")
    if len(expected.records) != len(found.records):
        return Verdict("wrong", f"{len(found.records)} values were seen, {len(expected.records)} in one process")
    return Verdict("equal")


def _is_of_an_optimizer(error: BaseException) -> bool:
    """Whether torch's optimizers refuse DTensors of this kind, with nothing of autoshard's running."""
    files = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
    return any("/torch/optim/" in file for file in files) and not any("/autoshard/" in file for file in files)


def _refusal(error: AutoshardError) -> Verdict:
    cause = error.__cause__
    if "VerificationError" in f"{type(error).__name__}: {error}":
        return Verdict("foreign", f"a plan made of the planner's own strategies was refused: {error}")
    if not str(error).strip():
        return Verdict("foreign", f"{type(error).__name__} without a text")
    if isinstance(cause, AttributeError | KeyError | IndexError | AssertionError | NotImplementedError | TypeError):
        return Verdict("foreign", f"a {type(error).__name__} that repeats {_text(cause)}")
    return Verdict("refused", f"{type(error).__name__}: {error}")


def _first_difference(expected: Seen, found: Seen, tolerance: float) -> str:
    for (name, theirs), (other, ours) in zip(expected.records, found.records):
        if ours == [ABSENT]:
            continue
        if name != other:
            return f"{other!r} was seen where one process has {name!r}"
        difference = _difference(theirs, ours, tolerance)
        if difference:
            return f"{name}: {difference}"
    return ""


def _difference(theirs: Any, ours: Any, tolerance: float) -> str:
    """In words, or empty."""
    if isinstance(theirs, set):
        return f"{sorted(ours - theirs)}" if ours - theirs else ""
    for k, (a, b) in enumerate(zip(theirs, ours)):
        if isinstance(a, torch.Tensor) != isinstance(b, torch.Tensor) or (not isinstance(a, torch.Tensor) and a != b):
            return f"leaf {k} is {_short(b)}, in one process {_short(a)}"
        if isinstance(a, torch.Tensor):
            if (a.shape, a.dtype) != (b.shape, b.dtype):
                return f"leaf {k} is {b.dtype}{list(b.shape)}, in one process {a.dtype}{list(a.shape)}"
            if (by := distance(a, b)) > tolerance:
                return f"leaf {k} differs by {by:.3g}: it is {_short(b)}, in one process {_short(a)}"
    return ""


def distance(a: torch.Tensor, b: torch.Tensor) -> float:
    """The largest difference as a share of the largest number, or of 1; infinite where it has no size."""
    if not (a.is_floating_point() or a.is_complex()):
        return 0.0 if torch.equal(a, b) else float("inf")
    wide = torch.complex128 if a.is_complex() else torch.float64  # torch compares no complex numbers of half precision
    a, b = a.to(wide), b.to(wide)
    if not a.numel() or torch.equal(a, b):
        return 0.0
    same = (a == b) | (a.isnan() & b.isnan())
    if not bool((same | (a.isfinite() & b.isfinite())).all()):
        return float("inf")
    a, b = a.where(~same, 0), b.where(~same, 0)
    return float((a - b).abs().max()) / max(1.0, float(a.abs().max()))


def _overflows(names: Any, expected: Seen) -> bool:
    """Whether one process has a number that is too large for float16."""
    leaves = (leaf for _, value in expected.records if not isinstance(value, set) for leaf in value)
    halves = (leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.is_floating_point())
    return names.PRECISION == "float16" and not all(bool(leaf.isfinite().all()) for leaf in halves)


def _is_unstable(names: Any, expected: Seen, found: list[Seen]) -> bool:
    """Whether noise of the size of rounding changes what one process sees about as much as the ranks differ from it."""
    tolerance = TOLERANCE[names.PRECISION]
    shaken = [eager(names, Noise(NOISE[names.PRECISION], k)) for k in range(SHAKES)]
    if any((s.error is None) != (expected.error is None) or len(s.records) != len(expected.records) for s in shaken):
        return True
    if any(seen.error is None and len(seen.records) != len(expected.records) for seen in found):
        return False
    for seen in found:
        for k, ((_, theirs), (_, ours)) in enumerate(zip(expected.records, seen.records)):
            if not _difference(theirs, ours, tolerance):
                continue
            if isinstance(theirs, set):
                return False
            if not all(_within(theirs, ours, [s.records[k][1] for s in shaken])):
                return False
    return True


def _within(theirs: list[Any], ours: list[Any], shaken: list[list[Any]]) -> Iterator[bool]:
    for n, (a, b) in enumerate(zip(theirs, ours)):
        if not isinstance(a, torch.Tensor) or not isinstance(b, torch.Tensor) or a.shape != b.shape:
            yield a is b or a == b
            continue
        yield distance(a, b) <= UNSTABLE * max(distance(a, other[n]) for other in shaken)


def _short(value: Any) -> str:
    text = " ".join(str(value).split())
    return text if len(text) < 160 else f"{text[:160]}..."


def _text(error: BaseException) -> str:
    return f"{type(error).__name__}: {_short(error)}"
