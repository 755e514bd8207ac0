"""What is known of an operator beyond what torch says of it: one entry for each operator or family, looked up by name.

The families are the other files of this package. An operator without an entry has DTensor's rules, runs on shards as it
runs on whole tensors, and is priced as a pointwise kernel.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, Protocol

import torch

from cost_models.kernel_kinds import OpKind

from ..capture import Node, TensorMeta
from ..layout import Layout, Placement
from ..mesh import Mesh
from .rule import Rule

Metas = tuple[TensorMeta, ...]
Shape = tuple[int, ...]
Form = tuple[Node, Metas]

Trait = Literal[
    "attention",
    "batched",
    "cast",
    "choice",
    "contraction",
    "copied",
    "drawn",
    "grouped",
    "linear",
    "masked",
    "mean",
    "part",
    "reshape",
    "rows",
    "scaling",
    "shift",
    "split",
    "statistics",
    "sum",
    "uninitialised",
    "view",
]
"""What an operator is, where somebody asks:

* ``attention``: dims 0 and 1 of its tensors are batch and heads;
* ``batched``: a product of one matrix per index of dim 0;
* ``cast``: the same numbers in another dtype;
* ``choice``: it picks the largest of a dim, as a router does of its experts;
* ``contraction``: a matrix product or a convolution of the forward;
* ``copied``: the same numbers in other memory, of which DTensor takes no addends;
* ``drawn``: it draws a random number for each element, by itself, in shapes that all its tensors share;
* ``grouped``: a product of each row with the matrix of its group, of which a rank may have some;
* ``linear``: of all its tensors taken together: what it makes of sums is the sum of what it makes of the addends;
* ``masked``: it gives some numbers of a tensor, and another number in the place of the rest;
* ``mean``: it averages, so that DTensor's averages of shards stand for sums here;
* ``part``: it takes one range, or one index, of the dim that is its second argument;
* ``reshape``: the same elements in row-major order;
* ``rows``: it reads some rows of its first argument, not all of it;
* ``scaling``: linear where it takes one tensor;
* ``shift``: a maximum that is subtracted from what it is the maximum of and added again; a NaN that it may lose, by the
  order of the ranks, is in the rest;
* ``split``: it cuts one dim into pieces;
* ``statistics``: it makes, or reads, sums of each channel over the batch, which SyncBatchNorm all-reduces;
* ``sum``: it adds two tensors;
* ``uninitialised``: its result is whatever the memory holds;
* ``view``: nothing is computed or moved, although torch's schema does not say so.
"""


class Caller(Protocol):
    """What executes an operator: torch itself, or a graph under construction."""

    def call(self, op: Any, *args: Any, **kwargs: Any) -> Any:
        """Applies a torch operator."""

    def value(self, x: Any) -> torch.Tensor:
        """A tensor as it is; for a value of a graph one that looks like it, whose numbers nobody reads."""


@dataclass(frozen=True)
class LocalCall:
    """A call of an operator on one rank's shards.

    Attributes:
        args, kwargs: the operator's, with the shards (or graph values) in place of tensors.
        metas: global shape and dtype of each tensor argument.
        inputs, outputs: the layouts of the strategy.
    """

    caller: Caller
    node: Node
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    metas: Metas
    inputs: tuple[Layout, ...]
    outputs: tuple[Layout | None, ...]
    mesh: Mesh
    coordinate: tuple[int, ...]

    def run(self, op: Any, *args: Any, **kwargs: Any) -> Any:
        """Applies a torch operator."""
        return self.caller.call(op, *args, **kwargs)

    def lying_alike(self, *images: Any) -> tuple[Any, ...]:
        """Tensors of one shape, contiguous unless the dims of all lie in memory alike. Some kernels of torch read all
        that they take in the order of one; what a redistribution brings lies otherwise than what one process has.
        """
        if len({self.caller.value(x).stride() for x in images}) == 1:
            return images
        return tuple(self.run(torch.ops.aten.contiguous.default, x) for x in images)


Rules = Callable[[Node, Metas], list[Rule]]
Local = Callable[[LocalCall], Any]
Small = Callable[[Node, Metas, list[list[int]], dict[int, int]], tuple[Any, ...]]
SmallForm = Callable[[Node, Metas, int, int], Form | None]
Keeps = Callable[[Node, int, int, int], bool]
InParts = Callable[[Node, Metas, int, Placement], list[Rule]]
Fits = Callable[[Node, Metas, tuple[Layout, ...], tuple[Layout | None, ...], Mesh], bool]
Flops = Callable[[Node, list[Shape], list[Shape]], float]
Blocks = Callable[[Node, list[Shape], tuple[Layout, ...]], tuple[float, int]]
Meant = Callable[[Node, tuple[torch.Tensor, ...]], tuple[torch.Tensor, ...]]
Passes = Callable[[Node, Metas, tuple[Layout, ...]], float]
AsOne = Callable[[Node, tuple[Layout, ...]], bool]


@dataclass(frozen=True)
class Operator:
    """What is known of an operator. What is left out is as with any other.

    Attributes:
        rules: all of its one-axis rules, in place of DTensor's. Every rule is checked by numbers before it is offered.
        more_rules: rules beside DTensor's.
        rules_beside_others: rules that are wrong on one axis alone and may be right beside those of other axes, which
            ``fits`` proves.
        in_parts: rules that take a dim that is cut in parts apart, or make one: takes the node, its tensors, the place
            among these and its results of one that is cut in parts, and how. Beside them, what holds of a cut dim
            holds of one cut in parts, as far as the check finds that it does.
        in_parts_beside_others: the same of rules that are right beside those of other axes alone.
        fits: whether a product of its rules is right on a mesh of several axes; left out, blocks of dims of different
            lengths must be even.
        suits: what else must be so on a mesh of several axes, where ``fits`` is left out.
        local: what runs on the shards of a rank; left out, the operator itself.
        small: the arguments of a small call for the check: takes the node, its tensors, their small shapes, which it
            may correct, and the small number for every length. Left out, integers are replaced like lengths.
        small_form: the whole small call: takes the node, its tensors, and the ranks of the axis and of the check.
        keeps: whether a length stays as it is in a small call: takes the node, the position of the tensor among the
            arguments, the dim, and the number of dims.
        meant: the tensors of a small call for the check, of random ones where these mean nothing: takes the small node.
        kernel: the kind of kernel that it is priced as.
        passes: how often its bytes move, of those read and written once, where on shards it is several kernels: takes
            the node, its tensors, and the layouts that it wants of them. Left out, once.
        parts: the positions of arguments that capture took out of it: what makes them takes the first argument of it in
            the layout that it does.
        as_one: of an operator with parts and of the parts, whether it is one kernel of torch under the layouts that are
            wanted of its tensors: it reads no part then, and the parts do not run.
        flops: floating-point operations on shards of given shapes: takes the node, and the shapes of arguments and
            results. Left out, one for each element of the largest result (of a reduction, or of its argument).
        blocks: of what runs block by block where a dim is cut in parts: what the slowest rank does of the flops of
            shards of such shapes, and the kernels beyond the first; takes the node, the shapes of arguments, and the
            layouts that it wants of them. Left out, all of them, and none.
        traits: what it is, where somebody asks.
    """

    rules: Rules | None = None
    more_rules: Rules | None = None
    rules_beside_others: Rules | None = None
    in_parts: InParts | None = None
    in_parts_beside_others: InParts | None = None
    fits: Fits | None = None
    suits: Fits | None = None
    local: Local | None = None
    small: Small | None = None
    small_form: SmallForm | None = None
    keeps: Keeps | None = None
    meant: Meant | None = None
    kernel: OpKind = "pointwise"
    passes: Passes | None = None
    parts: tuple[int, ...] = ()
    as_one: AsOne | None = None
    flops: Flops | None = None
    blocks: Blocks | None = None
    traits: tuple[Trait, ...] = ()


_ENTRIES: dict[str, Operator] = {}
_PATTERNS: list[tuple[re.Pattern[str], Callable[[re.Match[str]], Operator]]] = []
_UNKNOWN = Operator()


def enter(names: str, operator: Operator, namespace: str = "aten") -> None:
    """Makes the entry of operators, named as in torch and separated by blanks.

    ``mean`` is all overloads; ``view.dtype`` is one, which then has this entry alone.

    Raises:
        ValueError: one of them has an entry.
    """
    for name in names.split():
        full = f"{namespace}::{name}"
        if full in _ENTRIES:
            raise ValueError(f"{full} has two entries; say in one place what is known of it")
        _ENTRIES[full] = operator
    known.cache_clear()


def enter_pattern(pattern: str, make: Callable[[re.Match[str]], Operator]) -> None:
    """Makes the entry of operators of torch whose names match, where they have no entry by name."""
    _PATTERNS.append((re.compile(pattern), make))
    known.cache_clear()


def entries() -> dict[str, Operator]:
    """All entries by the names of their operators."""
    return dict(_ENTRIES)


@cache
def known(op: torch._ops.OpOverload | None) -> Operator:
    """The entry of an operator; an empty one where it has none, or where ``op`` is None (an input, a parameter)."""
    if op is None:
        return _UNKNOWN
    name, overload = op._schema.name, op._schema.overload_name
    for full in (f"{name}.{overload}", name):
        if full in _ENTRIES:
            return _ENTRIES[full]
    found = ((make, match) for pattern, make in _PATTERNS if (match := pattern.search(name)))
    return next((make(match) for make, match in found), _UNKNOWN)


def has(node: Node, trait: Trait) -> bool:
    """Whether a node is an operator with a trait."""
    return trait in known(node.op).traits


def as_it_is(node: Node, inputs: Metas, shapes: list[list[int]], length: dict[int, int]) -> tuple[Any, ...]:
    """The arguments of a small call of an operator whose integers are no lengths, or lengths that stay."""
    return node.args


def is_statistic(node: Node, result: int) -> bool:
    """Whether a result is what a norm notes of its numbers for its backward. Of half precision some devices keep that
    in float32, as CUDA does, and others in the dtype of the numbers; a captured graph has the dtype of a CPU.
    """
    return result > 0 and known(node.op).kernel == "normalization"


def is_contraction(node: Node) -> bool:
    """Whether a node is a matrix product or a convolution of the forward."""
    return node.phase == "forward" and has(node, "contraction")


def is_linear(node: Node) -> bool:
    """Whether what an operator makes of sums is the sum of what it makes of the addends; constants that it adds count
    as one of these.
    """
    traits = known(node.op).traits
    alone = len(node.inputs) == 1 and not {"cast", "scaling"}.isdisjoint(traits)
    return alone or is_free(node) or not {"linear", "sum"}.isdisjoint(traits)


def is_part(node: Node) -> bool:
    """Whether an operator is a part of another one, which may be one kernel that does without it."""
    entry = known(node.op)
    return entry.as_one is not None and not entry.parts


def is_left_out(node: Node, inputs: tuple[Layout, ...]) -> bool:
    """Whether an operator does not run where these layouts are wanted of its tensors: it is a part, and the other is
    one kernel then.
    """
    entry = known(node.op)
    return entry.as_one is not None and not entry.parts and entry.as_one(node, inputs)


def unread(node: Node, inputs: tuple[Layout, ...]) -> tuple[int, ...]:
    """The positions of tensors that an operator does not read where these layouts are wanted of them: its parts."""
    entry = known(node.op)
    return entry.parts if entry.parts and entry.as_one is not None and entry.as_one(node, inputs) else ()


def is_free(node: Node) -> bool:
    """Whether an operator is a view: it moves and computes nothing."""
    assert node.op is not None
    alias = node.op._schema.returns[0].alias_info if node.op._schema.returns else None
    return has(node, "view") or (alias is not None and not alias.is_write)
