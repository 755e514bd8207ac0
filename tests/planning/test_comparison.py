"""The optimum is never worse than what people choose by hand."""

from __future__ import annotations

import pytest

from autoshard.errors import ConstraintError
from autoshard.planning.comparison import compare
from autoshard.plans import contest_json, first_difference

from ..models import EXAMPLES


@pytest.mark.filterwarnings("ignore::autoshard.errors.StrategyWarning")
@pytest.mark.parametrize("hardware", ["dgx-h100", "cpu-gloo"])
@pytest.mark.parametrize(
    ("model", "mesh"),
    [("llama", "dp=2,tp=2"), ("gpt2", "dp=4"), ("vit", "tp=4"), ("vit", "dp=2,tp=2"), ("routed", "dp=2,ep=2")],
)
def test_the_optimum_costs_no_more_than_any_baseline(model: str, mesh: str, hardware: str) -> None:
    contest = compare(*EXAMPLES[model](), mesh=mesh, hardware=hardware)
    optimum = contest.optimum.plan
    assert optimum is not None and optimum.solver.status == "optimal"
    with_plan = [c.plan for c in contest.baselines if c.plan]
    assert len(with_plan) >= 2
    costs = [plan.solver.cost_ns for plan in with_plan]
    assert costs == sorted(costs) and optimum.solver.cost_ns <= costs[0]
    assert contest.ratio is not None and contest.ratio <= 1 + 1e-6
    assert all(c.reason for c in contest.baselines if not c.plan)
    for plan in with_plan:  # another cost is another plan, and the other way round no plan differs from itself
        assert (first_difference(optimum, plan) is None) <= (plan.solver.cost_ns == optimum.solver.cost_ns)
        assert first_difference(plan, plan) is None


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
