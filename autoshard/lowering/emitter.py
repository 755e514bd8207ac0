"""Writes local graphs node by node, with the shape of every value known as it is written."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any, cast

import torch
from torch import fx

from ..mesh import Mesh
from ..ops import INTO
from ..plans import CollectiveKind
from .adapter import (
    ALL_GATHER,
    ALL_REDUCE,
    ALL_REDUCE_IN_PLACE,
    ALL_TO_ALL,
    REDUCE_SCATTER,
    WAIT,
    BoxedCodeGen,
)
from .direct_calls import called_directly
from .local_values import Results, Storage, Value, value_of
from .sketch import Sketch

aten = torch.ops.aten


@dataclass(frozen=True)
class Label:
    """What a node of a local graph is part of: the operator of the plan in whose turn it runs, and the tensor that it
    makes, or (``is_copy``) takes to another layout; with others together, where it is part of a bucket of the schedule.
    """

    operator: str
    tensor: str
    is_copy: bool
    bucket: int | None = None


@dataclass(frozen=True, eq=False)
class LocalGraph:
    """A graph of one list, which it empties when it is called. Its code is written the first time: who only reads the
    graph needs none.
    """

    graph: fx.Graph
    name: str

    @cached_property
    def _module(self) -> fx.GraphModule:
        return fx.GraphModule(torch.nn.Module(), called_directly(self.graph), class_name=self.name)

    def __call__(self, values: list[Any]) -> Any:
        """Runs the graph."""
        return self._module(values)

    @cached_property
    def values(self) -> tuple[torch.Tensor | None, ...]:
        """What it returns, without values."""
        returned: Sequence[Any] = next(node.args[0] for node in self.graph.nodes if node.op == "output")
        return tuple(None if value is None else value.meta["val"] for value in returned)


def hold(sent: torch.Tensor) -> None:
    """Does nothing with a tensor, which lives until then."""


def first_results(graph: LocalGraph, count: int, name: str, is_effect: Callable[[fx.Node], bool]) -> LocalGraph:
    """The graph that makes the first ``count`` results of another one alone, and lets go of everything else after its
    last use.

    Args:
        is_effect: whether a node has to run whoever reads what it gives.
    """
    part = fx.Graph()
    part.set_codegen(BoxedCodeGen())
    results: Any = part.graph_copy(graph.graph, {})
    part.output(tuple(results[:count]))
    part.eliminate_dead_code(is_impure_node=is_effect)
    part.lint()
    return LocalGraph(part, name)


class GraphEmitter:
    """Appends operators to an FX graph. ``node.meta["val"]`` of each is its result without values, as this rank's
    device makes it, ``node.meta["value"]`` says in which memory; ``node.meta["label"]`` what it is part of. The graph
    may be a :class:`autoshard.lowering.sketch.Sketch`, which is read in the same way and is not run.

    Implements :class:`autoshard.redistribution.execution.Emitter` and :class:`autoshard.ops.operator.Caller`.
    """

    def __init__(
        self, mesh: Mesh, groups: Mapping[str, str], results: Results | None = None, is_sketch: bool = False
    ) -> None:
        self.graph = cast(fx.Graph, Sketch()) if is_sketch else fx.Graph()
        if not is_sketch:
            self.graph.set_codegen(BoxedCodeGen())
        self._mesh = mesh
        self._groups = groups
        self._results = results or Results()
        self._label = Label("", "", is_copy=False)
        self._last: fx.Node | None = None

    def begin(self, operator: str) -> None:
        """Labels what is added from here on as part of an operator of the plan: the verifier and errors read it."""
        self._label = Label(operator, operator, is_copy=False)

    @contextmanager
    def copying(self, tensor: str, bucket: int | None = None) -> Iterator[None]:
        """What is added inside takes a tensor to another layout, for the operator that began."""
        outside = self._label
        self._label = Label(outside.operator, tensor, is_copy=True, bucket=bucket)
        yield
        self._label = outside

    def placeholder(self, name: str, value: torch.Tensor | Value, tensor: str) -> fx.Node:
        """Adds an input of the graph: ``value`` says its shape, strides and memory."""
        node = self.graph.placeholder(name)
        node.target = node.name  # unique, where two names differ only in a dot
        return _noted(node, value if isinstance(value, Value) else value_of(value), Label("", tensor, is_copy=False))

    def placeholders(self) -> list[fx.Node]:
        """The inputs of the graph, in order."""
        return [node for node in self.graph.nodes if node.op == "placeholder"]

    def finish(self, results: Any, name: str) -> LocalGraph:
        """The graph with what it returns, once all is added."""
        self.graph.output(results)
        self.graph.lint()
        return LocalGraph(self.graph, name)

    def call(self, op: Any, *args: Any, **kwargs: Any) -> fx.Node:
        """Adds an operator; none where a tensor is to be made contiguous that is."""
        if op is aten.contiguous.default and args[0].meta["val"].is_contiguous(**kwargs):
            return args[0]  # type: ignore[no-any-return]
        return self._append(op, args, kwargs, self._results.of(op, args, kwargs))

    def value(self, x: fx.Node) -> torch.Tensor:
        """See :class:`autoshard.redistribution.execution.Emitter`."""
        value: torch.Tensor = x.meta["val"]
        return value

    def write_into(self, made: fx.Node, place: fx.Node) -> None:
        """Has the operator that was added last write its result to a place, which was there before, if it can."""
        value, wanted = made.meta["val"], place.meta["val"]
        if made is not self._last or made.target not in INTO:
            return
        if (value.shape, value.dtype) == (wanted.shape, wanted.dtype):
            made.target, made.kwargs = INTO[made.target], {**made.kwargs, "out": place}
            made.meta["val"], made.meta["value"] = place.meta["val"], place.meta["value"]

    def beside(self, function: Callable[..., None], *args: Any) -> None:
        """Adds a call of a function that gives nothing: it does something beside the graph."""
        self._append(function, args, {}, Value(None, None, None))

    def results(self, node: fx.Node, outputs: Sequence[object | None]) -> list[fx.Node | None]:
        """The results of an operator, one for each of ``outputs``, which is None for one that is absent."""
        if len(outputs) == 1 and not isinstance(node.meta["val"], (tuple, list)):
            return [node]
        return [None if output is None else self.item(node, k) for k, output in enumerate(outputs)]

    def item(self, node: fx.Node, index: int) -> fx.Node:
        """Adds ``node[index]``: one of the results of an operator that has several."""
        return self._append(operator.getitem, (node, index), {}, node.meta["value"][index])

    def all_gather(self, x: fx.Node, axes: tuple[int, ...]) -> fx.Node:
        """See :class:`autoshard.redistribution.execution.Emitter`."""
        return self._sent("all_gather", x, axes)

    def reduce_scatter(self, x: fx.Node, axes: tuple[int, ...], reduce: str) -> fx.Node:
        """See :class:`autoshard.redistribution.execution.Emitter`."""
        return self._sent("reduce_scatter", x, axes, reduce)

    def all_reduce(self, x: fx.Node, axes: tuple[int, ...], reduce: str) -> fx.Node:
        """See :class:`autoshard.redistribution.execution.Emitter`."""
        return self._sent("all_reduce", x, axes, reduce)

    def all_to_all(self, x: fx.Node, axes: tuple[int, ...]) -> fx.Node:
        """See :class:`autoshard.redistribution.execution.Emitter`."""
        return self._sent("all_to_all", x, axes)

    def _sent(self, kind: CollectiveKind, x: fx.Node, axes: tuple[int, ...], reduce: str = "") -> fx.Node:
        arrived = self.wait(self.issue(kind, self.as_pairs(x), axes, reduce))
        return self.as_numbers(arrived, x)

    def as_pairs(self, x: fx.Node) -> fx.Node:
        """What travels of a tensor: complex numbers as pairs of real ones, as not every collective of every backend
        knows them.
        """
        if not x.meta["val"].is_complex():
            return x
        return self.call(aten.view_as_real.default, self.call(aten.resolve_conj.default, x))

    def as_numbers(self, arrived: fx.Node, x: fx.Node) -> fx.Node:
        """What arrived of a tensor like ``x``: the inverse of :meth:`as_pairs`."""
        return self.call(aten.view_as_complex.default, arrived) if x.meta["val"].is_complex() else arrived

    def issue(
        self, kind: CollectiveKind, x: fx.Node, axes: tuple[int, ...], reduce: str = "", *, in_place: bool = False
    ) -> fx.Node:
        """Adds a collective along mesh axes; what it brings is there once it was waited for.

        Args:
            in_place: an all-reduce writes into ``x`` itself.
        """
        parts, group, value = self._mesh.parts(axes), self._groups[self._mesh.named(axes)], x.meta["val"]
        rows = value.shape[0] if value.dim() else 1
        if kind == "all_reduce":
            op = ALL_REDUCE_IN_PLACE if in_place else ALL_REDUCE
            result = x.meta["value"] if in_place else self._empty(x, value.shape)
            return self._append(op, (x, reduce, group), {}, result)
        if kind == "all_gather":
            result = self._empty(x, (rows * parts, *value.shape[1:]))
            return self._append(ALL_GATHER, (x, parts, group), {}, result)
        if kind == "reduce_scatter":
            result = self._empty(x, (rows // parts, *value.shape[1:]))
            return self._append(REDUCE_SCATTER, (x, reduce, parts, group), {}, result)
        each = [rows // parts] * parts
        return self._append(ALL_TO_ALL, (x, each, each, group), {}, self._empty(x, value.shape))

    def _empty(self, like: fx.Node, shape: tuple[int, ...]) -> Value:
        return self._results.of(aten.new_empty.default, (like, tuple(shape)), {})

    def wait(self, issued: fx.Node) -> fx.Node:
        """Adds the wait for a collective: its result is there.

        Until then what it sends is held, on every backend: gloo alone would let go of it once it is sent, which may be
        soon or late.
        """
        arrived = self._append(WAIT, (issued,), {}, issued.meta["value"])
        if issued.next is not arrived and issued.target is not ALL_REDUCE_IN_PLACE:
            self.beside(hold, issued.args[0])
        return arrived

    def _append(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Value) -> fx.Node:
        node = self.graph.call_function(op)
        node.args = args  # given at once, arguments are searched for symbols: a fifth of all lowering
        if kwargs:
            node.kwargs = kwargs
        self._last = node
        return _noted(node, result, self._label)


def _noted(node: fx.Node, value: Value, label: Label) -> fx.Node:
    node.meta["val"], node.meta["value"], node.meta["label"] = value.tensor, value, label
    return node


def storages(node: fx.Node) -> dict[Storage, int]:
    """The storages of a value, each with its bytes."""
    return {storage: storage.size_bytes for storage in node.meta["value"].memory()}


def in_use(node: fx.Node) -> list[fx.Node]:
    """The values that are in use while a node runs, beside its own: those that it reads, and while a collective is
    waited for, what that sends.
    """
    read = list(node.all_input_nodes)
    return read + [sent for issued in read for sent in issued.all_input_nodes] if node.target is WAIT else read
