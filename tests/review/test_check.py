"""Whether a plan is still good."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from autoshard.api import plan
from autoshard.capture import capture
from autoshard.layout import replicated
from autoshard.plans import Redistribution, ShardingPlan, SolverOutcome, dump_plan, parse_plan
from autoshard.review import Review, check
from autoshard.review.model_changes import CONNECTIONS, model_changes
from autoshard.review.review_text import review_json, review_text

from ..models import llama, mlp
from ..plans.synthetic import costed
from ..plans_of import profile_of
from .subjects import example, plan_of

PINNED = ("x=dp:S(0)",)


def checked(made: ShardingPlan, name: str = "mlp", hardware: str = "slow", **options: object) -> Review:
    return check(made, *example(name), hardware=profile_of(hardware), **options)  # type: ignore[arg-type]


def failing(review: Review) -> list[str]:
    return [finding.part for finding in review.findings if not finding.fits]


@pytest.mark.parametrize("name", ["mlp", "llama of 3", "gpt2"])
def test_a_plan_just_made_is_good_and_optimal(name: str) -> None:
    found = checked(plan_of(name), name)
    assert found.fits and found.distance == 0.0
    assert found.recorded_ns == found.now_ns == found.best_ns == found.bound_ns
    assert review_text(found, "plan.yaml").endswith("plan.yaml is good\n")


def test_a_plan_of_a_worse_scheme_is_good_only_within_what_is_allowed() -> None:
    """The scheme is no constraint of the file any more: the plan is priced, and the best is another."""
    scheme = replace(plan_of("mlp", "dp=2", constraints=("baseline ddp",)), pins=())
    best = plan_of("mlp", "dp=2").solver.cost_ns
    scheme = replace(scheme, solver=SolverOutcome.of(scheme.solver.cost_ns, best, "free"))
    found = checked(scheme)
    share = scheme.solver.cost_ns / best - 1
    assert found.distance == pytest.approx(share) and share > 0.01
    assert failing(found) == ["optimality"] and found.best_ns == best
    assert checked(scheme, within=share + 0.01).fits
    assert checked(plan_of("mlp", "dp=2", constraints=("baseline ddp",))).fits


def test_a_bound_that_a_better_plan_refutes_is_told() -> None:
    """The file still says optimal, as under the scheme."""
    scheme = replace(plan_of("mlp", "dp=2", constraints=("baseline ddp",)), pins=())
    found = checked(scheme, within=10.0)
    assert failing(found) == ["record"]
    assert f"no plan costs less than {scheme.solver.bound_ns} ns, but one of" in review_text(found, "plan.yaml")


def _slower(plan: ShardingPlan) -> ShardingPlan:
    run = tuple(replace(entry, predicted_ns=entry.predicted_ns + 1000) for entry in plan.execution)
    return costed(replace(plan, execution=run, compute_s=sum(entry.predicted_ns for entry in run) / 1e9))


def _leaner(plan: ShardingPlan) -> ShardingPlan:
    """Another course of memory that adds up."""
    assert plan.memory is not None and plan.memory.other_bytes > 1
    peak = replace(plan.memory.peak, size_bytes=plan.memory.peak.size_bytes - 1)
    points = tuple(replace(p, size_bytes=min(p.size_bytes, peak.size_bytes)) for p in plan.memory.timeline)
    less = plan.memory.other_bytes - 1
    return replace(plan, memory=replace(plan.memory, peak=peak, timeline=points, other_bytes=less, kinds=()))


def _narrower(plan: ShardingPlan) -> ShardingPlan:
    """Fewer bytes of results of operators, whose shapes the file does not say."""
    named = {e.name for e in (*plan.parameters, *plan.buffers, *plan.inputs, *plan.outputs)}

    def less(entry: Redistribution) -> Redistribution:
        sent = tuple(replace(c, size_bytes=c.size_bytes - 4) for c in entry.collectives)
        return entry if {entry.tensor, *entry.consumers} & named else replace(entry, collectives=sent)

    return replace(plan, redistributions=tuple(map(less, plan.redistributions)))


@pytest.mark.parametrize(
    ("change", "hardware", "part", "said"),
    [
        (_slower, "slow", "record", "in ns: "),
        (_leaner, "slow", "record", "peak of memory: "),
        (_narrower, "slow", "decisions", "not those that its layouts need"),
        (_narrower, "cpu-gloo", "decisions", "does not communicate as planned: the plan says "),
    ],
)
def test_numbers_that_the_layouts_do_not_come_to_are_told(
    change: Callable[[ShardingPlan], ShardingPlan], hardware: str, part: str, said: str
) -> None:
    """Each is a file that contradicts nothing within itself."""
    made = plan_of("llama of 3", "dp=2")
    changed = parse_plan(dump_plan(change(made)))
    assert changed != made
    found = checked(changed, "llama of 3", hardware=hardware, within=10.0)
    assert part in failing(found) and said in review_text(found, "plan.yaml")


def test_a_plan_from_before_the_optimizers_step_had_a_price_is_priced_again() -> None:
    """Its cost, its times and its bound are of other prices, and no lies."""
    made = plan_of("mlp", constraints=PINNED)
    old = costed(replace(made, optimizer_s=None))
    assert old.solver.cost_ns < made.solver.cost_ns
    found = checked(old)
    assert found.fits and found.now_ns == found.best_ns == made.solver.cost_ns
    assert failing(checked(costed(replace(made, optimizer_s=0.0)))) == ["record"]


def test_another_profile_prices_the_plan_again() -> None:
    found = checked(plan_of("mlp", constraints=PINNED), hardware="cpu-gloo")
    assert failing(found) == ["optimality"]
    assert found.now_ns is not None and found.best_ns is not None and found.now_ns > found.best_ns
    assert any("priced again for cpu-gloo" in finding.said for finding in found.findings)
    assert found.best_ns == plan_of("mlp", hardware="cpu-gloo", constraints=PINNED).solver.cost_ns


def test_a_budget_is_compared_with_the_peak() -> None:
    made = plan_of("mlp", constraints=PINNED)
    (memory,) = [f for f in checked(made).findings if f.part == "memory"]
    assert memory.fits and "there is no budget" in memory.said
    assert failing(checked(made, memory_bytes=1500)) == ["memory"]
    assert checked(made, memory_bytes=1 << 20).fits


def test_a_plan_made_under_a_budget_is_good_under_it() -> None:
    """Whatever it copies again in the backward to save memory is priced as such. With SGD: the price of
    AdamW's step alone makes the plan the leanest there is.
    """
    model, args = example("mlp of 8")
    # without a schedule, whose prices would leave the bound below what fits
    options: dict[str, Any] = {"mesh": "dp=2,tp=2", "hardware": profile_of("slow"), "optimizer": "sgd", "bucket": 0}
    free = plan(model, args, **options)
    assert free.memory is not None
    peak = free.memory.peak.size_bytes
    tight = plan(model, args, **options, memory=peak - peak // 20)
    assert tight.solver.status == "optimal"
    found = checked(tight, "mlp of 8")
    assert found.now_ns == tight.solver.cost_ns and failing(found) == []
    assert failing(checked(free, "mlp of 8", memory_bytes=peak - 1)) == ["memory"]
    hopeless = checked(free, "mlp of 8", memory_bytes=10)
    assert failing(hopeless) == ["memory", "optimality"] and hopeless.best_ns is None
    assert "the smallest budget found to work is" in hopeless.findings[-1].said


def test_a_mesh_that_differs_is_told_and_nothing_is_priced() -> None:
    found = checked(plan_of("mlp", constraints=PINNED), mesh="dp=4")
    assert failing(found) == ["mesh"] and found.now_ns is None and found.distance is None
    assert checked(plan_of("mlp", constraints=PINNED), mesh="dp=2,tp=2").fits


def test_a_file_edited_by_hand_is_not_good() -> None:
    made = plan_of("mlp", constraints=PINNED)
    whole = replace(made.parameters[-1], layout=made.parameters[-1].layout.replace(1, made.inputs[0].layout[1]))
    edited = replace(made, parameters=(*made.parameters[:-1], whole))
    assert "decisions" in failing(checked(edited))
    whole = replace(made.operators[0], inputs=(replicated(made.mesh),) * len(made.operators[0].inputs))
    impossible = replace(made, operators=(whole, *made.operators[1:]))
    found = checked(impossible)
    assert failing(found) == ["decisions"] and found.now_ns is None
    assert "autoshard replan" in review_text(found, "plan.yaml")


def test_decisions_that_break_the_constraints_of_the_file_are_told() -> None:
    made = replace(plan_of("mlp", constraints=PINNED), pins=("x=dp:R",))
    found = checked(made)
    assert failing(found) == ["decisions"] and "the plan gives x dp:S(0) tp:R" in found.findings[-1].said


def test_what_changed_in_the_model_is_told_by_module_path() -> None:
    made = plan_of("llama of 3")
    model, args = llama(n_layers=4, d_ffn=16, batch=8)
    changes = [str(change) for change in model_changes(made, capture(model, args))]
    assert "changed parameter layers.{0-2}.feed_forward.w1.weight (3): float32[20, 24] -> float32[16, 24]" in changes
    assert "added parameter layers.3.attention.wq.weight: float32[24, 24]" in changes
    assert "changed input tokens: int64[4, 6] -> int64[8, 6]" in changes
    assert any(c.startswith("added operators of layers.3.attention.wq: ") for c in changes)
    fewer = [str(c) for c in model_changes(made, capture(*llama(n_layers=2)))]
    assert any(c.startswith("removed operators of layers.2.attention") for c in fewer)
    assert any(c.startswith("removed parameter layers.2.") for c in fewer)


def test_the_model_that_the_plan_was_made_for_has_no_changes() -> None:
    made = plan_of("mlp", constraints=PINNED)
    assert model_changes(made, capture(*mlp())) == ()
    other = replace(made, fingerprint="sha256:0")
    found = checked(other)
    assert failing(found) == ["model"] and found.findings[0].details == (CONNECTIONS,)


def test_the_findings_are_values_for_scripts() -> None:
    made = plan_of("mlp", constraints=PINNED)
    found = review_json(check(made, *mlp(hidden=16), hardware=profile_of("slow")))
    assert found["autoshard_check"] == 1 and found["fits"] is False and found["now_ns"] is None
    assert found["recorded_ns"] == made.solver.cost_ns
    assert found["findings"][0]["details"][0].startswith("changed parameter down.weight")


@pytest.mark.thorough
def test_a_plan_of_untied_layers_is_priced_as_it_is() -> None:
    model, args = example("llama of 2")
    made = plan(model, args, mesh="dp=2", hardware=profile_of("slow"), tie_layers=False)
    found = check(made, *example("llama of 2"), hardware=profile_of("slow"))
    assert found.fits and found.now_ns == made.solver.cost_ns
