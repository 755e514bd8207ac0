"""A plan file edited by hand loads as what it says, or is refused with its line; an oracle reads the text by itself."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from autoshard.errors import PlanFileError
from autoshard.layout import format_layout
from autoshard.plans import ShardingPlan, dump_plan, parse_plan

from ..thorough import tries
from .synthetic import sharded_plan

GOOD = dump_plan(sharded_plan(4))
LINES = GOOD.splitlines(keepends=True)

TOKENS = {
    "placement": (
        r"\b(?:R|S\(\d\)|P\(sum\))(?=[ \",])",
        ["R", "S(0)", "S(1)", "S(2)", "S(7)", "P(sum)", "P(max)", "Q"],
    ),
    "axis": (r"\b(?:dp|tp)(?=:)", ["dp", "tp", "pp"]),
    "pattern": (r"layers\.\*", ["layers.*", "layers.{0-3}", "layers.{0-2}", "layers.3", "layers.{1,3}", "heads.*"]),
    "count": (r"(?<=count: )\d+|(?<= x)\d+", ["1", "2", "3", "4", "0", "-4"]),
    "size": (r"(?<=\[)256|512(?=,)", ["128", "256", "0", "1e3", "x"]),
    "time": (r"(?<=bytes )[\d.]+(?= ms)", ["0", "0.5", "12.125", "-1", "x"]),
    "name": (r"\b(?:wq|wo|norm)\b", ["wq", "wo", "norm", "w1"]),
    "total": (r"(?<=parameters: )\d+", ["12", "13", "14"]),
}


@dataclass(frozen=True)
class Edit:
    """One token of one line replaced."""

    line: int
    text: str


@st.composite
def edits(draw: st.DrawFn) -> Edit:
    pattern, replacements = TOKENS[draw(st.sampled_from(sorted(TOKENS)))]
    body = [i for i, line in enumerate(LINES) if not line.startswith("#") and re.search(pattern, line)]
    line = draw(st.sampled_from(body))
    found = draw(st.sampled_from(list(re.finditer(pattern, LINES[line]))))
    changed = LINES[line][: found.start()] + draw(st.sampled_from(replacements)) + LINES[line][found.end() :]
    return Edit(line + 1, "".join([*LINES[:line], changed, *LINES[line + 1 :]]))


@settings(max_examples=tries(600))
@given(edits())
def test_an_edited_file_loads_as_what_it_says_or_is_refused_with_its_line(edit: Edit) -> None:
    try:
        plan = parse_plan(edit.text, source="plan.yaml", edited=True)
    except PlanFileError as error:
        assert re.match(r"plan\.yaml, line \d+( is not YAML)?: .+", str(error)), str(error)
        return
    assert said_by(plan) == said_by_the_text(edit.text)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"dp:S(0) tp:S(1)", shape: [256, 256]', '"dp:R tp:S(0)", shape: [256, 256]'),
        ('tp:R, dp:R tp:S(0) -> dp:S(0) tp:S(2) x4"', 'tp:R, dp:R tp:R -> dp:S(0) tp:R x4"'),
        ("shape: [512, 256]", "shape: [512, 128]"),
        ("layers.*.norm.weight: {", "layers.{0-3}.norm.weight: {"),
    ],
)
def test_these_edits_load(old: str, new: str) -> None:
    """So that the law above is not true for want of edits that load."""
    assert old in GOOD
    text = GOOD.replace(old, new, 1)
    plan = parse_plan(text, edited=True)
    assert said_by(plan) == said_by_the_text(text)


def said_by(plan: ShardingPlan) -> dict[str, Any]:
    """What a plan says of parameters, operators and redistributions, by name."""

    def text(layout: Any) -> str:
        return "-" if layout is None else format_layout(layout, plan.mesh)

    return {
        "parameters": {entry.name: (text(entry.layout), list(entry.shape)) for entry in plan.parameters},
        "operators": {
            (entry.phase, entry.name): ([text(one) for one in entry.inputs], [text(one) for one in entry.outputs])
            for entry in plan.operators
        },
        "redistributions": {
            (entry.tensor, entry.phase, tuple(text(one) for one in entry.path)): [
                (c.kind, c.axis, c.size_bytes, pytest.approx(c.predicted_s * 1000)) for c in entry.collectives
            ]
            for entry in plan.redistributions
        },
    }


def said_by_the_text(text: str) -> dict[str, Any]:
    """The same, read from the YAML with nothing of autoshard: layouts in full, patterns unfolded by hand."""
    document = yaml.safe_load(text)
    layers = document["repeats"]["layers"]

    def names(pattern: str) -> list[str]:
        choice = re.search(r"layers\.(\*|\{[\d,-]+\})", pattern)
        if choice is None:
            return [pattern]
        parts = [f"0-{layers - 1}"] if choice[1] == "*" else choice[1][1:-1].split(",")
        ends = [part.split("-") for part in parts]
        indices = [i for first, *last in ends for i in range(int(first), int((last or [first])[0]) + 1)]
        return [pattern.replace(choice[0], f"layers.{i}", 1) for i in indices]

    def full(layout: str) -> str:
        if layout == "-":
            return layout
        said = dict(entry.split(":") for entry in layout.split())
        return " ".join(f"{axis}:{said.get(axis, 'R')}" for axis in ("dp", "tp"))

    def strategy(written: str) -> tuple[list[str], list[str]]:
        sides = re.sub(r" x\d+$", "", written).split("->")
        inputs, outputs = ([full(one.strip()) for one in side.split(",") if one.strip()] for side in sides)
        return inputs, outputs

    operators = {
        (phase, name): strategy(written)
        for phase, section in document["operators"].items()
        for pattern, written in section.items()
        for name in names(pattern)
    }
    for phase, section in document["followers"].items():
        for line in section:
            for role in line["roles"]:
                operators |= {(phase, name): strategy(line["strategy"]) for name in names(f"{line['module']}/{role}")}
    return {
        "parameters": {
            name: (full(line["layout"]), line["shape"])
            for pattern, line in document["parameters"].items()
            for name in names(pattern)
        },
        "operators": operators,
        "redistributions": {
            (name, line["phase"], tuple(full(one) for one in line["path"].split(" => "))): [
                (kind, axis, int(size), pytest.approx(float(ms)))
                for kind, axis, size, _, ms, _ in (one.split() for one in line["collectives"])
            ]
            for line in document["redistributions"]
            for name in names(line["tensor"])
        },
    }
