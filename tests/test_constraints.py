"""Pins as text."""

from __future__ import annotations

import pytest

from autoshard.constraints import check_pins_match, layouts_pinned, parse_pin
from autoshard.errors import ConstraintError, LayoutError
from autoshard.layout import parse_layout
from autoshard.mesh import Mesh

MESH = Mesh.parse("dp=2,tp=2")
NAMES = ["layers.0.wq.weight", "layers.1.wq.weight", "layers.1.wo.weight", "tokens", "output.0"]


def test_a_pin_is_a_pattern_and_a_layout() -> None:
    pin = parse_pin("layers.*.wq.weight = tp:S(0)", MESH)
    assert (pin.pattern, pin.layout) == ("layers.*.wq.weight", parse_layout("dp:R tp:S(0)", MESH))
    assert pin.text == "layers.*.wq.weight = tp:S(0)"


@pytest.mark.parametrize("text", ["tokens", "", "=dp:R", "  = dp:R"])
def test_a_pin_without_a_name_or_a_layout_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(ConstraintError, match="NAME=LAYOUT"):
        parse_pin(text, MESH)


@pytest.mark.parametrize("text", ["tokens=dp:X", "tokens=pp:S(0)", "tokens=dp:S(0) dp:R"])
def test_a_pin_with_a_layout_that_cannot_be_read_is_a_layout_error(text: str) -> None:
    with pytest.raises(LayoutError):
        parse_pin(text, MESH)


def test_patterns_match_whole_names_with_case() -> None:
    pins = [parse_pin(f"{pattern}=tp:S(0)", MESH) for pattern in ("layers.*.wq.weight", "Tokens", "layers.1")]
    applied = {name: [pin.pattern for pin in layouts_pinned(pins, name)] for name in NAMES}
    assert applied == {name: ["layers.*.wq.weight"] if "wq" in name else [] for name in NAMES}


@pytest.mark.parametrize(
    ("pattern", "nearest"), [("layer.0.wq.weight", "layers.0.wq.weight"), ("Tokens", "tokens"), ("output", "output.0")]
)
def test_a_pin_that_names_nothing_suggests_the_nearest_name(pattern: str, nearest: str) -> None:
    pins = [parse_pin("tokens=dp:S(0)", MESH), parse_pin(f"{pattern}=dp:S(0)", MESH)]
    with pytest.raises(ConstraintError, match=f"'{pattern}=.*nearest name is {nearest}"):
        check_pins_match(pins, NAMES)
    check_pins_match(pins[:1], NAMES)
