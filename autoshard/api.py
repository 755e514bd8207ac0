"""The pipeline, read top to bottom: capture, enumerate, price, formulate, solve until it fits, interpret, and lower."""

from __future__ import annotations

import json
import os
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from inspect import signature
from typing import Any, Literal

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import cost_models
from cost_models.spelling import did_you_mean
from solver.backends import load_backend

from .apply import parallelize
from .capture import (
    as_arguments,
    capture,
    captured_once,
    check_is_module,
    check_keywords,
    described,
    in_mode,
    model_key,
)
from .constraints import Constraints, Given, gather_constraints
from .disk_cache import disk_cache
from .errors import ConstraintError, InputError, LayoutError, MeshError
from .garbage import seldom_collected
from .layout import format_layout
from .lowering import (
    Random,
    check_class,
    check_device_mesh,
    check_random,
    check_untaken,
    code_digest,
    from_first_rank,
    mesh_of,
)
from .mesh import HybridMesh, Mesh
from .mesh_search import Asked, search_meshes, shapes_of
from .ops import registered
from .plan_cache import kept_plan
from .planning import (
    OBJECTIVES,
    Checkpointing,
    Objective,
    Planner,
    against_experts,
    check_same_parameters,
    held_pins,
    is_proven,
    memory_limit,
    profile_of,
    warn_if_unproven,
)
from .plans import ShardingPlan, dump_plan, parse_plan
from .plans.schedule import BUCKET_BYTES, bucket_size
from .precision import Precision

__all__ = ["auto_parallelize", "plan"]

NO_EXPERT = (
    "the plan says nothing of experts: none of their schemes has a plan on this mesh under these constraints and this "
    "budget; `autoshard compare` says why"
)


def plan(
    model: nn.Module,
    args: Any = (),
    kwargs: dict[str, Any] | None = None,
    *,
    mesh: Mesh | HybridMesh | str | Mapping[str, int],
    devices: int | None = None,
    hardware: str | cost_models.Profile = "dgx-h100",
    objective: Objective = "step-time",
    constraints: Given | Sequence[Given] = (),
    pins: str | Sequence[str] = (),
    held_as: ShardingPlan | None = None,
    evaluation: bool = False,
    backend: str = "auto",
    time_limit_s: float | None = None,
    tie_layers: bool = True,
    checkpointing: Checkpointing = "free",
    micro_batches: int = 1,
    bucket: str | int = BUCKET_BYTES,
    param_dtype: object = None,
    reduce_dtype: object = None,
    optimizer: str | None = None,
    memory: str | int | None = None,
    memory_soft: float | None = None,
    against: Literal["experts"] | None = None,
    name: str | None = None,
    cache: bool = True,
    progress: Callable[[str], None] | None = None,
) -> ShardingPlan:
    """Decides the layout of every tensor of one training step, for the least predicted step time.

    Needs no process group, no accelerator and no memory for the tensors: model and arguments may be on the meta device.

    Args:
        model: its forward is captured once with the arguments; a scalar result is the loss.
        args, kwargs: example arguments with the *global* shapes of a step; one that is no tuple stands for itself.
        mesh: ``"dp=8,tp=8"``, a mapping of axis names to sizes, a :class:`Mesh`, or a :class:`HybridMesh`, whose order
            of ranks decides which links the axes are priced on (start the job on ``DeviceMesh(device, mesh.ranks)``);
            or ``"auto"``: the best mesh of so many ``devices`` (``docs/search.md``).
        devices: with ``mesh="auto"`` the number of devices.
        hardware: the name of a shipped profile, the path of a profile file, or a profile.
        objective: ``step-time`` (compute, communication and the optimizer's step), ``overlapped-step-time`` (the same
            where what travels beside computation costs the hardware's ``contention`` of its time) or
            ``communication-time``.
        constraints: what is decided already: constraints files by their paths, and texts in the forms of
            :mod:`autoshard.constraints`: pins, placements and collectives allowed or forbidden, tensors that are to be
            alike, schemes of axes.
        pins: further constraints, for those that are pins: ``NAME=LAYOUT`` with a glob pattern for the name of a
            parameter, input, operator or ``output.0``.
        held_as: a plan of the same model on the same mesh whose parameters are to be held alike, so that one module
            serves both plans (:func:`parallelize`): one for evaluation, or for batches of another shape.
        evaluation: plan a forward without a backward, of the model as it is after ``eval()`` (in which it is not left).
        backend: a name of ``solver.BACKENDS``, or ``auto``.
        time_limit_s: wall-clock seconds for the solver; the best plan found is returned.
        tie_layers: decide identical layers alike, as far as no constraint tells them apart. The optimum is then one
            among such plans, and the plan says so; otherwise solving takes much longer.
        checkpointing: what of the forward the backward computes again: ``free``, what the model marks with
            ``torch.utils.checkpoint`` where that fits the budget, else what is best, which the program decides;
            ``as-marked`` in any case; or ``none`` of it. The constraints ``recompute``, ``checkpoint`` and ``keep``
            come on top. See ``docs/memory.md``.
        micro_batches: how many forwards and backwards make a step; the arguments have the shapes of one of them. The
            plan decides what of parameters and gradients is held over the step, and moved once in it. See
            ``docs/memory.md``.
        bucket: how much travels together at most, ``"25MiB"`` or bytes: parameters are gathered a layer ahead, and
            gradients reduced in buckets (:mod:`autoshard.plans.schedule`). 0 for collectives that are waited for where
            they stand, each by itself; so are those of plans that do not fit the budget otherwise, and of several
            micro-batches.
        param_dtype: what the step computes in, ``"bfloat16"`` or ``torch.bfloat16``: parameters stay as they are, and
            are cast once at the start of a step, before they are gathered; so are floating arguments. None for what the
            model computes in. As FSDP2's ``MixedPrecisionPolicy``, for the model as one (``docs/precision.md``).
        reduce_dtype: in which gradients are reduced, whatever they are computed in; by default ``param_dtype``.
        optimizer: whose state counts in memory, and whose step in the predicted time: a name of
            ``cost_models.OPTIMIZERS``; ``adamw`` by default. What is given here of the optimizer and of memory comes
            before what constraints files say.
        memory: what the device may count of a rank: ``"80GiB"``, bytes, or ``"profile"`` for what the hardware profile
            says; None for no limit. What is in use stays below by the profile's margin of the allocator. See
            ``docs/memory.md`` for what is counted.
        memory_soft: makes the limit soft: one GiB in use above what it allows costs as much as this many milliseconds
            of step time.
        against: ``experts`` also plans the schemes that people use by hand, under the same constraints and budget:
            the plan says how far it is from the best of them, and what earns that (``docs/experts.md``). Where the best
            of them costs less, which may be under a budget, it is the plan.
        name: what the plan calls the model; its class by default.
        cache: give the plan that was made of the same before, where it was kept on disk, and keep the one that is made
            (``$AUTOSHARD_CACHE``, ``docs/decisions/0011-plans-kept-on-disk.md``).
        progress: called with the name of each stage as it starts, and with cost, bound and gap while it solves, from
            any thread.

    Returns:
        The plan, with its status, bound and gap.

    Warns:
        UserWarning: it is not proven optimal; or no scheme of experts has a plan, where it was to be held against them.

    Raises:
        CaptureError: the model is not one static graph.
        ConstraintError: a constraint names nothing or cannot hold.
        InfeasibleError: no assignment satisfies the pins, or none was found in the time given.
        BudgetError: the budget cannot be read, or no plan fits it; the message says which budget would work.
        ValueError: an unknown objective, checkpointing, optimizer policy, dtype or ``against``.
        InputError: a number of micro-batches below 1, or above it for a model without gradients; a bucket that is no
            size; a model that is no ``nn.Module``, or a path for ``held_as``.
        PlanMismatchError: ``held_as`` is a plan of another model.
        MeshError, LayoutError, ProfileError, BackendUnavailable: the argument of that name.
    """
    report = progress or (lambda stage: None)
    if objective not in OBJECTIVES:
        raise ValueError(f"unknown objective {objective!r}; choose one of {', '.join(OBJECTIVES)}")
    if against not in (None, "experts"):
        raise ValueError(f"cannot hold a plan against {against!r}; choose 'experts', or None")
    if (mesh == "auto") != (devices is not None):
        raise MeshError('the number of devices goes with mesh="auto": give both, or a mesh alone')
    check_is_module(model)
    check_keywords(kwargs)
    if isinstance(held_as, str | os.PathLike):
        raise InputError(f"held_as is the path {held_as!s}; read it: autoshard.read_plan({str(held_as)!r})")
    profile = profile_of(hardware)
    if devices is not None and held_as is not None:
        raise MeshError(f'held_as is a plan on the mesh {held_as.mesh}: give that, not mesh="auto"')

    def decided(mesh: Mesh) -> Constraints:
        return gather_constraints((*_listed(pins), *_listed(constraints)), mesh)

    if devices is None:
        mesh = Mesh.of(mesh)
        gathered = decided(mesh)
    else:
        mesh, gathered = _first_read([shape.mesh for shape in shapes_of(devices, profile)], decided)
    said = gathered.budgets
    soft = float(said["memory_soft"]) if memory_soft is None and "memory_soft" in said else memory_soft
    optimizer = optimizer or said.get("optimizer", "adamw")
    limit = memory_limit(optimizer, said.get("memory") if memory is None else memory, soft, profile)
    load_backend(backend)  # before the work, where its packages are not installed
    precision, bucket_bytes = Precision.of(param_dtype, reduce_dtype), bucket_size(bucket)
    args = as_arguments(args)

    def key() -> str | None:
        with _as_planned(model, evaluation):
            of_model = model_key(model, args, kwargs or {}, precision.param_dtype)
        of_operators = described(registered())
        return None if of_model is None or of_operators is None else of_model + of_operators

    started_s = time.monotonic()

    @seldom_collected()
    def make() -> ShardingPlan:
        nonlocal started_s
        with _as_planned(model, evaluation):
            planner = Planner.of_model(
                model,
                args,
                kwargs,
                mesh,
                profile,
                name=name,
                checkpointing=checkpointing,
                micro_batches=micro_batches,
                precision=precision,
                bucket_bytes=bucket_bytes,
                report=report,
                objective=objective,
                backend=backend,
                time_limit_s=time_limit_s,
                tie_layers=tie_layers,
                limit=limit,
            )
        started_s = time.monotonic()
        if devices is not None:
            experts = against is not None
            return search_meshes([Asked(planner)], devices, decided, experts=experts, report=report).plan
        held = gathered
        if held_as is not None:
            metas = [(n.name, n.outputs[0]) for _, n in planner.graph.of_kind("parameter") if n.outputs[0]]
            every = [*(name for name, _ in metas), *(name for name, _ in planner.graph.unused)]
            check_same_parameters(held_as, map(planner.graph.called, every))
            shapes = {called: meta.shape for name, meta in metas for called in planner.graph.called(name)}
            pinned = held_pins(held_as, shapes, mesh)
            held = gather_constraints((*pinned, *_listed(pins), *_listed(constraints)), mesh)
        made = planner.plan(held, report)
        return made if against is None else against_experts(planner, made, report)

    if cache:
        asked = {
            "name": name or type(model).__name__,
            "mesh": (mesh.axes, mesh.shape, mesh.order),
            "devices": devices and (devices, *map(str, (*_listed(pins), *_listed(constraints)))),
            "hardware": cost_models.dump_profile(profile),
            "objective": objective,
            "constraints": gathered.texts,
            "held as": "" if held_as is None else dump_plan(held_as),
            "backend": backend,
            "time limit": time_limit_s,
            "tie layers": tie_layers,
            "checkpointing": checkpointing,
            "micro-batches": micro_batches,
            "bucket": bucket_bytes,
            "precision": precision,
            "limit": limit,
            "against": against,
        }
        made = kept_plan(asked, key, make, keeps=lambda plan: time_limit_s is None or is_proven(plan), report=report)
    else:
        made = make()
    warn_if_unproven(made, time_limit_s, time.monotonic() - started_s)
    if against is not None and made.against is None:
        warnings.warn(NO_EXPERT, stacklevel=2)
    return made


def auto_parallelize(
    model: nn.Module,
    mesh: DeviceMesh,
    example_inputs: Any = (),
    example_kwargs: dict[str, Any] | None = None,
    *,
    hardware: str | cost_models.Profile | None = None,
    random: Random = "per-shard",
    batches: Sequence[int] = (),
    and_evaluation: bool = False,
    **options: Any,
) -> nn.Module:
    """Plans a model for a mesh and applies the plan: one call on every rank of a job.

    The first rank of the mesh plans and sends the plan to the others, so that all have the identical one.

    Args:
        model: as for :func:`parallelize`; it is taken apart.
        mesh: the DeviceMesh of the job, with axis names.
        example_inputs, example_kwargs: example arguments with the *global* shapes of a step.
        hardware: as for :func:`plan`; by default ``cpu-gloo`` on CPU and ``dgx-h100`` on CUDA.
        random, batches: as for :func:`parallelize`.
        and_evaluation: plan the forward of ``eval()`` as well, which calls under ``no_grad`` or ``inference_mode`` run
            in that mode. It holds parameters and inputs as the step does; the constraints are those of the step alone.
        options: objective, constraints, pins, held_as, evaluation, backend, time_limit_s, tie_layers, checkpointing,
            micro_batches, bucket, param_dtype, reduce_dtype, optimizer, memory, memory_soft, against, name, cache,
            progress: as
            for :func:`plan`.

    Returns:
        The module to train; ``module.plan`` is its plan.

    Raises:
        InputError: ``and_evaluation`` beside ``evaluation``, which plans a forward alone; or an option that
            :func:`plan` does not have.
        What :func:`plan` and :func:`parallelize` raise. If planning fails, every rank raises.
    """
    if and_evaluation and options.get("evaluation"):
        raise InputError(
            "evaluation=True plans a forward alone, and_evaluation=True one beside the step; give one of them"
        )
    _check_options(options)
    check_random(random)
    check_is_module(model)
    check_keywords(example_kwargs)
    check_device_mesh(mesh)
    check_class(model)
    check_untaken(model)
    if hardware is None:
        hardware = "cpu-gloo" if mesh.device_type == "cpu" else "dgx-h100"
    axes = _with_order(mesh)
    example_inputs = as_arguments(example_inputs)

    def make(say: Callable[[str], None]) -> str:
        told = {"progress": say, **options}
        made = [plan(model, example_inputs, example_kwargs, mesh=axes, hardware=hardware, **told)]
        if and_evaluation:
            told |= _of_evaluation(made[0])
            made.append(plan(model, example_inputs, example_kwargs, mesh=axes, hardware=hardware, **told))
        return json.dumps([dump_plan(each) for each in made])

    def meanwhile() -> None:
        with suppress(Exception), _as_planned(model, bool(options.get("evaluation"))):  # the first rank says why
            precision = Precision.of(options.get("param_dtype"), options.get("reduce_dtype"))
            capture(model, example_inputs, example_kwargs, precision=precision)

    graphs = disk_cache("graphs", code_digest()) if options.get("cache", True) else None
    with captured_once(graphs):  # each rank for itself, the first one as it plans, the others while it does
        text = from_first_rank(mesh, make, "planning", meanwhile)
        made = [parse_plan(each, "the plan of the first rank") for each in json.loads(text)]
        return parallelize(model, made, mesh, example_inputs, example_kwargs, random=random, batches=batches)


def _check_options(options: Iterable[str]) -> None:
    """Checks that :func:`plan` has the options that are handed on to it.

    Raises:
        InputError: it has no such option.
    """
    known = signature(plan).parameters
    for name in options:
        if name == "baseline":
            raise InputError('a baseline is given as a constraint: constraints=["baseline fsdp"]')
        if name not in known:
            raise InputError(f"auto_parallelize has no option {name!r}{did_you_mean(name, known)}")


def _of_evaluation(step: ShardingPlan) -> dict[str, Any]:
    """What :func:`plan` is told of a forward for evaluation beside a step, where it differs from what the step was."""
    inputs = [f"{entry.name}={format_layout(entry.layout, step.mesh)}" for entry in step.inputs]
    alone = {"constraints": (), "micro_batches": 1, "against": None}
    return {"evaluation": True, "held_as": step, "pins": inputs, **alone}


@contextmanager
def _as_planned(model: nn.Module, evaluation: bool) -> Iterator[None]:
    """Inside, the model is in the mode that a plan is made for."""
    mode = in_mode(model, training=False) if evaluation else nullcontext()
    with mode, torch.set_grad_enabled(torch.is_grad_enabled() and not evaluation):
        yield


def _first_read(meshes: Sequence[Mesh], decided: Callable[[Mesh], Constraints]) -> tuple[Mesh, Constraints]:
    """The first of the meshes on which the constraints can be read, and what they are there.

    Raises:
        What reading them on the first mesh raises, where there is none.
    """
    for mesh in meshes:
        with suppress(MeshError, LayoutError, ConstraintError):
            return mesh, decided(mesh)
    return meshes[0], decided(meshes[0])


def _listed(given: Given | Sequence[Given]) -> tuple[Given, ...]:
    return (given,) if isinstance(given, str | os.PathLike) else tuple(given)


def _with_order(mesh: DeviceMesh) -> Mesh:
    """The axes and sizes of a DeviceMesh, and its order of ranks where it spans the job."""
    axes = mesh_of(mesh)
    order = tuple(int(rank) for rank in mesh.mesh.flatten().tolist())
    return Mesh(axes.axes, axes.shape, order) if sorted(order) == list(range(axes.size)) else axes
