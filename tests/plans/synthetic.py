"""Plans for the tests: a small transformer-like one, and hypothesis strategies for any."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, get_args

from hypothesis import strategies as st

from autoshard.layout import P_SUM, Layout, P, Placement, R, S, largest_local_shape, parse_layout
from autoshard.mesh import Mesh
from autoshard.plans import (
    Collective,
    Execution,
    IdenticalLayers,
    MemoryKind,
    MemoryOutcome,
    MemoryPoint,
    MemorySaved,
    MemoryTenant,
    OperatorEntry,
    Redistribution,
    ShardingPlan,
    SolverOutcome,
    TensorEntry,
)
from autoshard.plans.dtypes import DTYPE_BYTES
from autoshard.plans.expert_attribution import distance
from autoshard.plans.memory_outcome import TENANT_KINDS, reserved_bytes
from autoshard.plans.natural_order import starred
from autoshard.plans.plan import PHASES
from autoshard.plans.text.contradictions import COUNTED
from autoshard.precision import AS_IT_IS, Precision
from autoshard.redistribution import size_bytes, step_on

MESH = Mesh.parse("dp=2,tp=2")


def layout(text: str) -> Layout:
    return parse_layout(text, MESH)


def transformer_plan(layers: int) -> ShardingPlan:
    """A plan of ``layers`` identical layers, in execution order; layer 0 takes its input from the embedding."""
    column, row, whole = layout("tp:S(0)"), layout("tp:S(1)"), layout("")
    batch, heads, partial = layout("dp:S(0)"), layout("dp:S(0) tp:S(2)"), layout("dp:S(0) tp:P(sum)")
    addends = layout("dp:P(sum) tp:S(0)")
    names = [f"layers.{i}" for i in range(layers)]
    parameters = [TensorEntry("embed.weight", (512, 256), "float32", whole)]
    for name in names:
        parameters += [
            TensorEntry(f"{name}.attention.wq.weight", (256, 256), "float32", column),
            TensorEntry(f"{name}.attention.wo.weight", (256, 256), "float32", row),
            TensorEntry(f"{name}.norm.weight", (256,), "float32", whole),
        ]
    forward = [OperatorEntry("embed/embedding", "forward", (whole, batch), (batch,))]
    for name in names:
        forward += [
            OperatorEntry(f"{name}.norm/rms_norm", "forward", (batch, whole), (batch, None)),
            OperatorEntry(f"{name}.attention.wq/mm", "forward", (batch, column), (heads,)),
            OperatorEntry(f"{name}.attention/mul.2", "forward", (heads, heads), (heads,)),
            OperatorEntry(f"{name}.attention.wo/mm", "forward", (heads, row), (partial,)),
        ]
    backward = [
        OperatorEntry(f"{name}.attention.wo/mm.{k}", "backward", (batch, row), (heads,))
        for name in reversed(names)
        for k in (1, 2)
    ]
    backward += [OperatorEntry(f"{name}.attention.wq/mm.1", "backward", (heads, batch), (addends,)) for name in names]
    backward.append(OperatorEntry("/ones", "backward", (), (whole,)))
    forward += [OperatorEntry(f"{name}/add", "forward", (batch, batch), (batch,)) for name in names]
    all_reduce = Collective("all_reduce", "tp", 1 << 19, 3.2768e-05)
    gradient = Collective("all_reduce", "dp", 1 << 17, 1.1e-05)
    redistributions = [
        Redistribution(
            f"{name}.attention.wo/mm", "forward", (partial, batch), (all_reduce,), consumers=(f"{name}/add",)
        )
        for name in names
    ]
    redistributions += [
        Redistribution(
            f"{name}.attention.wq/mm.1",
            "backward",
            (addends, column),
            (gradient,),
            consumers=(f"{name}.attention.wq.weight",),
        )
        for name in reversed(names)
    ]
    redistributions += [
        Redistribution(f"{name}.attention.wo/mm", "backward", (partial, batch), (), kept=True, shared=1)
        for name in names
    ]
    return ShardingPlan(
        model="transformer",
        fingerprint="3f2a9c",
        call='[{"tuple": [{"tensor": "tokens"}, {"tensor": "targets"}]}, {"dict": {}}]',
        mesh=MESH,
        hardware="cpu-gloo",
        hardware_fingerprint="77d0e1",
        objective="step-time",
        pins=("tokens=dp:S(0) tp:R",),
        **totals_of(tuple(transformer_execution(names)), redistributions),
        parameters=tuple(parameters),
        buffers=(TensorEntry("freqs", (128, 32), "complex64", whole),),
        inputs=(TensorEntry("tokens", (4, 128), "int64", batch), TensorEntry("targets", (4, 128), "int64", batch)),
        outputs=(TensorEntry("loss", (), "float32", whole),),
        operators=(*forward, *backward),
        redistributions=tuple(redistributions),
        memory=transformer_memory(layers),
        execution=tuple(transformer_execution(names)),
    )


def totals_of(execution: Sequence[Execution], moved: Sequence[Redistribution]) -> dict[str, Any]:
    """What operators, redistributions and 42.5 us of an optimizer add up to, as fields of a plan that is optimal."""
    compute_ns, optimizer_ns = sum(entry.predicted_ns for entry in execution), 42_500
    cost_ns = compute_ns + optimizer_ns + sum(round(entry.predicted_s * 1e9) for entry in moved)
    return {
        "solver": SolverOutcome.of(cost_ns, cost_ns, "alike"),
        "compute_s": compute_ns / 1e9,
        "communication_s": math.fsum(entry.predicted_s for entry in moved),
        "optimizer_s": optimizer_ns / 1e9,
        "at_peak_s": 0.5 * compute_ns / 1e9,
    }


def sharded_plan(layers: int) -> ShardingPlan:
    """The same with weights of the layers cut over dp too: gathered before use, gradients reduce-scattered."""
    plan = transformer_plan(layers)
    cut = {layout("tp:S(0)"): layout("dp:S(1) tp:S(0)"), layout("tp:S(1)"): layout("dp:S(0) tp:S(1)")}
    gather = Collective("all_gather", "dp", 1 << 17, 9e-06)
    moved = [entry for entry in plan.redistributions if not entry.tensor.endswith("wq/mm.1")]
    for i in range(layers):
        wq, wo = f"layers.{i}.attention.wq", f"layers.{i}.attention.wo"
        path = layout("dp:S(1) tp:S(0)"), layout("tp:S(0)")
        moved += [
            Redistribution(f"{wq}.weight", "forward", path, (gather,), consumers=(f"{wq}/mm",)),
            Redistribution(
                f"{wo}.weight",
                "forward",
                (layout("dp:S(0) tp:S(1)"), layout("tp:S(1)")),
                (gather,),
                consumers=(f"{wo}/mm",),
            ),
            Redistribution(
                f"{wq}/mm.1",
                "backward",
                (layout("dp:P(sum) tp:S(0)"), path[0]),
                (Collective("reduce_scatter", "dp", 1 << 17, 6e-06),),
                consumers=(f"{wq}.weight",),
            ),
        ]
    return replace(
        plan,
        parameters=tuple(replace(e, layout=cut.get(e.layout, e.layout)) for e in plan.parameters),
        redistributions=tuple(moved),
        memory=transformer_memory(layers, matrices=1 << 16),
        **totals_of(plan.execution, moved),
    )


def transformer_execution(layers: list[str]) -> Iterator[Execution]:
    """Layer after layer, and backwards again; in microseconds that add up to nothing in particular."""
    yield Execution("embed/embedding", "forward", 12_500)
    order = {"norm/rms_norm": 20_125, "attention.wq/mm": 89_355, "attention/mul.2": 0, "attention.wo/mm": 89_355}
    for layer in layers:
        yield from (Execution(f"{layer}.{name}", "forward", ns) for name, ns in order.items())
        yield Execution(f"{layer}/add", "forward", 2_506)
    yield Execution("/ones", "backward", 2_500)
    for layer in reversed(layers):
        yield from (
            Execution(f"{layer}.attention.{name}", "backward", 89_355) for name in ("wo/mm.1", "wo/mm.2", "wq/mm.1")
        )


def transformer_memory(layers: int, matrices: int = 1 << 17) -> MemoryOutcome:
    """Made up, like everything here, but for what is held: ``matrices`` are the bytes of one matrix on one rank."""
    parameters = 4 * 256 * 512 + layers * (2 * matrices + 4 * 256)
    activations = layers << 18
    peak = MemoryPoint("backward", f"layers.{layers - 1}.attention.wo/mm.1", 4 * parameters + activations)
    return MemoryOutcome(
        optimizer="adamw",
        budget_bytes=-(-peak.size_bytes >> 20) << 20,
        soft_ms_per_gib=None,
        parameter_bytes=parameters,
        gradient_bytes=parameters,
        optimizer_bytes=2 * parameters,
        buffer_bytes=1 << 15,
        input_bytes=1 << 12,
        peak=peak,
        tenants=(
            MemoryTenant("optimizer state", "optimizer", layers, 2 * parameters),
            MemoryTenant("layers.*.attention.wq.weight", "parameter", layers, parameters),
            MemoryTenant("layers.*.norm/rms_norm", "activation", layers, activations),
        ),
        other_bytes=parameters,
        timeline=(MemoryPoint("forward", "embed/embedding", 3 * parameters), peak),
        kinds=(
            MemoryKind("parameter", (parameters, parameters)),
            MemoryKind("gradient", (0, parameters - (9 << 12))),
            MemoryKind("optimizer", (2 * parameters - (9 << 12), 2 * parameters)),
            MemoryKind("buffer", (1 << 15, 1 << 15)),
            MemoryKind("input", (1 << 12, 1 << 12)),
            MemoryKind("activation", (0, activations)),
        ),
    )


# Any plan -----------------------------------------------------------------------------------------------------------

names = st.one_of(
    st.lists(st.sampled_from(["a", "b", "0", "1", "2", "10", "007", "*", "{0-1}"]), min_size=1, max_size=5).map(
        ".".join
    ),
    st.text(st.characters(exclude_categories=["Cs"]), max_size=20),
)
operator_names = st.tuples(names, st.sampled_from(["mm", "mul.2", "3", "view/4.5"])).map("/".join)
finite = st.floats(allow_nan=False, allow_infinity=False)
seconds = st.floats(min_value=0, max_value=1e9)
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
integers = st.integers(-(1 << 62), 1 << 62)


@st.composite
def meshes(draw: st.DrawFn, max_size: int = 8) -> Mesh:
    axes = draw(
        st.lists(st.from_regex(r"[A-Za-z_]\w{0,3}", fullmatch=True).filter(str.isascii), min_size=1, max_size=3)
    )
    axes = list(dict.fromkeys(axes))
    return Mesh(tuple(axes), tuple(draw(st.integers(1, max_size)) for _ in axes))


def placements(dims: int) -> st.SearchStrategy[Placement]:
    cuts = [S(dim) for dim in range(dims)]
    return st.sampled_from([R, P_SUM, P("max"), P("min"), *cuts])


def layouts(mesh: Mesh, dims: int = 3) -> st.SearchStrategy[Layout]:
    return st.tuples(*[placements(dims)] * mesh.ndim).map(Layout)


@st.composite
def tensors(draw: st.DrawFn, mesh: Mesh, name: str) -> TensorEntry:
    shape = tuple(draw(st.lists(st.sampled_from([0, 1, 4, 1 << 20]), max_size=2)))
    return TensorEntry(name, shape, draw(st.sampled_from(sorted(DTYPE_BYTES)[:2])), draw(layouts(mesh, len(shape))))


@st.composite
def operators(draw: st.DrawFn, mesh: Mesh, phase: str, name: str) -> OperatorEntry:
    few = st.lists(layouts(mesh, 1), max_size=2)
    outputs = st.lists(st.none() | layouts(mesh, 1), max_size=2)
    return OperatorEntry(name, phase, tuple(draw(few)), tuple(draw(outputs)))  # type: ignore[arg-type]


@st.composite
def moves(
    draw: st.DrawFn, mesh: Mesh, made: dict[str, tuple[Layout, TensorEntry | None]], wants: Sequence[OperatorEntry]
) -> tuple[Redistribution, ...]:
    """Tensors that go one or two steps from the layout they have, or from where another redistribution took them, for
    operators that want the last layout.

    Args:
        made: every tensor that can be moved: its layout, and its entry where the plan says its shape.
    """
    found: dict[object, Redistribution] = {}
    for _ in range(draw(st.integers(0, 6)) if made else 0):
        tensor, phase = draw(st.sampled_from(sorted(made))), draw(st.sampled_from(PHASES))
        layout, entry = made[tensor]
        dims = 3 if entry is None else len(entry.shape)
        path, collectives, kept = [layout], [], False
        others = [e for e in found.values() if e.tensor == tensor and e.phase in ("forward", phase)]
        if others and draw(st.booleans()):
            other = draw(st.sampled_from(others))
            path = list(other.path)
            kept = other.phase != phase or (other.kept and not other.taken)  # which took nothing itself to go on from
        shared = len(path) - 1
        for _ in range(draw(st.integers(0 if kept else 1, 2))):
            after = draw(layouts(mesh, dims))
            steps = [step for axis in range(mesh.ndim) if (step := step_on(path[-1], after, (axis,)))]
            if steps:
                step = draw(st.sampled_from(steps))
                size = draw(st.integers(0, 10**18 - 1))
                if entry is not None:
                    size = size_bytes(step, path[-1], entry.shape, DTYPE_BYTES[entry.dtype], mesh)
                if step.communicates:
                    time_s = draw(st.floats(min_value=0, max_value=1e6))
                    collectives.append(Collective(step.kind, mesh.named(step.axes), size, time_s))  # type: ignore[arg-type]
                path.append(path[-1].replace(step.axes, after[step.axes[0]]))
        key = tensor, phase, path[-1]
        if len(path) > 1 and key not in found:
            consumers = [e.name for e in wants if e.phase == phase and path[-1] in e.inputs and draw(st.booleans())]
            moved = Redistribution(tensor, phase, tuple(path), tuple(collectives), kept, tuple(consumers), shared)
            found[key] = moved
    return tuple(found.values())


@st.composite
def executions(draw: st.DrawFn, entries: tuple[OperatorEntry, ...]) -> tuple[Execution, ...]:
    """None, or all of the operators in any order."""
    if draw(st.booleans()):
        return ()
    ns = st.sampled_from([0, 1, 2_500, 123_456_789, 10**16])
    return tuple(Execution(entry.name, entry.phase, draw(ns)) for entry in draw(st.permutations(entries)))


sizes = st.integers(0, 1 << 40)


@st.composite
def memories(draw: st.DrawFn, plan: ShardingPlan) -> MemoryOutcome:
    """What the rank at coordinate 0 may need of memory under a plan."""

    def point(size_bytes: int) -> MemoryPoint:
        run = [(entry.phase, entry.name) for entry in plan.operators]
        return MemoryPoint(*draw(st.sampled_from([("optimizer", "step"), ("forward", "results"), *run])), size_bytes)

    parameters, buffers, inputs = (
        sum(math.prod(largest_local_shape(e.shape, e.layout, plan.mesh)) * DTYPE_BYTES[e.dtype] for e in entries)
        for entries in (plan.parameters, plan.buffers, plan.inputs)
    )
    kinds = st.sampled_from(TENANT_KINDS)
    state = draw(sizes)
    tenants = draw(st.lists(st.builds(MemoryTenant, texts, kinds, st.integers(1, 1000), sizes), max_size=3))
    other = parameters + buffers + inputs + state + draw(sizes)
    total = other + sum(tenant.size_bytes for tenant in tenants)
    margin = draw(st.sampled_from([0.0, 0.09]) | st.floats(0, 1))
    budget = draw(st.none() | sizes.map(lambda spare: reserved_bytes(total, margin) + spare))
    price = None if budget is None else draw(st.none() | seconds)
    timeline = [point(draw(st.integers(0, total))) for _ in range(draw(st.integers(0, 3)))]
    if timeline:
        timeline.insert(draw(st.integers(0, len(timeline))), point(total))
    gradients = draw(st.integers(0, parameters))
    held = parameters, gradients, state, buffers, inputs
    peak = point(total)
    again = sorted({starred(name) for name in plan.recomputed})
    saved = tuple(MemorySaved(name, draw(sizes)) for name in again)
    tenancy = tuple(tenants), other, tuple(timeline)
    made_of = tuple(kinds_of(total, timeline, tenants)) if draw(st.booleans()) else ()
    return MemoryOutcome(draw(texts), budget, price, *held, peak, *tenancy, margin, saved, made_of)


def kinds_of(total: int, points: Sequence[MemoryPoint], tenants: Sequence[MemoryTenant]) -> Iterator[MemoryKind]:
    """At the fullest points the tenants and otherwise buffers, at the others activations."""
    held: dict[str, int] = dict.fromkeys(TENANT_KINDS, 0)
    for tenant in tenants:
        held[tenant.kind] += tenant.size_bytes
    held["buffer"] += total - sum(held.values())
    for kind in TENANT_KINDS if points else ():
        less = [point.size_bytes if kind == "activation" else 0 for point in points]
        yield MemoryKind(kind, tuple(held[kind] if p.size_bytes == total else s for p, s in zip(points, less)))


@st.composite
def plans(draw: st.DrawFn) -> ShardingPlan:
    """Any plan that does not contradict itself."""
    mesh = draw(meshes())
    if mesh.size <= 64:
        mesh = replace(mesh, order=draw(st.just(()) | st.permutations(range(mesh.size)).map(tuple)))

    def some(of: st.SearchStrategy[str]) -> list[str]:
        return draw(st.lists(of, max_size=6, unique=True))

    held = some(names)
    ends = sorted(draw(st.tuples(st.integers(0, len(held)), st.integers(0, len(held)))))
    groups = held[: ends[0]], held[ends[0] : ends[1]], held[ends[1] :]
    parameters, buffers, inputs = (tuple(draw(tensors(mesh, name)) for name in group) for group in groups)
    entries = tuple(draw(operators(mesh, draw(st.sampled_from(PHASES)), name)) for name in some(operator_names))
    made: dict[str, tuple[Layout, TensorEntry | None]] = {
        entry.name: (entry.layout, entry) for entry in (*parameters, *buffers, *inputs)
    }
    for operator in entries:
        for k, layout in enumerate(operator.outputs):
            if layout is not None:
                made[f"{operator.name}:{k}" if k else operator.name] = layout, None
    moved = draw(moves(mesh, made, entries))
    execution = draw(executions(entries))
    plan = ShardingPlan(
        model=draw(texts),
        fingerprint=draw(texts),
        call=draw(texts),
        mesh=mesh,
        hardware=draw(texts),
        hardware_fingerprint=draw(texts),
        objective=draw(st.sampled_from(sorted(COUNTED))),
        pins=tuple(draw(st.lists(texts, max_size=2))),
        solver=SolverOutcome.of(
            0, 0, draw(st.sampled_from(get_args(IdenticalLayers))), tuple(draw(st.lists(texts, max_size=2)))
        ),
        compute_s=sum(entry.predicted_ns for entry in execution) / 1e9 if execution else draw(seconds),
        communication_s=math.fsum(entry.predicted_s for entry in moved),
        optimizer_s=draw(st.none() | seconds),
        at_peak_s=draw(st.none() | seconds),
        parameters=parameters,
        buffers=buffers,
        inputs=inputs,
        outputs=tuple(draw(tensors(mesh, name)) for name in some(names)),
        operators=entries,
        redistributions=moved,
        execution=execution,
        bucket_bytes=draw(st.sampled_from((0, 1, 1 << 20))),
        contention=draw(st.sampled_from((0.0, 0.4, 1.0))),
        network=draw(st.just(()) | st.tuples(*[texts] * mesh.ndim)),
        precision=draw(st.sampled_from((AS_IT_IS, Precision("bfloat16", "float32"), Precision(None, "float16")))),
    )
    plan = costed(plan, draw(st.floats(0, 1)))
    plan = replace(plan, memory=draw(st.none() | memories(plan)))
    if plan.execution and draw(st.booleans()):
        plan = replace(plan, against=distance(plan, draw(texts), replace(plan, optimizer_s=draw(seconds))))
    return plan


def costed(plan: ShardingPlan, bound: float = 1.0, sums: bool = False) -> ShardingPlan:
    """A plan with the cost that its seconds give, and a bound that is a share of it.

    With ``sums`` the seconds of communication are added up from its redistributions.
    """
    if sums:
        plan = replace(plan, communication_s=math.fsum(entry.predicted_s for entry in plan.redistributions))
    cost = round(COUNTED[plan.objective][1](plan) * 1e9)
    return replace(plan, solver=plan.solver.having(cost, min(cost, int(cost * bound))))


def undivided(plan: ShardingPlan) -> ShardingPlan:
    """The plan with every operator on whole tensors, so that nothing is communicated."""
    whole = Layout((R,) * plan.mesh.ndim)
    operators = tuple(
        replace(e, inputs=(whole,) * len(e.inputs), outputs=tuple(o and whole for o in e.outputs))
        for e in plan.operators
    )
    tensors = {
        field: tuple(replace(e, layout=whole) for e in getattr(plan, field))
        for field in ("parameters", "buffers", "inputs", "outputs")
    }
    cost_ns = round((plan.compute_s + (plan.optimizer_s or 0.0)) * 1e9)
    return replace(  # type: ignore[arg-type]
        plan,
        operators=operators,
        redistributions=(),
        communication_s=0.0,
        memory=None,
        solver=replace(plan.solver, cost_ns=cost_ns, bound_ns=cost_ns),
        **tensors,
    )
