from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoshard.errors import MeshError
from autoshard.mesh import MAX_RANKS, Mesh

meshes = st.dictionaries(
    st.from_regex(r"[A-Za-z_][A-Za-z0-9_]{0,5}", fullmatch=True), st.integers(1, 16), min_size=1, max_size=4
).map(Mesh.of)


@given(meshes)
def test_parse_is_the_inverse_of_str(mesh: Mesh) -> None:
    assert Mesh.parse(str(mesh)) == mesh
    assert Mesh.of(str(mesh)) == Mesh.of(mesh) == Mesh.of(dict(zip(mesh.axes, mesh.shape))) == mesh


@given(meshes)
def test_coordinates_are_those_of_the_ranks_in_order(mesh: Mesh) -> None:
    coordinates = list(mesh.coordinates())
    assert len(coordinates) == len(set(coordinates)) == mesh.size
    for rank, coordinate in enumerate(coordinates):
        folded = 0
        for index, size in zip(coordinate, mesh.shape):
            folded = folded * size + index
        assert folded == rank


def test_spaces_around_entries_are_allowed() -> None:
    assert Mesh.parse(" dp = 2 , tp=4 ") == Mesh(("dp", "tp"), (2, 4))


def test_size_and_index() -> None:
    mesh = Mesh.parse("dp=2,tp=4")
    assert (mesh.size, mesh.ndim, mesh.index("tp")) == (8, 2, 1)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "write axis=size"),
        ("dp", "write axis=size"),
        ("dp=", "write axis=size"),
        ("dp=two", "write axis=size"),
        ("dp=-2", "write axis=size"),
        ("dp=2,", "write axis=size"),
        ("dp=2;tp=2", "write axis=size"),
        ("dp=²", "write axis=size"),
        ("dp=999999999", "write axis=size"),
        ("dp=0", "a whole number of at least 1"),
        ("dp=2,dp=2", "distinct names"),
        ("2dp=2", "is not a name"),
        ("=2", "is not a name"),
        ("a b=2", "is not a name"),
        (f"dp={MAX_RANKS},tp=2", "at most 1048576 are supported"),
    ],
)
def test_a_text_that_is_no_mesh_says_why(text: str, said: str) -> None:
    with pytest.raises(MeshError, match=re.escape(said)):
        Mesh.parse(text)


@pytest.mark.parametrize(
    ("axes", "shape"), [((), ()), (("dp",), (2, 2)), (("dp", "tp"), (2,)), (("dp",), (2.0,)), (("dp",), ("2",))]
)
def test_a_value_that_is_no_mesh_is_refused(axes: tuple[str, ...], shape: tuple[int, ...]) -> None:
    with pytest.raises(MeshError):
        Mesh(axes, shape)


def test_an_unknown_axis_names_those_there_are() -> None:
    with pytest.raises(MeshError, match="unknown mesh axis 'pp'; the mesh dp=2,tp=4 has dp, tp"):
        Mesh.parse("dp=2,tp=4").index("pp")


@given(st.text(max_size=30))
def test_any_text_is_a_mesh_or_a_mesh_error(text: str) -> None:
    try:
        mesh = Mesh.parse(text)
    except MeshError:
        return
    assert Mesh.parse(str(mesh)) == mesh
