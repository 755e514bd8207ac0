"""The part of a forward that runs when the caller reads a result: what it waits for is on its way meanwhile.

It waits, and computes results without dims from what arrived. Nothing in it sets out, so that ranks may run it when
they like, and no other rank waits for one that does not.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from ..plans.schedule import END
from .adapter import WAIT, BoxedCodeGen, collective_name
from .draws import start_drawing
from .emitter import LocalGraph, hold, in_use, storages
from .sketch import NODES

aten = torch.ops.aten


@dataclass(frozen=True, eq=False)
class Parted:
    """A forward in two parts: ``now`` returns behind the results, of which the ``late`` ones are None, and all else
    the ``passed`` values that ``later`` takes, which returns these.
    """

    now: LocalGraph
    later: LocalGraph
    late: tuple[int, ...]
    passed: int


def late_nodes(graph: fx.Graph, late: Collection[int], operators: Collection[str]) -> dict[fx.Node, None]:
    """The nodes of a forward that only the results numbered ``late`` need, from what they wait for on, in order.

    Args:
        operators: in whose turn they run, or (END) behind the last one.
    """
    turns, nodes = {*operators, END}, list(graph.nodes)
    returned: Sequence[Any] = nodes.pop().args[0]
    values = [(k in late, value) for k, value in enumerate(returned) if isinstance(value, NODES)]
    first = next((k for k, node in enumerate(nodes) if node.meta["label"].operator in turns), len(nodes))
    behind = nodes[first:]  # what is before it none of them is
    needed = _with_sources(behind, (v for is_late, v in values if not is_late), _cannot_wait)
    wanted = _with_sources(behind, (v for is_late, v in values if is_late)) - needed
    found: dict[fx.Node, None] = {}
    last: Any = None
    for node in behind:
        holds = node.target is hold and last in found and last.target is WAIT
        is_in_turn = node in wanted and node.meta["label"].operator in turns
        waits = is_in_turn and (node.target is WAIT or any(read in found for read in node.all_input_nodes))
        if holds or waits:
            found[node] = None
        last = node
    return found


def _cannot_wait(node: fx.Node) -> bool:
    return node.op == "call_function" and node.target is not WAIT and is_effect(node)


def _with_sources(
    nodes: Sequence[fx.Node], ends: Iterable[Any], also: Callable[[fx.Node], bool] = lambda node: False
) -> set[fx.Node]:
    """The ends, all nodes that are ``also`` some, and all of these nodes that they are computed from."""
    found = set(ends)
    for node in reversed(nodes):
        if node in found or also(node):
            found.update((node, *node.all_input_nodes))
    return found


def parted(forward: LocalGraph, late: Sequence[int], operators: Collection[str], results: int) -> Parted:
    """A forward in two parts. What the caller can get at, and write into, before the second runs, that has a copy of.

    Args:
        late, operators: as :func:`late_nodes` takes them.
        results: so many of what the forward returns, the first, the caller gets.
    """
    graph, apart = forward.graph, late_nodes(forward.graph, late, operators)
    returned: Sequence[Any] = graph.output_node().args[0]  # type: ignore[assignment]
    ends = [returned[k] for k in late]
    # what is sent is held until it was waited for
    passed = dict.fromkeys(read for node in apart for read in in_use(node) if read not in apart)
    passed |= dict.fromkeys(end for end in ends if end not in apart)
    now, later = _empty(), _empty()
    known: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        if node.op != "output" and node not in apart:
            known[node] = now.node_copy(node, known.__getitem__)
    first = [None if k in late else value and known[value] for k, value in enumerate(returned)]
    shown = [value for k, value in enumerate(returned[:results]) if value is not None and k not in late]
    outside = {key for node in (*shown, *_inputs(graph)) for key in storages(node)}
    read = {each for node in apart if node.target not in (WAIT, hold) for each in node.all_input_nodes}
    for node in passed:
        if node in read and not outside.isdisjoint(storages(node)):
            copied = now.call_function(aten.clone.default, (known[node],))
            copied.meta.update(node.meta)
            known[node] = copied
    now.output((*first, *(known[node] for node in passed)))
    there: dict[fx.Node, fx.Node] = {}
    for node in passed:
        there[node] = later.placeholder(node.name)
        there[node].meta.update(node.meta)
    for node in apart:
        there[node] = later.node_copy(node, there.__getitem__)
    later.output(tuple(there[end] for end in ends))
    for part in (now, later):
        part.lint()
    return Parted(LocalGraph(now, "ForwardNow"), LocalGraph(later, "ForwardLater"), tuple(late), len(passed))


def _inputs(graph: fx.Graph) -> list[fx.Node]:
    return [node for node in graph.nodes if node.op == "placeholder"]


def _empty() -> fx.Graph:
    graph = fx.Graph()
    graph.set_codegen(BoxedCodeGen())
    return graph


def is_effect(node: fx.Node) -> bool:
    """Whether a node does more than give its result: it communicates, draws random numbers or seeds them, or writes in
    place.
    """
    if node.op != "call_function" or node.target is start_drawing:
        return True
    op = node.target
    if not isinstance(op, torch._ops.OpOverload):
        return False
    draws = torch.Tag.nondeterministic_seeded in op.tags
    return draws or op._schema.is_mutable or collective_name(node) is not None
