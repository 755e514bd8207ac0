"""A plan file that was edited at random is refused, or trains with the numbers of one process."""

from __future__ import annotations

import random
import re

import torch

import autoshard
from autoshard.errors import PlanFileError
from autoshard.plans import ShardingPlan

from . import cases
from .harness import caught, run_ranks
from .parity import device_mesh_of, full, relative

CASE, AXES = "mlp odd", "dp=2,tp=2"
EDITS = 24
LIMIT = 1e-4

TOKENS = {
    r"\b(?:R|S\(\d\)|P\(sum\))(?=[ \",])": ("R", "S(0)", "S(1)", "P(sum)"),
    r"\b(?:dp|tp)(?=:| \d+ bytes)": ("dp", "tp"),
    r"\b(?:up|down)(?=\.(?:weight|bias))": ("up", "down"),
    r"(?<= )\d+(?= bytes)": ("4", "36", "144"),
    r"\b(?:x|target)(?=[:,])": ("x", "target"),
    r"(?<=phase: )\w+": ("forward", "backward"),
}


def edited_plans(text: str) -> list[ShardingPlan]:
    """Plans of files in which one word of a decision or redistribution is another; those that can be read at all."""
    draw, start = random.Random(0), text.index("\nparameters:")
    body, found = text[start : text.index("\nmemory:")], {}
    places = [(m.start() + start, m.end() + start, new) for old, new in TOKENS.items() for m in re.finditer(old, body)]
    while len(found) < EDITS:
        begin, end, words = draw.choice(places)
        edited = text[:begin] + draw.choice(words) + text[end:]
        try:
            found[edited] = autoshard.parse_plan(edited, edited=True)
        except PlanFileError:
            continue
        if edited == text:
            del found[edited]
    return list(found.values())


def _refusals(plans: list[ShardingPlan]) -> list[str]:
    """For each plan the kind of error, or how far loss and gradients are from those of one process."""
    mesh = device_mesh_of(plans[0])
    said = []
    for plan in plans:
        (model, batch), (reference, _) = cases.make(CASE), cases.make(CASE)
        made: list[torch.nn.Module] = []
        kind, text = caught(
            lambda plan=plan, model=model, made=made: made.append(autoshard.parallelize(model, plan, mesh))
        )  # type: ignore[misc]
        if not made:
            said.append(f"{kind}: {text}")
            continue
        loss, expected = made[0](*autoshard.shard_inputs(plan, mesh, *batch)), reference(*batch)
        loss.backward()
        expected.backward()
        pairs = zip(made[0].parameters(), reference.parameters(), strict=True)
        worst = max([relative(full(loss), expected), *(relative(full(p.grad), q.grad) for p, q in pairs)])
        said.append("right" if worst <= LIMIT else f"wrong by {worst}")
    return said


def test_a_plan_edited_at_random_is_refused_or_right() -> None:
    plan = cases.sharded_plan(CASE, AXES)
    plans = [plan, *edited_plans(autoshard.dump_plan(plan))]
    results = run_ranks(4, _refusals, plans, timeout_s=240.0)
    for said in zip(*results):
        assert all(re.match("right|PlanMismatchError: |VerificationError: ", text) for text in said), said
    refused = sum(text != "right" for text in results[0])
    assert results[0][0] == "right" and refused >= EDITS // 2, results[0]
