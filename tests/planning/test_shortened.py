"""The course of a step by way of a shortened one against that of the whole step, moment by moment."""

from __future__ import annotations

import warnings
from collections import Counter
from dataclasses import replace

import pytest

import autoshard
from autoshard.capture import micro_batched, recomputed
from autoshard.errors import StrategyWarning
from autoshard.lowering import Results
from autoshard.planning import interpret, timeline_of
from autoshard.planning.course import Course
from autoshard.planning.short_graph import NotPeriodicError
from autoshard.planning.shortened import shortened
from autoshard.planning.timeline import Timeline, _corners, _course, _courses, timeline
from autoshard.plans import ShardingPlan
from autoshard.plans.schedule import BUCKET_BYTES
from cost_models import optimizer_policy
from solver import solve

from ..plans_of import formulated, profile_of
from ..thorough import some_thorough
from .deep_models import DEEP_MODELS, drawn, graph_of

POLICY = optimizer_policy("adamw")


def plan_of(name: str, axes: str, given: int | str) -> ShardingPlan:
    """The best plan under a constraint, or one drawn at random that decides identical layers alike."""
    graph = graph_of(name)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", StrategyWarning)
        if isinstance(given, str):
            model, args = DEEP_MODELS[name]()
            constraints = [given] if given else []
            return autoshard.plan(
                model, args, mesh=axes, hardware=profile_of("slow"), constraints=constraints, cache=False
            )
        formulation = formulated(graph, axes, "slow")
    solution = solve(drawn(formulation.problem, given))
    return replace(interpret(formulation, solution, profile_of("slow"), name, ""), bucket_bytes=BUCKET_BYTES)


def check(name: str, plan: ShardingPlan, is_shortened: bool | None = None) -> None:
    """All that a rank makes, and when it lets go of it; then what people see of the fullest.

    A bucket with tensors of all layers has a view for each of them, which the course leaves out: they hold nothing.

    Args:
        is_shortened: whether it has to be, or must not; None where that is open.
    """
    known, whole = Results(), recomputed(micro_batched(graph_of(name), plan.micro_batches), plan.recomputed)
    steps, courses = shortened(whole, plan), None
    try:
        courses = _courses(whole, plan, known, steps) if steps else None
    except NotPeriodicError:
        assert not is_shortened
    assert is_shortened is None or is_shortened == (courses is not None)
    for corner, course in courses or ():
        assert any(step.long for step in steps) or _seen(course) == _seen(_course(whole, plan, corner, known))
    found = timeline_of(graph_of(name), plan, POLICY, known)
    every = [timeline(graph_of(name), plan, POLICY, corner, known) for corner in _corners(whole, plan)]
    assert found.peak.size_bytes == max(each.peak.size_bytes for each in every)
    assert any(_is_same(found, each) for each in every)


def _seen(course: Course) -> tuple[object, ...]:
    made = Counter((e.name, e.kind, e.size_bytes, e.first, e.last, e.is_held) for e in course.lifetimes)
    return list(course.moments), made, dict(course.saved)


def _is_same(a: Timeline, b: Timeline) -> bool:
    same = (a.points, a.at_peak, a.static) == (b.points, b.at_peak, b.static)
    return same and dict(a.saved) == dict(b.saved) and dict(a.kinds) == dict(b.kinds)


def on(plan: ShardingPlan, bucket_bytes: int, gathers_ahead: bool) -> ShardingPlan:
    """The plan on another schedule."""
    deferred = plan.deferred if bucket_bytes and gathers_ahead else ()
    return replace(plan, bucket_bytes=bucket_bytes, gathers_ahead=gathers_ahead, deferred=deferred)


PLANNED = [
    ("llama", "dp=2,tp=2", "", True),
    ("llama", "dp=2,tp=2", "checkpoint layers.*", True),
    ("llama", "dp=2,tp=2", "baseline fsdp+tp", None),
    ("llama bf16", "dp=4", "baseline fsdp", None),
    ("llama odd", "tp=3", "", True),
    ("gpt2", "dp=2", "baseline ddp", None),
    ("gpt2", "dp=2,tp=2", "baseline ddp+tp", None),
    ("chain", "tp=2", "", True),
    ("chain", "dp=4", "baseline fsdp", None),
    ("every second", "tp=2", "", True),
    ("one in three", "tp=2", "", True),
    ("two stacks", "tp=2", "", True),
    ("two stacks", "dp=2", "baseline fsdp", None),
    ("translator", "tp=2", "", True),
    ("dense", "tp=2", "", True),
    ("drops", "tp=3", "", True),
    ("shown", "tp=2", "", False),
    ("statistics", "dp=2", "", False),
    ("tied", "tp=2", "", False),
    ("unlike", "tp=2", "", False),
]
_SLOW = [
    ("llama", "dp=2,tp=2", "checkpoint layers.*"),
    ("llama odd", "tp=3", ""),
    ("gpt2", "dp=2,tp=2", "baseline ddp+tp"),
    ("drops", "tp=3", ""),
]
SCHEDULES = [(BUCKET_BYTES, True), (2000, True), (64, True), (900, False), (0, True)]
THOROUGH = {case for case in PLANNED if case[:3] in _SLOW}


@pytest.mark.parametrize(("name", "axes", "given", "is_shortened"), some_thorough(PLANNED, THOROUGH))
def test_what_layers_hold_that_are_the_same_is_known_from_a_few_of_them(
    name: str, axes: str, given: str, is_shortened: bool | None
) -> None:
    plan = plan_of(name, axes, given)
    check(name, on(plan, 0, True), is_shortened)
    for bucket_bytes, gathers_ahead in SCHEDULES:
        check(name, on(plan, bucket_bytes, gathers_ahead))


DRAWN = [
    ("chain", "tp=3", 1),
    ("every second", "dp=2,tp=2", 2),
    ("drops", "dp=2,tp=2", 3),
    ("two stacks", "tp=2", 4),
    ("dense", "dp=2,tp=2", 5),
    *((name, axes, seed) for name in ("llama", "gpt2") for axes in ("tp=3", "dp=2,tp=2") for seed in (6, 7)),
]


@pytest.mark.parametrize(("name", "axes", "seed"), some_thorough(DRAWN, {DRAWN[4], *DRAWN[6:]}))
def test_so_it_is_in_plans_drawn_at_random(name: str, axes: str, seed: int) -> None:
    plan = plan_of(name, axes, seed)
    for bucket_bytes, gathers_ahead in SCHEDULES:
        check(name, on(plan, bucket_bytes, gathers_ahead))
