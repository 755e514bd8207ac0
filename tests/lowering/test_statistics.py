"""Norms of half precision on a device that keeps their statistics in float32, as CUDA does and a CPU does not.

Lowering needs no values, and so no such device: shapes and dtypes are those that torch states for it.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from itertools import islice
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn.utils.parametrizations import weight_norm

from autoshard.capture import CapturedGraph, capture, recomputed
from autoshard.lowering import LocalProgram, Rank, lower
from autoshard.lowering.adapter import WAIT, collective_name
from autoshard.mesh import Mesh
from autoshard.plans import ShardingPlan

from ..fuzz.random_plans import random_plans
from ..models import gpt2

SEEDS, PLANS = 4, 3
HALVES = (torch.bfloat16, torch.float16)
BACKWARDS = {"native_layer_norm_backward": (3, 4), "native_batch_norm_backward": (5, 6)}
"""The positions of statistics among the arguments."""


class Norms(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mix = weight_norm(nn.Conv2d(4, 4, 1))
        self.batch, self.group, self.layer = nn.BatchNorm2d(4), nn.GroupNorm(2, 4), nn.LayerNorm(4)
        self.batch.train()

    def forward(self, x: Tensor) -> Tensor:
        x = self.group(self.batch(self.mix(x)))
        return self.layer(x).float().square().mean()


def norms() -> tuple[nn.Module, tuple[Tensor, ...]]:
    torch.manual_seed(0)
    return Norms().bfloat16(), (torch.randn(4, 4, 4, 4, dtype=torch.bfloat16),)


MODELS = {"gpt2": lambda: gpt2(dtype=torch.bfloat16, n_layers=1), "norms": norms}


@cache
def _graph(name: str) -> CapturedGraph:
    return capture(*MODELS[name]())


@pytest.mark.parametrize("name", ["norms", pytest.param("gpt2", marks=pytest.mark.thorough)])
def test_statistics_are_kept_in_float32_and_travel_as_planned(name: str) -> None:
    """Where nothing of a plan is known but that it may be made: all kinds of redistribution meet statistics."""
    graph, mesh = _graph(name), Mesh.parse("a=2,b=2")
    model, args = MODELS[name]()
    read, narrowed = 0, 0
    for seed in range(SEEDS):
        for plan in islice(random_plans(graph, mesh, seed, model, args, {}), PLANS):
            here, there = (_lowered(graph, plan, device) for device in ("cpu", "cuda"))
            assert _sent(here) == _sent(there)
            for node in _nodes(there):
                for statistic in _statistics(node):
                    assert statistic.meta["val"].dtype is torch.float32
                    read += 1
                narrowed += _is_narrowed_statistic(node)
    assert read and narrowed


def _lowered(graph: CapturedGraph, plan: ShardingPlan, device: str) -> LocalProgram:
    rank = Rank((0, 0), torch.device(device), {link: link for link in plan.links})
    return lower(recomputed(graph, plan.recomputed), plan, rank)


def _nodes(program: LocalProgram) -> Iterator[fx.Node]:
    assert program.backward is not None
    for local in (program.forward, program.backward):
        yield from local.graph.nodes


def _sent(program: LocalProgram) -> list[tuple[Any, ...]]:
    sent = [node for node in _nodes(program) if collective_name(node) is not None and node.target is not WAIT]
    return [(collective_name(node), str(node.args[-1]), node.all_input_nodes[0].meta["val"].nbytes) for node in sent]


def _name(node: fx.Node) -> str:
    return node.target._schema.name.partition("::")[2] if isinstance(node.target, torch._ops.OpOverload) else ""


def _statistics(node: fx.Node) -> list[fx.Node]:
    positions = BACKWARDS.get(_name(node), ())
    return [statistic for k in positions if isinstance(statistic := node.args[k], fx.Node)]


def _is_narrowed_statistic(node: fx.Node) -> bool:
    if _name(node) != "_to_copy" or node.kwargs.get("dtype") not in HALVES:
        return False
    made = node.all_input_nodes[0]
    return made.op == "placeholder" or "norm" in _name(made.all_input_nodes[0])
