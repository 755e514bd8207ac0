"""Schemes that cut layers, of models with matrices that the others have no pair for, on simulated ranks."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autoshard
from autoshard.errors import ConstraintError, InfeasibleError, StrategyWarning
from autoshard.planning.comparison import compare
from autoshard.planning.lone_matrices import longest
from autoshard.plans import ShardingPlan, dump_plan, parse_plan
from autoshard.review import check
from solver import Problem, Solution, SolveReport, Status

from ..lowering.as_before import check_as_before
from ..models import AlikeLayers
from ..thorough import some_thorough

WIDTH = 8
Example = tuple[nn.Module, tuple[Tensor, ...]]


class Pair(nn.Module):
    """Columns, then rows."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Bridge(nn.Module):
    """A projection between two norms, as Swin has one between its stages."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.reduction = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.reduction(self.norm(x))  # type: ignore[no-any-return]


class Stages(nn.Module):
    """Layers with a bridge behind each."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(16, WIDTH), nn.Linear(WIDTH, 16)
        self.layers = nn.ModuleList(nn.ModuleDict({"pair": Pair(), "bridge": Bridge()}) for _ in range(2))

    def forward(self, words: Tensor, targets: Tensor) -> Tensor:
        x = self.embed(words)
        for layer in self.layers:
            x = layer["bridge"](layer["pair"](x))
        return F.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())


def stages() -> Example:
    torch.manual_seed(0)
    words = torch.randint(16, (4, 6))
    return Stages().double(), (words, words.roll(-1, 1))


LONE = "layers.*.bridge.reduction.weight"


@pytest.mark.parametrize("family", ["tp", "sp"])
def test_a_matrix_without_another_to_go_with_is_left_to_the_solver_and_the_others_are_cut(family: str) -> None:
    model, args = stages()
    asked = ["family dp=ddp", f"family tp={family}"]
    with pytest.warns(StrategyWarning, match=rf"{LONE}.* read by .*reduction/mm .*has no other to go with.*leaving"):
        plan = autoshard.plan(model, args, mesh="dp=2,tp=2", hardware="cpu-gloo", constraints=asked, cache=False)
    assert plan.pins == (asked[0], f"{asked[1]} leaving {LONE}")
    cut = {entry.name for entry in plan.parameters if entry.layout[1].kind == "S"}
    assert {f"layers.{k}.pair.{name}.weight" for k in range(2) for name in ("up", "down")} <= cut
    check_as_before(model, args, plan, rtol=1e-9, atol=1e-12)
    again = parse_plan(dump_plan(plan))
    assert check(again, model, args).fits


@pytest.mark.parametrize("budget", [None, "1GiB"])
def test_no_matrix_is_left_because_the_time_was_over(monkeypatch: pytest.MonkeyPatch, budget: str | None) -> None:
    def late(problem: Problem, **options: Any) -> Solution:
        return Solution(Status.TIME_LIMIT, None, None, None, math.inf, SolveReport("none", 0.0, (), ()))

    def unasked(*args: Any) -> None:
        raise AssertionError("matrices were looked for")

    for module, name, done in (
        ("budget", "solve", late),
        ("planner", "solve", late),
        ("planner", "lone_matrices", unasked),
    ):
        monkeypatch.setattr(f"autoshard.planning.{module}.{name}", done)
    model, args = stages()
    options: dict[str, Any] = {"mesh": "dp=2,tp=2", "hardware": "cpu-gloo", "memory": budget, "cache": False}
    with pytest.raises(InfeasibleError, match="no valid assignment was found in the time given"):
        autoshard.plan(model, args, constraints=["family tp=tp"], time_limit_s=1.0, **options)


class HalfByHalf(nn.Module):
    """One half of the columns gates the norm of the other, as in gMLP."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.up = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH)
        self.norm, self.down = nn.LayerNorm(2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        gate, gated = F.gelu(self.up(self.before(x))).chunk(2, -1)
        return self.down(gate * self.norm(gated))  # type: ignore[no-any-return]


class ChannelMix(nn.Module):
    """A pair, and a matrix that gates what it makes, as in RWKV."""

    def __init__(self) -> None:
        super().__init__()
        self.key, self.receptance = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.value, self.norm = nn.Linear(4 * WIDTH, WIDTH), nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        return torch.sigmoid(self.receptance(x)) * self.value(F.relu(self.key(x)) ** 2)


class GatedHeads(nn.Module):
    """What small matrices make of single heads is put together for a gate, as in mLSTM: nobody asks for these cut."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.turn, self.gate = nn.Parameter(torch.randn(2 * WIDTH, 2, 2)), nn.Linear(8 * WIDTH, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(self.norm(x)).unflatten(-1, (-1, 2))
        h = torch.einsum("bthd,hod->btho", h, self.turn).flatten(2)
        gate = self.gate(torch.cat([h, h * h], -1)).sigmoid().mean(-1, keepdim=True)
        return self.down(h * gate)  # type: ignore[no-any-return]


LEFT = [(HalfByHalf, "up.weight"), (ChannelMix, "receptance.weight"), (GatedHeads, "turn")]


@pytest.mark.parametrize(("layer", "name"), LEFT)
def test_of_matrices_that_could_be_left_the_smallest_is(layer: Callable[[], nn.Module], name: str) -> None:
    asked = {"mesh": "tp=2", "hardware": "cpu-gloo", "constraints": ["family tp=tp"], "cache": False}
    with pytest.warns(StrategyWarning, match=rf"has no plan that cuts all: .*\.{name}, read by "):
        plan = autoshard.plan(AlikeLayers(layer), (torch.randn(4, 6, WIDTH),), **asked)
    assert plan.pins == (f"family tp=tp leaving layers.*.{name}",)


class GateOfAnother(nn.Module):
    """Has a gate, and a pair in which a matrix has the gate's name."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.mix = nn.Linear(WIDTH, WIDTH), Pair()

    def forward(self, x: Tensor) -> Tensor:
        return self.mix(F.layer_norm(self.down(x).sigmoid(), (WIDTH,)))  # type: ignore[no-any-return]


def test_a_matrix_that_has_the_name_of_one_that_is_left_is_cut() -> None:
    """``layers.*.down.weight`` matches ``layers.0.mix.down.weight``, too."""
    asked = {"mesh": "tp=2", "hardware": "cpu-gloo", "constraints": ["family tp=tp"], "cache": False}
    with pytest.warns(StrategyWarning, match="has no plan that cuts all"):
        plan = autoshard.plan(AlikeLayers(GateOfAnother), (torch.randn(4, 6, WIDTH),), **asked)
    assert plan.pins == ("family tp=tp leaving layers.0.down.weight layers.1.down.weight",)
    assert {e.name for e in plan.parameters if e.name.endswith("mix.down.weight") and e.layout[0].kind == "R"} == set()


def test_what_is_left_out_may_be_said_beforehand() -> None:
    """And no more is looked for, as there is a plan."""
    model, args = stages()
    said = [f"family tp=tp leaving {LONE} layers.0.pair.*"]
    plan = autoshard.plan(model, args, mesh="tp=2", hardware="cpu-gloo", constraints=said, cache=False)
    assert plan.pins == tuple(said)


@pytest.mark.parametrize(
    ("constraint", "said"),
    [
        ("family tp=ddp leaving head.weight", "as tp and sp do; ddp cuts the batch"),
        ("family tp=tp leaving *", "but they are all left out"),
        (
            "family tp=tp leaving layers.*.bridge.norm",
            "matches no parameter.*nearest name is layers.1.bridge.norm.bias",
        ),
        (
            "family tp=tp leaving layers.0.bridge.norm/*",
            "which is no parameter; the nearest name is layers.0.bridge.norm",
        ),
        ("family tp=tp leaving", "write .*'family tp=tp leaving NAME'"),
    ],
)
def test_what_cannot_be_left_out(constraint: str, said: str) -> None:
    model, args = stages()
    with pytest.raises(ConstraintError, match=said):
        autoshard.plan(model, args, mesh="tp=2", hardware="cpu-gloo", constraints=[constraint], cache=False)


def test_a_contender_that_leaves_matrices_says_so() -> None:
    contest = compare(*stages(), mesh="dp=2,tp=2", hardware="cpu-gloo")
    titles = {contender.name: contender.title for contender in contest.baselines if contender.plan}
    for name in ("ddp+tp", "fsdp+tp", "ddp+sp", "fsdp+sp"):
        assert titles[name].endswith(f", leaving {LONE}"), titles
    assert "leaving" not in titles["ddp"]


class Channels(nn.Module):
    """Convolutions with a norm over the batch between them, whose running means are whole on every rank."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Conv2d(8, 4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(F.relu(self.norm(self.first(x)))).square().mean()  # type: ignore[no-any-return]


def channels() -> Example:
    torch.manual_seed(0)
    return Channels().double(), (torch.randn(4, 3, 7, 7, dtype=torch.float64),)


class WrittenOut(nn.Module):
    """Causal attention of a product, a softmax and a product; ``folds`` its heads into the batch, as baddbmm wants."""

    def __init__(self, folds: bool) -> None:
        super().__init__()
        self.qkv, self.out, self.folds = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH), folds
        self.embed, self.head = nn.Embedding(16, WIDTH), nn.Linear(WIDTH, 16)

    def forward(self, words: Tensor, targets: Tensor) -> Tensor:
        h = self.embed(words)
        q, k, v = (x.unflatten(-1, (4, -1)).transpose(1, 2) for x in self.qkv(h).split(WIDTH, -1))
        if self.folds:
            q, k, v = (x.flatten(0, 1) for x in (q, k, v))
            scores = torch.baddbmm(q.new_zeros(1), q, k.mT, alpha=0.5).unflatten(0, (-1, 4))
        else:
            scores = q @ k.mT / 2
        late = torch.ones(*words.shape[1:], *words.shape[1:]).triu(1).bool()
        seen = scores.masked_fill(late, -1e9).softmax(-1)
        mixed = torch.bmm(seen.flatten(0, 1), v).unflatten(0, (-1, 4)) if self.folds else seen @ v
        h = h + self.out(mixed.transpose(1, 2).flatten(2))
        return F.cross_entropy(self.head(h).flatten(0, 1), targets.flatten())


def written_out(folds: bool) -> Example:
    torch.manual_seed(0)
    words = torch.randint(16, (4, 6))
    return WrittenOut(folds).double(), (words, words.roll(-1, 1))


class Shown(nn.Module):
    """``nn.MultiheadAttention`` as it is called by default: it shows its weights."""

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.norm = nn.MultiheadAttention(WIDTH, 4, batch_first=True), nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        return (x + self.attention(h, h, h)[0]).square().mean()  # type: ignore[no-any-return]


def shown() -> Example:
    torch.manual_seed(0)
    return nn.Sequential(Shown()).double(), (torch.randn(4, 6, WIDTH, dtype=torch.float64),)


class Asked(nn.Module):
    """Learned queries, of one row for all, that attend to the words: a Q-Former."""

    def __init__(self) -> None:
        super().__init__()
        self.queries = nn.Parameter(torch.randn(1, 3, WIDTH))
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        given = (self.q, self.queries), (self.k, x), (self.v, x)
        q, k, v = (layer(each).unflatten(-1, (4, -1)).transpose(1, 2) for layer, each in given)
        mixed = self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return (self.queries + mixed).square().mean()


def asked() -> Example:
    torch.manual_seed(0)
    return nn.Sequential(Asked()).double(), (torch.randn(4, 6, WIDTH, dtype=torch.float64),)


CASES: dict[str, tuple[Callable[[], Example], str]] = {
    "learned queries, tp": (asked, "tp"),
    "norm over the batch, tp": (channels, "tp"),
    "written out, cp": (lambda: written_out(False), "cp"),
    "folded, cp": (lambda: written_out(True), "cp"),
    "folded, tp": (lambda: written_out(True), "tp"),
    "shown, tp": (shown, "tp"),
    "shown, sp": (shown, "sp"),
    "shown, cp": (shown, "cp"),
}


@pytest.mark.parametrize("case", some_thorough(CASES, {"written out, cp", "folded, tp", "shown, sp", "shown, cp"}))
def test_schemes_of_what_is_written_out_are_the_step_of_one_process(case: str) -> None:
    make, family = CASES[case]
    model, args = make()
    asked = ["family dp=ddp", f"family tp={family}"]
    plan = autoshard.plan(model, args, mesh="dp=2,tp=2", hardware="cpu-gloo", constraints=asked, cache=False)
    assert plan.pins == tuple(asked), "nothing is left to the solver"
    if family == "cp":
        assert all(entry.layout[1].kind == "S" for entry in plan.inputs)
    else:
        assert any(entry.layout[1].kind == "S" for entry in plan.parameters)
    check_as_before(model, args, plan, rtol=1e-9, atol=1e-12)


class Points(nn.Module):
    """Of three features, which are turned first."""

    def __init__(self) -> None:
        super().__init__()
        self.turn, self.up, self.down = nn.Linear(3, 3), nn.Linear(3, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(self.turn(x).tanh()))).square().mean()  # type: ignore[no-any-return]


def test_a_matrix_that_is_shorter_than_the_ranks_is_left_to_the_solver() -> None:
    torch.manual_seed(0)
    model, args = Points().double(), (torch.randn(4, 3, dtype=torch.float64),)

    def planned(mesh: str) -> ShardingPlan:
        return autoshard.plan(model, args, mesh=mesh, hardware="cpu-gloo", constraints=["family tp=tp"], cache=False)

    plan = planned("tp=4")
    cut = {entry.name: str(entry.layout[0]) for entry in plan.parameters if entry.name.endswith("weight")}
    assert cut == {"turn.weight": "R", "up.weight": "S(0)", "down.weight": "S(1)"}
    check_as_before(model, args, plan, rtol=1e-9, atol=1e-12)
    with pytest.raises(ConstraintError, match="the model has none that 32 ranks can share"):
        planned("tp=32")


class Heads(nn.Module):
    """Attention of some heads, beside what passes by."""

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.qkv, self.out, self.norm, self.heads = nn.Linear(12, 36), nn.Linear(12, 12), nn.LayerNorm(12), heads

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        return x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class TwoStages(nn.Module):
    """Three heads, then six."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Heads(3), Heads(6)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


@pytest.mark.filterwarnings("ignore:.*has no other to go with:autoshard.errors.StrategyWarning")
def test_attention_is_cut_where_the_ranks_can_share_its_heads() -> None:
    torch.manual_seed(0)
    model, args = TwoStages().double(), (torch.randn(4, 6, 12, dtype=torch.float64),)
    plan = autoshard.plan(model, args, mesh="tp=2", hardware="cpu-gloo", constraints=["family tp=tp"], cache=False)
    heads = {e.name: str(e.inputs[0][0]) for e in plan.operators if e.name.endswith("/attention")}
    assert heads["layers.1/attention"] == "S(1)" != heads["layers.0/attention"]
    check_as_before(model, args, plan, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("most", range(1, 34))
def test_the_longest_is_found_with_one_question_where_there_is_none(most: int) -> None:
    for right in range(most + 1):
        asked: list[int] = []

        def holds(count: int, asked: list[int] = asked, right: int = right) -> bool:
            asked.append(count)
            return count <= right

        assert longest(most, holds) == right and (right or asked == [1])
        assert set(asked) <= set(range(1, most + 1)) and len(asked) == len(set(asked)) <= 2 * (right + 1).bit_length()
