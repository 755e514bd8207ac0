"""Rows of an embedding cut over the vocabulary, on real processes: parity with one process, collectives as planned."""

from __future__ import annotations

import pytest

import autoshard
from autoshard.layout import format_layout
from autoshard.mesh import Mesh
from autoshard.plans import ShardingPlan

from . import cases
from .harness import run_ranks
from .parity import check_parity

LIMIT = 1e-4  # as in test_parity


def _plan(case: str, axes: str, pins: list[str]) -> ShardingPlan:
    model, args = cases.make(case)
    return autoshard.plan(model, args, mesh=Mesh.parse(axes), hardware=cases.slow_machine(), pins=pins)


def _layout(plan: ShardingPlan, name: str) -> str:
    (entry,) = (entry for entry in plan.operators if entry.name == name)
    assert entry.outputs[0] is not None
    return format_layout(entry.outputs[0], plan.mesh)


def _moved(plan: ShardingPlan, tensor: str) -> set[str]:
    return {c.kind for entry in plan.redistributions if entry.tensor == tensor for c in entry.collectives}


def _check(case: str, plan: ShardingPlan) -> None:
    results = run_ranks(plan.mesh.size, check_parity, case, autoshard.dump_plan(plan), timeout_s=120.0)
    assert all(seen.within(LIMIT) for seen in results), results


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "axes", "table", "module"),
    [
        ("llama", "dp=2,tp=2", "tok_embeddings.weight", "tok_embeddings"),
        ("llama odd", "tp=3", "tok_embeddings.weight", "tok_embeddings"),
        ("llama of 1", "a=2,b=2", "tok_embeddings.weight", "tok_embeddings"),
    ],
)
def test_each_rank_looks_up_the_rows_that_it_has(case: str, axes: str, table: str, module: str) -> None:
    """Vocabularies of 64 and 101, cut over one axis, over three ranks, over two axes; nothing of the table moves."""
    last = axes.split(",")[-1].partition("=")[0]
    cut = "a:S(0) b:S(0)" if last == "b" else f"{last}:S(0)"
    partial = cut.replace("S(0)", "P(sum)")
    plan = _plan(case, axes, [f"{table}={cut}", f"{module}/embedding={partial}"])
    assert not _moved(plan, table)
    assert _moved(plan, f"{module}/embedding") <= {"all_reduce", "reduce_scatter"} != set()
    _check(case, plan)
