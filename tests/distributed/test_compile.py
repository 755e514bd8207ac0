"""``torch.compile(m, fullgraph=True)`` of a parallel module on real processes: what was planned runs, compiled."""

from __future__ import annotations

import shutil
from collections import Counter

import torch
from torch._dynamo.utils import counters

import autoshard

from . import cases
from .harness import run_ranks
from .parity import Differences, both, full, planned_collectives, relative, worst_parameter

CASE, AXES, STEPS = "mlp odd", "dp=2,tp=2", 3


def _trained(text: str) -> dict[str, tuple[Differences, list[int]]]:
    """By backend: how far a compiled module is from one process, and how many graphs dynamo had made after each step.

    AssertionError where a step's collectives are not those of the plan.
    """
    torch._inductor.config.compile_threads = 1  # no pool of processes for each rank
    found = {}
    for backend in ("aot_eager", "inductor"):
        plan, parallel, reference, mesh = both(CASE, text)
        compiled = torch.compile(parallel, fullgraph=True, backend=backend)
        ours, theirs = (torch.optim.AdamW(m.parameters(), lr=1e-3) for m in (parallel, reference))
        seen, graphs, before = Differences(), [], counters["stats"]["unique_graphs"]
        for step in range(STEPS):
            batch = cases.batch(CASE, step)
            with autoshard.measure_collectives(mesh) as log:
                loss, expected = compiled(*autoshard.shard_inputs(plan, mesh, *batch)), reference(*batch)
                loss.backward()
            assert Counter(log.records) == planned_collectives(plan), log.records
            expected.backward()
            seen.loss = max(seen.loss, relative(full(loss), expected))
            for parameter, other in zip(parallel.parameters(), reference.parameters()):
                assert parameter.grad.placements == parameter.placements
                seen.gradient = max(seen.gradient, relative(full(parameter.grad), other.grad))
            for optimizer in (ours, theirs):
                optimizer.step()
                optimizer.zero_grad()
            graphs.append(counters["stats"]["unique_graphs"] - before)
        seen.parameter = worst_parameter(parallel, reference)
        found[backend] = seen, graphs
    return found


def test_a_compiled_module_trains_as_one_process_in_one_graph_with_the_planned_collectives() -> None:
    assert shutil.which("g++"), "inductor needs a C++ compiler: install g++"
    text = autoshard.dump_plan(cases.sharded_plan(CASE, AXES))
    for found in run_ranks(4, _trained, text, timeout_s=240.0, group_timeout_s=200.0):
        for backend, (seen, graphs) in found.items():
            assert seen.within(1e-5), (backend, seen)
            assert len(set(graphs)) == 1, (backend, graphs)
