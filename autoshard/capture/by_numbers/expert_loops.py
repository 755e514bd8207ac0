"""Experts in a loop, each of which picks its tokens, as products in groups of rows.

    for e, expert in enumerate(experts):
        token, slot = torch.where(chosen == e)
        out[token] += expert(x[token]) * weight[token, slot, None]

or over the numbers of those that have tokens.

How many tokens an expert has is seen when a step runs. But the loop does to every pair of a token and one of its
choices what the expert of that choice does to a row, and adds up the pairs of a token. So it is written of all pairs at
once: where experts have a matrix of their own, rows meet that of their group (:mod:`.grouped_products`); what else they
do is the same for all. Experts must be picked by choices that are distinct for a token, as of ``topk`` and ``argmax``,
and do the same; or those of each of a few ranges do, as where the last ones return what they are given. Then each range
is written of all pairs, whose rows are dropped where another one has them, or none: where an expert takes no more than
so many tokens.

Shapes: T tokens, k choices of each, S = T k pairs, E experts.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx
from torch.fx import GraphModule

from ..dynamo.ways import begins, ends, is_among
from ..examples import are_lengths, example, is_unknown, name_of, new_call, shape_of, tensor_of
from ..operators.grouped_products import grouped_product
from .choices import (
    Choices,
    choices_found,
    choices_told,
    counted,
    is_transposed,
    is_view,
    number_of_experts,
    reordered,
)
from .idle_modes import is_mode, leave_out_idle_modes
from .known_places import pick_by_known_numbers
from .masks import memory_of, same, written_by, written_into
from .rows_of_masks import POINTWISE, TAME

_RESHAPES = frozenset("view reshape".split())
_FINDING = frozenset("nonzero unique".split())
_NUMBER = object()
_SAME = frozenset("contiguous detach clone".split())


class _OtherwiseError(Exception):
    """A loop does something that is not known to be the same for all pairs."""


@dataclass(frozen=True)
class _Mask:
    """Which pairs are of an expert. Its dims, of this ``shape``, are of tokens or of choices: ``tk``, ``kt``, ``ttk``;
    or ``t``, ``tt`` where any of a token's choices will do, or there is one.
    """

    dims: str
    shape: tuple[int, ...]
    is_bool: bool = True

    @property
    def is_of_tokens(self) -> bool:
        """Whether it tells tokens apart, and no choices."""
        return "k" not in self.dims

    @property
    def order(self) -> str:
        """What comes first in the order of its places: tokens, of which each is there once, or choices."""
        return self.dims[0]


@dataclass(frozen=True)
class _Places:
    """Where a mask is true."""

    mask: _Mask


@dataclass(frozen=True)
class _Column:
    """The tokens ``t``, or the choices ``k``, of an expert's pairs, in the order of a mask's dims."""

    of: str
    order: str


@dataclass(frozen=True)
class _Rows:
    """In the place of a tensor with a row for each of an expert's pairs one with a row for each pair, behind ``lead``
    dims of one element. In ``order`` tokens come first, or choices.
    """

    whole: fx.Node
    order: str
    lead: int = 0


@dataclass(frozen=True)
class _Some:
    """Whether an expert has tokens, or how many it has."""

    is_count: bool = False


@dataclass(frozen=True)
class _Chosen:
    """A tensor (T, k) with zeros for pairs of other experts; or its sum over the choices of a token."""

    of: fx.Node
    is_sum: bool


@dataclass(frozen=True)
class _Each:
    """What is another tensor, or number, for each expert."""

    values: tuple[Any, ...]


def take_loops_apart(module: GraphModule) -> None:
    """Rewrites a traced forward, as far as it has such loops."""
    graph = module.graph
    if not any(is_unknown(example(node)) for node in graph.nodes):
        return
    pick_by_known_numbers(graph)
    leave_out_idle_modes(graph)
    for loop in list(_loops(graph)):
        made: list[fx.Node] = []
        try:
            _Loop(graph, loop, made).rewrite()
        except _OtherwiseError:
            for node in reversed(made):
                graph.erase_node(node)


@dataclass(frozen=True)
class _Turns:
    """Experts, from ``first`` on, of ``count`` in all, that do the same: the masks of each, and what depends on them,
    in order.
    """

    choices: Choices
    roots: Sequence[Sequence[tuple[fx.Node, _Mask]]]
    turns: Sequence[Sequence[fx.Node]]
    first: int
    count: int


def _loops(graph: fx.Graph) -> Iterator[_Turns]:
    """What is done with choices: experts, as many in a row as do the same."""
    found: dict[Choices, dict[int, list[tuple[fx.Node, _Mask]]]] = {}
    for node in graph.nodes:
        for choices, expert, mask in _masks(node):
            found.setdefault(choices, {}).setdefault(expert, []).append((node, mask))
    for choices, roots in found.items():
        count = number_of_experts(choices)
        if count < 2 or sorted(roots) != list(range(count)):
            continue
        turns = [_of_one(graph, {node for node, _ in roots[expert]}) for expert in range(count)]
        does = [[(node.op, node.target) for node in turn] for turn in turns]
        first = 0
        for after in range(1, count + 1):
            if after == count or does[after] != does[first] or len(roots[after]) != len(roots[first]):
                experts = range(first, after)
                yield _Turns(choices, [roots[each] for each in experts], turns[first:after], first, count)
                first = after


def _of_one(graph: fx.Graph, roots: set[fx.Node]) -> list[fx.Node]:
    """What depends on the masks of an expert, in order."""
    found = set(roots)
    for node in graph.nodes:
        if not found.isdisjoint(node.all_input_nodes):
            found.add(node)
    return [node for node in graph.nodes if node in found and node.target is not begins]


def _masks(node: fx.Node) -> Iterator[tuple[Choices, int, _Mask]]:
    """If a node says which pairs are of an expert: the choices, the expert, and how they lie."""
    if name_of(node) == "eq" and len(node.args) == 2 and type(node.args[1]) is int:
        chosen: Any = node.args[0]
        shape = tuple(shape_of(chosen))
        if shape and are_lengths(shape, shape):
            yield Choices(chosen, shape), node.args[1], _Mask(_dims(shape), shape)
        return
    if node.target is not operator.getitem or not isinstance(node.args[0], fx.Node):
        return
    index: tuple[Any, ...] = node.args[1] if isinstance(node.args[1], tuple) else (node.args[1],)
    order, source = reordered(node.args[0])
    choices = choices_told(source)
    if choices is None:
        return
    dims = [f"{_dims(choices.shape)}e"[dim] for dim in order]
    if index and index[0] is Ellipsis:
        index = (*(slice(None),) * (len(dims) - len(index) + 1), *index[1:])
    at = [dim for dim, each in enumerate(index) if type(each) is int]
    rest = [each for each in index if type(each) is not int]
    if len(at) == 1 and dims[at[0]] == "e" and all(each == slice(None) for each in rest):
        yield choices, index[at[0]], _Mask("".join(dim for dim in dims if dim != "e"), tuple(shape_of(node)), False)


def _dims(shape: tuple[int, ...]) -> str:
    """What the dims of choices are of: the last one of the choices of a token, if there are others."""
    return "t" * (len(shape) - 1) + "k" if len(shape) > 1 else "t"


class _Loop:
    """The nodes of a loop, expert by expert."""

    def __init__(self, graph: fx.Graph, loop: _Turns, made: list[fx.Node]) -> None:
        self._graph, self._made = graph, made
        self._choices, self._chosen = loop.choices, loop.choices.chosen
        self._first, self._all, self._experts = loop.first, loop.count, len(loop.turns)
        self._turns = loop.turns
        self._meant: dict[fx.Node, Any] = {}
        self._masks = dict(loop.roots[0])
        self._sources: set[Any] = {memory_of(self._chosen), memory_of(self._choices.kept)}
        self._sums: dict[fx.Node, list[fx.Node]] = {}

    def rewrite(self) -> None:
        """Writes the loop anew.

        Raises:
            _OtherwiseError: it cannot be; nothing is changed, but for new nodes.
        """
        first, every = self._turns[0], {node for turn in self._turns for node in turn}
        if any(len(turn) != len(first) for turn in self._turns) or len(every) != self._experts * len(first):
            raise _OtherwiseError
        if any(user not in every and user.target is not begins for node in every for user in node.users):
            raise _OtherwiseError
        twins = [dict(zip(first, turn)) for turn in self._turns]
        place = _places(self._graph)
        start, last = min(every, key=place.__getitem__), max(every, key=place.__getitem__)
        if any(place[start] < place[node] < place[last] and is_mode(node) for node in self._graph.nodes):
            raise _OtherwiseError  # gradients off for a while, autocast
        with self._graph.inserting_after(last):
            anchor = self._graph.call_function(torch.sym_max, (0, 0))
            self._made.append(anchor)
        self._anchor, self._like = anchor, last
        self._group, self._dropped = self._groups()
        for node in first:
            together = [node, *(twin[node] for twin in twins[1:])]
            if any((each.op, each.target) != (node.op, node.target) for each in together):
                raise _OtherwiseError
            args = self._matched([each.args for each in together], twins)
            kwargs = self._matched([each.kwargs for each in together], twins)
            self._meant[node] = self._masks[node] if node in self._masks else self._meaning(node, args, kwargs)
        ways = list(self._ways(twins))
        self._check_memory(every)
        if not self._sums:
            raise _OtherwiseError
        for out, rows in self._sums.items():
            for added in rows:
                self._call("add_", out, added)
        self._graph.erase_node(anchor)
        self._made.remove(anchor)
        for node in ways:
            self._graph.erase_node(node)
        for node in reversed(list(self._graph.nodes)):
            is_left = node.target is is_among or name_of(node) in _FINDING
            if node in every or (is_left and not node.users):
                self._graph.erase_node(node)

    def _groups(self) -> tuple[fx.Node, fx.Node | None]:
        """The number of the expert of each pair, counted from the first one here, and which pairs are not of any of
        these; None where all are.
        """
        group = self._call("reshape", self._chosen, (-1,))
        dropped = None
        if self._choices.kept is not None:
            each = self._call("flatten", self._choices.kept, 0, -2)
            own = self._call("gather", each, 1, self._call("unsqueeze", group, 1))
            dropped = self._call("eq", self._call("squeeze", own, 1), 0)
        if self._is_part:
            group = self._call("sub", group, self._first)
            others = [self._call("lt", group, 0), self._call("ge", group, self._experts)]
            for each in others:
                dropped = each if dropped is None else self._call("logical_or", dropped, each)
        return group, dropped

    @property
    def _numbers(self) -> range:
        """The experts here, as the choices number them."""
        return range(self._first, self._first + self._experts)

    @property
    def _is_part(self) -> bool:
        """Whether other experts do something else."""
        return self._experts < self._all

    def _ways(self, twins: Sequence[dict[fx.Node, fx.Node]]) -> Iterator[fx.Node]:
        """Where Python went on as if an expert had tokens, and where that ends: between is what an expert does, which
        is nothing where it has none.

        Raises:
            _OtherwiseError: there is something else.
        """
        closed = {node.args[0]: node for node in self._graph.find_nodes(op="call_function", target=ends)}
        place = _places(self._graph)
        for begun in self._graph.find_nodes(op="call_function", target=begins):
            condition, number = begun.args
            expert = self._expert_of(condition, twins)
            if expert is None:
                continue
            end = closed.get(number)
            if end is None or not end.args[1]:
                raise _OtherwiseError
            turn = {*self._turns[expert], *self._made}
            for node in reversed(self._graph.nodes):
                if place[begun] < place[node] < place[end]:
                    if not self._is_nothing(node, turn):
                        raise _OtherwiseError
                    turn.add(node)
            yield from (begun, end)

    def _expert_of(self, condition: Any, twins: Sequence[dict[fx.Node, fx.Node]]) -> int | None:
        """The expert of which a condition asks whether it has tokens; None where it asks something else."""
        for expert, turn in enumerate(self._turns):
            if condition in turn:
                node = next(node for node, twin in twins[expert].items() if twin is condition)
                return expert if self._meant[node] in (_Some(), _NUMBER) else None
        if condition.target is is_among:
            found, expert = condition.args
            return self._here(expert) if self._are_these(choices_found(found)) else None
        number = example(condition)
        symbols = number.node.expr.free_symbols if isinstance(number, torch.SymBool | torch.SymInt) else ()
        for node in self._graph.nodes:
            value = example(node)
            if isinstance(value, torch.SymInt) and {value.node.expr} == set(symbols) and name_of(node) == "item":
                return self._counted(node.args[0])
        return None

    def _counted(self, element: Any) -> int | None:
        """The expert whose pairs ``torch.bincount(chosen.flatten(), minlength=E)`` counts in an element."""
        if not isinstance(element, fx.Node) or element.target is not operator.getitem:
            return None
        counts: Any = element.args[0]
        expert = element.args[1]
        is_one = name_of(counts) == "bincount" and self._are_these(counted(counts))
        return self._here(expert) if is_one and type(expert) is int else None

    def _are_these(self, found: Choices | None) -> bool:
        """Whether an expert that has none among choices has none here."""
        return (
            found is not None
            and is_view(found.chosen, self._chosen)
            and (found.kept is None or found.kept is self._choices.kept)
        )

    def _here(self, expert: int) -> int | None:
        """The number of an expert among those here; None of others."""
        return expert - self._first if expert in self._numbers else None

    def _is_nothing(self, node: fx.Node, turn: set[fx.Node]) -> bool:
        """Whether a node is what an expert does, or makes something for that alone."""
        if node in turn or node.op == "get_attr" or node.target in (begins, ends, is_among):
            return True
        is_number = isinstance(example(node), torch.SymInt | torch.SymBool)
        return not written_by(node) and (is_number or all(user in turn for user in node.users))

    def _matched(self, values: Sequence[Any], twins: Sequence[dict[fx.Node, fx.Node]]) -> Any:
        """What the arguments of all experts mean."""
        one = values[0]
        if any(type(value) is not type(one) for value in values):
            raise _OtherwiseError
        if isinstance(one, fx.Node):
            if all(twin.get(one) is value for twin, value in zip(twins, values)):
                return self._meant[one]
            if all(value is one for value in values):
                return one
            if one in twins[0] or not all(are_lengths(shape_of(value), shape_of(one)) for value in values):
                raise _OtherwiseError
            return _Each(tuple(values))
        if isinstance(one, (tuple, list)):
            if any(len(value) != len(one) for value in values):
                raise _OtherwiseError
            return type(one)(self._matched(each, twins) for each in zip(*values))
        if isinstance(one, dict):
            if any(value.keys() != one.keys() for value in values):
                raise _OtherwiseError
            return {key: self._matched([value[key] for value in values], twins) for key in one}
        if isinstance(one, slice):
            parts = [
                self._matched([getattr(value, end) for value in values], twins) for end in ("start", "stop", "step")
            ]
            return slice(*parts)
        if all(value == one for value in values):
            return one
        return _Each(tuple(values))

    def _meaning(self, node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        name = name_of(node)
        first = args[0] if args else None
        if isinstance(example(node), torch.SymInt | torch.SymBool) or name in ("size", "sym_size"):
            return _NUMBER  # how many pairs an expert has, of which only conditions may ask
        if isinstance(first, _Mask) and len(args) == 1 and not kwargs and name in ("any", "sum"):
            return _Some(name == "sum")
        if name == "gt" and first == _Some(True) and args[1:] == (0,):
            return _Some()
        if name in ("where", "nonzero") and isinstance(first, _Mask) and len(args) == 1:
            if kwargs != ({"as_tuple": True} if name == "nonzero" else {}):
                raise _OtherwiseError
            return _Places(first)
        if name == "getitem":
            return self._picked(first, args[1])
        if isinstance(first, _Mask):
            return self._of_mask(name, first, args[1:], kwargs)
        if name == "mul" and len(args) == 2 and isinstance(args[1], _Mask):
            return self._of_mask(name, args[1], (first,), kwargs)
        if (
            name == "sum"
            and isinstance(first, _Chosen)
            and _dim(args, kwargs) in (-1, 1)
            and not kwargs.keys() - {"dim"}
        ):
            return _Chosen(first.of, True)
        if name == "setitem" and isinstance(args[2], _Added):
            return self._written(first, args[1], args[2])
        if name == "index_add_" and len(args) == 4 and args[1] == 0 and not kwargs:
            return self._add(first, args[2:3], args[3])
        if name in ("add", "iadd") and isinstance(first, _Own) and len(args) == 2 and not kwargs:
            is_now = first.sums == len(self._sums.get(first.out, []))  # nothing was added since it was read
            return _Added(first.out, first.index, args[1]) if isinstance(args[1], _Rows) and is_now else self._stop()
        return self._of_rows(node, name, args, kwargs)

    def _stop(self) -> Any:
        raise _OtherwiseError

    def _of_mask(self, name: str, mask: _Mask, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What is made of a mask, but for its places."""
        last = len(mask.dims) - 1
        if name == "any" and mask.dims[-1] == "k" and _dim((mask, *args), kwargs) in (-1, last):
            if kwargs.keys() - {"dim"} or len(args) > 1:
                raise _OtherwiseError
            return _Mask(mask.dims[:-1], mask.shape[:-1])
        if (
            name in ("view", "reshape", "flatten")
            and mask.is_of_tokens
            and args in ((), (-1,), ((-1,),))
            and not kwargs
        ):
            return _Mask("t", (math.prod(mask.shape),), mask.is_bool)
        if name == "bool" or (name == "to" and args == (torch.bool,)):
            return replace(mask, is_bool=True)
        if name == "squeeze" and len(args) == 1 and not kwargs:
            dim = args[0] % len(mask.dims)
            if mask.shape[dim] != 1:
                return mask
            if mask.dims[dim] == "k":
                left = [at for at in range(len(mask.dims)) if at != dim]
                return replace(mask, dims=mask.dims.replace("k", ""), shape=tuple(mask.shape[at] for at in left))
        if name == "mul" and mask.dims == "tk" and len(args) == 1:
            (x,) = args
            if isinstance(x, fx.Node) and tuple(shape_of(x)) == mask.shape:
                return _Chosen(x, False)
        raise _OtherwiseError

    def _picked(self, x: Any, index: Any) -> Any:
        if isinstance(x, tuple) and type(index) is int:
            return x[index]
        if isinstance(x, _Places) and type(index) is int:
            dims = x.mask.dims
            if dims not in ("t", "tk", "kt") or not -len(dims) <= index < len(dims):
                raise _OtherwiseError
            return _Column(dims[index], x.mask.order)
        index = list(index) if isinstance(index, tuple) else [index]
        if isinstance(x, _Rows):
            return self._part(x, index)
        order = self._order_of(index)
        if isinstance(x, _Chosen) and x.is_sum and self._is_tokens(index[:1]) and set(map(repr, index[1:])) <= {"None"}:
            self._sources.add(memory_of(x.of))
            whole = self._call("flatten", x.of, 0, 1)
            for _ in index[1:]:
                whole = self._call("unsqueeze", whole, -1)
            return _Rows(whole, order)
        if not isinstance(x, fx.Node):
            raise _OtherwiseError
        if self._is_tokens(index[:1]) and len(index) == 1 and self._is_written(x):
            return _Own(x, index[0], len(self._sums.get(x, [])))
        lead = 0
        while index and index[0] is None:
            index.pop(0)
            lead += 1
        behind = 0
        while index and index[-1] is None:
            index.pop()
            behind += 1
        whole = self._rows_of(x, index)
        for _ in range(behind):
            whole = self._call("unsqueeze", whole, -1)
        return _Rows(whole, order, lead)

    def _order_of(self, index: Sequence[Any]) -> str:
        """The order of the pairs that an index picks."""
        if any(isinstance(each, _Mask) and not each.is_bool for each in index):
            raise _OtherwiseError  # numbers 0 and 1 pick these rows
        orders = {each.order for each in index if isinstance(each, (_Mask, _Column))}
        if len(orders) != 1:
            raise _OtherwiseError
        return orders.pop()

    def _rows_of(self, x: fx.Node, index: list[Any]) -> fx.Node:
        """A row for each pair of what an expert's pairs pick of a tensor (T, ...) or (T, k, ...)."""
        tokens, choices = self._size
        self._sources.add(memory_of(x))
        first = index[0] if index else None
        if isinstance(first, _Mask) and len(first.shape) > 1 and shape_of(x)[: len(first.shape)] == first.shape:
            x = self._call("flatten", x, 0, len(first.shape) - 1)
            if not first.is_of_tokens:
                if first.dims[-1] != "k" or len(index) > 1:
                    raise _OtherwiseError
                return x
        shape = tuple(shape_of(x))
        if shape[:1] != (tokens,):
            raise _OtherwiseError
        if [getattr(each, "of", None) for each in index] == ["t", "k"] and shape[1:2] == (choices,):
            return self._call("flatten", x, 0, 1)
        if self._is_tokens(index[:1]):
            if len(index) == 1:
                each = self._call("expand", self._call("unsqueeze", x, 1), (tokens, choices, *shape[1:]))
                return self._call("reshape", each, (tokens * choices, *shape[1:]))
            if len(index) == 2 and shape == (tokens, self._all):
                numbers = _Each(tuple(self._numbers))
                after = _Each(tuple(number + 1 for number in self._numbers))
                found = self._call("gather", x, 1, self._call("reshape", self._chosen, (tokens, choices)))
                if index[1] == numbers:
                    return self._call("reshape", found, (tokens * choices,))
                if index[1] == slice(numbers, after, None):
                    return self._call("reshape", found, (tokens * choices, 1))
        raise _OtherwiseError

    @property
    def _size(self) -> tuple[int, int]:
        shape = self._choices.shape
        choices = shape[-1] if len(shape) > 1 else 1
        return math.prod(shape) // choices, choices

    def _is_tokens(self, index: list[Any]) -> bool:
        (first,) = index or [None]
        return (isinstance(first, _Column) and first.of == "t") or (isinstance(first, _Mask) and first.is_of_tokens)

    def _is_written(self, x: fx.Node) -> bool:
        return any(node.target is operator.setitem and node.args[0] is x for turn in self._turns[:1] for node in turn)

    def _written(self, out: Any, index: Any, added: _Added) -> Any:
        """``out[tokens] = out[tokens] + rows``."""
        index = list(index) if isinstance(index, tuple) else [index]
        if added.out is not out or index != [added.index] or out in self._sums:
            raise _OtherwiseError
        return self._add(out, index, added.rows)

    def _add(self, out: Any, index: Sequence[Any], rows: Any) -> Any:
        whole, given = tensor_of(out), tensor_of(rows.whole) if isinstance(rows, _Rows) else None
        if whole is None or given is None or rows.lead or whole.dtype != given.dtype:
            raise _OtherwiseError
        if not self._is_tokens(list(index)) or self._order_of(index) != rows.order:
            raise _OtherwiseError
        tokens, choices = self._size
        shape = given.shape[1:]
        before = whole.shape[: whole.dim() - len(shape)]
        if whole.shape != (*before, *shape) or math.prod(before) != tokens:
            raise _OtherwiseError
        made = rows.whole
        if self._dropped is not None:
            made = self._call("masked_fill", made, self._call("reshape", self._dropped, (-1, *(1,) * len(shape))), 0)
        total = self._call("sum", self._call("reshape", made, (tokens, choices, *shape)), 1)
        self._sums.setdefault(out, []).append(self._call("reshape", total, tuple(whole.shape)))
        return None

    def _of_rows(self, node: fx.Node, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        rows = [each for each in (*args, *kwargs.values()) if isinstance(each, _Rows)]
        if any(each is _NUMBER for each in (*args, *kwargs.values())):
            raise _OtherwiseError
        if not rows or isinstance(args[0], (_Mask, _Column, _Places)):
            raise _OtherwiseError
        lead = rows[0].lead
        if name in ("linear", "matmul") and isinstance(args[0], _Rows) and not lead:
            return _Rows(self._product(name, *args, **kwargs), args[0].order)
        if name in _RESHAPES and rows[0].lead and isinstance(args[0], _Rows):
            wanted = args[1] if isinstance(args[1], (tuple, list)) else args[1:]
            if tuple(wanted) == (-1, *shape_of(args[0].whole)[1:]):
                return _Rows(args[0].whole, args[0].order)
            raise _OtherwiseError
        if name == "squeeze" and args[1:] == (0,) and lead == 1:
            return _Rows(args[0].whole, args[0].order)
        if name == "squeeze" and not lead and args[1:] == (1,) and shape_of(args[0].whole)[1:2] not in ((), (1,)):
            return args[0]
        if name == "unsqueeze" and isinstance(args[0], _Rows) and args[1:] in ((-1,), (len(shape_of(args[0].whole)),)):
            return _Rows(self._call("unsqueeze", args[0].whole, -1), args[0].order, lead)
        if name == "chunk" and isinstance(args[0], _Rows) and not lead:
            return self._parts(args[0], args[1:], kwargs)
        if name in _SAME or (name in ("type_as", "dropout", "chunk", "unsqueeze", "squeeze") and not lead):
            raise _OtherwiseError
        if (
            name not in (POINTWISE if self._dropped is None else TAME)
            or any((each.lead, each.order) != (lead, rows[0].order) for each in rows)
            or any(each is True for each in (*args, *kwargs.values()))
        ):
            raise _OtherwiseError
        dims = {len(shape_of(each.whole)) for each in rows}
        if len(dims) > 1:
            raise _OtherwiseError
        made = self._again(
            node,
            [self._plain(each, max(dims)) for each in args],
            {k: self._plain(v, max(dims)) for k, v in kwargs.items()},
        )
        return _Rows(made, rows[0].order, lead)

    def _part(self, rows: _Rows, index: list[Any]) -> _Rows:
        """A slice of what each row has: ``rows[..., ::2]``, ``rows[:, :n]``."""
        is_of_all = index[:1] == [slice(None)] or (
            index[:1] == [Ellipsis] and len(index) < len(shape_of(rows.whole)) + 1
        )
        if rows.lead or not is_of_all or not all(isinstance(each, slice) for each in index[1:]):
            raise _OtherwiseError
        return _Rows(self._call(operator.getitem, rows.whole, tuple(index)), rows.order)

    def _parts(self, rows: _Rows, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[_Rows, ...]:
        """The parts of what each row has."""
        shape = shape_of(rows.whole)
        dim = args[1] if len(args) > 1 else kwargs.get("dim", 0)
        if dim not in (-1, len(shape) - 1) or len(shape) < 2:
            raise _OtherwiseError
        made = self._call("chunk", rows.whole, *args, **kwargs)
        return tuple(_Rows(self._call(operator.getitem, made, part), rows.order) for part in range(len(example(made))))

    def _plain(self, value: Any, dims: int) -> Any:
        """An argument of an operator of each element by itself, for all pairs."""
        if isinstance(value, _Rows):
            return value.whole
        if isinstance(value, _Each) and isinstance(value.values[0], fx.Node):
            if len(shape_of(value.values[0])) != dims - 1:
                raise _OtherwiseError
            return self._of_group(value)
        if isinstance(value, fx.Node):
            if len(shape_of(value)) >= dims:
                raise _OtherwiseError
            return value
        if isinstance(value, (_Each, _Mask, _Column, _Places, _Own, _Added)):
            raise _OtherwiseError
        return value

    def _of_group(self, each: _Each) -> fx.Node:
        """Of tensors of experts that of the expert of each pair."""
        group = self._call("clamp", self._group, 0, self._experts - 1) if self._is_part else self._group
        return self._call("index_select", self._stacked(each), 0, group)

    def _stacked(self, each: _Each) -> fx.Node:
        """Tensors of all experts as one; that of which they are the rows, where they are."""
        if all(map(is_transposed, each.values)):
            return self._call("transpose", self._stacked(_Each(tuple(value.args[0] for value in each.values))), 1, 2)
        if all(value.target is operator.getitem and value.args[1] == k for k, value in zip(self._numbers, each.values)):
            wholes: list[Any] = [value.args[0] for value in each.values]
            written = written_into(self._graph)
            rows = shape_of(wholes[0])[:1]
            if rows and are_lengths(rows, rows) and all(same(wholes[0], other, written) for other in wholes):
                is_all = rows == (self._experts,)
                here = slice(self._numbers.start, self._numbers.stop)
                return wholes[0] if is_all else self._call(operator.getitem, wholes[0], here)
        return self._call(torch.stack, list(each.values))

    def _product(self, name: str, x: _Rows, weight: Any, bias: Any = None) -> fx.Node:
        """Rows with the matrix of their expert."""
        if len(shape_of(x.whole)) != 2:
            raise _OtherwiseError
        if isinstance(weight, fx.Node):
            if self._is_part and self._experts == 1:
                raise _OtherwiseError  # a product of all rows for those of one expert
            made = self._call(torch.nn.functional.linear if name == "linear" else torch.matmul, x.whole, weight)
        elif isinstance(weight, _Each) and len(shape_of(weight.values[0])) == 2:
            matrices = self._stacked(weight)
            matrices = self._call("transpose", matrices, 1, 2) if name == "linear" else matrices
            made = self._call(grouped_product, x.whole, self._group, matrices, self._all)
        else:
            raise _OtherwiseError
        if bias is None:
            return made
        return self._call(torch.add, made, bias if isinstance(bias, fx.Node) else self._of_group(bias))

    def _check_memory(self, every: set[fx.Node]) -> None:
        """Checks that the loop writes into its sums alone, and that nothing else reads or writes these meanwhile."""
        place = _places(self._graph)
        first, last = min(map(place.__getitem__, every)), max(map(place.__getitem__, every))
        sums = {memory_of(out) for out in self._sums}
        read = {memory_of(given) for node in every for given in node.all_input_nodes if given not in every}
        written = {memory_of(given) for node, at in place.items() if at >= first for given in written_by(node)}
        if not {memory_of(self._chosen), memory_of(self._choices.kept)}.isdisjoint(written_into(self._graph)):
            raise _OtherwiseError
        for node in self._graph.nodes:
            if first <= place[node] <= last and node not in every and node not in self._made:
                if any(memory_of(given) in sums for given in node.all_input_nodes) and place[node] > first:
                    raise _OtherwiseError
        others = {memory for memory in read - sums if memory in written}
        if others or self._sources & sums or len(sums) != len(self._sums):
            raise _OtherwiseError

    def _again(self, node: fx.Node, args: Sequence[Any], kwargs: dict[str, Any]) -> fx.Node:
        return self._call(node.target, *args, **kwargs)

    def _call(self, function: Any, *args: Any, **kwargs: Any) -> fx.Node:
        if not all(map(_is_plain, (*args, *kwargs.values()))):
            raise _OtherwiseError
        with self._graph.inserting_before(self._anchor):
            self._made.append(new_call(self._like, function, *args, **kwargs))
        return self._made[-1]


@dataclass(frozen=True)
class _Own:
    """What a sum has for the tokens of an expert, once so much was added."""

    out: fx.Node
    index: Any
    sums: int


@dataclass(frozen=True)
class _Added:
    """That, and rows."""

    out: fx.Node
    index: Any
    rows: _Rows


def _is_plain(value: Any) -> bool:
    """Whether an argument is the same for all pairs: nothing in it stands for what an expert has."""
    if isinstance(value, slice):
        return all(map(_is_plain, (value.start, value.stop, value.step)))
    if isinstance(value, (tuple, list)):
        return all(map(_is_plain, value))
    return value is not _NUMBER and not isinstance(
        value, (_Each, _Mask, _Column, _Places, _Rows, _Some, _Chosen, _Own, _Added)
    )


def _dim(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return args[1] if len(args) > 1 else kwargs.get("dim")


def _places(graph: fx.Graph) -> dict[fx.Node, int]:
    return {node: place for place, node in enumerate(graph.nodes)}
