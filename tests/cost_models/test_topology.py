"""Which link each mesh axis runs on."""

from __future__ import annotations

import dataclasses
import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cost_models import PRESETS, Hosts, Link, ProfileError, load_profile
from cost_models.topology import mesh_ranks

INTRA = Link("intra", latency_s=1e-6, bandwidth_bytes_per_s=1e11)
INTER = Link("inter", latency_s=1e-5, bandwidth_bytes_per_s=1e10)


def names(shape: tuple[int, ...], per_host: int | None) -> list[str]:
    axes = tuple(f"axis{i}" for i in range(len(shape)))
    topology = Hosts(per_host, INTRA, INTER).topology(axes, mesh_ranks(axes, shape, None))
    return [link.name for link in topology.links]


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ((8,), ["intra"]),  # one full host
        ((2, 2), ["intra", "intra"]),  # half a host
        ((8, 8), ["inter", "intra"]),  # hosts outside, their devices inside
        ((2, 4, 8), ["inter", "inter", "intra"]),
        ((4, 2, 4), ["inter", "intra", "intra"]),
        ((4, 4), ["intra + inter", "intra"]),  # the outer axis pairs ranks 0, 4 (one host) with 8, 12 (the next)
        ((16,), ["intra + inter"]),  # one ring through two hosts
        ((4, 16), ["inter", "intra + inter"]),
        ((16, 1), ["intra + inter", "intra"]),  # an axis of one rank never talks
        ((3, 5), ["intra + inter", "intra + inter"]),  # ranks 5..9 fall on both sides of a border
        ((64, 8), ["inter", "intra"]),
    ],
)
def test_links_of_meshes_over_hosts_of_eight(shape: tuple[int, ...], expected: list[str]) -> None:
    assert names(shape, 8) == expected


def test_one_host_of_any_size_has_one_link() -> None:
    assert names((16, 16), None) == ["intra", "intra"]


@given(st.lists(st.integers(1, 5), min_size=1, max_size=3), st.integers(1, 12))
def test_links_agree_with_the_hosts_of_each_group(sizes: list[int], per_host: int) -> None:
    """Against an oracle that walks every group of every axis."""
    shape = tuple(sizes)
    strides = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
    expected = []
    for axis, size in enumerate(shape):
        steps = set()
        for rest in itertools.product(*(range(1) if i == axis else range(n) for i, n in enumerate(shape))):
            base = sum(i * stride for i, stride in zip(rest, strides))
            hosts = [(base + i * strides[axis]) // per_host for i in range(size)]
            steps |= {one != next_one for one, next_one in itertools.pairwise(hosts)}
        expected.append("intra" if steps <= {False} else "inter" if steps == {True} else "intra + inter")
    assert names(shape, per_host) == expected


def test_an_axis_across_both_links_pays_the_worse_constant_of_each() -> None:
    link = INTRA.slower_of(dataclasses.replace(INTER, latency_s=1e-7, efficiency={"all_reduce": 0.5}))
    assert (link.latency_s, link.bandwidth_bytes_per_s) == (1e-6, 1e10)
    assert link.transfer_s("all_reduce", 1e10) == pytest.approx(2)
    assert link.transfer_s("all_gather", 1e10) == pytest.approx(1)


def test_a_mesh_larger_than_a_lone_host_is_refused_with_the_reason() -> None:
    dgx = load_profile("dgx-h100")
    assert isinstance(dgx.network, Hosts)
    profile = dataclasses.replace(dgx, network=dataclasses.replace(dgx.network, inter_host=None))
    with pytest.raises(ProfileError, match=r"'dgx-h100'.*dp=2,tp=8 has 16 ranks.*one host of 8.*links\.inter_host"):
        profile.topology(("dp", "tp"), (2, 8))


@pytest.mark.parametrize(
    ("axes", "shape", "match"),
    [
        ((), (), "one size per axis"),
        (("dp",), (2, 2), "one size per axis"),
        (("dp", "tp"), (2, 0), "size of at least 1, got dp=2,tp=0"),
        (("dp", "tp"), (1 << 11, 1 << 11), "4194304 ranks; the limit"),
    ],
)
def test_a_malformed_mesh_is_refused(axes: tuple[str, ...], shape: tuple[int, ...], match: str) -> None:
    with pytest.raises(ProfileError, match=match):
        load_profile("cpu-gloo").topology(axes, shape)


@pytest.mark.parametrize("name", [name for name in PRESETS if name.startswith("dgx")])
def test_dgx_hosts_are_slower_between_than_inside(name: str) -> None:
    topology = load_profile(name).topology(("dp", "tp"), (64, 8))
    outer, inner = (topology.collective_s("all_reduce", axis, 1 << 24) for axis in (0, 1))
    assert outer > inner > 0
