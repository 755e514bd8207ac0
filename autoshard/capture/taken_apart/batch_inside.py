"""Products of tensors whose batch is not in front, (steps, rows, features), with the batch as a dim of its own.

Torch takes (T, B, K) for a matrix of T * B rows, of which no block is the steps of some rows of the batch, so that the
batch could not be cut. ``autoshard::linear`` keeps the dims in front, and each of them can be cut; its kernel is that
which torch calls. ``autoshard::outer`` is the gradient of its matrix.

So are rows and heads of attention, (B, H, T, D), where a matrix that is the same for all of them meets these by
``torch.matmul`` or an equation: queries a table of positions, or random features. Where each step, or each head, has a
matrix of its own, (T, B, H, D), that is ``autoshard::linear_of_each``.

Shapes: x is (..., K), the matrix (N, K), with two or more dims in front; of each, x is (G, ..., K), and (G, N, K).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from ..ancestors import ancestors
from ..examples import shape_of, tensor_of
from ..operators.library import define, derive
from .equations import equation_of, sides_of
from .matrix_products import MULTIPLIES

_REPEATS = ("expand", "expand_as", "repeat", torch.tile, torch.broadcast_to)
_FOLDS = (torch.reshape, torch.flatten, "view", "reshape", "flatten")


def _linear(x: Tensor, weight: Tensor) -> Tensor:
    """``x @ weight.T``."""
    return F.linear(x, weight)


def _linear_shape(x: Tensor, weight: Tensor) -> Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


def _outer(x: Tensor, y: Tensor) -> Tensor:
    """The sum of the outer products of each row of (..., N) with that of (..., K): (N, K)."""
    return x.flatten(0, -2).mT @ y.flatten(0, -2)


def _outer_shape(x: Tensor, y: Tensor) -> Tensor:
    return x.new_empty((x.shape[-1], y.shape[-1]))


linear = define("linear", _linear, _linear_shape)
outer = define("outer", _outer, _outer_shape)


def _keep(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
    x, weight = ctx.saved_tensors
    of_x, of_weight = ctx.needs_input_grad
    return linear(grad, weight.mT) if of_x else None, outer(grad, x) if of_weight else None


derive("linear", _backward, _keep)


def _linear_of_each(x: Tensor, weight: Tensor) -> Tensor:
    """``x[g] @ weight[g].T`` for each g."""
    return (x.flatten(1, -2) @ weight.mT).reshape(*x.shape[:-1], weight.shape[1])


def _linear_of_each_shape(x: Tensor, weight: Tensor) -> Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[1]))


def _outer_of_each(x: Tensor, y: Tensor) -> Tensor:
    """For each g the sum of the outer products of each row of (..., N) with that of (..., K): (G, N, K)."""
    return x.flatten(1, -2).mT @ y.flatten(1, -2)


def _outer_of_each_shape(x: Tensor, y: Tensor) -> Tensor:
    return x.new_empty((x.shape[0], x.shape[-1], y.shape[-1]))


linear_of_each = define("linear_of_each", _linear_of_each, _linear_of_each_shape)
outer_of_each = define("outer_of_each", _outer_of_each, _outer_of_each_shape)


def _backward_of_each(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
    x, weight = ctx.saved_tensors
    of_x, of_weight = ctx.needs_input_grad
    return linear_of_each(grad, weight.mT) if of_x else None, outer_of_each(grad, x) if of_weight else None


derive("linear_of_each", _backward_of_each, _keep)


def keep_batch_inside(node: fx.Node, batch: int) -> bool:
    """Rewrites a call of torch in place if it folds a batch of that length with steps in front of it: a product with a
    matrix, or cross-entropy of rows that a view made; False for any other.

    What is the batch is known by its length alone. Where another dim is as long, the call may be left as it is, or
    be rewritten for nothing: it computes the same.
    """
    return _rewrite(node, _REWRITES, partial(_is_inside, batch=batch))


def keep_heads_in_front(node: fx.Node, fronts: Collection[tuple[int, ...]]) -> bool:
    """Rewrites a call of torch in place if it multiplies all of (rows, heads, ...) with one matrix; else False.

    Args:
        fronts: the lengths of dims that are rows and heads.
    """
    return _rewrite(node, _OF_HEADS, partial(_are_heads, fronts=fronts))


Kept = Callable[[Sequence[int]], bool]
"""Whether dims of such lengths, in front of the one that is multiplied, are kept."""
_Rewrites = Mapping[Any, Callable[[fx.Node, Kept], bool]]


def _rewrite(node: fx.Node, rewrites: _Rewrites, kept: Kept) -> bool:
    rewrite = rewrites.get(node.target)
    return rewrite is not None and not any(map(_is_complex, node.all_input_nodes)) and rewrite(node, kept)


def _linear_of(node: fx.Node, kept: Kept) -> bool:
    if len(node.args) < 2 or len(shape_of(node.args[1])) != 2 or not kept(shape_of(node.args[0])[:-1]):
        return False
    node.target = _linear_inside
    return True


def _product_of(node: fx.Node, kept: Kept) -> bool:
    if len(node.args) != 2 or node.kwargs:
        return False
    x, y = map(shape_of, node.args)
    if len(y) == 2 and kept(x[:-1]):
        node.op, node.target = "call_function", _product_inside
    elif len(x) == 2 and len(y) > 2 and kept((*y[:-2], y[-1])):
        node.op, node.target = "call_function", _product_behind
    else:
        return False
    return True


def _einsum_of(node: fx.Node, kept: Kept, ahead: Sequence[int] = ()) -> bool:
    """The same of an equation, in which an index of both tensors and the result may pick the matrix: a step, a head.

    Args:
        ahead: lengths that then stand in front of those that are kept.
    """
    equation = equation_of(node)
    if equation is None or len(equation.terms) != 2:
        return False
    for (x, of_x), (y, of_y) in (equation.terms, equation.terms[::-1]):
        sides = sides_of(x, y, equation.made)
        if sides is None or len(sides.front) > 1 or not sides.columns or _is_of_parameters(of_x):
            continue
        rows = [size for label, size in zip(x, shape_of(of_x)) if label in sides.rows]
        if kept([*ahead, *rows] if sides.front else rows):
            node.target = _einsum_of_each if sides.front else _einsum_inside
            node.args = of_x, of_y, x, y, equation.made
            return True
    return False


def _cross_entropy_of(node: fx.Node, kept: Kept) -> bool:
    given = node.args + tuple(node.kwargs[k] for k in ("input", "target") if k in node.kwargs)
    if len(given) != 2:
        return False
    rows, classes = given
    x, y = _folded(rows), _folded(classes)
    if x is None or y is None or not kept(shape_of(x)[:-1]):
        return False
    if node.kwargs.get("reduction", "mean") == "none" or shape_of(y) != shape_of(x)[:-1]:
        return False
    if shape_of(rows) != (shape_of(y).numel(), shape_of(x)[-1]) or len(shape_of(classes)) != 1:
        return False
    node.args, node.target = (x, y), _cross_entropy_inside
    node.kwargs = {key: value for key, value in node.kwargs.items() if key not in ("input", "target")}
    return True


_REWRITES: _Rewrites = {
    F.linear: _linear_of,
    **dict.fromkeys(MULTIPLIES, _product_of),
    torch.functional.einsum: _einsum_of,
    F.cross_entropy: _cross_entropy_of,
}
_OF_HEADS: _Rewrites = {
    **dict.fromkeys(MULTIPLIES, _product_of),
    torch.functional.einsum: partial(_einsum_of, ahead=(1,)),  # beside rows and heads, what picks the matrix
}


def _is_inside(front: Sequence[int], batch: int) -> bool:
    """Whether a batch stands among the dims in front, but not first."""
    return len(front) > 1 and batch > 1 and front[0] not in (1, batch) and batch in front[1:]


def _are_heads(front: Sequence[int], fronts: Collection[tuple[int, ...]]) -> bool:
    """Whether rows and heads stand in front of other dims, in any order."""
    if not all(type(size) is int for size in front):
        return False
    return any(len(front) > len(each) and not Counter(each) - Counter(front) for each in fronts)


def _is_of_parameters(node: fx.Node) -> bool:
    """Whether a tensor is made of parameters and buffers, which have no batch, and of nothing else: neither of what the
    model is called with, nor repeated for each row.
    """
    made_of = ancestors([node])
    repeats = any(each.op == "placeholder" or each.target in _REPEATS for each in made_of)
    return not repeats and any(each.op == "get_attr" for each in made_of)


def _is_complex(node: fx.Node) -> bool:
    value = tensor_of(node)
    return value is not None and value.is_complex()


def _folded(rows: object) -> fx.Node | None:
    """What a view folded the dims in front of, to rows."""
    if not isinstance(rows, fx.Node) or rows.target not in _FOLDS or not rows.args:
        return None
    return rows.args[0] if isinstance(rows.args[0], fx.Node) else None


def _linear_inside(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    if torch.is_autocast_enabled(x.device.type):
        return F.linear(x, weight, bias)
    found: Tensor = linear(x, weight)
    return found if bias is None else found + bias


def _product_inside(x: Tensor, y: Tensor) -> Tensor:
    return _linear_inside(x, y.mT)


def _product_behind(x: Tensor, y: Tensor) -> Tensor:
    return _linear_inside(y.mT, x).mT.contiguous()


def _einsum_inside(x: Tensor, y: Tensor, of_x: str, of_y: str, made: str) -> Tensor:
    """``einsum`` of two tensors without a label that both have and the result, too."""
    sides = sides_of(of_x, of_y, made)
    assert sides is not None
    free, other = ("".join(sorted(labels, key=made.index)) for labels in (sides.rows, sides.columns))
    summed = sides.summed
    rows = x.permute([of_x.index(label) for label in free + summed]).flatten(len(free))
    columns = y.permute([of_y.index(label) for label in other + summed])
    sizes = columns.shape[: len(other)]
    found = _linear_inside(rows, columns.flatten(len(other)).flatten(0, len(other) - 1))
    result: Tensor = found.unflatten(-1, list(sizes)).permute([(free + other).index(label) for label in made])
    return result if made[0] in free else result.contiguous()  # torch has the other tensor's rows in front then


def _einsum_of_each(x: Tensor, y: Tensor, of_x: str, of_y: str, made: str) -> Tensor:
    """``einsum`` of two tensors with one label that both have and the result, too."""
    if torch.is_autocast_enabled(x.device.type):
        return torch.einsum(f"{of_x},{of_y}->{made}", x, y)
    sides = sides_of(of_x, of_y, made)
    assert sides is not None
    free, other = ("".join(sorted(labels, key=made.index)) for labels in (sides.rows, sides.columns))
    rows = x.permute([of_x.index(label) for label in sides.front + free + sides.summed]).flatten(1 + len(free))
    columns = y.permute([of_y.index(label) for label in sides.front + other + sides.summed])
    sizes = columns.shape[1 : 1 + len(other)]
    matrices = columns.flatten(1 + len(other)).flatten(1, len(other))
    result: Tensor = linear_of_each(rows, matrices).unflatten(-1, list(sizes))
    return result.permute([(sides.front + free + other).index(label) for label in made])


def _cross_entropy_inside(x: Tensor, classes: Tensor, **options: Any) -> Tensor:
    return F.cross_entropy(x.movedim(-1, 1), classes, **options)
