"""Models that are built without values: their own initialisation gives them those of one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import autoshard
from autoshard.errors import InputError
from autoshard.lowering.adapter import local_of

from ..one_process import one_rank
from . import cases
from .harness import caught, run_ranks
from .parity import device_mesh_of, full

MESH = "dp=2,tp=2"
PINS = (
    "first.weight=dp:R tp:S(0)",
    "deep.*.weight=dp:S(0) tp:S(1)",
    "second.weight=dp:S(0) tp:S(1)",
    "second.bias=dp:S(0) tp:R",
    "square=dp:S(1) tp:S(0)",
)
IDS = torch.arange(32).reshape(8, 4) % 30


class Model(nn.Module):
    """Does in its initialisation what a shard by itself would do wrong."""

    table: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Embedding(30, 64, padding_idx=17)
        self.deep = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(6)))
        self.second = nn.Linear(64, 14)
        self.again = nn.Embedding(30, 64)
        self.again.weight = self.first.weight
        self.square = nn.Parameter(torch.zeros(14, 6))
        self.register_buffer("table", torch.arange(64.0).cos(), persistent=False)

    def forward(self, ids: Tensor) -> Tensor:
        return self.second(self.deep(self.first(ids) + self.again(ids)) * self.table) @ self.square

    def reset_parameters(self) -> None:
        for layer in self.deep:
            nn.init.xavier_normal_(layer.weight)
        nn.init.orthogonal_(self.square)
        row = self.square.data[5]
        self.first.reset_parameters()  # zeroes one row
        self.second.reset_parameters()
        row.zero_()  # of a parameter that was done
        self.second.weight.data.mul_(0.5)
        nn.init.trunc_normal_(self.first.weight.data[10:17])
        with torch.no_grad():
            self.second.bias.copy_(torch.randn(14) * self.second.weight.std())


def plan_text() -> str:
    plan = autoshard.plan(Model(), (IDS,), mesh=MESH, hardware=cases.slow_machine(), pins=PINS)
    return autoshard.dump_plan(plan)


def _initialised(text: str) -> dict[str, Any]:
    plan = autoshard.parse_plan(text)
    mesh = device_mesh_of(plan)
    with autoshard.weights_on_meta():
        model: Any = Model()
    assert all(p.is_meta for p in model.parameters()) and model.again.weight is model.first.weight
    autoshard.parallelize(model, plan, mesh)
    shards = autoshard.shard_inputs(plan, mesh, IDS)
    refused = {"on meta": caught(model.reset_parameters)}
    model.to_empty(device="cpu")
    refused["empty"] = caught(lambda: model(*shards))

    torch.manual_seed(dist.get_rank())  # that of the first rank counts
    before = torch.get_rng_state()
    with autoshard.measure_memory(*model.parameters(), *model.buffers()) as log:
        model.reset_parameters()
    kept = torch.equal(torch.get_rng_state(), before)

    torch.manual_seed(0)
    reference = Model()
    torch.manual_seed(0)
    reference.reset_parameters()
    held = (*model.named_parameters(), *model.named_buffers())
    others = (*reference.parameters(), *reference.buffers())
    off = [name for (name, ours), theirs in zip(held, others, strict=True) if not torch.equal(full(ours), theirs)]
    difference = (full(model(*shards)) - reference(IDS)).abs().max().item()

    def others_draw_otherwise() -> None:
        generator = torch.Generator().manual_seed(dist.get_rank())
        with autoshard.as_one_process(model):
            nn.init.normal_(model.second.weight, generator=generator)

    refused["own generators"] = caught(others_draw_otherwise)
    sizes = [local_of(tensor).nbytes for _, tensor in held]
    return {"off": off, "difference": difference, "refused": refused, "kept": kept, "peak": log.peak_bytes - sum(sizes)}


def test_initialisation_gives_the_values_of_one_process_one_parameter_at_a_time() -> None:
    sizes = [p.nbytes for p in Model().parameters()]
    # the largest parameter whole, and what operators take for themselves: another one at most, the generator's state
    most = 2 * max(sizes) + 8192
    assert most < 0.5 * sum(sizes)
    for rank, seen in enumerate(run_ranks(4, _initialised, plan_text())):
        assert seen["off"] == [] and seen["difference"] <= 1e-5
        assert seen["kept"] == (rank > 0)  # the job's own generators are as they were, but on the first rank
        assert max(sizes) <= seen["peak"] <= most, seen
        refused = seen["refused"]
        assert "is on the meta device, and cannot be filled; call to_empty" in refused["on meta"][1]
        assert "is empty: to_empty made it" in refused["empty"][1]
        assert "the ranks gave the parameters different values" in refused["own generators"][1]


def test_a_table_that_only_the_constructor_computes_is_refused_and_not_garbage() -> None:
    with torch.device("meta"):
        model = Model()
    with one_rank() as mesh:
        parallel: Any = autoshard.auto_parallelize(model, mesh, (IDS,))
        parallel.to_empty(device="cpu")
        parallel.reset_parameters()
        with pytest.raises(InputError, match=r"table is empty.*weights_on_meta"):
            parallel(IDS)
        parallel.table.copy_(torch.arange(64.0).cos())
        assert not full(parallel(IDS)).isnan().any()
