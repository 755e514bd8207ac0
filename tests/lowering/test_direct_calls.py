"""Graphs that call torch's own functions for their operators do what they did with the operators themselves."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import fx
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from autoshard.lowering.adapter import BoxedCodeGen
from autoshard.lowering.direct_calls import called_directly
from autoshard.ops import DIRECT

aten = torch.ops.aten

X, Y = torch.arange(6.0).reshape(2, 3) + 1, torch.arange(6.0).reshape(2, 3) - 2
WIDE = torch.ones(2, 3, 4)[:, :, ::2]  # not contiguous

CALLS: dict[Any, list[tuple[tuple[Any, ...], dict[str, Any]]]] = {
    aten.add.Tensor: [((X, Y), {}), ((X, 1e-5), {}), ((X, 2), {"alpha": 3}), ((X.int(), 0.5), {}), ((X, Y.half()), {})],
    aten.add.out: [((X, Y), {"out": torch.empty(2, 3)}), ((X, Y), {"alpha": 3, "out": torch.empty(2, 3)})],
    aten.addmm.default: [((X[0], X, Y.T @ Y), {}), ((X[0], X, Y.T @ Y), {"beta": 0.5, "alpha": 2})],
    aten.bmm.default: [((WIDE, WIDE.transpose(1, 2)), {})],
    aten.bmm.out: [((WIDE, WIDE.transpose(1, 2)), {"out": torch.empty(2, 3, 3)})],
    aten.cat.default: [(([X, Y],), {}), (((X, Y), -1), {}), (([X.int(), Y], 0), {})],
    aten.clone.default: [((WIDE,), {}), ((WIDE,), {"memory_format": torch.contiguous_format})],
    aten.contiguous.default: [((X,), {}), ((WIDE,), {}), ((WIDE,), {"memory_format": torch.contiguous_format})],
    aten.div.Tensor: [((X, Y), {}), ((X, 3), {}), ((X.int(), 2), {})],
    aten.expand.default: [((X, [4, 2, 3]), {}), ((X, (4, -1, 3)), {}), ((X, [2, 3]), {"implicit": True})],
    aten.mean.dim: [((X, [0]), {}), ((X, (-1,), True), {}), ((X, [0, 1]), {"dtype": torch.float64}), ((X, None), {})],
    aten.mm.default: [((X, Y.T), {})],
    aten.mm.out: [((X, Y.T), {"out": torch.empty(2, 2)})],
    aten.mul.Tensor: [((X, Y), {}), ((X, -0.5), {}), ((X.int(), 2), {}), ((X.bfloat16(), Y), {}), ((X, Y[0, 0]), {})],
    aten.neg.default: [((X,), {})],
    aten.permute.default: [((X, [1, 0]), {}), ((WIDE, (2, 0, 1)), {})],
    aten.pow.Tensor_Scalar: [((X, 2), {}), ((X, 0.5), {}), ((X.int(), 2), {})],
    aten.reshape.default: [((X, [6]), {}), ((X, (3, -1)), {}), ((WIDE, [12]), {}), ((X[0, 0], []), {})],
    aten.rsqrt.default: [((X,), {})],
    aten.sigmoid.default: [((X,), {})],
    aten.sub.Tensor: [((X, Y), {}), ((X, 1), {"alpha": 2}), ((X, Y.double()), {})],
    aten.sum.dim_IntList: [
        ((X, [0]), {}),
        ((X, (0, 1), True), {}),
        ((X, [-1]), {"dtype": torch.float64}),
        ((X, []), {}),
        ((X, None, True), {}),
        ((X > 2, [1]), {}),
    ],
    aten.t.default: [((X,), {}), ((X[0],), {})],
    aten.transpose.int: [((X, 0, 1), {}), ((WIDE, -1, 0), {})],
    aten.unsqueeze.default: [((X, 0), {}), ((X, -1), {})],
    aten.view.default: [((X, [6]), {}), ((X, (3, -1)), {}), ((X[0, 0], []), {})],
    aten.view.dtype: [((X, torch.int32), {}), ((torch.ones(2, 4), torch.int64), {})],
}


class _Arrivals(TorchDispatchMode):
    """Notes each operator that is dispatched, with what it takes and gives."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[object] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        self.seen.append(tree_map(_told, (func, args, kwargs or {}, found)))
        return found


def _told(value: object) -> object:
    if not isinstance(value, torch.Tensor):
        return value
    return value.dtype, tuple(value.shape), value.stride(), value.data_ptr() == X.data_ptr(), value.tolist()


def _arrivals(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[object], object]:
    with torch.no_grad(), _Arrivals() as arrivals:
        found = function(*args, **kwargs)
    return arrivals.seen, _told(found)


def test_every_function_is_tried() -> None:
    assert CALLS.keys() == DIRECT.keys()


@pytest.mark.parametrize(
    ("operator", "args", "kwargs"),
    [pytest.param(op, *call, id=f"{op}-{k}") for op, calls in CALLS.items() for k, call in enumerate(calls)],
)
def test_the_same_operators_are_dispatched_with_the_same_arguments(
    operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    assert _arrivals(DIRECT[operator], args, kwargs) == _arrivals(operator, args, kwargs)


def test_names_notes_and_order_of_a_graph_stay_and_the_graph_itself_too() -> None:
    graph = fx.Graph()
    graph.set_codegen(BoxedCodeGen())
    x = graph.placeholder("x")
    product = graph.call_function(aten.mul.Tensor, (x, 2))
    product.meta["label"] = "a product"
    kept = graph.call_function(aten.silu.default, (product,))
    graph.output((kept,))
    before = str(graph)

    copy = called_directly(graph)
    assert str(graph) == before
    assert [node.name for node in copy.nodes] == [node.name for node in graph.nodes]
    assert [node.target for node in copy.nodes][1:3] == [torch.mul, aten.silu.default]
    assert next(node for node in copy.nodes if node.name == product.name).meta["label"] == "a product"
    assert fx.GraphModule(torch.nn.Module(), copy)([X])[0].equal(fx.GraphModule(torch.nn.Module(), graph)([X])[0])
