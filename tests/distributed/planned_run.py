"""What a rank makes of a plan: memory against its own prediction, parity with one process, executed against planned."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch

import autoshard
from autoshard.capture import capture
from autoshard.planning.timeline import timeline
from autoshard.plans import ShardingPlan
from cost_models import optimizer_policy

from . import cases
from .operators import executed_operators, planned_operators
from .parity import check_parity, device_mesh_of

STEPS = 3
LR = 0.1


@dataclass(frozen=True)
class PlannedRun:
    """One rank: the peak of its third step in bytes, the largest relative difference of a loss, a gradient or a
    parameter from one process, and whether it ran the operators of the plan, those that are computed again among them.
    """

    predicted_bytes: int
    measured_bytes: int
    difference: float
    runs_as_planned: bool

    @property
    def off(self) -> float:
        """Predicted over measured, less one."""
        return self.predicted_bytes / self.measured_bytes - 1


def run_planned(case: str, text: str) -> PlannedRun:
    """Trains a case under a plan, on this rank: with SGD for the numbers, with AdamW for the memory. A first step of
    AdamW is as long for a gradient that is nothing but rounding as for any other, so that parameters differ by it.

    AssertionError where the collectives of a step are not those of the plan (:mod:`tests.distributed.parity`).
    """
    plan = autoshard.parse_plan(text)
    seen = check_parity(case, text, steps=STEPS, optimizer=partial(torch.optim.SGD, lr=LR))
    predicted, measured = peak_of(case, plan)
    same = executed_operators(case, text) == planned_operators(plan)
    return PlannedRun(predicted, measured, max(seen.loss, seen.gradient, seen.parameter), same)


def peak_of(case: str, plan: ShardingPlan) -> tuple[int, int]:
    """Predicted and measured peak of this rank in the last of STEPS steps."""
    mesh = device_mesh_of(plan)
    model, args = cases.make(case)
    found = timeline(capture(model, args), plan, optimizer_policy("adamw"), tuple(mesh.get_coordinate() or ()))
    parallel = autoshard.parallelize(model, plan, mesh)
    optimizer = torch.optim.AdamW(parallel.parameters())
    for step in range(STEPS):
        batches = (cases.batch(case, step * plan.micro_batches + k) for k in range(plan.micro_batches))
        left = [tuple(x.clone() for x in autoshard.shard_inputs(plan, mesh, *batch)) for batch in batches]
        state = [value for each in optimizer.state.values() for value in each.values() if torch.is_tensor(value)]
        with autoshard.measure_memory(*parallel.parameters(), *parallel.buffers(), *state) as log:
            while left:  # a batch counts from its first use until it is gone
                parallel(*left.pop()).backward()
            optimizer.step()
        optimizer.zero_grad()
    return found.peak.size_bytes, log.peak_bytes
