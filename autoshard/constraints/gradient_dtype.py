"""The precision policy as a limit: gradients are reduced in ``reduce_dtype`` and in no other dtype.

What would be cheaper is not asked: a gradient that is cast from bfloat16 to float32 before it is reduced would travel
in half the bytes if it were reduced before the cast. So the reductions of a tensor are banned where it is nothing but a
gradient, or a part of one, in another dtype than that.
"""

from __future__ import annotations

from collections.abc import Iterator

from ..capture import CapturedGraph, Ref
from ..mesh import Mesh
from ..ops import is_linear
from ..plans.schedule import REDUCTIONS
from ..redistribution import Banned
from .limits import Limits


def limit_to_dtype(limits: Limits, graph: CapturedGraph, mesh: Mesh) -> None:
    """Adds what the precision of a graph leaves: nothing where it does not say in which dtype gradients are reduced."""
    dtype = graph.precision.reduce_dtype
    if dtype is None:
        return
    metas = ((ref, graph.meta(ref).dtype) for ref in becoming_gradients(graph))
    others = {ref for ref, found in metas if found.is_floating_point and str(found) != f"torch.{dtype}"}
    banned: Banned = frozenset((kind, axis, -1) for kind in REDUCTIONS for axis in range(mesh.ndim))
    limits.ban(lambda ref: banned if ref in others else frozenset())


def becoming_gradients(graph: CapturedGraph) -> Iterator[Ref]:
    """The tensors of the backward that are gradients of parameters, or become such by linear operators alone, and are
    read for nothing else.
    """
    gradients = {ref for _, ref in graph.gradients}
    left = {ref for ref in (*graph.outputs, *(ref for _, ref in graph.mutations)) if ref is not None}
    passing: set[int] = set()
    for i, node in reversed(list(enumerate(graph.nodes))):
        if node.kind != "operator" or node.phase != "backward":
            continue
        made = [Ref(i, k) for k in range(len(node.outputs)) if Ref(i, k) in gradients or Ref(i, k) in graph.readers]
        found = [ref for ref in made if ref not in left and passing.issuperset(graph.readers.get(ref, ()))]
        if len(found) == len(made) and is_linear(node):
            passing.add(i)
        yield from found
