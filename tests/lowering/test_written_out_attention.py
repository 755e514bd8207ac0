"""Attention that is written out as products of matrices, cut along heads, rows and sums, against one process."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autoshard
from autoshard.capture import capture
from autoshard.capture.taken_apart.matrix_products import product
from autoshard.plans import ShardingPlan

from ..models import AlikeLayers
from ..thorough import some_thorough
from .as_before import check_as_before

ours = torch.ops.autoshard
BATCH, LENGTH, WIDTH, HEADS = 4, 7, 16, 4


class Attention(nn.Module):
    """Causal, with a bias for each head."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.bias = nn.Parameter(torch.randn(HEADS, LENGTH, LENGTH))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (f(x).view(BATCH, LENGTH, HEADS, -1).transpose(1, 2) for f in (self.q, self.k, self.v))
        hidden = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)
        scores = (q @ k.transpose(-2, -1) + self.bias).masked_fill(hidden, -1e9)
        return self.out(torch.matmul(scores.softmax(-1), v).transpose(1, 2).reshape(x.shape))


class WithoutKernel(Attention):
    """The same by torch's function, which has no kernel where the bias wants a gradient."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (f(x).view(BATCH, LENGTH, HEADS, -1).transpose(1, 2) for f in (self.q, self.k, self.v))
        return self.out(F.scaled_dot_product_attention(q, k, v, self.bias).transpose(1, 2).reshape(x.shape))


def _example(layer: type[Attention] = Attention) -> tuple[nn.Module, tuple[Tensor]]:
    torch.manual_seed(0)
    return AlikeLayers(layer).double(), (torch.randn(BATCH, LENGTH, WIDTH, dtype=torch.float64),)


def _plan(mesh: str, *constraints: str, layer: type[Attention] = Attention) -> ShardingPlan:
    model, args = _example(layer)
    return autoshard.plan(model, args, mesh=mesh, hardware="cpu-gloo", constraints=constraints, cache=False)


def _check(plan: ShardingPlan, layer: type[Attention] = Attention) -> None:
    check_as_before(*_example(layer), plan, rtol=1e-9, atol=1e-11)


def _products(plan: ShardingPlan) -> set[str]:
    """How the results of products are placed."""
    named = (e for e in plan.operators if e.name.rpartition("/")[2].removeprefix("bwd.").startswith("matmul"))
    return {autoshard.format_layout(layout, plan.mesh) for e in named if (layout := e.outputs[0])}


@pytest.mark.parametrize("layer", [Attention, WithoutKernel])
@pytest.mark.parametrize(
    ("mesh", "scheme"),
    some_thorough(
        [("tp=4", "tp"), ("dp=2,tp=2", "ddp+tp"), ("dp=2,tp=2", "fsdp+tp")], [("tp=4", "tp"), ("dp=2,tp=2", "ddp+tp")]
    ),
)
def test_heads_are_cut_and_one_all_reduce_follows_each_attention(
    mesh: str, scheme: str, layer: type[Attention]
) -> None:
    """As Megatron has it: with torch's operator there is no such plan, as it merges batch and heads."""
    plan = _plan(mesh, f"baseline {scheme}", layer=layer)
    assert _products(plan) == {"dp:S(0) tp:S(1)" if "dp" in mesh else "tp:S(1)"}
    sent = [(e.tensor, c) for e in plan.redistributions if e.phase == "forward" for c in e.collectives]
    over = [(tensor.split("/")[0], c.kind) for tensor, c in sent if "tp" in c.axes]
    assert over == [("layers.0.out", "all_reduce"), ("layers.1.out", "all_reduce")]
    _check(plan, layer)


@pytest.mark.parametrize("layout", ["a:S(2)", "a:S(3)", "a:P(sum)", "a:S(0)"])
def test_rows_columns_and_sums_are_cut_unevenly_too(layout: str) -> None:
    _check(_plan("a=2", f"layers.0/matmul={layout}", f"layers.1/matmul.1={layout}"))


def test_its_derivative_is_that_of_torch() -> None:
    generator = torch.Generator().manual_seed(0)
    x, y = (torch.randn(2, 3, 4, 5, generator=generator, dtype=torch.float64) for _ in range(2))
    x, y = x.requires_grad_(), y.mT.requires_grad_()
    assert torch.equal(product(x, y), x @ y)
    assert torch.autograd.gradcheck(
        product, (x, y.detach().transpose(0, 1).contiguous().transpose(0, 1).requires_grad_())
    )


@pytest.mark.parametrize(
    ("shape", "other"), [((2, 3, 4, 5), (1, 3, 5, 6)), ((3, 5, 4), (2, 3, 4, 6)), ((2, 3, 1, 4, 5), (2, 1, 2, 5, 6))]
)
def test_what_has_fewer_matrices_is_repeated_as_torch_repeats_it(
    shape: tuple[int, ...], other: tuple[int, ...]
) -> None:
    """To the last bit, however it lies in memory, with the gradient as a sum over what was repeated."""
    generator = torch.Generator().manual_seed(0)
    for turned in (False, True):
        x, y = (torch.randn(size, generator=generator, dtype=torch.float64) for size in (shape, other))
        x, y = (each.mT.contiguous().mT if turned else each for each in (x, y))
        x, y = x.requires_grad_(), y.requires_grad_()
        found, expected = product(x, y), x @ y
        assert torch.equal(found, expected) and found.stride() == expected.stride()
        weights = torch.randn(expected.shape, generator=generator, dtype=torch.float64)
        for ours_, theirs in zip(*(torch.autograd.grad(each, (x, y), weights) for each in (found, expected))):
            assert torch.equal(ours_, theirs) and ours_.stride() == theirs.stride()


class Relative(nn.Module):
    """Attention to positions too, which are the same for all rows, or for all of their heads."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.q, self.k, self.v, self.p, self.out = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(5))
        self.table = nn.Parameter(torch.randn(LENGTH, WIDTH // HEADS))
        self.how = how
        self.by_distance = nn.Embedding(LENGTH, WIDTH // HEADS)

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        steps = torch.arange(LENGTH)
        near = self.by_distance((steps[:, None] - steps).abs())
        q, k, v = (f(x).view(BATCH, LENGTH, HEADS, -1).transpose(1, 2) for f in (self.q, self.k, self.v))
        scores = q @ k.transpose(-2, -1)
        if self.how == "of heads":  # ESPnet, Conformer, Transformer-XL
            scores = scores + q @ self.p(positions).view(1, LENGTH, HEADS, -1).permute(0, 2, 3, 1)
        elif self.how == "of all":  # Shaw, Music Transformer
            scores = scores + torch.matmul(q, self.table.t())
        elif self.how == "equation":
            scores = scores + torch.einsum("bthd,jd->bhtj", q.transpose(1, 2), self.table)
        elif self.how == "of each step":  # Shaw, BERT, ESM
            scores = scores + torch.einsum("bhld,lrd->bhlr", q, near) + torch.einsum("lrd,bhrd->bhlr", near, k)
        elif self.how == "in front":
            scores = scores + self.table @ k.transpose(-2, -1)
        else:  # one head of keys for several of queries
            q, k = (f(x).view(BATCH, LENGTH, 2, -1, WIDTH // HEADS).permute(0, 2, 3, 1, 4) for f in (self.q, self.k))
            scores = scores + (q @ k[:, :, :1].transpose(-2, -1)).flatten(1, 2)
        a = scores.softmax(-1)
        mixed = a @ v + (torch.einsum("bhlr,lrd->bhld", a, near) if self.how == "of each step" else 0)
        return self.out(mixed.transpose(1, 2).reshape(x.shape)).square().mean()


RELATIVE = ("of heads", "of all", "of each step", "equation", "in front", "shared keys")
ALIKE = ("equation",)


@pytest.mark.filterwarnings("ignore:.*has no other to go with")  # the table, which is left whole
@pytest.mark.parametrize("how", some_thorough(RELATIVE, ALIKE))
def test_heads_are_cut_where_all_rows_meet_the_same_matrix(how: str) -> None:
    """Where rows, or rows and heads, are one batch of products or of rows, as torch has them, heads are whole."""
    torch.manual_seed(0)
    args = torch.randn(BATCH, LENGTH, WIDTH, dtype=torch.float64), torch.randn(LENGTH, WIDTH, dtype=torch.float64)
    model, pins = Relative(how).double(), ["baseline ddp+tp", *(f"{name}.weight=dp:R tp:S(0)" for name in "qkv")]
    plan = autoshard.plan(model, args, mesh="dp=2,tp=2", hardware="cpu-gloo", constraints=pins, cache=False)
    sent = [c for e in plan.redistributions if e.phase == "forward" for c in e.collectives if "tp" in c.axes]
    assert [c.kind for c in sent] == ["all_reduce"]
    check_as_before(model, args, plan, rtol=1e-9, atol=1e-11)


class Biased(nn.Module):
    """By torch's function, with fewer heads of keys, and a bias for positions that the queries say."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(6, 5))

    def forward(self, x: Tensor) -> Tensor:
        bias = x @ self.table.t()
        return F.scaled_dot_product_attention(x, x[:, :2], x[:, :2], bias, enable_gqa=True)


def test_heads_of_a_kernel_stay_apart_where_they_meet_a_matrix() -> None:
    ops = [node.op for _, node in capture(Biased(), (torch.randn(2, 4, 6, 5),)).of_kind("operator")]
    assert ours.linear.default in ops


class Channels(nn.Module):
    """Pictures, whose channels meet a matrix, beside attention of as many dims."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.linear = nn.Parameter(torch.randn(5, 5)), nn.Linear(5, 5)

    def forward(self, x: Tensor) -> Tensor:
        attended = x[:, :2] @ x[:, 1:].mT
        return (self.linear(x) @ self.weight).sum() + attended.sum()


def test_what_is_no_attention_of_these_heads_stays_as_torch_has_it() -> None:
    ops = [node.op for _, node in capture(Channels(), (torch.randn(2, 3, 4, 5),)).of_kind("operator")]
    assert ours.linear.default not in ops and ours.matmul.default in ops


class One(nn.Module):
    """A product of two tensors."""

    def __init__(self, method: str, cast: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(()))
        self.method, self.cast = method, cast

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = x * self.weight
        with torch.autocast("cpu", torch.bfloat16, enabled=self.cast):
            if self.method == "@":
                return x @ y
            return x.matmul(y) if self.method == "matmul" else torch.matmul(x, y)


@pytest.mark.parametrize(
    ("method", "shapes", "is_ours"),
    [
        ("@", [(2, 3, 4, 5), (2, 3, 5, 6)], True),
        ("matmul", [(2, 3, 4, 5), (2, 3, 5, 6)], True),
        ("torch", [(2, 3, 2, 4, 5), (2, 3, 2, 5, 6)], True),
        ("@", [(2, 3, 4, 5), (2, 1, 5, 6)], True),
        ("matmul", [(1, 3, 4, 5), (2, 1, 5, 6)], True),
        ("torch", [(3, 4, 5), (2, 3, 5, 6)], True),
        ("@", [(2, 3, 4, 5), (5, 6)], False),
        ("@", [(5, 4), (2, 3, 4, 6)], False),
        ("@", [(2, 4, 5), (2, 5, 6)], False),
    ],
)
def test_products_with_two_dims_in_front_are_one_operator(
    method: str, shapes: list[tuple[int, ...]], is_ours: bool
) -> None:
    args = tuple(torch.randn(shape) for shape in shapes)
    ops = [node.op for _, node in capture(One(method), args).of_kind("operator")]
    assert (ours.matmul.default in ops) == is_ours


def test_products_of_complex_numbers_are_torchs() -> None:
    """Their derivatives take conjugates."""
    args = tuple(torch.randn(2, 3, 4, 4, dtype=torch.complex128) for _ in range(2))
    ops = [node.op for _, node in capture(One("@"), args).of_kind("operator")]
    assert ours.matmul.default not in ops and torch.ops.aten.bmm.default in ops


def test_under_autocast_the_product_is_cast_as_torch_casts_it() -> None:
    args = torch.randn(2, 3, 4, 5), torch.randn(2, 3, 5, 6)
    graph = capture(One("@", cast=True), args)
    assert ours.matmul.default not in [node.op for _, node in graph.of_kind("operator")]
    (result,) = graph.outputs
    assert result is not None and graph.meta(result).dtype is torch.bfloat16
