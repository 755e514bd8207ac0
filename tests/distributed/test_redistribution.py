"""Redistribution on real processes: every pair of layouts, against the definition of layouts and against DTensor."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed._functional_collectives as funcol
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, distribute_tensor

import autoshard
import cost_models
from autoshard.layout import Layout, P, S, format_layout, has_empty_shard, is_even
from autoshard.lowering.placements import placements_of
from autoshard.lowering.shards import local_part
from autoshard.mesh import Mesh
from autoshard.redistribution import size_bytes, steps_along
from autoshard.redistribution.paths import Paths, cheapest_paths, layouts_of, single_steps

from ..thorough import some_thorough
from .eager import combined, pieces_of, run_path
from .harness import run_ranks

MESHES = {"1": "tp=1", "2": "tp=2", "3": "tp=3", "4": "tp=4", "2x2": "dp=2,tp=2"}
SHAPES = [(8, 4), (5, 3), (7, 5, 6), (13,)]
# torch 2.13 gives wrong numbers on these pairs (pytorch#194457); a release that is right only shortens the list.
KNOWN_CORRUPTION = ("2.11", "2.12", "2.13")


def _paths(shape: tuple[int, ...], mesh: Mesh, itemsize: int, reduces: tuple[str, ...] = ("sum",)) -> Paths:
    profile = cost_models.load_profile("cpu-gloo")
    topology = profile.topology(mesh.axes, mesh.shape)

    def seconds(step: Any, size: int, copied: int) -> float:
        sent = topology.collective_s(step.kind, step.axes, size) if step.communicates else 0.0
        return sent + profile.copy_s(copied)

    return cheapest_paths(
        single_steps(layouts_of(shape, mesh, frozenset(map(P, reduces))), shape, itemsize, mesh, seconds)
    )


def _reachable(before: Layout, after: Layout) -> bool:
    return all(old == new for old, new in zip(before, after) if new.kind == "P")


def _check_all_pairs(axes: str, shape: tuple[int, ...], dtype: torch.dtype, reduces: tuple[str, ...]) -> dict[str, Any]:
    """Runs every pair on this rank. Returns the number of pairs, and those on which torch differs."""
    mesh = Mesh.parse(axes)
    device_mesh = init_device_mesh("cpu", mesh.shape, mesh_dim_names=mesh.axes)
    coordinate = tuple(device_mesh.get_coordinate())
    paths = _paths(shape, mesh, dtype.itemsize, reduces)
    pairs, torch_wrong = 0, []
    for i, before in enumerate(paths.layouts):
        pieces = pieces_of(shape, before, mesh.shape, dtype)
        held = local_part(pieces[coordinate], before, mesh, coordinate)
        if not before.has_partial:
            theirs = distribute_tensor(pieces[coordinate], device_mesh, placements_of(before))
            assert torch.equal(theirs.to_local(), held), f"DTensor cuts {shape} {before} in another way"
        stride = torch.empty(shape).stride()
        start = DTensor.from_local(
            held, device_mesh, placements_of(before), run_check=False, shape=torch.Size(shape), stride=stride
        )
        for j, after in enumerate(paths.layouts):
            what = f"{shape}: {format_layout(before, mesh)} -> {format_layout(after, mesh)}"
            assert _reachable(before, after) == bool(paths.seconds[i, j] < float("inf")), what
            if not _reachable(before, after):
                continue
            pairs += 1
            path = paths.path(before, after)
            with autoshard.measure_collectives(device_mesh) as log:
                ours = run_path(start.to_local(), path, shape, device_mesh)
            wanted = local_part(combined(pieces, before, after)[coordinate], after, mesh, coordinate)
            assert torch.equal(ours, wanted), what
            assert ours.is_contiguous() and ours.dtype == dtype, what
            planned = [
                (step.kind, mesh.named(step.axes), size_bytes(step, at, shape, dtype.itemsize, mesh))
                for step, at in zip(steps_along(path), path)
                if step.communicates
            ]
            assert log.records == planned, f"{what}: ran {log.records}, planned {planned}"
            if not torch.equal(start.redistribute(placements=placements_of(after)).to_local(), wanted):
                torch_wrong.append((before, after))
    return {"pairs": pairs, "torch_wrong": torch_wrong}


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("axes", MESHES.values(), ids=MESHES)
def test_every_pair_of_layouts_gives_what_the_layout_says_with_the_bytes_priced(axes: str, shape: tuple[int, ...]):
    mesh = Mesh.parse(axes)
    results = run_ranks(mesh.size, _check_all_pairs, axes, shape, torch.float32, ("sum",))
    layouts = layouts_of(shape, mesh)
    assert {r["pairs"] for r in results} == {sum(_reachable(a, b) for a in layouts for b in layouts)}
    for before, after in {pair for r in results for pair in r["torch_wrong"]}:
        # only where one dim is cut unevenly by both axes may torch be wrong, and only in known versions
        assert torch.__version__.startswith(KNOWN_CORRUPTION), f"{before} -> {after}"
        assert any(
            len(layout.axes_of(d)) == 2 and not is_even(shape, layout, mesh)
            for layout in (before, after)
            for d in range(len(shape))
        ), f"{before} -> {after}"


DTYPES = [(torch.int64, "max"), (torch.float32, "min"), (torch.bfloat16, "sum")]


@pytest.mark.parametrize(("dtype", "reduce"), some_thorough(DTYPES, DTYPES[1:2]))
def test_other_dtypes_and_reductions(dtype: torch.dtype, reduce: str):
    run_ranks(4, _check_all_pairs, "dp=2,tp=2", (5, 3), dtype, (reduce,))


def _gather_doubly_cut() -> tuple[bool, bool]:
    """Whether torch, and whether autoshard, restores a (5, 3) tensor whose rows both axes cut."""
    mesh = Mesh.parse("dp=2,tp=2")
    device_mesh = init_device_mesh("cpu", mesh.shape, mesh_dim_names=mesh.axes)
    device_mesh._flatten()  # torch gathers over both axes at once only where it finds their flattened mesh
    full = torch.arange(15.0).reshape(5, 3)
    cut = Layout((S(0), S(0)))
    start = distribute_tensor(full, device_mesh, placements_of(cut))
    paths = _paths((5, 3), mesh, 4)
    path = paths.path(cut, next(layout for layout in paths.layouts if layout.is_replicated))
    ours = run_path(start.to_local(), path, (5, 3), device_mesh)
    return torch.equal(start.full_tensor(), full), torch.equal(ours, full)


def test_torch_corrupts_a_doubly_cut_tensor_and_autoshard_does_not():
    """pytorch#194457: a (5, 3) tensor with rows over 2x2, gathered over the flattened mesh, loses its fourth row."""
    results = run_ranks(4, _gather_doubly_cut)
    assert all(ours for _, ours in results)
    if torch.__version__.startswith("2.13"):
        assert not any(theirs for theirs, _ in results)


def _measured() -> list[tuple[str, str, int]]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    with autoshard.measure_collectives(mesh) as log:
        funcol.all_reduce(torch.ones(3), "sum", mesh.get_group("tp"))
        funcol.all_gather_tensor(torch.ones(3), 0, (mesh, 0))
        funcol.broadcast(torch.ones(2), 0, mesh.get_group("dp"))
        torch.ones(3).add(1)
    return log.records


def test_measuring_sees_every_functional_collective_whoever_runs_it():
    """Also those that no plan has, under torch's name."""
    wanted = [("all_reduce", "tp", 12), ("all_gather", "dp", 24), ("_c10d_functional.broadcast.default", "dp", 8)]
    assert run_ranks(4, _measured) == [wanted] * 4


def _check_empty_shards(axes: str, shape: tuple[int, ...]) -> int:
    """Runs every single step between layouts under which some rank is left without elements."""
    mesh = Mesh.parse(axes)
    device_mesh = init_device_mesh("cpu", mesh.shape, mesh_dim_names=mesh.axes)
    coordinate = tuple(device_mesh.get_coordinate())
    placements = placements_with_empty(shape, mesh)
    paths = cheapest_paths(single_steps(placements, shape, 4, mesh, lambda step, size, copied: 1.0 + size))
    pairs = 0
    for before in paths.layouts:
        pieces = pieces_of(shape, before, mesh.shape, torch.float32)
        held = local_part(pieces[coordinate], before, mesh, coordinate)
        for after in paths.layouts:
            if _reachable(before, after):
                ours = run_path(held, paths.path(before, after), shape, device_mesh)
                wanted = local_part(combined(pieces, before, after)[coordinate], after, mesh, coordinate)
                assert torch.equal(ours, wanted), f"{shape} on {axes}: {before} -> {after}"
                pairs += has_empty_shard(shape, before, mesh) or has_empty_shard(shape, after, mesh)
    return pairs


def placements_with_empty(shape: tuple[int, ...], mesh: Mesh) -> tuple[Layout, ...]:
    """Every layout, those included that plans never use because a rank would hold nothing."""
    roomy = tuple(mesh.size * size for size in shape)
    return layouts_of(roomy, mesh)


@pytest.mark.parametrize(("axes", "shape"), [("tp=4", (5, 3)), ("tp=3", (2, 4)), ("dp=2,tp=2", (3, 2))])
def test_ranks_left_without_elements_take_part_all_the_same(axes: str, shape: tuple[int, ...]):
    assert min(run_ranks(Mesh.parse(axes).size, _check_empty_shards, axes, shape)) > 0
