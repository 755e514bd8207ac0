"""Plans kept on disk: asked the same again, ``plan`` gives the same bytes, without capture and solver.

What the key of a plan holds, and why nothing stale is served: ``docs/decisions/0011-plans-kept-on-disk.md``.
"""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Callable, Mapping
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from .disk_cache import disk_cache
from .errors import PlanFileError, StrategyWarning
from .plans import ShardingPlan, dump_plan, parse_plan

_SOURCES = ("autoshard", "solver", "cost_models")
_SOLVERS = ("ortools", "highspy", "pulp", "numpy")


def kept_plan(
    asked: Mapping[str, object],
    model_key: Callable[[], str | None],
    make: Callable[[], ShardingPlan],
    keeps: Callable[[ShardingPlan], bool],
    report: Callable[[str], None] = lambda stage: None,
) -> ShardingPlan:
    """The plan that was made of the same before, or one that is made now and kept.

    Args:
        asked: all that a plan depends on beside the model and the versions of packages; equal values print alike.
        model_key: a text for the model and its arguments; None where there is no telling whether they are the same.
        keeps: whether a plan is to be kept.
        report: called with the name of the stage as it starts.

    Warns:
        StrategyWarning: those with which the plan was made; a kept one comes with the same.
    """
    plans = disk_cache("plans", _versions())
    if plans is not None:
        report("looking for a plan that was kept")
    of_model = model_key() if plans is not None else None
    if plans is None or of_model is None:
        return make()
    key = json.dumps([of_model, {name: str(value) for name, value in asked.items()}])
    found = _read(plans.get(key))
    if found is not None:
        plan, said = found
    else:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", StrategyWarning)
            plan = make()
        said = [str(each.message) for each in caught if issubclass(each.category, StrategyWarning)]
        for each in caught:
            if not issubclass(each.category, StrategyWarning):
                warnings.warn_explicit(each.message, each.category, each.filename, each.lineno)
        if keeps(plan):
            plans.put(key, json.dumps({"plan": dump_plan(plan), "warnings": said}).encode())
    for text in said:
        warnings.warn(text, StrategyWarning, stacklevel=3)
    return plan


def _read(entry: bytes | None) -> tuple[ShardingPlan, list[str]] | None:
    if entry is None:
        return None
    try:
        document = json.loads(entry)
        return parse_plan(document["plan"], "a plan of the cache"), document["warnings"]
    except (ValueError, KeyError, TypeError, PlanFileError):  # not what this version writes: made anew
        return None


@cache
def _versions() -> str:
    """The code of autoshard, file by file, and the versions of what solves; capture knows those of Python and torch."""
    digest = hashlib.sha256()
    root = Path(__file__).parent.parent
    for path in sorted(path for package in _SOURCES for path in (root / package).rglob("*.py")):
        digest.update(f"{path.relative_to(root)}\n".encode() + path.read_bytes())
    return f"{digest.hexdigest()} {[_version(package) for package in _SOLVERS]}"


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "-"
