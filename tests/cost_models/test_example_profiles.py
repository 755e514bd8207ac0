"""The profiles in ``examples/profiles``: one for each kind of network, with what docs/search.md says of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from cost_models import PRESETS, Hosts, Profile, load_profile

FOLDER = Path(__file__).parents[2] / "examples" / "profiles"
LARGE = 64e9
"""Bytes, so many that latency does not count."""


def example(name: str) -> Profile:
    return load_profile(str(FOLDER / f"{name}.yaml"))


def rates(name: str, *shape: int) -> list[float]:
    """Bytes a second that a rank receives in a large all-gather, along each axis."""
    topology = example(name).topology(tuple(f"axis{k}" for k in range(len(shape))), shape)
    seconds = [topology.collective_s("all_gather", axis, LARGE) for axis in range(len(shape))]
    return [LARGE * (ranks - 1) / ranks / float(took) for ranks, took in zip(shape, seconds)]


def test_each_says_where_its_numbers_are_from_and_is_no_preset() -> None:
    names = [path.stem for path in sorted(FOLDER.glob("*.yaml"))]
    assert names == ["nvl72", "slow-hosts", "tpu-v5p-cube"] and not set(names) & set(PRESETS)
    assert all(example(name).name == name for name in names)


def test_slow_hosts_have_a_tenth_of_the_network_between_them() -> None:
    slow, fast = example("slow-hosts").network, load_profile("dgx-h100").network
    assert isinstance(slow, Hosts) and isinstance(fast, Hosts) and slow.inter_host and fast.inter_host
    assert slow.inter_host.bandwidth_bytes_per_s == pytest.approx(fast.inter_host.bandwidth_bytes_per_s / 10)
    assert slow.intra_host == fast.intra_host


def test_on_one_switch_it_makes_no_difference_which_axis_comes_first() -> None:
    assert rates("nvl72", 4, 16) == pytest.approx(rates("nvl72", 16, 4)[::-1])


def test_a_cube_adds_up_the_links_of_its_dimensions() -> None:
    """Four ranks have one dimension of it, 16 have two, eight one and a half: 200 GB/s for each, less what is lost."""
    sixteen, four = rates("tpu-v5p-cube", 16, 4)
    assert 0.85 * 200e9 < four < 200e9
    assert sixteen == pytest.approx(2 * four, rel=1e-2)
    assert rates("tpu-v5p-cube", 8, 8) == pytest.approx([1.5 * four, 1.5 * four], rel=1e-2)
