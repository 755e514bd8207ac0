"""Experts that sort their tokens, captured in the tokens' own order: the model's numbers, and no sort is left."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from autoshard.capture import CapturedGraph, adapter, capture
from autoshard.capture.grouped_products import grouped_outer, grouped_product

from ..oracles import interpret
from .dropless import STAY, WAYS, Dropless, example, looped
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
