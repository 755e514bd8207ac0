"""Models of other kinds: loss outside, several results, made on the meta device, with batch norm."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import autoshard
from autoshard.lowering.placements import placements_of

from ..thorough import some_thorough
from . import cases
from .harness import run_ranks
from .parity import Differences, both, check_parity, device_mesh_of, full, relative

LIMIT = 1e-4
AXES = "dp=2,tp=2"


class Logits(nn.Module):
    """No loss inside: logits, and with them a number that is no tensor and a mean that needs no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = cases.make("mlp odd")[0]
        self.unused = nn.Parameter(torch.ones(3))
        self.frozen = nn.Parameter(torch.full((9,), 0.5), requires_grad=False)

    def forward(self, x: Tensor, *, scale: float) -> dict[str, Any]:
        hidden = F.relu(self.inner.up(x)) * scale
        logits = self.inner.down(hidden) * self.frozen
        return {"logits": logits, "hidden": hidden, "scale": scale, "mean": logits.detach().mean()}


def _logits() -> tuple[nn.Module, tuple[Tensor], Tensor]:
    torch.manual_seed(3)
    return Logits(), (torch.randn(7, 9),), torch.randint(0, 9, (7,))


def _loss_outside(plan_text: str) -> tuple[float, list[str]]:
    plan = autoshard.parse_plan(plan_text)
    mesh = device_mesh_of(plan)
    model, batch, target = _logits()
    reference = deepcopy(model)
    parallel = autoshard.parallelize(model, plan, mesh)
    out = parallel(*autoshard.shard_inputs(plan, mesh, *batch), scale=2.0)
    expected = reference(*batch, scale=2.0)
    assert out.keys() == expected.keys() and out["scale"] == 2.0
    worst = relative(full(out["mean"]), expected["mean"])
    layouts = {entry.name: placements_of(entry.layout) for entry in plan.outputs}
    for key in ("logits", "hidden"):
        assert isinstance(out[key], DTensor) and out[key].shape == expected[key].shape
        assert out[key].placements in layouts.values()
        worst = max(worst, relative(full(out[key]), expected[key]))
    for result in (out, expected):
        logits, hidden = full(result["logits"]), full(result["hidden"])
        (F.cross_entropy(logits, target) + hidden.square().mean()).backward()
    named = dict(parallel.named_parameters())
    for name, other in reference.named_parameters():
        assert (named[name].grad is None) == (other.grad is None), name
        assert named[name].requires_grad == other.requires_grad, name
        if other.grad is not None:
            assert named[name].grad.placements == named[name].placements, name
            worst = max(worst, relative(full(named[name].grad), other.grad))
    return worst, [str(entry.layout) for entry in plan.outputs]


ROWS = ["dp:S(0) tp:S(1)", "dp:S(1) tp:S(0)", "dp:R tp:S(1)", "dp:R tp:R"]


@pytest.mark.parametrize("rows", some_thorough(ROWS, ["dp:S(1) tp:S(0)"]))
def test_loss_outside_of_the_model(rows: str):
    model, batch, _ = _logits()
    pins = [f"output.0={rows}", f"output.1={rows}"]
    plan = autoshard.plan(model, batch, {"scale": 2.0}, mesh=AXES, hardware=cases.slow_machine(), pins=pins)
    results = run_ranks(4, _loss_outside, autoshard.dump_plan(plan))
    assert max(worst for worst, _ in results) <= LIMIT, results


def _from_meta(plan_text: str, case: str) -> Differences:
    """Builds on the meta device, shards, allocates, initialises, then trains as the same weights do in one process."""
    plan = autoshard.parse_plan(plan_text)
    mesh = device_mesh_of(plan)
    real, _ = cases.make(case)
    with torch.device("meta"):
        model = type(real)(real.config)
    parallel = autoshard.parallelize(model, plan, mesh)
    assert all(p.is_meta for p in parallel.parameters())
    parallel.to_empty(device="cpu")
    for module in (model, real):
        module.init_weights(seed=5)
    for ours, theirs in zip(parallel.parameters(), real.parameters(), strict=True):
        assert isinstance(ours, DTensor) and torch.equal(full(ours), theirs)
    with torch.no_grad():  # the first forward makes copies alike, with collectives of its own
        parallel(*autoshard.shard_inputs(plan, mesh, *cases.batch(case, 0)))
    return check_parity(case, plan_text, mesh, pair=(parallel, real))


@pytest.mark.parametrize("case", ["llama of 1", pytest.param("gpt2 small", marks=pytest.mark.thorough)])
def test_model_on_the_meta_device(case: str):
    plan = cases.sharded_plan(case, AXES)
    results = run_ranks(4, _from_meta, autoshard.dump_plan(plan), case)
    assert all(seen.within(LIMIT) for seen in results), results


def _batch_norm(plan_text: str) -> float:
    plan, parallel, reference, mesh = both("conv", plan_text)
    worst = 0.0
    for step in range(3):
        batch = cases.batch("conv", step)
        parallel(*autoshard.shard_inputs(plan, mesh, *batch)).backward()
        reference(*batch).backward()
        ours, theirs = dict(parallel.named_buffers()), dict(reference.named_buffers())
        assert list(ours) == list(theirs)
        worst = max(worst, *(relative(full(ours[name]).float(), theirs[name].float()) for name in ours))
    assert int(full(dict(parallel.named_buffers())["norm.num_batches_tracked"])) == 3
    return worst


@pytest.mark.filterwarnings("ignore::autoshard.errors.StrategyWarning")  # not every torch has a right convolution rule
@pytest.mark.parametrize("seed", some_thorough([None, 0, 1], [1]))
def test_batch_norm_statistics_are_those_of_the_whole_batch(seed: int | None):
    pins = ["image=dp:S(0) tp:R"]
    model, args = cases.make("conv")
    plan = (
        autoshard.plan(model, args, mesh=AXES, hardware=cases.slow_machine(), pins=pins)
        if seed is None
        else cases.random_plan("conv", AXES, seed)
    )
    assert max(run_ranks(4, _batch_norm, autoshard.dump_plan(plan))) <= LIMIT
