"""Constraints as text."""

from __future__ import annotations

import pytest

from autoshard.constraints import (
    AxisScheme,
    CollectiveRule,
    Constraint,
    PlacementRule,
    check_constraints_match,
    parse_constraint,
    parse_pin,
)
from autoshard.constraints.values import matches
from autoshard.errors import ConstraintError, LayoutError, MeshError
from autoshard.layout import P_SUM, P, Placement, R, S, parse_layout
from autoshard.mesh import Mesh

MESH = Mesh.parse("dp=2,tp=2")
NAMES = ["layers.0.wq.weight", "layers.1.wq.weight", "layers.1.wo.weight", "tokens", "output.0"]


def test_a_pin_is_a_pattern_and_a_layout() -> None:
    pin = parse_pin("layers.*.wq.weight = tp:S(0)", MESH)
    assert (pin.pattern, pin.layout) == ("layers.*.wq.weight", parse_layout("dp:R tp:S(0)", MESH))
    assert pin.text == "layers.*.wq.weight = tp:S(0)"
    assert parse_constraint(pin.text, MESH) == pin


@pytest.mark.parametrize("text", ["tokens", "", "=dp:R", "  = dp:R"])
def test_a_pin_without_a_name_or_a_layout_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(ConstraintError, match="NAME=LAYOUT"):
        parse_constraint(text, MESH)


@pytest.mark.parametrize("text", ["tokens=dp:X", "tokens=pp:S(0)", "tokens=dp:S(0) dp:R"])
def test_a_pin_with_a_layout_that_cannot_be_read_is_a_layout_error(text: str) -> None:
    with pytest.raises(LayoutError):
        parse_constraint(text, MESH)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("only *.wq.weight tp:S(0)", PlacementRule("*.wq.weight", 1, (S(0),), True, "")),
        ("only x dp:S dp:P(sum)", PlacementRule("x", 0, (Placement("S"), P_SUM), True, "")),
        ("forbid x/mm tp:R tp:P", PlacementRule("x/mm", 1, (R, Placement("P")), False, "")),
        (
            "forbid all_gather,all_reduce over dp of gradients",
            CollectiveRule(frozenset({"all_gather", "all_reduce"}), 0, "gradients", "*", ""),
        ),
        (
            "forbid collectives over tp of tensors layers.*",
            CollectiveRule(
                frozenset({"all_gather", "reduce_scatter", "all_reduce", "all_to_all"}), 1, "tensors", "layers.*", ""
            ),
        ),
        ("family dp=fsdp", AxisScheme(0, "fsdp", "")),
    ],
)
def test_every_text_form_is_read_as_what_it_says(text: str, expected: Constraint) -> None:
    found = parse_constraint(text, MESH)
    assert found.text == text
    assert {**vars(found), "text": ""} == vars(expected) and type(found) is type(expected)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("only tokens", "cannot read the constraint"),
        ("only tokens S(0)", "cannot read 'S"),
        ("only tokens tp:S(0)x", "cannot read 'tp:S"),
        ("only tokens tp:S(0) dp:S(0)", "names several axes"),
        ("forbid", "cannot read the constraint"),
        ("forbid all_gathr over dp of gradients", "did you mean 'all_gather'?"),
        ("forbid all_gather over dp of gradient", "did you mean 'gradients'?"),
        ("forbid all_gather over dp of gradients a b", "cannot read"),
        ("family dp=fdsp", "did you mean 'fsdp'?"),
        ("family dp", "unknown scheme ''"),
        ("family", "cannot read the constraint"),
        ("forbidd all_gather over tp of activations", "begins with .forbidd.*did you mean .forbid."),
        ("familly dp=fsdp", "did you mean .family."),
    ],
)
def test_a_constraint_that_cannot_be_read_says_what_was_expected(text: str, said: str) -> None:
    with pytest.raises(ConstraintError, match=said):
        parse_constraint(text, MESH)


@pytest.mark.parametrize("text", ["only x pp:R", "forbid collectives over pp of tensors", "family pp=ddp"])
def test_an_unknown_axis_is_a_mesh_error(text: str) -> None:
    with pytest.raises(MeshError, match="pp"):
        parse_constraint(text, MESH)


def test_a_placement_without_a_dim_stands_for_all_of_its_kind() -> None:
    assert matches(S(3), [Placement("S")]) and matches(P("max"), [Placement("P")]) and matches(R, [R])
    assert not matches(S(3), [S(0), R, Placement("P")]) and not matches(R, [Placement("S")])


@pytest.mark.parametrize(
    ("text", "nearest"),
    [
        ("layer.0.wq.weight=dp:S(0)", "layers.0.wq.weight"),
        ("Tokens=dp:S(0)", "tokens"),
        ("only output dp:R", "output.0"),
        ("forbid layers.1 dp:R", "layers.1"),
        ("forbid collectives over dp of tensors layers.0/split:2", "layers.0/split:1"),
    ],
)
def test_a_constraint_that_names_nothing_suggests_the_nearest_name(text: str, nearest: str) -> None:
    fine = [parse_constraint(text, MESH) for text in ("tok*=dp:S(0)", "family dp=ddp", "only output.0 dp:R")]
    tensors = [*NAMES, "layers.0/split", "layers.0/split:1"]
    with pytest.raises(ConstraintError, match=f"'.*nearest name is {nearest}"):
        check_constraints_match([*fine, parse_constraint(text, MESH)], NAMES, tensors)
    check_constraints_match(fine, NAMES, tensors)
