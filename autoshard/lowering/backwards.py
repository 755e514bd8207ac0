"""The backward graphs of one rank: one for each set of results that received a gradient."""

from __future__ import annotations

from dataclasses import dataclass

from torch.distributed.device_mesh import DeviceMesh

from ..capture import CapturedGraph
from ..errors import BackwardError
from ..plans import ShardingPlan
from .agree import bind, is_same_everywhere
from .emitter import LocalGraph
from .local_program import LocalProgram, lower
from .verify import verify


@dataclass(frozen=True, eq=False)
class Backward:
    """The backward for the gradients of some results.

    Of what the forward saved, it reads the positions ``needed``; those that are ``spent``, no operator reads that it
    leaves out: a later backward through other results does without them. Behind the tangents it takes the sums of the
    parameters ``summed``.
    """

    graph: LocalGraph
    needed: frozenset[int]
    spent: frozenset[int]
    summed: tuple[str, ...]


class Backwards:
    """Finds the graph that gives what autograd would give where only some results of a step received a gradient.

    Most jobs need one. That of all results is the program's own; any other is lowered the first time it is needed, and
    runs a part of the planned collectives. The ranks compare notes the first time, so that none waits for collectives
    that another leaves out.
    """

    def __init__(self, graph: CapturedGraph, plan: ShardingPlan, mesh: DeviceMesh, program: LocalProgram) -> None:
        self._graph, self._plan, self._mesh, self._program = graph, plan, mesh, program
        self._made: dict[tuple[frozenset[int], bool], Backward] = {}

    def of(self, used: frozenset[int], adds: bool = False) -> Backward:
        """The backward for gradients of the results numbered ``used``; it takes the tangents of these alone.

        Args:
            adds: whether it adds to sums of gradients.

        Raises:
            BackwardError: other ranks have gradients of other results.
        """
        if (used, adds) not in self._made:
            possible = self._program.tangents
            if len(possible) > 1 and not is_same_everywhere([k in used for k in possible], self._mesh):
                raise BackwardError(
                    f"this rank goes backward through {_names(used)} of the module, another rank through others; every "
                    "rank must compute its loss from the same results"
                )
            whole = self._program.backward
            is_whole = used == frozenset(possible)
            part = self._program if is_whole and not adds else self._part(used, adds, is_whole)
            assert part.backward is not None and whole is not None
            readers = _readers(part.backward)
            saved = len(readers) - len(used) - len(part.summed)
            spent = (k for k, found in enumerate(_readers(whole)[:saved]) if found <= readers[k])
            needed = (k for k, found in enumerate(readers[:saved]) if found)
            self._made[used, adds] = Backward(part.backward, frozenset(needed), frozenset(spent), part.summed)
        return self._made[used, adds]

    def _part(self, used: frozenset[int], adds: bool, is_whole: bool) -> LocalProgram:
        rank = bind(self._mesh, self._plan.links)
        part = lower(self._graph, self._plan, rank, used, adds=adds, random=self._program.random)
        verify(part, self._plan, rank.groups, whole=is_whole)
        return part


def _readers(module: LocalGraph) -> list[frozenset[str]]:
    """For each input of a graph, the operators in whose turn it is read."""
    given = (node for node in module.graph.nodes if node.op == "placeholder")
    return [frozenset(user.meta["label"].operator for user in node.users) for node in given]


def _names(results: frozenset[int]) -> str:
    """Numbers of results as an error says them."""
    return ("result " if len(results) == 1 else "results ") + ", ".join(map(str, sorted(results)))
