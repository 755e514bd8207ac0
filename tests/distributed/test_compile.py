"""``torch.compile(m, fullgraph=True)`` of a parallel module on real processes: what was planned runs, compiled."""

from __future__ import annotations

import shutil
from collections import Counter

import pytest
import torch
from torch._dynamo.utils import counters
from torch.distributed.tensor import DTensor

import autoshard

from . import cases
from .harness import run_ranks
from .parity import Differences, both, full, planned_collectives, relative, worst_parameter

CASE, STEPS = "mlp", 3


def _trained(text: str) -> tuple[Differences, list[int]]:
    """How far a module that inductor compiles is from one process, and how many graphs there were after each step.

    AssertionError where a step's collectives are not those of the plan.
    """
    torch._inductor.config.compile_threads = 1  # no pool of processes for each rank
    plan, parallel, reference, mesh = both(CASE, text)
    compiled = torch.compile(parallel, fullgraph=True)
    ours, theirs = (torch.optim.AdamW(m.parameters(), lr=1e-3) for m in (parallel, reference))
    seen, graphs = Differences(), []
    for step in range(STEPS):
        batch = cases.batch(CASE, step)
        with autoshard.measure_collectives(mesh) as log:
            loss, expected = compiled(*autoshard.shard_inputs(plan, mesh, *batch)), reference(*batch)
            loss.backward()
        assert Counter(log.records) == planned_collectives(plan), log.records
        expected.backward()
        seen.loss = max(seen.loss, relative(full(loss), expected))
        for parameter, other in zip(parallel.parameters(), reference.parameters()):
            assert isinstance(parameter.grad, DTensor) and isinstance(parameter, DTensor) and other.grad is not None
            assert parameter.grad.placements == parameter.placements
            seen.gradient = max(seen.gradient, relative(full(parameter.grad), other.grad))
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad()
        graphs.append(counters["stats"]["unique_graphs"])
    seen.parameter = worst_parameter(parallel, reference)
    return seen, graphs


@pytest.mark.parametrize(("axes", "ranks"), [("tp=2", 2), pytest.param("dp=2,tp=2", 4, marks=pytest.mark.thorough)])
def test_a_compiled_module_trains_as_one_process_in_one_graph_with_the_planned_collectives(
    axes: str, ranks: int
) -> None:
    assert shutil.which("g++"), "inductor needs a C++ compiler: install g++"
    text = autoshard.dump_plan(cases.sharded_plan(CASE, axes))
    for seen, graphs in run_ranks(ranks, _trained, text, timeout_s=240.0, group_timeout_s=200.0):
        assert seen.within(1e-5), seen
        assert len(set(graphs)) == 1, graphs
