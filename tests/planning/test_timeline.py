"""The timeline read off the local graphs against a watch of every storage while they run."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import torch

import autoshard
from autoshard.capture import capture
from autoshard.layout import local_shape
from autoshard.lowering import Results
from autoshard.mesh import Mesh
from autoshard.planning import interpret, outcome, timeline_of
from autoshard.planning.timeline import timeline
from autoshard.plans import ShardingPlan, dump_plan, parse_plan
from autoshard.plans.memory_outcome import MAX_POINTS, MAX_TENANTS
from autoshard.plans.schedule import schedule
from cost_models import optimizer_policy
from solver import solve

from .. import models
from ..distributed import cases
from ..one_process import measured
from ..plans_of import formulated, profile_of

# What torch holds and no plan knows: the gradient of the loss, a scalar.
LOSS_BYTES = 8

CASES = [
    ("mlp", "dp=2,tp=2", None, "adamw"),
    ("mlp odd", "dp=2,tp=2", 0, "sgd"),
    ("llama of 1", "dp=2,tp=2", None, "adamw"),
    pytest.param("llama odd", "dp=2,tp=2", 1, "sgd-momentum", marks=pytest.mark.thorough),
    pytest.param("gpt2", "dp=2,tp=2", None, "sgd", marks=pytest.mark.thorough),
    ("gpt2 odd", "tp=3", 2, "adamw"),
    ("moe", "dp=2,tp=2", 4, "adamw"),
    ("conv", "dp=4", 5, "sgd-momentum"),
]


@pytest.mark.filterwarnings("ignore::autoshard.errors.StrategyWarning")
@pytest.mark.parametrize(("case", "axes", "seed", "optimizer"), CASES, ids=lambda value: str(value))
def test_the_predicted_peak_is_the_measured_one_on_every_rank(
    case: str, axes: str, seed: int | None, optimizer: str
) -> None:
    """Plans of the slow machine under pins, and random ones; rank by rank, uneven shards included."""
    plan = cases.sharded_plan(case, axes) if seed is None else cases.random_plan(case, axes, seed)
    check_peaks(case, axes, plan, optimizer)


@pytest.mark.filterwarnings("ignore::autoshard.errors.StrategyWarning")
@pytest.mark.parametrize(
    ("case", "seed"), [("llama of 1", None), pytest.param("gpt2 odd", 7, marks=pytest.mark.thorough)]
)
def test_so_it_is_where_the_backward_computes_again(case: str, seed: int | None) -> None:
    axes, layers = "dp=2,tp=2", "layers.*" if "llama" in case else "h.*"
    kept = cases.sharded_plan(case, axes) if seed is None else cases.random_plan(case, axes, seed)
    again = (
        cases.sharded_plan(case, axes, constraints=(f"checkpoint {layers}",))
        if seed is None
        else cases.random_plan(case, axes, seed, again=0.7)
    )
    assert again.recomputed and not kept.recomputed
    check_peaks(case, axes, again, "sgd")


@pytest.mark.parametrize(("case", "name"), [("llama", "layers.*/silu"), ("gpt2", "h.*/gelu")])
def test_what_computing_again_saves_is_no_longer_held_at_the_turn(case: str, name: str) -> None:
    """Of operators whose inputs are kept in any case."""
    graph, policy = cases.graph(case), optimizer_policy("adamw")
    plans = [cases.baseline_plan(case, "dp=2", "ddp", constraints=given) for given in ((), (f"recompute {name}",))]
    layouts = [[entry for entry in plan.operators if entry.phase == "forward"] for plan in plans]
    assert layouts[0] == layouts[1]
    kept, again = (timeline_of(graph, replace(plan, bucket_bytes=0), policy) for plan in plans)
    turns = [[point for point in found.points if point.phase == "forward"][-1] for found in (kept, again)]
    assert not kept.saved
    assert set(again.saved) <= set(plans[1].recomputed)
    assert turns[0].size_bytes - turns[1].size_bytes == sum(again.saved.values()) > 0


def check_peaks(case: str, axes: str, plan: ShardingPlan, optimizer: str) -> None:
    """The timeline of every rank against what is measured: to the byte where nothing travels ahead.

    Works of torch's fake group hold nothing, those of gloo and NCCL hold what they send until they are waited for: so
    much more than is measured here is predicted where the schedule has something in flight. The first rank, whose
    shards are the largest, runs both ways, the last one with the schedule.
    """
    graph = cases.graph(case)
    mesh = Mesh.parse(axes)
    in_flight = sum(sorted(travel.size_bytes for bucket in schedule(plan).buckets for travel in bucket.travels)[-2:])
    peaks, known = [], Results()
    # DTensor caches the shard of the first rank that it sees of an uneven tensor; one process can only be that rank
    for rank in (0, mesh.size - 1) if case != "mlp odd" else (0,):
        coordinate = tuple(int(c) for c in torch.unravel_index(torch.tensor(rank), mesh.shape))
        ways = ((replace(plan, bucket_bytes=0), 0), (plan, in_flight))
        for each, most in ways if rank == 0 else ways[1:]:
            found = timeline(graph, each, optimizer_policy(optimizer), coordinate, known)
            log = measured(*cases.make(case), each, optimizer, rank)
            more = found.peak.size_bytes - log.peak_bytes
            assert -LOSS_BYTES <= more <= most + LOSS_BYTES, (rank, found.peak, log)
        peaks.append(found.peak.size_bytes)
    assert timeline_of(graph, plan, optimizer_policy(optimizer), known).peak.size_bytes >= max(peaks)


class Twins(torch.nn.Module):
    """Two parameters with one gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.v, self.w = (torch.nn.Parameter(torch.ones(64, 64)) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x @ (self.v + self.w)).square().mean()


def test_a_gradient_that_would_share_memory_is_copied_and_the_copy_is_counted() -> None:
    args = (torch.ones(2, 64),)
    graph = capture(Twins(), args)
    plan = autoshard.plan(Twins(), args, mesh="dp=2", hardware="cpu-gloo", pins=["x=dp:S(0)", "v=dp:R", "w=dp:R"])
    found = timeline(graph, plan, optimizer_policy("sgd"), (0,))
    log = measured(Twins(), args, plan, "sgd")
    assert abs(found.peak.size_bytes - log.peak_bytes) <= LOSS_BYTES, (found.peak, log)
    gradients = [tenant for tenant in found.at_peak if tenant.kind == "gradient"]
    assert sorted(tenant.name for tenant in gradients) == ["v", "w"]


def test_what_is_held_is_what_the_layouts_say_and_the_tenants_add_up() -> None:
    plan = cases.sharded_plan("llama", "dp=2,tp=2")
    graph = cases.graph("llama")
    found = timeline_of(graph, plan, optimizer_policy("adamw"))
    elements = [torch.Size(local_shape(e.shape, e.layout, plan.mesh, (0, 0))).numel() for e in plan.parameters]
    assert found.static["parameter"] == found.static["gradient"] == 4 * sum(elements)
    assert found.static["optimizer"] == 8 * sum(elements) + 4 * len(elements)
    stated = outcome(found, "adamw")
    assert stated.peak == found.peak == max(found.points, key=lambda point: point.size_bytes)
    assert sum(tenant.size_bytes for tenant in found.at_peak) == found.peak.size_bytes
    assert len(stated.tenants) <= MAX_TENANTS and stated.other_bytes >= 0
    sizes = [tenant.size_bytes for tenant in stated.tenants]
    assert sizes == sorted(sizes, reverse=True)
    assert any(tenant.name.startswith("layers.*.") and tenant.count == 2 for tenant in stated.tenants)


@pytest.mark.parametrize("layers", [1, 2, 5])
def test_the_course_in_the_file_does_not_grow_with_depth_and_keeps_its_peak(layers: int) -> None:
    graph = capture(*models.llama(n_layers=layers))
    formulation = formulated(graph, "dp=2", "slow", ("tokens=dp:S(0)",))
    plan = interpret(formulation, solve(formulation.problem), profile_of("slow"), "llama", "")
    found = timeline_of(graph, plan, optimizer_policy("adamw"))
    stated = outcome(found, "adamw", budget_bytes=1 << 40)
    assert len(stated.timeline) == min(MAX_POINTS, len(found.points))
    assert max(point.size_bytes for point in stated.timeline) == stated.peak.size_bytes
    order = {point: k for k, point in reversed(list(enumerate(found.points)))}
    assert all(order[a] <= order[b] for a, b in pairwise(stated.timeline))
    whole = replace(plan, memory=stated)
    assert parse_plan(dump_plan(whole)) == whole
