"""What each mesh axis is used for, in sentences, and what a plan leaves unused; how much a step gets through."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from math import prod

from ...layout import Layout
from ...mesh import Mesh
from ..plan import OperatorEntry, ShardingPlan
from ..units import format_seconds
from .parallelism import SUMMED, Parallelism, ParameterParallelism, size_bytes

UNUSED = 0.99
"""The share of the computation, by predicted time, from which on an axis counts as unused where all its ranks do it."""
WORTH_SAYING = 0.1
"""The share from which on it is said."""
MOST_RANKS = 8
"""How many ranks of a group are named."""

WARNING = "WARNING"
NOT_MODELLED = (
    "launches of kernels beyond the profile's, reading data, and what slows down while something else runs beside it"
)
"""What a plan's times leave out."""


def use_lines(plan: ShardingPlan) -> tuple[str, ...]:
    """How much a step gets through, where that is known, and what each axis is for."""
    throughput = throughput_line(plan)
    return (*([] if throughput is None else [throughput]), *axis_lines(plan))


def network_lines(plan: ShardingPlan) -> tuple[str, ...]:
    """What each axis runs on, and the order of ranks that this was said of; nothing where it is not known."""
    if not plan.network:
        return ()
    axes = "; ".join(f"{axis} {words}" for axis, words in zip(plan.mesh.axes, plan.network, strict=True))
    return f"axes: {axes}", order_line(plan.mesh)


def order_line(mesh: Mesh) -> str:
    """How ranks are counted: ``ranks count with the last axis fastest``, or the first group along each axis."""
    if not mesh.order:
        return "ranks count with the last axis fastest, and fill hosts in order"
    groups = "; ".join(f"along {axis} {_first_group(mesh, k)}" for k, axis in enumerate(mesh.axes))
    return (
        f"ranks have an order of their own, rank {mesh.order[0]}'s groups are {groups}; start the job on "
        "DeviceMesh(device, plan.mesh.ranks, mesh_dim_names=plan.mesh.axes)"
    )


def _first_group(mesh: Mesh, axis: int) -> str:
    """The ranks of the group of the first rank along an axis: ``0, 8, 16, 24, ...``."""
    stride = prod(mesh.shape[axis + 1 :])
    ranks = [str(mesh.order[k * stride]) for k in range(mesh.shape[axis])]
    return ", ".join([*ranks[:MOST_RANKS], *(["..."] if len(ranks) > MOST_RANKS else [])])


def axis_lines(plan: ShardingPlan) -> tuple[str, ...]:
    """For each axis, what it cuts and where the parameters lie: ``along dp, 8 ranks: fully sharded; it cuts the batch;
    parameters are cut over it and gathered for use``; then what every rank does alike, and what would have to change.
    """
    parallelism = Parallelism(plan)
    lines = [_line(plan, parallelism, axis) for axis in plan.mesh.axes]
    unused = unused_axes(plan)
    return (*lines, *([_warning(plan, unused)] if unused else []))


def unused_axes(plan: ShardingPlan) -> tuple[str, ...]:
    """The axes of more than one rank along which all ranks do the same work."""
    axes = plan.mesh.axes
    return tuple(axis for axis, size in zip(axes, plan.mesh.shape) if size > 1 and _repeated(plan, axis) >= UNUSED)


def samples(plan: ShardingPlan) -> int | None:
    """How many samples a step takes: the batch of its inputs, of all micro-batches. None where some have none."""
    is_known = plan.batch and all(plan.batch_dim_of(entry.shape) is not None for entry in plan.inputs if entry.shape)
    return plan.batch * plan.micro_batches if plan.batch and is_known else None


def tokens(plan: ShardingPlan) -> int | None:
    """How many tokens a step takes: inputs of integers, samples by positions. None where they have no one shape."""
    shapes = {entry.shape for entry in plan.inputs if len(entry.shape) == 2 and entry.dtype.startswith("int")}
    return prod(shapes.pop()) * plan.micro_batches if len(shapes) == 1 and samples(plan) is not None else None


def throughput_line(plan: ShardingPlan) -> str | None:
    """``12.3 samples/s, 100800 tokens/s (16 samples and 131072 tokens in 1.3 s); MFU 41%``; None where samples are not
    known.
    """
    taken, read = samples(plan), tokens(plan)
    if taken is None or not plan.step_s > 0:
        return None
    amounts = [(taken, "samples")] + ([] if read is None else [(read, "tokens")])
    a_step = " and ".join(f"{amount} {what}" for amount, what in amounts)
    a_second = ", ".join(f"{amount / plan.step_s:,.0f} {what}/s" for amount, what in amounts)
    used = "" if plan.mfu is None else f"; MFU {plan.mfu:.0%}"
    return f"predicted throughput of all ranks: {a_second} ({a_step} in {format_seconds(plan.step_s)}){used}"


def _line(plan: ShardingPlan, parallelism: Parallelism, axis: str) -> str:
    size = plan.mesh.shape[plan.mesh.index(axis)]
    said = [parallelism.words(axis), _inputs(plan, axis), *_parameters(plan, parallelism, axis)]
    share = _repeated(plan, axis)
    if WORTH_SAYING <= share < UNUSED:
        said.append(f"{share:.0%} of the computation is the same on all of its ranks")
    return f"along {axis}, {size} rank{'s' * (size > 1)}: {'; '.join(said)}"


def _inputs(plan: ShardingPlan, axis: str) -> str:
    index = plan.mesh.index(axis)
    cuts = [(entry, entry.layout[index].dim) for entry in plan.inputs if entry.layout[index].kind == "S"]
    if cuts and all(dim == (plan.batch_dim_of(entry.shape) or 0) for entry, dim in cuts):
        return "it cuts the batch"
    if cuts:
        return "it cuts " + " and ".join(f"dim {dim} of {entry.name}" for entry, dim in cuts)
    return "every rank reads the whole batch"


def _parameters(plan: ShardingPlan, parallelism: Parallelism, axis: str) -> Iterable[str]:
    weights: Counter[str] = Counter()
    for entry in plan.parameters:
        weights[_of_parameters(parallelism.of(entry, axis))] += size_bytes(entry)
    total = sum(weights.values())
    for text, weight in sorted(weights.items(), key=lambda item: (-item[1], item[0])):
        if weight >= UNUSED * total:
            return (f"parameters are {text}",)
    shown = [f"{weight / total:.0%} {text}" for text, weight in weights.most_common() if weight >= total / 200]
    return (f"of the parameters {', '.join(shown)}",) if shown else ()


def _of_parameters(use: ParameterParallelism) -> str:
    summed = f" (gradients {SUMMED[use.summed]})" if use.summed else ""
    where = {"whole": "whole on each", "gathered": "cut over it and gathered for use", "cut": "cut over it and used so"}
    return where[use.use] + summed


def _repeated(plan: ShardingPlan, axis: str) -> float:
    """The share of the computation that every rank along an axis does alike, by predicted time; by number of operators
    where times are not known.
    """
    index = plan.mesh.index(axis)
    alike = {(entry.phase, entry.name): _is_alike(entry, index) for entry in plan.operators}
    times = {(entry.phase, entry.name): entry.predicted_ns for entry in plan.execution}
    weights = times if sum(times.values()) else dict.fromkeys(alike, 1)
    total = sum(weights.get(key, 0) for key in alike)
    return sum(weights.get(key, 0) for key, is_alike in alike.items() if is_alike) / total if total else 0.0


def _is_alike(entry: OperatorEntry, index: int) -> bool:
    layouts: list[Layout] = [*entry.inputs, *(layout for layout in entry.outputs if layout is not None)]
    return all(layout[index].kind == "R" for layout in layouts)


def _warning(plan: ShardingPlan, unused: tuple[str, ...]) -> str:
    ranks = prod(plan.mesh.shape[plan.mesh.index(axis)] for axis in unused)
    axes, name = " and ".join(unused), plan.inputs[0].name if plan.inputs else "output.0"
    dim = plan.batch_dim if plan.inputs else 0
    held = ", or without its constraints" if plan.pins else ""
    return (
        f"{WARNING}: nothing is divided along {axes}: {ranks} ranks do the same work. Under this profile any division "
        f"costs more time than it saves, or cannot be; a larger batch or model would change that{held}, and "
        f"fewer ranks take as long. The price of a division: autoshard explain PLAN --why {name} "
        f"--not '{' '.join(f'{axis}:S({dim})' if axis in unused else f'{axis}:R' for axis in plan.mesh.axes)}'"
    )
