"""Rows that are sorted by their groups, worked on, and put back, as tokens are for their experts: in their own order.

A model without a limit on the tokens of an expert (dropless) sorts its tokens by their experts, so that one kernel
multiplies them with all matrices, and puts them back behind it. A block of the sorted tokens is no tokens of some rows
of the batch, so that nothing between can be cut. But what is done to a sorted row is what would be done to it in its
own place. Here the joint graph of a step is written so: of each tensor whose rows are sorted there is one whose rows
are not, made by the same operator; products with groups of rows become :mod:`.grouped_products`; sorting and putting
back fall away. The backward is of the same operators, and is written anew like the forward.

A sort with a reader that wants the sorted rows themselves stays as it is.

Shapes: S rows, n = S / each tokens, of which each is sent to so many experts, G groups (experts).
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias, cast

import torch
from torch.fx import Graph, map_arg
from torch.fx import Node as FxNode

from ..ancestors import ancestors
from ..operators.grouped_products import grouped_outer, grouped_product
from .made_of_groups import MadeOfGroups

aten = torch.ops.aten


@dataclass(frozen=True)
class _Count:
    """The row that is read, ``s // each`` for row s."""

    each: int


@dataclass(frozen=True)
class _Sorted:
    """A tensor that is ``twin`` with the indices of ``dim`` sorted by their groups."""

    twin: FxNode | _Count
    dim: int


@dataclass(frozen=True)
class _Plain:
    """A tensor that does not depend on the order, and the one that is made in its place."""

    instead: FxNode


@dataclass(frozen=True)
class _Back:
    """Where each row has gone."""


@dataclass(frozen=True)
class _Ends:
    """Where the rows of each group end."""


@dataclass(frozen=True)
class _Several:
    """The results of an operator."""

    results: tuple[_Sorted | _Plain, ...]


_Meaning: TypeAlias = _Sorted | _Plain | _Back | _Ends | _Several


class _Unknown(Exception):
    """A reader of sorted rows does something with them of which nobody knows whether it needs their order."""


def in_their_own_order(graph: Graph) -> None:
    """Rewrites the joint graph of a step in place, for each sort of integers (S) of which nothing needs the order."""
    for node in list(graph.nodes):
        if node.target in _SORTS:
            value = _shape(node.args[0])
            if value.dim() == 1 and len(value) > 1 and value.dtype in (torch.int32, torch.int64):
                _Region(graph, node).rewrite()


class _Region:
    """What depends on a sort, and what each of these tensors means."""

    def __init__(self, graph: Graph, sort: FxNode) -> None:
        self._graph, self._sort = graph, sort
        self._group: FxNode = sort.args[0]  # type: ignore[assignment]
        self._rows: int = self._group.meta["val"].shape[0]
        self._meant: dict[FxNode, _Meaning] = {}
        self._made: list[FxNode] = []

    def rewrite(self) -> None:
        """Lets all readers read what is in its own order; changes nothing where one of them wants it sorted."""
        order = next((user for user in self._sort.users if user.args[1] == 1), None)
        needed = ancestors([self._graph.output_node()])
        if order not in needed:
            return
        self._numbers = MadeOfGroups(self._group, order)
        self._meant[self._sort] = _Several((_Sorted(self._group, 0), _Sorted(_Count(1), 0)))
        try:
            for node in list(self._graph.nodes):
                meant = [self._meant[given] for given in node.all_input_nodes if given in self._meant]
                if node in needed and not all(isinstance(meaning, _Plain) for meaning in meant):
                    self._meant[node] = self._meaning(node)
        except _Unknown:
            for node in reversed(self._made):
                self._graph.erase_node(node)
            return
        for node, meaning in self._meant.items():
            if isinstance(meaning, _Plain):
                node.replace_all_uses_with(meaning.instead)

    def _meaning(self, node: FxNode) -> _Meaning:
        """Raises _Unknown."""
        op = node.target
        if node.op != "call_function":
            raise _Unknown
        if op in _LIKE:
            return self._filled(node)
        if (number := self._number(node.meta["val"], node)) is not None:
            return number
        if op in _SORTS:  # whose results are known by their numbers, if at all
            return _Several(())
        if op is operator.getitem:
            return self._result_of(node)
        if op in _ELEMENTWISE or torch.Tag.pointwise in getattr(op, "tags", ()):
            return self._elementwise(node)
        handle = _HANDLED.get(op) or _OTHERS.get(op._schema.name)  # type: ignore[union-attr]
        if handle is None:
            raise _Unknown
        return handle(self, node)

    def _number(self, value: Any, node: FxNode) -> _Meaning | None:
        """What a tensor is by its numbers, if it depends on the groups alone."""
        if not isinstance(value, torch.Tensor) or value.dim() != 1 or value.is_floating_point():
            return None
        if len(value) != self._rows:
            return _Ends() if self._numbers.is_ends(node, len(value)) else None
        if (each := self._numbers.each(node)) is not None:
            return _Sorted(_Count(each), 0)
        return _Back() if self._numbers.is_back(node) else None

    def _result_of(self, node: FxNode) -> _Meaning:
        several, k = self._meant[node.args[0]], node.args[1]  # type: ignore[index]
        assert isinstance(several, _Several) and isinstance(k, int)
        if k >= len(several.results):
            raise _Unknown
        return several.results[k]

    # what operators mean, a method for each kind

    def _elementwise(self, node: FxNode) -> _Sorted:
        """The sorted dim, from the last on, is the same one in all that are sorted; others are the same along it."""
        dims = {s.dim - _shape(given).dim() for given in node.all_input_nodes if (s := self._sorted(given))}
        at = dims.pop()
        if dims:
            raise _Unknown
        for given in node.all_input_nodes:
            value = _shape(given)
            if self._sorted(given) is None and value.dim() >= -at and value.shape[at] != 1:
                self._constant(given)
        return _Sorted(self._same(node), at + node.meta["val"].dim())

    def _along_another(self, node: FxNode) -> _Meaning:
        """Operators along one dim, which is not the sorted one."""
        position, default = _ALONG[node.target]
        dims = {found.dim for each in node.all_input_nodes if (found := self._sorted(each))}
        rank = _shape(node.all_input_nodes[0]).dim()
        for each in node.all_input_nodes:
            if self._sorted(each) is None:
                self._constant(each)
        made = node.meta["val"]
        moves = (made if isinstance(made, torch.Tensor) else made[0]).dim() - rank
        given: Any = node.args[position] if len(node.args) > position else default
        along, dim = given % (rank + max(moves, 0)), dims.pop()
        if dims:
            raise _Unknown
        if moves > 0:
            dim += along <= dim
        elif along == dim:
            raise _Unknown
        else:
            dim += moves * (along < dim)
        same = self._same(node)
        if isinstance(made, torch.Tensor):
            return _Sorted(same, dim)
        return _Several(tuple(_Sorted(self._result(same, value, k), dim) for k, value in enumerate(made)))

    def _moved(self, node: FxNode) -> _Sorted:
        """Views, in which the sorted dim is a dim of its own again."""
        given = self._of(node.args[0])
        before, after = _shape(node.args[0]), _shape(node)
        op, dim = node.target, given.dim
        if op in (aten.transpose.int, aten.t.default, aten.permute.default):
            if op is aten.permute.default:
                order = [d % before.dim() for d in node.args[1]]  # type: ignore[union-attr]
            else:
                order = list(range(before.dim()))
                a, b = node.args[1:] if op is aten.transpose.int else (0, 1)
                order[a], order[b] = order[b], order[a]  # type: ignore[index]
            dim = order.index(dim)
        elif op is aten.expand.default:
            dim += after.dim() - before.dim()
        else:
            front = before.shape[:dim].numel()
            dims = [d for d in range(after.dim()) if after.shape[:d].numel() == front and after.shape[d] == self._rows]
            if not dims:
                raise _Unknown
            dim = dims[0]
        return _Sorted(given.twin if isinstance(given.twin, _Count) else self._same(node), dim)

    def _reduced(self, node: FxNode) -> _Meaning:
        """Sums over the rows need no order."""
        dim, rank = self._of(node.args[0]).dim, _shape(node.args[0]).dim()
        given = node.args[1] if len(node.args) > 1 else None
        over = {d % rank for d in given} if isinstance(given, (tuple, list)) and given else set(range(rank))
        made = self._same(node)
        if dim in over:
            return _Plain(made)
        keeps = len(node.args) > 2 and bool(node.args[2])
        return _Sorted(made, dim if keeps else dim - sum(d < dim for d in over))

    def _of_no_order(self, node: FxNode) -> _Plain:
        return _Plain(self._same(node))

    def _filled(self, node: FxNode) -> _Plain:
        """What takes but the shape of sorted rows."""
        fill = node.args[1] if node.target is aten.full_like.default else int(node.target is aten.ones_like.default)
        value = node.meta["val"]
        options = {"dtype": value.dtype, "device": value.device}
        return _Plain(self._make(node, value, aten.full.default, tuple(value.shape), fill, **options))

    def _read(self, node: FxNode) -> _Meaning:
        """``x[index]``, by rows: rows are read in sorted order, or are put back."""
        x: Any = node.args[0]
        index: Any = _only(node.args[1]) if node.target is aten.index.Tensor else node.args[2]
        if node.target is not aten.index.Tensor and node.args[1] != 0:
            raise _Unknown
        rows, found = self._sorted(x), self._meant.get(index)
        if isinstance(found, _Back) and rows and rows.dim == 0 and isinstance(rows.twin, FxNode):
            return _Plain(rows.twin)
        if rows or not isinstance(found, _Sorted):
            raise _Unknown
        if isinstance(found.twin, _Count):
            return _Sorted(self._repeated(node, x, found.twin.each), 0)
        return _Sorted(self._same(node), found.dim)

    def _gathered(self, node: FxNode) -> _Sorted:
        """``gather(x, 0, index)`` with one index for each row."""
        x, dim, index = node.args[:3]
        found = self._meant.get(index)  # type: ignore[arg-type]
        is_by_rows = isinstance(found, _Sorted) and isinstance(found.twin, _Count) and found.dim == dim == 0
        if self._sorted(x) or not is_by_rows or _shape(index).shape[1:] != _shape(x).shape[1:]:
            raise _Unknown
        return _Sorted(self._repeated(node, x, found.twin.each), 0)  # type: ignore[union-attr]

    def _written(self, node: FxNode) -> _Meaning:
        """``x[index] = rows``, or ``+=``, by rows: what is sorted is put back, or what is not is sorted."""
        op = node.target
        if op in _BY_DIM:
            x, dim, index, rows = node.args[:4]
            adds, scale = op is not aten.scatter.src, node.kwargs.get("alpha", 1)
            if dim != 0 or scale != 1:
                raise _Unknown
        else:
            x, index, rows = node.args[0], _only(node.args[1]), node.args[2]
            adds = len(node.args) > 3 and bool(node.args[3])
        place, values = self._meant.get(index), self._sorted(rows)  # type: ignore[arg-type]
        if self._sorted(x):
            raise _Unknown
        is_zero = _is_zero(self._now(x))
        if isinstance(place, _Back) and values is None and _shape(rows).shape == _shape(x).shape:
            if adds and not is_zero:
                raise _Unknown
            return _Sorted(self._now(rows), 0)
        rank = _shape(x).dim() if op in _BY_DIM else _shape(x).dim() + _shape(index).dim() - 1
        if not isinstance(place, _Sorted) or values is None or values.dim != 0 or _shape(rows).dim() != rank:
            raise _Unknown
        if isinstance(values.twin, _Count):
            raise _Unknown
        if isinstance(place.twin, FxNode):  # to a row for each group, in any order
            if not adds or place.dim != 0:
                raise _Unknown
            return _Plain(self._same(node))
        each, shape = place.twin.each, _shape(x)
        is_by_rows = place.dim == 0 and (_shape(index).dim() == 1 or _shape(index).shape == _shape(rows).shape)
        if not is_by_rows or _shape(rows).shape[1:] != shape.shape[1:] or each * shape.shape[0] != self._rows:
            raise _Unknown
        if not adds:
            if each != 1:
                raise _Unknown
            return _Plain(values.twin)
        total = self._added_up(node, values.twin, each)
        return _Plain(total if is_zero else self._call(node, aten.add.Tensor, self._now(x), total))

    def _product(self, node: FxNode) -> _Meaning:
        """A product of groups of rows with a matrix each, or of groups of rows with each other."""
        x, y, ends = node.args[:3] if len(node.args) > 2 else (*node.args, node.kwargs.get("offs"))
        bias = [*node.args[3:], node.kwargs.get("bias"), node.kwargs.get("out_dtype")]
        if any(option not in (None, node.meta["val"].dtype) for option in bias):
            raise _Unknown
        rows, others = self._of(x), self._sorted(y)
        groups = node.meta["val"].shape[0] if others else _shape(y).shape[0]
        self._check_ends(ends, groups)
        if others is None and rows.dim == 0 and _shape(y).dim() == 3:
            return _Sorted(self._call(node, grouped_product, self._twin(x), self._group, self._now(y), groups), 0)
        if others is None or (rows.dim, others.dim) != (1, 0):
            raise _Unknown
        turned = self._turned(node, self._twin(x))
        return _Plain(self._call(node, grouped_outer, turned, self._twin(y), self._group, groups))

    def _products_of_backward(self, node: FxNode) -> _Several:
        """The gradients of the rows and of the matrices, of transformers' own product."""
        x, weight, ends, grad = node.args
        if self._of(x).dim != 0 or self._of(grad).dim != 0 or self._sorted(weight):
            raise _Unknown
        groups = _shape(weight).shape[0]
        self._check_ends(ends, groups)
        turned = self._turned(node, self._now(weight))
        of_rows = self._call(node, grouped_product, self._twin(grad), self._group, turned, groups)
        of_weight = self._call(node, grouped_outer, self._twin(x), self._twin(grad), self._group, groups)
        return _Several((_Sorted(of_rows, 0), _Plain(of_weight)))

    # what is asked of the arguments

    def _sorted(self, given: Any) -> _Sorted | None:
        found = self._meant.get(given) if isinstance(given, FxNode) else None
        if isinstance(found, _Back | _Ends | _Several):
            raise _Unknown
        return found if isinstance(found, _Sorted) else None

    def _of(self, given: Any) -> _Sorted:
        if (found := self._sorted(given)) is None:
            raise _Unknown
        return found

    def _twin(self, given: Any) -> FxNode:
        if isinstance(twin := self._of(given).twin, _Count):
            raise _Unknown
        return twin

    def _now(self, given: Any) -> FxNode:
        """What stands for a tensor that is not sorted."""
        found = self._meant.get(given)
        return found.instead if isinstance(found, _Plain) else cast(FxNode, given)

    def _constant(self, given: FxNode) -> None:
        if self._now(given).target not in _CONSTANT:
            raise _Unknown

    def _check_ends(self, ends: Any, groups: int) -> None:
        if not isinstance(ends, FxNode) or not self._numbers.is_ends(ends, groups):
            raise _Unknown

    # nodes that are made

    def _same(self, node: FxNode) -> FxNode:
        """The operator of a node on what stands for its arguments."""

        def instead(given: FxNode) -> FxNode:
            return self._twin(given) if self._sorted(given) else self._now(given)

        args, kwargs = map_arg((node.args, node.kwargs), instead)
        return self._make(node, node.meta["val"], node.target, *args, **kwargs)

    def _call(self, node: FxNode, op: Any, *args: Any) -> FxNode:
        with torch.no_grad():
            value = op(*map_arg(args, lambda given: given.meta["val"]))
        return self._make(node, value, op, *args)

    def _result(self, node: FxNode, value: Any, k: int) -> FxNode:
        with self._graph.inserting_after(node):
            made = self._graph.call_function(operator.getitem, (node, k))
        made.meta = {**node.meta, "val": value}
        self._made.append(made)
        return made

    def _make(self, node: FxNode, value: Any, op: Any, *args: Any, **kwargs: Any) -> FxNode:
        """A node that stands before another one and belongs where it does."""
        with self._graph.inserting_before(node):
            made = self._graph.call_function(op, args, kwargs)
        made.meta = {**node.meta, "val": value}
        self._made.append(made)
        return made

    def _turned(self, node: FxNode, given: FxNode) -> FxNode:
        """A tensor with its last two dims swapped."""
        if given.target is aten.transpose.int:
            (before, *dims), rank = given.args, _shape(given).dim()
            if {d % rank for d in dims} == {rank - 2, rank - 1}:
                return cast(FxNode, before)
        return self._call(node, aten.transpose.int, given, -2, -1)

    def _repeated(self, node: FxNode, x: Any, each: int) -> FxNode:
        """Each row of (n, ...) so many times: (S, ...)."""
        rows, shape = self._now(x), _shape(x).shape
        if each * shape[0] != self._rows:
            raise _Unknown
        if each == 1:
            return rows
        apart = self._call(node, aten.unsqueeze.default, rows, 1)
        views = self._call(node, aten.expand.default, apart, (shape[0], each, *shape[1:]))
        dense = {"memory_format": torch.contiguous_format}
        copies = self._make(node, _shape(views).clone(**dense), aten.clone.default, views, **dense)
        return self._call(node, aten.view.default, copies, (self._rows, *shape[1:]))

    def _added_up(self, node: FxNode, rows: FxNode, each: int) -> FxNode:
        """The sum of so many rows in turn: (S, ...) as (n, ...)."""
        if each == 1:
            return rows
        shape = _shape(rows).shape
        apart = self._call(node, aten.view.default, rows, (self._rows // each, each, *shape[1:]))
        return self._call(node, aten.sum.dim_IntList, apart, (1,))


def _shape(given: Any) -> Any:
    """A fake tensor, for its shape."""
    return given.meta["val"]


def _only(indices: Any) -> FxNode:
    """The one index, of dim 0."""
    if len(indices) != 1 or not isinstance(indices[0], FxNode) or _shape(indices[0]).dtype is torch.bool:
        raise _Unknown
    return indices[0]


def _is_zero(node: FxNode) -> bool:
    return node.target is aten.full.default and bool(node.args[1] == 0)


_CONSTANT = {aten.full.default, aten.scalar_tensor.default, aten.zeros.default, aten.ones.default}
_LIKE = {getattr(aten, f"{fill}_like").default for fill in ("empty", "zeros", "ones", "full")}
_SORTS = {aten.sort.default, aten.sort.stable}
_ELEMENTWISE = {aten._to_copy.default, aten.floor_divide.default, aten.detach.default, aten.alias.default}
_BY_DIM = {aten.scatter_add.default, aten.index_add.default, aten.scatter.src}
# The position of the dim among the arguments, and the dim where it is left out.
_ALONG: dict[Any, tuple[int, int]] = {
    aten.split.Tensor: (2, 0),
    aten.split_with_sizes.default: (2, 0),
    aten.slice.Tensor: (1, 0),
    aten.slice_backward.default: (2, 0),
    aten.slice_scatter.default: (2, 0),
    aten.cat.default: (1, 0),
    aten.glu.default: (1, -1),
    aten.glu_backward.default: (2, -1),
    aten._softmax.default: (1, -1),
    aten._softmax_backward_data.default: (2, -1),
    aten.select.int: (1, 0),
    aten.select_backward.default: (2, 0),
    aten.unbind.int: (1, 0),
}
_VIEWS = (aten.view, aten._unsafe_view, aten.expand, aten.permute, aten.t, aten.unsqueeze)
_HANDLED: dict[Any, Callable[[_Region, FxNode], _Meaning]] = {
    **dict.fromkeys(_ALONG, _Region._along_another),
    **dict.fromkeys((aten.transpose.int, aten.squeeze.dim, *(op.default for op in _VIEWS)), _Region._moved),
    **dict.fromkeys((aten.sum.dim_IntList, aten.mean.dim, aten.amax.default, aten.amin.default), _Region._reduced),
    **dict.fromkeys((aten.sum.default, aten.mean.default, aten.histc.default), _Region._of_no_order),
    **dict.fromkeys((aten.index.Tensor, aten.index_select.default), _Region._read),
    aten.gather.default: _Region._gathered,
    **dict.fromkeys((aten.index_put.default, aten._unsafe_index_put.default, *_BY_DIM), _Region._written),
    aten._grouped_mm.default: _Region._product,
}
_OTHERS: dict[str, Callable[[_Region, FxNode], _Meaning]] = {
    "transformers::grouped_mm_fallback": _Region._product,
    "transformers::grouped_mm_fallback_backward": _Region._products_of_backward,
}
