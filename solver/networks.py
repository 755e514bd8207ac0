"""One tensor's redistributions as a network: layouts joined by single steps, each paid once however many need it.

A vertex is a layout, an arc a single step between two layouts, with its price. The producer makes the tensor at one
vertex and every consumer wants it at one, each as its strategy says. What is decided beside the strategies are routes:
the arcs that are used, in the forward and in the backward.

    the producer makes R          arcs: R -> S(0) for 0, R -> S(1) for 0, S(0) -> R for 7
    consumers want S(0) and S(1)  routes: both arcs that leave R, for 0 together

A tensor may be made a second time, in the backward, by a node that may as well do without (`NOWHERE`). The backward
then starts from that alone, and nothing of the forward has to be there for it.

Routes are more than shortest paths: two consumers may share the first part of their ways, which is paid once, so the
cheapest set of arcs is a Steiner arborescence. Given the strategies each network is one of its own (`solver.routing`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from .integers import INFEASIBLE, IntArray, ProblemError, as_indices, as_integers

BoolArray = npt.NDArray[np.bool_]

NOWHERE = -1
"""The vertex of a strategy that wants nothing of a tensor in the backward, or does not make it again."""

MOST_VERTICES = 10**6
"""What a network may have: arrays of that size are made for it."""


class Consumer(NamedTuple):
    """A node that reads the tensor: strategy s of it wants the tensor at vertex `wants[s]`; int64 (S,). In the backward
    that may be NOWHERE.
    """

    node: int
    wants: IntArray

    @property
    def somewhere(self) -> IntArray:
        """The vertices without NOWHERE."""
        vertices: IntArray = self.wants[self.wants != NOWHERE]
        return vertices


class Routes(NamedTuple):
    """The arcs of one network that are used in each phase, ascending."""

    forward: tuple[int, ...] = ()
    backward: tuple[int, ...] = ()


class Life(NamedTuple):
    """When the copies of a network's tensor are in memory, in time steps.

    What a consumer wants is taken there just before step `at` and read in the steps of [at, until). A copy exists from
    the step before which it is made to the last one at which it is read, or before which another is taken from it.
    """

    made: int
    """The step at which the producer makes the tensor; it exists there at least."""
    reads: tuple[tuple[int, int], ...]
    """[at, until) of every consumer, in the order of `Network.consumers`."""
    base: Base | None = None
    """What the producer makes is a view: it shares the memory of what this consumer of another network reads."""
    again: int | None = None
    """The step at which the tensor is made again, for a network that has a node for that."""


class Base(NamedTuple):
    """One consumer in one life of a network: the numbers of the network, of the life, and of the consumer; and of the
    one that reads where a view is made again.
    """

    network: int
    life: int
    consumer: int
    again: int | None = None


class Assignment(NamedTuple):
    """What is decided: one strategy per node, and the routes of every network."""

    choices: tuple[int, ...]
    routes: tuple[Routes, ...] = ()


@dataclass(frozen=True, eq=False)
class Network:
    """The layouts of one tensor, the steps between them, who makes it and who wants it.

    V vertices, A arcs. The price of an arc that is used is paid once per phase, for all consumers of the phase
    together. Arrays may be, and for speed should be, shared between networks.

        cost = sum of costs[a] over the arcs a of routes.forward  +  the same over routes.backward

    Invariants: V from 1 to MOST_VERTICES; tails and heads in [0, V); costs from 0 up, together less than INFEASIBLE;
    one vertex per strategy of the producer and of each consumer (checked by `Problem`). The producer may be a consumer
    too, and a node may consume several times. NOWHERE stands in the backward only, and in what is made again.

    Attributes:
        name: for messages only.
        vertices: V.
        tails, heads: int64 (A,), the ends of the arcs.
        costs: int64 (A,), their prices.
        producer: the node that makes the tensor.
        makes: int64 (S,), the vertex at which each strategy of the producer makes it.
        forward, backward: who wants it in each phase.
        kept: whether copies outlive the forward. The forward's routes start at the producer's vertex. Those of the
            backward may start at every vertex that the forward reached if copies are kept, and at the producer's
            alone if they are not.
        sizes: int64 (V,), the bytes of a copy at each vertex; None where copies hold no memory.
        lives: when the copies exist: one life for each tensor that the network stands for (tied ones); none where
            copies hold no memory. What the backward starts from is kept since the forward; a vertex to which the
            backward has an arc of its own is made again.
        held: what the producer makes is in memory all the time and counted elsewhere; only other copies are counted.
        again: a node that makes the tensor again, at vertex `wants[s]` under strategy s; where that is not NOWHERE the
            routes of the backward start there and nowhere else.

    Raises:
        ProblemError: an invariant is broken.
    """

    name: str
    vertices: int
    tails: IntArray
    heads: IntArray
    costs: IntArray
    producer: int
    makes: IntArray
    forward: tuple[Consumer, ...] = ()
    backward: tuple[Consumer, ...] = ()
    kept: bool = True
    sizes: IntArray | None = None
    lives: tuple[Life, ...] = ()
    held: bool = False
    again: Consumer | None = None

    def __post_init__(self) -> None:
        where = f"network {self.name!r}"
        if not 1 <= self.vertices <= MOST_VERTICES:
            raise ProblemError(f"{where} has {self.vertices} vertices: expected from 1 to {MOST_VERTICES}")
        for end in ("tails", "heads"):
            object.__setattr__(self, end, as_indices(getattr(self, end), self.vertices, f"{end} of {where}"))
        object.__setattr__(self, "costs", as_integers(self.costs, 1, f"costs of {where}"))
        if not len(self.tails) == len(self.heads) == len(self.costs):
            raise ProblemError(
                f"{where} has {len(self.tails)} tails, {len(self.heads)} heads and {len(self.costs)} costs: "
                "one of each per arc"
            )
        if self.costs.size and self.costs.min() < 0:
            raise ProblemError(f"{where} has the negative cost {self.costs.min()}: arcs cost 0 or more")
        if self.costs.size and float(self.costs.max()) * self.costs.size >= INFEASIBLE and self._total() >= INFEASIBLE:
            raise ProblemError(f"the costs of {where} add up to {self._total()}: expected less than 10^18 (INFEASIBLE)")
        object.__setattr__(self, "makes", as_indices(self.makes, self.vertices, f"makes of {where}"))
        for phase, least in (("forward", 0), ("backward", NOWHERE)):
            checked = (self._end(end, least, f"wants in the {phase} of {where}") for end in getattr(self, phase))
            object.__setattr__(self, phase, tuple(checked))
        if self.again is not None:
            object.__setattr__(self, "again", self._end(self.again, NOWHERE, f"makes again of {where}"))
        self._check_lives(where)

    @property
    def consumers(self) -> tuple[Consumer, ...]:
        """Those of both phases."""
        return self.forward + self.backward

    @property
    def ends(self) -> tuple[Consumer, ...]:
        """The producer with the vertices at which it makes the tensor, then the consumers, then who makes it again."""
        again = () if self.again is None else (self.again,)
        return (Consumer(self.producer, self.makes), *self.consumers, *again)

    @cached_property
    def sources(self) -> IntArray:
        """The vertices at which the tensor may be made, or made again."""
        return self.makes if self.again is None else np.concatenate([self.makes, self.again.somewhere])

    @cached_property
    def is_optional(self) -> bool:
        """Whether strategies may want or make nothing in the backward."""
        return self.again is not None or any(wants.min() == NOWHERE for _, wants in self.backward)

    def made_again(self, choices: Sequence[int]) -> int:
        """The vertex at which the tensor is made again; NOWHERE where it is not."""
        return NOWHERE if self.again is None else int(self.again.wants[choices[self.again.node]])

    def between(self, end: Callable[[int, IntArray], Consumer]) -> Network:
        """The network between other nodes: `end(node, vertices)` says which, and where their strategies are: at some of
        these vertices, so that nothing needs to be checked again.
        """
        producer = end(self.producer, self.makes)
        forward, backward = (
            tuple(end(node, wants) for node, wants in consumers) for consumers in (self.forward, self.backward)
        )
        again = None if self.again is None else end(*self.again)
        return self._having(
            producer=producer.node, makes=producer.wants, forward=forward, backward=backward, again=again
        )

    def of_tensor(self, name: str, nodes: Sequence[int]) -> Network:
        """The network of another tensor that gets from place to place in the same ways, without lives; nothing needs to
        be checked again.

        Args:
            nodes: those at its ends, in the order of `ends`.
        """
        ends = [Consumer(node, vertices) for node, (_, vertices) in zip(nodes, self.ends, strict=True)]
        split = 1 + len(self.forward)
        last = len(ends) if self.again is None else -1
        return self._having(
            name=name,
            producer=ends[0].node,
            forward=tuple(ends[1:split]),
            backward=tuple(ends[split:last]),
            again=None if self.again is None else ends[-1],
            lives=(),
            sizes=None,
        )

    def _having(self, **changes: Any) -> Network:
        """The network with other values that hold together, which are not checked."""
        made, own = object.__new__(Network), vars(self)
        vars(made).update({name: own[name] for name in _FIELDS}, **changes)
        return made

    def _end(self, end: Consumer, least: int, what: str) -> Consumer:
        """The end with its vertices checked: from `least` up."""
        what = f"what node {end.node} {what}"
        vertices = as_integers(end.wants, 1, what)
        as_indices(vertices[vertices != NOWHERE] if least == NOWHERE else vertices, self.vertices, what)
        return Consumer(end.node, vertices)

    def _check_lives(self, where: str) -> None:
        if (self.sizes is None) != (not self.lives):
            raise ProblemError(f"{where} has sizes without lives, or lives without sizes: expected both, or neither")
        if self.sizes is not None:
            object.__setattr__(self, "sizes", as_integers(self.sizes, 1, f"sizes of {where}"))
            if len(self.sizes) != self.vertices or self.sizes.min() < 0:
                raise ProblemError(f"{where} must have one size from 0 up for each of its {self.vertices} vertices")
        for made, reads, _, again in self.lives:
            forward, backward = reads[: len(self.forward)], reads[len(self.forward) :]
            if len(reads) != len(self.consumers):
                raise ProblemError(f"a life of {where} has {len(reads)} reads: one for each of its consumers")
            if made < 0 or any(not made <= at <= until for at, until in reads):
                raise ProblemError(f"a life of {where} must have made <= at <= until for all reads, from 0 up")
            if max((at for at, _ in forward), default=0) > min((at for at, _ in backward), default=at_end(reads)):
                raise ProblemError(f"a life of {where} has a read of the backward before one of the forward")
            if (again is None) != (self.again is None):
                raise ProblemError(f"a life of {where} must say when the tensor is made again, if a node does that")
            over = max([made + 1, *(until for _, until in forward)])
            if again is not None and not over <= again <= min((at for at, _ in backward), default=again):
                raise ProblemError(
                    f"a life of {where} has the tensor made again at {again}: expected a step behind the reads of the "
                    "forward and before those of the backward"
                )

    def _total(self) -> int:
        return sum(self.costs.tolist())


_FIELDS = tuple(each.name for each in fields(Network))


def at_end(reads: Sequence[tuple[int, int]]) -> int:
    """The step after the last read."""
    return max((until for _, until in reads), default=0)


def rebased(networks: Sequence[Network], moved: Callable[[Base], Base]) -> tuple[Network, ...]:
    """The networks with other numbers for those whose memory views share."""

    def life(of: Life) -> Life:
        return of if of.base is None else of._replace(base=moved(of.base))

    return tuple(
        replace(network, lives=tuple(map(life, network.lives)))
        if any(of.base is not None for of in network.lives)
        else network
        for network in networks
    )


def reached(vertices: int, tails: IntArray, heads: IntArray, start: IntArray) -> BoolArray:
    """Per vertex, whether arcs lead there from a vertex of the start; with heads and tails exchanged, from there."""
    there = np.zeros(vertices, np.bool_)
    there[start] = True
    while True:
        more = heads[there[tails] & ~there[heads]]
        if not len(more):
            return there
        there[more] = True
