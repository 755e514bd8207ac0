"""Why a redistribution is there, in words."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autoshard.plans import Redistribution, ShardingPlan
from autoshard.plans.text.folded_plan import fold_plan
from autoshard.plans.text.notation import parse_path
from autoshard.plans.views.redistribution_reasons import RedistributionReasons

from .synthetic import MESH, transformer_plan

FIVE = tuple(f"m{i}/mm" for i in range(5))


def reasons(plan: ShardingPlan) -> list[str]:
    folded = fold_plan(plan)
    return [RedistributionReasons(plan, folded.repeats).of(line) for line in folded.redistributions]


@pytest.mark.parametrize(
    ("path", "consumers", "reason"),
    [
        ("dp:S(0) tp:P(sum) => dp:S(0) tp:R", ("layers.1/add",), "sums the addends of tp for layers.1/add"),
        ("tp:S(1) => tp:R", ("a/mm", "b/mm"), "makes it whole along tp for a/mm, b/mm"),
        ("dp:S(1) => dp:S(0)", ("a/mm",), "cuts dim 0 instead of 1 along dp for a/mm"),
        ("dp:R tp:R => dp:S(0) tp:R => dp:S(0) tp:S(0)", ("a/mm",), "cuts dim 0 along dp and tp for a/mm"),
        ("tp:P(max) => tp:R", ("a/mm",), "takes the max over tp for a/mm"),
        (
            "tp:P(sum) => tp:S(2)",
            ("loss",),
            "sums the addends of tp and leaves each rank a block of dim 2, as loss is held",
        ),
        ("tp:R => tp:P(sum)", (), "makes it addends along tp"),
        ("tp:S(0) => tp:R", FIVE, "makes it whole along tp for m0/mm, m1/mm, m2/mm and 2 more"),
    ],
)
def test_a_redistribution_is_explained(path: str, consumers: tuple[str, ...], reason: str) -> None:
    moved = Redistribution("layers.1.x/mm", "forward", parse_path(path, MESH), (), consumers=consumers)
    assert reasons(replace(transformer_plan(4), redistributions=(moved,))) == [reason]


def test_layers_that_are_alike_have_one_reason_in_terms_of_each_layer() -> None:
    assert reasons(transformer_plan(4)) == [
        "sums the addends of tp for layers.*/add",
        "sums the addends of tp",
        "sums the addends of dp, as the gradient of layers.*.attention.wq.weight is held",
    ]
