"""What a run measures: sizes, what is held out, the order of rounds, and whether the job fits the mesh."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from autoshard.errors import CalibrationError
from autoshard.measure.job import check_job
from autoshard.measure.kernels import COLD_BYTES, KERNELS, MOST_SETS, STREAMS, in_a_row, kernel, kernel_points
from autoshard.measure.sampling import (
    BEHIND_BYTES,
    BESIDE,
    BESIDE_KERNELS,
    GROUP_KINDS,
    ROW_BYTES,
    ROW_TURNS,
    collective_points,
    row_points,
    shuffled,
    together_points,
)
from autoshard.mesh import Mesh
from cost_models import COLLECTIVE_KINDS, OP_KINDS
from cost_models.samples import RowPoint

MESH = Mesh.parse("dp=2,one=1,tp=3")


@pytest.mark.parametrize("most", [1024, 5000, 1 << 20])
def test_every_collective_over_every_axis_of_several_ranks_doubles_from_a_kibibyte_up(most: int) -> None:
    points = collective_points(MESH, most)
    assert {p.axis for p in points} == {"dp", "tp", "dp+tp"}
    assert {p.kind for p in points} <= set(COLLECTIVE_KINDS)
    assert {p.kind for p in points if p.axis == "dp+tp"} == set(GROUP_KINDS)
    for kind in {p.kind for p in points}:
        sizes = [p.size_bytes for p in points if (p.kind, p.axis) == (kind, "dp")]
        assert sizes == [1024 << i for i in range(len(sizes))]
        assert sizes[-1] <= most < 2 * sizes[-1]


def test_what_hides_is_measured_beside_products_on_every_axis() -> None:
    collectives, kernels = collective_points(MESH, 1 << 20), kernel_points(1024, 1 << 20)
    found = together_points(collectives, kernels)
    assert {(p.collective.kind, p.collective.axis, p.kernels) for p in found} == {
        (kind, axis, count) for kind in BESIDE for axis in ("dp", "tp") for count in BESIDE_KERNELS
    }
    assert all(p.collective in collectives and p.kernel in kernels for p in found)  # each alone is measured too
    assert {p.kernel.shape for p in found} == {(512, 512, 512)}


def test_rows_have_every_kind_that_streams_and_collectives_behind_them_that_hide_on_every_axis() -> None:
    collectives, kernels = collective_points(MESH, 1 << 20), kernel_points(1024, 1 << 20)
    found = row_points(collectives, kernels)
    alone = [p for p in found if p.collective is None]
    assert len(alone) == len(ROW_BYTES)
    for point in alone:
        of_graphs = set(STREAMS) - {"adamw"}
        assert {p.name for p in point.kernels} == {"mm", *of_graphs}
        assert len(point.kernels) == ROW_TURNS * (1 + len(of_graphs)) and point.views == ROW_TURNS * len(of_graphs)
    behind = [p.collective for p in found if p.collective]
    assert len(set(behind)) == len(behind) == len(BEHIND_BYTES) * len(BESIDE) * 2
    assert {(p.kind, p.axis) for p in behind} == {(kind, axis) for kind in BESIDE for axis in ("dp", "tp")}
    assert all(size <= max(p.size_bytes for p in behind) < size + 12 for size in BEHIND_BYTES[-1:])
    # each alone is measured too
    assert set(behind) <= set(collectives) and all(set(p.kernels) <= set(kernels) for p in found)
    assert all(replace(p, collective=None) in alone for p in found)


def test_a_row_runs_its_kernels_in_order_and_its_views_between_them() -> None:
    kernels = [p for p in kernel_points(64, 1 << 14) if p.dtype == "float32"]
    product, add, softmax = (next(p for p in kernels if p.name == name) for name in ("mm", "add", "softmax"))
    seen: list[str] = []
    with Names(seen):
        run: Any = in_a_row(SimpleNamespace(device=torch.device("cpu")), RowPoint((product, add, softmax), 2))  # type: ignore[arg-type]
        del seen[:]
        run()
    assert seen == ["mm", "view", "add", "transpose", "_softmax"]


class Names(TorchDispatchMode):
    """The operators that run."""

    def __init__(self, seen: list[str]) -> None:
        super().__init__()
        self._seen = seen

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._seen.append(func._overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("size", [1 << 12, 1 << 20, 1 << 23, 1 << 26])
def test_a_kernel_comes_back_to_numbers_when_a_cache_has_forgotten_them(
    monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    read: list[tuple[int, ...]] = []

    def seen(*inputs: Any) -> None:
        read.append(tuple(x.data_ptr() for x in inputs))

    point = next(p for p in kernel_points(64, size) if (p.name, p.dtype) == ("add", "float32"))
    point = replace(point, shape=(size // 4096, 1024))
    monkeypatch.setitem(KERNELS, "add", replace(KERNELS["add"], call=seen))
    run: Any = kernel(SimpleNamespace(device=torch.device("cpu")), point)  # type: ignore[arg-type]
    for _ in range(MOST_SETS + 1):
        run()
    again = read.index(read[0], 1) if read[0] in read[1:] else len(read)
    assert again == max(1, min(MOST_SETS, COLD_BYTES["cpu"] // (2 * size)))
    assert len({start for inputs in read[:again] for start in inputs}) == 2 * again  # none is read twice before


def test_buffers_divide_among_the_ranks() -> None:
    assert all(p.size_bytes % (4 * MESH.parts(MESH.indices(p.axis))) == 0 for p in collective_points(MESH, 1 << 20))


def test_every_second_size_is_held_out_and_lies_between_two_that_are_fitted() -> None:
    for axis in ("dp", "tp"):
        series = [p for p in collective_points(MESH, 1 << 20) if (p.kind, p.axis) == ("all_reduce", axis)]
        assert [p.held_out for p in series] == [i % 2 == 1 for i in range(len(series))]
    for name in KERNELS:
        series = [p for p in kernel_points(512, 1 << 22) if (p.name, p.dtype) == (name, "float32")]
        assert not series[0].held_out
        assert name == "conv2d" or any(p.held_out for p in series)


def test_every_kind_of_kernel_that_is_priced_by_its_work_is_measured() -> None:
    kinds = {p.kind for p in kernel_points(512, 1 << 20)}
    assert kinds == set(OP_KINDS) - {"view"}


def test_amounts_of_kernels_are_positive_and_rise_with_the_shape() -> None:
    for name in KERNELS:
        series = [p for p in kernel_points(512, 1 << 22) if (p.name, p.dtype) == (name, "float32")]
        assert all(math.isfinite(p.flops) and p.bytes_moved > 0 for p in series)
        assert [p.bytes_moved for p in series] == sorted({p.bytes_moved for p in series})


def test_rounds_have_all_points_in_orders_that_change_and_are_the_same_everywhere() -> None:
    points = collective_points(MESH, 1 << 20)
    first, second = shuffled(points, 0), shuffled(points, 1)
    assert sorted(first) == sorted(second) == sorted(points)
    assert first != second
    assert shuffled(points, 0) == first


@pytest.mark.parametrize(
    ("environment", "said"),
    [
        ({}, "start it with torchrun --nproc-per-node 4 -m autoshard calibrate --mesh dp=2,tp=2"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "2 ranks, fewer ranks than the mesh dp=2,tp=2, which needs 4"),
        ({"RANK": "0", "WORLD_SIZE": "8"}, "8 ranks, more ranks than the mesh dp=2,tp=2, which needs 4"),
    ],
)
def test_a_job_of_another_size_than_the_mesh_is_refused(environment: dict[str, str], said: str) -> None:
    with pytest.raises(CalibrationError, match=said):
        check_job(Mesh.parse("dp=2,tp=2"), "cpu", environment)


def test_a_job_of_the_mesh_passes() -> None:
    check_job(Mesh.parse("dp=2,tp=2"), "cpu", {"RANK": "3", "WORLD_SIZE": "4"})
