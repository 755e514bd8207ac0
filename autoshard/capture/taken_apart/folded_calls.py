"""What a call of torch is where heads that are folded into the batch are a dim of their own: a table by function.

A tensor is *folded* along a dim ``d`` where dims ``d`` and ``d + 1`` of the tensor apart, of rows and of heads, are its
one. A handler says how the result of a node is computed of arguments that are apart; None where it does not know.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from inspect import signature
from string import ascii_letters
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, fx
from torch.fx.node import map_arg

from ..examples import COMPUTED_ANEW, example, shape_of, tensor_of
from ..operators.picture_samples import sampled
from .equations import equation_of
from .matrix_products import are_matrices, product, product_of_equation
from .moved_pieces import moved
from .multihead import has_a_batch, multihead_attention


class Fold(NamedTuple):
    """The dim that is folded, and how many rows and heads it has; or heads and rows, where heads are in front."""

    dim: int
    rows: int
    heads: int

    def at(self, dim: int) -> Fold:
        """The same rows and heads in another dim."""
        return self._replace(dim=dim)


class Apart(NamedTuple):
    """An argument that is to be apart."""

    node: fx.Node
    fold: Fold


class Longer(NamedTuple):
    """An argument that is to have a further dim, of one element."""

    node: fx.Node
    dim: int


@dataclass(frozen=True)
class Call:
    """What computes the result of a node apart, or, where there is no ``fold``, that result itself."""

    function: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    fold: Fold | None = None


Folds = dict[fx.Node, Fold]

Handler = Callable[[fx.Node, Folds, int], Call | None]
"""Is given a node, what is folded so far, and the length of the batch."""


def writes(node: fx.Node) -> bool:
    """Whether a node may change one of its arguments."""
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    is_in_place = name.endswith("_") or name == "setitem" or node.target in COMPUTED_ANEW
    asked = node.kwargs.get("inplace") or node.args[_INPLACE.get(node.target, len(node.args)) :][:1] == (True,)
    return is_in_place or bool(asked) or "out" in node.kwargs


def _args(node: fx.Node) -> tuple[Any, ...]:
    return node.args


def _kwargs(node: fx.Node) -> dict[str, Any]:
    return dict(node.kwargs)


def _reshaped(node: fx.Node, folds: Folds, batch: int) -> Call | None:
    """Views: that folds heads into the batch, that takes them apart again, and others behind that dim."""
    x, shape = _args(node)[0], tuple(example(node).shape)
    before = tuple(example(x).shape)
    if x in folds:
        fold = folds[x]
        front = before[: fold.dim]
        if shape[: fold.dim] != front or len(shape) <= fold.dim:
            return None
        if shape[fold.dim] == fold.rows:
            return Call(torch.reshape, (Apart(x, fold), shape))
        if shape[fold.dim] != fold.rows * fold.heads:
            return None
        apart = (*front, fold.rows, fold.heads, *shape[fold.dim + 1 :])
        return Call(torch.reshape, (Apart(x, fold), apart), fold=fold)
    d = next((d for d, pair in enumerate(zip(before, shape)) if pair[0] != pair[1]), len(before))
    if d == len(before) or batch in (0, 1, *before[:d]):  # of two dims that are as long the first is the batch
        return None
    rows, (heads, rest) = before[d], divmod(shape[d], before[d] or 1)
    is_fold = rows == batch or (
        not rows % batch and before[d + 1 : d + 2] == (heads,)
    )  # of windows just these two dims
    if rest or heads < 2 or not rows or not is_fold:
        return None
    return Call(torch.reshape, (x, (*shape[:d], rows, heads, *shape[d + 1 :])), fold=Fold(d, rows, heads))


def _moved(node: fx.Node, folds: Folds, batch: int) -> Call | None:
    """Heads that are put behind each other along the batch, so that they are in front, and beside each other again."""
    x, dim, count, along, is_stack = _args(node)
    if x in folds:
        is_taken_apart = (dim, count) == folds[x][:2]
        return Call(moved, (Apart(x, folds[x]), dim, 0, along, is_stack)) if is_taken_apart else None
    rows = example(node).shape[along] // max(count, 1)
    if is_stack or count < 2 or along or rows != batch:
        return None
    return Call(moved, (x, dim, count, along, True), fold=Fold(along, count, rows))


def _repeated(node: fx.Node, folds: Folds, batch: int) -> Call | None:
    """What is the same for all rows, once for each."""
    x, shape = _args(node)[0], tuple(example(node).shape)
    before = tuple(example(x).shape)
    if x in folds or node.kwargs or len(shape) != len(before) or before[1:] != shape[1:]:
        return None
    if batch < 2 or before[0] < 2 or shape[0] != batch * before[0]:
        return None
    return Call(_for_each_row, (x, batch), fold=Fold(0, batch, before[0]))


def _repeated_each(node: fx.Node, folds: Folds, batch: int) -> Call | None:
    """What is the same for all heads of a row, once for each of them."""
    given = {**dict(zip(("input", "repeats", "dim"), _args(node))), **_kwargs(node)}
    x, heads = given.get("input"), given.get("repeats")
    if x in folds or given.keys() != {"input", "repeats", "dim"} or given["dim"] != 0:
        return None
    if batch < 2 or shape_of(x)[:1] != (batch,) or type(heads) is not int or heads < 2:
        return None
    return Call(_for_each_head, (x, heads), fold=Fold(0, batch, heads))


def _for_each_head(x: Tensor, heads: int) -> Tensor:
    return x.unsqueeze(1).expand(x.shape[0], heads, *x.shape[1:])


def _for_each_row(x: Tensor, rows: int) -> Tensor:
    return x.unsqueeze(0).expand(rows, *x.shape)


def _expanded(node: fx.Node, folds: Folds, batch: int) -> Call | None:
    """What is the same for all rows and heads, once for each. How many heads there are is not said here: that of the
    folds so far is taken.
    """
    x, shape = _args(node)[0], tuple(example(node).shape)
    before = tuple(example(x).shape)
    found = [fold for fold in folds.values() if fold.dim == 0 and shape[:1] == (fold.rows * fold.heads,)]
    if x in folds or not found or len(before) > len(shape) or (len(before) == len(shape) and before[0] != 1):
        return None
    fold = found[-1]
    front = x if len(before) < len(shape) else Longer(x, 0)
    return Call("expand", (front, (fold.rows, fold.heads, *shape[1:])), fold=fold)


def _elementwise(node: fx.Node, folds: Folds, batch: int) -> Call | None:
    """Element by element: the dims of all tensors are aligned from the last one on."""
    value, found = example(node), [each for each in node.all_input_nodes if each in folds]
    if not found or not isinstance(value, Tensor) or (writes(node) and node.target not in COMPUTED_ANEW):
        return None
    fold = folds[found[0]]
    behind = example(found[0]).dim() - fold.dim
    fits = True

    def given(arg: fx.Node) -> Any:
        nonlocal fits
        tensor = example(arg)
        if not isinstance(tensor, Tensor):
            return arg
        made = _aligned(arg, fold.at(tensor.dim() - behind), folds)
        fits = fits and made is not None
        return made

    args, kwargs = map_arg(_args(node), given), map_arg(_kwargs(node), given)
    target = COMPUTED_ANEW.get(node.target, node.target)
    if target is not node.target and not _is_last_use(node, folds):
        return None
    return Call(target, args, kwargs, fold.at(value.dim() - behind)) if fits else None


def _aligned(arg: fx.Node, fold: Fold, folds: Folds) -> Any:
    """An argument beside one that is apart, which has that dim there or is the same for all of it; else None."""
    if fold.dim < 0:
        return arg
    size = example(arg).shape[fold.dim]
    if size == 1:
        return arg if fold.dim == 0 else Longer(arg, fold.dim)
    if folds.get(arg, fold) != fold or size != fold.rows * fold.heads:
        return None
    return Apart(arg, fold)


def _is_last_use(node: fx.Node, folds: Folds) -> bool:
    """Whether nobody else reads what a node writes into, nor could by another name."""
    into = _args(node)[0]
    return into in folds and len(into.users) == 1 and into.target not in _VIEWS


def may_be_written(x: fx.Node, call: Call) -> bool:
    """Whether what a node gives may be written into where it is computed by a call: nobody reads what it is a view of,
    and where that call gives it apart, nobody but the writer reads it.
    """
    if call.fold is None:
        if x.target not in _VIEWS or not isinstance(x.args[0], fx.Node):
            return False
        x = x.args[0]
    while len(x.users) == 1 and x.target in _VIEWS and isinstance(x.args[0], fx.Node):
        x = x.args[0]
    is_new = HANDLERS.get(x.target) in _MAKING and x.target not in _MAY_BE_GIVEN and not writes(x)
    return len(x.users) == 1 and is_new


def _along(node: fx.Node, folds: Folds, batch: int) -> Call | None:
    """What goes along one dim, the first argument behind the tensor or ``dim``; with an index, it has the same dims."""
    x = _args(node)[0] if node.args else None
    if x not in folds:
        return None
    fold, rank = folds[x], example(x).dim()
    args, kwargs = list(_args(node)), _kwargs(node)
    if len(args) > 1 and isinstance(args[1], int):
        args[1] = _beside(args[1], fold, rank)
    elif isinstance(kwargs.get("dim"), int):
        kwargs["dim"] = _beside(kwargs["dim"], fold, rank)
    else:
        return None
    if args[1:2] == [None] or kwargs.get("dim", 0) is None:
        return None
    others = [*args[1:], *kwargs.values()]
    apart = {each: _aligned(each, fold, folds) for each in others if isinstance(each, fx.Node)}
    if not all(isinstance(each, Apart) for each in apart.values()):
        return None
    args = [Apart(x, fold), *(apart.get(arg, arg) if isinstance(arg, fx.Node) else arg for arg in args[1:])]
    kwargs = {key: apart[arg] if isinstance(arg, fx.Node) else arg for key, arg in kwargs.items()}
    return Call(node.target, tuple(args), kwargs, fold)


def _reduced(node: fx.Node, folds: Folds, batch: int) -> Call | None:
    """What is found along one other dim, the first argument behind the tensor or ``dim``: a number of each row and
    head.
    """
    x, *given = _args(node) or (None,)
    kwargs = _kwargs(node)
    dim = given[0] if given else kwargs.pop("dim", None)
    keeps = given[1] if len(given) == 2 else kwargs.pop("keepdim", False)
    if x not in folds or len(given) > 2 or kwargs.keys() - {"dtype"} or type(keeps) is not bool:
        return None
    dims = list(dim) if isinstance(dim, (tuple, list)) else [dim]
    if len(dims) != 1 or type(dims[0]) is not int:
        return None
    fold = folds[x]
    beside = _beside(dims[0], fold, example(x).dim())
    if beside is None:
        return None
    is_moved = not keeps and beside < fold.dim
    return Call(node.target, (Apart(x, fold), beside, keeps), kwargs, fold.at(fold.dim - is_moved))


def _beside(dim: int, fold: Fold, rank: int) -> int | None:
    """A dim of the folded tensor in the one apart; None for that which is folded."""
    dim %= rank
    return None if dim == fold.dim else dim + (dim > fold.dim)


def _transposed(node: fx.Node, folds: Folds, batch: int) -> Call | None:
    x, *given = _args(node)
    swapped = [-2, -1] if node.target is getattr and given == ["mT"] else given
    if x not in folds or len(swapped) != 2 or type(swapped[0]) is not int:
        return None
    a, b = swapped
    rank, dims = example(x).dim(), list(range(example(x).dim()))
    dims[a % rank], dims[b % rank] = dims[b % rank], dims[a % rank]
    return _in_order(x, dims, folds[x])


def _permuted(node: fx.Node, folds: Folds, batch: int) -> Call | None:
    x, *given = _args(node)
    dims = given[0] if len(given) == 1 and isinstance(given[0], (tuple, list)) else given
    if x not in folds or not dims or node.kwargs:
        return None
    return _in_order(x, [dim % len(dims) for dim in dims], folds[x])


def _in_order(x: fx.Node, dims: list[int], fold: Fold) -> Call:
    order = [k for dim in dims for k in ((dim, dim + 1) if dim == fold.dim else (dim + (dim > fold.dim),))]
    return Call(torch.permute, (Apart(x, fold), order), fold=fold.at(dims.index(fold.dim)))


def _unbound(node: fx.Node, folds: Folds, batch: int) -> Call | None:
    """The tensors along a dim, which are taken by their numbers alone."""
    x, *given = _args(node)
    if x not in folds or any(user.target is not operator.getitem for user in node.users):
        return None
    fold, dim = folds[x], given[0] if given else _kwargs(node).get("dim", 0)
    beside = _beside(dim, fold, example(x).dim())
    if beside is None:
        return None
    return Call(torch.unbind, (Apart(x, fold), beside), fold=fold.at(fold.dim - (beside < fold.dim)))


def _joined(node: fx.Node, folds: Folds, batch: int) -> Call | None:
    """Tensors of the same rows and heads behind each other along another dim."""
    given, *rest = _args(node) if node.args else ((),)
    dim = rest[0] if rest else _kwargs(node).get("dim", 0)
    found = [x for x in given if x in folds] if isinstance(given, (tuple, list)) else []
    if not found or type(dim) is not int or node.kwargs.keys() - {"dim"}:
        return None
    fold, rank = folds[found[0]], example(found[0]).dim()
    if any(len(shape_of(x)) != rank for x in given):
        return None
    beside, tensors = _beside(dim, fold, rank), [_aligned(x, fold, folds) for x in given]
    if beside is None or not all(isinstance(x, Apart) for x in tensors):
        return None
    return Call(node.target, (tensors, beside), fold=fold)


def _stacked(node: fx.Node, folds: Folds, batch: int) -> Call | None:
    """Tensors of the same rows and heads beside each other in a new dim."""
    given, *rest = _args(node) if node.args else ((),)
    dim = rest[0] if rest else _kwargs(node).get("dim", 0)
    found = [x for x in given if x in folds] if isinstance(given, (tuple, list)) else []
    if not found or type(dim) is not int or node.kwargs.keys() - {"dim"}:
        return None
    fold, tensors = folds[found[0]], [_aligned(x, folds[found[0]], folds) for x in given]
    dim %= example(node).dim()
    if not all(isinstance(x, Apart) for x in tensors):
        return None
    is_behind = dim > fold.dim
    return Call(node.target, (tensors, dim + is_behind), fold=fold.at(fold.dim + (not is_behind)))


def _cut(node: fx.Node, folds: Folds, batch: int) -> Call | None:
    """Pieces of another dim, which are taken by their numbers alone."""
    x, *given = _args(node)
    dim = given[1] if len(given) == 2 else _kwargs(node).get("dim", 0)
    if x not in folds or not given or type(dim) is not int or node.kwargs.keys() - {"dim"}:
        return None
    beside = _beside(dim, folds[x], example(x).dim())
    if beside is None or any(user.target is not operator.getitem for user in node.users):
        return None
    return Call(node.target, (Apart(x, folds[x]), given[0], beside), fold=folds[x])


def _padded(node: fx.Node, folds: Folds, batch: int) -> Call | None:
    """With a number around it, along dims behind the one that is folded."""
    x, pad, *rest = (*_args(node), None)[: len(node.args) or 2]
    if x not in folds or not isinstance(pad, (tuple, list)) or rest[:1] not in ([], ["constant"]):
        return None
    fold, behind = folds[x], 2 * (example(x).dim() - 1 - folds[x].dim)
    if node.kwargs.get("mode", "constant") != "constant" or any(pad[behind:]):
        return None
    return Call(node.target, (Apart(x, fold), tuple(pad[:behind]), *rest), _kwargs(node), fold)


def _picked(node: fx.Node, folds: Folds, batch: int) -> Call | None:
    """One of several tensors; or ranges and single numbers of dims, and new dims, beside that which is folded."""
    x, index = _args(node)
    if x not in folds:
        return None
    fold = folds[x]
    if isinstance(example(x), tuple):
        return Call(operator.getitem, (Apart(x, fold), index), fold=fold)
    entries = list(index) if isinstance(index, tuple) else [index]
    if ... in entries:
        missing = example(x).dim() - sum(entry is not None and entry is not ... for entry in entries)
        at = entries.index(...)
        entries[at : at + 1] = [slice(None)] * missing
    if not all(entry is None or type(entry) in (int, slice) for entry in entries):
        return None
    dim = place = 0  # of the tensor, and of the result
    for k, entry in enumerate(entries):
        if entry is not None and dim == fold.dim:
            if entry != slice(None):
                return None
            entries.insert(k, slice(None))
            break
        dim += entry is not None
        place += not isinstance(entry, int)
    else:
        place += fold.dim - dim
    return Call(operator.getitem, (Apart(x, fold), tuple(entries)), fold=fold.at(place))


def _multiplied(node: fx.Node, folds: Folds, batch: int) -> Call | None:
    """Products of matrices, one for each row and head, or several, as of each window."""
    if len(node.args) != 2 or node.kwargs:
        return None
    fold = _in_front(_args(node), folds, shape_of(node.args[0])[:-2])
    if fold is None:
        return None
    x, y = (Apart(arg, fold) for arg in _args(node))
    return Call(product, (x, y), fold=fold)


def _in_front(args: Iterable[Any], folds: Folds, front: Sequence[int] | None = None) -> Fold | None:
    """How batches of matrices are folded of which one is known to be: all along the first dim in front of a matrix, the
    only one; else None.

    Args:
        front: the dims in front, where there may be others.
    """
    given = list(args)
    found = [folds[arg] for arg in given if isinstance(arg, fx.Node) and arg in folds]
    if not found or found[0].dim != 0:
        return None
    values = [example(arg) for arg in given]
    is_batch = all(isinstance(each, Tensor) and each.dim() >= 3 and not each.is_complex() for each in values)
    same = is_batch and len({(each.dtype, each.shape[:-2]) for each in values}) == 1
    same = same and len(values[0].shape[:-2]) == (1 if front is None else len(front))
    return found[0] if same and len(set(found)) == 1 else None


def _multiplied_and_added(node: fx.Node, folds: Folds, batch: int) -> Call | None:
    given = {**dict(zip(("input", "batch1", "batch2"), _args(node))), **_kwargs(node)}
    fold = _in_front((given.get("batch1"), given.get("batch2")), folds)
    if fold is None or not given.keys() <= {"input", "batch1", "batch2", "beta", "alpha"}:
        return None
    bias = example(given["input"])
    added = _aligned(given["input"], fold.at(bias.dim() - 3), folds) if isinstance(bias, Tensor) else None
    if added is None or bias.dtype != example(given["batch1"]).dtype:
        return None
    given |= {"input": added, **{name: Apart(given[name], fold) for name in ("batch1", "batch2")}}
    return Call(_product_and_sum, (), given, fold)


def _product_and_sum(input: Tensor, batch1: Tensor, batch2: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    """``torch.baddbmm``, whose arguments these are, with rows and heads in front of each matrix."""
    if torch.is_autocast_enabled(batch1.device.type):
        shape = (*batch1.shape[:2], batch1.shape[2], batch2.shape[3])
        given = (x.flatten(0, 1) for x in (input.expand(shape), batch1, batch2))
        found: Tensor = torch.baddbmm(*given, beta=beta, alpha=alpha).unflatten(0, shape[:2])
        return found
    found = product(batch1, batch2) * alpha
    return found if beta == 0 else found + input * beta  # of a bias that is not read nothing is taken, nor NaN


def _attended(node: fx.Node, folds: Folds, batch: int) -> Call | None:
    names = ("query", "key", "value", "attn_mask")
    given = {**dict(zip(names, _args(node))), **_kwargs(node)}
    fold = _in_front((given.get(name) for name in names[:3]), folds)
    if fold is None or len(node.args) > len(names) or given.get("enable_gqa"):
        return None
    given |= {name: Apart(given[name], fold) for name in names[:3]}
    if isinstance(given.get("attn_mask"), fx.Node):
        given["attn_mask"] = _aligned(given["attn_mask"], fold.at(example(given["attn_mask"]).dim() - 3), folds)
        if given["attn_mask"] is None:
            return None
    return Call(node.target, (), given, fold)


def _sampled(node: fx.Node, folds: Folds, batch: int) -> Call | None:
    """Pictures of each row and head at their places, as in deformable attention."""
    given = signature(sampled).bind(*_args(node), **_kwargs(node)).arguments
    pair = given["input"], given["grid"]
    found = [folds[x] for x in pair if x in folds]
    values = [value for value in map(tensor_of, pair) if value is not None and value.dim() == _OF_PICTURES]
    if not found or found[0].dim != 0 or len(values) < len(pair) or values[0].dtype != values[1].dtype:
        return None
    image, grid = (_aligned(x, found[0], folds) for x in pair)
    if not (isinstance(image, Apart) and isinstance(grid, Apart)):
        return None
    return Call(sampled, (), given | {"input": image, "grid": grid}, found[0])


def _masked_attention(node: fx.Node, folds: Folds, batch: int) -> Call | None:
    """Attention of several heads with a mask for each of these."""
    given = signature(multihead_attention).bind(*_args(node), **_kwargs(node)).arguments
    mask = given.get("attn_mask")
    fold = folds.get(mask) if isinstance(mask, fx.Node) else None
    if not isinstance(mask, fx.Node) or fold is None or (fold.dim, fold.heads) != (0, given["num_heads"]):
        return None
    if not has_a_batch(len(shape_of(given["query"])), *_args(node), **_kwargs(node)):
        return None
    return Call(multihead_attention, (), given | {"attn_mask": Apart(mask, fold)})


def _summed(node: fx.Node, folds: Folds, batch: int) -> Call | None:
    """An equation in which the folded dim has a label that the result keeps."""
    equation = equation_of(node)
    found = next((term for term in equation.terms if term.tensor in folds), None) if equation else None
    if equation is None or found is None:
        return None
    fold = folds[found.tensor]
    label = found.labels[fold.dim]
    if label not in equation.made or any(x in folds and label not in labels for labels, x in equation.terms):
        return None
    given = [_aligned(x, fold.at(labels.find(label)), folds) for labels, x in equation.terms]
    if not all(isinstance(arg, Apart) == (label in term.labels) for arg, term in zip(given, equation.terms)):
        return None
    other = next(letter for letter in ascii_letters if letter not in equation.text)
    apart = equation.text.replace(label, label + other)
    fold = fold.at(equation.made.index(label))
    if len(given) == 2 and sum(label in term.labels for term in equation.terms) == 1:
        x, y = sorted(equation.terms, key=lambda term: label not in term.labels)
        of_x, made = (labels.replace(label, label + other) for labels in (x.labels, equation.made))
        is_batch = any(each in equation.made for each in x.labels if each in y.labels)
        if is_batch and are_matrices(of_x, label + other + y.labels, made):
            arguments = Apart(x.tensor, folds[x.tensor]), y.tensor, of_x, label + other, y.labels, made
            return Call(_product_with_the_same, arguments, fold=fold)
    return Call(node.target, (apart, *given), fold=fold)


def _product_with_the_same(x: Tensor, y: Tensor, of_x: str, new: str, of_y: str, made: str) -> Tensor:
    """``einsum`` with a tensor that is the same for all rows and heads, which are the labels ``new``: torch multiplies
    all of these as one matrix.
    """
    sizes = [x.shape[of_x.index(label)] for label in new]
    return product_of_equation(x, y.expand(*sizes, *y.shape), of_x, new + of_y, made)


_OF_PICTURES = 4
"""Dims of pictures that are sampled, and of their places."""
_MAKING: tuple[Handler, ...] = (_elementwise, _along, _reduced, _multiplied, _multiplied_and_added)
"""Handlers of what makes a tensor of its own; an equation of one tensor may give a view."""
_MAY_BE_GIVEN = {F.dropout, "contiguous", "to", "type_as", "float", "double", "half", "bfloat16"}
"""What may give the tensor that it takes."""

PRODUCTS = (
    product,
    _product_and_sum,
    _product_with_the_same,
    multihead_attention,
    sampled,
    F.scaled_dot_product_attention,
    torch.functional.einsum,
)
"""Functions of the calls that multiply, or sample."""
_INPLACE: Mapping[Any, int] = {F.dropout: 3, F.relu: 1}
"""Where the argument of that name stands."""

_VIEWS = {"view", "reshape", "expand", "transpose", "permute", "unbind", torch.reshape, torch.transpose, torch.permute}
_VIEWS |= {torch.flatten, "flatten", torch.unflatten, "unflatten", torch.unbind, operator.getitem, "contiguous", "to"}

HANDLERS: dict[Any, Handler] = {
    **dict.fromkeys((torch.reshape, torch.flatten, torch.unflatten), _reshaped),
    **dict.fromkeys(("view", "reshape", "reshape_as", "view_as", "flatten", "unflatten"), _reshaped),
    moved: _moved,
    "repeat": _repeated,
    **dict.fromkeys((torch.repeat_interleave, "repeat_interleave"), _repeated_each),
    "expand": _expanded,
    **dict.fromkeys((operator.add, operator.sub, operator.mul, operator.truediv, operator.neg), _elementwise),
    **dict.fromkeys((torch.add, torch.sub, torch.mul, torch.div, torch.neg, torch.where, torch.exp), _elementwise),
    **dict.fromkeys((torch.masked_fill, torch.clamp, torch.tanh, torch.sigmoid, F.dropout, F.relu), _elementwise),
    **dict.fromkeys(("add", "sub", "mul", "div", "neg", "where", "exp", "masked_fill", "clamp", "tanh"), _elementwise),
    **dict.fromkeys(("sigmoid", "relu", "contiguous", "clone", "to", "type_as", "float", "double"), _elementwise),
    **dict.fromkeys(("half", "bfloat16", *COMPUTED_ANEW), _elementwise),
    **dict.fromkeys((F.softmax, torch.softmax, "softmax", F.log_softmax, torch.log_softmax), _along),
    **dict.fromkeys(("log_softmax", torch.gather, "gather"), _along),
    **dict.fromkeys((torch.sum, torch.mean, torch.max, torch.min, torch.amax, torch.amin, torch.logsumexp), _reduced),
    **dict.fromkeys(("sum", "mean", "max", "min", "amax", "amin", "logsumexp"), _reduced),
    **dict.fromkeys((torch.transpose, "transpose", torch.swapaxes, "swapaxes", getattr), _transposed),
    **dict.fromkeys((torch.permute, "permute"), _permuted),
    **dict.fromkeys((torch.unbind, "unbind"), _unbound),
    **dict.fromkeys((torch.cat, torch.concat, torch.concatenate), _joined),
    torch.stack: _stacked,
    **dict.fromkeys((torch.chunk, "chunk", torch.split, "split"), _cut),
    **dict.fromkeys((F.pad, torch._C._nn.pad), _padded),
    operator.getitem: _picked,
    **dict.fromkeys((operator.matmul, torch.matmul, "matmul", torch.bmm, "bmm"), _multiplied),
    **dict.fromkeys((torch.baddbmm, "baddbmm"), _multiplied_and_added),
    F.scaled_dot_product_attention: _attended,
    F.grid_sample: _sampled,
    F.multi_head_attention_forward: _masked_attention,
    torch.functional.einsum: _summed,
}
