"""What follows from other fields of a plan is worked out again: a file that contradicts itself is refused."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

import pytest

from autoshard.errors import PlanFileError
from autoshard.planning import OBJECTIVES
from autoshard.plans import ShardingPlan, dump_plan, parse_plan
from autoshard.plans.text.contradictions import COUNTED, Contradiction, check_record

from .synthetic import transformer_plan

PLAN = transformer_plan(4)
GOOD = dump_plan(PLAN)

# One value changed within what a plan records: what stands there, what is written, and what the error says.
WITHIN_THE_RECORD = {
    "cost": ("cost_ns: 2110196", "cost_ns: 1", "a cost of 1 ns is below a bound of 2110196 ns"),
    "bound": ("bound_ns: 2110196", "bound_ns: 2110197", "a cost of 2110196 ns is below a bound of 2110197 ns"),
    "lower bound": (
        "bound_ns: 2110196",
        "bound_ns: 1055098",
        "the gap is 0.0, but a cost of 2110196 ns and a bound of 1055098 ns give 0.5",
    ),
    "gap": ("gap: 0.0", "gap: 0.25", "result, gap: the gap is 0.25, but a cost of 2110196 ns"),
    "status": ("status: optimal", "status: feasible", "the status is feasible, but a cost of 2110196 ns and a bound"),
    "unknown status": ("status: optimal", "status: best", "status: found 'best'"),
    "compute": ("compute_s: 0.001892624", "compute_s: 0.0017", "but the operators of the execution take 0.001892624 s"),
    "an operator's time": ("{embedding: 0.0125}", "{embedding: 1.0125}", "compute_s is 0.001892624, but the operators"),
    "a collective's time": ("0.011 ms", "0.012 ms", "communication_s is 0.000175072000"),
    "communication": ("communication_s: 0.000175", "communication_s: 0.000275", "and nothing else is moved"),
    "time of the optimizer": (
        "optimizer_s: 4.25e-05",
        "optimizer_s: 5.25e-05",
        "communication_s and optimizer_s give 2120196 ns",
    ),
    "objective": ("objective: step-time", "objective: communication-time", "communication_s give 175072 ns"),
    "unknown objective": ("objective: step-time", "objective: speed", "unknown objective 'speed'; expected step-time"),
    "bytes": (
        "131072 bytes",
        "131073 bytes",
        "said to move 131073 bytes, but float32[256, 256] in the layout dp:P(sum)",
    ),
    "kind": ("all_reduce dp", "all_gather dp", "the collectives are all_gather over dp, but those of the path"),
    "axis": ("all_reduce dp", "all_reduce tp", "are all_reduce over tp, but those of the path dp:P(sum)"),
    "path": ("dp:P(sum) tp:S(0) => dp:R", "dp:S(1) tp:S(0) => dp:R", "are all_gather over dp"),
    "no such step": ("dp:P(sum) tp:S(0) => dp:R", "dp:R tp:S(0) => dp:P(sum)", "no step leads from dp:R tp:S(0) to"),
    "kept": (
        'backward, path: "dp:S(0) tp:P(sum) => dp:S(0) tp:R", collectives: [], kept',
        'backward, path: "dp:S(0) tp:P(sum) => dp:S(0) tp:S(1)", collectives: [], kept',
        "layers.0.attention.wo/mm is kept from the forward, where nothing takes it along the same path",
    ),
    "a dim too many": (
        "dp:P(sum) tp:S(0) => dp:R tp:S(0)",
        "dp:P(sum) tp:S(2) => dp:R tp:S(2)",
        "is float32[256, 256], which has not all the dims that its path dp:P(sum) tp:S(2) => dp:R tp:S(2) cuts",
    ),
    "one tensor twice": ("  freqs: {", "  tokens: {", "'tokens' is named 2 times among the parameters, buffers and"),
    "tenants": ("other_bytes: 1576960", "other_bytes: 5", "the tenants of the peak hold"),
    "timeline": ("wo/mm.1: 7356416", "wo/mm.1: 7356415", "fullest point has 7356415 bytes, the peak 7356416"),
    "kinds": ("activation: [0, 1048576]", "activation: [0, 1048577]", "add up to 7356417 bytes at layers.3.attention"),
    "a kind's points": (
        "activation: [0, 1048576]",
        "activation: [0, 1048576, 0]",
        "each of the 2 points of the timeline",
    ),
    "a kind of a tenant": (
        "activation: [0, 1048576]",
        "kept copy: [0, 1048576]",
        "the tenants of the peak hold 1048576 bytes more of the kind activation than are in use",
    ),
    "optimizer": ("optimizer: 3153920", "optimizer: 9153920", "are held whatever runs, more than the peak of 7356416"),
}

# A decision that is no longer the one that the record belongs to, as after an edit by hand.
DECISIONS = {
    "layout of a parameter": (
        'wq.weight: {layout: "dp:R tp:S(0)"',
        'wq.weight: {layout: "dp:R tp:R"',
        "is redistributed to dp:R tp:S(0) for layers.0.attention.wq.weight, which wants dp:R tp:R",
    ),
    "layout of a buffer": (
        'freqs: {layout: "dp:R tp:R"',
        'freqs: {layout: "dp:R tp:S(0)"',
        "are said to hold 1576960, 32768, 4096 bytes, but their layouts give the first rank 1576960, 16384, 4096",
    ),
    "shape": ("[512, 256]", "[512, 128]", "but their layouts give the first rank 1314816, 32768, 4096"),
    "strategy": (
        "dp:R tp:S(1) -> dp:S(0) tp:P(sum) x4",
        "dp:R tp:S(1) -> dp:S(0) tp:R x4",
        "layers.0.attention.wo/mm is redistributed from dp:S(0) tp:P(sum), but its layout is dp:S(0) tp:R",
    ),
    "no such tensor": (
        "tensor: layers.*.attention.wq/mm.1",
        "tensor: layers.*.attention.wq/mm.9",
        "no tensor of the plan",
    ),
    "no such consumer": ("for: [layers.*/add]", "for: [layers.*/mul]", "layers.0/mul, which the plan does not have"),
    "other consumer": ("for: [layers.*/add]", "for: [layers.*.attention/mul.2]", "which wants dp:S(0) tp:S(2)"),
    "peak": ("operator: layers.3.attention", "operator: layers.7.attention", "names 'layers.7.attention.wo/mm.1'"),
    "phase of the peak": ("peak: {phase: backward", "peak: {phase: forward", "no operator of the forward"),
    "timeline's operator": ("{embed/embedding: 4730880}", "{embed/view: 4730880}", "names 'embed/view'"),
    "gradients": ("gradients: 1576960", "gradients: 1576961", "gradients hold 1576961 bytes, more than the 1576960"),
    "budget": (
        "budget_bytes: 8388608",
        "budget_bytes: 7356415",
        "peak of 7356416 bytes is above the budget of 7356415",
    ),
    "margin": (
        "budget_bytes: 8388608",
        "budget_bytes: 8018493\n  allocator_margin: 0.09",
        "peak of 7356416 bytes, 8018494 with the allocator's margin, is above the budget of 8018493",
    ),
}


def error_of(text: str, edited: bool = False) -> str:
    with pytest.raises(PlanFileError) as caught:
        parse_plan(text, "plan.yaml", edited=edited)
    return str(caught.value)


def changed(old: str, new: str) -> str:
    assert GOOD.count(old) >= 1
    return GOOD.replace(old, new, 1)


@pytest.mark.parametrize("case", WITHIN_THE_RECORD)
def test_a_record_that_contradicts_itself_is_refused_with_both_values(case: str) -> None:
    old, new, said = WITHIN_THE_RECORD[case]
    for edited in (False, True):
        message = error_of(changed(old, new), edited)
        assert said in message and message.startswith("plan.yaml")


def test_an_operator_that_is_named_twice_is_refused() -> None:
    plan = parse_plan(GOOD)
    with pytest.raises(Contradiction, match="is named 2 times among the operators of both phases"):
        check_record(replace(plan, operators=(*plan.operators, plan.operators[0])))


@pytest.mark.parametrize("case", DECISIONS)
def test_a_decision_that_contradicts_its_record_is_refused_until_it_is_planned_again(case: str) -> None:
    old, new, said = DECISIONS[case]
    message = error_of(changed(old, new))
    assert said in message and re.match(r"plan\.yaml, line \d+: ", message) and "autoshard replan" in message
    parse_plan(changed(old, new), edited=True)


def test_a_misspelt_tensor_is_told_by_its_own_line() -> None:
    """And is not sent to replan, which takes names as they are."""
    text = changed("  layers.*.attention.wq.weight: {", "  layers.*.attention.wq.wieght: {")
    line = 1 + next(i for i, line in enumerate(text.splitlines()) if "wieght" in line)
    message = error_of(text)
    assert message.startswith(f"plan.yaml, line {line}: parameters, layers.*.attention.wq.wieght: no redistribution ")
    assert message.endswith("did you mean 'layers.0.attention.wq.weight'?")
    parse_plan(text, edited=True)


@pytest.mark.parametrize("number", re.findall(r"^  (\w+): \d", GOOD.partition("result:")[2], re.MULTILINE)[:5])
def test_no_number_of_the_result_can_be_changed_alone(number: str) -> None:
    found = re.search(rf"^  {number}: (.*)$", GOOD, re.MULTILINE)
    assert found is not None
    value = float(found[1])
    for other in (value * 1.001 + 1e-6, value / 2 - 1e-6 if value else 1.0, 0 if value else 1):
        text = f"{max(0, round(other))}" if number.endswith("_ns") else repr(abs(other))
        error_of(GOOD.replace(found[0], f"  {number}: {text}", 1))


@pytest.mark.parametrize(
    "change",
    [
        lambda plan: replace(plan, solver=replace(plan.solver, gap=0.5)),
        lambda plan: replace(plan, compute_s=1.0),
        lambda plan: replace(plan, redistributions=plan.redistributions[1:]),
        lambda plan: replace(plan, parameters=plan.parameters[1:]),
    ],
)
def test_a_plan_that_contradicts_itself_is_not_written(change: Callable[[ShardingPlan], ShardingPlan]) -> None:
    with pytest.raises(PlanFileError, match="the plan cannot be written: "):
        dump_plan(change(PLAN))


def test_objectives_are_those_that_plans_are_made_for() -> None:
    assert set(COUNTED) == set(OBJECTIVES)
