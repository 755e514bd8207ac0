"""The graph that runs: the operators of a local graph, called by torch's own Python functions where there are some."""

from __future__ import annotations

from torch import fx

from ..ops import DIRECT
from .adapter import BoxedCodeGen


def called_directly(graph: fx.Graph) -> fx.Graph:
    """A copy of a local graph, with the same names, that calls the functions of :data:`autoshard.ops.DIRECT`."""
    copy, copied = fx.Graph(), dict[fx.Node, fx.Node]()
    copy.set_codegen(BoxedCodeGen())
    for node in graph.nodes:
        made = copied[node] = copy.node_copy(node, copied.__getitem__)
        if node.op == "call_function":
            made.target = DIRECT.get(node.target, node.target)
    return copy
