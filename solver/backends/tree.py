"""Branch and bound for programs whose copies hold memory: a tree of relaxations, each solved from the last one's basis.

The relaxation of such a program is integral but for a few strategies, and one decision often settles the others. So it
is decided in which layouts the node makes its tensors that has the most bytes undecided, then the next one (a dive);
what comes out on the way, rounded, is an answer. Where a dive gets dearer than DETOUR above the lowest bound of what it
left aside, the search goes on there. Rows for memory are added where an answer is over the limit, for all of the tree.

Bytes, because what is small follows what is large: with the node first that is least decided, Llama-3-8B on 8x8 under
10 GiB went through the layouts of numbers for rows, which cost nothing, and had 0.37% after 60 relaxations and 33 CPU
seconds; so it has 0.05% after 13.
Source: Land and Doig, "An automatic method of solving discrete programming problems", 1960.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import highspy
import numpy as np

from ..evaluate import evaluate
from ..networks import Assignment, BoolArray
from ..problem import INFEASIBLE, IntArray, Problem
from ..routing import Router
from ..solution import Mixture, relative_gap
from .backend import Answer, Request
from .bounds import proven_cost
from .circles import cuts
from .integer_program import INTEGRAL, FloatArray, build
from .lazy import first_steps, peaks_to_add, run_lazily
from .mathopt import MathOpt
from .priced import priced_answer
from .warm_relaxation import WarmRelaxation

DETOUR = 2e-3
"""How far above the lowest bound of the tree a dive may go once an answer is known, as a part of that bound."""
ROUNDS_OF_ROUTES = 4
"""How often rows are added while routes are looked for that fit strategies."""
GOOD = 2e-2
"""Until there is an answer of at most this gap, each decision of a dive may cost DETOUR."""
WITHOUT_ANSWER = 8
"""After how many relaxations without an answer one is looked for by prices on memory (`solver.backends.priced`)."""
LEAN = 1e-3
"""The part of a copy that the backward makes anew from which on it makes all of it, where keeping it is too much."""
RELAXATIONS = 200
"""How many nodes of the tree are searched at most where nobody says; each takes one relaxation."""
FIRST = 0.5
"""The part of a time limit that is for relaxations until there is an answer: one may be looked for in the rest."""
MORE_ROWS = 8
"""How many relaxations with more rows, for memory or against circles, do not count as nodes."""
SHARE_DIGITS = 3
"""To how many digits shares are equal that nodes are undecided by."""


@dataclass(frozen=True, eq=False)
class Branch:
    """A part of the tree that is not searched yet: the values of variables that are held, and from above it a bound and
    the basis of its relaxation.
    """

    bound: float
    held: Mapping[int, float]
    depth: int = 0
    basis: highspy.HighsBasis | None = None


def run_tree(problem: Problem, request: Request) -> Answer:
    """The best answer found, and a bound.

    The search ends where the gap is as asked for, where the time ends, or after so many relaxations as the request's
    `node_limit` says, and RELAXATIONS without one. Branch and cut on the whole follows where a proven optimum is asked
    for and is not found, or nothing is and there is no such limit: what the tree has no answer for takes minutes there.
    """
    tree = _Tree(problem, request)
    answer = tree.search()
    nothing = answer.choices is None and request.node_limit is None
    missing = nothing or (request.relative_gap == 0 and not tree.is_proven)
    if answer.infeasible or request.ended() or not missing:
        return answer
    start = answer.assignment or request.start
    cut = run_lazily(MathOpt("HIGHS"), problem, replace(request, start=start, on_answer=lambda found: None))
    return tree.better(cut)


class _Tree:
    def __init__(self, problem: Problem, request: Request) -> None:
        self._problem, self._request = problem, request
        self._steps = first_steps(problem)
        self._known = Answer()
        self._cost: int | None = None
        if request.start is not None:
            self._steps.update(peaks_to_add(problem, request.start, self._steps))
            self._take(request.start)
        self._program = build(problem)
        self._relaxation = WarmRelaxation(self._program, request.seed)
        if self._steps:
            self._relaxation.minimise({}, request.seconds_left())  # a basis from which rows are soon satisfied
            self._add_rows(sorted(self._steps))
        self._router = Router()
        self._layouts = _layouts(problem, self._program.first)
        self._weights, self._repeats = _weights(problem)
        self._is_mixing = True  # until a point has all decided that stands alone
        self._open: list[Branch] = []
        self._has_looked = False
        self._late_s = (request.seconds_left() or 0.0) * (1 - FIRST)
        self._closed = np.inf  # the least bound of leaves whose cost is not known to be that

    @property
    def is_proven(self) -> bool:
        """Whether the best answer is proven as good as was asked for."""
        return self._request.is_met(self._cost, self._known.bound)

    def search(self) -> Answer:
        """The best answer found, and the bound of all that is left."""
        branch: Branch | None = Branch(-np.inf, {})
        most = self._request.node_limit or RELAXATIONS
        number = rounds = 0
        while number < most and branch is not None and not self._request.ended():
            if (number == WITHOUT_ANSWER or self._seconds() == 0.0) and self._is_to_look:
                self._look_for_first()
            found = self._relaxation.minimise(branch.held, self._seconds(), self._dearest(), branch.basis)
            if found.x is None and not found.infeasible:
                if self._is_to_look:
                    continue
                break  # the time is over
            if found.x is None or found.bound is None:
                branch, number = self._next(), number + 1
                continue
            branch = replace(branch, bound=max(branch.bound, found.bound), basis=None)  # from this point on
            if self._is_cut(found.x) or self._answered(found.x):
                rounds += 1
                number += rounds > MORE_ROWS
                continue  # with more rows
            number += 1
            branch = self._below(branch, found.x)
            self._bounded(branch)
            if self.is_proven:
                return self._known
        if branch is None and self._cost is None and self._closed == np.inf:
            return Answer(infeasible=True)
        self._bounded(branch)
        return self._known

    @property
    def _is_to_look(self) -> bool:
        """Whether there is no answer, and none was looked for yet."""
        return self._cost is None and not self._has_looked

    def _seconds(self) -> float | None:
        """Seconds that a relaxation may take."""
        left_s = self._request.seconds_left()
        return left_s if left_s is None or not self._is_to_look else max(0.0, left_s - self._late_s)

    def _look_for_first(self) -> None:
        """Looks for an answer by prices on memory, and for the best copies for its strategies."""
        self._has_looked = True
        start = self._request.start
        if start is None or self._problem.usage_price is not None or evaluate(self._problem, *start).cost >= INFEASIBLE:
            return
        found = priced_answer(self._problem, start, self._chosen)
        if found is None:
            return
        self._take(found)
        for _ in range(ROUNDS_OF_ROUTES):
            point = self._relaxation.minimise(self._choosing(found.choices), self._request.seconds_left())
            if point.x is None or not self._answered(point.x):
                break

    def _chosen(self, priced: Problem) -> tuple[int, ...] | None:
        """The strategies of the relaxation of a problem without memory."""
        if self._request.ended():
            return None
        program = build(priced)
        x = WarmRelaxation(program, self._request.seed).minimise({}, self._request.seconds_left()).x
        return None if x is None else program.choices_of(x)

    def _choosing(self, choices: Sequence[int]) -> dict[int, float]:
        """The values of all strategies where choices are made."""
        held = _all_zero(np.arange(self._program.choices))
        return held | dict.fromkeys((self._program.first[:-1] + np.array(choices)).tolist(), 1.0)

    def _below(self, branch: Branch, x: FloatArray) -> Branch | None:
        """The branch to search next, once a branch has been searched."""
        if not self._may_be_better(branch.bound):
            return self._next()
        if self._is_mixing:
            self._known = replace(self._known, mixtures=tuple(self._mixed(x)))
        parts = self._parts(x)
        if parts is None:
            self._closed = min(self._closed, branch.bound)
            return self._next()
        basis = self._relaxation.basis
        dive, rest = (Branch(branch.bound, {**branch.held, **part}, branch.depth + 1, basis) for part in parts)
        self._open.append(rest)
        if dive.bound - self._credit(dive) <= min(each.bound - self._credit(each) for each in self._open):
            return dive
        self._open.append(dive)
        return self._next()

    def _credit(self, branch: Branch) -> float:
        """How much dearer a branch may be than one that nothing was decided in, and still be searched before."""
        depth = 1 if self._is_good else branch.depth
        return DETOUR * depth * abs(branch.bound)

    @property
    def _is_good(self) -> bool:
        """Whether there is an answer that is worth proving, not only a first one."""
        return self._cost is not None and relative_gap(self._cost, self._known.bound) <= GOOD

    def better(self, other: Answer) -> Answer:
        """The best of what the tree and another search found and proved."""
        if other.infeasible and self._cost is None:
            return other
        if other.assignment is not None:
            self._take(other.assignment)
        bounds = [bound for bound in (self._known.bound, other.bound) if bound is not None]
        return replace(self._known, bound=max(bounds, default=None))

    def _next(self) -> Branch | None:
        """The open branch to search next; None where none can hold a better answer."""
        self._open = [each for each in self._open if self._may_be_better(each.bound)]
        if not self._open:
            return None
        best = min(self._open, key=lambda each: each.bound - self._credit(each))
        self._open.remove(best)
        return best

    def _dearest(self) -> float:
        """What a point may cost at most, as the program counts, to be of use."""
        return np.inf if self._cost is None else float(self._cost - self._problem.offset)

    def _may_be_better(self, bound: float) -> bool:
        return self._cost is None or self._proven(bound) < self._cost

    def _proven(self, bound: float) -> int:
        """The cost that a bound of the program proves of the problem."""
        return proven_cost(bound, self._cost, self._problem.offset)

    def _parts(self, x: FloatArray) -> tuple[dict[int, float], dict[int, float]] | None:
        """Two parts of a branch, as values of variables, of which neither holds the point; None where it is integral.

        Of the node that has the most bytes in undecided layouts: those strategies that make its tensors in the layouts
        that have most, and the others. Where all layouts are decided, the same with strategies, then other variables.
        """
        program = self._program
        chosen = np.round(x[: program.choices], 6)
        for groups in (self._layouts, np.arange(program.choices)):
            shares = np.bincount(groups, chosen, program.choices)[groups]
            most = np.maximum.reduceat(np.where(chosen > 0, shares, 0.0), program.first[:-1])
            undecided = np.where(most < 1 - INTEGRAL, (1 - most) * self._weights, 0.0)
            node = int(np.argmax(undecided))
            if undecided[node] > 0:
                self._is_mixing &= not self._repeats[node]
                columns = np.arange(program.first[node], program.first[node + 1])
                largest = groups[columns[np.argmax(np.where(chosen[columns] > 0, shares[columns], 0.0))]]
                among = groups[columns] == largest
                return _all_zero(columns[~among]), _all_zero(columns[among])
        off = np.where(program.integers, np.abs(x - np.rint(x)), 0.0)
        column = int(np.argmax(off))
        nearest = float(np.rint(x[column]))
        return ({column: nearest}, {column: 1.0 - nearest}) if off[column] > INTEGRAL else None

    def _mixed(self, x: FloatArray) -> Iterator[Mixture]:
        """What a point mixes, by share; nothing where no routes lead to that."""
        program = self._program
        chosen = np.round(x[: program.choices], 6)
        most = program.choices_of(chosen)
        second: dict[float, dict[int, int]] = defaultdict(dict)
        for node, (first, end) in enumerate(pairwise(program.first.tolist())):
            rest = chosen[first:end].copy()
            rest[most[node]] = 0.0
            share = round(float(rest.sum()), SHARE_DIGITS)
            if share > 0:
                second[share][node] = int(rest.argmax())
        main = self._router.routed(self._problem, most, program.arcs_of(x))
        if main is None:
            return
        for share, other in second.items():
            choices = [other.get(node, choice) for node, choice in enumerate(most)]
            found = self._router.routed(self._problem, choices, program.arcs_of(x))
            if found is not None:
                yield Mixture(main, found, share)

    def _answered(self, x: FloatArray) -> bool:
        """Takes what a point is when it is rounded as an answer; whether that led to more rows. What is over the limit
        is rounded once more, with fewer copies kept.
        """
        program = self._program
        choices, arcs = program.choices_of(x), program.arcs_of(x)
        found = self._router.routed(self._problem, choices, arcs, program.routes_of(x))
        if found is None:
            return False
        self._take(found)
        over = peaks_to_add(self._problem, found, self._steps)
        new = [step for step in over if step not in self._steps]
        if new:
            self._steps.update(new)
            self._add_rows(new)
        elif over:
            leaner = self._router.routed(self._problem, choices, arcs, program.routes_of(x, anew=LEAN))
            if leaner is not None:
                self._take(leaner)
        return bool(new)

    def _is_cut(self, x: FloatArray) -> bool:
        """Whether rows were added against circles of a point."""
        rows = cuts(self._problem, self._program, x)
        if rows:
            self._program = self._program.extended(0, rows)
            self._relaxation.grow(self._program)
        return bool(rows)

    def _add_rows(self, steps: Sequence[int]) -> None:
        """Adds memory rows for steps."""
        self._program = self._program.with_usage_rows(self._problem, steps)
        self._relaxation.grow(self._program)

    def _take(self, assignment: Assignment) -> None:
        """Notes an assignment where it is the best so far."""
        judged = evaluate(self._problem, *assignment)
        if judged.feasible and (self._cost is None or judged.cost < self._cost):
            self._known, self._cost = self._known.with_assignment(assignment), judged.cost

    def _bounded(self, branch: Branch | None) -> None:
        """Notes the bound of all that is left, and tells it."""
        left = self._open if branch is None else [*self._open, branch]
        least = min([self._closed, *(each.bound for each in left)])
        if least == np.inf and self._cost is not None:
            self._known = replace(self._known, bound=self._cost)
        elif np.isfinite(least):
            proven = self._proven(least)
            if self._cost is not None:
                proven = min(proven, self._cost)
            self._known = replace(self._known, bound=max(proven, self._known.bound or proven))
        self._request.on_answer(self._known)
        self._request.on_progress(self._cost, self._known.bound)


def _all_zero(columns: IntArray) -> dict[int, float]:
    return dict.fromkeys(columns.tolist(), 0.0)


def _weights(problem: Problem) -> tuple[FloatArray, BoolArray]:
    """Per node the bytes of the tensors that it makes and takes, one at least; and whether they stand for several."""
    weights, repeats = np.ones(len(problem.nodes)), np.zeros(len(problem.nodes), np.bool_)
    for network in problem.networks:
        if network.sizes is not None:
            readers = (consumer.node for consumer in (*network.forward, *network.backward))
            around = list({network.producer, *readers})
            weights[around] += float(network.sizes.min())
            repeats[around] |= len(network.lives) > 1
    return weights, repeats


def _layouts(problem: Problem, first: IntArray) -> IntArray:
    """Per strategy of all nodes a number that those strategies of its node share that make its tensors in the same
    layouts, and make them again in the same: that of the first one.
    """
    made: dict[int, dict[int, IntArray]] = defaultdict(dict)
    for network in problem.networks:
        made[network.producer][id(network.makes)] = network.makes
        if network.again is not None:
            made[network.again.node][id(network.again.wants)] = network.again.wants
    groups = np.arange(int(first[-1]))
    for node, vertices in made.items():
        rows = np.stack(list(vertices.values()), axis=1)
        _, leaders, group = np.unique(rows, axis=0, return_index=True, return_inverse=True)
        groups[first[node] : first[node + 1]] = first[node] + leaders[group.ravel()]
    return groups
