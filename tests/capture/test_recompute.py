"""Graphs that compute again: the same numbers to the bit, and nothing of what is computed again is kept."""

from __future__ import annotations

import random
from functools import partial
from itertools import groupby

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from autoshard.capture import CapturedGraph, capture, is_random, marked, recomputable, recomputed
from autoshard.recomputation import again_name, first_name

from ..models import EXAMPLES, graph_of
from ..oracles import interpret
from .test_graph_computes_the_model import leaves_of

SEEDS = range(4)


def forward_names(graph: CapturedGraph) -> list[str]:
    return [node.name for _, node in graph.of_kind("operator") if node.phase == "forward"]


def drawn(graph: CapturedGraph, seed: int) -> set[str]:
    """Some of the operators of the forward; with the last seed all of them."""
    names = forward_names(graph)
    return set(names) if seed == SEEDS[-1] else set(random.Random(seed).sample(names, len(names) // 2))


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", EXAMPLES)
def test_results_and_gradients_are_the_same_to_the_bit(name: str, seed: int) -> None:
    model, args = EXAMPLES[name]()
    graph = graph_of(name)
    again = recomputed(graph, drawn(graph, seed))
    before, after = (interpret(each, leaves_of(model, args, each)) for each in (graph, again))
    for old, new in zip(graph.outputs, again.outputs, strict=True):
        if old is not None and new is not None:
            assert torch.equal(before[old.node, old.output], after[new.node, new.output])
    for (parameter, old), (other, new) in zip(graph.gradients, again.gradients, strict=True):
        assert parameter == other
        assert torch.equal(before[old.node, old.output], after[new.node, new.output]), parameter


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", EXAMPLES)
def test_the_backward_reads_nothing_that_it_computes_again(name: str, seed: int) -> None:
    graph = graph_of(name)
    again = recomputed(graph, drawn(graph, seed))
    position = {node.name: i for i, node in enumerate(again.nodes)}
    for i, node in enumerate(again.nodes):
        for ref in node.inputs:
            assert ref.node < i
            assert node.phase == "forward" or again.nodes[ref.node].name not in again.again
    assert {first_name(name) for name in position} - {None} == set(again.again)
    for first in again.again:
        second = again.nodes[position[again_name(first)]]
        assert second.op is again.nodes[position[first]].op and second.phase == "backward"
        assert any(position[second.name] == ref.node for node in again.nodes for ref in node.inputs)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", EXAMPLES)
def test_the_graph_is_that_of_what_a_plan_says_is_computed_again(name: str, seed: int) -> None:
    """Of the operators asked for, those whose results the backward does not need leave no trace."""
    graph = graph_of(name)
    again = recomputed(graph, drawn(graph, seed))
    anew = recomputed(graph, again.again)
    assert [node.name for node in anew.nodes] == [node.name for node in again.nodes] and anew.again == again.again


def test_what_is_computed_again_is_said_anew_each_time() -> None:
    graph = graph_of("llama")
    one, other = drawn(graph, 0), drawn(graph, 1)
    twice = recomputed(recomputed(graph, one), other)
    assert [node.name for node in twice.nodes] == [node.name for node in recomputed(graph, other).nodes]
    assert twice.fingerprint == graph.fingerprint and recomputed(twice, ()) is graph


def test_it_stands_right_before_the_first_operator_that_needs_it() -> None:
    graph = graph_of("mlp")
    again = recomputed(graph, forward_names(graph))
    names = [node.name for node in again.nodes]
    for i, node in enumerate(again.nodes):
        if first_name(node.name) is not None:
            follower = again.nodes[i + 1]
            assert any(names[ref.node] == node.name for ref in follower.inputs) or first_name(follower.name) is not None


class Dropping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(self.up(x).sin(), 0.5, self.training).cos().sum()


class Routed(nn.Module):
    """A layer that changes in place what its backward reads, as routers that divide shares by their sum do: torch
    copies what was there before, in the midst of the forward.
    """

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        shares = self.inner(x).softmax(-1).topk(2).values
        shares /= shares.sum(-1, keepdim=True)
        return x + self.outer(x).tanh() * shares.square().sum(-1, keepdim=True)


def test_copies_for_the_backward_do_not_have_all_layers_computed_again_at_its_start() -> None:
    graph = capture(nn.Sequential(*(Routed() for _ in range(4))), (torch.ones(2, 4),))
    again = recomputed(graph, recomputable(graph))
    assert any(node.name.endswith("/bwd.clone") for node in graph.nodes)
    layers = [node.name[0] for node in again.nodes if node.phase == "backward" and node.name[0].isdecimal()]
    assert [layer for layer, _ in groupby(layers)] == ["3", "2", "1", "0"]


def test_what_is_drawn_is_kept() -> None:
    graph = capture(Dropping(), (torch.ones(2, 4),))
    again = recomputed(graph, forward_names(graph))
    assert any(is_random(node) for node in graph.nodes)
    assert again.again and not any(is_random(node) for node in again.nodes if node.phase == "backward")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(x)))


def saving_products(context: object, op: object, *args: object, **kwargs: object) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if op is torch.ops.aten.addmm.default else CheckpointPolicy.PREFER_RECOMPUTE


class Marked(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(2))
        self.kind = kind

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            if self.kind == "plain":
                x = layer(x)
            elif self.kind == "whole":
                x = checkpoint(layer, x, use_reentrant=False)
            else:
                contexts = partial(create_selective_checkpoint_contexts, saving_products)
                x = checkpoint(layer, x, use_reentrant=False, context_fn=contexts)
        return x.square().mean()


def test_marks_of_the_model_are_read_as_torch_means_them() -> None:
    """What goes into a checkpointed part and what comes out of it is kept; a policy that saves saves."""
    plain, whole, selective = (capture(Marked(kind), (torch.ones(3, 4),)) for kind in ("plain", "whole", "selective"))
    assert marked(plain) == frozenset()
    inner = {
        f"layers.{k}{role}" for k in range(2) for role in (".up/t", ".up/addmm", "/gelu", ".down/t", ".down/addmm")
    }
    assert marked(whole) == inner
    assert marked(selective) == {name for name in inner if "addmm" not in name}
    assert [node.name for node in whole.nodes] == [node.name for node in plain.nodes]
    assert whole.fingerprint == plain.fingerprint
