"""Models that are called with (steps, rows), as torch's layers are without ``batch_first``: each as in one process."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.data import TensorDataset

import autoshard
from autoshard.capture import capture
from autoshard.layout import S
from autoshard.mesh import Mesh
from autoshard.plans import ShardingPlan, dump_plan, parse_plan
from autoshard.plans.views.axis_use import axis_lines, samples

from ..fuzz.judge import capturing_once
from ..fuzz.random_plans import random_plan
from ..fuzz.ranks import run_ranks
from ..thorough import some_thorough
from .as_before import check_as_before

STEPS, ROWS, WIDTH, WORDS = 3, 4, 8, 12


class Words(nn.Module):
    """A language model, of whose mask nobody says that it is causal; which words are padding is said row by row."""

    def __init__(self, is_batch_first: bool = False) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        layer = nn.TransformerEncoderLayer(WIDTH, 2, 12, dropout=0.0, batch_first=is_batch_first)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, tokens: Tensor, is_padding: Tensor) -> Tensor:
        mask = torch.ones(is_padding.shape[1], is_padding.shape[1], dtype=torch.bool).triu(1)
        y = self.head(self.layers(self.table(tokens), mask, src_key_padding_mask=is_padding))
        return F.cross_entropy(y.view(-1, WORDS), tokens.reshape(-1), ignore_index=3)


class Translated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        with warnings.catch_warnings(action="ignore"):  # torch's own, of nested tensors
            self.inner = nn.Transformer(WIDTH, 2, 1, 1, 12, dropout=0.0)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return (
            self.inner(x, y, tgt_mask=nn.Transformer.generate_square_subsequent_mask(len(y), dtype=y.dtype))
            .square()
            .mean()
        )


class Recurrent(nn.Module):
    """Its state before the first step is an argument; rows are weighed one by one."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.LSTM(WIDTH, 5, 2, bidirectional=True), nn.GRU(10, 6)

    def forward(self, x: Tensor, weights: Tensor) -> Tensor:
        y, _ = self.second(self.first(x)[0])
        return (y[-1].square().mean(-1) * weights).mean()


class StepByStep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enter, self.cell = nn.Linear(WIDTH, 6), nn.GRUCell(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        h, total = x.new_zeros(x.shape[1], 6), x.new_zeros(())
        for step in self.enter(x):
            h = self.cell(step, h)
            total = total + h.square().mean()
        return total


class Filtered(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.filter, self.leave = nn.Conv1d(WIDTH, 6, 3, padding=1), nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.leave(self.filter(x.permute(1, 2, 0)).permute(2, 0, 1)).square().mean()


class Attended(nn.Module):
    """Attention that is written by hand: (steps, rows, heads, features) to (rows, heads, steps, features)."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)) for _ in "ab")

    def forward(self, x: Tensor) -> Tensor:
        for enter, leave in self.layers:
            q, k, v = (y.unflatten(-1, (2, -1)).permute(1, 2, 0, 3) for y in enter(x).chunk(3, -1))
            x = x + leave(F.scaled_dot_product_attention(q, k, v, is_causal=True).permute(2, 0, 1, 3).flatten(2))
        return x.square().mean()


class Folded(nn.Module):
    """Attention whose heads are folded into the batch, as fairseq writes it."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.leave = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (f(x).contiguous().view(STEPS, -1, 4).transpose(0, 1) for f in (self.q, self.k, self.v))
        h = torch.bmm(torch.bmm(q, k.transpose(1, 2)).softmax(-1), v)
        return (x + self.leave(h.transpose(0, 1).contiguous().view(x.shape))).square().mean()


class Multiplied(nn.Module):
    """The same with heads as a dim of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (y.unflatten(-1, (2, -1)).permute(1, 2, 0, 3) for y in self.enter(x).chunk(3, -1))
        h = (q @ k.transpose(-1, -2)).softmax(-1) @ v
        return (x + self.leave(h.permute(2, 0, 1, 3).flatten(2))).square().mean()


def _tokens() -> Tensor:
    return torch.randint(4, WORDS, (STEPS, ROWS))


def _steps(count: int = STEPS, rows: int = ROWS) -> Tensor:
    return torch.randn(count, rows, WIDTH, dtype=torch.float64)


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], tuple[Tensor, ...]]]] = {
    "words": (Words, lambda: (_tokens(), torch.arange(STEPS) > torch.arange(ROWS)[:, None])),
    "translated": (Translated, lambda: (_steps(), _steps(2))),
    "recurrent": (Recurrent, lambda: (_steps(), torch.rand(ROWS, dtype=torch.float64))),
    "step by step": (StepByStep, lambda: (_steps(),)),
    "filtered": (Filtered, lambda: (_steps(),)),
    "attended": (Attended, lambda: (_steps(),)),
    "folded": (Folded, lambda: (_steps(),)),
    "multiplied": (Multiplied, lambda: (_steps(),)),
}


def _example(name: str) -> tuple[nn.Module, tuple[Tensor, ...]]:
    torch.manual_seed(0)
    make, args = MODELS[name]
    return make().double(), args()


def _plan(model: nn.Module, args: tuple[Tensor, ...], mesh: str, *constraints: str) -> ShardingPlan:
    return autoshard.plan(model, args, mesh=mesh, hardware="cpu-gloo", constraints=constraints, cache=False)


@pytest.mark.parametrize(
    ("mesh", "baseline"),
    some_thorough([("a=2", "ddp"), ("a=2", "fsdp"), ("a=2,b=2", "hsdp")], [("a=2", "ddp"), ("a=2", "fsdp")]),
)
@pytest.mark.parametrize("name", MODELS)
def test_rows_are_cut(name: str, mesh: str, baseline: str) -> None:
    model, args = _example(name)
    made = _plan(model, args, mesh, f"baseline {baseline}")
    for entry in made.inputs:
        batch = entry.shape.index(ROWS)
        assert set(entry.layout.placements) == {S(batch)}, entry
    assert parse_plan(dump_plan(made)) == made and samples(made) == ROWS
    assert all("it cuts the batch" in line for line in axis_lines(made))
    check_as_before(model, args, made, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("name", ["words", "attended"])
@pytest.mark.parametrize("baseline", some_thorough(["ddp+tp", "ddp+sp", "fsdp+cp"], ["ddp+tp", "ddp+sp"]))
def test_layers_and_steps_are_cut_beside_them(name: str, baseline: str) -> None:
    model, args = _example(name)
    args = tuple(arg[:, :2] if arg.shape[1] == ROWS else arg[:2] for arg in args)  # of cp a rank has one row
    check_as_before(model, args, _plan(model, args, "a=2,b=2", f"baseline {baseline}"), rtol=1e-8, atol=1e-10)


ALIKE = {"translated", "attended", "multiplied", "recurrent"}
"""Models whose random plans are looked at in `make test-all`: of each, another one is much like it."""


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.thorough)])
@pytest.mark.parametrize("name", some_thorough(MODELS, ALIKE))
def test_whatever_is_cut(name: str, seed: int) -> None:
    model, args = _example(name)
    plan = random_plan(capture(model, args), Mesh.parse("a=2,b=2"), seed, model, args, {})
    check_as_before(model, args, plan, rtol=1e-8, atol=1e-10)


def test_dim_0_is_the_batch_where_layers_say_so_or_say_nothing() -> None:
    words, (tokens, is_padding) = _example("words")
    assert capture(words, (tokens, is_padding)).batch_dim == 1
    assert capture(Words(True), (tokens.t().contiguous(), is_padding)).batch_dim == 0
    square = torch.randn(ROWS, ROWS, WIDTH)
    assert capture(nn.LSTM(WIDTH, 5), (square,)).batch_dim == 0, "of as many steps as rows nobody knows"
    assert capture(nn.Linear(WIDTH, 5), (_steps().float(),)).batch_dim == 0
    picture = torch.randn(ROWS, 3, 8, 8)
    assert (
        capture(
            nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(2), nn.LSTM(36, 3, batch_first=True)), (picture,)
        ).batch_dim
        == 0
    )


def test_ranks_read_rows() -> None:
    model, args = _example("recurrent")
    made = _plan(model, args, "a=2", "baseline ddp")
    models = [copy.deepcopy(model) for _ in range(2)]

    def one(rank: int) -> tuple[Tensor, int]:
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("a",))
        parallel = autoshard.parallelize(models[rank], made, mesh, args)
        read = (arg.narrow(arg.dim() // 2, 2 * rank, 2) for arg in args)
        count = autoshard.sampler(made, mesh, TensorDataset(torch.arange(8))).num_replicas
        return parallel(*autoshard.shard_inputs(made, mesh, *read)).detach(), count

    with capturing_once(capture(model, args, guarded=True)):
        results = run_ranks(2, one)
    for found in results:
        assert not isinstance(found, BaseException), found
        torch.testing.assert_close(found[0], model(*args).detach())
        assert found[1] == 2


def test_there_may_be_more_rows() -> None:
    model, args = _example("recurrent")
    made = _plan(model, args, "a=1")
    more, expected = (_steps(rows=6), torch.rand(6, dtype=torch.float64)), copy.deepcopy(model)

    def one(rank: int) -> Tensor:
        mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("a",))
        parallel = autoshard.parallelize(model, made, mesh, args, batches=[6])
        found: Tensor = parallel(*autoshard.shard_inputs(made, mesh, *more, batch=6))
        return found.detach()

    (found,) = run_ranks(1, one)
    assert not isinstance(found, BaseException), found
    torch.testing.assert_close(found, expected(*more).detach())
