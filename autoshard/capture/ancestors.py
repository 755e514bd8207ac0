"""What nodes of a graph of ``torch.fx`` are made of."""

from __future__ import annotations

from collections.abc import Iterable

from torch.fx import Node as FxNode


def ancestors(roots: Iterable[FxNode]) -> set[FxNode]:
    """Nodes, and all that they are made of, directly or not."""
    found = set(roots)
    waiting = list(found)
    while waiting:
        for given in waiting.pop().all_input_nodes:
            if given not in found:
                found.add(given)
                waiting.append(given)
    return found
