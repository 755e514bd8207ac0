"""The integer program of a graph: its cost, shared redistributions, pins, ties."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch import Tensor, nn

from autoshard.capture import capture
from autoshard.errors import ConstraintError
from autoshard.layout import Layout, R, parse_layout
from autoshard.planning import pair_problem
from autoshard.planning.tensor_networks import HELD
from solver import INFEASIBLE, Status, solve

from ..models import graph_of
from ..plans_of import formulated, layers, planned

SMALL = ["mlp", "mlp with loss", "gpt2", "llama", "moe"]


@pytest.mark.parametrize("hardware", ["slow", "cpu-gloo"])
@pytest.mark.parametrize(
    ("name", "mesh", "pin"),
    [
        ("mlp", "dp=3", "x=dp:S(0)"),
        ("mlp with loss", "dp=2,tp=3", "x=dp:S(0)"),
        ("moe", "dp=2,tp=2", "x=dp:S(0)"),
        ("gpt2", "dp=4", "tokens=dp:S(0)"),
        ("gpt2", "dp=2,tp=2", "tokens=dp:S(0)"),
        ("llama", "dp=2", "tokens=dp:S(0)"),
        ("conv", "dp=2", "image=dp:S(0)"),
    ],
)
def test_highs_and_cbc_prove_the_same_cost(name: str, mesh: str, pin: str, hardware: str) -> None:
    problem = formulated(graph_of(name), mesh, hardware, (pin,)).problem
    highs, cbc = solve(problem, backend="highs"), solve(problem, backend="cbc")
    assert highs.status is cbc.status is Status.OPTIMAL
    assert highs.cost == cbc.cost == highs.bound == cbc.bound


@pytest.mark.parametrize("hardware", ["slow", "cpu-gloo"])
@pytest.mark.parametrize("name", SMALL)
def test_the_optimum_costs_no_more_than_full_replication(name: str, hardware: str) -> None:
    formulation = planned(name, "dp=2,tp=2", hardware).formulation
    whole = [
        next(
            k
            for k, s in enumerate(strategies)
            if all(set(layout) == {R} for layout in (*s.inputs, *s.outputs) if layout)
        )
        for strategies in formulation.strategies
    ]
    answer = formulation.routed(whole)
    assert answer is not None
    _, replicated = answer
    best = planned(name, "dp=2,tp=2", hardware).solution.cost
    assert best is not None and 0 < best <= replicated
    if hardware == "slow":  # where bytes and flops decide, cutting pays
        assert best < 0.75 * replicated


class TwoReaders(nn.Module):
    """Two products read one activation."""

    def __init__(self, readers: int) -> None:
        super().__init__()
        self.heads = nn.ModuleList(nn.Linear(8, 8, bias=False) for _ in range(readers))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        y = x.relu()
        return tuple(head(y) for head in self.heads)


def test_a_layout_that_two_consumers_want_is_paid_once() -> None:
    """y is pinned to rows and both products to whole inputs: one all-gather, whoever else reads."""
    costs, gathers = [], []
    for readers in (1, 2, 3):
        model = TwoReaders(readers)
        with torch.no_grad():
            graph = capture(model, (torch.randn(64, 8),))
        pins = ["/relu=dp:S(0)", *(f"heads.{i}/mm=dp:R" for i in range(readers))]
        formulation = formulated(graph, "dp=2", "cpu-gloo", pins, objective="communication-time", tie_layers=False)
        solution = solve(formulation.problem)
        costs.append(solution.cost)
        relu = next(i for i, node in enumerate(graph.nodes) if node.name == "/relu")
        gathers.append([len(d.consumers) for d in formulation.demands if d.ref.node == relu])
    assert gathers == [[1], [2], [3]]
    assert costs[0] is not None and costs[0] > 0
    assert costs == [costs[0]] * 3


@pytest.mark.parametrize("keep_copies", [True, False])
def test_in_pairs_consumers_of_one_tensor_form_a_group_across_phases_where_copies_are_kept(keep_copies: bool) -> None:
    formulation = formulated(graph_of("llama"), "dp=2", "cpu-gloo", keep_copies=keep_copies)
    problem = pair_problem(formulation)
    consumers: Counter[object] = Counter()
    for demand in formulation.demands:
        consumers[demand.ref if keep_copies else (demand.ref, demand.phase)] += len(demand.consumers)
    assert len(problem.groups) == sum(count > 1 for count in consumers.values()) > 0
    wanted = sum(len(demand.consumers) for demand in formulation.demands)
    assert len(problem.edges) == wanted + len(formulation.free.edges)
    assert len({(demand.ref, demand.phase) for demand in formulation.demands}) == len(formulation.demands)


@pytest.mark.parametrize("name", ["llama", "gpt2", "moe"])
def test_copies_that_are_kept_never_cost_more_than_copies_made_again(name: str) -> None:
    """The backward may always make its own: those plans are among those where it need not."""
    pins = ("tokens=dp:S(0)",) if name != "moe" else ("x=dp:S(0)",)
    kept, again = (formulated(graph_of(name), "dp=2,tp=2", "slow", pins, keep_copies=keep) for keep in (True, False))
    costs = solve(kept.problem).cost, solve(again.problem).cost
    assert None not in costs and costs[0] <= costs[1]


def test_every_gradient_is_wanted_by_its_parameter_and_every_result_by_its_tangent() -> None:
    for name in ("llama", "gpt2", "conv"):
        graph = graph_of(name)
        formulation = formulated(graph, "dp=2", "cpu-gloo")
        held = {(d.ref, node) for d in formulation.demands for node, position in d.consumers if position == HELD}
        number = {node.name: i for i, node in enumerate(graph.nodes)}
        assert {(ref, number[name]) for name, ref in graph.gradients} <= held
        assert len(held) == len(graph.gradients) + 1 + len(graph.mutations)


def test_pairs_that_no_steps_join_are_infeasible_and_all_others_finite() -> None:
    formulation = formulated(graph_of("gpt2"), "dp=2,tp=2", "dgx-h100")
    for edge, demand in zip(pair_problem(formulation).edges, (d for d in formulation.demands for _ in d.consumers)):
        before = [s.outputs[demand.ref.output] for s in formulation.strategies[demand.ref.node]]
        for k, layout in enumerate(before):
            if layout is not None and not layout.has_partial:
                row = edge.costs[edge.rows[k]]
                assert (row < INFEASIBLE).any()


@pytest.mark.parametrize(
    ("name", "pin", "mesh"),
    [
        ("llama", "layers.*.attention.wq.weight=dp:R tp:S(0)", "dp=2,tp=2"),
        ("llama", "tokens=dp:S(0) tp:S(1)", "dp=2,tp=2"),
        ("llama", "layers.0.attention/attention=dp:S(0) tp:S(1)", "dp=2,tp=2"),
        ("mlp", "output.0=dp:S(1)", "dp=2"),
        ("mlp", "up/addmm=dp:S(1)", "dp=2"),
    ],
)
def test_a_pin_is_respected(name: str, pin: str, mesh: str) -> None:
    plan = planned(name, mesh, "cpu-gloo", (pin,)).plan
    pattern, _, text = pin.partition("=")
    layout = parse_layout(text, plan.mesh)
    entries: dict[str, Layout | None] = {e.name: e.layout for e in (*plan.parameters, *plan.inputs, *plan.outputs)}
    entries |= {e.name: e.outputs[0] for e in plan.operators}
    pinned = [name for name in entries if name == pattern.replace("*", "0")]
    assert pinned and all(entries[name] == layout for name in pinned)
    assert plan.pins == (pin,)


@pytest.mark.parametrize("pin", ["tokens=dp:S(2)", "tokens=dp:P(sum)", "layers.0.attention/attention=dp:S(3)"])
def test_an_impossible_pin_lists_what_is_possible(pin: str) -> None:
    with pytest.raises(ConstraintError, match=r"cannot hold: on the mesh dp=2, .* can have dp:R; dp:S\(0\)"):
        formulated(graph_of("llama"), "dp=2", "cpu-gloo", (pin,))


def test_two_pins_that_contradict_each_other_cannot_hold() -> None:
    with pytest.raises(ConstraintError, match="contradicts the pin"):
        formulated(graph_of("llama"), "dp=2", "cpu-gloo", ("tokens=dp:S(0)", "tok*=dp:R"))


@pytest.mark.parametrize(
    ("name", "count", "mesh", "hardware", "pins"),
    [
        pytest.param("llama", 2, "dp=2", "slow", ("tokens=dp:S(0)",), marks=pytest.mark.thorough),
        ("llama", 3, "dp=2", "slow", ()),
        ("gpt2", 2, "dp=2,tp=2", "slow", ("tokens=dp:S(0)",)),
        ("gpt2", 3, "dp=2", "slow", ()),
        ("gpt2", 2, "dp=2,tp=2", "dgx-h100", ("tokens=dp:S(0)", "h.*.mlp.c_fc.weight=tp:S(0)")),
    ],
)
def test_tying_identical_layers_costs_nothing(name, count, mesh, hardware, pins) -> None:
    graph = layers(name, count)
    tied = formulated(graph, mesh, hardware, pins)
    untied = formulated(graph, mesh, hardware, pins, tie_layers=False)
    assert tied.problem.ties and not untied.problem.ties
    with_ties, without = solve(tied.problem).cost, solve(untied.problem).cost
    assert with_ties is not None and without is not None and with_ties >= without
    assert with_ties == without
