"""A sketch of a local program has the nodes of the graphs that run, one by one."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from autoshard.lowering import NODES, LocalProgram, Rank, in_use, lower

from ..oracles import groups_of
from ..plans_of import planned


def described(nodes: Any) -> list[tuple[object, ...]]:
    """What a count of memory reads of each node, with numbers in the place of nodes and of memory."""
    order = list(nodes)
    number = {id(node): k for k, node in enumerate(order)}
    memory: dict[object, int] = {}

    def numbered(arg: Any) -> object:
        if isinstance(arg, NODES):
            return "node", number[id(arg)]
        return tuple(map(numbered, arg)) if isinstance(arg, (tuple, list)) else arg

    def read(node: Any) -> tuple[object, ...]:
        given = numbered(node.args), {key: numbered(arg) for key, arg in node.kwargs.items()}
        used = [number[id(each)] for each in in_use(node)]
        if node.op == "output":
            return node.op, *given, used
        value, target = node.meta["value"], node.target if node.op == "call_function" else None
        places = [(memory.setdefault(storage, len(memory)), storage.size_bytes) for storage in value.memory()]
        return node.op, target, *given, used, value.looks, places, node.meta["label"]

    return [read(node) for node in order]


@pytest.mark.parametrize("name", ["llama", "gpt2", "moe", "conv", "assorted"])
@pytest.mark.parametrize("mesh", ["dp=2", "dp=2,tp=2"])
def test_a_sketch_has_the_nodes_of_the_graph_that_runs(name: str, mesh: str) -> None:
    found = planned(name, mesh)
    rank = Rank((0,) * found.plan.mesh.ndim, torch.device("cpu"), groups_of(found.plan.mesh))

    def lowered(is_sketch: bool) -> LocalProgram:
        return lower(found.graph, found.plan, rank, is_sketch=is_sketch)

    real, sketch = lowered(False), lowered(True)
    assert real.backward is not None and sketch.backward is not None
    assert described(sketch.forward.graph.nodes) == described(real.forward.graph.nodes)
    assert described(sketch.backward.graph.nodes) == described(real.backward.graph.nodes)
    others = ("arguments", "results", "mutated", "tangents", "trained", "exposed_results", "exposed_arguments")
    assert all(getattr(sketch, name) == getattr(real, name) for name in others)
