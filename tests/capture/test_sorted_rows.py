"""Experts that sort their tokens, captured in the tokens' own order: the model's numbers, and no sort is left."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from autoshard.capture import CapturedGraph, adapter, capture
from autoshard.capture.operators.grouped_products import grouped_outer, grouped_product

from ..oracles import interpret
from .dropless import EACH, EXPERTS, STAY, WAYS, Dropless, example, looped
from .test_graph_computes_the_model import leaves_of

aten = torch.ops.aten
SORTS = {aten.sort.default, aten.sort.stable}


def _check(graph: CapturedGraph, expected: Dropless) -> None:
    """The loss and the gradients of a graph, computed in double precision whatever it asks for."""
    args, expected = tuple(arg.double() for arg in example()), expected.double()
    leaves = {name: leaf.double() for name, leaf in leaves_of(expected, args, graph).items()}
    values = interpret(graph, leaves, widen=True)
    (output,) = [values[ref.node, ref.output] for ref in graph.outputs if ref]
    loss = expected(*args)
    loss.backward(leaves["grad.0"])
    torch.testing.assert_close(output, loss.detach(), rtol=1e-9, atol=1e-12)
    gradients = {name: values[ref.node, ref.output] for name, ref in graph.gradients}
    assert gradients.keys() == {name for name, p in expected.named_parameters() if p.grad is not None}
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, expected.get_parameter(name).grad, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", WAYS)
def test_experts_are_captured_in_the_tokens_own_order_however_they_are_written(name: str) -> None:
    """Against a loop over the experts, which sorts nothing."""
    graph = capture(Dropless(WAYS[name]), example())
    operators = [node.op for _, node in graph.of_kind("operator")]
    assert not SORTS & set(operators)
    assert aten._grouped_mm.default not in operators
    assert operators.count(grouped_product) == 4  # two in the forward, and the gradients of their rows
    assert operators.count(grouped_outer) == 2
    _check(graph, Dropless(looped))


@pytest.mark.parametrize("name", STAY)
def test_a_sort_that_a_reader_depends_on_stays_as_it_was(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    graph = capture(Dropless(STAY[name]), example())
    operators = [node.op for _, node in graph.of_kind("operator")]
    assert SORTS & set(operators)
    assert not {grouped_product, grouped_outer} & set(operators)
    monkeypatch.setattr(adapter, "in_their_own_order", lambda graph: None)
    as_it_was = capture(Dropless(STAY[name]), example())
    assert list(map(repr, as_it_was.nodes)) == list(map(repr, graph.nodes))


def _grouped_mm(rows: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    return torch.ops.transformers.grouped_mm_fallback(rows, weight, ends)  # type: ignore[no-any-return]


def _as_they_are(model: Dropless, tokens: Tensor, experts: Tensor, scores: Tensor) -> Tensor:
    """As GPT-OSS has it: matrices of (E, K, N), which no transpose stands before."""
    in_order, order = experts.flatten().sort()
    ends = torch.histc(in_order.float(), EXPERTS, 0, EXPERTS - 1).cumsum(0, dtype=torch.int32)
    made = _grouped_mm(tokens[order // EACH], model.down, ends)
    made = _grouped_mm(torch.cat([made, made.square()], 1), model.up, ends)
    return (made[order.argsort()].view(len(tokens), EACH, -1) * scores.unsqueeze(-1)).sum(1)


def _looped_as_they_are(model: Dropless, tokens: Tensor, experts: Tensor, scores: Tensor) -> Tensor:
    total = torch.zeros_like(tokens)
    for e in range(EXPERTS):
        made = tokens @ model.down[e]
        score = (scores * (experts == e)).sum(-1, keepdim=True)
        total = total + score * (torch.cat([made, made.square()], 1) @ model.up[e])
    return total


def test_matrices_of_experts_may_be_parameters_as_they_are() -> None:
    with torch.library._scoped_library("transformers", "FRAGMENT") as library:
        if not hasattr(torch.ops.transformers, "grouped_mm_fallback"):
            _define_grouped_mm(library)
        graph = capture(Dropless(_as_they_are), example())
    operators = [node.op for _, node in graph.of_kind("operator")]
    assert not SORTS & set(operators)
    assert operators.count(grouped_product) == 4
    _check(graph, Dropless(_looped_as_they_are))


def _define_grouped_mm(library: torch.library.Library) -> None:
    """Stand-ins for the operators of transformers, of which a capture needs no more than the shapes."""
    name, three = "transformers::grouped_mm_fallback", "Tensor input, Tensor weight, Tensor offs"
    library.define(f"grouped_mm_fallback({three}) -> Tensor")
    library.define(f"grouped_mm_fallback_backward({three}, Tensor grad_output) -> (Tensor, Tensor)")
    torch.library.register_fake(
        name, lambda input, weight, offs: input.new_empty(input.shape[0], weight.shape[2]), lib=library
    )
    torch.library.register_fake(
        f"{name}_backward",
        lambda input, weight, offs, grad_output: (torch.empty_like(input), torch.empty_like(weight)),
        lib=library,
    )

    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        return *torch.ops.transformers.grouped_mm_fallback_backward(*ctx.saved_tensors, grad), None

    def keep(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    torch.library.register_autograd(name, backward, setup_context=keep, lib=library)


SHAPES = st.integers(0, 12), st.integers(1, 4), st.sampled_from([3, 8]), st.sampled_from([5, 16])


@settings(max_examples=60, deadline=None)
@given(*SHAPES, st.integers(0, 99), st.sampled_from([torch.float64, torch.bfloat16]))
def test_each_row_meets_the_matrix_of_its_group_and_rows_of_none_are_zeros(
    rows: int, groups: int, width: int, columns: int, seed: int, dtype: torch.dtype
) -> None:
    """Row by row; groups without rows, no rows at all, and a block of the groups as a rank has it."""
    generator = torch.Generator().manual_seed(seed)
    x, y = (torch.randn(rows, size, generator=generator, dtype=torch.float64).to(dtype) for size in (width, columns))
    weight = torch.randn(groups, width, columns, generator=generator, dtype=torch.float64).to(dtype)
    group = torch.randint(-1, groups + 1, (rows,), generator=generator)
    found = grouped_product(x, group, weight, groups + 2)
    sums = grouped_outer(x, y, group, groups)
    expected, expected_sums = torch.zeros(rows, columns).double(), torch.zeros(groups, width, columns).double()
    for s, g in enumerate(group.tolist()):
        if 0 <= g < groups:
            expected[s] = x[s].double() @ weight[g].double()
            expected_sums[g] += torch.outer(x[s].double(), y[s].double())
    tolerance = 1e-12 if dtype is torch.float64 else 5e-2
    assert found.dtype == sums.dtype == dtype
    torch.testing.assert_close(found.double(), expected, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(sums.double(), expected_sums, rtol=tolerance, atol=tolerance)
