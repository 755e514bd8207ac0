"""A vocabulary cut over ranks, on real processes: rows of the embedding, columns of the head, and the loss.

Parity with one process, collectives and memory as planned.
"""

from __future__ import annotations

import pytest

import autoshard
from autoshard.mesh import Mesh
from autoshard.plans import ShardingPlan

from . import cases
from .harness import run_ranks
from .parity import check_parity
from .planned_run import PlannedRun, run_planned

LIMIT = 1e-4  # as in test_parity


def _plan(case: str, axes: str, pins: list[str]) -> ShardingPlan:
    model, args = cases.make(case)
    return autoshard.plan(model, args, mesh=Mesh.parse(axes), hardware=cases.slow_machine(), pins=pins)


def _moved(plan: ShardingPlan, tensor: str) -> set[str]:
    return {c.kind for entry in plan.redistributions if entry.tensor == tensor for c in entry.collectives}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "axes", "cut"),
    [
        ("llama odd", "tp=3", "tp:S(0)"),
        pytest.param("llama of 1", "a=2,b=2", "a:S(0) b:S(0)", marks=pytest.mark.thorough),
    ],
)
def test_each_rank_looks_up_the_rows_that_it_has(case: str, axes: str, cut: str) -> None:
    """Vocabularies of 101 and 64, cut over three ranks and over two axes; nothing of the table moves."""
    table, found = "tok_embeddings.weight", "tok_embeddings/embedding"
    plan = _plan(case, axes, [f"{table}={cut}", f"{found}={cut.replace('S(0)', 'P(sum)')}"])
    assert not _moved(plan, table)
    assert _moved(plan, found) <= {"all_reduce", "reduce_scatter"} != set()
    results = run_ranks(plan.mesh.size, check_parity, case, autoshard.dump_plan(plan), timeout_s=120.0)
    assert all(seen.within(LIMIT) for seen in results), results


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "axes", "table", "head"),
    [
        ("llama", "dp=2,tp=2", "tok_embeddings", "output"),
        pytest.param("demo", "dp=2,tp=2", "tok_embeddings", "output", marks=pytest.mark.thorough),
        pytest.param("gpt2", "dp=2,tp=2", "wte", "", marks=pytest.mark.thorough),
        ("gpt2 odd", "tp=3", "wte", ""),
    ],
)
def test_table_head_and_loss_are_cut_along_the_vocabulary(case: str, axes: str, table: str, head: str) -> None:
    """GPT-2's table is its head, too; one of 101 rows over three ranks. Logits never move, numbers for rows do."""
    rows = "dp:S(0) " * ("dp" in axes)
    pins = [f"{name}.weight=tp:S(0)" for name in (table, head) if name]
    pins += [f"{table}/embedding={rows}tp:P(sum)", f"/gather={rows}tp:P(sum)"]
    pins += [f"{name}={rows}tp:S(1)" for name in ("/_log_softmax", "/bwd._log_softmax_backward_data")]
    plan = _plan(case, axes, pins)
    for name in ("/row_max", "/row_sum", "/bwd.row_total"):
        assert _moved(plan, name) == {"all_reduce"}
    for name in ("/gather", "/squeeze", "/neg"):  # addends of the targets' logits, until somewhere they are added up
        assert _moved(plan, name) <= {"all_reduce", "reduce_scatter"}
    for name in ("/_log_softmax", "/bwd.mul", "/bwd._log_softmax_backward_data"):
        assert not _moved(plan, name)
    runs: list[PlannedRun] = run_ranks(plan.mesh.size, run_planned, case, autoshard.dump_plan(plan), timeout_s=200.0)
    print(f"{case} on {axes}: {[f'{run.off:+.1%}' for run in runs]}")
    assert all(run.runs_as_planned and run.difference <= LIMIT for run in runs), runs
    assert all(run.measured_bytes <= run.predicted_bytes for run in runs), runs
