"""Products of matrices with several dims in front, attention that is written out, as one operator.

Torch computes ``q @ k.transpose(-2, -1)`` of (B, H, T, D) as one batch of B * H products. Of that dim no block is some
heads of several rows, so that attention could be cut along its batch alone. ``autoshard::matmul`` keeps the dims in
front, and each of them can be cut. It calls the kernel that torch calls, with the copies that torch makes for it.

Where one of the two has no such dim, or one of a single element (positions that are the same for all rows, keys that
all heads share), it is repeated along it, as torch repeats it for its batch.

Shapes: x is (..., M, K), y is (..., K, N), with two or more dims in front that are the same.
"""

from __future__ import annotations

import operator
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from ..examples import is_unknown, shape_of, tensor_of
from ..operators.library import define, derive
from .equations import equation_of, sides_of

MULTIPLIES = (operator.matmul, torch.matmul, "matmul")
LEAST = 4
"""With fewer dims a product is a batch of products as it is."""


def _matmul(x: Tensor, y: Tensor) -> Tensor:
    """The product of each pair of matrices."""
    return torch.matmul(x, y)


def _matmul_shape(x: Tensor, y: Tensor) -> Tensor:
    return x.new_empty((*x.shape[:-1], y.shape[-1]))


matmul = define("matmul", _matmul, _matmul_shape)


def product(x: Tensor, y: Tensor) -> Tensor:
    """``x @ y``; under autocast torch's own, which knows what to cast."""
    if torch.is_autocast_enabled(x.device.type):
        return x @ y
    if x.shape[:-2] != y.shape[:-2]:
        front = torch.broadcast_shapes(x.shape[:-2], y.shape[:-2])
        x, y = (each if each.shape[:-2] == front else each.expand(*front, *each.shape[-2:]) for each in (x, y))
    found: Tensor = matmul(_as_a_batch(x), _as_a_batch(y))
    return found


def _as_a_batch(x: Tensor) -> Tensor:
    """A copy where the dims in front are no single dim in memory: torch's kernel takes one."""
    front = range(x.dim() - 3)
    return x if all(x.stride(d) == x.shape[d + 1] * x.stride(d + 1) for d in front) else x.contiguous()


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
    x, y = ctx.saved_tensors
    of_x, of_y = ctx.needs_input_grad
    grad = _as_a_batch(grad)
    return product(grad, y.mT) if of_x else None, product(x.mT, grad) if of_y else None


def _keep(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


derive("matmul", _backward, _keep)


def take_equation_apart(node: fx.Node) -> bool:
    """Rewrites a call of ``torch.einsum`` in place if it multiplies matrices of real numbers, one for each index of two
    or more dims that both tensors have and the result: attention, as an equation. Else False.
    """
    equation = equation_of(node)
    if equation is None or len(equation.terms) != 2:
        return False
    (of_x, x), (of_y, y) = equation.terms
    sides = sides_of(of_x, of_y, equation.made)
    if sides is None or len(sides.front) < LEAST - 2:
        return False
    values = [value for value in (tensor_of(x), tensor_of(y)) if value is not None and not value.is_complex()]
    if len(values) != len(equation.terms):
        return False
    sizes = [dict(zip(of, value.shape)) for of, value in zip((of_x, of_y), values)]
    if values[0].dtype != values[1].dtype or any(
        sizes[0][label] != sizes[1][label] for label in sides.front + sides.summed
    ):
        return False
    node.args, node.target = (x, y, of_x, of_y, equation.made), product_of_equation
    return True


def are_matrices(of_x: str, of_y: str, made: str) -> bool:
    """Whether an equation of two tensors multiplies matrices, one for each index of two or more dims."""
    sides = sides_of(of_x, of_y, made)
    return sides is not None and len(sides.front) >= LEAST - 2


def product_of_equation(x: Tensor, y: Tensor, of_x: str, of_y: str, made: str) -> Tensor:
    """``einsum`` of two tensors with these labels (:func:`are_matrices`), the dims in front kept."""
    sides = sides_of(of_x, of_y, made)
    assert sides is not None
    front, rows, summed, columns = sides
    sizes = dict(zip(of_x, x.shape)) | dict(zip(of_y, y.shape))

    def matrices(tensor: Tensor, of: str, first: str, second: str) -> Tensor:
        in_order = tensor.permute([of.index(label) for label in front + first + second])
        lengths = (prod(sizes[label] for label in labels) for labels in (first, second))
        return in_order.reshape(*in_order.shape[: len(front)], *lengths)

    found = product(matrices(x, of_x, rows, summed), matrices(y, of_y, summed, columns))
    order = front + rows + columns
    result: Tensor = found.reshape([sizes[label] for label in order]).permute([order.index(label) for label in made])
    return result


def is_product(node: fx.Node) -> bool:
    """Whether a node multiplies matrices of real numbers, of which one tensor at least has two or more dims in front,
    and none is a single matrix.
    """
    if node.target not in MULTIPLIES or len(node.args) != 2 or node.kwargs:
        return False
    x, y = map(tensor_of, node.args)
    if x is None or y is None or x.dtype != y.dtype or x.is_complex():
        return False
    if is_unknown(x) or is_unknown(y):
        return x.dim() == y.dim() >= LEAST and x.shape[:-2] == y.shape[:-2]
    return max(x.dim(), y.dim()) >= LEAST and min(x.dim(), y.dim()) >= LEAST - 1


def fronts_of(graph: fx.Graph) -> set[tuple[int, ...]]:
    """The lengths of the dims in front of the matrices that a graph multiplies, rows and heads of its attention."""
    found: set[tuple[int, ...]] = set()
    for node in graph.nodes:
        if any(is_unknown(tensor_of(x)) for x in node.all_input_nodes):
            continue
        equation = equation_of(node)
        if node.target is F.scaled_dot_product_attention:
            query = node.args[0] if node.args else node.kwargs["query"]
            found.add(tuple(shape_of(query)[:-2]))
        elif node.target is product or is_product(node):
            found.add(tuple(torch.broadcast_shapes(*(shape_of(x)[:-2] for x in node.args))))
        elif equation is not None and len(equation.terms) == 2:
            x, y = equation.terms
            sides = sides_of(x.labels, y.labels, equation.made)
            sizes = dict(zip(x.labels, shape_of(x.tensor)))
            found |= {tuple(sizes[label] for label in sides.front)} if sides else set()
    return {front for front in found if len(front) >= LEAST - 2}
