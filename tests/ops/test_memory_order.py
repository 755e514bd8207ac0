"""How what an operator makes of a shard lies in memory: as the graph says that it does, which redistributions go by."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from autoshard.capture import TensorMeta
from autoshard.layout import Layout, R
from autoshard.mesh import Mesh
from autoshard.ops import run_local

from ..strategies.subjects import operator

aten = torch.ops.aten
LAST, FIRST = (4, 5, 6, 3), (0, 3, 1, 2)
"""Images (4, 3, 5, 6) whose channels are last in memory, by a permutation of (4, 5, 6, 3)."""


def f(*shape: int) -> TensorMeta:
    return TensorMeta(shape, torch.float32)


OPERATORS: dict[str, Callable[[], Any]] = {
    "gradient of a layer norm": lambda: operator(
        aten.native_layer_norm_backward.default,
        *(f(4, 3, 5, 6), f(4, 3, 5, 6), [6], f(4, 3, 5, 1), f(4, 3, 5, 1), f(6), f(6), [True] * 3),
    ),
    "layer norm": lambda: operator(aten.native_layer_norm.default, f(4, 3, 5, 6), [6], f(6), f(6), 1e-5),
    "rolled": lambda: operator(aten.roll.default, f(4, 3, 5, 6), [1], [2]),
    "rolled twice": lambda: operator(aten.roll.default, f(4, 3, 5, 6), [1, 2], [2, 3]),
    "reversed": lambda: operator(aten.flip.default, f(4, 3, 5, 6), [2]),
    "padded": lambda: operator(aten.constant_pad_nd.default, f(4, 3, 5, 6), [1, 1]),
    "running sum": lambda: operator(aten.cumsum.default, f(4, 3, 5, 6), 1),
}


class _Caller:
    """Torch itself."""

    def call(self, op: Any, *args: Any, **kwargs: Any) -> Any:
        return op(*args, **kwargs)

    def value(self, x: Tensor) -> Tensor:
        return x


@pytest.mark.parametrize("name", OPERATORS)
def test_what_is_made_of_images_with_their_channels_last_lies_as_the_graph_says(name: str) -> None:
    graph = OPERATORS[name]()
    node, whole, mesh = graph.nodes[-1], Layout((R,)), Mesh(("a",), (2,))
    metas = tuple(map(graph.meta, node.inputs))
    layouts = (whole,) * len(metas), tuple(whole if meta else None for meta in node.outputs)
    values = [torch.randn(LAST).permute(FIRST) if m.shape == (4, 3, 5, 6) else torch.randn(m.shape) for m in metas]

    def strides(values: list[Tensor]) -> list[tuple[int, ...]]:
        made = run_local(_Caller(), node, tuple(values), metas, *layouts, mesh, (0,))
        return [x.stride() for x in (made if isinstance(made, tuple | list) else (made,))]

    with FakeTensorMode() as mode:
        without_values = strides([mode.from_tensor(value) for value in values])
    assert strides(values) == without_values
