"""Local graphs whose computation a compiler has compiled: what lies between two collectives is a piece.

Collectives, their waits, what draws random numbers and what writes in place stay where they are in the graph, one by
one: what runs, and in which order, is what was planned whatever the compiler does. Pieces that are the same but for
the names of their values, as those of identical layers, are compiled once.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import fx

from .adapter import BoxedCodeGen, collective_name, example_of
from .emitter import LocalGraph, storages

Compiler = Callable[[fx.GraphModule, list[torch.Tensor]], Callable[..., Any]]
"""A backend of ``torch.compile``: from a graph and example inputs to a function that gives a sequence of results."""

LEAST = 2
"""Operators that a piece has at least; less is not worth a call of a compiled function."""


class Pieces:
    """What one compiler has compiled."""

    def __init__(self, compiler: Compiler) -> None:
        self._compiler = compiler
        self._graphs: WeakKeyDictionary[LocalGraph, LocalGraph] = WeakKeyDictionary()
        self._known: dict[Hashable, Callable[..., Any]] = {}

    def of(self, graph: LocalGraph) -> LocalGraph:
        """The same graph, whose pieces are compiled."""
        if graph not in self._graphs:
            self._graphs[graph] = self._compiled(graph)
        return self._graphs[graph]

    def _compiled(self, graph: LocalGraph) -> LocalGraph:
        made, taken = fx.Graph(), dict[fx.Node, fx.Node]()
        made.set_codegen(BoxedCodeGen())
        for run in _runs(graph.graph):
            if len(run) > 1:
                self._add_piece(made, taken, run)
            else:
                taken[run[0]] = made.node_copy(run[0], taken.__getitem__)
        made.lint()
        return LocalGraph(made, f"Compiled{graph.name}")

    def _add_piece(self, made: fx.Graph, taken: dict[fx.Node, fx.Node], run: Sequence[fx.Node]) -> None:
        inside = set(run)
        inputs = list(dict.fromkeys(source for node in run for source in node.all_input_nodes if source not in inside))
        results = [node for node in run if _is_tensor(node) and any(user not in inside for user in node.users)]
        piece, values = fx.Graph(), dict[fx.Node, fx.Node]()
        for k, source in enumerate(inputs):
            values[source] = piece.placeholder(f"x{k}")
        for k, node in enumerate(run):
            values[node] = piece.node_copy(node, values.__getitem__)
            values[node].name, values[node].meta = f"v{k}", {}
        piece.output(tuple(values[node] for node in results))
        call = made.call_function(self._function(piece, inputs), tuple(taken[source] for source in inputs))
        call.meta = dict(run[-1].meta)
        for k, node in enumerate(results):
            taken[node] = made.call_function(operator.getitem, (call, k))
            taken[node].meta = dict(node.meta)

    def _function(self, piece: fx.Graph, inputs: Sequence[fx.Node]) -> Callable[..., Any]:
        examples = [example_of(source.meta["val"]) for source in inputs]
        key = str(piece), tuple((x.dtype, x.shape, x.stride(), x.device) for x in examples)
        if key not in self._known:
            function = self._compiler(fx.GraphModule(torch.nn.Module(), piece), examples)

            def run(*values: torch.Tensor) -> Any:  # FX can write a call of it: it has a name in a module
                return function(*values)

            self._known[key] = run
        return self._known[key]


def _runs(graph: fx.Graph) -> Iterator[list[fx.Node]]:
    """The nodes in order: those of a piece together, each other one alone. So are views of memory that an operator
    writes its result to: what a compiler makes of them may be copies.
    """
    run: list[fx.Node] = []
    written = {storage for node in graph.nodes if "out" in node.kwargs for storage in storages(node)}
    for node in graph.nodes:
        if _is_pure(node) and written.isdisjoint(storages(node)):
            run.append(node)
            continue
        yield from _worth(run)
        yield [node]
        run = []
    yield from _worth(run)


def _worth(run: list[fx.Node]) -> list[list[fx.Node]]:
    computing = [node for node in run if node.target is not operator.getitem and not _is_view(node)]
    return [run] if len(computing) >= LEAST else [[node] for node in run]


def _is_pure(node: fx.Node) -> bool:
    """Whether a node does nothing but compute its result from its inputs."""
    if node.op != "call_function":
        return False
    op = node.target
    if not isinstance(op, torch._ops.OpOverload):
        return op is operator.getitem and _is_pure(node.all_input_nodes[0])
    draws = torch.Tag.nondeterministic_seeded in op.tags
    return not (draws or op._schema.is_mutable or collective_name(node) is not None)


def _is_view(node: fx.Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and node.target.is_view


def _is_tensor(node: fx.Node) -> bool:
    return isinstance(node.meta["val"], torch.Tensor)
