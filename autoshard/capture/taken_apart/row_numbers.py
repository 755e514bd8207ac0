"""``x[rows, columns]`` where ``rows`` is ``torch.arange``: each row is picked from, or written into, by itself, so the
batch can be cut.

So padding masks are looked up (``mask[arange(B)[:, None, None, None], arange(S)]``), and what stands at the last word
of each row (``logits[arange(B), last]``), or in one step (``scores[step, arange(B), tags]``). For torch's own operator
row numbers are numbers like any others. They may stand behind other indices (``h[lengths - 1, arange(B)]``), and count
each row several times in a row (``arange(B).repeat_interleave(k)``); other dims are counted from their start on.

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

from ..examples import are_lengths, shape_of, tensor_of
from .folded_calls import writes

Along = tuple[int | None, ...]
"""For each tensor of indices the dim of the result in which it counts what it picks from; None for any other."""
Indices = tuple[Any, ...]
"""Tensors, and numbers: of the dim that has one what stands there is taken."""

LARGEST = 1 << 22
"""Indices of more numbers are not looked at."""

_VIEWS = {torch.unsqueeze, torch.squeeze, torch.reshape, torch.flatten, torch.transpose, torch.permute}
_VIEWS |= {torch.broadcast_to, torch.functional.meshgrid, operator.getitem}
_FUNCTIONS = _VIEWS | {operator.add, operator.sub, operator.mul, torch.add, torch.sub, torch.mul}
_FUNCTIONS |= {torch.tile, torch.repeat_interleave, torch.clone}
_VIEW_METHODS = {"unsqueeze", "squeeze", "view", "reshape", "flatten", "transpose", "permute", "t", "expand", "long"}
_VIEW_METHODS |= {"to", "contiguous"}
_METHODS = _VIEW_METHODS | {"repeat", "tile", "repeat_interleave", "clone", "add", "sub", "mul"}
_LIKE_ANOTHER = {"expand_as", "view_as", "reshape_as"}
"""Methods that read of their argument its shape alone."""


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
    is_written = node.target is operator.setitem
    found = _along(picking, torch.broadcast_shapes(*(tensor.shape for tensor in given)), starts=not is_written)
    if is_written:
        can_be = len(found) == 2 and found[0] is not None and found[1] is None
    else:
        can_be = any(dim is not None for dim in found) and found.count(None) <= 1
    return (indices, found) if can_be else None


def _along(picking: list[tuple[Any, int]], shape: torch.Size, starts: bool) -> Along:
    """Of indices, each with the size of the dim that it picks from, and that shape of the result; all are None where it
    is not clear what they count.

    Args:
        starts: whether the start of a dim counts, too, beside one that is counted to its end.
    """
    counted = [(_counts(each, size, shape), size) for each, size in picking]
    ends = {dim for dim, size in counted if dim is not None and shape[dim] == size}

    def is_known(dim: int, size: int) -> bool:
        if not ends:
            return shape[dim] > size
        return shape[dim] == size or (starts and shape[dim] < size and dim not in ends)

    found = tuple(dim if dim is not None and is_known(dim, size) else None for dim, size in counted)
    known = [dim for dim in found if dim is not None]
    is_clear = len(set(known)) == len(known) and (bool(ends) or len(known) == 1)
    return found if is_clear else (None,) * len(found)


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
        _counts(each.args[0], size, torch.Size((size,))) == 0 for each, size in zip(indices, sizes)
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
    for k, dim in enumerate(along):
        if dim is not None and shape[dim] < x.shape[k]:
            x = x.narrow(k, 0, shape[dim])
    rows = sorted((k for k, dim in enumerate(along) if dim is not None), key=lambda k: along[k] or 0)
    order = [*rows, *(k for k in range(x.dim()) if k not in rows)]
    if None not in along:
        sizes = [x.shape[along.index(dim)] if dim in along else 1 for dim in range(len(shape))]
        return x.permute(order).reshape(*sizes, *rest).expand(*shape, *rest).clone()
    x = x if order == list(range(x.dim())) else x.permute(order)
    flat = x.reshape(math.prod(x.shape[: len(rows)]), x.shape[len(rows)], math.prod(rest))
    front, dims = tuple(range(len(rows))), [along[k] or 0 for k in rows]
    picked = indices[along.index(None)].expand(shape).movedim(dims, front)
    found: Tensor = _Picked.apply(flat, _in_rows(flat, picked))
    return found.reshape(*picked.shape, *rest).movedim(front, dims)


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
    return picked.reshape(len(flat), picked.numel() // max(len(flat), 1), 1).expand(-1, -1, features)


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


def _counts(index: Any, size: int, shape: torch.Size) -> int | None:
    """The dim of a result of that shape in which an index is ``arange(size)``, the start of it, or each number of it
    several times in a row; the same in all other dims.
    """
    numbers = _numbers(index)
    if numbers is None or type(size) is not int:
        return None
    ahead = len(shape) - numbers.dim()
    for dim, length in enumerate(numbers.shape):
        if not are_lengths((length,), (shape[ahead + dim],)) or not length * size:
            continue
        if length > size and length % size:
            continue
        line = torch.arange(length) // max(length // size, 1)
        if torch.equal(numbers, line.view(-1, *[1] * (numbers.dim() - dim - 1)).expand_as(numbers)):
            return ahead + dim
    return None


def _numbers(index: Any) -> Tensor | None:
    """What a node gives that is made of ``torch.arange`` and moved about; None where it is not."""
    made = _computed(index)
    return made if isinstance(made, Tensor) else None


def _computed(node: Any) -> Any:
    """The same; or several, in a tuple."""
    if not isinstance(node, fx.Node) or shape_of(node).numel() > LARGEST or _is_written(node):
        return None
    if node.target is torch.arange:
        made = torch.arange(*node.args, **{k: v for k, v in node.kwargs.items() if k != "device"})
        return None if made.is_floating_point() else made.long()
    if node.target in _LIKE_ANOTHER:
        x, other = node.args
        given = _computed(x)
        return None if given is None else getattr(given, str(node.target))(torch.empty(()).expand(shape_of(other)))
    if node.target not in (_METHODS if node.op == "call_method" else _FUNCTIONS):
        return None
    known = {each: _computed(each) for each in node.all_input_nodes}
    if any(each is None for each in known.values()):
        return None
    args, kwargs = fx.map_arg((node.args, node.kwargs), known.__getitem__)
    if node.target == "to":
        dtypes = {each for each in (*args[1:], *kwargs.values()) if isinstance(each, torch.dtype)}
        return args[0] if dtypes <= {torch.int64} else None
    function: Any = getattr(torch.Tensor, node.target) if isinstance(node.target, str) else node.target
    made = function(*args, **kwargs)
    return made if isinstance(made, tuple) or made.dtype is torch.int64 else None


def _is_written(node: fx.Node) -> bool:
    """Whether something writes into what a node gives, or into what may be a view of that."""
    views = _VIEWS | _VIEW_METHODS | _LIKE_ANOTHER
    readers = [user for user in node.users if user.args[:1] == (node,) or user.kwargs.get("out") is node]
    return any(writes(user) or (user.target in views and _is_written(user)) for user in readers)
