"""``x[rows, columns]`` where ``rows`` is ``torch.arange``: each row is picked from, or written into, by itself, so the
batch can be cut.

So padding masks are looked up (``mask[arange(B)[:, None, None, None], arange(S)]``), and what stands at the last word
of each row (``logits[arange(B), last]``), or in one step (``scores[step, arange(B), tags]``). For torch's own operator
row numbers are numbers like any others.

And numbers in a row are a range: ``x[..., [-2], :]`` is a part of x, which is cut as parts are. Within ``torch.vmap``
over ``torch.arange`` of all rows a number is one row, and ``x[row, word]`` what ``vmap`` over dims of x itself gives:
so a mask of attention says for two words of a row what they are (Gemma 3).
"""

from __future__ import annotations

import math
import operator
from typing import Any

import torch
from torch import Tensor, fx

from ..examples import shape_of, tensor_of

Along = tuple[int | None, ...]
"""For each tensor of indices the dim of the result in which it counts all of what it picks from; None for any other."""
Indices = tuple[Any, ...]
"""Tensors, and numbers: of the dim that has one what stands there is taken."""

LARGEST = 1 << 16
"""Indices of more numbers are not looked at."""

_FUNCTIONS = {torch.arange, torch.unsqueeze, operator.getitem, operator.add, torch.add}
_METHODS = {"unsqueeze", "view", "reshape", "expand", "long", "add"}


def positions(node: fx.Node) -> tuple[Indices, Along] | None:
    """With which indices a node of ``operator.getitem`` can be computed by :func:`by_position`, or one of
    ``operator.setitem`` by :func:`write_by_position`; None where it cannot. All that it has behind them takes all.
    """
    x, indices = node.args[0], _as_tuple(node.args[1])
    while indices and _is_all(indices[-1]):
        indices = indices[:-1]
    if len(indices) > len(shape_of(x)):
        return None
    picking = [(each, size) for each, size in zip(indices, shape_of(x)) if type(each) is not int]
    given = [tensor for tensor in (tensor_of(each) for each, _ in picking) if tensor is not None]
    if not 2 <= len(given) == len(picking) or any(tensor.dtype is torch.bool for tensor in given):
        return None
    result = torch.broadcast_shapes(*(tensor.shape for tensor in given))
    found = tuple(_counts(each, size, len(result)) for each, size in picking)
    known = [dim for dim in found if dim is not None]
    is_picking = len(found) == 2 and found[0] is not None
    if node.target is operator.setitem:
        can_be = is_picking and found[1] is None
    else:
        can_be = len(set(known)) == len(known) and (len(known) == len(found) or is_picking)
    return (indices, found) if can_be else None


def is_mapped(node: fx.Node) -> bool:
    """Whether ``torch.vmap`` maps a node of ``operator.getitem`` over all rows, or words, of what it picks from."""
    if node.target is not operator.getitem:
        return False
    x, indices = node.args[0], _as_tuple(node.args[1])
    of_maps = [isinstance(each, fx.Node) and _is_of_map(each) and each.args[1] == 0 for each in indices]
    if not isinstance(x, fx.Node) or not all(of_maps):
        return False
    levels = [each.args[2] for each in indices]
    sizes = shape_of(x)[: len(levels)]
    is_all = len(sizes) == len(levels) and all(
        _counts(each.args[0], size, 1) == 0 for each, size in zip(indices, sizes)
    )
    return is_all and len(set(levels)) == len(levels) and not _reads_a_map(x)


def map_dims(node: fx.Node) -> None:
    """Has ``torch.vmap`` map the dims of what such a node picks from."""
    x: Any = node.args[0]
    waiting = sorted((each.args[2], dim, each.target) for dim, each in enumerate(_as_tuple(node.args[1])))
    taken: list[int] = []
    with node.graph.inserting_before(node):
        for level, dim, function in waiting:
            x = node.graph.call_function(function, (x, dim - sum(other < dim for other in taken), level))
            taken.append(dim)
    x.meta |= node.meta
    node.replace_all_uses_with(x)
    node.graph.erase_node(node)


def _as_tuple(index: Any) -> Indices:
    return index if isinstance(index, tuple) else (index,)


def _is_of_map(node: fx.Node) -> bool:
    return node.op == "call_function" and getattr(node.target, "__name__", "") == "_add_batch_dim"


def _reads_a_map(node: fx.Node) -> bool:
    """Whether a node is computed of what ``torch.vmap`` maps."""
    waiting, seen = [node], {node}
    while waiting:
        each = waiting.pop()
        if _is_of_map(each):
            return True
        new = set(each.all_input_nodes) - seen
        waiting += new
        seen |= new
    return False


def by_position(x: Tensor, indices: Indices, along: Along) -> Tensor:
    """``x[indices]``, where what ``along`` says of these is so; x is (a size for each index, ...)."""
    x, indices = _at_numbers(x, indices)
    shape = torch.broadcast_shapes(*(index.shape for index in indices))
    rest = x.shape[len(indices) :]
    if None not in along:
        order = sorted(range(len(along)), key=lambda k: along[k] or 0)
        sizes = [x.shape[along.index(dim)] if dim in along else 1 for dim in range(len(shape))]
        x = x.permute(*order, *range(len(along), x.dim()))
        return x.reshape(*sizes, *rest).expand(*shape, *rest).clone()
    assert along[0] is not None
    flat = x.reshape(*x.shape[:2], math.prod(rest))
    picked = indices[1].expand(shape).movedim(along[0], 0)
    found: Tensor = _Picked.apply(flat, _in_rows(flat, picked))
    return found.reshape(*picked.shape, *rest).movedim(0, along[0])


class _Picked(torch.autograd.Function):
    """``flat.gather(1, at)``, of which the backward needs no number of ``flat``: ``index``, in whose place it stands,
    may be followed by a write into what it picked from.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(flat: Tensor, at: Tensor) -> Tensor:
        return flat.gather(1, at)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(inputs[1])
        ctx.save_for_forward(inputs[1])
        ctx.shape = inputs[0].shape

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (at,) = ctx.saved_tensors
        return grad.new_zeros(ctx.shape).scatter_add(1, at, grad), None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, _: None) -> Tensor:
        (at,) = ctx.saved_tensors
        return tangent.gather(1, at)


def write_by_position(x: Tensor, indices: Indices, value: Any, along: Along) -> None:
    """``x[indices] = value`` in the same way, where the second index picks in each row."""
    assert along[0] is not None
    x, indices = _at_numbers(x, indices)
    rest = x.shape[2:]
    flat = x.reshape(*x.shape[:2], math.prod(rest))
    picked = indices[1].expand(torch.broadcast_shapes(*(index.shape for index in indices)))
    value = value.to(x.dtype) if isinstance(value, Tensor) else x.new_full((), value)
    while value.dim() > picked.dim() + len(rest) and value.shape[0] == 1:  # as an assignment has it
        value = value[0]
    value = value.expand(*picked.shape, *rest).movedim(along[0], 0)
    at = _in_rows(flat, picked.movedim(along[0], 0))
    x.copy_(flat.scatter(1, at, value.reshape(at.shape)).reshape(x.shape))


def _at_numbers(x: Tensor, indices: Indices) -> tuple[Tensor, tuple[Tensor, ...]]:
    """The view of a tensor that the numbers among its indices say, and the other indices."""
    for dim, index in reversed(list(enumerate(indices))):
        x = x.select(dim, index) if type(index) is int else x
    return x, tuple(index for index in indices if type(index) is not int)


def _in_rows(flat: Tensor, picked: Tensor) -> Tensor:
    """Numbers in each row of (rows, length, features), of shape (rows, ...), as ``gather`` along dim 1 takes them."""
    length, features = flat.shape[1:]
    picked = torch.where(picked < 0, picked + length, picked)
    return picked.reshape(len(flat), math.prod(picked.shape[1:]), 1).expand(-1, -1, features)


def as_range(index: Any) -> tuple[Any, ...] | None:
    """An index with a range for the one list of numbers in a row that it has; None of any other."""
    found = index if isinstance(index, tuple) else (index,)
    lists = [k for k, each in enumerate(found) if isinstance(each, list)]
    if len(lists) != 1 or any(isinstance(each, fx.Node | int) for each in found):
        return None
    numbers = found[lists[0]]
    if not numbers or not all(type(n) is int for n in numbers) or numbers[0] < 0 <= numbers[-1]:
        return None
    if list(numbers) != list(range(numbers[0], numbers[0] + len(numbers))):
        return None
    return (*found[: lists[0]], slice(numbers[0], numbers[-1] + 1 or None), *found[lists[0] + 1 :])


def part(x: Tensor, index: tuple[Any, ...]) -> Tensor:
    """``x[index]`` of ranges, as a tensor of its own, as what a list of numbers picks is."""
    return x[index].clone(memory_format=torch.contiguous_format)


def _is_all(index: Any) -> bool:
    """Whether an index behind others takes all that is there: ``:`` or ``...``."""
    return index is Ellipsis or index == slice(None)


def _counts(index: Any, size: int, dims: int) -> int | None:
    """The dim of a result of so many dims in which an index is ``arange(size)``, the same in all others."""
    numbers = _numbers(index)
    if numbers is None:
        return None
    long = [dim for dim, length in enumerate(numbers.shape) if length > 1] or [numbers.dim() - 1]
    if len(long) > 1 or numbers.dim() == 0 or not torch.equal(numbers.flatten(), torch.arange(size)):
        return None
    return long[0] + dims - numbers.dim()


def _numbers(node: Any) -> Tensor | None:
    """What a node gives that is made of ``torch.arange`` and moved about; None where it is not."""
    if not isinstance(node, fx.Node) or shape_of(node).numel() > LARGEST:
        return None
    if node.target is torch.arange:
        numbers = torch.arange(*node.args, **{k: v for k, v in node.kwargs.items() if k != "device"})
        return None if numbers.is_floating_point() else numbers.long()
    is_known = node.target in (_METHODS if node.op == "call_method" else _FUNCTIONS)
    if not is_known or any(isinstance(a, fx.Node) for a in (*node.args[1:], *node.kwargs.values())):
        return None
    given = _numbers(node.args[0])
    if given is None:
        return None
    if node.op == "call_method":
        made = getattr(given, str(node.target))(*node.args[1:], **node.kwargs)
    else:
        made = node.target(given, *node.args[1:], **node.kwargs)  # type: ignore[operator]
    return made if isinstance(made, Tensor) and made.dtype is torch.int64 else None
