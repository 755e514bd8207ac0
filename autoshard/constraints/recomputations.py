"""What people compute again by hand to save memory, read off the graph: no names of modules are needed.

``selective``
    The core attention alone: what it makes is large for the time it takes. An attention operator, or, where attention
    is written out, the product of queries and keys, the product with the values, and what stands between, the softmax
    among it; and the views of what they make. V. Korthikanti et al., "Reducing Activation Recomputation in Large
    Transformer Models", arXiv:2205.05198, section 5.
``full``
    Every layer, each as ``torch.utils.checkpoint`` around it has it: kept is what goes in and what comes out.
    T. Chen et al., "Training Deep Nets with Sublinear Memory Cost", arXiv:1604.06174, section 4.

Operators that draw random numbers are always kept, as everywhere.
"""

from __future__ import annotations

from collections.abc import Iterable

from ..capture import CapturedGraph, can_be_again, within_layers
from ..errors import ConstraintError
from ..ops import is_free
from .roles import Roles
from .values import Recomputation


def recomputation_of(constraint: Recomputation, graph: CapturedGraph) -> frozenset[str]:
    """The operators that are computed again, by name.

    Raises:
        ConstraintError: the model has no attention, or no layer, to compute again.
    """
    captured = graph.original or graph
    if constraint.granularity == "full":
        found, missing = within_layers(captured), "layer: no numbered module (layers.0) with two or more matrices"
    else:
        found, missing = _core_attention(captured), "attention: no attention operator, no softmax between two products"
    if not found:
        raise ConstraintError(
            f"the constraint {constraint.text!r} finds nothing to compute again, since the model has no {missing}; "
            "name operators ('recompute NAME') or modules ('checkpoint MODULE')"
        )
    return found


def _core_attention(graph: CapturedGraph) -> frozenset[str]:
    roles = Roles(graph)
    core = {i for i in roles.attentions if graph.nodes[i].phase == "forward"} | roles.written_out
    return with_views((graph.nodes[i].name for i in core if can_be_again(graph.nodes[i])), graph)


def with_views(names: Iterable[str], graph: CapturedGraph) -> frozenset[str]:
    """Operators of the forward, and with them the views of what they make: these share the memory of the first one, if
    they are not made again with it.
    """
    named = frozenset(names)
    found: set[int] = set()
    for i, node in graph.of_kind("operator"):
        shares = is_free(node) and node.inputs and node.inputs[0].node in found
        if can_be_again(node) and (node.name in named or shares):
            found.add(i)
    return frozenset(graph.nodes[i].name for i in found)
