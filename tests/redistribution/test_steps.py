"""Redistribution without processes: steps, bytes, paths, and execution by ranks in lock step."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from itertools import pairwise, product
from math import prod

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

from autoshard.errors import LayoutError
from autoshard.layout import (
    P_SUM,
    Layout,
    P,
    Placement,
    R,
    S,
    has_empty_shard,
    is_even,
    largest_local_shape,
    local_shape,
    parse_layout,
)
from autoshard.lowering import Storage, storages
from autoshard.lowering.emitter import GraphEmitter
from autoshard.mesh import Mesh
from autoshard.redistribution import Step, size_bytes, step_between, steps_along
from autoshard.redistribution.execution import Shard, packed, run_step
from autoshard.redistribution.paths import cheapest_paths, copied_bytes, layouts_of, single_steps, transient_bytes

from ..oracles import Eager, LockStep, close, groups_of, shards_of, whole_of

GRIDS = ["a=2", "a=3", "a=4", "a=2,b=2", "a=2,b=3", "a=3,b=2"]
SHAPES = [(8, 7), (5, 3), (7, 4, 3)]
PARTS = (P_SUM, S(0, (1, 1)), S(1, (1, 1, 1)), S(1, (2, 1, 1)))
IN_PARTS = [("a=2", (8, 24)), ("a=3", (6, 12, 5)), ("a=2,b=2", (8, 48)), ("a=2,b=3", (7, 36)), ("a=3,b=2", (12, 5, 24))]
"""Meshes and shapes with dims that are cut in parts, some beside uneven ones, and what tensors are offered there."""


def _price(step, size: int, copied: int) -> float:
    """Latency and bandwidth of unequal axes, so that detours can pay."""
    return (max(step.axes) + 1) * (10 + size) * step.communicates + 0.01 * copied + 0.5


def _paths(shape, mesh, further=(P_SUM,), price=_price):
    layouts = layouts_of(shape, mesh, frozenset(further))
    return cheapest_paths(single_steps(layouts, shape, 4, mesh, price))


def _reachable(mesh: Mesh, shape: tuple[int, ...], further=(P_SUM,)):
    paths = _paths(shape, mesh, further)
    finite = np.isfinite(paths.seconds)
    for i, j in product(range(len(paths.layouts)), repeat=2):
        if i != j and finite[i, j]:
            yield paths.layouts[i], paths.layouts[j], paths


@pytest.mark.parametrize(("grid", "shape"), [*product(GRIDS, SHAPES), ("a=2,b=2,c=2", (13,)), *IN_PARTS])
def test_executing_every_path_gives_every_rank_its_slice_of_the_whole(grid: str, shape: tuple[int, ...]) -> None:
    mesh, generator = Mesh.parse(grid), torch.Generator().manual_seed(0)
    whole = torch.randn(shape, generator=generator, dtype=torch.float64)
    further = [p for p in PARTS if (grid, shape) in IN_PARTS or not p.parts]
    jobs = [
        (paths.path(before, after), shards_of(whole, before, mesh, generator))
        for before, after, paths in _reachable(mesh, shape, further)
    ]
    assert any(p.parts for path, _ in jobs for layout in path for p in layout) == ((grid, shape) in IN_PARTS)

    def run(emit, at):
        results = []
        for path, shards in jobs:
            x = shards[at]
            for a, b in pairwise(path):
                x = run_step(emit, x, a, b, Shard(shape, mesh, at))
                assert x.is_contiguous() and tuple(x.shape) == local_shape(shape, b, mesh, at)
            results.append(x)
        return results

    found = LockStep(mesh).run(run)
    assert jobs
    for k, (path, _) in enumerate(jobs):
        arrived = {at: results[k] for at, results in found.items()}
        goal = shards_of(whole, path[-1], mesh, generator)
        if path[-1].has_partial:
            assert close(whole_of(arrived, path[-1], mesh), whole)
        else:
            assert all(close(arrived[at], goal[at]) for at in goal), path


@pytest.mark.parametrize("how", ["as it is", "behind others", "turned"])
@pytest.mark.parametrize(
    ("shape", "count"),
    [((6, 8), 2), ((6, 8), 4), ((5, 6), 3), ((2, 12, 4), 3), ((3, 2), 2), ((0, 8), 2), ((6, 8, 0), 2)],
)
@pytest.mark.parametrize(
    "dtype", [torch.bool, torch.bfloat16, torch.float32, torch.float64, torch.int64, torch.complex64, torch.complex128]
)
def test_blocks_are_stacked_whatever_they_are_made_of_and_wherever_they_lie(
    dtype: torch.dtype, shape: tuple[int, ...], count: int, how: str
) -> None:
    """In wide words where these fit, else element by element."""
    mesh, whole = Mesh.parse(f"a={count}"), torch.arange(1.0, 1 + prod(shape)).reshape(shape).to(dtype)
    if how == "behind others":
        whole = torch.cat([whole.reshape(-1)[:1], whole.reshape(-1)])[1:].view(shape)
    elif how == "turned":
        whole = whole.transpose(0, -1).contiguous().transpose(0, -1)
    path = Layout((P_SUM,)), Layout((S(1),))
    given = packed(Eager(), whole, *path, Shard(shape, mesh, (0,)))
    assert torch.equal(given, torch.cat(whole.chunk(count, 1))) and given.is_contiguous()


def test_blocks_of_one_row_are_stacked_whatever_its_stride_is() -> None:
    """Without values torch keeps the stride of a dim of one element, by which no words can be made."""
    with FakeTensorMode():
        x = torch.empty_strided((1, 128), (1, 1))
        given = packed(Eager(), x, Layout((P_SUM,)), Layout((S(1),)), Shard((1, 128), Mesh.parse("a=4"), (0,)))
    assert given.shape == (4, 32) and given.is_contiguous()


@pytest.mark.parametrize("reduce", ["max", "min"])
def test_maxima_and_minima_are_combined_and_scattered(reduce: str) -> None:
    mesh = Mesh.parse("a=3")
    shards = {(i,): torch.tensor([[3.0, 1.0], [i, -i], [0.0, 7.0 * i], [5.0 - i, 2.0]]) for i in range(3)}
    whole = whole_of(shards, Layout((P(reduce),)), mesh)
    for goal in (R, S(0), S(1)):
        if has_empty_shard((4, 2), Layout((goal,)), mesh):
            continue
        path = (Layout((P(reduce),)), Layout((goal,)))
        results = LockStep(mesh).run(
            lambda emit, at, path=path: run_step(emit, shards[at], *path, Shard((4, 2), mesh, at))
        )
        expected = shards_of(whole, path[1], mesh, torch.Generator())
        assert all(torch.equal(results[at], expected[at]) for at in expected)


@pytest.mark.parametrize(
    ("grid", "shape"), [*product(["a=3", "a=2,b=2", "a=2,b=3"], SHAPES), ("a=2,b=3,c=2", (29,)), *IN_PARTS]
)
def test_what_the_ranks_exchange_is_what_size_bytes_says(grid: str, shape: tuple[int, ...]) -> None:
    mesh, generator = Mesh.parse(grid), torch.Generator().manual_seed(0)
    whole = torch.randn(shape, generator=generator, dtype=torch.float64)
    further = PARTS if (grid, shape) in IN_PARTS else (P_SUM,)
    for before, after, _ in _reachable(mesh, shape, further):
        try:
            step = step_between(before, after)
        except LayoutError:
            continue
        world, shards = LockStep(mesh), shards_of(whole, before, mesh, generator)
        world.run(lambda emit, at, b=before, a=after, s=shards: run_step(emit, s[at], b, a, Shard(shape, mesh, at)))
        expected = [(step.kind, step.axes, size_bytes(step, before, shape, 1, mesh))] if step.communicates else []
        assert world.sent == expected


@pytest.mark.parametrize("grid", ["a=3", "a=2,b=2", "a=2,b=3"])
def test_cheapest_paths_are_those_of_dijkstra(grid: str) -> None:
    mesh, shape = Mesh.parse(grid), (6, 4)
    paths = _paths(shape, mesh)
    for start in paths.layouts:
        best = _dijkstra(start, paths.layouts, shape, mesh)
        for goal in paths.layouts:
            found = paths.seconds[paths.layouts.index(start), paths.layouts.index(goal)]
            assert found == pytest.approx(best.get(goal, np.inf))


def _dijkstra(start: Layout, layouts, shape, mesh: Mesh) -> dict[Layout, float]:
    best, queue = {start: 0.0}, [(0.0, start)]
    while queue:
        cost, at = heapq.heappop(queue)
        if cost > best[at]:
            continue
        for other in layouts:
            try:
                step = step_between(at, other)
            except LayoutError:
                continue
            sizes = [rule(step, at, shape, 4, mesh) for rule in (size_bytes, copied_bytes)]
            if cost + _price(step, *sizes) < best.get(other, np.inf):
                best[other] = cost + _price(step, *sizes)
                heapq.heappush(queue, (best[other], other))
    return best


@pytest.mark.parametrize("grid", GRIDS)
def test_paths_obey_the_triangle_inequality_start_where_they_should_and_cost_what_their_steps_cost(grid: str) -> None:
    mesh, shape = Mesh.parse(grid), (6, 12)
    paths = _paths(shape, mesh)
    seconds = paths.seconds
    assert (np.diag(seconds) == 0).all()
    assert (seconds[:, None, :] <= seconds[:, :, None] + seconds[None, :, :] + 1e-9).all()
    for before, after, _ in _reachable(mesh, shape):
        path = paths.path(before, after)
        assert (path[0], path[-1]) == (before, after)
        cost = sum(
            _price(step, *(rule(step, a, shape, 4, mesh) for rule in (size_bytes, copied_bytes)))
            for step, a in zip(steps_along(path), path)
        )
        assert cost == pytest.approx(seconds[paths.layouts.index(before), paths.layouts.index(after)])


@pytest.mark.parametrize("grid", GRIDS)
def test_no_step_produces_a_partial_and_everything_else_is_reachable(grid: str) -> None:
    mesh, shape = Mesh.parse(grid), (8, 12)
    paths = _paths(shape, mesh, (P("max"), P_SUM))
    for i, before in enumerate(paths.layouts):
        for j, after in enumerate(paths.layouts):
            needs_partial = any(q.kind == "P" and p != q for p, q in zip(before, after))
            assert np.isfinite(paths.seconds[i, j]) == (not needs_partial)
            if i != j and not needs_partial:
                for a, b in pairwise(paths.path(before, after)):
                    assert all(q.kind != "P" or p == q for p, q in zip(a, b))


def test_of_two_axes_that_cut_one_dim_the_inner_one_changes_or_both() -> None:
    mesh = Mesh.parse("a=2,b=2")
    nested, outer, inner = (parse_layout(text, mesh) for text in ("a:S(0) b:S(0)", "a:S(0)", "b:S(0)"))
    assert step_between(nested, outer).kind == "all_gather"
    assert step_between(outer, nested).kind == "slice"
    whole, addends = parse_layout("a:R b:R", mesh), parse_layout("a:P(sum) b:P(sum)", mesh)
    assert step_between(nested, whole).kind == "all_gather"
    assert step_between(addends, nested).kind == "reduce_scatter"
    for before, after in [(nested, inner), (inner, nested), (nested, nested), (whole, nested), (addends, outer)]:
        with pytest.raises(LayoutError, match="no single step"):
            step_between(before, after)


@pytest.mark.parametrize(
    ("before", "after", "shape", "elements"),
    [
        ("a:S(0)", "a:R", (8, 6), 8 * 6),  # the gathered whole
        ("a:S(0)", "a:R", (5, 3), 6 * 3),  # blocks of 3 and 2, padded to 3
        ("a:P(sum)", "a:R", (5, 3), 5 * 3),
        ("a:P(sum)", "a:S(0)", (5, 3), 6 * 3),
        ("a:P(sum)", "a:S(1)", (5, 3), 5 * 4),
        ("a:S(0)", "a:S(1)", (5, 3), 3 * 4),  # 3 rows, and 3 columns padded to 2 x 2
        ("a:R", "a:S(0)", (5, 3), 0),
        ("a:S(0) b:S(0)", "a:S(0)", (5, 3), 4 * 3),  # 3 rows in blocks of 2
        ("a:S(1) b:S(0)", "a:S(1)", (5, 3), 6 * 2),
        ("a:S(0) b:P(sum)", "a:S(0)", (5, 3), 3 * 3),
        ("a:P(sum)", "a:R", (), 1),
    ],
)
def test_bytes_of_a_step_are_those_of_the_larger_buffer_with_padding(before, after, shape, elements: int) -> None:
    mesh = Mesh.parse("a=2,b=2")
    a, b = parse_layout(before, mesh), parse_layout(after, mesh)
    assert size_bytes(step_between(a, b), a, shape, 4, mesh) == 4 * elements


def test_copied_bytes_of_each_step_by_hand() -> None:
    mesh = Mesh.parse("a=2")
    r, s0, s1, p = (Layout((placement,)) for placement in (R, S(0), S(1), P_SUM))
    copied = {
        (a, b): copied_bytes(step_between(a, b), a, (8, 6), 4, mesh)
        for a, b in [(s0, r), (s1, r), (p, s0), (p, s1), (p, r), (s0, s1), (s1, s0), (r, s0), (r, s1)]
    }
    whole, half = 8 * 6 * 4, 8 * 6 * 2
    assert copied == {
        (s0, r): 0,
        (s1, r): 2 * whole,
        (p, s0): 0,
        (p, s1): 2 * whole,
        (p, r): 0,
        (s0, s1): 2 * half,  # columns are packed, rows arrive in order
        (s1, s0): 2 * half,
        (r, s0): 2 * half,  # copied, so that the whole can go
        (r, s1): 2 * half,
    }


class Copies:
    """An emitter that counts the bytes which the operators of another one read and write."""

    def __init__(self, emit) -> None:
        self._emit, self.copied = emit, 0

    def __getattr__(self, name: str):
        return getattr(self._emit, name)

    def call(self, op, *args, **kwargs):
        result = self._emit.call(op, *args, **kwargs)
        aten = torch.ops.aten
        if op in (aten.cat.default, aten.constant_pad_nd.default, aten.clone.default):
            self.copied += 2 * result.nbytes
        elif op is torch.ops.aten.contiguous.default and not args[0].is_contiguous():
            self.copied += 2 * result.nbytes
        return result


@pytest.mark.parametrize(
    ("grid", "shape"), [*product(["a=2", "a=3", "a=2,b=2"], [(8, 12), (4, 12, 8), *SHAPES]), *IN_PARTS]
)
def test_what_the_ranks_copy_is_what_copied_bytes_says(grid: str, shape: tuple[int, ...]) -> None:
    """Exactly for even shards; padding and cutting of uneven ones is priced within a factor of three."""
    mesh, generator = Mesh.parse(grid), torch.Generator().manual_seed(0)
    whole = torch.randn(shape, generator=generator, dtype=torch.float64)
    for before, after, _ in _reachable(mesh, shape, PARTS if (grid, shape) in IN_PARTS else (P_SUM,)):
        try:
            step = step_between(before, after)
        except LayoutError:
            continue
        shards, copies = shards_of(whole, before, mesh, generator), {}

        def run(emit, at, before=before, after=after, shards=shards, copies=copies):
            copies[at] = Copies(emit)
            return run_step(copies[at], shards[at], before, after, Shard(shape, mesh, at))

        LockStep(mesh).run(run)
        most = max(each.copied for each in copies.values())
        priced = copied_bytes(step, before, shape, 8, mesh)
        if is_even(shape, before, mesh) and is_even(shape, after, mesh):
            assert priced == most, f"{before} -> {after}"
        else:
            assert most / 3 <= priced <= 3 * most or (most, priced) == (0, 0), f"{before} -> {after}"


def test_a_dear_axis_is_avoided_by_gathering_over_the_cheap_one_first() -> None:
    mesh = Mesh.parse("slow=2,fast=2")
    price = lambda step, size, copied: size * (100 if 0 in step.axes else 1) + 1e-6  # noqa: E731
    paths = _paths((8, 8), mesh, price=price)
    before, after = parse_layout("slow:P(sum) fast:P(sum)", mesh), parse_layout("slow:R fast:R", mesh)
    kinds = [(step.kind, step.axes) for step in steps_along(paths.path(before, after))]
    assert kinds == [("reduce_scatter", (1,)), ("all_reduce", (0,)), ("all_gather", (1,))]


@pytest.mark.parametrize("grid", ["dp=4", "dp=2,tp=2"])
def test_transient_bytes_are_those_alive_while_the_steps_run(grid: str) -> None:
    """Steps written on the meta device, and the storages that live beside the source at each."""
    mesh, shape = Mesh.parse(grid), (8, 16, 4)
    layouts = layouts_of(shape, mesh, frozenset({P_SUM, S(0, (1, 1)), S(1, (2, 1, 1))}))
    paths = cheapest_paths(single_steps(layouts, shape, 4, mesh, lambda step, size, copied: 1.0 + size + copied))
    for before in layouts:
        for after in layouts:
            if before != after and np.isfinite(paths.seconds[layouts.index(before), layouts.index(after)]):
                path = paths.path(before, after)
                emitter = GraphEmitter(mesh, groups_of(mesh))
                source = torch.empty(largest_local_shape(shape, before, mesh), device="meta")
                value = emitter.placeholder("x", source, "x")
                for a, b in pairwise(path):
                    value = run_step(emitter, value, a, b, Shard(shape, mesh, (0,) * mesh.ndim))
                assert transient_bytes(path, shape, 4, mesh) == _most_alive(emitter.graph, value), path


def _most_alive(graph: fx.Graph, result: fx.Node) -> int:
    """Bytes beside the input at the fullest node; every storage dies after its last use, the result's never."""
    nodes = list(graph.nodes)
    of = {node: storage for node in nodes for storage in storages(node)}
    last: dict[Storage, int] = {}
    first: dict[Storage, int] = {}
    for k, node in enumerate(nodes):
        first.setdefault(of[node], k)
        last |= {of[each]: k for each in (node, *node.all_input_nodes)}
    last[of[result]] = len(nodes)
    alive = [{each for each in first if first[each] <= k <= last[each]} - {of[nodes[0]]} for k in range(len(nodes))]
    return max(sum(each.size_bytes for each in held) for held in alive)


@pytest.mark.parametrize(("latency_s", "together"), [(2.0, True), (0.0, False)])
def test_a_step_over_two_axes_is_offered_where_it_is_cheaper_than_two(latency_s: float, together: bool) -> None:
    """A step costs its latency and a second for each rank but one: 3 over both axes, 1 and 1 one after the other."""
    mesh = Mesh.parse("a=2,b=2")
    price = lambda step, size, copied: latency_s + mesh.parts(step.axes) - 1  # noqa: E731
    steps = single_steps(layouts_of((8,), mesh), (8,), 4, mesh, price)
    ends = {(steps.layouts[i], steps.layouts[j]) for i, j in zip(steps.tails, steps.heads)}
    found = {step_between(*pair).kind for pair in ends if len(step_between(*pair).axes) == 2}
    assert found == ({"all_reduce", "all_gather", "reduce_scatter"} if together else set())


def test_what_is_known_of_a_mesh_is_not_taken_for_one_of_another_order() -> None:
    # equal meshes, on one of which no block may travel over both axes at once: the ranks of a+b are 0, 2, 1, 3
    layouts = layouts_of((8,), Mesh.parse("a=2,b=2"))
    whole, cut = (layouts.index(Layout((p, p))) for p in (R, S(0)))

    def offered(mesh: Mesh) -> bool:
        steps = single_steps(layouts, (8,), 4, mesh, lambda step, size, copied: 1.0)
        return (cut, whole) in set(zip(steps.tails.tolist(), steps.heads.tolist()))

    crossed = Mesh(("a", "b"), (2, 2), (0, 2, 1, 3))
    assert [offered(mesh) for mesh in (crossed, Mesh.parse("a=2,b=2"), crossed)] == [False, True, False]


PLACEMENTS = st.sampled_from([R, P_SUM, P("max"), S(0), S(1), S(0, (1, 1)), S(0, (1, 2)), S(1, (1, 1, 1))])


@given(st.lists(st.lists(PLACEMENTS, min_size=1, max_size=3).map(tuple), min_size=2, max_size=8))
def test_a_step_that_was_looked_up_before_is_the_one_found_anew(placements: list[tuple[Placement, ...]]) -> None:
    def found(step_of: Callable[[Layout, Layout], Step], *ends: Layout) -> Step | str:
        try:
            return step_of(*ends)
        except LayoutError as error:
            return str(error)

    layouts = list(map(Layout, placements))
    for ends in (*product(layouts, repeat=2), *product(reversed(layouts), repeat=2)):
        assert found(step_between, *ends) == found(step_between.__wrapped__, *ends)
