"""Layers that people cut by columns: each under the baseline ``tp`` against one process, on simulated ranks."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.nn.utils.parametrize import register_parametrization

import autoshard

from ..thorough import some_thorough
from .as_before import check_as_before

WIDTH, HEADS = 16, 4


class GroupOfEachHead(nn.Module):
    """A norm of each head, as RWKV's and xLSTM's, of words in a row and of sequences; one without weights."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.norm, self.plain = nn.GroupNorm(HEADS, WIDTH), nn.GroupNorm(2 * HEADS, WIDTH, affine=False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.enter(x)
        h = self.norm(h.reshape(-1, WIDTH)).view(x.shape) + self.plain(h.transpose(1, 2)).transpose(1, 2)
        return self.leave(F.silu(h))


class NormOfInstances(nn.Module):
    """A norm of each channel of each row, as in U-Nets and of style, with weights and without."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.leave = nn.Conv1d(WIDTH, WIDTH, 3, padding=1), nn.Conv1d(WIDTH, WIDTH, 1)
        self.norm, self.plain = nn.InstanceNorm1d(WIDTH, affine=True), nn.InstanceNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        h = self.enter(x.transpose(1, 2))
        return self.leave(F.silu(self.norm(h)) + self.plain(h.exp())).transpose(1, 2)


class ConvolvedTogether(nn.Module):
    """Queries, keys and values of one projection are convolved along the sequence, channel by channel, shifted, and
    taken apart; there are as many of each, or of few and more.
    """

    def __init__(self, *sizes: int) -> None:
        super().__init__()
        self.sizes, whole = sizes, sum(sizes)
        self.enter, self.leave = nn.Linear(WIDTH, whole), nn.Linear(WIDTH, WIDTH)
        self.near = nn.Conv1d(whole, whole, 4, groups=whole, padding=3)
        self.nearer = nn.Conv1d(whole, whole, 3, groups=whole, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.enter(x).transpose(1, 2)
        h = self.nearer(F.pad(F.silu(self.near(h)[..., : x.shape[1]]), (2, 0)))
        q, k, v = F.pad(h, (1, 0))[..., :-1].transpose(1, 2).split(self.sizes, -1)
        gate = k * v if k.shape == q.shape else torch.cat([k, v], -1)
        return self.leave(q.unflatten(-1, (HEADS, -1)).softmax(-1).flatten(-2) * gate)


class OfLowRank(nn.Module):
    """A projection with what is added of low rank, as LoRA's, and a gate of low rank, as RWKV's."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.down, self.up = nn.Linear(WIDTH, 4, bias=False), nn.Linear(4, WIDTH, bias=False)
        self.first, self.second = nn.Parameter(torch.randn(WIDTH, 4)), nn.Parameter(torch.randn(4, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        gate = torch.sigmoid(torch.tanh(x @ self.first) @ self.second)
        return self.leave((self.enter(x) + self.up(F.rms_norm(self.down(x), (4,)))).relu() * gate)


class OfATable(nn.Module):
    """What each place weighs is computed of a table that is learned: at once, or by a small network, as Hyena's."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.table, self.places = nn.Parameter(torch.randn(5, 8)), nn.Parameter(torch.randn(5, 8))
        self.weigh, self.more = nn.Linear(8, WIDTH), nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.leave(self.enter(x) * self.weigh(self.table) + self.more(self.places) * self.enter(x.cos()))


class HeadsByPieces(nn.Module):
    """Heads that are made by taking features apart, and joining the pieces along the batch, or along a new dim."""

    def __init__(self, is_stacked: bool) -> None:
        super().__init__()
        self.is_stacked = is_stacked
        self.enter, self.keys, self.leave = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        if self.is_stacked:
            q, k = (torch.stack(each(x).chunk(HEADS, dim=-1), dim=1) for each in (self.enter, self.keys))
            return self.leave(torch.cat(((q @ k.mT).softmax(-1) @ k).unbind(1), -1))
        q, k = (torch.cat(each(x).split(WIDTH // HEADS, 2), 0) for each in (self.enter, self.keys))
        return self.leave(torch.cat((q + (q @ k.mT).softmax(-1) @ k).split(len(x), 0), 2))


class GatedByHalves(nn.Module):
    """Half of what is made gates the other half; ``convolves``, as the convolutions of a Conformer."""

    def __init__(self, convolves: bool) -> None:
        super().__init__()
        self.convolves = convolves
        make = partial(nn.Conv1d, kernel_size=1) if convolves else nn.Linear
        self.enter, self.leave = make(WIDTH, 2 * WIDTH), make(WIDTH, WIDTH)
        self.near = nn.Conv1d(WIDTH, WIDTH, 3, padding=1, groups=WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        if not self.convolves:
            return self.leave(F.glu(self.enter(x)))
        return self.leave(F.silu(self.near(F.glu(self.enter(x.transpose(1, 2)), 1)))).transpose(1, 2)


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "gated by halves": partial(GatedByHalves, False),
    "gated by halves, convolved": partial(GatedByHalves, True),
    "a group of each head": GroupOfEachHead,
    "a norm of instances": NormOfInstances,
    "of low rank": OfLowRank,
    "of a table": OfATable,
    "heads behind each other": partial(HeadsByPieces, False),
    "heads that are stacked": partial(HeadsByPieces, True),
    "convolved together": partial(ConvolvedTogether, WIDTH, WIDTH, WIDTH),
    "unequal, convolved together": partial(ConvolvedTogether, WIDTH, WIDTH // 2, WIDTH // 2),
}


class Stack(nn.Module):
    """Three layers around a residual stream."""

    def __init__(self, make: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(make() for _ in range(3))
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer, norm in zip(self.layers, self.norms):
            x = x + layer(norm(x))
        return x.square().mean()


@pytest.mark.parametrize(("mesh", "baseline"), some_thorough([("a=4", "tp"), ("a=2,b=2", "fsdp+tp")], [("a=4", "tp")]))
@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_is_cut_by_columns_and_is_as_before(name: str, mesh: str, baseline: str) -> None:
    torch.manual_seed(0)
    model, args = Stack(LAYERS[name]).double(), (torch.randn(4, 5, WIDTH, dtype=torch.float64),)
    plan = autoshard.plan(model, args, mesh=mesh, hardware="cpu-gloo", constraints=[f"baseline {baseline}"])
    if "unequal" not in name:
        entered = [entry.layout[-1] for entry in plan.parameters if entry.name.endswith("enter.weight")]
        assert len(entered) == len(model.layers) and all(str(placement).startswith("S(0") for placement in entered)
    check_as_before(model, args, plan, rtol=1e-8, atol=1e-10)


class Scaled(nn.Module):
    """A weight times a number, as StyleGAN's."""

    def forward(self, weight: Tensor) -> Tensor:
        return weight * 0.3


class OfThreeValues(nn.Module):
    """As BitNet's: the gradient is that of the weight before it was rounded."""

    def forward(self, weight: Tensor) -> Tensor:
        scale = weight.abs().mean().clamp(min=1e-5)
        return weight + ((weight / scale).round().clamp(-1, 1) * scale - weight).detach()


class Masked(nn.Module):
    """As MADE's."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mask", torch.ones(WIDTH, WIDTH).tril())

    def forward(self, weight: Tensor) -> Tensor:
        return weight * self.mask


class OfNormOne(nn.Module):
    """Rows of norm one."""

    def forward(self, weight: Tensor) -> Tensor:
        return F.normalize(weight)


class Changed(nn.Module):
    """A weight and what is added of low rank, as LoRA's; ``has_lengths``, as DoRA's."""

    def __init__(self, has_lengths: bool) -> None:
        super().__init__()
        self.first, self.second = nn.Parameter(torch.randn(3, WIDTH)), nn.Parameter(torch.randn(WIDTH, 3))
        self.lengths = nn.Parameter(torch.rand(WIDTH, 1)) if has_lengths else None

    def forward(self, weight: Tensor) -> Tensor:
        changed = weight + self.second @ self.first
        return changed if self.lengths is None else self.lengths * changed / changed.norm(2, -1, True)


WEIGHTS: dict[str, Callable[[nn.Linear], nn.Module]] = {
    "scaled": lambda linear: register_parametrization(linear, "weight", Scaled()),
    "of three values": lambda linear: register_parametrization(linear, "weight", OfThreeValues()),
    "masked": lambda linear: register_parametrization(linear, "weight", Masked()),
    "of norm one": lambda linear: register_parametrization(linear, "weight", OfNormOne()),
    "of directions and lengths": parametrizations.weight_norm,
    "of largest singular value one": parametrizations.spectral_norm,
    "changed by low rank": lambda linear: register_parametrization(linear, "weight", Changed(False)),
    "so, and with lengths": lambda linear: register_parametrization(linear, "weight", Changed(True)),
}


class OfComputedWeights(nn.Module):
    """A pair of layers whose weights are computed."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.enter, self.leave = (WEIGHTS[name](nn.Linear(WIDTH, WIDTH)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return self.leave(F.gelu(self.enter(x)))  # type: ignore[no-any-return]


MESHES = {"tp": "a=2", "fsdp+tp": "a=2,b=2", "sp": "a=2"}
OF_WEIGHTS = [(name, baseline) for name in WEIGHTS for baseline in MESHES]
SLOW = [(name, baseline) for name, baseline in OF_WEIGHTS if baseline == "sp" or "singular" in name]


@pytest.mark.parametrize(("name", "baseline"), some_thorough(OF_WEIGHTS, SLOW))
def test_a_weight_that_is_computed_is_cut_as_the_parameter_that_it_is_of(name: str, baseline: str) -> None:
    torch.manual_seed(0)
    model, args = Stack(partial(OfComputedWeights, name)).double(), (torch.randn(4, 6, WIDTH, dtype=torch.float64),)
    asked = [f"baseline {baseline}"]
    plan = autoshard.plan(model, args, mesh=MESHES[baseline], hardware="cpu-gloo", constraints=asked)
    assert not any("leaving" in pin for pin in plan.pins)
    cut = {entry.name: str(entry.layout[-1]) for entry in plan.parameters}
    original = "original1" if name == "of directions and lengths" else "original"
    for k in range(len(model.layers)):
        assert cut[f"layers.{k}.enter.parametrizations.weight.{original}"].startswith("S(0")
        assert cut[f"layers.{k}.leave.parametrizations.weight.{original}"].startswith("S(1")
    check_as_before(model, args, plan, rtol=1e-8, atol=1e-10)
