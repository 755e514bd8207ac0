"""Layouts in the notation of PyTorch/XLA's mark_sharding."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoshard.constraints import Pin, parse_constraint
from autoshard.constraints.partition_spec import parse_partition_spec
from autoshard.errors import LayoutError
from autoshard.layout import Layout, Placement, R, S, parse_layout
from autoshard.mesh import Mesh

MESH = Mesh.parse("dp=2,tp=2")


@pytest.mark.parametrize(
    ("spec", "layout", "dims"),
    [
        ("(dp, None)", "dp:S(0)", 2),
        ("('dp', None)", "dp:S(0)", 2),
        ('("dp", "tp")', "dp:S(0) tp:S(1)", 2),
        ("(0, None)", "dp:S(0)", 2),
        ("(None, 1, None)", "tp:S(1)", 3),
        ("((dp, tp), None)", "dp:S(0) tp:S(0)", 2),
        ("[[dp, tp], null]", "dp:S(0) tp:S(0)", 2),
        ("(None,)", "", 1),
        ("()", "", 0),
        ("(dp,)", "dp:S(0)", 1),
    ],
)
def test_a_spec_is_the_layout_that_it_says(spec: str, layout: str, dims: int) -> None:
    assert parse_partition_spec(spec, MESH) == (parse_layout(layout, MESH), dims)


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ("(pp, None)", "names axis 'pp'; the mesh dp=2,tp=2 has no such axis"),
        ("(2, None)", "names axis '2'"),
        ("(dp, dp)", "names axis 'dp' twice"),
        ("((tp, dp), None)", "only the order of the mesh"),
        ("(dp, None", "cannot read the partition spec"),
        ("(dp None)", "cannot read"),
        ("(dp, None) tp", "cannot read"),
        ("(dp, ((tp)))", "cannot read"),
        ("(dp;)", "cannot read"),
        ("(,)", "cannot read"),
    ],
)
def test_a_spec_that_cannot_be_is_an_error_that_says_why(spec: str, said: str) -> None:
    with pytest.raises(LayoutError) as error:
        parse_partition_spec(spec, MESH)
    assert said in str(error.value)


@given(st.lists(st.sampled_from([None, 0, 1]), max_size=4), st.integers(1, 5))
def test_every_layout_without_partial_sums_has_a_spec(axes: list[int | None], dims: int) -> None:
    """A spec made of a layout, as Python writes a tuple, is read back as the layout."""
    cuts = (axes + [None, None])[:2]
    layout = Layout(tuple(R if cut is None or cut >= dims else S(cut) for cut in cuts))
    by_dim = [tuple(MESH.axes[a] for a in layout.axes_of(dim)) for dim in range(dims)]
    spec = tuple(names[0] if len(names) == 1 else names or None for names in by_dim)
    assert parse_partition_spec(repr(spec), MESH) == (layout, dims)


def test_a_pin_may_be_written_as_a_spec_and_knows_its_dims() -> None:
    text = f"tokens={('dp', None)}"
    assert parse_constraint(text, MESH) == Pin("tokens", Layout((Placement("S", 0), R)), text, 2)
