"""A model under a plan against the model as it was: loss, gradients and buffers of one step, on simulated ranks."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import autoshard
from autoshard.capture import capture
from autoshard.plans import ShardingPlan

from ..fuzz.judge import capturing_once
from ..fuzz.ranks import run_ranks


def check_as_before(
    model: nn.Module,
    args: tuple[Tensor, ...],
    plan: ShardingPlan,
    *,
    rtol: float,
    atol: float,
    batch: tuple[Tensor, ...] | None = None,
) -> None:
    """Every rank's step under the plan is that of the model.

    Args:
        batch: what the step is of; the example by default.

    Raises:
        AssertionError: something of it differs by more than the tolerances; what a rank raises comes as it is.
    """
    given = args if batch is None else batch
    expected = _seen(copy.deepcopy(model), given)
    for found in steps(model, args, plan, given):
        if isinstance(found, BaseException):
            raise found
        assert found.keys() == expected.keys()
        for name, theirs in expected.items():
            torch.testing.assert_close(
                found[name], theirs, rtol=rtol, atol=atol, msg=lambda text, n=name: f"{n}: {text}"
            )


def steps(
    model: nn.Module, args: tuple[Tensor, ...], plan: ShardingPlan, batch: tuple[Tensor, ...]
) -> list[dict[str, Tensor] | BaseException]:
    """What every rank sees of a step of a batch under a plan that was made with example arguments, or raises."""
    models = [copy.deepcopy(model) for _ in range(plan.mesh.size)]

    def one(rank: int) -> dict[str, Tensor]:
        mesh = init_device_mesh("cpu", plan.mesh.shape, mesh_dim_names=plan.mesh.axes)
        parallel = autoshard.parallelize(models[rank], plan, mesh, args)
        return _seen(parallel, autoshard.shard_inputs(plan, mesh, *batch))

    with capturing_once(capture(model, args, guarded=True)):
        return run_ranks(plan.mesh.size, one)


def _seen(model: nn.Module, args: tuple[Tensor, ...]) -> dict[str, Tensor]:
    loss = model(*args)
    loss.backward()
    seen = {"loss": loss.detach()} | {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    seen |= {f"{name} itself": value.detach() for name, value in (*model.named_parameters(), *model.named_buffers())}
    return {name: getattr(value, "full_tensor", lambda value=value: value)() for name, value in seen.items()}
