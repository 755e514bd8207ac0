"""What of an expert's cuts is offered and what is not, line by line: the table of docs/operators.md."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autoshard.capture import Ref, TensorMeta, capture
from autoshard.errors import StrategyWarning
from autoshard.layout import Layout, S
from autoshard.mesh import Mesh
from autoshard.ops import has, parts_asked_for
from autoshard.strategies import Enumerator

from ..fused_models import crossed
from ..models import graph_of
from ..strategies.subjects import operator
from ..strategies.test_rule_check import f, i

aten = torch.ops.aten


def offered(op: torch._ops.OpOverload, *args: Any, mesh: str = "a=2") -> set[str]:
    """The strategies of an operator, as in ``S(0), R -> S(0)``."""
    graph = operator(op, *args)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", StrategyWarning)
        strategies = Enumerator(graph, Mesh.parse(mesh)).strategies(graph.nodes[-1])
    return {
        ", ".join(" ".join(map(str, layout)) for layout in s.inputs)
        + " -> "
        + ", ".join(" ".join(map(str, layout)) for layout in s.outputs if layout)
        for s in strategies
    }


def test_attention_along_the_queries_is_cut_and_along_the_keys_is_not() -> None:
    q = f(2, 4, 6, 3)
    for causal in (False, True):
        found = offered(torch.ops.autoshard.attention.default, q, q, q, None, causal, None)
        assert "S(2), R, R -> S(2), S(2)" in found
        assert not any(", S(2), S(2)" in rule.partition(" -> ")[0] for rule in found)


@pytest.mark.parametrize(("rows", "mesh"), [(12, "a=2"), (11, "a=2"), (11, "a=3"), (50_257, "a=8")])
@pytest.mark.parametrize("padding", [-1, 0, 7])
@pytest.mark.parametrize("by_frequency", [False, True])
def test_an_embedding_is_cut_along_its_features_and_along_its_rows(
    rows: int, mesh: str, padding: int, by_frequency: bool
) -> None:
    looked_up = offered(aten.embedding.default, f(rows, 24), i(2, 6), padding, by_frequency, mesh=mesh)
    assert {"S(1), R -> S(2)", "S(0), R -> P(sum)"} <= looked_up
    gradient = offered(
        aten.embedding_dense_backward.default, f(2, 6, 24), i(2, 6), rows, padding, by_frequency, mesh=mesh
    )
    assert {"S(2), R -> S(1)", "R, R -> S(0)"} <= gradient


@pytest.mark.parametrize(("length", "mesh"), [(12, "a=2"), (11, "a=2"), (11, "a=3"), (50_257, "a=8"), (30_522, "a=8")])
def test_the_head_and_the_loss_are_cut_along_the_vocabulary(length: int, mesh: str) -> None:
    """Of log-softmax in the parts that capture makes of it, and of picking a logit of each row."""

    def of(op: Any, *args: Any) -> set[str]:
        return offered(op, *args, mesh=mesh)

    ours, logits, rows = torch.ops.autoshard, f(24, length), f(24, 1)
    assert "R, S(1) -> S(1)" in of(aten.mm.default, f(24, 4), f(4, length))
    assert "S(1) -> P(max)" in of(ours.row_max.default, logits, 1)
    assert "S(1), R -> P(sum)" in of(ours.row_sum.default, logits, rows, 1)
    assert "S(1), R, R -> S(1)" in of(ours.log_softmax.default, logits, rows, rows, 1)
    assert "S(1) -> P(sum)" in of(ours.row_total.default, logits, 1)
    assert "S(1), S(1), R -> S(1)" in of(ours.log_softmax_backward.default, logits, logits, rows, 1, torch.float32)
    assert "S(1), R -> P(sum)" in of(aten.gather.default, logits, 1, i(24, 1))
    assert "S(1), R -> S(1)" in of(aten.scatter.value, logits, 1, i(24, 1), -1.0)
    assert "S(1), R, R -> S(1)" in of(aten.scatter.src, logits, 1, i(24, 1), rows)
    assert "S(1), R, R -> S(1)" in of(aten.scatter_add.default, logits, 1, i(24, 3), f(24, 3))
    assert not any(rule.startswith("S(1)") for rule in of(aten.scatter.value, logits, 1, i(24, 3), -1.0))
    assert of(aten._softmax.default, logits, 1, False) == {"R -> R", "S(0) -> S(0)"}


@pytest.mark.parametrize("name", ["gpt2", "fused", "fused 2:1:1", "fused 4:1:1"])
def test_the_columns_of_a_fused_projection_are_cut_in_the_parts_that_they_are_taken_apart_into(name: str) -> None:
    """Equal ones in the weight as well; of unequal ones no DTensor can be cut, so that weights are whole."""
    graph, mesh = graph_of(name), Mesh.parse("a=2")
    enumerator = Enumerator(graph, mesh)
    parts = {"gpt2": (1, 1, 1), "fused": (1, 1, 1), "fused 2:1:1": (2, 1, 1), "fused 4:1:1": (4, 1, 1)}[name]
    of = {node.name: enumerator.strategies(node) for node in graph.nodes}
    projection = "h.0.attn.c_attn" if name == "gpt2" else "layers.0.attention.qkv"
    product = f"{projection}/{'addmm' if name == 'gpt2' else 'mm'}"
    assert any(s.outputs[0] == Layout((S(1, parts),)) for s in of[product])
    is_held = any(s.outputs[0] == Layout((S(0, parts),)) for s in of[f"{projection}.weight"])
    assert is_held == (set(parts) == {1})
    taken = [s for node in graph.nodes if node.name.startswith(projection.rpartition(".")[0]) for s in of[node.name]]
    apart = [s for s in taken if s.inputs and s.outputs[0] and s.inputs[0][0].parts and not s.outputs[0][0].parts]
    assert any(s.outputs[0][0].kind == "S" for s in apart if s.outputs[0])


def test_a_weight_that_is_taken_apart_before_its_products_is_cut_in_these_parts_and_its_gradient_too() -> None:
    """As ``nn.MultiheadAttention`` takes its own apart where keys are not queries."""
    graph = capture(*crossed())
    enumerator = Enumerator(graph, Mesh.parse("a=2"))
    held, gradients = Layout((S(0, (1, 1, 1)),)), dict(graph.gradients)
    for at, node in graph.of_kind("parameter"):
        is_held = any(s.outputs[0] == held for s in enumerator.strategies(node))
        arrives = any(s.outputs[0] == held for s in enumerator.strategies(graph.nodes[gradients[node.name].node]))
        assert is_held == arrives == ("in_proj" in node.name), node.name
        taken = [reader for _, reader in graph.of_kind("operator") if Ref(at) in reader.inputs and is_held]
        for strategies in map(enumerator.strategies, filter(lambda reader: has(reader, "split"), taken)):
            assert any(s.inputs == (held,) and set(s.outputs) == {Layout((S(0),))} for s in strategies)


def test_products_that_keep_the_dims_in_front_are_cut_along_any_of_them() -> None:
    ours, x = torch.ops.autoshard, f(4, 6, 2, 8)
    products = offered(ours.matmul.default, x, f(4, 6, 8, 2))
    assert {"S(0), S(0) -> S(0)", "S(1), S(1) -> S(1)", "S(2), R -> S(2)", "R, S(3) -> S(3)"} <= products
    assert "S(3), S(2) -> P(sum)" in products
    rows = offered(ours.linear.default, f(6, 4, 8), f(2, 8))
    assert {"S(0), R -> S(0)", "S(1), R -> S(1)", "R, S(0) -> S(2)", "S(2), S(1) -> P(sum)"} <= rows
    matrices = offered(ours.outer.default, f(6, 4, 8), f(6, 4, 2))
    assert {"S(0), S(0) -> P(sum)", "S(1), S(1) -> P(sum)", "S(2), R -> S(0)", "R, S(2) -> S(1)"} <= matrices
    of_each = offered(ours.linear_of_each.default, x, f(4, 6, 8))
    assert {"S(0), S(0) -> S(0)", "S(1), R -> S(1)", "S(2), R -> S(2)", "R, S(1) -> S(3)"} <= of_each
    assert "S(3), S(2) -> P(sum)" in of_each
    matrices = offered(ours.outer_of_each.default, x, f(4, 6, 2, 6))
    assert {"S(0), S(0) -> S(0)", "S(1), S(1) -> P(sum)", "S(2), S(2) -> P(sum)"} <= matrices
    assert {"S(3), R -> S(1)", "R, S(3) -> S(2)"} <= matrices
    samples = offered(ours.sample.default, f(4, 6, 8, 3, 3), f(4, 6, 5, 1, 2), 0, 0, False)
    assert {"S(0), S(0) -> S(0)", "S(1), S(1) -> S(1)", "S(2), R -> S(2)"} <= samples


def test_batches_that_are_put_behind_each_other_are_cut_in_these_and_other_dims_are_not() -> None:
    class Joined(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            one, other = self.linear(torch.cat([x, y])).chunk(2)
            beside = torch.cat([x, y], 1).cos().sum() + torch.cat([x[:3], y]).sin().sum()  # not along it, or not of it
            return (one * other).sum() + self.linear(x.repeat(3, 1)).exp().sum() + beside

    graph = capture(Joined(), (torch.ones(6, 4), torch.ones(6, 4)))
    enumerator = Enumerator(graph, Mesh.parse("a=2"))
    parts = {
        node.name: {p.parts for s in enumerator.strategies(node) for p in s.outputs[0] or () if p.parts}
        for _, node in graph.of_kind("operator")
    }
    assert parts["/cat"] == {(1, 1)} and parts["/repeat"] == {(1, 1, 1)}
    assert parts["/cat.1"] == parts["/cat.2"] == parts["/cos"] == parts["/sin"] == set()
    assert {(1, 1), (1, 1, 1)} == {each for found in parts.values() for each in found}


def test_a_graph_that_takes_no_product_apart_is_offered_no_parts() -> None:
    """Llama's rotary embedding takes the dims of heads apart, which no product made as its columns."""
    for name in ("llama", "vit", "moe", "conv", "assorted"):
        graph = graph_of(name)
        assert not list(parts_asked_for(graph)), name


def test_fewer_heads_of_keys_and_values_than_ranks_are_whole_until_they_are_repeated() -> None:
    heads = offered(aten.view.default, f(2, 6, 6), (2, 6, 2, 3), mesh="a=4")
    assert not any(rule.startswith("S(2)") for rule in heads)
    q = f(2, 4, 6, 3)
    assert "S(1), S(1), S(1) -> S(1), S(1)" in offered(
        torch.ops.autoshard.attention.default, q, q, q, None, True, None, mesh="a=4"
    )


def test_experts_are_cut_over_one_axis_and_over_two_and_grouped_products_of_sorted_rows_are_whole() -> None:
    products = offered(aten.bmm.default, f(4, 6, 8), f(4, 8, 2), mesh="a=2,b=2")
    assert {"S(0) R, S(0) R -> S(0) R", "S(0) S(0), S(0) S(0) -> S(0) S(0)"} <= products
    tokens, experts = TensorMeta((16, 16), torch.bfloat16), TensorMeta((4, 16, 16), torch.bfloat16)
    ends = TensorMeta((4,), torch.int32)
    assert offered(aten._grouped_mm.default, tokens, experts, ends) == {"R, R, R -> R"}


@pytest.mark.parametrize(("rows", "groups", "mesh"), [(12, 4, "a=2"), (11, 5, "a=3"), (512, 128, "a=8")])
def test_grouped_products_of_rows_in_any_order_are_cut_along_rows_columns_sums_and_groups(
    rows: int, groups: int, mesh: str
) -> None:
    x, y, group, weight = f(rows, 16), f(rows, 24), i(rows), f(groups, 16, 24)
    product = torch.ops.autoshard.grouped_product.default
    products = offered(product, x, group, weight, groups, mesh=mesh)
    assert offered(product, x, group, weight, groups + 3, mesh=mesh) == products  # beside rows of other experts
    cuts = {"S(0), S(0), R -> S(0)", "S(1), R, S(1) -> P(sum)", "R, R, S(2) -> S(1)", "R, R, S(0) -> P(sum)"}
    assert cuts <= products
    gradients = offered(torch.ops.autoshard.grouped_outer.default, x, y, group, groups, mesh=mesh)
    cuts = {"S(0), S(0), S(0) -> P(sum)", "S(1), R, R -> S(1)", "R, S(1), R -> S(2)", "R, R, R -> S(0)"}
    assert cuts <= gradients


@pytest.mark.parametrize(("channels", "mesh"), [((8, 12), "a=2"), ((7, 11), "a=2"), ((9, 6), "a=3")])
@pytest.mark.parametrize(("groups", "transposed"), [(1, False), (1, True), (2, False), (6, False), (6, True)])
def test_a_convolution_is_cut_along_its_channels(
    channels: tuple[int, int], mesh: str, groups: int, transposed: bool
) -> None:
    """Filters as the columns of a matrix, channels of the image as its rows; in groups along these; not transposed."""
    before, after = (groups * size for size in channels)
    x, grad = f(4, before, 5, 5), f(4, after, 5, 5)
    filters = f(before, channels[1], 3, 3) if transposed else f(after, channels[0], 3, 3)
    rest = ((1, 1), (1, 1), (1, 1), transposed, (0, 0), groups)
    found = offered(aten.convolution.default, x, filters, f(after), *rest, mesh=mesh)
    alone = offered(aten.convolution.default, x, filters, None, *rest, mesh=mesh)
    wanted = (True, True, True)
    back = offered(aten.convolution_backward.default, grad, x, filters, (after,), *rest, wanted, mesh=mesh)
    is_cut = groups == 1 and not transposed
    shares_groups = groups > 1 and groups % Mesh.parse(mesh).size == 0
    assert ({"S(1), S(0), S(0) -> S(1)"} <= found) == ({"S(1), S(0) -> S(1)"} <= alone) == shares_groups
    assert ({"S(1), S(1), S(0) -> S(1), S(0), S(0)"} <= back) == shares_groups
    assert ({"R, S(0), S(0) -> S(1)", "S(1), S(1), R -> P(sum)"} <= found) == is_cut
    assert ({"R, S(0) -> S(1)", "S(1), S(1) -> P(sum)"} <= alone) == is_cut
    assert ({"S(1), R, S(0) -> P(sum), S(0), S(0)", "R, S(1), S(1) -> S(1), S(1), R"} <= back) == is_cut
