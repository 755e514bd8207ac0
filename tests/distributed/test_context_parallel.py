"""Context parallelism on real processes: memory as planned, every operator as planned, uneven blocks of positions."""

from __future__ import annotations

import pytest

import autoshard

from . import cases
from .harness import run_ranks
from .planned_run import PlannedRun, run_planned

LIMIT = 1e-4  # as in test_parity


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "axes", "name"),
    [
        ("llama of a row", "cp=4", "cp"),
        pytest.param("llama of two rows", "dp=2,cp=2", "fsdp+cp", marks=pytest.mark.thorough),
        pytest.param("gpt2 of two rows", "dp=2,cp=2", "ddp+cp", marks=pytest.mark.thorough),
    ],
)
def test_a_step_runs_and_holds_what_the_plan_says(case: str, axes: str, name: str) -> None:
    """Seven positions on four ranks and on two; the last rank has fewer and holds no more than is planned."""
    plan = cases.baseline_plan(case, axes, name)
    runs: list[PlannedRun] = run_ranks(4, run_planned, case, autoshard.dump_plan(plan), timeout_s=200.0)
    print(f"{case} on {axes}, {name}: {[f'{run.off:+.1%}' for run in runs]}")
    assert all(run.runs_as_planned and run.difference <= LIMIT for run in runs)
    assert all(run.measured_bytes <= run.predicted_bytes for run in runs)
