"""Identical layers are found, and only those."""

from __future__ import annotations

import torch
from torch import nn

from autoshard.capture import CapturedGraph, capture
from autoshard.constraints.layers import layers, tied_nodes

from ..models import MLP, WithLoss, gpt2, llama


def _classes(graph: CapturedGraph) -> set[frozenset[str]]:
    return {frozenset(graph.nodes[i].name for i in members) for members in tied_nodes(graph, layers(graph))}


def _stack(*layers: nn.Module) -> CapturedGraph:
    width = 8
    return capture(WithLoss(nn.Sequential(*layers)), (torch.randn(4, width), torch.randn(4, width)))


def test_layers_of_a_transformer_are_tied_at_the_same_place() -> None:
    for make, place in [(llama, "layers.{}.feed_forward.w1.weight"), (gpt2, "h.{}.mlp.c_fc.weight")]:
        graph = capture(*make(n_layers=3))
        classes = _classes(graph)
        assert frozenset(place.format(i) for i in range(3)) in classes
        prefix = place.partition("{")[0]
        for names in classes:
            assert len(names) == 3
            assert len({name.removeprefix(prefix)[1:] for name in names}) == 1
        tied = set().union(*classes)
        layered = {node.name for node in graph.nodes if node.name.startswith(prefix)}
        assert layered == tied


def test_members_of_a_class_do_the_same_on_the_same_shapes() -> None:
    graph = capture(*llama(n_layers=3))
    for members in tied_nodes(graph, layers(graph)):
        first = graph.nodes[members[0]]
        for node in (graph.nodes[i] for i in members[1:]):
            assert (node.kind, node.phase, node.op, node.outputs) == (first.kind, first.phase, first.op, first.outputs)
            assert len(node.inputs) == len(first.inputs)


def test_a_plain_stack_of_linear_layers_is_not_tied() -> None:
    """Neighbours may well alternate: columns, then rows."""
    assert _classes(_stack(*(nn.Linear(8, 8) for _ in range(4)))) == set()


def test_a_layer_of_another_width_or_another_operation_is_not_tied_to_the_others() -> None:
    class Other(MLP):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.down(torch.tanh(self.up(x)))

    for odd in (MLP(8, 16), Other(8, 12), MLP(8, 12, bias=False)):
        classes = _classes(_stack(nn.Linear(8, 8), MLP(8, 12), odd, MLP(8, 12)))
        assert all(not any(name.startswith("model.2.") for name in names) for names in classes)
        assert frozenset({"model.1.up.weight", "model.3.up.weight"}) in classes


def test_a_single_layer_has_nothing_to_be_tied_to() -> None:
    assert _classes(capture(*llama(n_layers=1))) == set()
