"""The backward graphs of one rank: one for each set of results that received a gradient."""

from __future__ import annotations

from torch import fx
from torch.distributed.device_mesh import DeviceMesh

from ..capture import CapturedGraph
from ..errors import BackwardError
from ..plans import ShardingPlan
from .agree import bind, is_same_everywhere
from .program import LocalProgram, lower
from .verify import verify


class Backwards:
    """Finds the graph that gives what autograd would give where only some results of a step received a gradient.

    Most jobs need one. That of all results is the program's own; any other is lowered the first time it is needed, and
    runs a part of the planned collectives. The ranks compare notes the first time, so that none waits for collectives
    that another leaves out.
    """

    def __init__(self, graph: CapturedGraph, plan: ShardingPlan, mesh: DeviceMesh, program: LocalProgram) -> None:
        self._graph, self._plan, self._mesh, self._program = graph, plan, mesh, program
        self._graphs: dict[frozenset[int], fx.GraphModule] = {}

    def of(self, used: frozenset[int]) -> fx.GraphModule:
        """The graph for gradients of the results numbered ``used``; it takes their tangents alone.

        Raises:
            BackwardError: other ranks have gradients of other results.
        """
        if used not in self._graphs:
            possible = self._program.tangents
            if len(possible) > 1 and not is_same_everywhere([k in used for k in possible], self._mesh):
                raise BackwardError(
                    f"this rank goes backward through {_names(used)} of the module, another rank through others; every "
                    "rank must compute its loss from the same results"
                )
            is_whole = used == frozenset(possible)
            graph = self._program.backward if is_whole else self._part(used)
            assert graph is not None
            self._graphs[used] = graph
        return self._graphs[used]

    def _part(self, used: frozenset[int]) -> fx.GraphModule | None:
        rank = bind(self._mesh)
        part = lower(self._graph, self._plan, rank, used)
        verify(part, self._plan, rank.groups, whole=False)
        return part.backward


def _names(results: frozenset[int]) -> str:
    """Numbers of results as an error says them."""
    return ("result " if len(results) == 1 else "results ") + ", ".join(map(str, sorted(results)))
