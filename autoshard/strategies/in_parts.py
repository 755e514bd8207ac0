"""Dims cut in parts: which tensors of a graph are offered such cuts, and the rules of operators for them.

A cut in parts begins where the graph takes a dim apart that a product made or a parameter has
(:func:`autoshard.ops.parts_asked_for`), puts batches behind each other (:func:`autoshard.ops.batches_joined`), or joins
columns in front of a product (:func:`autoshard.ops.columns_joined`). It spreads along the rules of the operators that
have tensors with that dim, from a parameter to its gradient, and to what computes a tensor again: to the weight and the
bias of the product, and to all their gradients. No other tensor is offered it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence
from functools import cache
from typing import Protocol

from ..capture import CapturedGraph, Node, Ref, TensorMeta, is_random
from ..layout import Layout, Placement, S, cuts_parts_evenly, is_possible
from ..mesh import Mesh
from ..micro_batches import is_held, is_summed
from ..ops import Rule, batches_joined, columns_joined, known, parts_asked_for
from ..recomputation import again_name, first_name
from .rule_check import Check
from .signatures import signature

Metas = tuple[TensorMeta, ...]


class Rules(Protocol):
    """Where rules that cut dims in parts are looked up."""

    def in_parts(self, node: Node, metas: Metas, ranks: int, position: int, placement: Placement) -> tuple[Rule, ...]:
        """The rules along an axis of so many ranks with a placement at a position among what a node takes and gives."""


def rules_in_parts(
    node: Node, metas: Metas, ranks: int, rules: tuple[Rule, ...], position: int, placement: Placement
) -> tuple[Rule, ...]:
    """The rules of an operator with a dim cut in parts at a position among the tensors that it takes and gives: what it
    says itself, and those of its other ``rules`` that hold whichever indices of the dim a rank has.

    Each is checked: by numbers, or by what the operator proves.
    """
    if is_random(node):
        return ()
    mesh, entry, check = Mesh(("axis",), (ranks,)), known(node.op), Check(node, metas, ranks)
    tensors = (*metas, *node.outputs)

    def is_cut(rule: Rule) -> bool:
        pairs = zip((*rule.inputs, *rule.outputs), tensors)
        return all(p is None or m is None or is_possible(m.shape, Layout((p,)), mesh) for p, m in pairs)

    def fits(rule: Rule) -> bool:
        if entry.fits is None:
            return check.holds_in_parts(rule)
        before = tuple(Layout((p,)) for p in rule.inputs)
        after = tuple(None if p is None else Layout((p,)) for p in rule.outputs)
        return entry.fits(node, metas, before, after, mesh)

    own = entry.in_parts(node, metas, position, placement) if entry.in_parts else []
    found = [rule for rule in own if is_cut(rule) and fits(rule)]
    if entry.fits is None:
        alike = (_in_parts_alike(rule, tensors, position, placement) for rule in rules)
        found += [rule for rule in alike if rule and is_cut(rule) and check.holds_of_any(rule)]
    return tuple(dict.fromkeys(found))


def rules_in_parts_beside_others(
    node: Node, metas: Metas, position: int, placement: Placement, asked: Collection[Placement]
) -> list[Rule]:
    """The rules of an operator with a dim cut in parts that are right beside those of other axes alone; whether a
    product with them is, the operator proves.

    Args:
        asked: how dims are cut in parts that somebody asks for beside the graph: rules have as many parts, of the first
            dim and of others, as one of these.
    """
    make = known(node.op).in_parts_beside_others
    if make is None or not asked:
        return []
    counts = {(not p.dim, len(p.parts)) for p in asked}
    return [
        rule
        for rule in make(node, metas, position, placement)
        if all(p is None or not p.parts or (not p.dim, len(p.parts)) in counts for p in (*rule.inputs, *rule.outputs))
    ]


def _in_parts_alike(
    rule: Rule, tensors: tuple[TensorMeta | None, ...], position: int, placement: Placement
) -> Rule | None:
    """A rule with all dims that it cuts cut in parts, where one is that of the placement and all are as long."""
    placements = (*rule.inputs, *rule.outputs)
    if placements[position] != S(placement.dim):
        return None
    lengths = {m.shape[p.dim] for p, m in zip(placements, tensors) if p and m and p.kind == "S"}
    if len(lengths) > 1:
        return None
    cut = [S(p.dim, placement.parts) if p and p.kind == "S" else p for p in placements]
    count = len(rule.inputs)
    return Rule(tuple(p for p in cut[:count] if p), tuple(cut[count:]))


def cuts_in_parts(
    graph: CapturedGraph, mesh: Mesh, rules: Rules, asked: Sequence[tuple[Ref, Placement]] = ()
) -> dict[Ref, frozenset[Placement]]:
    """The cuts in parts that each tensor of a graph is offered on a mesh; empty where it takes no dim apart, and no
    others are ``asked`` for.
    """
    sizes = sorted(set(mesh.shape) - {1})
    axes = [Mesh(("axis",), (size,)) for size in sizes]
    found: dict[Ref, set[Placement]] = defaultdict(set)
    waiting: list[tuple[Ref, Placement]] = []
    ways = {placement for _, placement in asked}
    keys: dict[int, object] = {}
    led_to: dict[object, list[tuple[int, Placement]]] = {}

    @cache
    def is_even(shape: tuple[int, ...], placement: Placement) -> bool:
        return any(cuts_parts_evenly(shape, Layout((placement,)), axis) for axis in axes)

    def add(ref: Ref, placement: Placement) -> None:
        if placement not in found[ref] and is_even(graph.meta(ref).shape, placement):
            found[ref].add(placement)
            waiting.append((ref, placement))

    def leads_to(index: int, position: int, placement: Placement) -> list[tuple[int, Placement]]:
        """The cuts in parts at other positions; equal operators have the same."""
        node, metas = graph.nodes[index], tuple(map(graph.meta, graph.nodes[index].inputs))
        if index not in keys:
            keys[index] = signature(node, metas)
        key = keys[index], position, placement
        if key not in led_to:
            along = [r for size in sizes for r in rules.in_parts(node, metas, size, position, placement)]
            along += rules_in_parts_beside_others(node, metas, position, placement, ways)
            every = ((k, p) for rule in along for k, p in enumerate((*rule.inputs, *rule.outputs)) if p and p.parts)
            led_to[key] = list(dict.fromkeys(every))
        return led_to[key]

    own = (*(each[:2] for each in parts_asked_for(graph)), *batches_joined(graph), *columns_joined(graph))
    for ref, placement in (*own, *asked):
        add(ref, placement)
    if not waiting:
        return {}
    readers: dict[Ref, list[tuple[int, int]]] = defaultdict(list)
    for i, node in graph.of_kind("operator"):
        for position, ref in enumerate(node.inputs):
            readers[ref].append((i, position))
    named = dict(graph.gradients)
    gradients = {i: named[node.name] for i, node in graph.of_kind("parameter") if node.name in named}
    numbers = {node.name: i for i, node in graph.of_kind("operator")}
    while waiting:
        ref, placement = waiting.pop()
        if ref.node in gradients:
            add(gradients[ref.node], placement)  # it arrives in its parameter's layout
        name = graph.nodes[ref.node].name
        for alike in (first_name(name), again_name(name)):
            if alike in numbers:
                add(Ref(numbers[alike], ref.output), placement)  # both have the same strategies
        made = [(ref.node, len(graph.nodes[ref.node].inputs) + ref.output)]
        for i, position in (*made, *readers[ref]):
            node = graph.nodes[i]
            if node.kind != "operator":
                continue
            refs = (*node.inputs, *(Ref(i, k) for k in range(len(node.outputs))))
            if graph.micro_batches > 1 and (is_held(node.name) or is_summed(node.name)):
                for other in refs:
                    add(other, placement)
                continue
            for k, led in leads_to(i, position, placement):
                add(refs[k], led)
    return {ref: frozenset(placements) for ref, placements in found.items()}
