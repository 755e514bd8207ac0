"""Which operators of a training step can be cut, by whose rules, and what the others cost: asked before solving."""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

import cost_models

from ..capture import Node, as_arguments, capture
from ..errors import StrategyWarning
from ..mesh import Mesh
from ..precision import Precision
from ..strategies import Enumerator, Provenance, Rulebook, Source
from .planner import MeshGiven, profile_of
from .pricing import Prices


@dataclass(frozen=True)
class AuditedOperator:
    """All occurrences of an operator in a step whose rules come from the same sources.

    Attributes:
        name: as torch has it, ``aten.mm.default``.
        sources: who says how it can be cut: ``torch`` (DTensor's rules), ``autoshard``, ``user``
            (``register_operator``) or ``guess`` (nobody; a guess was tried). Every rule was checked by numbers. Empty
            where every rank runs all of it.
        lack: why there is no rule; empty where there is one, and where there is nothing to cut (a single number).
        count: how often it occurs in forward and backward.
        replicated_s: what it costs that every rank runs all of it, in predicted seconds of a step: its price so, less
            the price with its flops and bytes shared out evenly among all ranks, summed over the occurrences. A view
            costs nothing. Where there are rules it is what they may save; no plan saves more, and communication is not
            counted.
        source: file, line and code of the first occurrence that has them; else empty.
        first: the name of the first occurrence in a plan.
    """

    name: str
    sources: tuple[Source, ...]
    lack: str
    count: int
    replicated_s: float
    source: str
    first: str


@dataclass(frozen=True)
class Audit:
    """The operators of a step on a mesh of a machine: those without a rule first, then by what being whole costs."""

    mesh: Mesh
    hardware: str
    operators: tuple[AuditedOperator, ...]

    @property
    def whole(self) -> tuple[AuditedOperator, ...]:
        """Those of which every rank runs all, although there is something to cut."""
        return tuple(operator for operator in self.operators if operator.lack)


def audit(
    model: nn.Module,
    args: Any = (),
    kwargs: dict[str, Any] | None = None,
    *,
    mesh: MeshGiven,
    hardware: str | cost_models.Profile = "dgx-h100",
    param_dtype: object = None,
    reduce_dtype: object = None,
    progress: Callable[[str], None] | None = None,
) -> Audit:
    """Says of each operator of a training step where its rules come from, and what it costs to run it whole.

    Nothing is solved; the step is that without anything computed again.

    Args:
        model, args, kwargs, mesh, hardware, param_dtype, reduce_dtype, progress: as for :func:`autoshard.plan`; but
            the mesh is one of sizes.

    Raises:
        CaptureError: the model is not one static graph.
        MeshError, ProfileError: the argument of that name cannot be read.
        ValueError: an unknown dtype.
    """
    report = progress or (lambda stage: None)
    axes, profile = Mesh.of(mesh), profile_of(hardware)
    precision = Precision.of(param_dtype, reduce_dtype)
    report("capturing the training step")
    graph = capture(model, as_arguments(args), kwargs or {}, precision=precision)
    report("checking rules")
    enumerator, prices = Enumerator(graph, axes, Rulebook.of_process()), Prices(graph, axes, profile)
    found: dict[tuple[str, Provenance], list[tuple[Node, float]]] = defaultdict(list)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", StrategyWarning)  # which is what the audit says
        for _, node in graph.of_kind("operator"):
            whole = enumerator.strategies(node)[0]
            cost_s = float(prices.compute_s(node, (whole,))[0]) - prices.evenly_s(node, whole)
            found[str(node.op), enumerator.provenance(node)].append((node, cost_s))
    operators = (
        AuditedOperator(
            name,
            provenance.sources,
            provenance.lack,
            len(occurrences),
            sum(cost_s for _, cost_s in occurrences),
            next((node.source for node, _ in occurrences if node.source), ""),
            occurrences[0][0].name,
        )
        for (name, provenance), occurrences in found.items()
    )
    ranked = sorted(operators, key=lambda o: (not o.lack, -o.replicated_s, o.name, o.sources, o.lack))
    return Audit(axes, profile.name, tuple(ranked))
