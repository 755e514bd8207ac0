"""The captured graph, run node by node on real tensors, gives the eager result and gradients: an oracle of capture."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from autoshard.capture import CapturedGraph, capture

from ..models import EXAMPLES, ConvNet, graph_of
from ..oracles import interpret


def leaves_of(model: nn.Module, args: tuple[torch.Tensor, ...], graph: CapturedGraph) -> dict[str, torch.Tensor]:
    leaves: dict[str, torch.Tensor] = {name: p.detach() for name, p in model.named_parameters()}
    leaves |= {name: b.clone() for name, b in model.named_buffers()}
    leaves |= {node.name: arg for (_, node), arg in zip(graph.of_kind("input"), args)}
    for _, node in graph.of_kind("tangent"):
        meta = node.outputs[0]
        assert meta is not None
        leaves[node.name] = torch.randn(meta.shape, generator=torch.Generator().manual_seed(3)).to(meta.dtype)
    return leaves


@pytest.mark.parametrize("name", [name for name in EXAMPLES if name != "llama bf16"])
def test_interpreting_the_nodes_gives_eager_results_and_gradients(name: str) -> None:
    model, args = EXAMPLES[name]()
    graph = graph_of(name)
    leaves = leaves_of(model, args, graph)
    values = interpret(graph, leaves)
    (output,) = [values[ref.node, ref.output] for ref in graph.outputs if ref]
    expected = model(*args)
    torch.testing.assert_close(output, expected, rtol=1e-5, atol=1e-6)
    expected.backward(leaves["grad.0"])
    gradients = {name: values[ref.node, ref.output] for name, ref in graph.gradients}
    assert gradients.keys() == {name for name, _ in model.named_parameters()}
    largest = {parameter: float(p.grad.abs().max()) for parameter, p in model.named_parameters()}
    rounding = torch.finfo(torch.float32).eps * max(largest.values())  # all there is of a bias before a batch norm
    for parameter, p in model.named_parameters():
        atol = 1e-5 * largest[parameter] + rounding
        torch.testing.assert_close(gradients[parameter], p.grad, rtol=1e-4, atol=atol)


def test_bfloat16_parameters_give_eager_results_within_their_rounding() -> None:
    model, args = EXAMPLES["llama bf16"]()
    graph = graph_of("llama bf16")
    values = interpret(graph, leaves_of(model, args, graph))
    (ref,) = graph.outputs
    assert ref is not None
    torch.testing.assert_close(values[ref.node, ref.output], model(*args), rtol=1e-2, atol=1e-2)
    assert all(graph.meta(ref).dtype is torch.bfloat16 for _, ref in graph.gradients)


def test_batch_norm_statistics_are_mutations_with_the_eager_values() -> None:
    torch.manual_seed(0)
    model, args = ConvNet(), (torch.randn(4, 3, 6, 6), torch.tensor([0, 1, 2, 3]))
    graph = capture(model, args)
    values = interpret(graph, leaves_of(model, args, graph))
    model(*args)
    assert {name for name, _ in graph.mutations} == {
        "norm.running_mean",
        "norm.running_var",
        "norm.num_batches_tracked",
    }
    buffers = dict(model.named_buffers())
    for name, ref in graph.mutations:
        torch.testing.assert_close(values[ref.node, ref.output], buffers[name])


def test_a_graph_in_evaluation_mode_mutates_nothing() -> None:
    graph = capture(ConvNet().eval(), (torch.randn(4, 3, 6, 6), torch.tensor([0, 1, 2, 3])))
    assert graph.mutations == ()


@pytest.mark.parametrize("name", EXAMPLES)
def test_recorded_shapes_and_dtypes_are_those_of_the_real_tensors(name: str) -> None:
    model, args = EXAMPLES[name]()
    graph = graph_of(name)
    values = interpret(graph, leaves_of(model, args, graph))
    for i, node in enumerate(graph.nodes):
        for k, meta in enumerate(node.outputs):
            value = values[i, k]
            assert (meta is None) == (value is None)
            if meta is not None and value is not None:
                assert (tuple(value.shape), value.dtype) == (meta.shape, meta.dtype), node.name


@pytest.mark.parametrize("name", EXAMPLES)
def test_nodes_stand_in_execution_order_forward_before_backward_without_dead_ones(name: str) -> None:
    graph = graph_of(name)
    used = {ref for ref in graph.outputs if ref} | {ref for _, ref in graph.gradients + graph.mutations}
    for i, node in enumerate(graph.nodes):
        assert all(ref.node < i for ref in node.inputs)
        used |= set(node.inputs)
        if node.phase == "forward":
            assert all(graph.nodes[ref.node].phase == "forward" for ref in node.inputs)
    assert {ref.node for ref in used} >= {i for i, _ in graph.of_kind("operator")}
