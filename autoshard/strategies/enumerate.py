"""Every strategy of an operator on a mesh: the product of its checked one-axis rules over the axes."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache, partial
from itertools import product
from typing import Literal

import torch

from ..capture import CapturedGraph, Node, Ref, TensorMeta, is_random
from ..errors import StrategyWarning
from ..layout import Layout, P, Placement, R, S, is_even, is_possible
from ..mesh import Mesh
from ..micro_batches import is_held, is_summed
from ..ops import Rule, has, is_registered, known, replicate_rule
from .dtensor import dtensor_function, dtensor_rules
from .guesses import guessed_rules
from .in_parts import cuts_in_parts, rules_in_parts, rules_in_parts_beside_others
from .rule_check import Check
from .signatures import signature

_NEVER_SENT = frozenset({torch.int16, torch.uint16})
"""No collective of gloo or NCCL takes these ("Invalid scalar type" in torch 2.13): every rank has them whole."""


@dataclass(frozen=True)
class Strategy:
    """The layouts of one operator: wanted of each tensor argument, and of each result (None for an absent one)."""

    inputs: tuple[Layout, ...]
    outputs: tuple[Layout | None, ...]


Source = Literal["torch", "autoshard", "user", "guess"]
"""Who says how an operator can be cut: DTensor's rules, ``autoshard.ops``, ``register_operator``, or nobody, so that a
guess is tried.
"""


@dataclass(frozen=True)
class Provenance:
    """Where the rules come from by which an operator can be cut on a mesh; each was checked by numbers.

    ``sources`` are in the order of rules; where there are none every rank runs the whole operator, and ``lack`` says
    why; it is empty where there is nothing to cut, as in a single number.
    """

    sources: tuple[Source, ...]
    lack: str = ""


class Rulebook:
    """The checked rules of operators, each looked up and checked once for a number of ranks.

    They depend on no graph and no mesh: planning a model under other constraints, or with other operators computed
    again, need not check them anew, which is half of the time that a program takes to write. What they come to on a
    mesh is kept, too.
    """

    def __init__(self) -> None:
        self._found: dict[object, _Found] = {}
        self._in_parts: dict[object, tuple[Rule, ...]] = {}
        self._strategies: dict[tuple[object, Mesh], tuple[Strategy, ...]] = {}

    @classmethod
    def of_process(cls) -> Rulebook:
        """One with the rules that were checked in this process before, as a model is often planned several times; what
        they come to on a mesh is its own.
        """
        book = cls()
        book._found, book._in_parts = _OF_PROCESS._found, _OF_PROCESS._in_parts
        return book

    def strategies(self, key: object, mesh: Mesh, make: Callable[[], tuple[Strategy, ...]]) -> tuple[Strategy, ...]:
        """The strategies of the operators of a signature on a mesh, made where they are not known."""
        if (key, mesh) not in self._strategies:
            self._strategies[key, mesh] = make()
        return self._strategies[key, mesh]

    def of(self, node: Node, metas: tuple[TensorMeta, ...], parts: int) -> _Found:
        """The rules of an operator along an axis of so many ranks."""
        key = (signature(node, metas), parts, *_sources(node))
        if key not in self._found:
            self._found[key] = _rules(node, metas, parts)
        return self._found[key]

    def in_parts(
        self, node: Node, metas: tuple[TensorMeta, ...], ranks: int, position: int, placement: Placement
    ) -> tuple[Rule, ...]:
        """The rules of an operator along an axis of so many ranks that cut a dim of one of its tensors in parts: that
        at a position among the tensors that it takes and then its results.
        """
        key = (signature(node, metas), ranks, position, placement, *_sources(node))
        if key not in self._in_parts:
            found = self.of(node, metas, ranks).rules
            self._in_parts[key] = rules_in_parts(node, metas, ranks, tuple(found), position, placement)
        return self._in_parts[key]


_OF_PROCESS = Rulebook()


def _sources(node: Node) -> tuple[object, object]:
    """Who says how an operator can be cut, which is registered at any time: the user, or whoever extends DTensor."""
    return known(node.op), dtensor_function(node.op)


class Enumerator:
    """Strategies of the nodes of one graph on one mesh, worked out once per distinct operator.

    Two operators are the same when name, arguments and the shapes and dtypes of inputs and results agree.

    Args:
        rulebook: the rules that are known from other graphs, which gets those of this one.
        asked: cuts in parts beside those that the graph asks for; then inputs and results may be cut so, too.
    """

    def __init__(
        self,
        graph: CapturedGraph,
        mesh: Mesh,
        rulebook: Rulebook | None = None,
        asked: Sequence[tuple[Ref, Placement]] = (),
    ) -> None:
        self._graph = graph
        self._also_asked = tuple(asked)
        self._ways = frozenset(placement for _, placement in self._also_asked)
        self._mesh = mesh
        self._rulebook = rulebook or Rulebook()
        self._operators: dict[object, tuple[Strategy, ...]] = {}
        self._rules: dict[object, dict[int, _Found]] = {}
        self._tensors: dict[object, tuple[Strategy, ...]] = {}
        self._is_possible = lru_cache(maxsize=None)(lambda shape, layout: is_possible(shape, layout, mesh))
        self._numbers = {id(node): i for i, node in enumerate(graph.nodes)}

    def strategies(self, node: Node) -> tuple[Strategy, ...]:
        """The strategies of a node; equal nodes get the same tuple.

        Warns:
            StrategyWarning: an operator has no rule beyond replication, although its results could be cut.
        """
        in_parts = self._cuts_in_parts(node)
        if node.kind == "operator":
            metas = tuple(self._graph.meta(ref) for ref in node.inputs)
            if self._graph.micro_batches > 1 and (is_held(node.name) or is_summed(node.name)):
                further = (P("sum"),) if is_summed(node.name) else ()
                return self._passed_on(metas[0], (*further, *sorted(in_parts[0])))
            key = signature(node, metas)
            if key not in self._rules:
                self._rules[key] = self._rules_of(node, metas)
            if (key, in_parts) not in self._operators:
                make = partial(self._enumerate, node, metas, self._rules[key], in_parts)
                known_as = key, in_parts, self._ways
                self._operators[key, in_parts] = self._rulebook.strategies(known_as, self._mesh, make)
            return self._operators[key, in_parts]
        meta = node.outputs[0]
        assert meta is not None
        if node.kind == "buffer":
            return self.held(meta, cut=False)
        may_be = node.kind == "parameter" or self._also_asked
        return self.held(meta, in_parts=tuple(sorted(in_parts[0])) if may_be else ())

    def leaving(self, ref: Ref, cut: bool) -> tuple[Strategy, ...]:
        """The layouts of a result that leaves the graph."""
        in_parts = self._asked.get(ref, frozenset()) if self._also_asked else frozenset()
        return self.held(self._graph.meta(ref), cut, tuple(sorted(in_parts)))

    def _cuts_in_parts(self, node: Node) -> tuple[frozenset[Placement], ...]:
        """The cuts in parts that the graph asks for of each tensor that a node takes, and then of its results."""
        if not self._asked:
            return (frozenset(),) * (len(node.inputs) + len(node.outputs))
        results = (
            [Ref(self._numbers[id(node)], k) for k in range(len(node.outputs))] if id(node) in self._numbers else []
        )
        return tuple(self._asked.get(ref, frozenset()) for ref in (*node.inputs, *results))

    @cached_property
    def _asked(self) -> dict[Ref, frozenset[Placement]]:
        return cuts_in_parts(self._graph, self._mesh, self._rulebook, self._also_asked)

    def provenance(self, node: Node) -> Provenance:
        """Where the rules of an operator come from.

        Warns:
            StrategyWarning: as :meth:`strategies`.
        """
        is_cut = len(self.strategies(node)) > 1
        found = self._rules[signature(node, tuple(self._graph.meta(ref) for ref in node.inputs))].values()
        if is_cut:
            return Provenance(tuple(dict.fromkeys(source for f in found for source in f.rules.values())))
        if not _could_be_cut(node):
            return Provenance(())
        short = "its dims are too short for the axes, or of lengths that they do not cut alike"
        return Provenance((), next((f.lack for f in found if f.lack), short))

    def _passed_on(self, meta: TensorMeta, further: tuple[Placement, ...]) -> tuple[Strategy, ...]:
        """What is held over a step: in every layout of a DTensor, as it comes; addends are where sums may wait."""
        key = (meta, further)
        if key not in self._tensors:
            layouts = self._layouts(meta, cut=meta.dtype not in _NEVER_SENT, further=further)
            self._tensors[key] = tuple(Strategy((layout,), (layout,)) for layout in layouts)
        return self._tensors[key]

    def held(self, meta: TensorMeta, cut: bool = True, in_parts: tuple[Placement, ...] = ()) -> tuple[Strategy, ...]:
        """The layouts in which a tensor enters or leaves the graph: no partial ones, and no dim cut unevenly twice.

        What leaves the graph is a DTensor, and torch loses rows of a dim cut unevenly by two axes (pytorch#194457).
        Numbers that no collective takes are whole on every rank.
        Complex tensors are cut evenly only: ``view_as_real`` of an uneven DTensor is a copy in torch 2.13, so that
        AdamW, which writes through it, would leave the parameter behind. Parts are equal ones, cut by one axis.

        Args:
            in_parts: cuts in parts that the graph asks for.
        """
        cut = cut and meta.dtype not in _NEVER_SENT
        key = (meta.shape, cut, meta.dtype.is_complex, in_parts)
        if key not in self._tensors:
            self._tensors[key] = tuple(Strategy((), (layout,)) for layout in self._layouts(meta, cut, in_parts))
        return self._tensors[key]

    def _layouts(self, meta: TensorMeta, cut: bool, further: tuple[Placement, ...] = ()) -> Iterator[Layout]:
        """Those that a DTensor of a shape can have: whole, cut, or with a further placement on each axis."""
        placements = [R, *(S(d) for d in range(len(meta.shape))), *further] if cut else [R]
        per_axis = ([R] if size == 1 else placements for size in self._mesh.shape)
        layouts = (Layout(combination) for combination in product(*per_axis))
        return (layout for layout in layouts if self._can_hold(meta, layout))

    def _can_hold(self, meta: TensorMeta, layout: Layout) -> bool:
        if not self._is_possible(meta.shape, layout):
            return False
        if any(p.parts and (set(p.parts) != {1} or len(layout.axes_of(p.dim)) > 1) for p in layout):
            return False  # which no DTensor can be
        twice = any(len(layout.axes_of(dim)) > 1 for dim in range(len(meta.shape)))
        return not (twice or meta.dtype.is_complex) or is_even(meta.shape, layout, self._mesh)

    def _rules_of(self, node: Node, metas: tuple[TensorMeta, ...]) -> dict[int, _Found]:
        """The rules of an operator for each size of an axis above 1."""
        sizes = sorted(set(self._mesh.shape) - {1})
        found = {size: self._rulebook.of(node, metas, size) for size in sizes}
        if sizes and all(f.lack for f in found.values()) and _could_be_cut(node):
            warnings.warn(
                f"{node.op}: {found[sizes[0]].lack}; {node.name} runs replicated on every rank"
                + (f" ({node.source})" if node.source else ""),
                StrategyWarning,
                stacklevel=3,
            )
        return found

    def _enumerate(
        self,
        node: Node,
        metas: tuple[TensorMeta, ...],
        found: Mapping[int, _Found],
        in_parts: tuple[frozenset[Placement], ...],
    ) -> tuple[Strategy, ...]:
        whole = replicate_rule(len(metas), node.outputs)
        asked = [(k, placement) for k, placements in enumerate(in_parts) for placement in sorted(placements)]
        further = (rule for cut in asked for rule in rules_in_parts_beside_others(node, metas, *cut, self._ways))
        beside = [*_beside_others(node, metas), *dict.fromkeys(further)]
        parts = {
            size: dict.fromkeys(rule for cut in asked for rule in self._rulebook.in_parts(node, metas, size, *cut))
            for size in found
        }
        choices = (
            [whole, *found[size].rules, *parts[size], *beside] if size > 1 else [whole] for size in self._mesh.shape
        )
        strategies = []
        for combination in product(*choices):
            strategy = _combine(combination)
            if self._is_valid(node, metas, strategy):
                strategies.append(strategy)
        return tuple(dict.fromkeys(strategies))

    def _is_valid(self, node: Node, metas: tuple[TensorMeta, ...], strategy: Strategy) -> bool:
        pairs = [*zip(strategy.inputs, metas), *zip(strategy.outputs, node.outputs)]
        if any(layout and meta and not self._is_possible(meta.shape, layout) for layout, meta in pairs):
            return False
        if any(layout and meta and meta.dtype in _NEVER_SENT and not layout.is_replicated for layout, meta in pairs):
            return False
        entry, given = known(node.op), (node, metas, strategy.inputs, strategy.outputs, self._mesh)
        if entry.fits is not None:
            return entry.fits(*given)
        if entry.suits is not None and not entry.suits(*given):
            return False
        cuts = [(layout, meta.shape) for layout, meta in pairs if layout and meta]
        return all(self._blocks_correspond(cuts, axis) for axis in range(self._mesh.ndim))

    def _blocks_correspond(self, cuts: list[tuple[Layout, tuple[int, ...]]], axis: int) -> bool:
        """Dims of different lengths are cut along one axis only evenly: 16 over 3 is 6, 6, 4 and 32 is 11, 11, 10."""
        along = [(layout, shape) for layout, shape in cuts if layout[axis].kind == "S"]
        if len({shape[layout[axis].dim] for layout, shape in along}) < 2:
            return True
        return all(is_even(shape, layout, self._mesh) for layout, shape in along)


@dataclass(frozen=True)
class _Found:
    """The rules of an operator along one axis beside replication.

    Each has its source. ``lack`` says why there is none; empty where there are, and where its dims are only too short
    for the axis.
    """

    rules: Mapping[Rule, Source] = field(default_factory=dict)
    lack: str = ""


def _rules(node: Node, metas: tuple[TensorMeta, ...], parts: int) -> _Found:
    if is_random(node):
        return _drawn_rules(node, metas, parts)
    whole = replicate_rule(len(metas), node.outputs)
    found = {rule: source for rule, source in _written_rules(node, metas, parts).items() if rule != whole}
    usable = _giving_every_rank_a_part(found, node, metas, parts)
    check = Check(node, metas, parts)
    held = {rule: source for rule, source in usable.items() if check.holds(rule)}
    if not held and any(map(_cuts, found)) and not any(map(_cuts, usable)):
        return _Found()  # shorter than the axis
    if not held and node.op.namespace == "aten":  # type: ignore[union-attr]
        guessed: dict[Rule, Source] = dict.fromkeys(guessed_rules(node, metas, parts), "guess")
        held = _giving_every_rank_a_part(guessed, node, metas, parts)
    return _Found(held, "" if held else _lack(len(usable), check))


def _drawn_rules(node: Node, metas: tuple[TensorMeta, ...], parts: int) -> _Found:
    """Rules that no numbers can check, as other numbers are drawn on shards than on the whole."""
    found = _written_rules(node, metas, parts) if has(node, "drawn") else {}
    if not found:
        return _Found(lack="it draws random numbers, which all ranks must draw alike")
    return _Found(_giving_every_rank_a_part(found, node, metas, parts))


def _written_rules(node: Node, metas: tuple[TensorMeta, ...], parts: int) -> dict[Rule, Source]:
    """Our rules for an operator, or the user's, or DTensor's and ours beside them."""
    entry = known(node.op)
    if entry.rules is not None:
        return dict.fromkeys(entry.rules(node, metas), "user" if is_registered(entry) else "autoshard")
    found: dict[Rule, Source] = dict.fromkeys(dtensor_rules(node, metas, parts), "torch")
    for rule in entry.more_rules(node, metas) if entry.more_rules else ():
        found.setdefault(rule, "autoshard")
    return found


def _beside_others(node: Node, metas: tuple[TensorMeta, ...]) -> list[Rule]:
    """Rules that are right on no axis alone; whether a product with them is, its operator proves."""
    entry = known(node.op)
    return entry.rules_beside_others(node, metas) if entry.rules_beside_others else []


def _giving_every_rank_a_part(
    rules: Mapping[Rule, Source], node: Node, metas: tuple[TensorMeta, ...], parts: int
) -> dict[Rule, Source]:
    axis = Mesh(("axis",), (parts,))

    def gives(rule: Rule) -> bool:
        pairs = zip((*rule.inputs, *rule.outputs), (*metas, *node.outputs))
        return not any(p and meta and not is_possible(meta.shape, Layout((p,)), axis) for p, meta in pairs)

    return {rule: source for rule, source in rules.items() if gives(rule)}


def _cuts(rule: Rule) -> bool:
    return any(p is not None and p.kind == "S" for p in (*rule.inputs, *rule.outputs))


def _lack(found: int, check: Check) -> str:
    if not found:
        return "neither torch nor autoshard has a rule that cuts it"
    if not check.can_try:
        return "its sharding rules cannot be checked, as it does not run on random tensors of a size that can be tried"
    return f"none of its {found} sharding rules gives its numbers when it is checked"


def _could_be_cut(node: Node) -> bool:
    return any(meta and max(meta.shape, default=0) > 1 for meta in node.outputs)


def _combine(rules: tuple[Rule, ...]) -> Strategy:
    inputs = tuple(Layout(placements) for placements in zip(*(rule.inputs for rule in rules)))
    outputs = tuple(
        None if placements[0] is None else Layout(placements) for placements in zip(*(rule.outputs for rule in rules))
    )
    return Strategy(inputs, outputs)
