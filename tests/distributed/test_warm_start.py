"""A job that starts again reads the graph of its model instead of capturing it, and trains as before."""

from __future__ import annotations

import os
from importlib import import_module
from pathlib import Path

import autoshard
from autoshard.errors import PlanMismatchError

from . import cases
from .harness import caught, run_ranks
from .parity import check_parity, device_mesh_of

CASE = "llama of 1"
LIMIT = 1e-4  # as of any plan


def _start(folder: str, plan_text: str) -> tuple[int, bool, tuple[str, str]]:
    """A start of one rank: how often it traces the model, whether it trains as one process does, and what it says of a
    number that changes.
    """
    os.environ["AUTOSHARD_CACHE"] = folder
    captures = import_module("autoshard.capture.capture")
    runs, trace = [], captures.trace

    def traced(*args: object) -> object:
        runs.append(args)
        return trace(*args)

    captures.trace = traced
    plan = autoshard.parse_plan(plan_text)
    mesh = device_mesh_of(plan)
    model, _ = cases.make(CASE)
    reference, _ = cases.make(CASE)
    parallel = autoshard.parallelize(model, plan, mesh)
    found = check_parity(CASE, plan_text, mesh, steps=2, pair=(parallel, reference))
    parallel.layers[0].attention.n_heads += 1
    inputs = autoshard.shard_inputs(plan, mesh, *cases.batch(CASE, 0))
    return len(runs), found.within(LIMIT), caught(lambda: parallel(*inputs))


def test_the_second_start_captures_nothing_and_notices_what_the_first_does(tmp_path: Path) -> None:
    text = autoshard.dump_plan(cases.sharded_plan(CASE, "dp=2,tp=2"))
    first, second = (run_ranks(4, _start, str(tmp_path / "cache"), text, timeout_s=120.0) for _ in range(2))
    assert any(runs for runs, *_ in first)
    assert [runs for runs, *_ in second] == [0] * 4
    for _, is_right, (error, said) in (*first, *second):
        assert is_right
        assert error == PlanMismatchError.__name__
        assert "model.layers.0.attention.n_heads == " in said, said
    assert second[0][2] == first[0][2]
