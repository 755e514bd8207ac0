"""A tied parameter goes by each of its names."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autoshard
from autoshard.errors import ConstraintError
from autoshard.layout import format_layout
from autoshard.plans import ShardingPlan, dump_plan, parse_plan
from autoshard.review import explain, replan

from ..plans_of import profile_of


class Tied(nn.Module):
    """Its head is its embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.emb, self.head = nn.Embedding(12, 8), nn.Linear(8, 12)
        self.head.weight = self.emb.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.emb(tokens)).logsumexp(-1).mean()


ARGS = torch.zeros(8, 4, dtype=torch.int64)
OPTIONS: dict[str, Any] = {"hardware": profile_of("slow")}


def planned(*constraints: str, **options: Any) -> ShardingPlan:
    torch.manual_seed(0)
    return autoshard.plan(Tied(), (ARGS,), mesh="tp=2", constraints=constraints, cache=False, **OPTIONS, **options)


def layout_of(plan: ShardingPlan, name: str = "emb.weight") -> str:
    return next(format_layout(entry.layout, plan.mesh) for entry in plan.parameters if entry.name == name)


@pytest.mark.parametrize(
    ("said", "layout"),
    [
        ("{}=tp:S(1)", "tp:S(1)"),
        ("{}=(tp, None)", "tp:S(0)"),
        ("only {} tp:R", "tp:R"),
        ("forbid {} tp:S", "tp:R"),
        ("forbid collectives over tp of parameters {}", None),
    ],
)
def test_a_constraint_by_another_name_is_one_by_the_first(said: str, layout: str | None) -> None:
    first, other = (planned(said.format(name)) for name in ("emb.weight", "head.weight"))
    assert (first.parameters, first.operators) == (other.parameters, other.operators)
    assert layout in (None, layout_of(other))


def test_a_pattern_finds_it_by_each_name() -> None:
    assert {layout_of(planned("only head.* tp:R"), name) for name in ("emb.weight", "head.bias")} == {"tp:R"}
    alike = planned("alike head.* tokens", "tokens=tp:S(0)")
    assert {layout_of(alike, name) for name in ("emb.weight", "head.bias")} == {"tp:S(0)"}
    with pytest.raises(ConstraintError, match=r"contradicts the pin 'emb.weight=tp:S"):
        planned("emb.weight=tp:S(0)", "head.weight=tp:S(1)")
    with pytest.raises(ConstraintError, match=r"has 3 entries, but"):
        planned("head.weight=(tp, None, None)")
    with pytest.raises(ConstraintError, match=r"nearest name is head\.weight"):
        planned("head.wieght=tp:R")


def test_questions_and_edits_take_each_name() -> None:
    plan = planned("forbid head.weight tp:S(1)")
    by_first, by_other = (explain(plan, Tied(), (ARGS,), why=name, **OPTIONS) for name in ("emb.weight", "head.weight"))
    assert by_first.names == by_other.names and by_first.alternative is not None and by_other.alternative is not None
    assert by_first.alternative.parameters == by_other.alternative.parameters
    held = planned(held_as=plan)
    assert layout_of(held) == layout_of(plan)
    pinned = planned("head.weight=tp:R")
    text = dump_plan(pinned).replace('emb.weight: {layout: "tp:R"', 'emb.weight: {layout: "tp:S(0)"')
    made = replan(parse_plan(text, edited=True), Tied(), (ARGS,), **OPTIONS)
    assert made.replaced == ("head.weight=tp:R",) and layout_of(made.plan) == "tp:S(0)"
