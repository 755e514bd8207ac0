"""What a forward computes of the rows that a mask picks (``x[mask]``), of all rows instead.

How many rows a mask picks is seen when a step runs, and a graph needs shapes that are known before. So what is computed
of each row by itself is computed of all rows, and where they become one (a sum, a mean, a loss) or are written back
(``x[mask] = ...``) those are left out that the mask does not pick: numbers and gradients are those of the picked rows.
A row that is left out holds zeros from the beginning, and ones where an operator is infinite at zero, so that nothing
infinite meets its gradient, which is zero. What is computed of it may become infinite nevertheless, as no row that is
picked would (``exp`` of a large bias, ``softmax`` where all is filled with ``-inf``), or be no index that there is
(``ids[mask] - 1``); so it is zeros again in front of an operator that would mind (:class:`_LeftOut`).

A number that Python takes out of a tensor (``mask.sum().item()``, ``len(x[mask])``) is that tensor, where it is only
computed with. What reads picked rows, or such numbers, in another way stays as it is, and :mod:`.static_shapes` refuses
the forward.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from inspect import signature
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from ..dynamo.numbers_as_indices import in_tensor
from ..examples import COMPUTED_ANEW, are_lengths, example, is_unknown, name_of, new_call, shape_of, tensor_of
from .masks import is_of_python, mask_of, memory_of, placed_by, same, seen_through, written_by, written_into

POINTWISE = frozenset(
    "add sub mul neg abs pow square exp expm1 tanh sigmoid relu gelu silu elu leaky_relu softplus sin cos erf sign "
    "where masked_fill logsigmoid float half bfloat16 double long int bool to clamp clamp_min clamp_max maximum "
    "minimum detach contiguous eq ne lt le gt ge and_ or_ invert logical_and logical_or logical_not log log1p sqrt "
    "rsqrt reciprocal truediv div".split()
)
"""Operators of each element by itself, by name."""
_AT_ONE = frozenset("log log1p sqrt rsqrt reciprocal truediv div pow kl_div poisson_nll_loss".split())
"""Those that are infinite at zero, or whose derivatives are."""
_STEEP = frozenset({"exp", "expm1", "binary_cross_entropy", "soft_margin_loss"})
"""Those that are infinite, or an error, at numbers that are not."""
TAME = POINTWISE - _AT_ONE - _STEEP
"""Operators of each element by itself that are finite wherever that is, as their derivatives are."""
_BY_INDEX = frozenset({"embedding", "gather"})
"""What raises an error at an integer that is no index."""
_AS_IT_IS = frozenset("float half bfloat16 double long int bool to detach contiguous unsqueeze squeeze".split())
"""What keeps each number."""
_OF_SUMS = _AS_IT_IS | frozenset("add sub neg where masked_fill sum mean".split())
"""What gives infinite numbers a gradient of zero, where the result's is."""
_MODERATE = 1e4
"""A number that is no larger than this makes nothing infinite that is added to it, or multiplied by it."""
_OF_FEATURES = frozenset({"linear", "layer_norm", "rms_norm"})
"""Operators of the last dims of each row: a norm of as many as it says."""
_ALONG_DIM = dict.fromkeys("softmax log_softmax sum mean argmax amax amin logsumexp unsqueeze squeeze".split(), 1)
_ALONG_DIM |= {"normalize": 2, "gather": 1, "cosine_similarity": 2}
"""Operators that go by a dim, and the number of the argument that says which: here the last one of each row."""
_BY_DEFAULT = {"normalize": 1, "cosine_similarity": 1}
"""The dim that they go by where none is said. Source: torch.nn.functional."""
_WEIGHTS = {"binary_cross_entropy": ("weight",), "binary_cross_entropy_with_logits": ("weight", "pos_weight")}
"""Losses of each element by itself that weigh it, and the arguments that say how."""
_LOSSES = _WEIGHTS.keys() | set(
    "mse_loss l1_loss smooth_l1_loss huber_loss kl_div poisson_nll_loss soft_margin_loss hinge_embedding_loss "
    "margin_ranking_loss".split()
)
"""Losses of each element by itself."""
_OF_PAIRS = ("gather", "cosine_similarity")
"""Operators along a dim of two tensors."""
_BY_CLASS = frozenset({"cross_entropy", "nll_loss"})
"""Losses of the class of each row: of scores, classes, weight, size_average, ignore_index, reduce and reduction."""
_LEGACY = ("reduce", "size_average")
_IGNORED = -100
"""The class that they ignore where none is said. Source: torch.nn.functional.cross_entropy."""
_OF_NUMBERS = frozenset("add sub mul truediv floordiv mod neg sym_max sym_min sym_float".split())
"""What Python computes of numbers, by name."""
_BESIDE = ("max_norm", "scale_grad_by_freq", "sparse")
"""What an embedding may do besides looking up: it writes, or counts rows."""
_HALF = (torch.float16, torch.bfloat16)
_OF_BOUNDS = {"sym_max": torch.maximum, "sym_min": torch.minimum}


class _LeftOut(Enum):
    """What rows hold that a mask does not pick."""

    A_NUMBER = auto()
    """One that was put there."""
    FINITE = auto()
    """What is computed of such, of parameters and of moderate numbers, which are taken not to overflow."""
    ANYTHING = auto()
    """Infinite numbers, or none, perhaps. The operator that gave them is one whose derivatives are finite."""


@dataclass(frozen=True)
class _Rows:
    """In the place of the rows that ``mask`` picks all rows, of shape (*mask.shape, *rest)."""

    whole: fx.Node
    mask: fx.Node
    left_out: _LeftOut

    @property
    def lead(self) -> int:
        """The number of dims of the mask."""
        return len(shape_of(self.mask))

    @property
    def rest(self) -> torch.Size:
        """The shape of each row."""
        return shape_of(self.whole)[self.lead :]


def compute_of_all_rows(graph: fx.Graph) -> None:
    """Rewrites a traced forward, as far as it reads rows that masks pick in such ways."""
    if any(is_unknown(example(node)) for node in graph.nodes):
        for node in graph.nodes:
            _change_a_copy(node)
        _Rewriting(graph).run()


def _change_a_copy(node: fx.Node) -> None:
    """Has ``x[mask] += y`` compute its sum anew: what a mask picks is a copy, which nobody else reads here."""
    rows = _first(node) if node.target in COMPUTED_ANEW and len(node.args) == 2 else None
    if not isinstance(rows, fx.Node) or rows.target is not operator.getitem or list(rows.users) != [node]:
        return
    other, value = tensor_of(node.args[1]), tensor_of(rows)
    is_alike = other is None or (value is not None and other.dtype == value.dtype)
    if is_alike and mask_of(_with_what_is_behind(rows.args[1])[0]) is not None:
        node.target = COMPUTED_ANEW[node.target]


class _Rewriting:
    def __init__(self, graph: fx.Graph) -> None:
        self._graph = graph
        self._written = written_into(graph)
        self._changed = {node for each in graph.nodes for given in written_by(each) for node in seen_through(given)}
        self._rows: dict[Any, _Rows] = {}
        self._numbers: dict[Any, fx.Node] = {}
        self._replaced = set[fx.Node]()

    def run(self) -> None:
        """Rewrites what can be, and erases what nothing reads any more."""
        before = list(self._graph.nodes)
        for node in before:
            if node.op not in ("call_function", "call_method"):
                continue
            self._node = node
            with self._graph.inserting_before(node):
                made = self._made(node)
            if isinstance(made, _Rows):
                self._rows[node] = made
            elif made is not None:
                node.replace_all_uses_with(made)
                self._replaced.add(node)
        read: set[fx.Node] = set()
        for node in reversed(before):
            is_left = (node in read or is_unknown(example(node))) and not written_by(node)
            if not node.users and (is_left or node in self._replaced) and node.op not in ("placeholder", "output"):
                read.update(given for given in node.all_input_nodes if given.op not in ("placeholder", "get_attr"))
                self._graph.erase_node(node)

    def _made(self, node: fx.Node) -> _Rows | fx.Node | None:
        """What stands for a node: rows, or a node that gives what it does; None where nothing does."""
        name, read = name_of(node), [self._rows[given] for given in node.all_input_nodes if given in self._rows]
        if is_unknown(example(node)) and node in self._changed:
            return None
        if not read:
            return self._of_numbers(node, name) or self._picked(node)
        rows = read[0]
        if not all(same(each.mask, rows.mask, self._written) for each in read):
            return None
        if node.target is operator.setitem:
            return self._put_back(node)
        if node.target is operator.getitem:
            return self._part(node, rows)
        if name in ("sym_size", "size") and node.args[1:] == (0,):
            self._numbers[node] = self._call(torch.sum, rows.mask)
            return None
        if name == "ctc_loss":
            return self._alignments(node, rows)
        if name in _BY_CLASS:
            return self._loss_by_class(node, rows.mask)
        if name in _LOSSES:
            return self._loss(node, name, rows.mask)
        if name in ("sum", "mean") and (node.args[1:], node.kwargs) in (((), {}), ((0,), {}), ((), {"dim": 0})):
            return self._reduced(rows, name, len(node.args) + len(node.kwargs) == 1)
        if name in ("view", "reshape", "flatten"):
            return rows if self._keeps_rows(node, rows) else None
        if name == "dropout":
            return None if _drops(node) else rows
        if name == "embedding" and (
            any((*node.args[3:4], *node.args[5:])) or any(node.kwargs.get(key) for key in _BESIDE)
        ):
            return None
        if name in ("layer_norm", "rms_norm", "normalize", "cosine_similarity") and 0 in (
            *node.args[3:],
            node.kwargs.get("eps"),
        ):
            return None  # rows that are left out would be divided by nothing
        if name in _OF_FEATURES or name == "embedding":
            is_first = node.args[0] in self._rows and len(read) == 1
            return self._of_each(node, name) if is_first and len(rows.rest) >= _features(node, name) else None
        if name in _ALONG_DIM:
            return self._along_dim(node, name, read)
        return self._of_elements(node, name, read) if name in POINTWISE else None

    def _picked(self, node: fx.Node) -> _Rows | None:
        """Rows that a node picks by a mask, if how many is unknown, or was before as many others were added to some."""
        if name_of(node) not in ("getitem", "masked_select") or len(node.args) != 2:
            return None
        x: Any = node.args[0]
        index, behind = _with_what_is_behind(node.args[1])
        mask = mask_of(index)
        if mask is None or tensor_of(x) is None or memory_of(mask) in self._written:
            return None
        if not is_unknown(example(node)) and not any(
            same(mask, rows.mask, self._written) for rows in self._rows.values()
        ):
            return None
        if name_of(node) == "masked_select":
            if shape_of(x) != torch.broadcast_shapes(shape_of(x), shape_of(mask)):
                return None
            mask = mask if shape_of(mask) == shape_of(x) else self._call("expand", mask, tuple(shape_of(x)))
        if not are_lengths(shape_of(x)[: len(shape_of(mask))], shape_of(mask)):
            return None
        if behind:
            x = self._call(operator.getitem, x, (*(slice(None),) * len(shape_of(mask)), *behind))
        return self._left_out(_Rows(x, mask, _LeftOut.ANYTHING), 0)

    def _left_out(self, rows: _Rows, by: int) -> _Rows:
        """Rows with a number in those that are left out."""
        value = tensor_of(rows.whole)
        assert value is not None
        number = torch.tensor(by, dtype=value.dtype).item()
        return _Rows(self._call(torch.where, self._beside(rows), rows.whole, number), rows.mask, _LeftOut.A_NUMBER)

    def _taken(self, given: Any, name: str) -> _Rows:
        """Rows as an operator can take them: with its derivatives finite in those that are left out."""
        rows, value = self._rows[given], tensor_of(self._rows[given].whole)
        assert value is not None
        if name in _AT_ONE:
            return self._left_out(rows, 1)
        is_index = name in _BY_INDEX and not value.is_floating_point()
        is_any = rows.left_out is _LeftOut.ANYTHING and name not in _OF_SUMS | _BY_INDEX
        if rows.left_out is not _LeftOut.A_NUMBER and (is_index or is_any or name in _STEEP):
            self._rows[given] = rows = self._left_out(rows, 0)
        return rows

    def _is_rows(self, given: Any) -> bool:
        return isinstance(given, fx.Node) and given in self._rows

    def _given(self, node: fx.Node, name: str, read: Sequence[_Rows]) -> _LeftOut:
        """What an operator gives in the rows that are left out, of rows that it can take."""
        value, kinds = tensor_of(node), {rows.left_out for rows in read}
        if name in _AS_IT_IS and len(kinds) == 1:
            return read[0].left_out
        if value is not None and not value.is_floating_point():
            return _LeftOut.FINITE
        others = [each for each in (*node.args, *node.kwargs.values()) if not self._is_rows(each)]
        is_finite = name in _OF_FEATURES or name in _ALONG_DIM or all(map(_is_finite, others))
        return _LeftOut.FINITE if is_finite and _LeftOut.ANYTHING not in kinds else _LeftOut.ANYTHING

    def _beside(self, rows: _Rows) -> fx.Node:
        """The mask of rows, with dims of one element for those of each row."""
        return self._call("reshape", rows.mask, (*shape_of(rows.mask), *(1,) * len(rows.rest)))

    def _of_each(self, node: fx.Node, name: str, args: Any = None, kwargs: Any = None) -> _Rows:
        """What a node computes, of all rows; of other arguments, where they are given."""
        read = {given: self._taken(given, name) for given in node.all_input_nodes if given in self._rows}

        def whole(given: fx.Node) -> fx.Node:
            return read[given].whole if given in read else self._number(given, node)

        args, kwargs = fx.map_arg((args or node.args, node.kwargs if kwargs is None else kwargs), whole)
        rows = list(read.values())
        return _Rows(self._again(node, args, kwargs), rows[0].mask, self._given(node, name, rows))

    def _of_elements(self, node: fx.Node, name: str, read: Sequence[_Rows]) -> _Rows | None:
        dims = len(read[0].rest)
        if any(len(each.rest) != dims for each in read) or node.kwargs.get("inplace"):
            return None
        others = [given for given in node.all_input_nodes if given not in self._rows and given not in self._numbers]
        if not all(_is_for_each(given, dims) for given in others):
            return (
                self._with_others(read[0], others)
                if name == "add" and len(node.args) == 2 and not node.kwargs
                else None
            )
        return self._of_each(node, name)

    def _with_others(self, rows: _Rows, others: Sequence[fx.Node]) -> _Rows | None:
        """The sum of rows and as many others, which then stand in the places of those that are picked."""
        value = tensor_of(others[0])
        if len(others) > 1 or value is None or is_unknown(value) or not are_lengths(value.shape[1:], rows.rest):
            return None
        none, other = self._call(torch.zeros_like, rows.whole), self._call("type_as", others[0], rows.whole)
        placed = self._call("masked_scatter", none, self._beside(rows), other)
        return _Rows(self._call(torch.add, rows.whole, placed), rows.mask, rows.left_out)

    def _along_dim(self, node: fx.Node, name: str, read: Sequence[_Rows]) -> _Rows | None:
        """Operators along the last dim of each row, or that put one behind or take one away there."""
        at, dims, is_new = _ALONG_DIM[name], len(read[0].rest), name == "unsqueeze"
        dim = node.args[at] if len(node.args) > at else node.kwargs.get("dim", _BY_DEFAULT.get(name))
        dim = dim[0] if isinstance(dim, (list, tuple)) and len(dim) == 1 else dim
        if node.args[0] not in self._rows or dim not in (-1, dims + is_new) or not (dims or is_new):
            return None
        if not all(given in self._rows for given in node.all_input_nodes):
            return None
        if len(read) > 1 and (name not in _OF_PAIRS or len(read[1].rest) != dims):
            return None
        args = tuple(-1 if k == at else value for k, value in enumerate(node.args))
        return self._of_each(node, name, args, node.kwargs | ({"dim": -1} if len(node.args) <= at else {}))

    def _part(self, node: fx.Node, rows: _Rows) -> _Rows | None:
        """Some features of each row: ``rows[:, 0]``, ``rows[..., 1:]``."""
        x, index = node.args
        first, *rest = index if isinstance(index, tuple) else (index,)
        taken = sum(each is not None for each in rest)
        if x not in self._rows or first not in (Ellipsis, slice(None)) or taken > len(rows.rest):
            return None
        if not all(is_of_python(each) for each in rest):
            return None
        front = [first] if first is Ellipsis else [slice(None)] * rows.lead
        return _Rows(self._call(operator.getitem, rows.whole, (*front, *rest)), rows.mask, rows.left_out)

    def _reduced(self, rows: _Rows, name: str, is_of_all: bool = True) -> fx.Node:
        """The sum or the mean of rows: of each feature, or of all of them (``batchmean``: over how many rows)."""
        dims = tuple(range(rows.lead + (len(rows.rest) if is_of_all else 0)))
        whole = self._left_out(rows, 0).whole
        if name == "sum":
            return self._call(torch.sum, whole, dims)
        value, each = tensor_of(whole), math.prod(rows.rest) if is_of_all and name == "mean" else 1
        assert value is not None
        total = self._call(torch.sum, whole, dims, dtype=torch.float32 if value.dtype in _HALF else value.dtype)
        count = self._call(torch.mul, self._call(torch.sum, rows.mask), each)
        return self._call("to", self._call(torch.div, total, count), value.dtype)

    def _of_numbers(self, node: fx.Node, name: str) -> fx.Node | None:
        """What is computed of numbers that Python takes out of tensors, or of how many rows there are: of tensors of no
        dims, float64 where Python has a float. Of numbers alone it is noted, as nothing else may read it so.
        """
        value = example(node)
        if name == "item" and isinstance(value, torch.SymInt | torch.SymFloat) and (x := self._noted(_first(node))):
            taken = self._call("reshape", self._call("clone", self._call("detach", x)), ())
            self._numbers[node] = self._call("double", taken) if isinstance(value, torch.SymFloat) else taken
        elif name in ("sym_size", "size") and node.args[1:] == (0,) and (mask := placed_by(node.args[0])):
            if memory_of(mask) not in self._written:
                self._numbers[node] = self._call(torch.sum, mask)
        elif not self._numbers.keys().isdisjoint(node.all_input_nodes):
            if node.target is in_tensor:
                return self._call("long", self._numbers[node.args[0]])
            if isinstance(value, torch.SymInt | torch.SymFloat) and name in _OF_NUMBERS:
                self._numbers[node] = self._arithmetic(node, name, isinstance(value, torch.SymFloat))
            elif isinstance(value, Tensor) and name in POINTWISE and not is_unknown(value):
                args, kwargs = fx.map_arg((node.args, node.kwargs), lambda given: self._number(given, node))
                if value.dtype not in _HALF:
                    return self._again(node, args, kwargs)
                args, kwargs = fx.map_arg((args, kwargs), self._precise)
                return self._call("to", self._again(node, args, kwargs), value.dtype)
        return None

    def _noted(self, taken: Any) -> fx.Node | None:
        """What a number is taken out of: of a ``tolist`` dynamo notes no example."""
        if not isinstance(taken, fx.Node) or tensor_of(taken) is not None:
            return taken if isinstance(taken, fx.Node) else None
        x = self._noted(taken.args[0]) if taken.target is operator.getitem else None
        return None if x is None else self._call(operator.getitem, x, taken.args[1])

    def _precise(self, given: fx.Node) -> fx.Node:
        """A tensor in float32 where it is of half precision, which holds no number of Python's."""
        value = tensor_of(given)
        return self._call("float", given) if value is not None and value.dtype in _HALF else given

    def _arithmetic(self, node: fx.Node, name: str, is_float: bool) -> fx.Node:
        args: Any = fx.map_arg(node.args, lambda given: self._numbers.get(given, given))
        if is_float:
            args = tuple(self._call("double", each) if isinstance(each, fx.Node) else each for each in args)
        if name == "sym_float":
            number: fx.Node = args[0]
            return number
        if name in _OF_BOUNDS:
            args = tuple(each if isinstance(each, fx.Node) else self._full(each, args) for each in args)
        return self._call(_OF_BOUNDS.get(name, node.target), *args)

    def _full(self, number: Any, args: Sequence[Any]) -> fx.Node:
        """A number of Python's, as the tensor that stands beside it."""
        beside = next(each for each in args if isinstance(each, fx.Node))
        return self._call(torch.full_like, beside, number)

    def _number(self, given: fx.Node, node: fx.Node) -> fx.Node:
        """What a node reads, where that is a number of Python's as a tensor that makes of the others what it would."""
        if given not in self._numbers:
            return given
        number, value, made = self._numbers[given], tensor_of(self._numbers[given]), tensor_of(node)
        assert value is not None
        if made is None or not (made.is_floating_point() and value.is_floating_point()):
            return number
        return self._call("to", number, torch.float32 if made.dtype in _HALF else made.dtype)

    def _loss(self, node: fx.Node, name: str, mask: fx.Node) -> _Rows | fx.Node | None:
        """A loss of each element by itself. Its tensors are rows; a weight may be the same for each of them."""
        function: Any = node.target
        if function is not getattr(F, name):
            return None
        given = signature(function).bind(*node.args, **node.kwargs).arguments
        given = {key: value for key, value in given.items() if value is not None}
        kind, may_weigh = given.pop("reduction", "mean"), _WEIGHTS.get(name, ())
        tensors = {key: value for key, value in given.items() if isinstance(value, fx.Node)}
        rows = {key: value for key, value in tensors.items() if value in self._rows}
        weights, shapes = tensors.keys() - rows.keys(), {self._rows[each].rest for each in rows.values()}
        if kind not in ("mean", "sum", "none", "batchmean") or not given.keys().isdisjoint(_LEGACY) or len(shapes) > 1:
            return None
        if not weights <= set(may_weigh) or ("weight" in given and not may_weigh):
            return None
        if not all(_is_for_each(tensors[key], len(*shapes)) for key in weights):
            return None
        whole = {key: self._taken(value, name).whole for key, value in rows.items()}
        each = _Rows(self._call(function, **(given | whole), reduction="none"), mask, _LeftOut.FINITE)
        return each if kind == "none" else self._reduced(each, kind)

    def _loss_by_class(self, node: fx.Node, mask: fx.Node) -> _Rows | fx.Node | None:
        scores, classes, *others = node.args
        if scores not in self._rows or classes not in self._rows:
            return None
        legacy = (*others[1:2], *others[3:4], *(node.kwargs.get(key) for key in _LEGACY))
        if any(value is not None for value in legacy):
            return None
        x, y = self._rows[scores], self._rows[classes]
        value = tensor_of(y.whole)
        ignored = others[2] if len(others) > 2 else node.kwargs.get("ignore_index", _IGNORED)
        kind = others[4] if len(others) > 4 else node.kwargs.get("reduction", "mean")
        if len(x.rest) != 1 or y.rest or value is None or value.is_floating_point():
            return None
        if kind not in ("mean", "sum", "none") or not isinstance(ignored, int):
            return None
        x = self._taken(scores, name_of(node))
        kept = self._call("reshape", self._call(torch.where, mask, y.whole, ignored), (-1,))
        flat = self._call("reshape", x.whole, (-1, x.rest[0]))
        made = self._call(node.target, flat, kept, *others, **node.kwargs)
        if kind != "none":
            return made
        return _Rows(self._call("reshape", made, tuple(shape_of(mask))), mask, _LeftOut.FINITE)

    def _alignments(self, node: fx.Node, rows: _Rows) -> fx.Node | None:
        """``F.ctc_loss`` of targets that a mask picks, one behind another: with those in front that it picks, in each
        row where their lengths are how many these are, else in all.
        """
        given = dict(zip(("log_probs", "targets", "input_lengths", "target_lengths"), node.args)) | node.kwargs
        if [each for each in node.all_input_nodes if each in self._rows] != [given["targets"]] or rows.rest:
            return None
        mask, whole, counted = rows.mask, self._taken(given["targets"], "embedding").whole, given["target_lengths"]
        if rows.lead != 2 or not _counts_each(counted, mask, self._written):
            mask, whole = (self._call("reshape", each, (-1,)) for each in (mask, whole))
        in_front = self._call(torch.argsort, self._call(torch.logical_not, mask), dim=-1, stable=True)
        targets = self._call(torch.gather, whole, -1, in_front)
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda each: targets if each in self._rows else each)
        return self._again(node, args, kwargs)

    def _keeps_rows(self, node: fx.Node, rows: _Rows) -> bool:
        """Whether a view, which has as many elements, has the rows as they are."""
        made = tensor_of(node)
        return made is not None and made.dim() > 0 and are_lengths(made.shape[1:], rows.rest)

    def _put_back(self, node: fx.Node) -> fx.Node | None:
        """What is computed of rows, written into their places."""
        x, index, value = node.args
        mask, once = mask_of(index), {memory_of(x)} if self._written[memory_of(x)] == 1 else set()
        if value not in self._rows or mask is None:
            return None
        rows = self._rows[value]
        if not same(mask, rows.mask, self._written.keys() - once):
            return None
        if not are_lengths(shape_of(rows.whole), shape_of(x)):
            return None
        new = self._call(torch.where, self._beside(rows), self._call("type_as", rows.whole, x), x)
        return self._call("copy_", x, new)

    def _again(self, node: fx.Node, args: Any, kwargs: Any) -> fx.Node:
        """What a node calls, on other arguments."""
        return self._call(node.target, *args, **kwargs)

    def _call(self, function: Any, *args: Any, **kwargs: Any) -> fx.Node:
        return new_call(self._node, function, *args, **kwargs)


def _counts_each(counted: Any, mask: fx.Node, written: Collection[Any]) -> bool:
    """Whether a node counts what a mask picks of each row."""
    if name_of(counted) != "sum" or (*counted.args[1:], *counted.kwargs.values()) not in ((-1,), (1,)):
        return False
    return same(counted.args[0], mask, written)


def _is_finite(given: Any) -> bool:
    """Whether an argument is a parameter, a moderate number, or no number."""
    if isinstance(given, fx.Node):
        return isinstance(example(given), nn.Parameter)
    return not isinstance(given, int | float) or abs(given) <= _MODERATE


def _is_for_each(given: fx.Node, dims: int) -> bool:
    """Whether a tensor is the same for each row of so many dims."""
    shape = shape_of(given)
    return tensor_of(given) is not None and (
        len(shape) <= dims or (len(shape) == dims + 1 and are_lengths(shape[:1], (1,)))
    )


def _with_what_is_behind(index: Any) -> tuple[Any, tuple[Any, ...]]:
    """An index, and what it takes of each row that the mask in front of it picks: ``x[mask, 0, None]``."""
    if not isinstance(index, tuple) or not all(map(is_of_python, index[1:])):
        return index, ()
    return index[0], () if all(each == slice(None) for each in index[1:]) else index[1:]


def _features(node: fx.Node, name: str) -> int:
    """How many dims of each row such an operator takes."""
    shape = node.kwargs.get("normalized_shape", node.args[1] if len(node.args) > 1 else ())
    if name == "embedding":
        return 0
    return len(shape) if name != "linear" and isinstance(shape, (tuple, list)) else 1


def _drops(node: fx.Node) -> bool:
    """Whether a dropout leaves anything out."""
    given = dict(zip(("input", "p", "training", "inplace"), node.args)) | node.kwargs
    return bool(given.get("p", 0.5)) and bool(given.get("training", True))


def _first(node: fx.Node) -> Any:
    return node.args[0] if node.args else None
