"""Views: a reshape of shards is offered where every rank's shard holds the same elements on both sides."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from autoshard.layout import Layout, R, S, has_empty_shard, is_possible, local_range
from autoshard.mesh import Mesh
from autoshard.ops.views import aligned
from autoshard.strategies import Enumerator

from ..oracles import all_layouts, shards_of
from ..thorough import tries
from .subjects import operator
from .test_rule_check import f

aten = torch.ops.aten
SHAPES = {
    24: [(24,), (4, 6), (2, 3, 4), (6, 4), (3, 8), (2, 2, 6), (1, 24), (4, 1, 6), (12, 2), (2, 12)],
    30: [(30,), (5, 6), (6, 5), (5, 3, 2), (2, 15), (3, 10), (1, 5, 6), (10, 3), (15, 2)],
    7: [(7,), (7, 1), (1, 7), (1, 7, 1)],
}
MESHES = [Mesh.parse(text) for text in ("a=2", "a=3", "a=4", "a=5", "a=2,b=2", "a=2,b=3", "a=3,b=2", "a=1,b=2")]


@st.composite
def reshapes(draw: st.DrawFn):
    count = draw(st.sampled_from(sorted(SHAPES)))
    mesh = draw(st.sampled_from(MESHES))
    sides = []
    for _ in range(2):
        shape = draw(st.sampled_from(SHAPES[count]))
        placements = [R, *(S(dim) for dim in range(len(shape)))]
        per_axis = ([R] if size == 1 else placements for size in mesh.shape)  # one rank replicates
        sides.append((shape, Layout(tuple(draw(st.sampled_from(choice)) for choice in per_axis))))
    return (*sides, mesh)


def _elements(shape: tuple[int, ...], layout: Layout, mesh: Mesh) -> dict[tuple[int, ...], list[int]]:
    numbered = torch.arange(torch.Size(shape).numel()).reshape(shape)
    return {at: shard.flatten().tolist() for at, shard in shards_of(numbered, layout, mesh, torch.Generator()).items()}


@settings(max_examples=tries(500))
@given(reshapes())
def test_aligned_shards_are_those_that_hold_the_same_elements_in_the_same_order(case) -> None:
    (before, a), (after, b), mesh = case
    if has_empty_shard(before, a, mesh) or has_empty_shard(after, b, mesh):
        return
    assert aligned(before, a, after, b, mesh) == (_elements(before, a, mesh) == _elements(after, b, mesh))


@st.composite
def reshapes_in_parts(draw: st.DrawFn):
    """Shapes of 48 elements, with dims cut in equal parts, some by one axis beside others that cut them as one."""
    mesh = draw(st.sampled_from([Mesh.parse(text) for text in ("a=2", "a=2,b=2", "a=3,b=2", "a=2,b=2,c=2")]))
    sides = []
    for _ in range(2):
        shape = draw(st.sampled_from([(48,), (2, 24), (4, 12), (2, 2, 12), (6, 8), (3, 16), (24, 2)]))
        placements = [R, *(S(dim, parts) for dim in range(len(shape)) for parts in ((), (1, 1), (1, 1, 1)))]
        layouts = [Layout(each) for each in product(placements, repeat=mesh.ndim)]
        sides.append((shape, draw(st.sampled_from([each for each in layouts if is_possible(shape, each, mesh)]))))
    return (*sides, mesh)


@settings(max_examples=tries(1000))
@given(reshapes_in_parts())
def test_aligned_shards_in_parts_hold_the_same_elements_in_the_same_order(case) -> None:
    """What is alike in another way than parts say it may be missed; nothing is called alike that is not."""
    (before, a), (after, b), mesh = case
    if aligned(before, a, after, b, mesh):
        assert _elements(before, a, mesh) == _elements(after, b, mesh)


def test_parts_of_a_row_are_parts_of_rows_taken_together() -> None:
    mesh = Mesh.parse("dp=2,cp=3")
    apart, together = Layout((S(0), S(1, (1,) * 4))), Layout((S(0), S(0, (1,) * 4)))
    assert aligned((2, 24, 5), apart, (48, 5), together, mesh) and aligned((48, 5), together, (2, 24, 5), apart, mesh)
    assert _elements((2, 24, 5), apart, mesh) == _elements((48, 5), together, mesh)
    assert not aligned((4, 24, 5), apart, (96, 5), together, mesh)  # two rows on a rank


@pytest.mark.parametrize(("batch", "length"), [(2, 6), (2, 5), (4, 6), (1, 6)])
def test_positions_of_one_row_are_rows_of_rows_and_positions_taken_together(batch: int, length: int) -> None:
    """Context parallelism needs it, in both directions; with two rows on a rank no block is positions of both."""
    mesh = Mesh.parse("dp=2,cp=2")
    apart, together = Layout((S(0), S(1))), Layout((S(0), S(0)))
    for before, after, pair in (
        ((batch, length, 3), (batch * length, 3), (apart, together)),
        ((batch * length, 3), (batch, length, 3), (together, apart)),
    ):
        graph = operator(aten.view.default, f(*before), after)
        strategies = Enumerator(graph, mesh).strategies(graph.nodes[-1])
        offered = {(s.inputs[0], s.outputs[0]) for s in strategies if not s.inputs[0].has_partial}
        assert (pair in offered) == (batch == 2)
        assert all(_elements(before, x, mesh) == _elements(after, y, mesh) for x, y in offered if y)


def test_the_views_offered_are_the_pairs_of_cuts_of_one_dim_that_are_aligned() -> None:
    """Nothing local is lost: every pair of layouts whose shards hold the same elements on every rank is offered."""
    for before, after in [((4, 6), (24,)), ((24,), (4, 6)), ((5, 6), (5, 3, 2)), ((5, 3, 2), (15, 2)), ((7,), (1, 7))]:
        graph = operator(aten.view.default, f(*before), after)
        for mesh in MESHES[:4]:
            strategies = Enumerator(graph, mesh).strategies(graph.nodes[-1])
            offered = {(s.inputs[0], s.outputs[0]) for s in strategies if not s.inputs[0].has_partial}
            expected = {
                (a, b)
                for a in all_layouts([R, *(S(d) for d, size in enumerate(before) if size > 1)], mesh)
                for b in all_layouts([R, *(S(d) for d, size in enumerate(after) if size > 1)], mesh)
                if not has_empty_shard(before, a, mesh)
                and not has_empty_shard(after, b, mesh)
                and _elements(before, a, mesh) == _elements(after, b, mesh)
            }
            assert offered == expected, (before, after, mesh)


def test_a_cut_of_an_inner_dim_never_becomes_a_cut_of_an_outer_one() -> None:
    """pytorch#179502: a view of an S(1) tensor (12, 8) over 4 ranks to (16, 6) was taken for S(0)."""
    graph = operator(aten.view.default, f(12, 8), (16, 6))
    strategies = Enumerator(graph, Mesh(("a",), (4,))).strategies(graph.nodes[-1])
    assert {(str(s.inputs[0][0]), str(s.outputs[0][0])) for s in strategies if s.outputs[0]} == {
        ("R", "R"),
        ("S(0)", "S(0)"),
        ("P(sum)", "P(sum)"),
    }


def test_heads_that_the_ranks_do_not_divide_are_not_cut_out_of_a_width_that_they_do() -> None:
    """Width 24 = 4 heads of 6: three ranks take 8 of 24 each, which is no whole number of heads."""
    graph = operator(aten.view.default, f(2, 5, 24), (2, 5, 4, 6))
    node = graph.nodes[-1]
    cut = Layout((S(2),))
    on = {
        n: [s for s in Enumerator(graph, Mesh(("a",), (n,))).strategies(node) if s.inputs[0] == cut] for n in (2, 3, 4)
    }
    assert [len(on[n]) for n in (2, 3, 4)] == [1, 0, 1]
    assert on[2][0].outputs == (Layout((S(2),)),)


@given(st.integers(1, 40), st.sampled_from(MESHES), st.data())
def test_local_range_is_where_chunk_puts_the_elements(size: int, mesh: Mesh, data) -> None:
    layout = Layout(tuple(data.draw(st.sampled_from([R, S(0)])) for _ in mesh.axes))
    held = _elements((size,), layout, mesh)
    for at in mesh.coordinates():
        start, stop = local_range(size, layout, 0, mesh, at)
        assert held[at] == list(range(start, stop))
