"""What a precision policy makes of a plan: gathers halved, gradients reduced in one dtype, buckets, memory."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autoshard
import cost_models
from autoshard.capture import CapturedGraph, Ref, capture, micro_batched
from autoshard.constraints import gather_constraints
from autoshard.errors import CaptureError, PlanMismatchError
from autoshard.lowering import check_graph
from autoshard.mesh import Mesh
from autoshard.planning import formulate, interpret
from autoshard.plans import Redistribution, ShardingPlan, summarize
from autoshard.plans.schedule import schedule, sent
from autoshard.plans.views.show import headline
from autoshard.precision import AS_IT_IS, Precision
from solver import solve
from tests import models
from tests.one_process import measured

FSDP = ("family dp=fsdp",)
WIDE: dict[str, Any] = {"param_dtype": "bfloat16", "reduce_dtype": "float32"}
NARROW: dict[str, Any] = {"param_dtype": torch.bfloat16}


@cache
def planned(**options: Any) -> ShardingPlan:
    model, args = models.gpt2(n_layers=2)
    return autoshard.plan(model, args, mesh="dp=4", hardware="cpu-gloo", constraints=FSDP, **options)


def sizes(plan: ShardingPlan, *kinds: str) -> list[int]:
    """Bytes of the collectives of these kinds, but for those of scalars."""
    return sorted(each.size_bytes for each in sent(plan) if each.kind in kinds and each.size_bytes > 4)


def test_gathers_are_halved_and_gradients_are_reduced_in_their_dtype():
    halved = [size // 2 for size in sizes(planned(), "all_gather")]
    assert halved == sizes(planned(**WIDE), "all_gather") == sizes(planned(**NARROW), "all_gather")
    reductions = ("reduce_scatter", "all_reduce")
    assert sizes(planned(**WIDE), *reductions) == sizes(planned(), *reductions)
    assert sizes(planned(**NARROW), *reductions) == [size // 2 for size in sizes(planned(), *reductions)]


def test_casts_travel_in_the_buckets_of_their_parameters():
    whole, wide, narrow = (
        [len(bucket.members) for bucket in schedule(planned(**given)).buckets] for given in ({}, WIDE, NARROW)
    )
    assert len(whole) > 1 and max(whole) > 1 and whole == wide == narrow


class Fused(nn.Module):
    """One projection that is cut into three: its gradient is joined of three."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(16, 48, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        parts = [x @ part.t() for part in self.qkv.weight.chunk(3)]
        return (parts[0] * parts[1].tanh() + parts[2].relu()).float().square().mean()


def reductions_in(graph: CapturedGraph, plan: ShardingPlan, dtype: torch.dtype) -> list[Redistribution]:
    """The redistributions that reduce what is no scalar in a dtype."""
    refs = [Ref(i, k) for i, node in enumerate(graph.nodes) for k, meta in enumerate(node.outputs) if meta]
    metas = {graph.tensor_name(ref): graph.meta(ref) for ref in refs}
    kinds = {"all_reduce", "reduce_scatter"}
    return [
        entry
        for entry in plan.redistributions
        if any(each.kind in kinds for each in entry.collectives)
        and metas[entry.tensor].shape
        and metas[entry.tensor].dtype is dtype
    ]


def test_a_gradient_is_not_reduced_before_its_cast_although_that_is_cheaper():
    precision = Precision.of("bfloat16", "float32")
    graph = capture(Fused(), (torch.zeros(1 << 16, 16),), precision=precision)
    mesh, profile = Mesh.parse("dp=4"), cost_models.load_profile("cpu-gloo")
    found = []
    for given in (graph, replace(graph, precision=AS_IT_IS)):
        program = formulate(given, mesh, profile, constraints=gather_constraints(("x=dp:S(0)",), mesh).values)
        found.append(interpret(program, solve(program.problem), profile, "fused", ""))
    under, free = found
    assert reductions_in(graph, under, torch.float32) and not reductions_in(graph, under, torch.bfloat16)
    assert reductions_in(graph, free, torch.bfloat16) and free.solver.cost_ns < under.solver.cost_ns


@pytest.mark.parametrize("reduce_dtype", ["float32", "bfloat16"])
def test_micro_batches_add_up_in_the_dtype_of_the_parameter(reduce_dtype: str):
    model, args = models.mlp_loss()
    graph = micro_batched(capture(model, args, precision=Precision.of("bfloat16", reduce_dtype)), 2)
    assert {graph.meta(ref).dtype for _, ref in graph.gradients} == {torch.float32}
    added = {graph.meta(ref).dtype for _, total in graph.gradients for ref in graph.nodes[total.node].inputs}
    assert added == {torch.float32}


@pytest.mark.parametrize("policy", [WIDE, NARROW])
def test_memory_is_what_a_rank_measures(policy: dict[str, Any]):
    plan = planned(**policy)
    assert plan.memory is not None
    log = measured(*models.gpt2(n_layers=2), plan, "adamw")
    assert log.peak_bytes == plan.memory.peak.size_bytes


def test_the_plan_file_has_the_policy_and_a_model_in_another_dtype_is_refused():
    plan = planned(**WIDE)
    assert autoshard.parse_plan(autoshard.dump_plan(plan)) == plan
    model, args = models.gpt2(n_layers=2)
    with pytest.raises(PlanMismatchError, match="parameters as bfloat16, gradients reduced as float32"):
        check_graph(plan, capture(model, args))
    with pytest.raises(PlanMismatchError, match=r"is float32\[.*\] in the plan and bfloat16\["):
        check_graph(plan, capture(model.bfloat16(), args, precision=plan.precision))
    with pytest.raises(ValueError, match="unknown reduce_dtype 'int8'; choose one of bfloat16"):
        planned(reduce_dtype="int8")


@pytest.mark.parametrize(
    ("policy", "said"),
    [({"reduce_dtype": "float32"}, None), (NARROW, "precision: a step computes with parameters as bfloat16")],
)
def test_of_a_forward_alone_nothing_is_said_of_gradients(policy: dict[str, Any], said: str | None):
    model, args = models.mlp()
    plan = autoshard.plan(model, args, mesh="dp=2", hardware="cpu-gloo", evaluation=True, **policy)
    lines = headline(summarize(plan))
    assert next((line for line in lines if line.startswith("precision")), None) == said
    assert "; parameters " in lines[-1] and "gradients" not in lines[-1] and "adamw" not in lines[-1]


def test_buffers_stay_as_they_are_and_a_parameter_as_result_is_refused():
    class Scaled(nn.Linear):
        def forward(self, x: Tensor) -> Any:
            scaled = super().forward(x) * self.scale
            return (scaled.mean(), self.weight) if self.gives_weight else scaled.mean()

    model = Scaled(4, 4)
    model.register_buffer("scale", torch.ones(4))
    for model.gives_weight in (False, True):
        if model.gives_weight:
            with pytest.raises(CaptureError, match="result 1 of the model is its parameter weight itself"):
                capture(model, (torch.zeros(2, 4),), precision=Precision.of("bfloat16"))
        else:
            graph = capture(model, (torch.zeros(2, 4),), precision=Precision.of("bfloat16"))
            dtypes = {node.name: node.outputs[0].dtype for node in graph.nodes if node.outputs[0]}
            assert (dtypes["scale"], dtypes["x"], dtypes["/cast_x"]) == (torch.float32, torch.float32, torch.bfloat16)
            assert dtypes["/addmm"] is torch.bfloat16 and dtypes["/mul"] is torch.float32
