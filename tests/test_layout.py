from __future__ import annotations

import math
import re
from itertools import pairwise, product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from autoshard.errors import LayoutError
from autoshard.layout import (
    P_SUM,
    Layout,
    P,
    Placement,
    R,
    S,
    block,
    check_fits,
    cuts_parts_evenly,
    format_layout,
    has_empty_shard,
    is_even,
    largest_local_shape,
    local_range,
    local_ranges,
    local_shape,
    parse_layout,
    replicated,
    uneven_axes,
)
from autoshard.mesh import Mesh

MESH = Mesh.parse("dp=2,tp=4")
SIZES = (0, 1, 2, 3, 4, 5, 7, 8, 12, 13)

meshes = st.sampled_from([Mesh.parse(text) for text in ("a=1", "a=2", "a=3,b=2", "a=2,b=2,c=2", "a=4,b=3")])
placements = st.sampled_from([R, P_SUM, P("max"), P("min"), S(0), S(1), S(2)])
shapes = st.tuples(*[st.integers(0, 9)] * 3)


@st.composite
def layouts_on_meshes(draw: st.DrawFn) -> tuple[Layout, Mesh]:
    mesh = draw(meshes)
    return Layout(tuple(draw(placements) for _ in mesh.axes)), mesh


@given(layouts_on_meshes())
def test_parse_is_the_inverse_of_format(case: tuple[Layout, Mesh]) -> None:
    layout, mesh = case
    assert parse_layout(format_layout(layout, mesh), mesh) == layout


@given(layouts_on_meshes(), st.randoms(use_true_random=False))
def test_entries_in_another_order_mean_the_same_unless_they_cut_one_dim(case, random) -> None:
    layout, mesh = case
    entries = format_layout(layout, mesh).split()
    random.shuffle(entries)
    if all(len(layout.axes_of(dim)) < 2 for dim in range(3)):
        assert parse_layout(" ".join(entries), mesh) == layout


@given(st.text(alphabet="dtp:RSP()012sum x", max_size=30))
def test_any_text_is_a_layout_or_a_layout_error(text: str) -> None:
    try:
        layout = parse_layout(text, MESH)
    except LayoutError:
        return
    assert parse_layout(format_layout(layout, MESH), MESH) == layout


def test_axes_left_out_are_replicated() -> None:
    assert parse_layout("tp:S(1)", MESH) == Layout((R, S(1)))
    assert parse_layout("", MESH) == replicated(MESH)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("dp:S(0), tp:R", "cannot read 'dp:S(0),'"),
        ("dp:S(-1)", "cannot read 'dp:S(-1)'"),
        ("dp:S", "write axis:R, axis:S(dim) or axis:P(sum)"),
        ("dp:P", "write axis:R, axis:S(dim) or axis:P(sum)"),
        ("dp:P(avg)", "cannot read 'dp:P(avg)'"),
        ("dp:r", "cannot read 'dp:r'"),
        ("S(0)", "cannot read 'S(0)'"),
        ("dp:S(9999)", "cannot read 'dp:S(9999)'"),
        ("pp:R", "the mesh dp=2,tp=4 has no such axis"),
        ("dp:R dp:S(0)", "names axis 'dp' twice"),
        ("tp:S(0) dp:S(0)", "cuts dim 0 over tp before dp; only the order of the mesh (dp=2,tp=4) is supported"),
    ],
)
def test_a_text_that_is_no_layout_says_why(text: str, said: str) -> None:
    with pytest.raises(LayoutError, match=re.escape(said)):
        parse_layout(text, MESH)


@pytest.mark.parametrize("text", ["a:S(0/3) b:S(0/3)", "a:S(0) b:S(0/3)", "a:S(0) b:S(0) c:S(0/2)", "a:R b:S(0/6)"])
def test_ranks_hold_a_block_of_every_part_of_what_outer_axes_leave_them(text: str) -> None:
    mesh = Mesh.parse("a=2,b=2,c=2")
    layout = parse_layout(text, mesh)
    numbers = torch.arange(48)
    assert cuts_parts_evenly((48,), layout, mesh)
    held: dict[tuple[int, ...], list[int]] = {}
    for at in mesh.coordinates():
        mine = numbers
        for axis in layout.outer_axes_of(0):
            mine = mine.chunk(2)[at[axis]]
        blocks = list(mine.chunk(len(layout.parts_of(0)))) if layout.parts_of(0) else [mine]
        for axis in layout.axes_of(0)[len(layout.outer_axes_of(0)) :]:
            blocks = [block.chunk(2)[at[axis]] for block in blocks]
        held[at] = torch.cat(blocks).tolist()
        ranges = local_ranges(48, layout, 0, mesh, at)
        assert [k for start, stop in ranges for k in range(start, stop)] == held[at]
        assert local_shape((48,), layout, mesh, at) == (len(held[at]),)
    assert sorted({k for each in held.values() for k in each}) == list(range(48))


@pytest.mark.parametrize("text", ["a:S(0/3) b:S(0)", "a:S(0/3) b:S(0/2)", "a:S(0/2) b:S(0) c:S(0/2)"])
def test_outer_axes_alone_may_cut_as_one_what_others_cut_in_parts(text: str) -> None:
    mesh = Mesh.parse("a=2,b=2,c=2")
    with pytest.raises(LayoutError, match="cut the same parts, but for outer ones that cut it as one"):
        parse_layout(text, mesh)
    layout = Layout(tuple(parse_layout(f"a:{each.partition(':')[2]}", mesh)[0] for each in text.split()) + (R,))
    assert not cuts_parts_evenly((48,), Layout(layout.placements[:3]), mesh)


@pytest.mark.parametrize("parts", [1, 2, 3, 4, 6])
def test_blocks_are_those_of_torch_chunk(parts: int) -> None:
    torch = pytest.importorskip("torch")
    for size in SIZES:
        chunks = [chunk.tolist() for chunk in torch.arange(size).chunk(parts)] if size else []
        chunks += [[]] * (parts - len(chunks))  # chunk leaves empty blocks out
        assert [list(range(*block(size, parts, i))) for i in range(parts)] == chunks


@given(st.integers(0, 100), st.integers(1, 20))
def test_blocks_lie_side_by_side_and_cover_the_dim(size: int, parts: int) -> None:
    blocks = [block(size, parts, i) for i in range(parts)]
    assert blocks[0][0] == 0
    assert blocks[-1][1] == size
    assert all(before[1] == after[0] for before, after in pairwise(blocks))


@given(layouts_on_meshes(), shapes)
def test_the_shards_cover_every_element_once_per_replica(case: tuple[Layout, Mesh], shape: tuple[int, ...]) -> None:
    layout, mesh = case
    held = dict.fromkeys(product(*map(range, shape)), 0)
    for coordinate in mesh.coordinates():
        ranges = [local_range(size, layout, dim, mesh, coordinate) for dim, size in enumerate(shape)]
        assert local_shape(shape, layout, mesh, coordinate) == tuple(stop - start for start, stop in ranges)
        for element in product(*(range(start, stop) for start, stop in ranges)):
            held[element] += 1
    cuts = math.prod(size for size, placement in zip(mesh.shape, layout) if placement.kind == "S")
    assert set(held.values()) <= {mesh.size // cuts}


@given(layouts_on_meshes(), shapes)
def test_the_largest_shard_is_the_first(case: tuple[Layout, Mesh], shape: tuple[int, ...]) -> None:
    layout, mesh = case
    all_shapes = [local_shape(shape, layout, mesh, coordinate) for coordinate in mesh.coordinates()]
    assert largest_local_shape(shape, layout, mesh) == tuple(map(max, zip(*all_shapes)))


@given(layouts_on_meshes(), shapes)
def test_even_and_empty_say_what_the_shards_show(case: tuple[Layout, Mesh], shape: tuple[int, ...]) -> None:
    layout, mesh = case
    all_shapes = [local_shape(shape, layout, mesh, coordinate) for coordinate in mesh.coordinates()]
    if is_even(shape, layout, mesh):
        assert len(set(all_shapes)) == 1
    cut = [dim for dim in range(len(shape)) if layout.axes_of(dim)]
    assert has_empty_shard(shape, layout, mesh) == any(local[dim] == 0 for local in all_shapes for dim in cut)
    if 0 not in shape:
        assert is_even(shape, layout, mesh) == (len(set(all_shapes)) == 1)


@given(layouts_on_meshes(), shapes)
def test_along_other_axes_than_the_uneven_ones_shards_are_alike(
    case: tuple[Layout, Mesh], shape: tuple[int, ...]
) -> None:
    layout, mesh = case
    uneven = uneven_axes(shape, layout, mesh)
    assert (uneven == frozenset()) == is_even(shape, layout, mesh)
    found = {c: local_shape(shape, layout, mesh, c) for c in mesh.coordinates()}
    for coordinate, local in found.items():
        first = tuple(at if axis in uneven else 0 for axis, at in enumerate(coordinate))
        assert local == found[first]


def test_a_dim_cut_twice_is_cut_over_the_first_axis_first() -> None:
    both = parse_layout("dp:S(0) tp:S(0)", MESH)
    starts = [local_range(16, both, 0, MESH, coordinate) for coordinate in MESH.coordinates()]
    assert starts == [(i, i + 2) for i in range(0, 16, 2)]


def test_the_uneven_shards_of_pytorch_194457() -> None:
    mesh = Mesh.parse("a=2,b=2")
    both = parse_layout("a:S(0) b:S(0)", mesh)
    assert [local_range(5, both, 0, mesh, c) for c in mesh.coordinates()] == [(0, 2), (2, 3), (3, 4), (4, 5)]
    assert not is_even((5, 3), both, mesh)
    assert not has_empty_shard((5, 3), both, mesh)
    assert has_empty_shard((3, 3), both, mesh)


@pytest.mark.parametrize(
    ("text", "shape", "said"),
    [
        ("dp:S(2)", (4, 4), "dp:S(2) cuts dim 2 of a tensor of shape [4, 4], which has dims 0 to 1"),
        ("tp:S(0)", (), "tp:S(0) cuts a scalar"),
    ],
)
def test_a_layout_that_does_not_fit_its_tensor_says_why(text: str, shape: tuple[int, ...], said: str) -> None:
    with pytest.raises(LayoutError, match=re.escape(said)):
        check_fits(parse_layout(text, MESH), shape, MESH)


def test_a_layout_of_another_mesh_does_not_fit() -> None:
    with pytest.raises(LayoutError, match="needs 2 placements, got 1"):
        check_fits(Layout((R,)), (4,), MESH)


def test_a_layout_that_fits_passes() -> None:
    check_fits(parse_layout("dp:S(0) tp:P(sum)", MESH), (1,), MESH)


def test_replace_and_the_questions_about_a_layout() -> None:
    layout = replicated(MESH).replace(1, P_SUM)
    assert layout == Layout((R, P_SUM))
    assert (layout.has_partial, layout.is_replicated, replicated(MESH).is_replicated) == (True, False, True)
    assert list(layout) == [R, P_SUM]
    assert (len(layout), layout[1]) == (2, Placement("P", reduce="sum"))
    assert Layout((S(0), S(0))).axes_of(0) == (0, 1)
