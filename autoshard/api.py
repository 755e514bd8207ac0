"""The pipeline, read top to bottom: capture, enumerate, price, formulate, solve, interpret, and lower."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._pytree import tree_flatten

import cost_models
from solver import Status, solve

from .apply import parallelize
from .calls import as_arguments, describe_call
from .capture import capture, input_names
from .constraints import parse_pin
from .errors import InfeasibleError
from .formulation import OBJECTIVES, Objective, formulate
from .interpretation import interpret
from .lowering import from_first_rank, mesh_of
from .mesh import HybridMesh, Mesh
from .plans import ShardingPlan, dump_plan, parse_plan

__all__ = ["auto_parallelize", "plan"]


def plan(
    model: nn.Module,
    args: Any = (),
    kwargs: dict[str, Any] | None = None,
    *,
    mesh: Mesh | HybridMesh | str | Mapping[str, int],
    hardware: str | cost_models.Profile = "dgx-h100",
    objective: Objective = "step-time",
    pins: str | Sequence[str] = (),
    backend: str = "auto",
    time_limit_s: float | None = None,
    tie_layers: bool = True,
    name: str | None = None,
    progress: Callable[[str], None] | None = None,
) -> ShardingPlan:
    """Decides the layout of every tensor of one training step, for the least predicted step time.

    Needs no process group, no accelerator and no memory for the tensors: model and arguments may be on the meta device.

    Args:
        model: its forward is captured once with the arguments; a scalar result is the loss.
        args, kwargs: example arguments with the *global* shapes of a step; one that is no tuple stands for itself.
        mesh: ``"dp=8,tp=8"``, a mapping of axis names to sizes, a :class:`Mesh`, or a :class:`HybridMesh`, whose order
            of ranks decides which links the axes are priced on (start the job on ``DeviceMesh(device, mesh.ranks)``).
        hardware: the name of a shipped profile, the path of a profile file, or a profile.
        objective: ``step-time`` (compute plus communication) or ``communication-time``.
        pins: ``NAME=LAYOUT`` with a glob pattern for the name of a parameter, input, operator or ``output.0``.
        backend: a name of ``solver.BACKENDS``, or ``auto``.
        time_limit_s: wall-clock seconds for the solver; the best plan found is returned.
        tie_layers: decide identical layers once.
        name: what the plan calls the model; its class by default.
        progress: called with the name of each stage as it starts.

    Returns:
        The plan, with its status, bound and gap.

    Raises:
        CaptureError: the model is not one static graph.
        ConstraintError: a pin names nothing or cannot hold.
        InfeasibleError: no assignment satisfies the pins, or none was found in the time given.
        MeshError, LayoutError, ProfileError, BackendUnavailable: the argument of that name.
    """
    args = as_arguments(args)
    report = progress or (lambda stage: None)
    if objective not in OBJECTIVES:
        raise ValueError(f"unknown objective {objective!r}; choose one of {', '.join(OBJECTIVES)}")
    mesh = Mesh.of(mesh)
    profile = hardware if isinstance(hardware, cost_models.Profile) else cost_models.load_profile(hardware)
    pins = (pins,) if isinstance(pins, str) else tuple(pins)
    parsed = [parse_pin(pin, mesh) for pin in pins]
    report("capturing the training step")
    graph = capture(model, args, kwargs)
    report("enumerating and pricing strategies")
    formulation = formulate(graph, mesh, profile, objective=objective, pins=parsed, tie_layers=tie_layers)
    report("solving")
    solution = solve(formulation.problem, backend=backend, time_limit_s=time_limit_s)
    if solution.choices is None:
        under = f" under the pins {', '.join(pins)}" if pins else ""
        raise InfeasibleError(f"no plan{under}: {solution.status.value} {solution.report.explanation}".rstrip())
    if solution.status is not Status.OPTIMAL:
        warnings.warn(f"the plan is not proven optimal: its gap is {solution.gap:.2%}", stacklevel=2)
    report("writing the plan")
    return interpret(formulation, solution, profile, name or type(model).__name__, _call(model, args, kwargs or {}))


def auto_parallelize(
    model: nn.Module,
    mesh: DeviceMesh,
    example_inputs: Any = (),
    example_kwargs: dict[str, Any] | None = None,
    *,
    hardware: str | cost_models.Profile | None = None,
    **options: Any,
) -> nn.Module:
    """Plans a model for a mesh and applies the plan: one call on every rank of a job.

    The first rank of the mesh plans and sends the plan to the others, so that all have the identical one.

    Args:
        model: as for :func:`parallelize`; it is taken apart.
        mesh: the DeviceMesh of the job, with axis names.
        example_inputs, example_kwargs: example arguments with the *global* shapes of a step.
        hardware: as for :func:`plan`; by default ``cpu-gloo`` on CPU and ``dgx-h100`` on CUDA.
        options: objective, pins, backend, time_limit_s, tie_layers, name, progress: as for :func:`plan`.

    Returns:
        The module to train; ``module.plan`` is its plan.

    Raises:
        What :func:`plan` and :func:`parallelize` raise. If planning fails, every rank raises.
    """
    if hardware is None:
        hardware = "cpu-gloo" if mesh.device_type == "cpu" else "dgx-h100"
    axes = _with_order(mesh)
    example_inputs = as_arguments(example_inputs)

    def make() -> str:
        return dump_plan(plan(model, example_inputs, example_kwargs, mesh=axes, hardware=hardware, **options))

    text = from_first_rank(mesh, make)
    return parallelize(model, parse_plan(text, "the plan of the first rank"), mesh, example_inputs, example_kwargs)


def _with_order(mesh: DeviceMesh) -> Mesh:
    """The axes and sizes of a DeviceMesh, and its order of ranks where it spans the job."""
    axes = mesh_of(mesh)
    order = tuple(int(rank) for rank in mesh.mesh.flatten().tolist())
    return Mesh(axes.axes, axes.shape, order) if sorted(order) == list(range(axes.size)) else axes


def _call(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    leaves, _ = tree_flatten((args, kwargs))
    named = zip(input_names(model, args, kwargs), leaves)
    supply = iter([name for name, leaf in named if isinstance(leaf, torch.Tensor)])
    return describe_call(args, kwargs, lambda value: next(supply) if isinstance(value, torch.Tensor) else None)
