"""Heads that a model folds into its batch, or that an equation has, are dims of their own in its graph, and are cut."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autoshard
from autoshard.capture import capture
from autoshard.errors import StrategyWarning
from autoshard.mesh import Mesh

from ..fuzz.random_plans import random_plan
from ..lowering.as_before import check_as_before
from ..thorough import some_thorough

B, T, H, D = 4, 6, 2, 4


def _softmax_of(scores: Tensor) -> Tensor:
    return scores.softmax(-1)


class Folded(nn.Module):
    """Attention of one layer; ``attend`` is given queries, keys and values of (B * H, T, D)."""

    def __init__(self, attend: Callable[..., Tensor]) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(H * D, H * D) for _ in range(4))
        self.position = nn.Linear(H * D, H * D)
        self.far = nn.Parameter(torch.randn(T, D))
        self.attend = attend

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (each(x).view(B, T, H, D).permute(0, 2, 1, 3) for each in (self.q, self.k, self.v))
        q, k, v = (each.contiguous().view(-1, T, D) for each in (q, k, v))
        y = self.attend(self, q, k, v).view(B, H, T, D).permute(0, 2, 1, 3).reshape(B, T, H * D)
        return self.o(y).square().mean()


def _plain(model: Folded, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.bmm(_softmax_of(torch.bmm(q, k.transpose(1, 2)) / D**0.5), v)


def _with_kernel(model: Folded, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, torch.ones(T, T, dtype=torch.bool).tril())


def _apart_between(model: Folded, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = (q @ k.transpose(-1, -2)).view(B, H, T, T).masked_fill(torch.eye(T, dtype=torch.bool), -9.0)
    return torch.bmm(scores.softmax(-1).view(-1, T, T), v)


def _biased(model: Folded, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """A bias for each head and key, as BLOOM has it."""
    slopes, steps = torch.arange(1.0, H + 1, dtype=q.dtype), torch.arange(T).expand(B, T)
    bias = (slopes[..., None] * steps[:, None, :]).reshape(B * H, 1, T)
    scores = bias.baddbmm(batch1=q, batch2=k.transpose(-1, -2), beta=0.5, alpha=D**-0.5)
    return torch.bmm(scores.view(B, H, T, T).softmax(-1).view(B * H, T, T), v)


def _disentangled(model: Folded, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Keys of positions, the same for all rows, and picked by number, as DeBERTa has them."""
    far = torch.ones(1, T, H * D, dtype=q.dtype).cumsum(1) / T
    keys = model.position(far).view(1, T, H, D).permute(0, 2, 1, 3).contiguous().view(-1, T, D).repeat(B, 1, 1)
    steps = torch.arange(T)
    index = (steps[:, None] - steps[None, :]).abs().unsqueeze(0).expand([B * H, T, T])
    of_positions = torch.gather(torch.bmm(q, keys.transpose(-1, -2)), dim=-1, index=index)
    score: Any = 0
    score += of_positions / D**0.5
    score += torch.gather(torch.bmm(k, keys.transpose(-1, -2)), dim=-1, index=index).transpose(-1, -2)
    return _softmax_of(torch.bmm(q, k.transpose(1, 2)) + score) @ v


def _decomposed(model: Folded, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Positions along two dims of the steps, by equations, as SAM has them."""
    rows = q.reshape(B * H, 2, 3, D)
    of_rows = torch.einsum("bhwc,hkc->bhwk", rows, model.far.view(2, 3, D)[:, :2])
    of_columns = torch.einsum("bhwc,wkc->bhwk", rows, model.far.view(3, 2, D).repeat(1, 2, 1)[:, :3])
    bias = (of_rows[:, :, :, :, None] + of_columns[:, :, :, None, :]).reshape(B * H, T, T)
    return _softmax_of(q @ k.transpose(-2, -1) + bias).to(v.dtype) @ v


def _masked(model: Folded, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """A mask of each row, once for each of its heads."""
    mask = (q.detach().view(B, H, T, D).sum((1, 3)) > 0)[:, None, None, :].expand(B, H, T, T).reshape(B * H, T, T)
    scores = torch.bmm(q, k.transpose(1, 2)).masked_fill(mask, -3.0)
    return F.dropout(scores.softmax(dim=-1), 0.5, training=False) @ v


def _filled(model: Folded, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Written into by another name, with nobody else to read it, as in Megatron-LM and GPT-NeoX."""
    scores = torch.bmm(q, k.transpose(1, 2)).view(B, H, T, T)
    scores.masked_fill_(torch.ones(T, T, dtype=torch.bool).triu(1), -9.0)
    return torch.bmm(scores.softmax(-1).view(B * H, T, T), v)


def _of_chunks(model: Folded, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Products of the queries and keys of each chunk."""
    q, k, v = (each.reshape(B * H, 3, 2, D) for each in (q, k, v))
    return ((q @ k.mT).softmax(-1) @ v).view(B * H, T, D)


def _seen_apart(model: Folded, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Weights that are seen apart and folded again, so that they could be given back, as XGLM has them."""
    mask = torch.ones(T, T, dtype=q.dtype).tril().log()
    scores = (torch.bmm(q, k.transpose(1, 2)).view(B, H, T, T) + mask).view(B * H, T, T)
    weights = scores.softmax(-1).view(B, H, T, T)
    return torch.bmm(F.dropout(weights.view(B * H, T, T), 0.0), v)


def _deformable(model: Folded, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Values as pictures that each head sees at places of its own, in two sizes, as Deformable DETR has them."""
    places, weights = q.tanh().view(B * H, T, 2, 2), k.softmax(-1).view(B * H, 1, T, 4)
    pictures = v.transpose(1, 2).reshape(B * H, D, 2, 3)
    levels = [pictures[..., 1:], pictures]
    seen = [F.grid_sample(each, places, mode="bilinear", padding_mode="zeros", align_corners=False) for each in levels]
    return (torch.stack(seen, dim=-2).flatten(-2) * weights).sum(-1).transpose(1, 2)


def _linear(model: Folded, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Without scores of all pairs of steps, divided by what they add up to; of the largest of each row, as Linformer's
    kin have it.
    """
    q, k = q.sigmoid() / q.amax(-1, keepdim=True).exp(), k.exp() * k.mean(dim=1, keepdim=True).sigmoid()
    total = torch.bmm(q, k.sum(1).view(B * H, D, 1))
    return torch.bmm(q, torch.bmm(k.transpose(1, 2), v)) / total + v.max(1)[0].unsqueeze(1)


def _of_equations(model: Folded, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """All products as equations, as lucidrains' Perceiver has them."""
    return torch.einsum("bij,bjd->bid", torch.einsum("bid,bjd->bij", q, k).softmax(-1), v)


def _of_windows(model: Folded, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Queries of a window see that one and the one before, as in lucidrains' local attention; turned by halves."""

    def around(x: Tensor) -> Tensor:
        padded = F.pad(x, (0, 0, 0, 0, 1, 0), value=-1.0)
        return torch.cat([padded[:, k : k + 3, ...] for k in range(2)], dim=2)

    def turned(x: Tensor) -> Tensor:
        first, second = x.chunk(2, dim=-1)
        return x + torch.cat((-second, first), dim=-1)

    q, k, v = (each.reshape(-1, 3, 2, D) for each in (q, k, v))
    scores = torch.einsum("bhie,bhje->bhij", turned(q), turned(around(k)))
    return torch.einsum("bhij,bhje->bhie", scores.softmax(-1), around(v)).reshape(-1, T, D)


def _sorted_between(model: Folded, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Something between that nobody here knows."""
    scores = torch.bmm(q, k.transpose(1, 2))
    return torch.bmm(torch.fft.fft(scores).real.softmax(-1), v)


def _written(model: Folded, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Written into, and read by another name."""
    scores = torch.bmm(q, k.transpose(1, 2))
    turned = scores.transpose(1, 2)
    turned.mul_(2.0)
    turned[:, 0] = 1.0
    return torch.bmm((scores + turned).softmax(-1), v)


def _zeroed(model: Folded, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Written into by a function that is asked to, and read as it was before that."""
    scores = torch.bmm(q, k.transpose(1, 2))
    turned = scores.transpose(1, 2)
    return torch.bmm((F.relu(scores, True) + turned).softmax(-1), v)


ATTENTION = {
    "plain": _plain,
    "with a kernel": _with_kernel,
    "apart between": _apart_between,
    "biased": _biased,
    "disentangled": _disentangled,
    "decomposed": _decomposed,
    "masked": _masked,
    "seen apart": _seen_apart,
    "deformable": _deformable,
    "linear": _linear,
    "filled": _filled,
    "of chunks": _of_chunks,
    "of equations": _of_equations,
    "of windows": _of_windows,
    "sorted between": _sorted_between,
    "written": _written,
    "zeroed": _zeroed,
}
AS_IT_WAS = ("written", "zeroed")


class MasksOfHeads(nn.Module):
    """torch's own attention, which takes a mask for each head of each row as (B * H, T, T)."""

    def __init__(self, repeats: Callable[[Tensor, Tensor], Tensor], need_weights: bool) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(H * D, H, batch_first=True)
        self.bias = nn.Parameter(torch.randn(H, T, T))
        self.repeats, self.need_weights = repeats, need_weights

    def forward(self, x: Tensor) -> Tensor:
        mask = self.repeats(x, self.bias)
        y, seen = self.attention(x, x, x, attn_mask=mask, need_weights=self.need_weights)
        return y.square().mean() + (0.0 if seen is None else seen.square().mean())


def _of_each_row(x: Tensor, bias: Tensor) -> Tensor:
    """A mask of numbers that all heads of a row have."""
    return (x[:, :, :1] - x[:, None, :, 0]).repeat_interleave(H, dim=0)


def _of_each_head(x: Tensor, bias: Tensor) -> Tensor:
    """Biases that all rows have, as in WavLM."""
    return bias.repeat(B, 1, 1)


class StepsFirst(nn.Module):
    """(T, B, H * D), folded as (T, B * H, D), which is turned: fairseq's attention."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(H * D, H * D) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        x = x.transpose(0, 1)
        q, k, v = (each(x).view(T, B * H, D).transpose(0, 1) for each in (self.q, self.k, self.v))
        y = torch.bmm(torch.bmm(q, k.transpose(1, 2)).softmax(-1), v)
        return self.o(y.transpose(0, 1).contiguous().view(T, B, H * D)).square().mean()


class OneProjection(nn.Module):
    """Queries, keys and values along a dim in front of the one that is folded: SAM's."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.o = nn.Linear(H * D, 3 * H * D), nn.Linear(H * D, H * D)

    def forward(self, x: Tensor) -> Tensor:
        qkv = self.qkv(x).reshape(B, T, 3, H, D).permute(2, 0, 3, 1, 4)
        q, k, v = qkv.reshape(3, B * H, T, D).unbind(0)
        y = (q * D**-0.5) @ k.transpose(-2, -1)
        y = (F.softmax(y, dtype=torch.float64, dim=-1) @ v).reshape(B, H, 2, 3, D)
        return self.o(y.permute(0, 2, 3, 1, 4).reshape(B, T, H * D)).square().mean()


class Windows(nn.Module):
    """Rows are taken for several windows each, heads folded with those."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.o = nn.Linear(H * D, 3 * H * D), nn.Linear(H * D, H * D)

    def forward(self, x: Tensor) -> Tensor:
        windows = x.view(B, 2, T // 2, H * D).reshape(2 * B, T // 2, H * D)
        qkv = self.qkv(windows).reshape(2 * B, T // 2, 3, H, D).permute(2, 0, 3, 1, 4)
        q, k, v = qkv.reshape(3, 2 * B * H, T // 2, D).unbind(0)
        y = ((q @ k.transpose(-2, -1)).softmax(-1) @ v).reshape(2 * B, H, T // 2, D)
        return self.o(y.transpose(1, 2).reshape(B, T, H * D)).square().mean()


class Equations(nn.Module):
    """Attention as two equations, of heads in front of the steps or behind them."""

    def __init__(self, scores: str, mixed: str, turns: bool) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(H * D, H * D) for _ in range(4))
        self.scores, self.mixed, self.turns = scores, mixed, turns

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (each(x).view(B, T, H, D) for each in (self.q, self.k, self.v))
        if self.turns:
            q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        y = torch.einsum(self.mixed, torch.einsum(self.scores, q, k).softmax(-1), v)
        return self.o((y.transpose(1, 2) if self.turns else y).reshape(B, T, H * D)).square().mean()


class EquationsOfThree(nn.Module):
    """Linear attention, as Performer's: equations of three tensors, with dots for rows and heads."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(H * D, H * D) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (each(x).view(B, T, H, D).transpose(1, 2) for each in (self.q, self.k, self.v))
        q, k = q.softmax(-1), k.exp()
        total = torch.einsum("...nd,...d->...n", q, k.sum(-2))
        y = torch.einsum("...de,...nd,...n->...ne", torch.einsum("...nd,...ne->...de", k, v), q, 1 / total)
        return self.o(y.transpose(1, 2).reshape(B, T, H * D)).square().mean()


def _model(name: str) -> nn.Module:
    torch.manual_seed(0)
    others: dict[str, Callable[[], nn.Module]] = {
        "steps first": StepsFirst,
        "masks of rows": lambda: MasksOfHeads(_of_each_row, True),
        "masks of heads": lambda: MasksOfHeads(_of_each_head, False),
        "one projection": OneProjection,
        "windows": Windows,
        "equations": lambda: Equations("b h i d, b h j d -> b h i j", "b h i j, b h j d -> b h i d", True),
        "equations of three": EquationsOfThree,
        "equations of heads behind": lambda: Equations("bqhd,bkhd->bhqk", "bhqk,bkhd->bqhd", False),
    }
    return (others[name]() if name in others else Folded(ATTENTION[name])).double()


ALL = (
    *ATTENTION,
    "masks of rows",
    "masks of heads",
    "steps first",
    "one projection",
    "windows",
    "equations",
    "equations of heads behind",
    "equations of three",
)
X = torch.randn(B, T, H * D, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


WHOLE = ("masked", "sorted between")
"""Of these, attention is whole on every rank: of heads that something is told by, and of what nobody here knows."""
ALIKE = ("masked", "sorted between", "apart between", "equations of heads behind")


@pytest.mark.parametrize("name", some_thorough([name for name in ALL if name not in AS_IT_WAS], ALIKE))
def test_heads_are_cut(name: str) -> None:
    """Beside the batch, and nothing but sums is sent for it."""
    model = _model(name)
    whole = pytest.warns(StrategyWarning, match="every rank computes all of") if name in WHOLE else nullcontext()
    with whole:
        plan = autoshard.plan(model, (X,), mesh="dp=2,tp=2", hardware="cpu-gloo", constraints=["baseline ddp+tp"])
    cut = {entry.name for entry in plan.parameters if not entry.layout.is_replicated}
    assert any(f"{name}weight" in cut for name in ("o.", "attention.out_proj."))
    assert {"q.weight", "k.weight", "v.weight"} <= cut or cut & {"qkv.weight", "attention.in_proj_weight"}
    check_as_before(model, (X,), plan, rtol=1e-8, atol=1e-10)


UNLIKE = {"with a kernel", "biased", "disentangled"}  # they have what the others do


@pytest.mark.parametrize("name", some_thorough(ALL, set(ALL) - UNLIKE))
def test_whatever_is_cut(name: str) -> None:
    if name == "written" and torch.__version__ < "2.12":
        pytest.skip("torch 2.11 has no rule for select_scatter")
    model = _model(name)
    plan = random_plan(capture(model, (X,)), Mesh.parse("a=2,b=2"), 0, model, (X,), {})
    check_as_before(model, (X,), plan, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("name", [*AS_IT_WAS, "no batch"])
def test_what_has_no_heads_in_its_batch_stays(name: str) -> None:
    """What is written into by another name, and products of as many matrices as there is no batch of."""
    if name == "no batch":
        model: nn.Module = nn.Bilinear(3, 3, 3).double()
        args: tuple[Tensor, ...] = (torch.ones(5, 3).double(), torch.ones(5, 3).double())
    else:
        model, args = _model(name), (X,)
    operators = {str(node.op) for node in capture(model, args).nodes if node.op is not None}
    assert not any("matmul" in operator for operator in operators)


@pytest.mark.parametrize(
    ("equation", "shapes"),
    [
        ("abij,abjk->abik", ((2, 3, 4, 5), (2, 3, 5, 6))),
        ("bqhd,bkhd->bhqk", ((2, 4, 3, 5), (2, 6, 3, 5))),
        ("xaybz,azwbv->bwvxya", ((2, 3, 4, 2, 5), (3, 5, 2, 2, 3))),  # rows and columns of two dims each
        ("abkl,abkl->ab", ((2, 3, 4, 5), (2, 3, 4, 5))),  # of one row and one column
        ("abcj,abcj->abc", ((2, 3, 1, 5), (2, 3, 1, 5))),
        ("abij,abjk->aik", ((2, 3, 4, 5), (2, 3, 5, 6))),  # one dim in front: torch's own
        ("abij,abkl->abijkl", ((2, 3, 4, 5), (2, 3, 2, 2))),  # nothing is summed: torch's own
        ("abij,abjk->abik", ((2, 3, 4, 5), (1, 3, 5, 6))),  # the same for all rows: torch's own
        ("...ij,...jk", ((2, 3, 4, 5), (2, 3, 5, 6))),
        ("...a,...b->...ab", ((3, 4), (2, 3, 5))),  # dots of one dim and of two
        ("...de,...nd,...n->...ne", ((2, 3, 4, 5), (2, 3, 6, 4), (2, 3, 6))),
        ("i,bj,k,l->lkij", ((2,), (1, 3), (4,), (5,))),
        ("bij,bjk,bkl->", ((2, 3, 4), (1, 4, 5), (2, 5, 1))),
        ("ii,ij,jk->ik", ((3, 3), (3, 4), (4, 2))),  # a label twice: torch's own
    ],
)
def test_products_by_an_equation_are_torchs_with_their_gradients(
    equation: str, shapes: tuple[tuple[int, ...], ...]
) -> None:
    class Multiplied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.given = nn.ParameterList(torch.randn(shape, dtype=torch.float64) for shape in shapes)

        def forward(self, z: Tensor) -> Tensor:
            return (torch.einsum(equation, *self.given) * z).sin().sum()

    args = (torch.ones(1, dtype=torch.float64),)
    check_as_before(
        (model := Multiplied()), args, autoshard.plan(model, args, mesh="a=1", cache=False), rtol=1e-12, atol=1e-12
    )
