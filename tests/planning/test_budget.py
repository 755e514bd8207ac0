"""Plans under a memory budget: they fit, cost no less under less, and say why where nothing fits."""

from __future__ import annotations

import warnings
from contextlib import suppress
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autoshard
from autoshard.capture import capture
from autoshard.constraints import Constraints, gather_constraints
from autoshard.constraints.baselines import baseline
from autoshard.errors import BudgetError, InfeasibleError
from autoshard.mesh import Mesh
from autoshard.planning import Formulation, MemoryLimit, NothingFitsError, Planner, timeline_of
from autoshard.planning.budget import GAP, Found, SolverOptions, plan_within_budget
from autoshard.planning.ladder import Hints, on_any_schedule
from autoshard.plans import ShardingPlan, dump_plan
from autoshard.plans.units import format_bytes, format_seconds, parse_bytes
from cost_models import load_profile, optimizer_policy

from ..capture.dropless import example as dropless
from ..distributed import cases
from ..lowering.test_dropless import InLayers
from ..models import Blocks
from ..plans_of import profile_of

PINS = {"mlp": ("x=dp:S(0)", "target=dp:S(0)"), "deep": ("x=dp:S(0)",)}


class Deep(nn.Module):
    """Wide layers on few rows: nearly all memory is parameters."""

    def __init__(self, layers: int = 4, width: int = 64) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).relu()
        return x.square().mean()


def example(name: str) -> tuple[nn.Module, tuple[Tensor, ...]]:
    if name != "deep":
        return cases.make(name)
    torch.manual_seed(0)
    return Deep(), (torch.randn(8, 64),)


def plan(name: str, mesh: str = "dp=2,tp=2", **options: Any) -> ShardingPlan:
    model, args = example(name)
    hardware = profile_of("cpu-gloo" if name == "deep" else "slow")  # where "deep" without a budget is replicated
    options = {"hardware": hardware, "pins": PINS.get(name, ()), "time_limit_s": 20.0} | options
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # not proven optimal
        return autoshard.plan(model, args, mesh=mesh, **options)


@cache
def free_peak(name: str, mesh: str = "dp=2,tp=2", optimizer: str = "adamw") -> int:
    found = plan(name, mesh, optimizer=optimizer).memory
    assert found is not None and found.budget_bytes is None
    return found.peak.size_bytes


@pytest.mark.parametrize(
    ("name", "mesh", "optimizer", "shares"),
    [
        ("mlp", "dp=2,tp=2", "none", (1.0, 0.99)),
        pytest.param("mlp", "dp=2,tp=2", "none", (1.0, 0.99, 0.9), marks=pytest.mark.thorough),
        ("deep", "dp=4", "adamw", (1.0, 0.7, 0.4)),
    ],
)
def test_plans_fit_their_budget_exactly_counted_and_cost_no_less_under_less(
    name: str, mesh: str, optimizer: str, shares: tuple[float, ...]
) -> None:
    graph = capture(*example(name))
    costs = []
    for share in shares:
        budget = int(free_peak(name, mesh, optimizer) * share)
        found = plan(name, mesh, memory=budget, optimizer=optimizer)
        assert found.memory is not None and found.memory.budget_bytes == budget
        again = timeline_of(graph, found, optimizer_policy(optimizer))
        assert found.memory.peak == again.peak and again.peak.size_bytes <= budget
        assert found.solver.bound_ns <= found.solver.cost_ns
        assert found.solver.cost_ns == pytest.approx(found.step_s * 1e9, abs=len(found.operators) + 50)
        costs.append(found.solver.cost_ns)
    assert costs == sorted(costs)
    assert costs[0] == plan(name, mesh, optimizer=optimizer).solver.cost_ns < costs[-1]


def test_a_budget_that_does_not_bind_changes_nothing_but_the_line_that_names_it() -> None:
    free, loose = plan("mlp"), plan("mlp", memory="80GiB")
    assert free.memory is not None and loose.memory is not None
    assert loose.memory.budget_bytes == 80 << 30
    assert loose.redistributions == free.redistributions and loose.operators == free.operators
    assert loose.solver == free.solver and free.solver.status == "optimal"


def test_with_memory_to_spare_gathered_parameters_are_kept_and_without_gathered_again() -> None:
    """Parameters pinned to shards must be gathered: for both phases together, or for each."""
    pins = (*PINS["deep"], "layers.*.weight=dp:S(0)", "layers.*/mm=dp:S(0)")
    names = {f"layers.{i}.weight" for i in range(4)} | {f"layers.{i}/t" for i in range(4)}

    def gathers(found: ShardingPlan) -> tuple[int, int]:
        moved = [r for r in found.redistributions if r.tensor in names and r.phase == "backward"]
        return sum(r.kept for r in moved), sum(any(c.kind == "all_gather" for c in r.collectives) for r in moved)

    rich = plan("deep", "dp=4", pins=pins, bucket=0)
    assert rich.memory is not None
    kept, again = gathers(rich)
    assert kept > 0 and again == 0
    poor = plan("deep", "dp=4", pins=pins, bucket=0, memory=int(rich.memory.peak.size_bytes * 0.75))
    assert poor.memory is not None and poor.memory.peak.size_bytes <= 0.75 * rich.memory.peak.size_bytes
    assert gathers(poor)[1] > 0
    assert poor.solver.cost_ns > rich.solver.cost_ns


def test_under_a_budget_two_runs_write_the_same_and_the_bound_is_one_under_the_budget() -> None:
    """The bound of the free plan is far below; without a clock in the way the same bytes come out."""
    budget = int(free_peak("deep", "dp=4") * 0.5)
    first, again = (plan("deep", "dp=4", memory=budget, time_limit_s=None) for _ in range(2))
    assert dump_plan(first) == dump_plan(again)
    free = plan("deep", "dp=4")
    assert free.solver.cost_ns < first.solver.bound_ns <= first.solver.cost_ns
    assert first.solver.gap <= 2 * GAP


def test_a_soft_limit_trades_time_for_bytes() -> None:
    budget = free_peak("deep", "dp=4") // 2
    costs, peaks = [], []
    for price in (0.0, 1e6, 1e12):
        found = plan("deep", "dp=4", memory=budget, memory_soft=price)
        assert found.memory is not None and found.memory.soft_ms_per_gib == price
        costs.append(found.step_s)
        peaks.append(found.memory.peak.size_bytes)
    assert costs == sorted(costs) and peaks == sorted(peaks, reverse=True)
    assert costs[0] == pytest.approx(plan("deep", "dp=4").step_s) and peaks[-1] < peaks[0]


@pytest.mark.parametrize("optimizer", [pytest.param("adamw", marks=pytest.mark.thorough), "adamw-8bit"])
def test_a_budget_below_the_parameters_names_the_smallest_that_works_and_that_one_works(optimizer: str) -> None:
    with pytest.raises(BudgetError) as caught:
        plan("mlp", optimizer=optimizer, memory=100, time_limit_s=5.0)
    said = str(caught.value)
    assert said.startswith("no plan fits 100 B per rank (100 bytes): the smallest budget found to work is ")
    assert "its fullest moment is in the " in said and "would free the most" in said
    assert said.count(" (parameter") + said.count(" (optimizer") + said.count(" (temporary") >= 1
    needed = int(said.partition("found to work is ")[2].partition("(")[2].partition(" bytes")[0])
    found = plan("mlp", optimizer=optimizer, memory=needed, time_limit_s=5.0)
    assert found.memory is not None and found.memory.peak.size_bytes <= needed
    with pytest.raises(BudgetError):
        plan("mlp", optimizer=optimizer, memory=needed // 2, time_limit_s=5.0)


def test_no_schedule_forgets_what_the_plan_without_a_budget_holds() -> None:
    """The budget that is named as one that works is never above that."""
    planner = Planner.of_model(*example("deep"), None, "dp=2,tp=2", profile_of("slow"))
    free = planner.fitted(planner.formulate(Constraints()))
    assert free.memory is not None
    known: list[int | None] = []

    def search(planner: Planner, program: Formulation, hints: Hints) -> ShardingPlan:
        known.append(hints.leanest and hints.leanest.peak_bytes)
        options = SolverOptions(leanest=hints.leanest, explains=False, is_thorough=False)
        return plan_within_budget(program, planner.limit, options, planner.write)

    short = planner.having(limit=MemoryLimit(budget_bytes=1000))
    with pytest.raises(NothingFitsError) as caught:
        on_any_schedule(short, short.formulate(Constraints()), search, asks_experts=False)
    assert len(known) > 1 and known == [None, *[free.memory.peak.size_bytes] * (len(known) - 1)]
    assert caught.value.least_bytes <= free.memory.peak.size_bytes


@pytest.mark.parametrize("is_settled", [True, False])
def test_no_other_schedule_is_looked_at_where_the_answer_of_the_program_fits_on_the_first(is_settled: bool) -> None:
    """Its gap, far above what is good here, is the solver's, and would be there on each of them."""
    planner = Planner.of_model(*example("deep"), None, "dp=2,tp=2", profile_of("slow"))
    planner = planner.having(limit=MemoryLimit(budget_bytes=free_peak("deep", "dp=2,tp=2")))
    looked = 0

    def search(planner: Planner, program: Formulation, hints: Hints) -> ShardingPlan:
        nonlocal looked
        looked += 1
        found = plan_within_budget(program, planner.limit, SolverOptions(), planner.write)
        if is_settled:
            hints.settle()
        return replace(found, solver=found.solver.having(found.solver.cost_ns, found.solver.cost_ns // 2))

    on_any_schedule(planner, planner.formulate(Constraints()), search, asks_experts=False)
    assert looked == 1 if is_settled else looked > 1


@pytest.mark.parametrize("over", [0, 1])
def test_an_answer_of_the_program_that_fits_settles_the_schedule(monkeypatch: pytest.MonkeyPatch, over: int) -> None:
    """Here all but the cheapest plan holds so much more than the budget."""
    planner = Planner.of_model(*example("deep"), None, "dp=4", profile_of("slow"))
    budget, asked, settled = free_peak("deep", "dp=4") // 2, list[Found](), list[bool]()

    def peak_bytes(found: Found) -> int:
        asked.append(found)
        return budget + (1 if found is asked[0] else over)

    monkeypatch.setattr(Found, "peak_bytes", property(peak_bytes))
    options = SolverOptions(settle=lambda: settled.append(True), explains=False, is_thorough=False)
    with suppress(NothingFitsError):
        plan_within_budget(planner.formulate(Constraints()), MemoryLimit(budget_bytes=budget), options, planner.write)
    assert bool(settled) == (over == 0)


@pytest.mark.parametrize("has_time", [True, False])
def test_where_a_time_limit_ends_a_search_far_from_its_bound_baselines_are_looked_at(has_time: bool) -> None:
    """Without a budget, too. A search that proves what it found needs none."""
    limit = {} if has_time else {"time_limit_s": 4.0}
    planner = Planner.of_model(*example("deep"), None, "dp=2,tp=2", profile_of("slow"), **limit)
    program = planner.formulate(Constraints())
    best = planner.fitted(program)

    def search(planner: Planner, program: Formulation, hints: Hints) -> ShardingPlan:
        cost = best.solver.cost_ns * (1 if has_time else 100)
        return replace(best, solver=best.solver.having(cost, best.solver.bound_ns))

    found = on_any_schedule(planner, program, search, asks_experts=True)
    assert found.solver.bound_ns == best.solver.bound_ns
    assert best.solver.cost_ns <= found.solver.cost_ns < 2 * best.solver.cost_ns


def test_a_search_starts_from_a_baseline_whose_cuts_its_program_offers() -> None:
    """Of experts that route tokens ``sp`` cuts these along their sequences, which no other program does."""
    profile, found = profile_of("slow"), list[Found | None]()
    limit = MemoryLimit(budget_bytes=1 << 40)
    planner = Planner.of_model(InLayers(), dropless(), {}, "dp=2,tp=2", profile, limit=limit)

    def search(planner: Planner, program: Formulation, hints: Hints) -> ShardingPlan:
        found.append(hints.ask())
        raise InfeasibleError("enough")

    with pytest.raises(InfeasibleError, match="enough"):
        on_any_schedule(planner, planner.formulate(Constraints()), search, asks_experts=True)
    (start,) = found
    assert start is not None and not start.formulation.asked
    sp = planner.program(gather_constraints(("family dp=fsdp", "family tp=sp"), planner.mesh).values)
    assert sp.asked and planner.solution(sp).choices is not None


def test_pins_that_contradict_a_budget_are_named_with_what_they_cost() -> None:
    pins = (*PINS["deep"], "layers.*.weight=dp:R")
    budget = free_peak("deep", "dp=4") // 2
    assert plan("deep", "dp=4", memory=budget).memory is not None
    with pytest.raises(BudgetError, match=r"a plan without the constraint 'layers.\*.weight=dp:R' would free the most"):
        plan("deep", "dp=4", pins=pins, memory=budget)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"memory": "80 gibs"}, "cannot read the size '80 gibs'; write a number and a unit"),
        ({"memory": 0}, "give a size above zero"),
        ({"memory": "-5GiB"}, "cannot read the size '-5GiB': a size is above zero"),
        ({"memory_soft": 1.0}, "a soft memory limit needs a budget"),
        ({"memory": "1GiB", "memory_soft": -1.0}, "is no price"),
        ({"memory": "1GiB", "memory_soft": float("nan")}, "is no price"),
    ],
)
def test_what_is_no_budget_is_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(BudgetError, match=said):
        plan("mlp", **options)


def test_an_unknown_policy_is_refused_and_the_known_ones_listed() -> None:
    with pytest.raises(ValueError, match="unknown optimizer policy 'lion'; choose one of adamw"):
        plan("mlp", optimizer="lion")


def test_the_profile_has_a_budget() -> None:
    found = plan("mlp", hardware="dgx-h100", memory="profile").memory
    assert found is not None and found.budget_bytes == load_profile("dgx-h100").memory_bytes == 80e9


@pytest.mark.parametrize(
    ("text", "size"),
    [("80GiB", 80 << 30), ("80 gb", 80 * 10**9), ("1.5MiB", 3 << 19), ("1024", 1024), ("7B", 7), ("2TiB", 2 << 40)],
)
def test_sizes_are_read(text: str, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize("size", [1, 1023, 1 << 20, 80 << 30])
def test_what_is_written_for_people_is_read_back(size: int) -> None:
    assert parse_bytes(format_bytes(size)) == size


@pytest.mark.filterwarnings("ignore:the plan is not proven optimal")  # the bound is one for all schedules
def test_where_a_schedule_holds_too_much_one_that_holds_less_is_taken() -> None:
    """Eight layers of a MiB: all gradients are one bucket of 25 MiB, two of 4 MiB, and each alone in 1 MiB."""
    torch.manual_seed(0)
    model, args = Deep(layers=8, width=512), (torch.randn(8, 512),)
    options: dict[str, Any] = {"mesh": "dp=4", "hardware": profile_of("slow"), "constraints": "family dp=fsdp"}
    free = autoshard.plan(model, args, **options, optimizer="sgd", checkpointing="none")
    graph, policy, before = capture(model, args), optimizer_policy("sgd"), free
    for bucket, ahead in (("25MiB", False), ("4MiB", False), ("1MiB", False), ("0", True)):
        leaner = replace(free, bucket_bytes=parse_bytes(bucket), gathers_ahead=ahead)
        budget = timeline_of(graph, leaner, policy).peak.size_bytes
        found = autoshard.plan(model, args, **options, optimizer="sgd", checkpointing="none", memory=budget)
        assert found.memory is not None and found.memory.peak.size_bytes <= budget
        assert (found.bucket_bytes, found.gathers_ahead) == (leaner.bucket_bytes, leaner.gathers_ahead)
        assert found.solver.bound_ns <= free.solver.cost_ns <= before.solver.cost_ns <= found.solver.cost_ns
        before = found


@pytest.mark.filterwarnings("ignore:the plan is not proven optimal")
def test_every_bound_that_is_said_is_one_for_the_plan_that_was_asked_for() -> None:
    """Each tensor alone takes longer here, which is a bound of that schedule only."""
    torch.manual_seed(0)
    model, args = Deep(layers=8, width=512), (torch.randn(8, 512),)
    options: dict[str, Any] = {"mesh": "dp=4", "hardware": "cpu-gloo", "constraints": "family dp=fsdp"}
    options |= {"optimizer": "sgd", "checkpointing": "none", "cache": False}
    free = autoshard.plan(model, args, **options)
    alone = replace(free, bucket_bytes=0)
    budget = timeline_of(capture(model, args), alone, optimizer_policy("sgd")).peak.size_bytes
    said: list[str] = []
    found = autoshard.plan(model, args, **options, memory=budget, progress=said.append)
    assert found.bucket_bytes == 0 and found.solver.cost_ns > 1.2 * found.solver.bound_ns
    bounds = {each.split(",")[0] for text in said for each in text.split("at least ")[1:]}
    assert bounds == {format_seconds(found.solver.bound_ns / 1e9)}


@pytest.mark.parametrize("bucket", ["25MiB", 0])
def test_where_only_an_expert_has_a_plan_that_fits_it_is_that_one_however_short_the_search(bucket: str | int) -> None:
    """Fully sharded data parallel holds least here; the search alone finds nothing below 99,944 bytes."""
    torch.manual_seed(0)
    model, args = Blocks((32,)), (torch.randn(256, 8),)
    options: dict[str, Any] = {"mesh": "dp=2", "hardware": "cpu-gloo", "optimizer": "sgd", "bucket": bucket}
    schemes = baseline("fsdp", Mesh.parse("dp=2")).constraints(Mesh.parse("dp=2"))
    by_hand = autoshard.plan(model, args, **options, constraints=schemes, checkpointing="none")
    assert by_hand.memory is not None
    budget = by_hand.memory.peak.size_bytes
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # not proven optimal
        found = autoshard.plan(model, args, **options, memory=budget, time_limit_s=0.5)
    assert found.memory is not None and found.memory.peak.size_bytes <= budget
    assert found.solver.cost_ns <= by_hand.solver.cost_ns
    assert found.pins == ()


@pytest.mark.parametrize("is_known", [True, False])
def test_what_people_do_is_not_asked_for_where_parameters_alone_are_too_much(
    monkeypatch: pytest.MonkeyPatch, is_known: bool
) -> None:
    asked: list[object] = []
    monkeypatch.setattr("autoshard.planning.ladder._Ladder._first_expert", lambda ladder: asked.append(ladder))
    if not is_known:
        monkeypatch.setattr("autoshard.planning.budget.is_out_of_reach", lambda problem: False)
    with pytest.raises(NothingFitsError, match="no plan fits"):
        autoshard.plan(*example("deep"), mesh="dp=2,tp=2", hardware=profile_of("slow"), memory="1KiB", cache=False)
    assert bool(asked) != is_known
