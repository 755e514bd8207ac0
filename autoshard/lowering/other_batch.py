"""A plan for batches of another size: the same layouts and order of operators, other shapes and bytes.

Nothing is taken for granted of the other size: the model is captured with it, and what comes of the plan is checked as
any plan is.
"""

from __future__ import annotations

from dataclasses import replace

from ..capture import CapturedGraph, Ref
from ..errors import InputError, PlanMismatchError
from ..plans import Redistribution, ShardingPlan, TensorEntry
from .needs import sent_along


def batch_size(plan: ShardingPlan) -> int:
    """The size of the batch that a plan was made for.

    Raises:
        InputError: no input has dims.
    """
    if plan.batch is None:
        raise InputError("the plan has no input with a batch, so that there is no other size of it")
    return plan.batch


def even_sizes(plan: ShardingPlan, size: int) -> str:
    """Which sizes have the layouts of a plan where this one has not: words for an error."""
    dims = ((entry.layout, plan.batch_dim_of(entry.shape)) for entry in plan.inputs)
    ranks = max((plan.mesh.parts(layout.axes_of(dim)) for layout, dim in dims if dim is not None), default=1)
    if size % ranks == 0:
        return f"{batch_size(plan)}, the size that the plan was made for"
    return (
        f"a multiple of {ranks}, the ranks that the batch is cut over (uneven parts are served only where no "
        "operator makes one dim of the batch and another, as a linear layer does of batch and sequence)"
    )


def with_batch(plan: ShardingPlan, size: int) -> ShardingPlan:
    """A plan whose inputs and results have a batch of another size; those that have no batch stay as they are.

    Raises:
        InputError: no input has dims.
    """
    batch_size(plan)

    def sized(entry: TensorEntry) -> TensorEntry:
        batch = plan.batch_dim_of(entry.shape)
        return replace(entry, shape=tuple(size if dim == batch else n for dim, n in enumerate(entry.shape)))

    return replace(plan, inputs=tuple(map(sized, plan.inputs)), outputs=tuple(map(sized, plan.outputs)))


def at_batch(plan: ShardingPlan, graph: CapturedGraph) -> ShardingPlan:
    """A plan with the shapes of a graph that was captured with a batch of another size.

    What it says of time is that of the plan's own batch, and of memory it says nothing.

    Raises:
        PlanMismatchError: the model runs other operators then; names the first.
    """
    planned = {(entry.name, entry.phase) for entry in plan.operators}
    found = {(node.name, node.phase) for _, node in graph.of_kind("operator")}
    for name, phase in sorted(planned ^ found)[:1]:
        runs = "runs" if (name, phase) in found else "does not run"
        raise PlanMismatchError(
            f"with this size of the batch the model {runs} the operator {name} in the {phase}, other than with that "
            f"of the plan, {batch_size(plan)}: make a plan for it (autoshard plan ... --held-as PLAN.yaml), and give "
            "parallelize both"
        )
    made = (Ref(i, k) for i, node in enumerate(graph.nodes) for k in range(len(node.outputs)))
    refs = {graph.tensor_name(ref): ref for ref in made}
    results = {f"output.{k}": ref for k, ref in enumerate(graph.outputs)}

    def shaped(entry: TensorEntry, ref: Ref | None) -> TensorEntry:
        return entry if ref is None else replace(entry, shape=graph.meta(ref).shape)

    def moved(entry: Redistribution) -> Redistribution:
        sizes = (size for _, _, size in sent_along(entry, plan.mesh, graph.meta(refs[entry.tensor])))
        sent = (replace(collective, size_bytes=size) for collective, size in zip(entry.collectives, sizes))
        return replace(entry, collectives=tuple(sent))

    return replace(
        plan,
        fingerprint=graph.fingerprint,
        inputs=tuple(shaped(entry, refs.get(entry.name)) for entry in plan.inputs),
        outputs=tuple(shaped(entry, results.get(entry.name)) for entry in plan.outputs),
        redistributions=tuple(moved(entry) for entry in plan.redistributions),
        memory=None,
    )
