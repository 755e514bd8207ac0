"""What numbers in tensors pick (``x[k]``): a tensor of its own in the graph, a view in one process. Where one of them
is written into, the other would have to change.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Iterator
from itertools import takewhile
from typing import Any

from torch import fx
from torch.fx import GraphModule

from ..dynamo.numbers_as_indices import picked
from ..examples import COMPUTED_ANEW, tensor_of
from ..lines import at, lines_in
from .masks import memory_of, same, written_by, written_into
from .static_shapes import ByNumbersError


def refuse_views_that_change(module: GraphModule) -> None:
    """Refuses a traced forward in which what a number picks is written into, or read after that was of which it is a
    part. ``x[k] += y`` computes its sum anew, and writes it.

    Raises:
        ByNumbersError: it does so, with its line.
    """
    for graph in (inner.graph for inner in module.modules() if isinstance(inner, GraphModule)):
        if rows := graph.find_nodes(op="call_function", target=picked):
            _compute_sums_anew(graph, rows)
            _refuse(graph, rows)


def _compute_sums_anew(graph: fx.Graph, rows: list[fx.Node]) -> None:
    written = written_into(graph)
    for row in rows:
        changing = _only_user(row)
        if changing is None or changing.target not in COMPUTED_ANEW or changing.args[0] is not row:
            continue
        value, other = tensor_of(row), tensor_of(changing.args[1])
        is_alike = other is None or (value is not None and other.dtype == value.dtype and other.dim() <= value.dim())
        if is_alike and _is_put_back(row.args[0], changing, written):
            changing.target = COMPUTED_ANEW[changing.target]


def _is_put_back(taken: Any, value: fx.Node, written: Counter[Any]) -> bool:
    """Whether a value goes where ``taken`` was looked up, and nowhere else."""
    put: Any = _only_user(value)
    if put is None or put.target is not operator.setitem or put.args[2] is not value:
        return False
    (x, places), (whole, others), memory = taken.args, put.args[:2], memory_of(taken.args[0])
    between = takewhile(lambda node: node is not put, _from(value.next))
    if any(memory in map(memory_of, node.all_input_nodes) and memory_of(node) is not memory for node in between):
        return False  # it would read the sum, too
    known = written.keys() - {memory}
    return all(a is b or same(a, b, known) for a, b in zip((x, *places), (whole, *others), strict=True))


def _from(node: fx.Node) -> Iterator[fx.Node]:
    while node.op != "root":
        yield node
        node = node.next


def _only_user(node: fx.Node) -> fx.Node | None:
    return next(iter(node.users)) if len(node.users) == 1 else None


def _refuse(graph: fx.Graph, rows: list[fx.Node]) -> None:
    wholes = {row: memory_of(row.args[0]) for row in rows}
    stale = set[fx.Node]()
    seen = list[fx.Node]()
    for node in graph.nodes:
        read = {memory_of(given) for given in node.all_input_nodes}
        if old := stale & read:
            raise _error(old.pop(), node, "it is read after that was written into of which it is a part")
        changed = {memory_of(given) for given in written_by(node)}
        if own := changed & wholes.keys():
            raise _error(own.pop(), node, "it is written into")
        stale |= {row for row in seen if wholes[row] in changed}
        seen += [node] if node in wholes else []


def _error(row: fx.Node, node: fx.Node, what: str) -> ByNumbersError:
    picked_at, where = (lines_in(each.meta.get("stack_trace") or "") for each in (row, node))
    return ByNumbersError(
        f"what is picked{at(picked_at)} by a number in a tensor is a view in one process, and {what}{at(where)}: a "
        "captured step looks the number up, and has a copy. Write x[k] = value; or pick with .clone(), and put back "
        "what is to be put back"
    )
