"""Constraints held against a graph: what they leave of the layouts of every tensor, and of the ways to move it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ..capture import CapturedGraph, Node, Ref, annotated
from ..errors import ConstraintError, LayoutError
from ..mesh import Mesh
from .gradient_dtype import limit_to_dtype
from .limits import Exactly, Limit, Limits
from .names import names_of, results_of
from .schemes import limit_to_schemes
from .values import (
    Alike,
    AxisScheme,
    Constraint,
    Recomputation,
    Recompute,
    check_constraints_match,
    check_specs_fit,
    parse_pin,
)


def compile_constraints(constraints: Sequence[Constraint], graph: CapturedGraph, mesh: Mesh) -> Limits:
    """What constraints, the annotations in the model and its precision leave.

    ``Alike``, ``Recompute`` and ``Recomputation`` limit no layout: they relate tensors to each other, or say which
    graph it is (:mod:`autoshard.constraints.computed_again`).

    Raises:
        ConstraintError: a constraint names nothing, an axis has two schemes, or a scheme makes no sense for the model.
    """
    names, results = names_of(graph), results_of(graph)
    tensors = [graph.tensor_name(Ref(i, k)) for i, node in enumerate(graph.nodes) for k in range(len(node.outputs))]
    check_constraints_match(constraints, _every(names, graph), _every(tensors, graph))
    metas = [node.outputs[0] for node in graph.nodes] + [graph.meta(ref) for _, ref in results]
    shapes = {name: meta.shape for name, meta in zip(names, metas) if meta is not None}
    check_specs_fit(constraints, {each: shape for name, shape in shapes.items() for each in graph.called(name)})
    limits = Limits(graph, names)
    for constraint in constraints:
        if not isinstance(constraint, AxisScheme | Alike | Recompute | Recomputation):
            limits.add(constraint)
    for i, node, text in annotated(graph):
        limits.limit(i, _annotation(node, text, mesh))
    limit_to_schemes(limits, [c for c in constraints if isinstance(c, AxisScheme)], graph, mesh)
    limit_to_dtype(limits, graph, mesh)
    return limits


def _every(names: Iterable[str], graph: CapturedGraph) -> list[str]:
    """Names, and the further ones of tied parameters."""
    return [each for name in names for each in graph.called(name)]


def _annotation(node: Node, text: str, mesh: Mesh) -> Limit:
    """What ``autoshard.constrain`` says in the model."""
    assert node.outputs[0] is not None
    where = f"autoshard.constrain at {node.source or node.name}"
    try:
        pin = parse_pin(f"{node.name}={text}", mesh)
        check_specs_fit([pin], {node.name: node.outputs[0].shape})
    except (ConstraintError, LayoutError) as error:
        raise ConstraintError(f"{where}: {error}") from None
    return Exactly(pin.layout, f"{text} of {where}", "annotation")
