"""Laws of the fit: what a known machine would measure gives that machine back, noise and outliers or not."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cost_models import Profile, ProfileError, dump_profile, optimizer_policy, parse_profile
from cost_models.collective_kinds import REDISTRIBUTION_KINDS
from cost_models.fit import compare, fit, honest, isotonic, residual
from cost_models.samples import CollectivePoint, Header, KernelPoint, Point, RowPoint, Sample, Samples, TogetherPoint

from ..thorough import tries

KINDS = REDISTRIBUTION_KINDS
SIZES = [1024 << step for step in range(15)]
KERNELS = ("pointwise", "copy", "reduction")
Machine = Callable[[Point], float]


def machine(point: Point) -> float:
    """Seconds on a machine of two axes, dp ten times slower than tp, whose library changes algorithm at 256 KiB."""
    assert not isinstance(point, TogetherPoint | RowPoint)
    if isinstance(point, KernelPoint):
        rate = 50e9 if point.kind == "matmul" else 10e9
        return 5e-6 + (point.flops if point.kind == "matmul" else point.bytes_moved) / rate
    passes = 2 if point.kind == "all_reduce" else 1
    sent = passes * point.size_bytes / 2
    small, large = 1e-3 + sent / 0.2e9, 2e-3 + sent / 2e9
    return passes * min(small, large) * (10 if point.axis == "dp" else 1)


def points() -> list[Point]:
    collectives = [
        CollectivePoint(k, a, size, i % 2 == 1) for k in KINDS for a in "dp tp".split() for i, size in enumerate(SIZES)
    ]
    products = [_product(n, n in (96, 192, 384)) for n in (64, 96, 128, 192, 256, 384, 512)]
    streams = [
        KernelPoint(kind, kind, "float32", (n,), 0.0, 4.0 * n, False)
        for kind in KERNELS
        for n in (1 << 10, 1 << 14, 1 << 20)
    ]
    return [*collectives, *products, *streams]


def _product(n: int, held_out: bool) -> KernelPoint:
    return KernelPoint("matmul", "mm", "float32", (n, n, n), 2.0 * n**3, 12.0 * n * n, held_out)


def header(mesh: str = "dp=2,tp=2") -> Header:
    return Header(mesh, (0, 0, 0, 0), "cpu", "gloo", {"cores": "4"}, {"torch": "2.13"}, "2026-11-20 10:00 UTC", "run")


def measured(machine: Machine, rounds: int = 1, noise: Callable[[], float] = lambda: 1.0) -> Samples:
    found = [Sample(p, round, machine(p) * noise()) for round in range(rounds) for p in points()]
    return Samples(header(), tuple(found), True)


def fitted(samples: Samples) -> Profile:
    return fit(samples, name="made", memory_bytes=1 << 30)


def errors(profile: Profile, machine: Machine, kind: type[Point]) -> list[float]:
    found = compare(profile, Samples(header(), tuple(Sample(p, 0, machine(p)) for p in points()), True))
    return [abs(one.error) for one in found if isinstance(one.point, kind)]


def test_a_machine_is_recovered_from_its_own_times() -> None:
    profile = fitted(measured(machine))
    assert max(errors(profile, machine, KernelPoint)) < 0.01
    # 256 KiB lies between two knots: there the fit is a chord of the kink
    assert np.median(errors(profile, machine, CollectivePoint)) < 0.001
    assert max(errors(profile, machine, CollectivePoint)) < 0.15


def test_sizes_beyond_the_largest_follow_its_bandwidth() -> None:
    topology = fitted(measured(machine)).topology(("dp", "tp"), (2, 2))
    for kind in KINDS:
        for axis, name in enumerate(("dp", "tp")):
            point = CollectivePoint(kind, name, 1 << 30, held_out=False)
            assert topology.collective_s(kind, axis, 1 << 30) == pytest.approx(machine(point), rel=0.01)


def test_noise_is_averaged_out() -> None:
    generator = np.random.default_rng(0)
    profile = fitted(measured(machine, 15, lambda: float(generator.lognormal(0.0, 0.3))))
    assert np.median(errors(profile, machine, CollectivePoint)) < 0.1
    assert np.median(errors(profile, machine, KernelPoint)) < 0.1


def test_a_third_of_outliers_changes_nothing_much() -> None:
    generator = np.random.default_rng(0)
    profile = fitted(measured(machine, 15, lambda: 50.0 if generator.random() < 0.3 else 1.0))
    assert np.median(errors(profile, machine, CollectivePoint)) < 0.001


def test_held_out_points_change_nothing_but_the_residuals() -> None:
    def other(point: Point) -> float:
        return machine(point) * (3.0 if point.held_out else 1.0)

    one, two = fitted(measured(machine)), fitted(measured(other))
    assert one.fingerprint == two.fingerprint
    residuals = two.provenance.collectives["dp"]["all_gather"]
    assert residuals.median == pytest.approx(2 / 3, rel=0.01) and residuals.points == len(SIZES) // 2


def test_the_launch_of_an_optimizers_step_is_its_own() -> None:
    """So that a small parameter costs what is launched for it, cut or whole."""

    def step(elements: int) -> KernelPoint:
        return KernelPoint("optimizer", "adamw", "float32", (elements,), 0.0, 80.0 * elements, False)

    def seconds(point: KernelPoint) -> float:
        return 1e-4 + point.bytes_moved / 10e9

    alone = measured(machine)
    points = [step(1 << size) for size in range(10, 22, 2)]
    profile = fitted(Samples(alone.header, (*alone.samples, *(Sample(p, 0, seconds(p)) for p in points)), True))
    assert profile.compute.launch_s == fitted(alone).compute.launch_s
    assert profile.compute.optimizer_launch_s == pytest.approx(0.9 * seconds(points[0]), rel=1e-5)
    adamw = optimizer_policy("adamw")
    for point in points:
        priced_s = adamw.step_s(profile.compute, "float32", point.shape[0], 4)
        assert priced_s - profile.compute.issue_s == pytest.approx(seconds(point), rel=1e-4)
    assert adamw.step_s(profile.compute, "float32", 256, 4) > 0.9 * adamw.step_s(profile.compute, "float32", 1024, 4)


def beside(machine: Machine, contention: float, count: tuple[int, ...] = (1, 4, 16), factor: float = 1.0) -> Samples:
    """The times of a machine, and those of collectives beside products, of which the shorter hides, but for a share."""
    alone = measured(machine)
    product = _product(512, False)
    sent = [
        CollectivePoint(kind, axis, 4 << 20, False) for kind in ("all_gather", "all_reduce") for axis in ("dp", "tp")
    ]
    found = []
    for point in (TogetherPoint(each, product, many) for each in sent for many in count):
        kernels_s, collective_s = point.kernels * machine(product), machine(point.collective)
        both_s = kernels_s + collective_s - (1 - contention) * min(kernels_s, collective_s)
        found.append(Sample(point, 0, both_s * factor))
    return Samples(alone.header, (*alone.samples, *found), True)


@pytest.mark.parametrize("contention", [0.0, 0.3, 1.0])
def test_what_hides_beside_kernels_is_recovered(contention: float) -> None:
    samples = beside(machine, contention)
    profile = fitted(samples)
    assert profile.contention == pytest.approx(contention, abs=1e-5)
    assert parse_profile(dump_profile(profile), "dumped") == profile
    assert set(profile.provenance.together) == {"dp", "tp"}
    both = [one for one in compare(profile, samples) if isinstance(one.point, TogetherPoint)]
    assert len(both) == 12 and max(abs(one.error) for one in both) < 0.01


def in_rows(issue_s: float, meeting_s: float) -> Samples:
    """The times of a machine, and of its kernels in a row, each longer by what the host adds, and of collectives behind
    such a row, longer by what it takes the ranks to meet.
    """
    alone = measured(machine)
    streams = tuple(p for p in points() if isinstance(p, KernelPoint) and p.kind in KERNELS)
    rows = [RowPoint((_product(256, False), *streams) * 2, views) for views in (0, 3, 6)]
    behind = [
        CollectivePoint(kind, axis, 1024, False) for kind in ("all_gather", "all_reduce") for axis in ("dp", "tp")
    ]

    def seconds(row: RowPoint) -> float:
        operators = len(row.kernels) + row.views
        met_s = machine(row.collective) + meeting_s if row.collective else 0.0
        return sum(map(machine, row.kernels)) + operators * issue_s + met_s

    found = [*rows, *(replace(row, collective=each) for row in rows for each in behind)]
    return Samples(alone.header, (*alone.samples, *(Sample(row, 0, seconds(row)) for row in found)), True)


@pytest.mark.parametrize(("issue_s", "meeting_s"), [(0.0, 0.0), (2e-5, 0.0), (0.0, 1.5e-3), (2e-5, 1.5e-3)])
def test_what_a_step_adds_to_operators_and_collectives_is_recovered(issue_s: float, meeting_s: float) -> None:
    samples = in_rows(issue_s, meeting_s)
    profile = fitted(samples)
    assert profile.compute.issue_s == pytest.approx(issue_s, rel=1e-5, abs=1e-12)
    assert profile.meeting_s == pytest.approx(meeting_s, rel=1e-5, abs=1e-9)
    assert parse_profile(dump_profile(profile), "dumped") == profile
    rows = [one for one in compare(profile, samples) if isinstance(one.point, RowPoint)]
    assert len(rows) == 15 and max(abs(one.error) for one in rows) < 0.01
    assert {name: r.points for name, r in profile.provenance.rows.items()} == {"alone": 3, "with a collective": 12}
    kernels = [one for one in compare(profile, samples) if isinstance(one.point, KernelPoint)]
    assert kernels == [one for one in compare(fitted(measured(machine)), samples) if isinstance(one.point, KernelPoint)]


def test_rows_that_take_no_longer_than_their_parts_add_nothing() -> None:
    profile = fitted(in_rows(-1e-6, -1e-4))
    assert (profile.compute.issue_s, profile.meeting_s) == (0.0, 0.0)
    nobody_looked = fitted(measured(machine))
    assert (nobody_looked.compute.issue_s, nobody_looked.meeting_s) == (0.0, 0.0)


def test_a_machine_that_gains_nothing_side_by_side_hides_nothing() -> None:
    assert fitted(measured(machine)).contention == 1.0  # nobody looked
    assert fitted(beside(machine, 1.0, factor=1.5)).contention == 1.0
    # a thousand products beside one collective: what that costs is lost in their noise
    assert fitted(beside(machine, 0.0, count=(1000,))).contention == 1.0


@st.composite
def times(draw: st.DrawFn) -> Machine:
    """Machines of any times at all, within nine orders of magnitude."""
    logs = {point: draw(st.floats(-12.0, 8.0)) for point in points()}
    return lambda point: math.exp(logs[point])


@settings(max_examples=tries(40))
@given(times())
def test_whatever_was_measured_the_laws_of_prices_hold(machine: Machine) -> None:
    profile = fitted(measured(machine))
    assert parse_profile(dump_profile(profile), "dumped") == profile
    topology = profile.topology(("dp", "tp"), (2, 2))
    sizes = [0, 1, 100, *SIZES, *(3 * size for size in SIZES), 1 << 32, 1 << 40]
    for axis in (0, 1):
        for kind in KINDS:
            seconds = [topology.collective_s(kind, axis, size) for size in sorted(sizes)]
            assert seconds[0] == 0.0
            assert all(a < b * (1 + 1e-12) for a, b in pairwise(seconds))
        for size in sizes:
            reduce, scatter = (topology.collective_s(kind, axis, size) for kind in ("all_reduce", "reduce_scatter"))
            assert reduce >= scatter * (1 - 1e-9)
    for kind in ("matmul", *KERNELS, "softmax"):
        seconds = [profile.op_s("float32", 10.0**e, 10.0**e, kind) for e in range(13)]
        assert all(0 < a <= b for a, b in pairwise(seconds))


@given(st.lists(st.floats(-100, 100), min_size=1, max_size=8))
def test_isotonic_regression_is_the_nearest_sequence_that_never_falls(values: list[float]) -> None:
    found = isotonic(values)
    assert all(a <= b + 1e-9 for a, b in pairwise(found))
    best = float(np.sum((found - values) ** 2))
    # the optimum is a mean of neighbours at each place: no shift of a tail or a head is better
    for i in range(len(values)):
        for step in (-1e-3, 1e-3):
            for moved in (found + step * (np.arange(len(values)) >= i), found + step * (np.arange(len(values)) <= i)):
                if np.all(np.diff(moved) >= 0):
                    assert np.sum((moved - values) ** 2) >= best - 1e-9


def test_a_group_of_axes_that_was_measured_as_one_has_a_link_of_its_own() -> None:
    """A ring through four ranks sends half as much again over the slow link as levels would."""
    sizes = [1 << step for step in range(10, 25)]
    group = [CollectivePoint("all_reduce", "dp+tp", size, step % 2 == 1) for step, size in enumerate(sizes)]
    alone = measured(machine)
    found = [Sample(point, 0, 1e-3 + 1.5 * point.size_bytes / 20e6) for point in group]
    samples = Samples(alone.header, (*alone.samples, *found), True)
    profile = fitted(samples)
    topology = profile.topology(("dp", "tp"), (2, 2))
    assert topology.collective_s("all_reduce", (0, 1), 1 << 22) == pytest.approx(
        1e-3 + 1.5 * (1 << 22) / 20e6, rel=1e-3
    )
    one_by_one = fitted(alone).topology(("dp", "tp"), (2, 2))
    assert topology.collective_s("all_reduce", 0, 1 << 22) == one_by_one.collective_s("all_reduce", 0, 1 << 22)
    assert parse_profile(dump_profile(profile), "dumped") == profile
    assert profile.provenance.collectives["dp+tp"]["all_reduce"].points == len(sizes) // 2


def test_an_axis_of_one_rank_needs_no_samples() -> None:
    kernels = [Sample(p, 0, machine(p)) for p in points() if isinstance(p, KernelPoint)]
    profile = fit(Samples(header("one=1"), tuple(kernels), True), name="alone", memory_bytes=1)
    assert profile.topology(("one",), (1,)).collective_s("all_reduce", 0, 1 << 20) == 0.0
    assert parse_profile(dump_profile(profile), "dumped") == profile


MISSING = {
    "an axis": (lambda p: getattr(p, "axis", "") != "tp", "over the axis 'tp'"),
    "products": (lambda p: p.kind != "matmul", "no samples of kernels"),
    "streams": (lambda p: isinstance(p, CollectivePoint) or p.kind == "matmul", "no samples of kernels"),
}


@pytest.mark.parametrize("what", MISSING)
def test_missing_samples_are_an_error_that_names_them(what: str) -> None:
    keep, said = MISSING[what]
    every = measured(machine)
    left = Samples(every.header, tuple(s for s in every.samples if keep(s.point)), True)
    with pytest.raises(ProfileError, match=said):
        fitted(left)


def test_residuals_are_of_held_out_points_alone() -> None:
    """A fit of all points of a series goes through them, and an error of 0% would say nothing."""
    compared = compare(fitted(measured(machine)), measured(machine))
    assert all(one.point.held_out for one in honest(compared))
    plain = [one for one in compared if not one.point.held_out]
    assert honest(plain) == []
    every = Samples(measured(machine).header, tuple(s for s in measured(machine).samples if not s.point.held_out), True)
    assert not fitted(every).provenance.collectives and not fitted(every).provenance.kernels
    assert residual([]) is None
