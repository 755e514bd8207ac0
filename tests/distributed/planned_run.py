"""What a rank makes of a plan: memory against its own prediction, parity with one process, executed against planned."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import nn

import autoshard
from autoshard.planning.timeline import timeline
from autoshard.plans import ShardingPlan
from cost_models import optimizer_policy

from . import cases
from .operators import executed_operators, planned_operators
from .parity import both, check_parity, device_mesh_of

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
    plan, parallel, reference, mesh = both(case, text)
    pair = parallel, reference
    seen = check_parity(case, text, mesh, STEPS, pair, partial(torch.optim.SGD, lr=LR))
    same = executed_operators(case, plan, parallel) == planned_operators(plan)
    at = tuple(mesh.get_coordinate() or ())
    predicted = timeline(cases.graph(case), plan, optimizer_policy("adamw"), at).peak.size_bytes
    measured = peak_of(case, plan, parallel)
    return PlannedRun(predicted, measured, max(seen.loss, seen.gradient, seen.parameter), same)


def peak_of(case: str, plan: ShardingPlan, parallel: nn.Module) -> int:
    """The measured peak of this rank in the last of STEPS steps."""
    mesh = device_mesh_of(plan)
    parallel.zero_grad()
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
    return log.peak_bytes
