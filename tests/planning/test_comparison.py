"""The optimum is never worse than what people choose by hand."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import autoshard
from autoshard.constraints.baselines import baseline
from autoshard.errors import BudgetError, ConstraintError
from autoshard.mesh import Mesh
from autoshard.planning import Planner
from autoshard.planning.comparison import compare
from autoshard.plans import Contest, ShardingPlan, contest_json, dump_plan, first_difference

from ..models import EXAMPLES, Block, Example, blocks


@pytest.mark.filterwarnings("ignore::autoshard.errors.StrategyWarning")
@pytest.mark.parametrize(
    ("model", "mesh", "hardware"),
    [
        ("llama", "dp=2,tp=2", "cpu-gloo"),
        ("gpt2", "dp=4", "dgx-h100"),
        pytest.param("vit", "tp=4", "cpu-gloo", marks=pytest.mark.thorough),
        pytest.param("vit", "dp=2,tp=2", "dgx-h100", marks=pytest.mark.thorough),
        pytest.param("routed", "dp=2,ep=2", "dgx-h100", marks=pytest.mark.thorough),
    ],
)
def test_the_optimum_costs_no_more_than_any_baseline(model: str, mesh: str, hardware: str) -> None:
    contest = compare(*EXAMPLES[model](), mesh=mesh, hardware=hardware)
    optimum = contest.optimum.plan
    assert optimum is not None and optimum.solver.status == "optimal"
    with_plan = [c.plan for c in contest.baselines if c.plan]
    assert len(with_plan) >= 2
    assert not any("/" in c.name for c in contest.baselines)  # nobody computes again what fits
    costs = [plan.solver.cost_ns for plan in with_plan]
    assert costs == sorted(costs) and optimum.solver.cost_ns <= costs[0]
    assert contest.ratio is not None and contest.ratio <= 1 + 1e-6
    assert all(c.reason for c in contest.baselines if not c.plan)
    for plan in with_plan:  # another cost is another plan, and the other way round no plan differs from itself
        assert (first_difference(optimum, plan) is None) <= (plan.solver.cost_ns == optimum.solver.cost_ns)
        assert first_difference(plan, plan) is None


@pytest.mark.thorough
def test_constraints_hold_for_all_contenders() -> None:
    contest = compare(*EXAMPLES["llama"](), mesh="dp=2,tp=2", constraints=["only tok_embeddings.weight tp:S(1)"])
    for contender in (contest.optimum, *contest.baselines):
        if contender.plan:
            embedding = next(e for e in contender.plan.parameters if e.name == "tok_embeddings.weight")
            assert str(embedding.layout[1]) == "S(1)"
    ddp = next(c for c in contest.baselines if c.name == "ddp")
    assert ddp.plan is None and "contradicts" in ddp.reason


def test_a_constraint_that_names_nothing_is_an_error_and_no_reason() -> None:
    with pytest.raises(ConstraintError, match="nearest name"):
        compare(*EXAMPLES["mlp"](), mesh="dp=2", constraints=["only nothing dp:R"])


def test_the_json_of_a_contest_says_who_wins_and_where_they_differ() -> None:
    found = contest_json(compare(*EXAMPLES["llama"](), mesh="dp=4", hardware="dgx-h100"))
    contenders = {c["name"]: c for c in found["contenders"]}  # type: ignore[attr-defined]
    assert next(iter(contenders)) == "optimum" and contenders["optimum"]["first_difference"] is None
    assert found["best"] in contenders and found["ratio"] <= 1 + 1e-6  # type: ignore[operator]
    assert contenders["ep"]["plan"] is None and "three dims" in contenders["ep"]["reason"]
    assert contenders["fsdp"]["first_difference"]["section"] == "parameters"


BUDGET, PLAIN_BUDGET = 180_000, 120_000
"""Bytes that no baseline of :func:`blocks` and of :func:`plain` on two ranks fits without recomputation."""


class Plain(Block):
    """A layer of fewer operators, so that all can be left free."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(x)))


def plain() -> Example:
    model, args = blocks(256)
    model.layers = nn.ModuleList(map(Plain, (32, 48)))
    return model, args


def short_of_memory(example: Example | None = None, memory: int = BUDGET, **options: Any) -> Contest:
    example = example or blocks(256)
    return compare(*example, mesh="dp=2", hardware="cpu-gloo", optimizer="sgd", memory=memory, **options)


def planned(constraints: Sequence[str], example: Example | None = None, **options: Any) -> ShardingPlan:
    options = {"mesh": "dp=2", "hardware": "cpu-gloo", "optimizer": "sgd", "memory": BUDGET} | options
    options = {"checkpointing": "as-marked"} | options  # what is computed again is what constraints say
    return autoshard.plan(*(example or blocks(256)), constraints=constraints, name="Blocks", **options)


def _texts(name: str) -> tuple[str, ...]:
    mesh = Mesh.parse("dp=2")
    return baseline(name, mesh).constraints(mesh)


@pytest.mark.parametrize(
    ("checkpointing", "example", "budget"),
    [
        pytest.param("free", plain, PLAIN_BUDGET, marks=pytest.mark.thorough),
        ("as-marked", lambda: blocks(256), BUDGET),
    ],
)
@pytest.mark.thorough
def test_the_optimum_costs_no_more_than_baselines_that_compute_layers_again(
    checkpointing: str, example: Callable[[], Example], budget: int
) -> None:
    contest = short_of_memory(example(), budget, checkpointing=checkpointing)
    optimum, plans = contest.optimum.plan, {c.name: c.plan for c in contest.baselines if c.plan}
    reasons = {c.name: c.reason for c in contest.baselines if not c.plan}
    hopeless = {name for name, reason in reasons.items() if "not searched" in reason}
    assert optimum is not None and contest.best is not None and contest.best.plan is not None
    for name in ("ddp/full", "fsdp/full", "tp/full"):
        plan = planned(_texts(name), example(), memory=budget)
        if hopeless & {name, name.partition("/")[0]}:  # nor is it with recomputation
            assert name not in plans and plan.solver.cost_ns >= contest.best.plan.solver.cost_ns
        else:
            assert dump_plan(plan) == dump_plan(plans[name])
    for plan in (optimum, *plans.values()):
        assert plan.memory is not None and plan.memory.peak.size_bytes <= budget
        assert optimum.solver.bound_ns <= optimum.solver.cost_ns <= plan.solver.cost_ns
    if checkpointing == "as-marked":  # of which none is as cheap: the optimum is one that computes layers again
        assert "recomputation full" in optimum.pins and "recomputation full" in contest.optimum.reason
        assert set(optimum.recomputed) == set(contest.best.plan.recomputed)
        assert dump_plan(optimum) == dump_plan(planned(["recomputation full"]))
    assert "no plan fits" in reasons["ddp"] and "no attention" in reasons["ddp/selective"]
    assert "ep/full" not in reasons  # a scheme that makes no sense makes none with recomputation either


@pytest.mark.parametrize("scheme", ["ddp", "fsdp", "tp"])
def test_full_recomputation_is_every_layer_checkpointed(scheme: str) -> None:
    by_name, by_hand = planned(_texts(f"{scheme}/full")), planned([f"family dp={scheme}", "checkpoint layers.*"])
    assert by_name.recomputed
    assert dump_plan(by_name).replace("recomputation full", "checkpoint layers.*") == dump_plan(by_hand)


def test_a_contender_has_the_plan_that_its_constraints_have() -> None:
    contest = compare(*blocks(256), mesh="dp=2", hardware="cpu-gloo", optimizer="sgd", memory=10 * BUDGET)
    plans = {c.name: c.plan for c in contest.baselines if c.plan}
    assert {"ddp", "fsdp", "tp"} <= set(plans)
    for name, plan in plans.items():
        assert dump_plan(plan) == dump_plan(planned(_texts(name), memory=10 * BUDGET))


def test_where_the_search_for_the_optimum_finds_nothing_the_best_baseline_is_it(monkeypatch: Any) -> None:
    fitted = Planner.fitted

    def failing(self: Planner, formulation: Any, start: Any = None, free: Any = None) -> Any:
        if not any(constraint.text.startswith("family") for constraint in formulation.constraints):
            raise BudgetError("nothing was found")
        return fitted(self, formulation, start, free)

    monkeypatch.setattr(Planner, "fitted", failing)
    contest = short_of_memory()
    optimum, best = contest.optimum.plan, contest.best
    assert optimum is not None and best is not None and best.plan is not None
    assert first_difference(optimum, best.plan) is None and optimum.pins == ("recomputation full",)
    assert (optimum.solver.status, optimum.solver.bound_ns) == ("feasible", 0)
