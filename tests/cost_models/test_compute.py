"""The roofline: laws and hand-computed cases."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cost_models import OP_KINDS, PRESETS, Profile, ProfileError, load_profile
from cost_models.compute import Compute, Efficiency

AMOUNTS = st.just(0.0) | st.floats(1e-3, 1e18)  # below, seconds would be so small that doubles lose digits
KINDS = st.sampled_from(OP_KINDS)
PROFILES = st.sampled_from([load_profile(name) for name in PRESETS])

TOY = Compute(
    launch_s=1.0,
    memory_bandwidth_bytes_per_s=10.0,
    peak_flops_per_s={"float32": 100.0, "bfloat16": 400.0},
    compute_efficiency={"default": 0.5, "matmul": 1.0},
    memory_efficiency={"default": 1.0, "copy": 0.5},
)


@pytest.mark.parametrize(
    ("dtype", "flops", "bytes_moved", "kind", "expected"),
    [
        ("float32", 1000, 10, "matmul", 1 + 10),  # compute: 1000 / 100
        ("bfloat16", 1000, 10, "matmul", 1 + 2.5),
        ("float32", 1000, 10, "pointwise", 1 + 20),  # half the peak
        ("float32", 1000, 400, "pointwise", 1 + 40),  # memory: 400 / 10
        ("torch.float32", 0, 100, "copy", 1 + 20),  # half the bandwidth
        ("int64", 1000, 0, "pointwise", 1 + 20),  # integers run at the rate of float32
        ("bool", 0, 10, "pointwise", 1 + 1),
        ("float32", 0, 0, "matmul", 0),
        ("float32", 1e9, 1e9, "view", 0),
    ],
)
def test_hand_computed_cost(dtype: str, flops: float, bytes_moved: float, kind: str, expected: float) -> None:
    assert TOY.op_s(dtype, flops, bytes_moved, kind) == pytest.approx(expected)


def test_what_the_host_adds_is_in_every_operator_that_does_something_and_all_that_a_view_costs() -> None:
    host = dataclasses.replace(TOY, issue_s=3.0)
    assert host.op_s("float32", 1000, 10, "matmul") == 3 + 1 + 10
    assert host.op_s("float32", 1e9, 1e9, "view") == 3
    assert host.op_s("float32", 0, 0, "matmul") == 0
    amounts = np.array([0.0, 1000.0])
    assert host.op_s("float32", amounts, 0 * amounts, "matmul").tolist() == [0, 14]
    assert host.op_s("float32", amounts, amounts, "view").tolist() == [3, 3]


def test_a_large_matmul_on_an_h100_by_hand() -> None:
    """8192^3 in bfloat16: 2 x 8192^3 / (0.80 x 989e12) = 1.390 ms, and 2.5 us of launch."""
    cost = load_profile("dgx-h100").op_s("bfloat16", 2 * 8192**3, 3 * 8192**2 * 2, "matmul")
    assert cost == pytest.approx(1.392e-3, rel=1e-3)


@given(PROFILES, KINDS, AMOUNTS, AMOUNTS, AMOUNTS, AMOUNTS)
def test_more_work_never_costs_less(
    profile: Profile, kind: str, flops: float, bytes_moved: float, more_flops: float, more_bytes: float
) -> None:
    less = profile.op_s("float32", flops, bytes_moved, kind)
    assert profile.op_s("float32", flops + more_flops, bytes_moved + more_bytes, kind) >= less >= 0


def test_an_efficiency_that_depends_on_the_size_by_hand() -> None:
    """A quarter of 100 flops/s up to 1000 flops, half of it from 4000 on, seconds straight from 40 to 80 between."""
    knots = Efficiency(((1000.0, 0.25), (4000.0, 0.5)))
    device = dataclasses.replace(TOY, launch_s=0.0, compute_efficiency={"default": 1.0, "matmul": knots})
    seconds = [device.op_s("float32", flops, 0, "matmul") for flops in (500, 1000, 2500, 4000, 8000)]
    assert seconds == pytest.approx([20, 40, 60, 80, 160])


def test_a_kind_with_a_dtype_goes_before_the_kind() -> None:
    device = dataclasses.replace(TOY, compute_efficiency={"default": 1.0, "matmul": 0.5, "matmul/bfloat16": 0.25})
    assert device.op_s("bfloat16", 400, 0, "matmul") == pytest.approx(1 + 4)
    assert device.op_s("torch.bfloat16", 400, 0, "matmul") == pytest.approx(1 + 4)
    assert device.op_s("float32", 400, 0, "matmul") == pytest.approx(1 + 8)


@pytest.mark.parametrize("name", PRESETS)
def test_no_kernel_of_a_preset_jumps_or_falls_with_its_work(name: str) -> None:
    profile, work = load_profile(name), np.geomspace(1, 1e16, 20_000)
    for kind in set(OP_KINDS) - {"view"}:
        for dtype in profile.compute.peak_flops_per_s:
            for seconds in (profile.op_s(dtype, work, 0.0, kind), profile.op_s(dtype, 0.0, work, kind)):
                assert (np.diff(seconds) >= 0).all() and (seconds > profile.compute.launch_s).all()
                assert (seconds[1:] / seconds[:-1]).max() <= 1.2 * work[1] / work[0]


def test_a_small_product_on_an_h100_by_hand() -> None:
    """1.07e9 flops in bfloat16 reach 0.204 of 989 TFLOP/s: 5.30 us, and 2.5 us of launch."""
    assert load_profile("dgx-h100").op_s("bfloat16", 1.07e9, 0, "matmul") == pytest.approx(7.80e-6, rel=1e-3)


@given(PROFILES, KINDS, AMOUNTS, AMOUNTS, st.floats(0.1, 10))
def test_a_device_c_times_slower_costs_c_times_as_much(
    profile: Profile, kind: str, flops: float, bytes_moved: float, factor: float
) -> None:
    device = profile.compute
    slower = dataclasses.replace(
        device,
        launch_s=device.launch_s * factor,
        memory_bandwidth_bytes_per_s=device.memory_bandwidth_bytes_per_s / factor,
        peak_flops_per_s={dtype: rate / factor for dtype, rate in device.peak_flops_per_s.items()},
    )
    expected = factor * device.op_s("bfloat16", flops, bytes_moved, kind)
    assert slower.op_s("bfloat16", flops, bytes_moved, kind) == pytest.approx(expected, rel=1e-9)


@given(PROFILES, KINDS, st.lists(st.tuples(AMOUNTS, AMOUNTS), min_size=1, max_size=5))
def test_arrays_give_the_seconds_of_each(profile: Profile, kind: str, work: list[tuple[float, float]]) -> None:
    flops, moved = np.array(work).T
    each = [profile.op_s("float32", *amounts, kind) for amounts in work]
    assert profile.op_s("float32", flops, moved, kind).tolist() == each
    assert profile.copy_s(moved).tolist() == [profile.copy_s(amount) for _, amount in work]


@given(PROFILES, AMOUNTS)
def test_a_copy_is_an_operation_without_flops(profile: Profile, moved: float) -> None:
    assert profile.copy_s(moved) == profile.op_s("float32", 0, moved, "copy")
    assert profile.copy_s(0) == 0


def test_the_default_kind_is_pointwise() -> None:
    profile = load_profile("cpu-gloo")
    assert profile.op_s("float32", 10, 1e6) == profile.op_s("float32", 10, 1e6, "pointwise")


def test_a_dtype_without_a_peak_is_refused_with_those_there_are() -> None:
    with pytest.raises(ProfileError, match=r"no peak rate for dtype 'float8_e4m3fn'.*float32, bfloat16"):
        TOY.op_s("float8_e4m3fn", 1, 1, "matmul")


def test_an_unknown_kind_is_refused_with_the_nearest() -> None:
    with pytest.raises(ValueError, match=r"unknown kind of operation 'matmull'.*did you mean 'matmul'"):
        TOY.op_s("float32", 1, 1, "matmull")


@pytest.mark.parametrize("amount", [-1.0, math.nan, math.inf])
def test_work_that_is_no_amount_is_refused(amount: float) -> None:
    with pytest.raises(ValueError, match="flops must be finite"):
        TOY.op_s("float32", amount, 1, "matmul")
    with pytest.raises(ValueError, match="bytes_moved must be finite"):
        TOY.op_s("float32", 1, amount, "matmul")
