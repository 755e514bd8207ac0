"""A plan holds every redistribution that its strategies need, and no other."""

from __future__ import annotations

from collections import defaultdict
from itertools import pairwise
from random import Random

import pytest
import torch
from torch import nn

from autoshard.api import plan
from autoshard.capture import micro_batched
from autoshard.layout import P_SUM, R
from autoshard.planning.interpretation import computations
from autoshard.plans import dump_plan, parse_plan
from autoshard.redistribution import size_bytes, steps_along
from cost_models import load_profile

from ..distributed.cases import checkpointed, mlp
from ..models import MLP, graph_of
from ..plans_of import Planned, formulated, layouts_needed, planned, profile_of

PIN_DATA = ("tokens=dp:S(0)",)
PIN_HEADS = ("tokens=dp:S(0)", "layers.*.attention.wq.weight=tp:S(0)", "layers.*.feed_forward.w1.weight=tp:S(0)")
CASES = [
    ("mlp", "dp=2", ("x=dp:S(0)",)),
    ("mlp with loss", "dp=2,tp=2", ("x=dp:S(0)", "model.up.weight=tp:S(0)")),
    ("llama", "dp=2,tp=2", PIN_HEADS),
    ("llama bf16", "dp=2,tp=2", PIN_HEADS),
    ("llama odd", "dp=2,tp=3", PIN_DATA),
    ("gpt2", "dp=2,tp=2", ("tokens=dp:S(0)", "h.*.mlp.c_fc.weight=tp:S(0)")),
    ("conv", "dp=2", ("image=dp:S(0)",)),
    ("moe", "dp=2,ep=2", ("x=dp:S(0)", "up=ep:S(0)")),
]
cases = pytest.mark.parametrize("case", CASES, ids=lambda case: case[0])


def _planned(case) -> Planned:
    name, mesh, pins = case
    return planned(name, mesh, "slow", pins)


@cases
def test_every_layout_needed_has_one_redistribution_and_none_is_superfluous(case) -> None:
    found = _planned(case)
    listed = [(r.tensor, r.phase, r.path[0], r.path[-1]) for r in found.plan.redistributions]
    assert set(listed) == layouts_needed(found)
    assert len(set(listed)) == len(listed)
    assert listed


@cases
def test_a_redistribution_names_exactly_those_who_want_it(case) -> None:
    """Operators that take the layout, parameters for their gradients, outputs, buffers for their new values."""
    found = _planned(case)
    graph, plan = found.graph, found.plan
    operators = {entry.name: entry for entry in plan.operators}
    held = {entry.name: entry.layout for entry in (*plan.parameters, *plan.buffers, *plan.outputs)}
    wanted = defaultdict(set)
    for _, node in graph.of_kind("operator"):
        for ref, layout in zip(node.inputs, operators[node.name].inputs):
            wanted[graph.tensor_name(ref), node.phase, layout].add(node.name)
    for phase, pairs in (
        ("backward", graph.gradients),
        ("forward", graph.mutations),
        ("forward", [(f"output.{k}", ref) for k, ref in enumerate(graph.outputs) if ref is not None]),
    ):
        for name, ref in pairs:
            wanted[graph.tensor_name(ref), phase, held[name]].add(name)
    for moved in plan.redistributions:
        assert set(moved.consumers) == wanted[moved.tensor, moved.phase, moved.path[-1]]


@cases
def test_the_order_of_execution_is_that_of_the_graph_and_its_times_are_the_computation(case) -> None:
    found = _planned(case)
    order = [(node.name, node.phase) for _, node in found.graph.of_kind("operator")]
    assert [(entry.name, entry.phase) for entry in found.plan.execution] == order
    half_a_ns_each = 0.5e-9 * len(order)
    total_s = sum(entry.predicted_ns for entry in found.plan.execution) / 1e9
    assert total_s == pytest.approx(found.plan.compute_s, abs=half_a_ns_each)
    assert parse_plan(dump_plan(found.plan)) == found.plan


@cases
def test_collectives_are_the_communicating_steps_with_their_bytes(case) -> None:
    found = _planned(case)
    mesh = found.plan.mesh
    metas = {
        found.graph.tensor_name(ref): found.graph.meta(ref) for node in found.graph.nodes for ref in node.inputs
    } | {found.graph.tensor_name(ref): found.graph.meta(ref) for _, ref in found.graph.gradients}
    metas |= {found.graph.tensor_name(ref): found.graph.meta(ref) for ref in found.graph.outputs if ref}
    metas |= {found.graph.tensor_name(ref): found.graph.meta(ref) for _, ref in found.graph.mutations}
    for redistribution in found.plan.redistributions:
        meta, path, shared = metas[redistribution.tensor], redistribution.path, redistribution.shared
        assert not redistribution.kept or (redistribution.phase == "backward" and shared)
        if shared:
            phase = "forward" if redistribution.kept else redistribution.phase
            others = [r for r in found.plan.redistributions if (r.tensor, r.phase) == (redistribution.tensor, phase)]
            assert any(r.path[: shared + 1] == path[: shared + 1] and r.shared < shared for r in others)
        path = path[shared:]
        expected = [
            (step.kind, mesh.named(step.axes), size_bytes(step, before, meta.shape, meta.dtype.itemsize, mesh))
            for step, before in zip(steps_along(path), path)
            if step.communicates
        ]
        assert [(c.kind, c.axis, c.size_bytes) for c in redistribution.collectives] == expected


@cases
def test_the_cost_is_the_compute_and_the_redistributions_priced_again(case) -> None:
    """Independent of the formulation: collectives from the cost model, compute from each operator's layouts."""
    found = _planned(case)
    plan, prices = found.plan, found.formulation.prices
    topology = profile_of("slow").topology(plan.mesh.axes, plan.mesh.shape)
    for _, collective in plan.collectives():
        sent = topology.collective_s(collective.kind, plan.mesh.indices(collective.axis), collective.size_bytes)
        assert collective.predicted_s >= sent > 0
    entries = {entry.name: entry for entry in plan.operators}
    strategies = dict(zip((node.name for node in found.graph.nodes), found.formulation.strategies))
    compute_s = 0.0
    for _, node in found.graph.of_kind("operator"):
        entry = entries[node.name]
        (chosen,) = [s for s in strategies[node.name] if (s.inputs, s.outputs) == (entry.inputs, entry.outputs)]
        compute_s += float(prices.compute_s(node, (chosen,))[0])
    moved_s = 0.0
    metas = {found.graph.tensor_name(d.ref): found.graph.meta(d.ref) for d in found.formulation.demands}
    for r in plan.redistributions:
        moved_s += sum(float(prices.matrix_s(metas[r.tensor], (a,), (b,))[0, 0]) for a, b in pairwise(r.own))
    assert plan.compute_s == pytest.approx(compute_s)
    assert plan.communication_s == pytest.approx(moved_s)
    assert any(r.kept for r in plan.redistributions) or case[0] == "mlp with loss"
    terms = len(plan.operators) + sum(len(r.own) for r in plan.redistributions)
    assert plan.solver.cost_ns == pytest.approx((compute_s + moved_s) * 1e9, abs=terms)


@cases
def test_parameters_gradients_and_results_are_never_partial(case) -> None:
    plan = _planned(case).plan
    for entry in (*plan.parameters, *plan.buffers, *plan.inputs, *plan.outputs):
        assert not entry.layout.has_partial
    assert any(P_SUM in r.path[0].placements for r in plan.redistributions)
    assert all(set(entry.layout) == {R} for entry in plan.buffers)


@cases
def test_a_plan_names_every_parameter_input_output_and_operator_once(case) -> None:
    found = _planned(case)
    plan, graph = found.plan, found.graph
    assert {e.name for e in plan.parameters} == {n.name for _, n in graph.of_kind("parameter")}
    assert [e.name for e in plan.inputs] == [n.name for _, n in graph.of_kind("input")]
    assert sorted(e.name for e in plan.operators) == sorted(n.name for _, n in graph.of_kind("operator"))
    assert [e.name for e in plan.outputs] == ["output.0"]


def test_an_unused_parameter_is_whole_on_every_rank() -> None:
    model = MLP()
    model.spare = nn.Linear(3, 2)
    found = plan(model, (torch.randn(4, 8),), mesh="dp=2", hardware="cpu-gloo", pins=["x=dp:S(0)"])
    spare = {entry.name: entry.layout for entry in found.parameters if entry.name.startswith("spare")}
    assert spare.keys() == {"spare.weight", "spare.bias"}
    assert all(layout.is_replicated for layout in spare.values())


@pytest.mark.parametrize(("axes", "again"), [("dp=2,tp=2", False), ("dp=4", True)])
def test_the_time_at_the_peak_is_that_of_the_models_products_whatever_the_plan(axes: str, again: bool) -> None:
    """Two products forward, and backward one for each weight and one for the input of the second."""
    model, args = checkpointed() if again else mlp(batch=8, width=16, hidden=32)
    found = plan(model, args, mesh=axes, hardware="dgx-h100", checkpointing="as-marked")
    assert any("up/" in name for name in found.recomputed) == again
    peak = load_profile("dgx-h100").compute.peak("float32")
    assert found.at_peak_s == pytest.approx(5 * 2 * 8 * 16 * 32 / peak / 4)
    assert found.mfu == pytest.approx(found.at_peak_s / found.step_s)


@pytest.mark.parametrize("micro_batches", [1, 3])
@pytest.mark.parametrize("name", ["llama", "llama bf16", "moe", "assorted"])
def test_operators_that_are_priced_once_cost_what_each_of_them_costs(name: str, micro_batches: int) -> None:
    program = formulated(micro_batched(graph_of(name), micro_batches), "dp=2,tp=2", "slow")
    random = Random(0)
    for _ in range(3):
        choices = [random.randrange(len(strategies)) for strategies in program.strategies]
        for node, seconds in computations(program, choices):
            i = program.graph.nodes.index(node)
            assert seconds == program.prices.compute_s(node, (program.strategies[i][choices[i]],))[0], node.name
