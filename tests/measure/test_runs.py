"""Calibration on real gloo processes: profiles come out, interruptions lose nothing, failures reach every rank."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch.utils._python_dispatch import TorchDispatchMode

from autoshard.errors import CalibrationError
from autoshard.measure import Effort, Job, Series, calibrate, check
from autoshard.measure.calibrate import points_of
from autoshard.measure.kernels import kernel_points
from autoshard.measure.measure import measure
from autoshard.measure.sampling import BESIDE, GROUP_KINDS
from autoshard.measure.timed_collectives import collective, together
from autoshard.mesh import Mesh
from cost_models import MeasuredMesh, load_profile
from cost_models.collective_kinds import COLLECTIVE_KINDS, REDISTRIBUTION_KINDS
from cost_models.fit import Compared
from cost_models.samples import (
    CollectivePoint,
    KernelPoint,
    Point,
    Sample,
    SamplesError,
    SamplesFile,
    TogetherPoint,
    read_samples,
)

from ..distributed.harness import caught, run_ranks

TINY = Effort(rounds=3, repetition_s=1e-5, point_s=5.0, budget_s=60.0, max_bytes=8192, max_width=64)
MESH = Mesh.parse("dp=2,tp=2")


def quiet(done: int, total: int, what: str) -> None:
    """No progress."""


def _calibrate(folder: str, effort: Effort = TINY) -> tuple[int, float] | None:
    job = Job.on(MESH, "cpu")
    found = calibrate(job, effort, Path(folder) / "s.jsonl", Path(folder) / "p.yaml", quiet)
    return found and (len(found.samples.samples), found.profile.memory_bytes)


@pytest.fixture(scope="module")
def calibrated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a profile and its samples, which tests only read."""
    folder = tmp_path_factory.mktemp("calibrated")
    run_ranks(4, _calibrate, str(folder))
    return folder


def test_four_ranks_write_a_profile_that_prices_their_mesh(tmp_path: Path) -> None:
    results = run_ranks(4, _calibrate, str(tmp_path))
    assert results[0] is not None and results[1:] == [None] * 3
    samples = read_samples(tmp_path / "s.jsonl")
    counts = Counter(sample.point for sample in samples.samples)
    assert samples.complete and set(counts.values()) == {TINY.rounds}
    profile = load_profile(str(tmp_path / "p.yaml"))
    topology = profile.topology(MESH.axes, MESH.shape)
    assert all(topology.collective_s(kind, axis, 1 << 20) > 0 for kind in COLLECTIVE_KINDS for axis in (0, 1))
    assert set(profile.provenance.collectives) == {"dp", "tp", "dp+tp"}
    assert set(profile.provenance.together) == {"dp", "tp"}
    assert isinstance(profile.network, MeasuredMesh) and set(profile.network.flattened) == {("dp", "tp")}
    assert 0 <= profile.contention <= 1
    assert profile.compute.issue_s >= 0 and profile.meeting_s >= 0 and profile.bucket_copies
    assert profile.provenance.machine and profile.provenance.versions["torch"]
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["p.yaml", "s.jsonl"]

    before = (tmp_path / "s.jsonl").read_bytes()
    assert run_ranks(4, _calibrate, str(tmp_path))[0] == results[0]
    assert (tmp_path / "s.jsonl").read_bytes() == before  # a complete file is fitted again, not measured again


def _run_collectives() -> list[tuple[str, int, int, list[float]]]:
    job = Job.on(MESH, "cpu")
    found = []
    for kind in REDISTRIBUTION_KINDS:  # a broadcast works in place
        point = CollectivePoint(kind, "tp", 1024, held_out=False)
        run: Any = collective(job, point)
        (given,) = (cell.cell_contents for cell in run.__closure__ if hasattr(cell.cell_contents, "nbytes"))
        out = run()
        found.append((kind, given.nbytes, out.nbytes, out.unique().tolist()))
    return found


def test_collectives_have_the_buffers_and_results_that_their_points_say() -> None:
    for found in run_ranks(4, _run_collectives):
        assert found == [
            ("all_gather", 512, 1024, [1.0]),
            ("reduce_scatter", 1024, 512, [2.0]),
            ("all_reduce", 1024, 1024, [2.0]),
            ("all_to_all", 1024, 1024, [1.0]),
        ]


def _run_together() -> list[list[float]]:
    """The results of a collective beside products, and where in the order of what ran it was waited for."""
    job = Job.on(MESH, "cpu")
    product = next(p for p in kernel_points(64, 1 << 12) if p.name == "mm")
    found = []
    for kind in BESIDE:
        sent = CollectivePoint(kind, "tp", 1024, held_out=False)
        seen: list[str] = []
        with _Names(seen):
            out: Any = together(job, TogetherPoint(sent, product, 3))()
        assert [name for name in seen if name in (kind, "mm", "wait_tensor")] == [kind, *["mm"] * 3, "wait_tensor"]
        found.append(out.unique().tolist())
    return found


class _Names(TorchDispatchMode):
    """The operators that run."""

    def __init__(self, seen: list[str]) -> None:
        super().__init__()
        self._seen = seen

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._seen.append(func._overloadpacket.__name__.removesuffix("_into_tensor"))
        return func(*args, **(kwargs or {}))


def test_a_collective_is_on_its_way_while_kernels_run() -> None:
    assert run_ranks(4, _run_together) == [[[1.0], [2.0]]] * 4


def _fail_after(folder: str, count: int) -> tuple[str, str]:
    """Calibrates; the first rank's disk takes so many samples and no more."""
    appended = SamplesFile.append

    def append(self: SamplesFile, samples: Any) -> None:
        if self.count >= count:
            raise SamplesError(f"cannot write the samples {self.path}: no space left on device")
        appended(self, samples)

    SamplesFile.append = append  # type: ignore[method-assign]
    return caught(lambda: _calibrate(folder))


@pytest.mark.thorough
def test_a_disk_that_fills_up_ends_every_rank_and_the_same_command_continues(tmp_path: Path) -> None:
    (tmp_path / "p.yaml").write_text("a good profile")
    results = run_ranks(4, _fail_after, str(tmp_path), 100)
    assert all(kind == "CalibrationError" for kind, _ in results)
    assert "no space left on device" in results[0][1]
    assert (tmp_path / "p.yaml").read_text() == "a good profile"
    kept = read_samples(tmp_path / "s.jsonl")
    assert len(kept.samples) == 100 and not kept.complete
    run_ranks(4, _calibrate, str(tmp_path))
    after = read_samples(tmp_path / "s.jsonl")
    assert after.samples[:100] == kept.samples
    assert set(Counter(sample.point for sample in after.samples).values()) == {TINY.rounds}
    assert load_profile(str(tmp_path / "p.yaml")).name == "p"


def _die_after(folder: str, count: int) -> tuple[str, str]:
    """Calibrates; the last rank dies in the middle."""
    job = Job.on(MESH, "cpu")
    left = [count]

    def progress(done: int, total: int, what: str) -> None:
        left[0] -= 1
        if job.rank == 3 and not left[0]:
            os._exit(1)

    return caught(lambda: calibrate(job, TINY, Path(folder) / "s.jsonl", Path(folder) / "p.yaml", progress))


@pytest.mark.parametrize("count", [5, pytest.param(200, marks=pytest.mark.thorough)])  # in the warm-up; between samples
def test_a_rank_that_dies_is_an_error_on_all_others_and_the_samples_are_kept(tmp_path: Path, count: int) -> None:
    results = run_ranks(4, _die_after, str(tmp_path), count, group_timeout_s=8.0, dying={3})
    assert [kind for kind, _ in results[:3]] == ["CalibrationError"] * 3
    said = results[0][1]
    kept = len(read_samples(tmp_path / "s.jsonl").samples)
    assert "another rank died or hung" in said and f"{kept} samples are kept in" in said
    assert (kept > 0) == (count == 200)
    assert not (tmp_path / "p.yaml").exists()


def _other_run(folder: str) -> tuple[str, str]:
    job = Job.on(Mesh.parse("dp=4"), "cpu")
    return caught(lambda: calibrate(job, TINY, Path(folder) / "s.jsonl", Path(folder) / "p.yaml", quiet))


def test_samples_of_another_mesh_stop_every_rank(calibrated: Path) -> None:
    before = {path: path.read_bytes() for path in calibrated.iterdir()}
    results = run_ranks(4, _other_run, str(calibrated))
    assert [kind for kind, _ in results] == ["CalibrationError"] * 4
    assert "mesh dp=4 instead of dp=2,tp=2" in results[0][1]
    assert {path: path.read_bytes() for path in calibrated.iterdir()} == before


def _stop_early() -> list[int]:
    job = Job.on(MESH, "cpu")
    kept: list[Sample] = []
    effort = Effort(rounds=1000, repetition_s=1e-5, point_s=5.0, budget_s=0.0, max_bytes=2048, max_width=64)
    measure(job, points_of(job, effort), effort, kept.append, quiet, Counter())
    return [len(kept), len({sample.point for sample in kept}), len(points_of(job, effort))]


def test_a_run_out_of_time_has_measured_every_point_once() -> None:
    first, *others = run_ranks(4, _stop_early)
    samples, points, planned = first
    assert points == planned and planned < samples < 3 * planned
    assert [rank[0] for rank in others] == [0, 0, 0]


def _all_too_slow() -> list[Any]:
    job = Job.on(MESH, "cpu")
    kept: list[Sample] = []
    effort = replace(TINY, rounds=1, point_s=1e-12)
    measure(job, points_of(job, effort), effort, kept.append, quiet, Counter())
    return [sample.point for sample in kept]


def test_where_every_size_takes_too_long_the_smallest_of_each_is_measured() -> None:
    points, *_ = run_ranks(4, _all_too_slow)
    sizes = {(p.kind, p.axis): p.size_bytes for p in points if isinstance(p, CollectivePoint)}
    links = {"dp": COLLECTIVE_KINDS, "tp": COLLECTIVE_KINDS, "dp+tp": GROUP_KINDS}
    assert sizes == {(kind, link): 1024 for link, kinds in links.items() for kind in kinds}
    kernels = [(p.name, p.dtype) for p in points if isinstance(p, KernelPoint)]
    assert len(kernels) == len(set(kernels)) > 9


def _check(path: str, mesh: str, factor: float) -> Any:
    """Checks a profile whose links were made slower by a factor; the collectives that do not fit, or the error."""
    profile = load_profile(path)
    assert isinstance(profile.network, MeasuredMesh)
    links = tuple(link.scaled(factor) for link in profile.network.links)
    profile = replace(profile, network=replace(profile.network, links=links))
    job = Job.on(Mesh.parse(mesh), "cpu")
    try:
        found = check(job, profile, quiet, TINY)
    except CalibrationError as error:
        return str(error)
    return found and [(series.rows()[0][0], series.ratio) for series in found if not series.fits(9.0)]


def test_links_that_are_a_thousand_times_slower_in_the_profile_do_not_fit(calibrated: Path) -> None:
    first, *others = run_ranks(4, _check, str(calibrated / "p.yaml"), "dp=2,tp=2", 1000.0)
    assert [rank for rank in others if rank is not None] == []
    off = {name.partition(",")[0] for name, ratio in first if ratio < 0.1}
    assert off >= {f"{kind} over {axis}" for kind in COLLECTIVE_KINDS for axis in ("dp", "tp")}


def test_a_profile_of_another_mesh_cannot_be_checked(calibrated: Path) -> None:
    results = run_ranks(4, _check, str(calibrated / "p.yaml"), "dp=4", 1.0)
    assert all("it was measured on the mesh dp=2,tp=2" in said for said in results)


def _kernels_checked(path: str) -> Any:
    """By kind, the kernels that a check measures, and those that a calibration measures."""
    job = Job.on(MESH, "cpu")
    found = check(job, load_profile(path), quiet, TINY)
    checked = {one.point for series in found or () for one in series.compared}
    return _kernels_of(checked), _kernels_of(points_of(job, TINY))


def _kernels_of(points: Iterable[Point]) -> dict[str, set[str]]:
    kernels = [p for p in points if isinstance(p, KernelPoint) and p.dtype == "float32"]
    return {kind: {p.name for p in kernels if p.kind == kind} for kind in {p.kind for p in kernels}}


def test_of_a_kind_of_kernel_a_check_measures_all_because_one_curve_lies_between_them(calibrated: Path) -> None:
    checked, measured = run_ranks(4, _kernels_checked, str(calibrated / "p.yaml"))[0]
    assert checked.items() <= measured.items() and len(checked["pointwise"]) > 1


def _series(ratios: list[float]) -> Series:
    point = CollectivePoint("all_reduce", "dp", 1024, held_out=False)
    return Series(tuple(Compared(point, 1e-3, 1e-3 * ratio) for ratio in ratios))


@pytest.mark.parametrize(("ratios", "fits"), [([1.0], True), ([1.4, 0.7], True), ([1.6], False), ([0.6], False)])
def test_a_series_fits_within_the_tolerance_both_ways(ratios: list[float], fits: bool) -> None:
    assert _series(ratios).fits(0.5) is fits


def test_one_outlier_is_no_disagreement() -> None:
    assert _series([1.0, 1.1, 30.0]).fits(0.5)
