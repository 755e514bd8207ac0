"""Masks that pick rows in a traced forward, and whether two of them are the same."""

from __future__ import annotations

import operator
import re
from collections import Counter
from collections.abc import Collection, Iterator
from inspect import signature
from itertools import takewhile
from types import FunctionType
from typing import Any

import torch
from torch import fx

from ..examples import name_of, shape_of, tensor_of

_WRITING = frozenset(
    "setitem iadd isub imul itruediv ifloordiv imod ipow imatmul iand ior ixor ilshift irshift".split()
)
"""What writes into its first argument, by name, beside methods that end with an underscore."""
_STATISTICS = frozenset({"batch_norm", "instance_norm", "native_batch_norm"})
"""What writes into its second and third arguments."""
RANDOM = re.compile("rand|bernoulli|multinomial|normal|poisson|dropout|exponential|uniform|geometric|cauchy")
"""What draws, by name."""
_MOST_CALLS = 8
"""So many calls make a mask at most that is found to be the same as another one."""
_VIEWS = frozenset(
    "view reshape flatten unflatten squeeze unsqueeze transpose t permute getitem expand expand_as contiguous detach "
    "select narrow chunk split unbind view_as reshape_as movedim moveaxis swapaxes swapdims to type_as bool ravel "
    "float double half bfloat16 long int short byte char type cpu cuda getattr diagonal unfold as_strided real imag "
    "tensor_split hsplit vsplit dsplit dropout alpha_dropout feature_dropout broadcast_to atleast_1d atleast_2d "
    "atleast_3d adjoint positive conj resolve_conj resolve_neg view_as_real view_as_complex".split()
)
"""What gives its first argument's memory, or may."""
_OF_PYTHON = frozenset({"and_", "or_", "not_", "is_"})


def written_into(graph: fx.Graph) -> Counter[Any]:
    """How often the memory of nodes is written into, by the node that made it."""

    return Counter(memory_of(given) for node in graph.nodes for given in written_by(node))


def written_by(node: fx.Node) -> list[Any]:
    """What a call writes into."""
    name, found = name_of(node), list[Any]()
    if node.op not in ("call_function", "call_method"):
        return found
    if name in _WRITING or (name.endswith("_") and not name.endswith("__") and name not in _OF_PYTHON):
        found += node.args[:1]
    elif name in _STATISTICS:
        given = dict(zip(("input", "running_mean", "running_var"), node.args)) | node.kwargs
        found += [given[key] for key in ("running_mean", "running_var") if isinstance(given.get(key), fx.Node)]
    elif _is_in_place(node):
        found += node.args[:1] or [node.kwargs.get("input")]
    schema = getattr(node.target, "_schema", None)
    if schema is not None and schema.is_mutable:
        found += node.all_input_nodes
    out = node.kwargs.get("out")
    return found + (list(out) if isinstance(out, tuple | list) else [out] if out is not None else [])


def _is_in_place(node: fx.Node) -> bool:
    """Whether a function is told to write into what it is given: ``F.relu(x, True)``."""
    if "inplace" in node.kwargs:
        return bool(node.kwargs["inplace"])
    if not isinstance(node.target, FunctionType) or True not in node.args:
        return False
    names = list(signature(node.target).parameters)
    return bool(dict(zip(names, node.args)).get("inplace"))


def memory_of(node: Any) -> Any:
    """The node that made the memory in which the tensor of a node lies, as far as views go back."""
    for made in seen_through(node):
        node = made
    return node


def seen_through(node: Any) -> Iterator[Any]:
    """A node, and those of which it is a view, or a write's result, one after the other."""
    yield node
    while isinstance(node, fx.Node) and node.args:
        if name_of(node) not in _VIEWS and not any(given is node.args[0] for given in written_by(node)):
            return
        node = node.args[0]
        yield node


def same(a: fx.Node, b: fx.Node, written: Collection[Any], calls: int = _MOST_CALLS) -> bool:
    """Whether two nodes give the same: one node, or so many calls alike, at most, of what nothing writes into."""
    if a is b:
        return True
    if not calls or a.op not in ("call_function", "call_method") or (a.op, a.target) != (b.op, b.target):
        return False
    if len(a.args) != len(b.args) or a.kwargs.keys() != b.kwargs.keys():
        return False
    if RANDOM.search(name_of(a)) or any(memory_of(node) in written for node in (a, b, *a.all_input_nodes)):
        return False
    pairs = [*zip(a.args, b.args), *((a.kwargs[key], b.kwargs[key]) for key in a.kwargs)]
    return all(
        same(x, y, written, calls - 1) if isinstance(x, fx.Node) and isinstance(y, fx.Node) else x == y
        for x, y in pairs
    )


def mask_of(index: Any) -> fx.Node | None:
    """The mask by which an index picks rows: itself, or its places; None where it picks in another way."""
    given = list(index) if isinstance(index, tuple) else [index]
    while given and (given[-1] is Ellipsis or given[-1] == slice(None)):
        given.pop()
    if len(given) == 1 and isinstance(given[0], fx.Node) and _is_mask(given[0]):
        return given[0]
    if not given or not all(isinstance(each, fx.Node) and each.args for each in given):
        return None
    mask, dims = placed_by(given[0]), [dim for _, dim in map(_place, given)]
    is_all = (
        mask is not None and dims == list(range(len(shape_of(mask)))) and len({at for at, _ in map(_place, given)}) == 1
    )
    return mask if is_all else None


def with_what_is_in_front(index: Any) -> tuple[tuple[Any, ...], Any]:
    """What an index takes of the dims in front of those that it picks by a mask, and the rest: ``x[:, 0, mask]``."""
    given = index if isinstance(index, tuple) else (index,)
    front = tuple(takewhile(is_of_python, given))
    return (front, given[len(front) :]) if front else ((), index)


def is_of_python(index: Any) -> bool:
    """Whether an index takes one, a range or all of a dim, or is a new one, and stands in the forward."""
    if isinstance(index, slice):
        return all(each is None or type(each) is int for each in (index.start, index.stop, index.step))
    return index is None or type(index) is int


def placed_by(node: Any) -> fx.Node | None:
    """The mask whose places a node gives in one of its dims: of ``torch.where(mask)``, of ``mask.nonzero()``."""
    mask = places.args[0] if (places := _place(node)[0]) is not None else None
    return mask if isinstance(mask, fx.Node) else None


def _place(node: Any) -> tuple[fx.Node | None, int]:
    """The call that gives the places of a mask, and of which dim of the mask a node gives them."""
    places = node.args[0] if isinstance(node, fx.Node) and node.args else None
    if not isinstance(places, fx.Node) or not places.args or not _is_mask(places.args[0]):
        return None, 0
    name = name_of(places)
    if (name == "where" and len(places.args) == 1) or (name == "nonzero" and places.kwargs.get("as_tuple")):
        dim = node.args[1] if node.target is operator.getitem else None
        return (places, dim) if isinstance(dim, int) else (None, 0)
    is_column = len(shape_of(node)) == 1 and name_of(node) in ("squeeze", "flatten")
    is_one = is_column and name == "nonzero" and not places.kwargs and len(shape_of(places.args[0])) == 1
    return (places if is_one else None), 0


def _is_mask(index: object) -> bool:
    value = tensor_of(index)
    return value is not None and value.dtype is torch.bool and value.dim() > 0
