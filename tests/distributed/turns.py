"""What every rank of a job makes alike is made once: one rank captures and checks, the others read what it has kept.

On two cores, eight ranks that capture at the same time take as long as if they did so one after the other, and captures
and checks were two thirds of what ranks computed. The tests of this folder share what they keep, too, from one run to
the next and with the process that plans (:mod:`tests.distributed.conftest`); elsewhere nothing is kept beyond a run.
"""

from __future__ import annotations

import fcntl
import functools
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_map_only

from autoshard import api, apply
from autoshard.apply import code_digest
from autoshard.capture import CapturedGraph, capture
from autoshard.disk_cache import VARIABLE, DiskCache
from autoshard.planning import Planner, planner
from autoshard.plans import ShardingPlan
from autoshard.strategies import Rulebook

_SHARED = ((api, "capture"), (apply, "capture"), (apply, "check_once"), (planner, "capture"))
"""None of these waits for another rank, and a rank that fails or dies in one gives its turn to the next."""

kept: Path | None = None
"""Where runs of ranks keep what they make; by default each in a folder of its own."""

_rules = Rulebook()
model_key = sys.modules["autoshard.capture.model_key"]  # the package has a function of that name


def take_turns(folder: str, cache: str) -> None:
    """From now on this process captures and checks while no other with the same folder does, and reads what they have
    kept in the cache.
    """
    global kept
    os.environ[VARIABLE], kept = cache, Path(cache)
    for module, name in _SHARED:
        setattr(module, name, _in_turn(getattr(module, name), f"{folder}/turn"))
    for owner, name, value in _ALIKE:
        setattr(owner, name, value)


def share(folder: Path, patch: pytest.MonkeyPatch) -> None:
    """As long as the patch lasts, plans of this process are made from graphs that are kept for ranks, with rules that
    are checked once, and checked as ranks check them.
    """
    patch.setattr(f"{__name__}.kept", folder)
    patch.setattr(planner, "capture", capture_once)
    patch.setattr(Planner, "plan", _and_checked(Planner.plan))
    for owner, name, value in _ALIKE:
        patch.setattr(owner, name, value)


def capture_once(
    model: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None, **options: Any
) -> CapturedGraph:
    """A capture as ranks make it, of arguments on the meta device, read or kept where they do."""
    if kept is None:
        return capture(model, args, kwargs, **options)
    args, kwargs = tree_map_only(torch.Tensor, lambda given: given.to("meta"), (args, kwargs))
    graphs = DiskCache(kept / "graphs", made_by=code_digest())
    return capture(model, args, kwargs, **options, guarded=True, graphs=graphs)


def check_in_advance(plan: ShardingPlan, graph: CapturedGraph) -> None:
    """Checks a plan as a rank does, which reads that it was right: here all rules are known."""
    if kept is not None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv(VARIABLE, str(kept))
            apply.check_once(plan, graph)


def _and_checked(make: Callable[..., ShardingPlan]) -> Callable[..., ShardingPlan]:
    def planned(self: Planner, *args: Any, **kwargs: Any) -> ShardingPlan:
        plan = make(self, *args, **kwargs)
        if not plan.recomputed:  # else its graph is another
            check_in_advance(plan, self.graph)
        return plan

    return planned


def _as_one(rulebook: Rulebook) -> None:
    """All rulebooks are one: rules depend on operators alone, of which no test here changes any."""
    rulebook.__dict__ = _rules.__dict__


def _no_files(model: object) -> tuple[()]:
    """A key names the files of all modules that a process has, which differ between processes; none changes here."""
    return ()


_ALIKE = ((Rulebook, "__init__", _as_one), (model_key, "_files", _no_files))
"""What is the same in all processes of a run of pytest."""


def _in_turn(function: Callable[..., Any], path: str) -> Callable[..., Any]:
    @functools.wraps(function)
    def waits(*args: Any, **kwargs: Any) -> Any:
        with open(path, "w") as turn:
            fcntl.flock(turn, fcntl.LOCK_EX)
            return function(*args, **kwargs)

    return waits
