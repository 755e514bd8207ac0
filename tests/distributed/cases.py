"""Models of the distributed tests, and plans that shard them for certain."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import autoshard
import cost_models
from autoshard.capture import CapturedGraph, call_text, recomputed
from autoshard.constraints.baselines import baseline
from autoshard.mesh import Mesh
from autoshard.planning import formulate, interpret
from autoshard.plans import ShardingPlan
from autoshard.plans.schedule import BUCKET_BYTES
from examples import llama, moe, vit
from solver import INFEASIBLE, solve

from .. import models
from ..fused_models import crossed, fused
from .turns import capture_once, check_in_advance

Example = tuple[nn.Module, tuple[Any, ...]]


class MLP(models.MLP):
    """A model with its loss; the loss is written out."""

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return (super().forward(x) - target).square().mean()


class Checkpointed(MLP):
    """The same, whose first half is marked to be computed again."""

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        hidden = checkpoint(lambda y: self.up(y).relu().sin(), x, use_reentrant=False)
        return (self.down(hidden) - target).square().mean()


def checkpointed() -> Example:
    torch.manual_seed(0)
    return Checkpointed(16, 32), (torch.randn(8, 16), torch.randn(8, 16))


def mlp(batch: int, width: int, hidden: int) -> Example:
    torch.manual_seed(0)
    return MLP(width, hidden), (torch.randn(batch, width), torch.randn(batch, width))


def _filled(factory: Callable[[], Example], largest: int) -> Example:
    """An example with random inputs, whole numbers below ``largest``."""
    model, args = factory()
    generator = torch.Generator().manual_seed(2)
    return model, tuple(
        torch.randn(x.shape, generator=generator)
        if x.is_floating_point()
        else torch.randint(0, largest, x.shape, generator=generator)
        for x in args
    )


SIZES_ODD: dict[str, Any] = {"batch": 7, "vocab_size": 101, "n_layers": 1, "d_model": 90, "n_heads": 6}
SIZES_EVEN: dict[str, Any] = {"batch": 8, "vocab_size": 64, "d_model": 32, "n_heads": 8, "max_sequence": 8}

CASES: dict[str, Callable[[], Example]] = {
    "mlp": lambda: mlp(batch=8, width=16, hidden=32),
    "mlp odd": lambda: mlp(batch=7, width=9, hidden=13),
    "llama": lambda: models.llama(**SIZES_EVEN, n_layers=2, n_kv_heads=4, d_ffn=48),
    "llama of 1": lambda: models.llama(**SIZES_EVEN, n_layers=1, n_kv_heads=4, d_ffn=48),
    "llama odd": lambda: models.llama(**SIZES_ODD, n_kv_heads=3, d_ffn=50, max_sequence=13),
    "llama small": lambda: models.llama(batch=5, n_layers=1, d_model=12, n_heads=2, n_kv_heads=1, d_ffn=9),
    "llama of a row": lambda: models.llama(batch=1, n_layers=1, max_sequence=7),
    "llama of two rows": lambda: models.llama(batch=2, n_layers=1, max_sequence=7),
    "gpt2 of two rows": lambda: models.gpt2(batch=2, n_layers=1, max_sequence=7),
    "gpt2": lambda: models.gpt2(**SIZES_EVEN),
    "fused": lambda: fused(layers=1),
    "fused 2:1:1": lambda: fused("split", groups=4, layers=1),
    "fused 4:1:1": lambda: fused("ranges", groups=2, layers=1),
    "crossed": lambda: crossed(layers=1),
    "gpt2 odd": lambda: models.gpt2(**SIZES_ODD, max_sequence=13),
    "gpt2 small": lambda: models.gpt2(batch=5, n_layers=1),
    "gpt2 dropout": lambda: models.gpt2(batch=8, dropout=0.1),
    "moe": models.moe,
    "assorted": models.assorted,
    "assorted odd": lambda: models.assorted(batch=5, length=7),
    "conv": models.conv,
    "blocks": models.blocks,
    "checkpointed": checkpointed,
    "demo": lambda: _filled(llama.demo, 256),
    "vit": lambda: _filled(vit.tiny, 10),
    "routed": lambda: _filled(moe.tiny, 256),
}

_BATCH = {
    "mlp": ("x", "target"),
    "llama": ("tokens", "targets"),
    "gpt2": ("tokens", "targets"),
    "fused": ("tokens", "targets"),
}
_SHARDED = {
    "mlp": ["*/relu=dp:S(0) tp:S(1)", "down.weight=dp:S(0) tp:S(1)"],
    "llama": [
        "layers.*.attention/attention=dp:S(0) tp:S(1)",
        "layers.*.feed_forward/silu=dp:S(0) tp:S(2)",
        "layers.*.feed_forward.w2.weight=dp:S(0) tp:S(1)",
        "tok_embeddings.weight=tp:S(0)",
    ],
    "gpt2": [
        "h.*.attn/attention=dp:S(0) tp:S(1)",
        "h.*.mlp/gelu=dp:S(0) tp:S(2)",
        "h.*.mlp.c_proj.weight=dp:S(0) tp:S(1)",
        "wte.weight=tp:S(0)",
    ],
}


def make(case: str) -> Example:
    """A fresh model with fixed weights, and the batch of one step."""
    return CASES[case]()


@cache
def graph(case: str) -> CapturedGraph:
    """The captured graph of a case, captured once per test run."""
    return capture_once(*make(case))


def batch(case: str, step: int) -> tuple[torch.Tensor, ...]:
    """Another full batch for each step, the same on every rank."""
    generator = torch.Generator().manual_seed(100 + step)
    return tuple(
        torch.randn(x.shape, generator=generator)
        if x.is_floating_point()
        else torch.randint(0, int(x.max()) + 1, x.shape, generator=generator)
        for x in make(case)[1]
    )


def pins(case: str, mesh: Mesh, without: str = "") -> list[str]:
    """Inputs cut over dp, heads and MLP columns over tp, one weight over dp like FSDP; axes the mesh lacks left out."""
    family = case.split()[0]
    wanted = [*(f"{name}=dp:S(0)" for name in _BATCH[family]), *_SHARDED[family]]
    result = []
    for pin in wanted:
        name, _, layout = pin.partition("=")
        entries = [entry for entry in layout.split() if entry.partition(":")[0] in mesh.axes]
        if entries and not (without and without in name):
            result.append(f"{name}={' '.join(entries)}")
    return result


def slow_machine() -> cost_models.Profile:
    """A machine as much slower than a real one as these models are smaller than real ones: its optimum is sharded."""
    profile = cost_models.load_profile("cpu-gloo")
    compute = profile.compute
    slow = replace(
        compute,
        launch_s=0.0,
        memory_bandwidth_bytes_per_s=compute.memory_bandwidth_bytes_per_s / 1e4,
        peak_flops_per_s={dtype: rate / 1e4 for dtype, rate in compute.peak_flops_per_s.items()},
    )
    return replace(profile, name="slow-machine", compute=slow)


def optimum(case: str, axes: str, hardware: str | cost_models.Profile) -> ShardingPlan:
    """The optimum without pins."""
    model, args = make(case)
    return autoshard.plan(model, args, mesh=axes, hardware=hardware)


@cache
def sharded_plan(case: str, axes: str, without: str = "", constraints: tuple[str, ...] = ()) -> ShardingPlan:
    """The optimum of the slow machine under :func:`pins`, except those whose name contains ``without``."""
    mesh = Mesh.parse(axes)
    model, args = make(case)
    return autoshard.plan(
        model, args, mesh=mesh, hardware=slow_machine(), pins=pins(case, mesh, without), constraints=constraints
    )


def baseline_plan(
    case: str, axes: str, name: str, hardware: str | cost_models.Profile = "dgx-h100", constraints: Sequence[str] = ()
) -> ShardingPlan:
    """The plan of a baseline, under further constraints."""
    mesh = Mesh.parse(axes)
    model, args = make(case)
    families = baseline(name, mesh).constraints(mesh)
    return autoshard.plan(model, args, mesh=mesh, hardware=hardware, constraints=(*families, *constraints))


def slow_network() -> cost_models.Profile:
    """A machine on whose links every byte counts, however small the tensor."""
    profile = cost_models.load_profile("dgx-h100")
    assert isinstance(profile.network, cost_models.Hosts)
    link = replace(profile.network.intra_host, bandwidth_bytes_per_s=1e7, alternatives=())
    return replace(profile, network=replace(profile.network, intra_host=link))


def slow_starts() -> cost_models.Profile:
    """A machine on which a collective takes as long as any other, however large it is, and over however many axes."""
    profile = cost_models.load_profile("dgx-h100")
    assert isinstance(profile.network, cost_models.Hosts)
    link = replace(profile.network.intra_host, launch_s=1e-3, latency_s=0.0, alternatives=())
    return replace(profile, network=replace(profile.network, intra_host=link))


BUCKETS = (BUCKET_BYTES, 500, 0)
"""Of random plans: everything that may travels together, a little of it, nothing."""


@cache
def random_plan(case: str, axes: str, seed: int, again: float = 0.0) -> ShardingPlan:
    """A plan in which every operator has a strategy drawn at random among those that can be joined up.

    again: the share of the forward's operators, drawn at random too, that the backward computes again.
    """
    draw = np.random.default_rng(seed)
    model, args = make(case)
    profile = cost_models.load_profile("cpu-gloo")
    names = [node.name for _, node in graph(case).of_kind("operator") if node.phase == "forward"]
    again_too = recomputed(graph(case), {name for name in names if again and draw.random() < again})
    formulation = formulate(again_too, Mesh.parse(axes), profile, tie_layers=False)
    problem = formulation.problem
    nodes = [
        replace(n, costs=np.where(n.costs >= INFEASIBLE, INFEASIBLE, draw.integers(0, 1_000_000, n.costs.shape)))
        for n in problem.nodes
    ]
    networks = [replace(network, costs=np.zeros_like(network.costs)) for network in problem.networks]
    drawn = solve(replace(problem, nodes=tuple(nodes), networks=tuple(networks)))
    solution = replace(drawn, bound=0)
    plan = interpret(formulation, solution, profile, case, call_text(model, args, {}))
    plan = replace(plan, bucket_bytes=BUCKETS[seed % len(BUCKETS)])
    check_in_advance(plan, again_too)
    return plan
