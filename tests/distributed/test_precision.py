"""Precision policies on real processes: trained as casts in one process, with the collectives of the plan."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

import autoshard
from autoshard.plans import ShardingPlan

from . import cases
from .harness import run_ranks
from .parity import Differences, check_parity, device_mesh_of

FSDP = ("family dp=fsdp",)
# A step is exact but for the order of summation: that of float32 here, where float64 computes. What bfloat16 leaves
# is a few roundings to 8 bits; 0.023 is the largest difference seen.
LIMITS = {"float64": 1e-5, "bfloat16": 0.05}


class CastOnce:
    """A model whose parameters and arguments are cast before every call: what a policy means, in one process."""

    def __init__(self, model: nn.Module, dtype: torch.dtype) -> None:
        self._model, self._dtype = model, dtype

    def __call__(self, *args: Tensor) -> Any:
        cast = {name: self._cast(parameter) for name, parameter in self._model.named_parameters()}
        return functional_call(self._model, cast, tuple(map(self._cast, args)), tie_weights=True)

    def _cast(self, value: Tensor) -> Tensor:
        return value.to(self._dtype) if value.is_floating_point() else value

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        return self._model.named_parameters()

    def parameters(self) -> Iterator[nn.Parameter]:
        return self._model.parameters()


def planned(case: str, axes: str, constraints: tuple[str, ...] = (), **options: Any) -> ShardingPlan:
    model, args = cases.make(case)
    return autoshard.plan(model, args, mesh=axes, hardware=cases.slow_machine(), constraints=constraints, **options)


def trained(case: str, text: str) -> Differences:
    plan = autoshard.parse_plan(text)
    mesh = device_mesh_of(plan)
    parallel = autoshard.parallelize(cases.make(case)[0], plan, mesh)
    reference: Any = CastOnce(cases.make(case)[0], getattr(torch, plan.precision.param_dtype or "float32"))
    sgd = torch.optim.SGD
    return check_parity(case, text, mesh, 2, (parallel, reference), lambda given: sgd(given, lr=0.1))


@pytest.mark.parametrize(
    ("case", "axes", "constraints", "param_dtype", "reduce_dtype", "micro_batches"),
    [
        ("gpt2", "dp=4", FSDP, "bfloat16", "float32", 1),
        pytest.param("gpt2", "dp=4", FSDP, "bfloat16", "bfloat16", 1, marks=pytest.mark.thorough),
        pytest.param("llama of 1", "dp=4", FSDP, "float64", "float32", 2, marks=pytest.mark.thorough),
        pytest.param(
            "llama odd", "dp=2,tp=2", ("tokens=dp:S(0)",), "float64", "float64", 1, marks=pytest.mark.thorough
        ),
        ("mlp", "dp=4", ("x=dp:S(0)",), "bfloat16", "float32", 2),
    ],
)
def test_a_policy_trains_as_casts_in_one_process_do_and_communicates_as_planned(
    case: str, axes: str, constraints: tuple[str, ...], param_dtype: str, reduce_dtype: str, micro_batches: int
):
    options = {"param_dtype": param_dtype, "reduce_dtype": reduce_dtype, "micro_batches": micro_batches}
    plan = planned(case, axes, constraints, **options)
    results = run_ranks(plan.mesh.size, trained, case, autoshard.dump_plan(plan), timeout_s=120.0)
    assert all(seen.within(LIMITS[param_dtype]) for seen in results), results
