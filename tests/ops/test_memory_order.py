"""How what an operator makes of a shard lies in memory: as the graph says that it does, which redistributions go by."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor._ops._pointwise_ops import pointwise_ops

import autoshard
from autoshard.capture import CapturedGraph, Node, TensorMeta, is_random
from autoshard.layout import Layout, R
from autoshard.mesh import Mesh
from autoshard.ops import known, run_local

from ..lowering.as_before import check_as_before
from ..models import EXAMPLES
from ..oracles import run_node, wide
from ..strategies.subjects import operator, subjects
from ..strategies.test_operators import OPERATORS as CHANGING_LENGTHS
from ..strategies.test_operators import OTHERS, values_of

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
    "gradient of a gated unit": lambda: operator(aten.glu_backward.default, f(4, 3, 5, 3), f(4, 3, 5, 6), 3),
    "channels dealt out": lambda: operator(aten.channel_shuffle.default, f(4, 3, 5, 6), 3),
    "running sum": lambda: operator(aten.cumsum.default, f(4, 3, 5, 6), 1),
}


class _Caller:
    """Torch itself."""

    def call(self, op: Any, *args: Any, **kwargs: Any) -> Any:
        return op(*args, **kwargs)

    def value(self, x: Tensor) -> Tensor:
        return x


def _on_a_rank(node: Node, values: Sequence[Tensor]) -> list[Tensor]:
    """What the local form of an operator makes of whole tensors."""
    whole, mesh = Layout((R,)), Mesh(("a",), (2,))
    metas = tuple(TensorMeta(tuple(value.shape), value.dtype) for value in values)
    layouts = (whole,) * len(metas), tuple(whole if meta else None for meta in node.outputs)
    made = run_local(_Caller(), node, tuple(values), metas, *layouts, mesh, (0,))
    return list(made) if isinstance(made, tuple | list) else [made]


def _compare(graph: CapturedGraph, values: list[Tensor]) -> None:
    node = graph.nodes[-1]

    def strides(values: list[Tensor]) -> list[tuple[int, ...]]:
        return [x.stride() for x in _on_a_rank(node, values)]

    with FakeTensorMode() as mode:
        without_values = strides([mode.from_tensor(value) for value in values])
    assert strides(values) == without_values, (node.op, [x.stride() for x in values])


@pytest.mark.parametrize("name", OPERATORS)
def test_what_is_made_of_images_with_their_channels_last_lies_as_the_graph_says(name: str) -> None:
    graph = OPERATORS[name]()
    metas = [graph.meta(ref) for ref in graph.nodes[-1].inputs]
    _compare(
        graph, [torch.randn(LAST).permute(FIRST) if m.shape == (4, 3, 5, 6) else torch.randn(m.shape) for m in metas]
    )


SHAPE = 2, 4, 3
LIKE_GRADIENTS = (
    "elu_backward hardtanh_backward hardswish_backward hardsigmoid_backward softplus_backward log_sigmoid_forward "
    "binary_cross_entropy_backward mse_loss_backward smooth_l1_loss_backward huber_loss_backward "
    "_log_softmax_backward_data _softmax_backward_data _prelu_kernel _prelu_kernel_backward native_dropout_backward "
    "poisson _standard_gamma"
)
ELEMENT_BY_ELEMENT = {
    *(op for op in pointwise_ops if op.namespace == "aten" and not op._schema.is_mutable),
    *(getattr(torch.ops.aten, name).default for name in LIKE_GRADIENTS.split()),
    *(torch.ops.aten.isin.Tensor_Tensor, torch.ops.aten.isin.Tensor_Scalar, torch.ops.aten.floor_divide.default),
    *(torch.ops.aten.normal.Tensor_Tensor, torch.ops.aten.normal.float_Tensor),
}
ARGUMENTS = {"Tensor": TensorMeta(SHAPE, torch.float32), "number": 0.5, "float": 0.5, "int": 1, "bool": False}


def _lying(order: tuple[int, ...]) -> Tensor:
    return (torch.rand([SHAPE[dim] for dim in order]) * 0.8 + 0.1).permute([order.index(dim) for dim in range(3)])


ORDERS = [*map(_lying, ((0, 1, 2), (0, 2, 1), (1, 0, 2), (2, 0, 1))), torch.rand(2, 4, 6)[..., ::2]]
REPEATED = torch.rand(2, 1, 3).expand(SHAPE)
"""As the gradient of a mean lies; what comes behind the first tensor of an operator was computed, and does not."""


@pytest.mark.parametrize("op", sorted(ELEMENT_BY_ELEMENT, key=str), ids=str)
def test_what_works_element_by_element_makes_what_the_graph_says_however_its_tensors_lie(op: Any) -> None:
    wanted = [arg for arg in op._schema.arguments if not arg.has_default_value()]
    args = [ARGUMENTS.get(str(arg.type)) for arg in wanted if not arg.kwarg_only]
    kwargs = {arg.name: ARGUMENTS.get(str(arg.type)) for arg in wanted if arg.kwarg_only}
    try:
        op(*(ORDERS[0] if isinstance(arg, TensorMeta) else arg for arg in args), **kwargs)
        graph = operator(op, *args, **kwargs)
    except (RuntimeError, TypeError) as error:  # of other dtypes than these; or torch 2.12 cannot say what it makes
        assert known(op).local is None or (torch.__version__ < "2.13" and isinstance(error, NotImplementedError))
        return
    count = len(graph.nodes[-1].inputs)
    for values in product((*ORDERS, REPEATED), *[ORDERS] * (min(count, 2) - 1)):
        _compare(graph, [*values, *[values[-1]] * (count - len(values))])


def _lying_otherwise(x: Tensor) -> Iterator[Tensor]:
    """The same numbers with dims the other way round in memory, with channels last, and with the last two turned; of a
    dim of one element the step is any.
    """
    dims = list(range(x.dim()))
    for order in (dims[::-1], [0, *dims[2:], 1], [*dims[:-2], dims[-1], dims[-2]]) if len(dims) > 1 else ():
        turned = x.permute(order).contiguous().permute([order.index(dim) for dim in dims])
        yield turned.as_strided(x.shape, [1 if n == 1 else step for n, step in zip(x.shape, turned.stride())])


def _check_however_they_lie(node: Node, values: Sequence[Tensor]) -> None:
    expected = run_node(node, dict(zip(node.inputs, values)).__getitem__)
    for k, value in enumerate(values):
        for other in _lying_otherwise(value):
            given = [other if ref == node.inputs[k] else x for ref, x in zip(node.inputs, values)]
            for found, wanted in zip(_on_a_rank(node, given), expected):
                if wanted is not None:
                    message = f"{node.op}: tensor {k} of strides {other.stride()}"
                    torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-8, equal_nan=True, msg=message)


RUN_BY_NUMBERS = {**CHANGING_LENGTHS, **OTHERS}


@pytest.mark.parametrize("name", RUN_BY_NUMBERS)
def test_what_an_operator_makes_is_the_same_however_its_shards_lie(name: str) -> None:
    """Kernels that read memory in one order alone are called by torch with copies; a rank calls them itself."""
    graph = RUN_BY_NUMBERS[name](12)
    _check_however_they_lie(wide(graph.nodes[-1]), values_of(graph))


@pytest.mark.parametrize("name", EXAMPLES)
def test_so_it_is_of_the_operators_of_a_model(name: str) -> None:
    for subject in subjects(name):
        if not is_random(subject.node):
            _check_however_they_lie(subject.wide, subject.values)


class Picture(nn.Module):
    """The middle of an autoencoder of pictures: attention among pixels in front of a group norm."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.out, self.after = nn.Conv2d(3, 8, 1), nn.Linear(8, 8), nn.GroupNorm(2, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.before(x)
        pixels = x.flatten(2).transpose(1, 2)
        found = F.scaled_dot_product_attention(pixels, pixels, pixels)
        x = self.out(found).transpose(-1, -2).reshape(x.shape) + x
        return self.after(x / 2).square().mean()  # type: ignore[no-any-return]


def test_a_rank_of_one_picture_norms_it_in_groups() -> None:
    """Of one picture the step to the next is any, by which torch tells channels that come last in memory."""
    torch.manual_seed(0)
    model, args = Picture().double(), (torch.randn(2, 3, 4, 4, dtype=torch.float64),)
    plan = autoshard.plan(model, args, mesh="a=2", hardware="cpu-gloo", constraints=["baseline ddp"])
    check_as_before(model, args, plan, rtol=1e-9, atol=1e-11)
