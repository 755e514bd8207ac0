"""Editing a plan file by hand and planning around the edit."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from dataclasses import replace

import pytest

from autoshard.errors import ConstraintError, InfeasibleError, PlanMismatchError
from autoshard.layout import format_layout, parse_layout
from autoshard.mesh import Mesh
from autoshard.planning import Planner, formulate
from autoshard.plans import ShardingPlan, dump_plan, parse_plan
from autoshard.plans.text.line_numbers import line_of_decision
from autoshard.review import Replanned, replan
from autoshard.review.decisions import choices_of, decisions_of
from autoshard.review.fewest_changes import cheapest_nearest, count_changes, with_fewest_changes
from autoshard.review.review_text import replanned_text
from cost_models import optimizer_policy
from solver import solve

from ..models import graph_of, mlp
from ..plans_of import profile_of
from .subjects import example, plan_of

PINNED = ("x=dp:S(0)",)
LAYOUTS = ["dp:R tp:R", "dp:S(0) tp:R", "dp:R tp:S(0)", "dp:S(0) tp:S(0)"]


def edited(plan: ShardingPlan, old: str, new: str) -> str:
    """The file with one line changed; ``old`` is a regular expression."""
    text, count = re.subn(old, new, dump_plan(plan))
    assert count == 1, f"{old} is there {count} times"
    return text


def replanned(text: str, name: str = "mlp", original: ShardingPlan | None = None) -> Replanned:
    return replan(
        parse_plan(text, edited=True),
        *example(name),
        text=text,
        source="plan.yaml",
        original=original,
        hardware=profile_of("slow"),
    )


def layout_of(plan: ShardingPlan, name: str) -> str:
    entries = {e.name: e.layout for e in (*plan.parameters, *plan.inputs, *plan.outputs)}
    return format_layout(entries[name], plan.mesh)


@pytest.mark.parametrize("name", ["up.weight", "up.bias", "down.weight", "down.bias", "x", "output.0"])
@pytest.mark.parametrize("which", range(3))
def test_an_edited_tensor_is_recognised_kept_and_planned_around(name: str, which: int) -> None:
    plan = plan_of("mlp of 8")
    present = layout_of(plan, name)
    layout = [other for other in LAYOUTS if other != present][which]
    made = replanned(
        edited(plan, rf'  {re.escape(name)}: {{layout: "[^"]*"', f'  {name}: {{layout: "{layout}"'), "mlp of 8"
    )
    assert [(edit.names, edit.before, edit.after) for edit in made.edits] == [((name,), layout_of(plan, name), layout)]
    assert layout_of(made.plan, name) == layout
    assert f"{name}={layout}" in made.plan.pins
    assert made.plan.solver.status == "optimal" and made.plan.solver.cost_ns >= plan.solver.cost_ns
    assert parse_plan(dump_plan(made.plan)) == made.plan


def test_an_edited_operator_is_held_in_what_was_edited() -> None:
    plan = plan_of("mlp", constraints=PINNED)
    entry = next(e for e in plan.operators if e.name == "down/bwd.mm.1")
    taken = format_layout(entry.inputs[0], plan.mesh)
    made = replanned(edited(plan, rf'down/bwd\.mm\.1: "{re.escape(taken)},', 'down/bwd.mm.1: "dp:S(0) tp:R,'))
    assert [edit.texts for edit in made.edits] == [("down/bwd.mm.1=dp:S(0) tp:R, * -> *",)]
    found = next(e for e in made.plan.operators if e.name == "down/bwd.mm.1")
    assert format_layout(found.inputs[0], plan.mesh) == "dp:S(0) tp:R" != taken


def test_an_edited_line_of_identical_layers_holds_them_all() -> None:
    plan = plan_of("llama of 3")
    before = layout_of(plan, "layers.0.attention.wq.weight")
    made = replanned(
        edited(
            plan,
            r'layers\.\*\.attention\.wq\.weight: {layout: "[^"]*"',
            'layers.*.attention.wq.weight: {layout: "dp:S(0) tp:R"',
        ),
        "llama of 3",
    )
    (edit,) = made.edits
    assert (edit.pattern, len(edit.names), edit.before) == ("layers.*.attention.wq.weight", 3, before)
    assert edit.texts == ("layers.*.attention.wq.weight=dp:S(0) tp:R",)
    assert {layout_of(made.plan, f"layers.{i}.attention.wq.weight") for i in range(3)} == {"dp:S(0) tp:R"}


def test_several_edits_are_kept_together() -> None:
    plan = plan_of("mlp", constraints=PINNED)
    text = edited(plan, r'  up\.bias: {layout: "[^"]*"', '  up.bias: {layout: "dp:R tp:R"')
    text, count = re.subn(r'  down\.bias: {layout: "[^"]*"', '  down.bias: {layout: "dp:R tp:R"', text)
    assert count == 1
    made = replanned(text)
    assert sorted(edit.pattern for edit in made.edits) == ["down.bias", "up.bias"]
    assert {layout_of(made.plan, "up.bias"), layout_of(made.plan, "down.bias")} == {"dp:R tp:R"}


def test_a_plan_that_was_not_edited_stays_as_it_is() -> None:
    plan = plan_of("mlp", constraints=PINNED)
    made = replanned(dump_plan(plan))
    assert (made.edits, made.replaced, made.others) == ((), (), 0)
    assert made.plan == plan


def test_a_replanned_plan_can_be_edited_again_and_the_later_word_counts() -> None:
    first = replanned(edited(plan_of("mlp"), r'  x: {layout: "[^"]*"', '  x: {layout: "dp:R tp:S(0)"'))
    again = replanned(edited(first.plan, r'  x: {layout: "[^"]*"', '  x: {layout: "dp:S(0) tp:R"'))
    assert again.replaced == ("x=dp:R tp:S(0)",) and again.plan.pins == ("x=dp:S(0) tp:R",)
    assert layout_of(again.plan, "x") == "dp:S(0) tp:R"


@pytest.mark.parametrize("edit", ["pin", "pin and layout", "rule"])
@pytest.mark.parametrize("given", [False, True])
def test_a_pin_that_was_added_is_kept(edit: str, given: bool) -> None:
    plan = plan_of("mlp", constraints=PINNED)
    pin = "only up.weight dp:R" if edit == "rule" else "up.weight=dp:R tp:R"
    text = dump_plan(plan).replace('  - "x=dp:S(0)"\n', f'  - "x=dp:S(0)"\n  - "{pin}"\n')
    if edit == "pin and layout":
        text = re.sub(r'  up\.weight: {layout: "[^"]*"', '  up.weight: {layout: "dp:R tp:R"', text)
    made = replanned(text, original=plan if given else None)
    assert made.added == (pin,) and made.plan.pins == (*PINNED, pin) and made.replaced == ()
    assert layout_of(made.plan, "up.weight").startswith("dp:R")
    assert f"kept the added pin {pin}\n" in replanned_text(made, plan)


def test_a_pin_that_was_removed_leaves_the_plan_free() -> None:
    plan = plan_of("mlp", constraints=("up.weight=dp:R tp:R",))
    made = replanned(dump_plan(replace(plan, pins=())))
    assert made.plan.solver.cost_ns < plan.solver.cost_ns and made.others
    assert "found no edit: other decisions are better under the pins and" in replanned_text(made, plan)


def test_an_original_at_hand_tells_the_edits_too() -> None:
    plan = plan_of("mlp", constraints=PINNED)
    text = edited(plan, r'  up\.weight: {layout: "[^"]*"', '  up.weight: {layout: "dp:R tp:R"')
    assert replanned(text, original=plan) == replanned(text)


def test_under_other_prices_the_original_must_be_given() -> None:
    plan = plan_of("mlp", constraints=PINNED)
    text = edited(plan, r'  up\.weight: {layout: "[^"]*"', '  up.weight: {layout: "dp:R tp:R"')
    with pytest.raises(PlanMismatchError, match="--original"):
        replan(parse_plan(text, edited=True), *example("mlp"), hardware=profile_of("cpu-gloo"))
    made = replan(parse_plan(text, edited=True), *example("mlp"), original=plan, hardware=profile_of("cpu-gloo"))
    assert layout_of(made.plan, "up.weight") == "dp:R tp:R" and made.plan.hardware == "cpu-gloo"


def test_an_edit_of_what_follows_from_the_layouts_is_refused() -> None:
    plan = plan_of("mlp", constraints=PINNED)
    lines = dump_plan(plan).splitlines(keepends=True)
    line = next(i for i, text in enumerate(lines) if text.startswith("  - {tensor:") and "kept: true" in text)
    count = len(plan.redistributions)
    text = "".join(lines[:line] + lines[line + 1 :]).replace(
        f"redistributions: {count}}}", f"redistributions: {count - 1}}}"
    )
    with pytest.raises(PlanMismatchError, match="Redistributions follow from the layouts"):
        replanned(text)


@pytest.mark.parametrize(
    ("old", "new", "error", "said"),
    [
        (
            r'down/addmm: "(.*) -> [^"]*"',
            r'down/addmm: "\1 -> dp:P(max) tp:R"',
            ConstraintError,
            "the pin 'down/addmm=dp:P(max) tp:R' cannot hold",
        ),
        (
            r'  x: {layout: "[^"]*"',
            '  x: {layout: "dp:R tp:R"',
            ConstraintError,
            "contradicts the constraint 'only x dp:S(0)'",
        ),
    ],
)
def test_an_edit_that_cannot_hold_is_an_error_with_its_line(
    old: str, new: str, error: type[Exception], said: str
) -> None:
    plan = plan_of("mlp", constraints=("only x dp:S(0)",))
    text = edited(plan, old, new)
    line = 1 + next(i for i, line in enumerate(text.splitlines()) if re.search(old, line))
    with pytest.raises(error) as found:
        replanned(text)
    assert said in str(found.value) and f"plan.yaml, line {line}" in str(found.value)


def test_edits_that_contradict_each_other_are_both_named() -> None:
    """The transpose of whole weights is whole; nothing makes addends of it."""
    plan = plan_of("mlp")
    text = edited(plan, r'  up\.weight: {layout: "[^"]*"', '  up.weight: {layout: "dp:R tp:R"')
    operators = tuple(
        replace(e, outputs=(parse_layout("dp:P(sum)", plan.mesh),), inputs=(parse_layout("dp:P(sum)", plan.mesh),))
        if e.name == "up/t"
        else e
        for e in plan.operators
    )
    made = replace(parse_plan(text, edited=True), operators=operators)
    with pytest.raises(InfeasibleError) as error:
        replan(made, *example("mlp"), original=plan, hardware=profile_of("slow"))
    assert "'up/t=dp:P(sum) tp:R -> dp:P(sum) tp:R' leaves none" in str(error.value)


def test_the_line_of_every_decision_is_found() -> None:
    """Of identical layers, which share their lines, the last one stands for all."""
    plan = plan_of("llama of 3")
    text = dump_plan(plan)
    lines = text.splitlines()
    entries = (*plan.parameters, *plan.inputs, *plan.outputs, *plan.operators)
    names = {re.sub(r"layers\.\d+", "layers", entry.name): entry.name for entry in entries}
    for name in names.values():
        line = line_of_decision(text, name)
        assert line is not None
        last = re.split(r"[./]", name)[-1]
        assert last in lines[line - 1] or "roles" in lines[line - 1]
    assert line_of_decision(text, "nothing") is None


def test_the_nearest_optimum_is_the_nearest_of_all() -> None:
    """Against every assignment of a small problem: none costs less, and none that costs as much changes fewer."""
    graph, mesh = graph_of("mlp"), Mesh.parse("dp=2")
    planner = Planner(graph, mesh, profile_of("slow"), "mlp", "")
    formulation = formulate(graph, mesh, profile_of("slow"), policy=planner.limit.policy)
    problem, solution = formulation.problem, solve(formulation.problem)

    def cost_of(choices: Sequence[int]) -> int | None:
        answer = formulation.routed(choices)
        return None if answer is None else answer[1]

    assert solution.choices is not None and solution.cost is not None
    free = [i for i, node in enumerate(problem.nodes) if 1 < len(node.costs) <= 3][:4]
    for wanted in itertools.product(*(range(len(problem.nodes[i].costs)) for i in free)):
        target = list(solution.choices)
        for i, choice in zip(free, wanted):
            target[i] = choice
        found = with_fewest_changes(planner, problem, solution, target)
        assert found.choices is not None and cost_of(found.choices) == solution.cost
        changes = count_changes(target, found.choices)
        again = cheapest_nearest(planner, formulation, target)
        assert again.choices is not None and cost_of(again.choices) == again.bound == solution.cost
        assert count_changes(target, again.choices) == changes
        some = [None if i in free[:2] else choice for i, choice in enumerate(target)]
        partly = cheapest_nearest(planner, formulation, some)
        assert partly.choices is not None and cost_of(partly.choices) == solution.cost
        assert count_changes(some, partly.choices) <= changes
        for others in itertools.product(*(range(len(problem.nodes[i].costs)) for i in free)):
            choices = list(solution.choices)
            for i, choice in zip(free, others):
                choices[i] = choice
            if cost_of(choices) == solution.cost:
                assert changes <= count_changes(target, choices)


def test_decisions_of_a_plan_are_the_choices_that_it_was_made_of() -> None:
    plan = plan_of("mlp", constraints=PINNED)
    policy, bucket = optimizer_policy("adamw"), plan.bucket_bytes
    formulation = formulate(graph_of("mlp"), plan.mesh, profile_of("slow"), policy=policy, bucket_bytes=bucket)
    choices = choices_of(decisions_of(plan, formulation), formulation)
    assert None not in choices
    answer = formulation.routed([c or 0 for c in choices])
    assert answer is not None and answer[1] == plan.solver.cost_ns


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        (r'  up\.weight: {layout: "[^"]*"', '  up.wieght: {layout: "dp:R tp:R"', "did you mean 'up.weight'?"),
        (r'  x: {layout: "[^"]*"', '  y: {layout: "dp:R tp:R"', "no input y; did you mean 'x'?"),
        (r"(  output\.0: .*)float32", r"\1int32", "output.0 is int32[6, 8] in the file, but float32[6, 8] in "),
        (r"(  x: .*shape: )\[6, 8\]", r"\1[6, 8, 1]", "the input x is float32[6, 8, 1] in the file, but float32[6, 8]"),
    ],
)  # fmt: skip
def test_what_is_the_models_is_no_edit_and_is_refused_with_its_line(old: str, new: str, said: str) -> None:
    plan = plan_of("mlp", constraints=PINNED)
    text = edited(plan, old, new)
    lines = zip(dump_plan(plan).splitlines(), text.splitlines())
    line = 1 + next(i for i, (before, after) in enumerate(lines) if before != after)
    with pytest.raises(PlanMismatchError, match=rf"^plan.yaml, line {line}: ") as error:
        replanned(text)
    assert said in str(error.value)


def test_a_plan_for_another_model_is_refused() -> None:
    plan = plan_of("mlp", constraints=PINNED)
    with pytest.raises(PlanMismatchError, match="another model"):
        replan(plan, *mlp(hidden=16), hardware=profile_of("slow"))
