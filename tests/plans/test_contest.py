"""Plans beside each other: where they differ, and the table of a contest."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest

from autoshard.constraints.baselines import baselines
from autoshard.layout import parse_layout
from autoshard.mesh import Mesh
from autoshard.plans import Contender, Contest, ShardingPlan, contest_json, first_difference, summary_json
from autoshard.plans.views.show import console_for
from autoshard.plans.views.show_contest import show_contest, verdict

from .synthetic import costed, transformer_plan

PLAN = transformer_plan(2)


def _with(plan: ShardingPlan, section: str, index: int, text: str) -> ShardingPlan:
    entries = list(getattr(plan, section))
    entries[index] = replace(entries[index], layout=parse_layout(text, plan.mesh))
    return replace(plan, **{section: tuple(entries)})


def test_a_plan_does_not_differ_from_itself() -> None:
    assert first_difference(PLAN, PLAN) is None
    assert first_difference(PLAN, replace(PLAN, compute_s=PLAN.compute_s * 2)) is None


def test_parameters_are_compared_before_inputs_and_inputs_before_operators() -> None:
    other = PLAN
    for section in ("operators", "inputs", "parameters"):
        if section == "operators":
            first = other.operators[0]
            other = replace(other, operators=(replace(first, inputs=()), *other.operators[1:]))
        else:
            whole = "dp:R tp:R"
            index = next(i for i, e in enumerate(getattr(PLAN, section)) if not e.layout.is_replicated)
            other = _with(other, section, index, whole)
        found = first_difference(PLAN, other)
        assert found is not None and (found.section, found.differing) == (section, 1)
        assert found.total == len(getattr(PLAN, section)) and found.ours != found.theirs
        assert str(found).endswith(f"1 of {found.total} {section}")


def test_an_operator_that_one_plan_alone_computes_again_is_a_difference() -> None:
    extra = replace(PLAN.operators[0], name="layers.0/again.mul", phase="backward")
    other = replace(PLAN, operators=(*PLAN.operators, extra))
    for ours, theirs in ((PLAN, other), (other, PLAN)):
        found = first_difference(ours, theirs)
        assert found is not None and (found.name, found.differing) == ("layers.0/again.mul", 1)
        assert (found.ours == "-", found.theirs == "-") == (ours is PLAN, theirs is PLAN)
        assert found.total == len(other.operators)


def test_file_names_are_of_one_folder_and_of_one_contender_each() -> None:
    families = baselines(Mesh.parse("dp=2,tp=2"))
    names = [each.name for base in families for each in (base, *base.recomputing())]
    files = {Contender(name, "", None).file_name for name in names}
    assert len(files) == len(names) == 3 * len(families) and not any("/" in file for file in files)


def test_the_verdict_says_of_which_plans_the_bound_is_one() -> None:
    contest = Contest(Contender("optimum", "", PLAN, "plans of some kind"), (Contender("a", "first", PLAN),))
    assert verdict(contest).endswith("Its bound is one for plans of some kind.")
    assert "Its bound" not in verdict(replace(contest, optimum=Contender("optimum", "", PLAN)))


def test_the_ratio_is_that_of_the_fastest_baseline() -> None:
    slow = costed(replace(PLAN, compute_s=PLAN.compute_s + 3 * PLAN.step_s))
    contest = Contest(
        Contender("optimum", "", PLAN), (Contender("a", "first", slow), Contender("b", "second", None, "because"))
    )
    assert contest.best == contest.baselines[0] and contest.ratio == pytest.approx(0.25, rel=1e-6)
    assert "75.0% less than the best baseline, a: first" in verdict(contest)
    alone = replace(contest, baselines=contest.baselines[1:])
    assert alone.best is None and alone.ratio is None and "alone" in verdict(alone)


def test_the_table_has_a_line_for_each_contender_and_a_reason_where_there_is_no_plan() -> None:
    index = next(i for i, e in enumerate(PLAN.parameters) if not e.layout.is_replicated)
    other = _with(PLAN, "parameters", index, "dp:R tp:R")
    contest = Contest(
        Contender("optimum", "", PLAN),
        (Contender("ddp", "data [bold]", other), Contender("ep", "", None, "no experts")),
    )
    stream = io.StringIO()
    show_contest(contest, console_for(stream))
    lines = stream.getvalue().splitlines()
    assert [line.split()[0] for line in lines[2:5]] == ["optimum", "ddp", "ep"]
    assert PLAN.parameters[index].name in lines[3] and "no experts" in lines[4]
    assert "data [bold]" in lines[-1]


def test_the_json_holds_the_summaries() -> None:
    contest = Contest(Contender("optimum", "o", PLAN), (Contender("ep", "e", None, "no experts"),))
    found = contest_json(contest)
    assert found["contenders"] == [
        {"name": "optimum", "title": "o", "plan": summary_json(PLAN), "reason": "", "first_difference": None},
        {"name": "ep", "title": "e", "plan": None, "reason": "no experts"},
    ]
    assert (found["autoshard_contest"], found["ratio"], found["best"]) == (1, None, None)
