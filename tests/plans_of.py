"""Plans and their formulations, made once and read by several tests; and an independent sum of what a plan costs."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from autoshard.capture import CapturedGraph, Ref, capture
from autoshard.constraints import parse_constraint
from autoshard.errors import StrategyWarning
from autoshard.layout import Layout
from autoshard.mesh import Mesh
from autoshard.planning import Formulation, formulate, interpret
from autoshard.plans import ShardingPlan
from cost_models import Hosts, Profile, load_profile
from solver import Solution, solve

from .models import graph_of


@dataclass(frozen=True, eq=False)
class Planned:
    """All stages of one plan."""

    graph: CapturedGraph
    formulation: Formulation
    solution: Solution
    plan: ShardingPlan


@cache
def profile_of(name: str = "cpu-gloo") -> Profile:
    """A shipped profile, or ``slow``: rates so low that bytes and flops of tiny tensors outweigh every fixed time."""
    if name != "slow":
        return load_profile(name)
    profile = load_profile("cpu-gloo")
    compute = replace(
        profile.compute,
        launch_s=1e-7,
        memory_bandwidth_bytes_per_s=1e7,
        peak_flops_per_s=dict.fromkeys(profile.compute.peak_flops_per_s, 1e8),
    )
    assert isinstance(profile.network, Hosts)
    link = replace(profile.network.intra_host, latency_s=1e-6, launch_s=0.0, bandwidth_bytes_per_s=1e7)
    return replace(profile, name="slow", compute=compute, network=replace(profile.network, intra_host=link))


def formulated(graph: CapturedGraph, mesh: str, hardware: str, pins: Sequence[str] = (), **options: Any) -> Formulation:
    axes = Mesh.parse(mesh)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", StrategyWarning)
        parsed = [parse_constraint(pin, axes) for pin in pins]
        return formulate(graph, axes, profile_of(hardware), constraints=parsed, **options)


@cache
def planned(
    name: str, mesh: str, hardware: str = "slow", pins: tuple[str, ...] = (), objective: str = "step-time"
) -> Planned:
    graph = graph_of(name)
    formulation = formulated(graph, mesh, hardware, pins, objective=objective)
    solution = solve(formulation.problem)
    return Planned(graph, formulation, solution, interpret(formulation, solution, profile_of(hardware), name, ""))


def layers(name: str, count: int) -> CapturedGraph:
    """The graph of a transformer example with several layers."""
    from . import models

    return capture(*getattr(models, name)(n_layers=count))


def layouts_needed(planned: Planned) -> set[tuple[str, str, Layout, Layout]]:
    """(tensor, phase, layout it has, layout wanted) of everything that some consumer wants in another layout.

    Read from the plan's entries and the graph alone: operators, gradients, results, new values of buffers.
    """
    graph, plan = planned.graph, planned.plan
    operators = {entry.name: entry for entry in plan.operators}
    leaves = {entry.name: entry.layout for entry in (*plan.parameters, *plan.buffers, *plan.inputs)}
    outputs = {entry.name: entry.layout for entry in plan.outputs}

    def held(ref: Ref) -> Layout | None:
        node = graph.nodes[ref.node]
        if node.kind == "operator":
            return operators[node.name].outputs[ref.output]
        return leaves[node.name] if node.name in leaves else outputs[f"output.{node.name.removeprefix('grad.')}"]

    wanted: list[tuple[Ref, str, Layout]] = []
    for _, node in graph.of_kind("operator"):
        wanted += [(ref, node.phase, layout) for ref, layout in zip(node.inputs, operators[node.name].inputs)]
    wanted += [(ref, "backward", leaves[name]) for name, ref in graph.gradients]
    wanted += [(ref, "forward", outputs[f"output.{k}"]) for k, ref in enumerate(graph.outputs) if ref]
    wanted += [(ref, "forward", leaves[name]) for name, ref in graph.mutations]
    found = {(graph.tensor_name(ref), phase, held(ref), layout) for ref, phase, layout in wanted}
    return {entry for entry in found if entry[2] != entry[3]}  # type: ignore[misc]
