"""Operators whose result is longer or shorter than what they read: blocks of one need not be blocks of the other."""

from __future__ import annotations

import pytest
import torch

from autoshard.layout import Layout, S
from autoshard.mesh import Mesh
from autoshard.strategies import Enumerator

from ..oracles import run_node, strategy_error, wide
from .subjects import operator
from .test_check import f

aten = torch.ops.aten
OPERATORS = {
    "repeat": lambda n: operator(aten.repeat_interleave.self_int, f(8, n), 2, 1),
    "tile": lambda n: operator(aten.repeat.default, f(8, n), [1, 2]),
    "pool": lambda n: operator(aten.avg_pool2d.default, f(6, 6, n, n), [2, 2], [2, 2]),
    "pool with halo": lambda n: operator(aten.avg_pool2d.default, f(6, 6, n, n), [3, 3], [1, 1], [1, 1]),
    "every other": lambda n: operator(aten.slice.Tensor, f(8, n), 1, 0, None, 2),
    "all but one": lambda n: operator(aten.slice.Tensor, f(8, n), 1, 0, n - 1),
    "all but the first": lambda n: operator(aten.slice.Tensor, f(8, n), 1, 1, n),
    "padded": lambda n: operator(aten.constant_pad_nd.default, f(8, n), [1, 1]),
    "upsampled": lambda n: operator(aten.upsample_nearest2d.default, f(6, 6, n, n), [2 * n, 2 * n], None, None),
    "rolled": lambda n: operator(aten.roll.default, f(8, n), [1], [1]),
    "triangle": lambda n: operator(aten.tril.default, f(n, n)),
    "split": lambda n: operator(aten.split.Tensor, f(8, n), 5, 1),
    "joined": lambda n: operator(aten.cat.default, [f(8, n), f(8, 3)], 1),
    "transposed convolution": lambda n: operator(
        aten.convolution.default, f(4, 6, n), f(6, 4, 2), None, [2], [0], [1], True, [0], 1
    ),
}


@pytest.mark.filterwarnings("ignore::autoshard.errors.StrategyWarning")
@pytest.mark.parametrize("mesh", ["a=2", "a=3", "a=4", "a=2,b=2", "a=2,b=3"])
@pytest.mark.parametrize("length", [9, 12, 16, 22, 30])
@pytest.mark.parametrize("name", OPERATORS)
def test_every_strategy_of_an_operator_that_changes_a_length_is_right(name: str, length: int, mesh: str) -> None:
    """Shrunken blocks may match where the real ones do not: 16 over 3 is 6, 6, 4, and twice as long 11, 11, 10."""
    graph, ranks = OPERATORS[name](length), Mesh.parse(mesh)
    node, generator = graph.nodes[-1], torch.Generator().manual_seed(0)
    values = [
        torch.randn(meta.shape, generator=generator, dtype=torch.float64)
        for leaf in graph.nodes[:-1]
        for meta in leaf.outputs
        if meta
    ]
    expected = list(run_node(wide(node), lambda ref: values[ref.node]))
    for strategy in Enumerator(graph, ranks).strategies(node):
        assert not strategy_error(wide(node), values, expected, strategy, ranks), strategy


def test_what_doubles_a_length_may_cut_it_where_the_ranks_divide_it() -> None:
    for parts, offered in [(2, True), (3, False), (4, True)]:
        graph = OPERATORS["repeat"](16)
        strategies = Enumerator(graph, Mesh(("a",), (parts,))).strategies(graph.nodes[-1])
        assert any(s.outputs[0] == Layout((S(1),)) for s in strategies) is offered
