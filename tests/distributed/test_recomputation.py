"""What the backward computes again runs as planned, and trains as one process does that keeps everything."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from torch.utils._python_dispatch import TorchDispatchMode

import autoshard
from autoshard.plans import ShardingPlan

from . import cases
from .harness import run_ranks
from .parity import check_parity, device_mesh_of
from .test_parity import LIMIT

COUNTED = {"mm": "mm", "addmm": "mm", "bmm": "bmm", "silu": "silu", "gelu": "gelu"}
"""Operators that a rank runs once for each in the plan; of an addmm whose terms are partial sums the mm alone."""


class _Calls(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        role = func._schema.name.partition("::")[2]
        self.counts.update([COUNTED[role]] if role in COUNTED else [])
        return func(*args, **(kwargs or {}))


def _planned(plan: ShardingPlan) -> Counter[str]:
    roles = (entry.name.rpartition("/")[2] for entry in plan.execution)
    bare = (role.removeprefix("bwd.").removeprefix("again.").partition(".")[0] for role in roles)
    return Counter(COUNTED[role] for role in bare if role in COUNTED)


def _executed(case: str, text: str) -> Counter[str]:
    """The operators of one step of this rank."""
    plan = autoshard.parse_plan(text)
    mesh = device_mesh_of(plan)
    parallel = autoshard.parallelize(cases.make(case)[0], plan, mesh)
    shards = autoshard.shard_inputs(plan, mesh, *cases.batch(case, 0))
    with _Calls() as calls:
        parallel(*shards).backward()
    return calls.counts


def _trains(case: str, plan: ShardingPlan) -> None:
    results = run_ranks(plan.mesh.size, check_parity, case, autoshard.dump_plan(plan), timeout_s=120.0)
    assert all(seen.within(LIMIT) for seen in results), results


@pytest.mark.parametrize(("case", "layers"), [("llama", "layers.*"), ("gpt2", "h.*")])
def test_checkpointed_layers_run_as_planned_and_train_as_one_process_does(case: str, layers: str):
    kept = cases.sharded_plan(case, "dp=2,tp=2")
    plan = cases.sharded_plan(case, "dp=2,tp=2", constraints=(f"checkpoint {layers}",))
    assert plan.memory is not None and kept.memory is not None
    assert plan.memory.peak.size_bytes < kept.memory.peak.size_bytes
    planned = _planned(plan)
    assert planned.total() > _planned(kept).total()
    for executed in run_ranks(4, _executed, case, autoshard.dump_plan(plan)):
        assert executed == planned
    _trains(case, plan)


def test_what_the_planner_chooses_to_compute_again_runs_as_planned_and_fits():
    def planned(memory: int | None) -> ShardingPlan:
        model, args = cases.make("blocks")
        hardware = cases.slow_machine()
        return autoshard.plan(model, args, mesh="dp=2", hardware=hardware, memory=memory, checkpointing="free")

    kept = planned(None)
    assert kept.memory is not None and not kept.recomputed
    budget = int(0.85 * kept.memory.peak.size_bytes)
    plan = planned(budget)
    assert plan.memory is not None and plan.memory.peak.size_bytes <= budget
    assert plan.recomputed
    for executed in run_ranks(2, _executed, "blocks", autoshard.dump_plan(plan)):
        assert executed == _planned(plan)
    _trains("blocks", plan)


@pytest.mark.parametrize(
    ("case", "axes"), [("llama odd", "dp=2,tp=2"), ("gpt2 small", "tp=2"), ("assorted odd", "tp=3")]
)
def test_anything_may_be_computed_again_under_any_strategies(case: str, axes: str):
    plan = cases.random_plan(case, axes, seed=11, again=0.6)
    assert plan.recomputed
    _trains(case, plan)


def test_the_marks_of_the_model_count_unless_they_are_not_to():
    model, args = cases.make("checkpointed")
    as_marked = autoshard.plan(model, args, mesh="dp=2,tp=2", hardware="cpu-gloo")
    none = autoshard.plan(model, args, mesh="dp=2,tp=2", hardware="cpu-gloo", checkpointing="none")
    assert as_marked.recomputed and not none.recomputed
    assert as_marked.fingerprint == none.fingerprint
    for plan in (as_marked, none):
        _trains("checkpointed", plan)
