from __future__ import annotations

import doctest
import math
import re
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import autoshard.mesh
from autoshard.errors import MeshError
from autoshard.mesh import MAX_RANKS, HybridMesh, Mesh
from cost_models import Hosts, Link, Torus, load_profile

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
        ("dp=2x", "axis=OUTERxINNER"),
        ("dp=2x2x2", "axis=OUTERxINNER"),
        ("dp=2x2,tp=2", "axis=OUTERxINNER"),
        ("dp=0x2", "a whole number of at least 1"),
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


def test_the_ranks_of_a_plain_mesh_are_counted_with_the_last_axis_fastest() -> None:
    assert Mesh.parse("dp=2,tp=3").ranks == ((0, 1, 2), (3, 4, 5))
    assert Mesh.parse("dp=4").ranks == (0, 1, 2, 3)


def test_a_text_of_outer_and_inner_sizes_is_a_hybrid_mesh() -> None:
    found = Mesh.parse("tp=1x8,dp=8x1")
    by_hand = HybridMesh(axes=("tp", "dp"), outer=(1, 8), inner=(8, 1)).mesh
    assert (found, found.order) == (by_hand, by_hand.order)
    assert found.ranks[1][:3] == (1, 9, 17)  # the ranks of tp are those of a host
    assert Mesh.parse("dp=8x1,tp=1x8").order == ()


def test_an_order_that_counts_with_the_last_axis_fastest_is_none() -> None:
    assert Mesh(("dp", "tp"), (2, 2), (0, 1, 2, 3)).order == ()


def test_an_order_decides_no_layout_and_so_no_equality() -> None:
    mesh = Mesh(("dp", "tp"), (2, 2), (0, 2, 1, 3))
    assert mesh.ranks == ((0, 2), (1, 3))
    assert mesh == Mesh.parse("dp=2,tp=2") and hash(mesh) == hash(Mesh.parse("dp=2,tp=2"))


@pytest.mark.parametrize("order", [(0, 1, 2), (0, 1, 2, 2), (1, 2, 3, 4)])
def test_an_order_names_every_rank_once(order: tuple[int, ...]) -> None:
    with pytest.raises(MeshError, match="must name each of its 4 ranks once"):
        Mesh(("dp", "tp"), (2, 2), order)


def hybrid(inner: tuple[int, ...], outer: tuple[int, ...], **options: Any) -> HybridMesh:
    return HybridMesh(axes=("data", "fsdp", "tensor")[: len(inner)], inner=inner, outer=outer, **options)


@pytest.mark.parametrize(
    ("inner", "outer", "ranks"),
    [
        # two hosts of four; ranks 0 to 3 are the first host
        ((1, 4), (2, 1), ((0, 1, 2, 3), (4, 5, 6, 7))),
        ((4, 1), (1, 2), ((0, 4), (1, 5), (2, 6), (3, 7))),
        # data has two ranks in each host and spans both: 0, 1 in the first, 2, 3 in the second
        ((2, 2), (2, 1), ((0, 1), (2, 3), (4, 5), (6, 7))),
        ((2, 2), (1, 2), ((0, 1, 4, 5), (2, 3, 6, 7))),
    ],
)
def test_the_ranks_of_a_hybrid_mesh_by_hand(inner: tuple[int, ...], outer: tuple[int, ...], ranks: Any) -> None:
    assert hybrid(inner, outer).ranks == ranks


@given(st.lists(st.tuples(st.integers(1, 4), st.integers(1, 3)), min_size=1, max_size=3))
def test_inner_ranks_share_a_host_and_every_rank_is_there_once(sizes: list[tuple[int, int]]) -> None:
    inner, outer = zip(*sizes)
    mesh = hybrid(inner, outer).mesh
    ranks = np.array(mesh.ranks)
    assert ranks.shape == mesh.shape and sorted(ranks.flatten()) == list(range(mesh.size))
    for axis, size in enumerate(inner):
        hosts = np.moveaxis(ranks // math.prod(inner), axis, -1)
        blocks = hosts.reshape(-1, size)
        assert (blocks == blocks[:, :1]).all()


@given(st.lists(st.sampled_from([1, 2, 4]), min_size=1, max_size=3))
def test_hosts_are_filled_from_the_last_axis_unless_told_otherwise(sizes: list[int]) -> None:
    mesh = Mesh(("data", "fsdp", "tensor")[: len(sizes)], tuple(sizes))
    found = HybridMesh.fit(mesh, host=math.gcd(8, mesh.size))
    assert found.mesh == mesh and found.mesh.order == mesh.order == ()


def test_the_axis_of_most_traffic_is_kept_inside_hosts() -> None:
    profile = load_profile("dgx-h100")
    found = HybridMesh.fit("tp=8,dp=4", host=8, traffic=("tp",))
    assert (found.inner, found.outer) == ((8, 1), (1, 4))
    topology = profile.topology(found.mesh.axes, found.mesh.shape, found.mesh.order)
    assert [link.name for link in topology.links] == ["NVLink 4", "InfiniBand NDR"]


@pytest.mark.parametrize(
    ("torus", "mesh", "traffic", "expected"),
    [
        # each axis a dimension, the last axis on the last one: both rings
        ((16, 16), "dp=16,tp=16", (), ["ring of 16", "ring of 16"]),
        # one axis over both dimensions
        ((16, 16), "tp=256", (), ["ring of 16 x ring of 16"]),
        # no dimension of 8: a stretch of one, and what is left for dp
        ((16, 16), "dp=32,tp=8", (), ["ring of 16 x ring of 2", "line of 8"]),
        # the axis of most traffic gets two dimensions of 4 rather than the one of 16
        ((4, 4, 16), "dp=16,tp=16", (), ["ring of 16", "ring of 4 x ring of 4"]),
        ((4, 4, 16), "dp=16,tp=16", ("dp",), ["ring of 4 x ring of 4", "ring of 16"]),
        ((4, 4, 4), "dp=4,tp=16", (), ["ring of 4", "ring of 4 x ring of 4"]),
    ],
)
def test_axes_get_dimensions_of_a_torus(
    torus: tuple[int, ...], mesh: str, traffic: tuple[str, ...], expected: list[str]
) -> None:
    found = HybridMesh.fit(mesh, host=torus, traffic=traffic).mesh
    wired = Hosts(math.prod(torus), Link("", 1e-6, 1e9), None, Torus(torus, (True,) * len(torus)))
    links = wired.topology(found.axes, np.array(found.ranks)).links
    assert [link.name.strip() for link in links] == expected


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: hybrid((1, 4), (2,)), "one size per axis"),
        (lambda: hybrid((1, 0), (2, 1)), "a whole number of at least 1"),
        (lambda: hybrid((2, 2), (1, 1), torus=(4, 4)), "(2, 2) have 4 ranks, but a torus of 4x4 has 16 devices"),
        (lambda: hybrid((2, 2), (1, 1), traffic=("dp",)), "traffic names 'dp'; the axes are data, fsdp"),
        (lambda: hybrid((4, 9), (1, 1), torus=(6, 6)), "fsdp=9, data=4 cannot be laid on a torus of 6x6"),
        (lambda: HybridMesh.fit("dp=3,tp=5", host=8), "the mesh dp=3,tp=5 does not fill hosts of 8"),
    ],
)
def test_a_hybrid_mesh_that_cannot_be_says_why(make: Any, said: str) -> None:
    with pytest.raises(MeshError, match=re.escape(said)):
        make()


def test_the_examples_of_the_docstrings_hold() -> None:
    found = doctest.testmod(autoshard.mesh)
    assert found.attempted >= 3 and found.failed == 0
