"""A plan on real processes against the same training in one process."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

import autoshard
from autoshard.lowering.placements import placements_of
from autoshard.mesh import Mesh
from autoshard.plans import ShardingPlan
from autoshard.plans.schedule import sent

from . import cases

STEPS = 3
_ADAMW = partial(torch.optim.AdamW, lr=1e-3)


@dataclass
class Differences:
    """The largest relative differences seen: max |a - b| / max |b| of one tensor; kind and axis of every collective,
    in the order in which this rank issued them.
    """

    loss: float = 0.0
    gradient: float = 0.0
    parameter: float = 0.0
    issued: tuple[tuple[str, str], ...] = ()

    def within(self, limit: float) -> bool:
        return max(self.loss, self.gradient, self.parameter) <= limit


def are_in_one_order(ranks: Sequence[Differences]) -> bool:
    """Whether all ranks issued their collectives in the order of the first, so that none waits for another for ever."""
    return len({seen.issued for seen in ranks}) == 1


def relative(ours: Tensor, reference: Tensor) -> float:
    scale = reference.detach().abs().max().item()
    return (ours - reference).detach().abs().max().item() / max(scale, 1e-30)


def device_mesh_of(plan: ShardingPlan | Mesh) -> DeviceMesh:
    mesh = plan if isinstance(plan, Mesh) else plan.mesh
    return init_device_mesh("cpu", mesh.shape, mesh_dim_names=mesh.axes)


def full(value: Tensor) -> Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value


def determined(name: str, value: Tensor) -> Tensor:
    """The part of a parameter that training determines: all of it, but for the keys' part of a fused bias, as GPT-2
    and ``nn.MultiheadAttention`` have.

    A bias of the keys adds the same to all scores of a query, so its gradient is zero but for rounding, and Adam
    divides rounding by rounding: two orders of summation in one process disagree there as well.
    """
    if not name.endswith(("c_attn.bias", "in_proj_bias")):
        return value
    query, _, values = value.chunk(3)
    return torch.cat((query, values))


def worst_parameter(parallel: nn.Module, reference: nn.Module) -> float:
    """The largest relative difference of two modules' parameters."""
    pairs = zip(parallel.named_parameters(), reference.named_parameters(), strict=True)
    return max(relative(determined(n, full(ours)), determined(n, theirs)) for (n, ours), (_, theirs) in pairs)


def planned_collectives(plan: ShardingPlan) -> Counter[tuple[str, str, int]]:
    return Counter((c.kind, c.axis, c.size_bytes) for c in sent(plan))


def both(case: str, plan_text: str) -> tuple[ShardingPlan, nn.Module, nn.Module, DeviceMesh]:
    """The plan, the parallel module, the same model for one process, and the mesh."""
    plan = autoshard.parse_plan(plan_text)
    mesh = device_mesh_of(plan)
    model, _ = cases.make(case)
    reference = deepcopy(model)
    return plan, autoshard.parallelize(model, plan, mesh), reference, mesh


def check_parity(
    case: str,
    plan_text: str,
    mesh: DeviceMesh | None = None,
    steps: int = STEPS,
    pair: tuple[nn.Module, nn.Module] | None = None,
    optimizer: Callable[..., torch.optim.Optimizer] = _ADAMW,
) -> Differences:
    """Trains on this rank and in one process; ``pair`` are the parallel module and the other, made here by default, and
    ``optimizer`` makes the optimizers of their parameters.

    AssertionError where parameters are not DTensors placed as planned under their FQNs, gradients are not in their
    parameter's placements, or a step's collectives are not those of the plan.
    """
    plan = autoshard.parse_plan(plan_text)
    mesh = mesh or device_mesh_of(plan)
    if pair is None:
        model, _ = cases.make(case)
        reference = deepcopy(model)
        parallel = autoshard.parallelize(model, plan, mesh)
    else:
        parallel, reference = pair
    assert [name for name, _ in parallel.named_parameters()] == [name for name, _ in reference.named_parameters()]
    layouts = {entry.name: placements_of(entry.layout) for entry in plan.parameters}
    ours, theirs = (optimizer(m.parameters()) for m in (parallel, reference))
    seen = Differences()
    for step in range(steps):
        batches = [cases.batch(case, step * plan.micro_batches + k) for k in range(plan.micro_batches)]
        losses = []
        with autoshard.measure_collectives(mesh) as log:
            for batch in batches:
                losses.append(parallel(*autoshard.shard_inputs(plan, mesh, *batch)))
                losses[-1].backward()
        assert Counter(log.records) == planned_collectives(plan), "executed and planned collectives differ"
        seen.issued += tuple((kind, axis) for kind, axis, _ in log.records)
        for batch, loss in zip(batches, losses):
            expected = reference(*batch)
            expected.backward()
            seen.loss = max(seen.loss, relative(full(loss), expected))
        for (name, parameter), other in zip(parallel.named_parameters(), reference.parameters()):
            assert isinstance(parameter, DTensor) and parameter.placements == layouts[name], name
            assert isinstance(parameter.grad, DTensor) and parameter.grad.placements == parameter.placements, name
            seen.gradient = max(seen.gradient, relative(full(parameter.grad), other.grad))
        for each in (ours, theirs):
            each.step()
            each.zero_grad()
    seen.parameter = worst_parameter(parallel, reference)
    return seen
