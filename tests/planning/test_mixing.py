"""Operators that mix the rows that a scheme cuts: what they read is gathered, told, written down and exact."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autoshard
from autoshard.capture import capture
from autoshard.constraints import AxisScheme
from autoshard.errors import ConstraintError, StrategyWarning
from autoshard.mesh import Mesh
from autoshard.planning.comparison import compare
from autoshard.planning.mixing import mixers
from autoshard.plans import ShardingPlan
from autoshard.strategies import Rulebook

from ..lowering.as_before import check_as_before
from ..thorough import some_thorough

ROWS = 8


class Tower(nn.Module):
    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(width, 10), nn.GELU(), nn.Linear(10, 4))

    def forward(self, x: Tensor) -> Tensor:
        return F.normalize(self.net(x), dim=-1)


class Contrastive(nn.Module):
    """CLIP's loss, over pairs of features of all rows."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.scale = Tower(), Tower(), nn.Parameter(torch.tensor(1.5))

    def forward(self, x: Tensor) -> Tensor:
        alike = self.scale.exp() * self.first(x) @ self.second(x.tanh()).t()
        right = torch.arange(len(x))
        return F.cross_entropy(alike, right) + F.cross_entropy(alike.t(), right)


class Corrected(nn.Module):
    """Two towers whose softmax over the rows is corrected for how often each is drawn: what is subtracted of a column
    is of the row that the column is.
    """

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Tower(), Tower()

    def forward(self, x: Tensor) -> Tensor:
        often = x[:, 0].sigmoid()
        alike = self.first(x) @ self.second(x.tanh()).t() * often[None] - often.log()[None]
        return F.cross_entropy(alike, torch.arange(len(x)))


class Process(nn.Module):
    """The likelihood of a Gaussian process: a matrix of all rows, which is decomposed whole and read twice."""

    def __init__(self) -> None:
        super().__init__()
        self.tower = Tower()

    def forward(self, x: Tensor) -> Tensor:
        z, seen = self.tower(x), x[:, :1]
        alike = torch.exp(-(z[:, None] - z[None]).square().sum(-1)) + torch.eye(len(x), dtype=x.dtype)
        root = torch.linalg.cholesky_ex(alike).L
        return (seen * torch.cholesky_solve(seen, root)).sum() + torch.diagonal(root).log().sum()


class Views(nn.Module):
    """SimCLR: two views of each row, put behind each other, are looked at together, and each is to find the other."""

    def __init__(self) -> None:
        super().__init__()
        self.tower = Tower()

    def forward(self, x: Tensor) -> Tensor:
        z = self.tower(torch.cat([x, x.sin()]))
        alike = (z @ z.t()).masked_fill(torch.eye(len(z), dtype=torch.bool), -1e9)
        return F.cross_entropy(alike / 0.5, (torch.arange(len(z)) + len(x)) % len(z))


class Neighbours(nn.Module):
    """Two layers of a graph network: rows are nodes, and each sees what its neighbours are."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))
        self.register_buffer("sources", torch.tensor([0, 1, 2, 3, 4, 5, 6, 7, 0, 3]))
        self.register_buffer("targets", torch.tensor([1, 0, 3, 2, 5, 4, 7, 6, 4, 0]))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            seen = torch.zeros_like(x).index_add(0, self.targets, layer(x)[self.sources])
            x = x + seen.relu()
        return x.square().mean()


class Hardest(nn.Module):
    """The rows of most loss alone count."""

    def __init__(self) -> None:
        super().__init__()
        self.tower = Tower()

    def forward(self, x: Tensor) -> Tensor:
        return self.tower(x).sub(x[:, :4]).square().sum(-1).topk(3).values.mean()


class Triplets(nn.Module):
    """Of each row the farthest of its class and the nearest of the other."""

    def __init__(self) -> None:
        super().__init__()
        self.tower = Tower()

    def forward(self, x: Tensor) -> Tensor:
        z, of_class = self.tower(x), torch.arange(len(x)) % 2
        apart, same = torch.cdist(z, z), of_class[:, None] == of_class
        return (apart * same).amax(1).sub(apart.masked_fill(same, 1e9).amin(1)).add(0.3).relu().mean()


class Mixed(nn.Module):
    """Rows are mixed with those of another order, before they are looked at."""

    def __init__(self) -> None:
        super().__init__()
        self.tower = Tower()

    def forward(self, x: Tensor) -> Tensor:
        x = 0.7 * x + 0.3 * x.flip(0)
        h = self.tower(x)
        return (h * h.roll(1, 0)).sum(-1).square().mean()


class Packed(nn.Module):
    """Patches of all pictures in one list, whose length is none of the batch's: each rank computes all of them, and
    takes those of its rows.
    """

    def __init__(self) -> None:
        super().__init__()
        self.see, self.read = nn.Linear(5, 6), nn.Linear(6, 6)
        self.register_buffer("patches", torch.linspace(-1, 1, 3 * ROWS * 5).view(3 * ROWS, 5))

    def forward(self, x: Tensor) -> Tensor:
        seen = self.see(self.patches).relu().split([3 * k % 5 + 1 for k in range(ROWS - 1)] + [4])
        return (self.read(x) + torch.stack([each.sum(0) for each in seen])).tanh().square().mean()


class Shifted(nn.Module):
    """A model of words that takes its targets of its inputs, and looks at a few words before each."""

    def __init__(self, looks: bool) -> None:
        super().__init__()
        self.looks = looks
        self.embed, self.head = nn.Embedding(16, 8), nn.Linear(8, 16)
        self.near = nn.Conv1d(8, 8, 3, groups=8)
        self.project, self.leave = nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, words: Tensor) -> Tensor:
        h = self.embed(words)
        if self.looks:
            h = h + self.near(F.pad(h.transpose(1, 2), (2, 0))).transpose(1, 2)
        q, k, v = (part.view(*part.shape[:2], 2, 4).transpose(1, 2) for part in self.project(h).chunk(3, -1))
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(h.shape)
        targets = F.pad(words, (0, 1), value=-100)[:, 1:]
        return F.cross_entropy(self.head(h + self.leave(seen)).flatten(0, 1), targets.flatten())


class Taken(nn.Module):
    """An operator that has no rule by which it is cut."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return (self.features(x).take((x > 0).long()) * x).square().mean()


_ALL = (Contrastive, Corrected, Process, Views, Neighbours, Hardest, Triplets, Mixed, Packed, Taken)
MODELS = {each.__name__: each for each in _ALL}


def _example(name: str) -> tuple[nn.Module, tuple[Tensor]]:
    torch.manual_seed(0)
    return MODELS[name]().double(), (torch.randn(ROWS, 6, dtype=torch.float64),)


def _plan(model: nn.Module, args: tuple[Tensor, ...], mesh: str, *constraints: str) -> ShardingPlan:
    return autoshard.plan(model, args, mesh=mesh, hardware="cpu-gloo", constraints=list(constraints))


@pytest.mark.filterwarnings("ignore::autoshard.errors.StrategyWarning")
@pytest.mark.parametrize(
    ("mesh", "baseline"),
    some_thorough([("a=4", "ddp"), ("a=2", "fsdp"), ("a=2,b=2", "hsdp")], [("a=4", "ddp"), ("a=2", "fsdp")]),
)
@pytest.mark.parametrize("name", MODELS)
def test_what_mixes_rows_is_gathered_for(name: str, mesh: str, baseline: str) -> None:
    model, args = _example(name)
    plan = _plan(model, args, mesh, f"baseline {baseline}")
    assert all(entry.layout[0].kind == "S" for entry in plan.inputs)
    check_as_before(model, args, plan, rtol=1e-8, atol=1e-10)
    assert _plan(model, args, mesh, *plan.pins).solver.cost_ns == plan.solver.cost_ns


@pytest.mark.filterwarnings("ignore::autoshard.errors.StrategyWarning")
@pytest.mark.parametrize(
    ("mesh", "baseline"), [("a=4", "cp"), ("a=2,b=2", "fsdp+cp"), ("a=1,b=2,c=2", "fsdp+cp+tp"), ("a=2,b=2", "ddp+cp")]
)
def test_what_mixes_a_sequence_is_gathered_for(mesh: str, baseline: str) -> None:
    torch.manual_seed(0)
    axes = Mesh.parse(mesh)
    model, args = (
        Shifted(looks="tp" not in baseline).double(),
        (torch.randint(16, (axes.shape[0] if axes.ndim > 1 else 1, 12)),),
    )
    plan = _plan(model, args, mesh, f"baseline {baseline}")
    assert any(placement.kind == "S" and placement.dim == 1 for placement in plan.inputs[0].layout)
    assert any("gathering" in pin and "/constant_pad_nd" in pin for pin in plan.pins)
    embedded = next(entry.outputs[0] for entry in plan.operators if entry.name == "embed/embedding")
    assert embedded is not None and embedded.axes_of(1)  # words are whole for the targets alone
    check_as_before(model, args, plan, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("Contrastive", ("/mm",)),
        ("Views", ("/mm",)),
        ("Corrected", ("/mm", "/mul", "/sub", "/bwd.mm")),
        ("Neighbours", ("/index", "/index.*", "/bwd.index_select", "/bwd.index_select.*")),
        ("Taken", ("/take", "/bwd.put")),
    ],
)
def test_operators_are_named_with_their_lines_and_written_down(name: str, found: tuple[str, ...]) -> None:
    model, args = _example(name)
    with pytest.warns(StrategyWarning) as told:
        plan = _plan(model, args, "a=2", "family a=ddp")
    (said,) = [str(each.message) for each in told if "mixes it" in str(each.message)]
    assert "'family a=ddp' cuts the batch, but" in said and "test_mixing.py:" in said
    assert "people gather the rows of all ranks by hand" in said
    (pin,) = plan.pins
    assert pin == f"family a=ddp gathering {' '.join(found)}" and repr(pin) in said
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", StrategyWarning)
        warnings.filterwarnings("error", message=".*mixes it")
        assert _plan(model, args, "a=2", pin).pins == plan.pins  # who says it himself is told nothing


def test_a_batch_as_long_as_the_steps_is_said() -> None:
    with pytest.warns(StrategyWarning, match="plan for another number of steps"):
        _plan(nn.GRU(6, 5), (torch.ones(4, 4, 6),), "a=2", "baseline ddp")


def test_a_scheme_gathers_for_what_is_said_and_for_nothing_else() -> None:
    model, args = _example("Contrastive")
    with pytest.raises(ConstraintError, match="matches no parameter, input or operator"):
        _plan(model, args, "a=2", "family a=ddp gathering /mn")
    with pytest.raises(ConstraintError, match="tp cuts layers"):
        _plan(model, args, "a=2", "family a=tp gathering /mm")
    with pytest.raises(ConstraintError, match=r"cannot read .* gathering'; write .*gathering NAME'"):
        _plan(model, args, "a=2", "family a=ddp gathering")


class Plain(nn.Module):
    """A transformer's layer, a batch norm, and a mean over the batch: no row is gathered for any of them."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.norm = nn.BatchNorm1d(6)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(self.layer(x))
        return (h - h.mean(0)).square().mean()


@pytest.mark.parametrize("scheme", ["ddp", "fsdp", "tp"])
def test_what_keeps_rows_apart_is_not_gathered_for(scheme: str) -> None:
    graph = capture(Plain(), (torch.randn(8, 6, 8),))
    mesh = Mesh.parse("a=2,b=2")
    for axis in range(2):
        given = AxisScheme(axis, scheme, f"family {mesh.axes[axis]}={scheme}")  # type: ignore[arg-type]
        assert mixers(graph, given, [], mesh, Rulebook.of_process()) == ()


def test_a_comparison_has_the_schemes_and_says_what_they_gather() -> None:
    model, args = _example("Contrastive")
    found = {each.name: each for each in compare(model, args, mesh="a=2", hardware="cpu-gloo").baselines}
    for name in ("ddp", "fsdp"):
        plan = found[name].plan
        assert plan is not None and plan.pins == (f"family a={name} gathering /mm",)
        assert found[name].title.endswith(", gathering for /mm")


class OneByOne(nn.Module):
    """Convolves every row with numbers of its own, and writes it into a tensor (the Neural Turing Machine's shift)."""

    def __init__(self, sharpens: bool) -> None:
        super().__init__()
        self.a, self.b, self.o, self.g = nn.Linear(4, 5), nn.Linear(4, 3), nn.Linear(5, 2), nn.Linear(4, 1)
        self.sharpens = sharpens

    def forward(self, x: Tensor) -> Tensor:
        weights, shifts = self.a(x).softmax(1), self.b(x).softmax(1)
        made = torch.zeros_like(weights)
        for row in range(len(x)):
            around = torch.cat([weights[row, -1:], weights[row], weights[row, :1]])
            made[row] = F.conv1d(around.view(1, 1, -1), shifts[row].view(1, 1, -1)).view(-1)
        if self.sharpens:
            made = made ** (1 + F.softplus(self.g(x)))
        return self.o(made).square().mean()


@pytest.mark.filterwarnings("ignore::autoshard.errors.StrategyWarning")
@pytest.mark.parametrize("sharpens", [False, True])
def test_what_is_gathered_for_is_found_by_solving_where_no_input_alone_is_missing(sharpens: bool) -> None:
    torch.manual_seed(0)
    model, args = OneByOne(sharpens).double(), (torch.randn(ROWS, 4, dtype=torch.float64),)
    plan = _plan(model, args, "a=2", "baseline ddp")
    assert ("/pow" if sharpens else "o/bwd.mm.1") in plan.pins[0].split(" gathering ")[1].split()
    check_as_before(model, args, plan, rtol=1e-8, atol=1e-10)
    again = _plan(model, args, "a=2", plan.pins[0])
    assert again.pins == plan.pins and again.solver.cost_ns == plan.solver.cost_ns
