"""Which link each mesh axis runs on."""

from __future__ import annotations

import dataclasses
import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cost_models import COLLECTIVE_KINDS, PRESETS, Hosts, Link, MeasuredMesh, ProfileError, load_profile
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


def test_an_order_of_ranks_moves_an_axis_inside_the_host() -> None:
    """tp=8,dp=2 on hosts of 8: counted through, tp pairs ranks 0, 2, 4 and so on; with tp fastest it fills a host."""
    hosts = Hosts(8, INTRA, INTER)
    axes, shape = ("tp", "dp"), (8, 2)
    order = [dp * 8 + tp for tp in range(8) for dp in range(2)]
    plain = hosts.topology(axes, mesh_ranks(axes, shape, None))
    moved = hosts.topology(axes, mesh_ranks(axes, shape, order))
    assert [link.name for link in plain.links] == ["intra + inter", "intra"]
    assert [link.name for link in moved.links] == ["intra", "inter"]


def test_a_ring_is_laid_host_by_host_whatever_the_order_of_ranks() -> None:
    """16 ranks on 2 hosts, dealt out alternately: the library still runs inside the hosts first."""
    hosts, axes, shape = Hosts(8, INTRA, INTER), ("dp",), (16,)
    dealt = [rank % 2 * 8 + rank // 2 for rank in range(16)]
    routes = [hosts.topology(axes, mesh_ranks(axes, shape, order)).routes for order in (None, dealt)]
    assert routes[0] == routes[1]


def test_an_axis_across_both_runs_level_by_level_by_hand() -> None:
    """16 ranks on 2 hosts of 8, 1.6 MB, by level: every GPU sends its eighth over its own card.

    All-reduce: a reduce-scatter inside, 7 us + 7/8 x 1.6e6 / 1e11 = 21 us, an all-gather of as much, and between them
    an all-reduce of 0.2 MB between 2 hosts: 2 x 10 us + 0.2e6 / 1e10 = 40 us.
    """
    hosts = Hosts(8, INTRA, INTER)
    topology = hosts.topology(("dp",), mesh_ranks(("dp",), (16,), None))
    assert topology.collective_s("all_reduce", 0, 1.6e6) == pytest.approx(21e-6 + 40e-6 + 21e-6)
    flat = 30 * 1e-5 + 30 / 16 * 1.6e6 / 1e10
    assert topology.collective_s("all_reduce", 0, 1.6e6) < flat


def test_several_axes_together_are_one_group_by_hand() -> None:
    """dp=2 between hosts and tp=4 inside: an all-gather of 800 kB over both is one of 200 kB over dp, then one over tp.

    10 us + 1/2 x 2e5 / 1e10 = 20 us, and 3 us + 3/4 x 8e5 / 1e11 = 9 us. Inside one host dp=2,tp=2 sends the same
    bytes either way, 3/4 x 8e5 / 1e11 = 6 us, but axis by axis waits for 2 hops rather than 3.
    """
    both = Hosts(4, INTRA, INTER).topology(("dp", "tp"), mesh_ranks(("dp", "tp"), (2, 4), None))
    assert both.collective_s("all_gather", (0, 1), 8e5) == pytest.approx(29e-6)
    assert both.collective_s("all_gather", (1, 0), 8e5) == pytest.approx(29e-6)
    inside = Hosts(4, INTRA, None).topology(("dp", "tp"), mesh_ranks(("dp", "tp"), (2, 2), None))
    assert inside.collective_s("all_gather", (0, 1), 8e5) == pytest.approx(8e-6)


def test_a_measured_mesh_prices_itself_and_no_other() -> None:
    mesh = MeasuredMesh(("dp", "tp"), (2, 2), (INTER, INTRA), {("dp", "tp"): INTER})
    profile = dataclasses.replace(load_profile("cpu-gloo"), name="mine", network=mesh)
    topology = profile.topology(("dp", "tp"), (2, 2))
    assert [link.name for link in topology.links] == ["inter", "intra"]
    assert topology.collective_s("all_gather", (0, 1), 4e5) == pytest.approx(3e-5 + 3e5 / 1e10)
    for axes, shape in [(("dp",), (4,)), (("dp", "tp"), (2, 4)), (("tp", "dp"), (2, 2))]:
        with pytest.raises(ProfileError, match=r"'mine': it was measured on the mesh dp=2,tp=2 .*calibrate --mesh"):
            profile.topology(axes, shape)
    with pytest.raises(ProfileError, match="with ranks in order"):
        profile.topology(("dp", "tp"), (2, 2), (0, 2, 1, 3))


def test_axes_that_were_not_measured_together_are_priced_one_after_the_other() -> None:
    """All-gather of 400 kB over dp and tp: 200 kB over dp, 10 us + 1e5 / 1e10, then tp, 1 us + 2e5 / 1e11."""
    mesh = MeasuredMesh(("dp", "tp"), (2, 2), (INTER, INTRA))
    topology = mesh.topology(("dp", "tp"), mesh_ranks(("dp", "tp"), (2, 2), None))
    assert topology.collective_s("all_gather", (0, 1), 4e5) == pytest.approx(20e-6 + 3e-6)


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


@pytest.mark.parametrize("kind", COLLECTIVE_KINDS)
@pytest.mark.parametrize("name", [name for name in PRESETS if name.startswith("dgx")])
def test_more_hosts_never_cost_less(name: str, kind: str) -> None:
    """For an axis between hosts and for one across whole hosts. (On a torus a longer axis may close to a ring.)"""
    profile, sizes = load_profile(name), np.geomspace(1, 1e10, 50)
    for shape in [lambda hosts: (hosts, 8), lambda hosts: (8 * hosts, 1)]:
        topologies = [profile.topology(("dp", "tp"), shape(hosts)) for hosts in (1, 2, 3, 4, 8, 16, 64)]
        costs = np.array([topology.collective_s(kind, 0, sizes) for topology in topologies])
        assert (np.diff(costs, axis=0) >= -1e-12 * costs[1:]).all()


@pytest.mark.parametrize("order", [(0, 1), (0, 1, 2, 2), (1, 2, 3, 4)])
def test_an_order_that_is_no_permutation_is_refused(order: tuple[int, ...]) -> None:
    with pytest.raises(ProfileError, match="must name each of the 4 ranks of dp=2,tp=2 once"):
        load_profile("cpu-gloo").topology(("dp", "tp"), (2, 2), order)
