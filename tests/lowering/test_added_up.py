"""Sums whose addends are reduced once, and pieces that are put together and taken apart again, under a `tp`."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import Graph, Node

import autoshard
from autoshard.capture import capture
from autoshard.capture.addends import add_products_first

from .as_before import check_as_before

WIDTH, HEADS = 8, 2
Rest = Callable[["Layer", Tensor], Tensor]


class Layer(nn.Module):
    """Attention with weights of its own for queries, keys and values, and what is done with it."""

    def __init__(self, rest: Rest, puts_together: bool) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.before, self.between = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.rest, self.puts_together = rest, puts_together

    def forward(self, x: Tensor) -> Tensor:
        return self.rest(self, x)

    def attention(self, x: Tensor) -> Tensor:
        """Of heads that are made of x (N, S, WIDTH)."""
        biases = (self.q.bias, self.k.bias, self.v.bias)
        biases = torch.cat(biases).chunk(3) if self.puts_together else biases
        made = (F.linear(x, each.weight, bias) for each, bias in zip((self.q, self.k, self.v), biases))
        q, k, v = (each.unflatten(-1, (HEADS, -1)).transpose(1, 2) for each in made)
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))  # type: ignore[no-any-return]

    def mlp(self, x: Tensor) -> Tensor:
        """A layer up and one down."""
        return self.down(self.up(x).relu())  # type: ignore[no-any-return]


def norms_behind(layer: Layer, x: Tensor) -> Tensor:
    """As in BERT."""
    x = layer.before(x + layer.attention(x))
    return layer.between(x + layer.mlp(x))  # type: ignore[no-any-return]


def side_by_side(layer: Layer, x: Tensor) -> Tensor:
    """As in GPT-J, each added to the residual."""
    normed = layer.before(x)
    return x + layer.attention(normed) + layer.mlp(normed)


@pytest.mark.parametrize(
    ("rest", "puts_together", "forward", "backward"),
    [(norms_behind, False, 4, 3), (norms_behind, True, 4, 3), (side_by_side, False, 2, 2)],
)
def test_activations_are_reduced_as_often_as_people_do(
    rest: Rest, puts_together: bool, forward: int, backward: int
) -> None:
    """Of two layers; nobody wants the gradient of what comes in, which is reduced where a norm is in front alone."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Layer(rest, puts_together) for _ in range(2)), Mean()).double()
    args = (torch.randn(2, 4, WIDTH, dtype=torch.float64),)
    plan = autoshard.plan(model, args, mesh="tp=2", hardware="cpu-gloo", constraints=["family tp=tp"])
    activations = {"forward": 0, "backward": 0}
    for each in plan.redistributions:
        activations[each.phase] += sum(c.kind == "all_reduce" and c.size_bytes == 512 for c in each.collectives)
        assert all(c.kind == "all_reduce" for c in each.collectives)
    assert activations == {"forward": forward, "backward": backward}
    check_as_before(model, args, plan, rtol=1e-9, atol=1e-9)


class Mean(nn.Module):
    """A loss."""

    def forward(self, x: Tensor) -> Tensor:
        return x.square().mean()


def test_sums_may_be_of_any_length() -> None:
    graph, value = Graph(), torch.empty(2)

    def noted(node: Node) -> Node:
        node.meta["val"] = value
        return node

    x = noted(graph.placeholder("x"))
    products = [noted(graph.call_function(torch.ops.aten.mm.default, (x, x))) for _ in range(2)]
    total = x
    for each in (*[x] * 1200, *products):
        total = noted(graph.call_function(torch.ops.aten.add.Tensor, (total, each)))
    graph.output(total)
    add_products_first(graph)
    graph.lint()
    first = next(iter(graph.find_nodes(op="call_function", target=torch.ops.aten.add.Tensor)))
    assert list(first.args) == products


class Twice(nn.Module):
    """Adds a sum to itself, and then what products make."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = x + x.cos()
        return (y + y + self.first(x) + self.second(x)).square().mean()


def test_a_sum_that_is_added_to_itself_counts_twice() -> None:
    torch.manual_seed(0)
    model, args = Twice().double(), (torch.randn(2, 4, dtype=torch.float64),)
    plan = autoshard.plan(model, args, mesh="dp=2", hardware="cpu-gloo")
    check_as_before(model, args, plan, rtol=1e-9, atol=1e-9)


class GivesBack(nn.Module):
    """Gives back what it puts together, and pieces of it."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.randn(4)), nn.Parameter(torch.randn(6))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        joined = torch.cat([self.a, self.b])
        a, b = joined.split([4, 6])
        once, twice = torch.cat([x, 2 * x]).chunk(2)
        return {"loss": (x * a).sum() + b.sum(), "joined": joined, "a": a, "x": once, "twice": twice}


def test_pieces_that_are_given_back_are_tensors_of_their_own() -> None:
    torch.manual_seed(0)
    model, args = GivesBack().double(), (torch.randn(2, 4, dtype=torch.float64),)
    graph = capture(model, args)
    own = [graph.nodes[each.node].kind for each in graph.outputs]
    assert own == ["operator"] * 5 and len(set(graph.outputs)) == 5
