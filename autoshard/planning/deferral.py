"""What of a forward may run when the caller reads the loss, so that no rank waits for the others before its backward.

A loss is reduced over the ranks at the end of the forward, and the backward does not read it. What stands behind that
collective, and is there for results without dims alone, can be done whenever somebody reads one of them.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable
from heapq import heapify, heappop, heappush

from ..capture import CapturedGraph, Ref, is_random
from ..constraints.names import output_name
from ..ops import is_free
from ..plans import Redistribution, ShardingPlan
from ..plans.schedule import moves_alone

MOST_BYTES = 1 << 20
"""Of a tensor that may be on its way until the backward is over: held so long, what is larger is in the way of it."""


def deferrable(graph: CapturedGraph) -> frozenset[int]:
    """The operators of the forward that make numbers without dims, which only each other read, and floating ones among
    the results of the model; none where no backward follows, or of several micro-batches.

    None reads what the caller can get at, and change, before it runs.
    """
    return _tail(graph)[0]


def read_late(graph: CapturedGraph) -> frozenset[Ref]:
    """The tensors, none of more than ``MOST_BYTES``, that operators of the forward make for :func:`deferrable` ones and
    such results alone.
    """
    _, reads = _tail(graph)
    every, makers = _reads(graph), {ref: graph.nodes[ref.node] for ref in reads}
    made = (ref for ref, node in makers.items() if node.phase == "forward" and _is_ours(graph, ref))
    return frozenset(ref for ref in made if every(ref) == reads[ref] and graph.meta(ref).size_bytes <= MOST_BYTES)


def deferred(graph: CapturedGraph, plan: ShardingPlan) -> tuple[str, ...]:
    """The operators of the forward, and behind them the results, that a plan has run late: those for which a collective
    is waited for, and no other sets out behind them.

    Args:
        graph: the graph the plan was made for.
        plan: one whose schedule is decided.
    """
    late = deferrable(graph)
    if not (late or read_late(graph)) or not plan.bucket_bytes or not plan.gathers_ahead:
        return ()
    sent = [entry for entry in plan.redistributions if entry.phase == "forward" and entry.collectives]
    makers = {graph.tensor_name(Ref(i, k)): i for i in late for k in range(len(graph.nodes[i].outputs))}
    now = {makers[entry.tensor] for entry in sent if entry.tensor in makers}
    for i in sorted(late, reverse=True):
        if i in now:
            now.update(ref.node for ref in graph.nodes[i].inputs if ref.node in late)
    results = {output_name(k): ref for k, ref in enumerate(graph.outputs) if ref is not None and _is_number(graph, ref)}
    may = {graph.nodes[i].name for i in late - now} | results.keys()
    tensors = {graph.tensor_name(ref): ref for ref in read_late(graph)}
    waited: dict[Ref, tuple[str, ...]] = defaultdict(tuple)
    for entry in sent:
        if entry.tensor in tensors and _is_for(entry, may) and moves_alone(plan, entry):
            waited[tensors[entry.tensor]] += entry.consumers
    found: dict[int, str] = {}
    for i in sorted(late - now):
        node = graph.nodes[i]
        if any(ref.node in found or node.name in waited[ref] for ref in node.inputs):
            found[i] = node.name
    return (*found.values(), *(name for name, ref in results.items() if ref.node in found or name in waited[ref]))


def _is_for(entry: Redistribution, names: set[str]) -> bool:
    return bool(entry.consumers) and names.issuperset(entry.consumers)


def _tail(graph: CapturedGraph) -> tuple[frozenset[int], Counter[Ref]]:
    """The deferrable operators, and how often they, and results that are numbers, read each tensor."""
    found: set[int] = set()
    if not graph.gradients or graph.micro_batches > 1:
        return frozenset(), Counter()
    reads = Counter(ref for ref in graph.outputs if ref is not None and _is_number(graph, ref))
    every = _reads(graph)
    todo = [-ref.node for ref in reads]
    heapify(todo)
    while todo:  # readers come before what they read
        i = -heappop(todo)
        node = graph.nodes[i]
        made = [Ref(i, k) for k, meta in enumerate(node.outputs) if meta is not None]
        may_wait = (node.kind, node.phase) == ("operator", "forward") and not is_random(node)
        may_wait = may_wait and all(graph.meta(ref).shape == () for ref in made)
        may_wait = may_wait and all(ref not in graph.outputs and _is_ours(graph, ref) for ref in node.inputs)
        if may_wait and i not in found and all(every(ref) == reads[ref] for ref in made):
            found.add(i)
            reads.update(node.inputs)
            for ref in node.inputs:
                heappush(todo, -ref.node)
    return frozenset(found), reads


def _is_ours(graph: CapturedGraph, ref: Ref) -> bool:
    """Whether a tensor is no parameter, buffer or input, and looks at none, nor at a result."""
    node = graph.nodes[ref.node]
    if node.kind != "operator" or not is_free(node):
        return node.kind == "operator"
    return all(read not in graph.outputs and _is_ours(graph, read) for read in node.inputs)


def _reads(graph: CapturedGraph) -> Callable[[Ref], int]:
    """How often a tensor is read: by operators, and by what leaves the graph."""
    outside = Counter((*graph.outputs, *(ref for _, ref in graph.mutations)))
    return lambda ref: graph.reads[ref] + outside[ref]


def _is_number(graph: CapturedGraph, ref: Ref) -> bool:
    meta = graph.meta(ref)
    return meta.shape == () and meta.dtype.is_floating_point
