"""Laws and hand-computed cases of the collective formulas."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cost_models import COLLECTIVE_KINDS, PRESETS, Hosts, Link, Route, Topology, load_profile
from cost_models.collectives import collective_s

KINDS = st.sampled_from(COLLECTIVE_KINDS)
RANKS = st.integers(1, 1024)
SIZES = st.floats(0, 1e13)
EFFICIENCIES = st.floats(0.01, 1)


@st.composite
def links(draw: st.DrawFn) -> Link:
    reduce_scatter = draw(EFFICIENCIES)
    efficiency = {
        "all_gather": draw(EFFICIENCIES),
        "all_to_all": draw(EFFICIENCIES),
        "reduce_scatter": reduce_scatter,
        "all_reduce": min(draw(EFFICIENCIES), 2 * reduce_scatter),
    }
    return Link(
        name="any",
        launch_s=draw(st.floats(0, 1e-2)),
        latency_s=draw(st.floats(0, 1e-2)),
        bandwidth_bytes_per_s=draw(st.floats(1e3, 1e13)),
        efficiency=efficiency,
        reduce_scatter_as_all_reduce=draw(st.booleans()),
    )


SHIPPED = [
    pytest.param(link, id=f"{name}-{link.name.replace(' ', '-')}")
    for name in PRESETS
    for network in [load_profile(name).network]
    if isinstance(network, Hosts)
    for link in (network.intra_host, network.inter_host)
    if link is not None
]


def at_least(left: float, right: float) -> bool:
    """Up to the rounding of the last digits."""
    return left >= right * (1 - 1e-12)


@given(KINDS, RANKS, SIZES, SIZES, links())
def test_more_bytes_never_cost_less(kind: str, ranks: int, one: float, other: float, link: Link) -> None:
    small, large = sorted((one, other))
    assert collective_s(kind, ranks, large, link) >= collective_s(kind, ranks, small, link)


@given(KINDS, RANKS, RANKS, SIZES, links())
def test_more_ranks_never_cost_less(kind: str, one: int, other: int, size: float, link: Link) -> None:
    few, many = sorted((one, other))
    assert at_least(collective_s(kind, many, size, link), collective_s(kind, few, size, link))


@given(RANKS, SIZES, links())
def test_an_all_reduce_costs_at_least_a_reduce_scatter(ranks: int, size: float, link: Link) -> None:
    assert at_least(collective_s("all_reduce", ranks, size, link), collective_s("reduce_scatter", ranks, size, link))


@given(KINDS, RANKS, links())
def test_zero_bytes_cost_nothing(kind: str, ranks: int, link: Link) -> None:
    assert collective_s(kind, ranks, 0, link) == 0


@given(KINDS, SIZES, links())
def test_one_rank_costs_nothing(kind: str, size: float, link: Link) -> None:
    assert collective_s(kind, 1, size, link) == 0


@given(KINDS, RANKS, SIZES, links(), st.floats(0.1, 10))
def test_a_link_c_times_slower_costs_c_times_as_much(
    kind: str, ranks: int, size: float, link: Link, factor: float
) -> None:
    slower = dataclasses.replace(
        link,
        launch_s=link.launch_s * factor,
        latency_s=link.latency_s * factor,
        bandwidth_bytes_per_s=link.bandwidth_bytes_per_s / factor,
    )
    expected = factor * collective_s(kind, ranks, size, link)
    assert collective_s(kind, ranks, size, slower) == pytest.approx(expected, rel=1e-9)


@given(KINDS, RANKS, SIZES, links(), links())
def test_the_slower_of_two_links_is_never_cheaper_than_either(
    kind: str, ranks: int, size: float, one: Link, other: Link
) -> None:
    both = collective_s(kind, ranks, size, one.slower_of(other))
    assert at_least(both, collective_s(kind, ranks, size, one))
    assert at_least(both, collective_s(kind, ranks, size, other))
    assert both == pytest.approx(collective_s(kind, ranks, size, other.slower_of(one)), rel=1e-12)


@given(KINDS, RANKS, st.lists(SIZES, min_size=1, max_size=5), links())
def test_an_array_of_sizes_gives_the_seconds_of_each(kind: str, ranks: int, sizes: list[float], link: Link) -> None:
    together = Topology(("x",), (ranks,), (Route(link),)).collective_s(kind, 0, np.array(sizes))
    assert together.tolist() == [collective_s(kind, ranks, size, link) for size in sizes]


@pytest.mark.parametrize("link", SHIPPED)
@pytest.mark.parametrize("kind", COLLECTIVE_KINDS)
def test_shipped_links_obey_the_laws_on_a_grid(link: Link, kind: str) -> None:
    ranks = (1, 2, 3, 4, 8, 64, 512)
    sizes = np.array([0.0, *(2.0**power for power in range(0, 36, 3))])
    cost = np.array([collective_s(kind, n, sizes, link) for n in ranks])
    assert (np.diff(cost, axis=1) >= 0).all()
    assert (np.diff(cost, axis=0) >= 0).all()
    assert (cost[:, 0] == 0).all() and (cost[0] == 0).all()
    assert (cost[1:, 1:] > 0).all() and np.isfinite(cost).all()
    scatter = np.array([collective_s("reduce_scatter", n, sizes, link) for n in ranks])
    reduce = np.array([collective_s("all_reduce", n, sizes, link) for n in ranks])
    assert (reduce >= scatter).all()


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        # 4 ranks, 4000 bytes, 1 s a launch, 10 s a hop, 10 bytes/s: 3 hops and 3/4 of the bytes in a pass
        ("all_gather", 1 + 3 * 10 + 300),
        ("reduce_scatter", 1 + 3 * 10 + 300),
        ("all_reduce", 1 + 6 * 10 + 600),
        ("all_to_all", 1 + 3 * 10 + 600),  # at half the rate
    ],
)
def test_hand_computed_cost(kind: str, expected: float) -> None:
    link = Link("toy", latency_s=10, bandwidth_bytes_per_s=10, launch_s=1, efficiency={"all_to_all": 0.5})
    assert collective_s(kind, 4, 4000, link) == pytest.approx(expected)


def test_a_gloo_reduce_scatter_costs_its_all_reduce() -> None:
    link = load_profile("cpu-gloo").topology(("x",), (4,)).links[0]
    assert collective_s("reduce_scatter", 4, 1 << 20, link) == collective_s("all_reduce", 4, 1 << 20, link)


def test_an_nvlink_host_by_hand() -> None:
    """All-gather over 8 H100: the least of NCCL's three protocols, LL for 4 KiB and Simple for 1 GiB.

    LL: 6.6 us + 7 x 0.6 us + 7/8 x 4096 / (0.236 x 0.82 x 450e9) = 10.84 us (Simple would take 8.4 + 7 x 3.4 = 32.2).
    Simple: 8.4 us + 7 x 3.4 us + 7/8 x 2^30 / (0.82 x 450e9) = 2.578 ms (LL128 would take 14 + 7 x 1.9 us + 2.768 ms).
    """
    topology = load_profile("dgx-h100").topology(("tp",), (8,))
    assert topology.collective_s("all_gather", 0, 4096) == pytest.approx(10.84e-6, rel=1e-3)
    assert topology.collective_s("all_gather", 0, 1 << 30) == pytest.approx(2.578e-3, rel=1e-3)


def test_a_tree_is_taken_for_small_buffers_between_many_hosts_by_hand() -> None:
    """All-reduce of 4 KiB over 64 hosts, one GPU each, by tree LL: 6.8 us + 2 x 6 x 5 us + 126/64 x 4096 B / 11.6 GB/s.

    The ring would wait for 126 hops of 2.7 us. For 1 GiB the ring at the full rate is the fastest of all.
    """
    topology = load_profile("dgx-h100").topology(("dp", "tp"), (64, 8))
    small = 6.8e-6 + 12 * 5e-6 + 126 / 64 * 4096 / (0.24 * 48.5e9)
    large = 8.4e-6 + 126 * 14e-6 + 126 / 64 * 2**30 / 48.5e9
    assert topology.collective_s("all_reduce", 0, 4096) == pytest.approx(small)
    assert topology.collective_s("all_reduce", 0, 1 << 30) == pytest.approx(large)


@pytest.mark.parametrize("size", [-1, math.nan, math.inf, np.array([1.0, -1.0]), np.array([math.nan])])
def test_a_size_that_is_no_amount_is_refused(size: float) -> None:
    with pytest.raises(ValueError, match="size_bytes must be finite and not negative"):
        collective_s("all_gather", 2, size, Link("toy", 1, 1))


def test_an_unknown_kind_is_refused_with_the_nearest() -> None:
    with pytest.raises(ValueError, match=r"unknown collective 'allgather'.*did you mean 'all_gather'"):
        collective_s("allgather", 2, 1, Link("toy", 1, 1))


@pytest.mark.parametrize("axis", [-1, 2])
def test_an_axis_that_is_not_there_is_refused(axis: int) -> None:
    topology = load_profile("dgx-h100").topology(("dp", "tp"), (8, 8))
    with pytest.raises(ValueError, match=r"no mesh axis of index .*dp, tp"):
        topology.collective_s("all_gather", axis, 1)
