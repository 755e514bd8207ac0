"""A model with an annotation, run by real processes: as planned, and as one process would run it."""

from __future__ import annotations

from collections import Counter

import pytest

import autoshard

from ..capture.test_annotation import Annotated, X, planned
from .harness import run_ranks
from .parity import device_mesh_of, full, planned_collectives, relative


def _step(text: str, layout: str) -> tuple[float, bool, list[str]]:
    """The largest difference of loss and gradients, whether the collectives are the planned ones, and what ran."""
    plan = autoshard.parse_plan(text)
    mesh = device_mesh_of(plan)
    reference = Annotated(layout)
    parallel = autoshard.parallelize(Annotated(layout), plan, mesh)
    with autoshard.measure_collectives(mesh) as log:
        loss = parallel(*autoshard.shard_inputs(plan, mesh, X))
        loss.backward()
    expected = reference(X)
    expected.backward()
    pairs = [(full(loss), expected)]
    pairs += [(full(p.grad), q.grad) for p, q in zip(parallel.parameters(), reference.parameters())]
    ran = [str(node.target) for node in parallel._autoshard.plans[0].program.forward.graph.nodes]
    return max(relative(*pair) for pair in pairs), Counter(log.records) == planned_collectives(plan), ran


@pytest.mark.parametrize(
    "layout",
    [*(pytest.param(each, marks=pytest.mark.thorough) for each in ("dp:S(0) tp:R", "tp:S(1)")), "dp:S(0) tp:S(0)"],
)
def test_an_annotated_model_trains_like_one_process_and_nothing_runs_for_the_annotation(layout: str) -> None:
    text = autoshard.dump_plan(planned(layout))
    for difference, as_planned, ran in run_ranks(4, _step, text, layout):
        assert difference <= 1e-5 and as_planned
        assert ran and not any("constrain" in target for target in ran)
