"""Models of which capture takes parts apart, on simulated ranks: any plan computes what one process computes."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import autoshard
from autoshard.capture import capture
from autoshard.layout import Layout, Placement, S
from autoshard.mesh import Mesh
from autoshard.plans import ShardingPlan

from ..fuzz.judge import capturing_once
from ..fuzz.random_plans import random_plan
from ..fuzz.ranks import run_ranks
from .sessions import full

MESH = Mesh.parse("a=2,b=2")
ROWS, STEPS, WIDTH = 4, 3, 8


class Shifted(nn.Module):
    """Writes into fresh tensors: through ranges, single indices, strides, transposes, masks and other views."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.first = nn.Embedding(12, WIDTH), nn.Parameter(torch.ones(WIDTH))

    def forward(self, tokens: Tensor) -> Tensor:
        shifted = tokens.new_zeros(tokens.shape)
        shifted[..., 1:] = tokens[..., :-1].clone()
        shifted[..., 0] = 3
        shifted.masked_fill_(shifted == 7, 1)
        h = self.table(shifted)
        y = h.new_zeros(h.shape)
        y[:, 1:] = h[:, :-1]
        y[:, 0] = self.first
        y.transpose(1, 2)[:, ::2] *= torch.tensor([1.0, 2.0, 0.5])
        y.view(len(y), -1)[:, WIDTH:].add_(1.0)
        y[y > 2.0] = 0.0
        return F.cross_entropy((y @ self.table.weight.t()).flatten(0, 1), tokens.flatten())


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.RNNBase], **options: Any) -> None:
        super().__init__()
        self.enter = nn.Linear(WIDTH, WIDTH)
        self.cells = kind(WIDTH, 6, **options)

    def forward(self, x: Tensor) -> Tensor:
        y, last = self.cells(self.enter(x))
        return y.square().mean() + sum(part.mean() for part in (last if isinstance(last, tuple) else (last,)))


class Bags(nn.Module):
    def __init__(self, mode: str, padding_idx: int | None) -> None:
        super().__init__()
        self.bags, self.leave = nn.EmbeddingBag(12, WIDTH, mode=mode, padding_idx=padding_idx), nn.Linear(WIDTH, 4)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.leave(self.bags(tokens)).square().mean()


class BagsAtOffsets(Bags):
    """Bags of 3, 0 and 5 rows of 12."""

    def __init__(self) -> None:
        super().__init__("mean", None)
        self.register_buffer("offsets", torch.tensor([0, 3, 3]))

    def forward(self, tokens: Tensor) -> Tensor:
        return self.leave(self.bags(tokens.flatten(), self.offsets)).square().mean()


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerDecoderLayer(WIDTH, 2, 12, dropout=0.0, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(STEPS)
        return self.layer(x, x.flip(1), tgt_mask=mask, tgt_is_causal=True).square().mean()


class Pictures(nn.Module):
    """Pictures that lie behind each other in one row, each of which attends to itself, as in Qwen-VL."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor) -> Tensor:
        made = self.enter(x).view(len(x), 3, 2, -1).permute(1, 2, 0, 3).unsqueeze(1)
        pieces = zip(*(part.split([2, 2], dim=2) for part in made))
        h = torch.cat([F.scaled_dot_product_attention(*each).transpose(1, 2).contiguous() for each in pieces], dim=1)
        return self.leave(h.reshape(len(x), -1)).square().mean()


class Picked(nn.Module):
    """A classifier by the last word of each row, with a mask of padding."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor) -> Tensor:
        mask = (x[..., 0] > -1.0)[torch.arange(len(x))[:, None, None], torch.arange(STEPS)]
        last = (x[..., 0] > 0).long().argmax(-1)
        h = self.enter(x)
        h = (h @ h.mT).masked_fill(~mask, -1e9).softmax(-1) @ h
        return self.leave(h[torch.arange(len(x)), last]).square().mean()


def _tokens() -> Tensor:
    tokens = torch.randint(0, 12, (ROWS, STEPS), generator=torch.Generator().manual_seed(0))
    tokens[0], tokens[1, 0], tokens[2, 1] = 5, 5, 7
    return tokens


MODELS: dict[str, Callable[[], tuple[nn.Module, Tensor]]] = {
    "writes": lambda: (Shifted(), _tokens()),
    "recurrent": lambda: (Recurrent(nn.LSTM, batch_first=True), torch.randn(ROWS, STEPS, WIDTH)),
    "attention": lambda: (Attention(), torch.randn(ROWS, STEPS, WIDTH)),
    "pictures": lambda: (Pictures(), torch.randn(ROWS, WIDTH)),
    "picked": lambda: (Picked(), torch.randn(ROWS, STEPS, WIDTH)),
    "bags": lambda: (Bags("mean", 5), _tokens()),
}


def _step(module: nn.Module, x: Tensor) -> list[Tensor]:
    loss = module(x)
    loss.backward()
    return [full(loss).detach(), *(full(p.grad) for p in module.parameters())]  # type: ignore[arg-type]


def _on_ranks(model: nn.Module, x: Tensor, plan: ShardingPlan) -> list[Tensor]:
    """What rank 0 sees in one step."""
    models = [deepcopy(model) for _ in range(MESH.size)]

    def one(rank: int) -> list[Tensor]:
        mesh = init_device_mesh("cpu", MESH.shape, mesh_dim_names=MESH.axes)
        parallel = autoshard.parallelize(models[rank], plan, mesh, (x,))
        return _step(parallel, *autoshard.shard_inputs(plan, mesh, x))

    results = run_ranks(MESH.size, one)
    failed = [result for result in results if isinstance(result, BaseException)]
    assert not failed, failed
    return results[0]  # type: ignore[no-any-return]


@pytest.mark.filterwarnings("ignore::autoshard.errors.StrategyWarning")
@pytest.mark.parametrize("name", [*MODELS, "bags at offsets"])
def test_a_random_plan_computes_what_one_process_computes(name: str) -> None:
    torch.manual_seed(0)
    model, x = MODELS[name]() if name in MODELS else (BagsAtOffsets(), _tokens())
    expected = _step(deepcopy(model), x)
    graph = capture(model, (x,), guarded=True)
    plan = random_plan(graph, MESH, 0, model, (x,), {})
    with capturing_once(graph), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.testing.assert_close(_on_ranks(model, x, plan), expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", MODELS)
def test_the_batch_can_be_cut_with_nothing_sent_but_gradients(name: str) -> None:
    model, x = MODELS[name]()
    plan = autoshard.plan(model, (x,), mesh="dp=2", hardware="cpu-gloo", constraints=["baseline ddp"])
    sent = {c.kind for r in plan.redistributions for c in r.collectives if c.size_bytes > 8}
    assert sent == {"all_reduce"}


@pytest.mark.filterwarnings("error::autoshard.errors.StrategyWarning")
@pytest.mark.parametrize(
    ("held", "added", "rows"),
    [("bags.weight=dp:S(1)", "dp:S(1)", S(1)), ("bags/embedding=dp:S(0)", "dp:P(sum)", S(0))],
    ids=["columns", "rows"],
)
def test_bags_at_offsets_are_cut_along_columns_and_rows(held: str, added: str, rows: Placement) -> None:
    """Rows that are cut make partial sums of bags."""
    pins = [held, f"bags/index_add={added}"]
    plan = autoshard.plan(BagsAtOffsets(), (_tokens(),), mesh="dp=2", hardware="cpu-gloo", pins=pins)
    (adding,) = (each for each in plan.operators if each.name == "bags/index_add")
    assert adding.inputs[-1] == Layout((rows,))
