"""Laws and hand-computed cases of the collective formulas."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cost_models import COLLECTIVE_KINDS, PRESETS, Algorithm, Curve, Hosts, Link, Route, Topology, load_profile
from cost_models.collectives import collective_s, leveled_s

KINDS = st.sampled_from(COLLECTIVE_KINDS)
RANKS = st.integers(1, 1024)
SIZES = st.floats(0, 1e13)
EFFICIENCIES = st.floats(0.01, 1)


TIMES = st.floats(0, 1e-2)
ALGORITHMS = st.builds(
    Algorithm, st.just("any"), st.sampled_from(["ring", "tree", "switch"]), TIMES, TIMES, EFFICIENCIES
)


@st.composite
def transfer_curves(draw: st.DrawFn) -> dict[str, Curve]:
    """Curves of some kinds; an all-reduce takes as long for twice the bytes as a reduce-scatter, or longer."""
    steps = st.floats(1.0, 1e9)
    xs = np.cumsum([draw(steps) for _ in range(draw(st.integers(1, 4)))])
    ys = np.cumsum([draw(steps) for _ in xs]) * 1e-9
    longer = draw(st.floats(1, 3))
    curve, twice = Curve.through(zip(xs, ys)), Curve.through(zip(2 * xs, longer * ys))
    kinds = {"all_gather": curve, "all_to_all": curve, "broadcast": curve}
    both = {"reduce_scatter": curve, "all_reduce": twice} if draw(st.booleans()) else {}
    return {kind: kinds[kind] for kind in draw(st.lists(st.sampled_from(sorted(kinds)), unique=True))} | both


@st.composite
def links(draw: st.DrawFn) -> Link:
    reduce_scatter = draw(EFFICIENCIES)
    efficiency = {
        "all_gather": draw(EFFICIENCIES),
        "all_to_all": draw(EFFICIENCIES),
        "broadcast": draw(EFFICIENCIES),
        "reduce_scatter": reduce_scatter,
        "all_reduce": min(draw(EFFICIENCIES), 2 * reduce_scatter),
    }
    launch_s = draw(TIMES)
    launches_s = {"all_reduce": launch_s + draw(TIMES), "all_to_all": draw(TIMES)} if draw(st.booleans()) else {}
    return Link(
        name="any",
        launch_s=launch_s,
        latency_s=draw(TIMES),
        bandwidth_bytes_per_s=draw(st.floats(1e3, 1e13)),
        efficiency=efficiency,
        launches_s=launches_s,
        curves=draw(transfer_curves()),
        alternatives=tuple(draw(st.lists(ALGORITHMS, max_size=3))),
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
    assert at_least(collective_s(kind, ranks, large, link), collective_s(kind, ranks, small, link))


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
    expected = factor * collective_s(kind, ranks, size, link)
    assert collective_s(kind, ranks, size, link.scaled(factor)) == pytest.approx(expected, rel=1e-9)


@given(KINDS, RANKS, SIZES, links())
def test_there_is_no_jump_from_one_size_to_the_next(kind: str, ranks: int, size: float, link: Link) -> None:
    """Nor at the borders of a curve's segments: a few more bytes take no more than the steepest slope explains."""
    for at in [size, *(knot / 2 for curve in link.curves.values() for knot, _ in curve.knots)]:
        more = at * (1 + 1e-7)
        gap = collective_s(kind, ranks, more, link) - collective_s(kind, ranks, at, link)
        assert gap <= 2 * steepest_s_per_byte(link) * (more - at) + 1e-12


def steepest_s_per_byte(link: Link) -> float:
    slowest = min([1.0, *(algorithm.bandwidth_share for algorithm in link.alternatives)])
    slopes = [1 / (link.bandwidth_bytes_per_s * share * slowest) for share in link.efficiency.values()]
    for curve in link.curves.values():
        xs, ys = np.array([(0.0, 0.0), *curve.knots]).T
        slopes += [curve.tail, *(np.diff(ys) / np.diff(xs))]
    return max(slopes)


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


TOPOLOGIES = [
    pytest.param(load_profile(name).topology(("dp", "cp", "tp"), shape), id=f"{name}-{shape}")
    for name in PRESETS
    for shape in [(2, 2, 2), (4, 2, 8), (16, 8, 4), (8, 4, 16)]
]


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


@pytest.mark.parametrize("topology", TOPOLOGIES)
@pytest.mark.parametrize("kind", COLLECTIVE_KINDS)
def test_shipped_topologies_obey_the_laws_on_a_grid(topology: Topology, kind: str) -> None:
    """Over each axis and group of axes: nothing for nothing, no fall, no jump; on one link an all-reduce at least its
    parts.

    Through whole hosts it may cost less: a ring passes every rank, and small all-reduces go by trees (measured: 876 and
    207 us on 32 hosts of 8 H100).
    """
    sizes = np.geomspace(1, 1e11, 4000)
    for axes in [0, 1, 2, (0, 1), (0, 2), (1, 2), (0, 1, 2)]:
        cost = topology.collective_s(kind, axes, sizes)
        assert topology.collective_s(kind, axes, 0) == 0
        assert (np.diff(cost) >= 0).all() and (cost > 0).all() and np.isfinite(cost).all()
        assert (cost[1:] / cost[:-1]).max() <= sizes[1] / sizes[0] * (1 + 1e-9)
        route = topology.flattened[axes] if isinstance(axes, tuple) else topology.routes[axes]
        if kind == "all_reduce" and not route.at_once:
            assert (cost >= topology.collective_s("reduce_scatter", axes, sizes)).all()


def test_a_collective_over_two_levels_by_hand() -> None:
    """4 ranks at 100 bytes/s on each of 2 hosts, 10 bytes/s between, 8000 bytes.

    Inside: 3/4 x 8000 / 100 = 60 s. Between: 1/2 x 2000 / 10 = 100 s for the quarter that each rank is left with.
    """
    levels = ((4, Link("inside", 0, 100)), (2, Link("between", 0, 10)))
    assert leveled_s("all_gather", 8000, levels) == pytest.approx(100 + 60)
    assert leveled_s("reduce_scatter", 8000, levels) == pytest.approx(60 + 100)
    assert leveled_s("all_reduce", 8000, levels) == pytest.approx(60 + 200 + 60)
    assert leveled_s("all_to_all", 8000, levels) == pytest.approx(60 + 400)
    assert leveled_s("broadcast", 8000, levels) == pytest.approx(80 + 800)


def test_levels_on_wires_of_their_own_are_busy_at_once_by_hand() -> None:
    """As above, in 64 chunks of 125 bytes: the first one alone on the level inside, then one after the other between,
    which takes longer. With a second of launch on each level, chunks get dear: of 1 to 64, 8 are best.
    """
    levels = ((4, Link("inside", 0, 100)), (2, Link("between", 0, 10)))
    assert leveled_s("all_gather", 8000, levels, at_once=True) == pytest.approx(60 / 64 + 100)
    slow = tuple((ranks, replace(link, launch_s=1)) for ranks, link in levels)
    assert leveled_s("all_gather", 8000, slow, at_once=True) == pytest.approx((60 / 8 + 1) + (100 + 8))


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        # 4 ranks, 4000 bytes, 1 s a launch, 10 s a hop, 10 bytes/s: 3 hops and 3/4 of the bytes in a pass
        ("all_gather", 1 + 3 * 10 + 300),
        ("reduce_scatter", 1 + 3 * 10 + 300),
        ("all_reduce", 1 + 6 * 10 + 600),
        ("all_to_all", 1 + 3 * 10 + 600),  # at half the rate
        ("broadcast", 1 + 3 * 10 + 400),  # every byte once over each link
    ],
)
def test_hand_computed_cost(kind: str, expected: float) -> None:
    link = Link("toy", latency_s=10, bandwidth_bytes_per_s=10, launch_s=1, efficiency={"all_to_all": 0.5})
    assert collective_s(kind, 4, 4000, link) == pytest.approx(expected)


def test_a_curve_takes_the_place_of_bandwidth_and_alternatives_by_hand() -> None:
    """4 ranks, 4000 bytes: 3000 sent, half way from (2000, 5 s) to (4000, 9 s): 7 s; 2 s of launch, 3 hops of 10 s."""
    link = Link(
        "toy",
        latency_s=10,
        bandwidth_bytes_per_s=10,
        launch_s=1,
        launches_s={"all_gather": 2},
        curves={"all_gather": Curve.through([(2000, 5), (4000, 9)])},
        alternatives=(Algorithm("free", "tree", 0, 0, 1),),
    )
    assert collective_s("all_gather", 4, 4000, link) == pytest.approx(2 + 30 + 7)
    assert collective_s("reduce_scatter", 4, 4000, link) == pytest.approx(300)


def test_the_fastest_algorithm_counts_by_hand() -> None:
    """8 ranks: a ring of 7 hops of 10 s at 10 bytes/s, or a tree of 3 hops of 12 s at half the rate."""
    tree = Algorithm("tree", "tree", launch_s=1, latency_s=12, bandwidth_share=0.5)
    link = Link("toy", latency_s=10, bandwidth_bytes_per_s=10, alternatives=(tree,))
    assert collective_s("all_gather", 8, 80, link) == pytest.approx(1 + 36 + 14)  # the ring: 70 + 7
    assert collective_s("all_reduce", 8, 80, link) == pytest.approx(1 + 72 + 28)  # the ring: 140 + 14
    assert collective_s("all_gather", 8, 8000, link) == pytest.approx(70 + 700)  # the tree: 37 + 1400
    assert collective_s("all_to_all", 8, 80, link) == pytest.approx(70 + 7)  # there is no tree for it


def test_a_gloo_reduce_scatter_costs_its_all_reduce() -> None:
    link = load_profile("cpu-gloo").topology(("x",), (4,)).links[0]
    assert collective_s("reduce_scatter", 4, 1 << 20, link) == collective_s("all_reduce", 4, 1 << 20, link)


def test_an_nvlink_host_by_hand() -> None:
    """All-gather over 8 H100: the least of NCCL's three protocols, LL for 4 KiB and Simple for 1 GiB.

    LL: 6.6 us + 7 x 0.6 us + 7/8 x 4096 / (0.236 x 0.76 x 450e9) = 10.84 us (Simple would take 8.4 + 7 x 3.4 = 32.2).
    Simple: 8.4 us + 7 x 3.4 us + 7/8 x 2^30 / (0.76 x 450e9) = 2.779 ms (LL128 would take 14 + 7 x 1.9 us + 2.986 ms).
    """
    topology = load_profile("dgx-h100").topology(("tp",), (8,))
    assert topology.collective_s("all_gather", 0, 4096) == pytest.approx(10.84e-6, rel=1e-3)
    assert topology.collective_s("all_gather", 0, 1 << 30) == pytest.approx(2.779e-3, rel=1e-3)


def test_a_tree_is_taken_for_small_buffers_between_many_hosts_by_hand() -> None:
    """All-reduce of 4 KiB over 64 hosts, by tree LL: 24.8 us + 2 x 6 x 0.45 us + 126/64 x 4 KiB / 11.4 GB/s.

    The quickest ring would wait for 126 hops of 3.9 us. For 1 GiB the ring at the full rate is the fastest of all.
    """
    topology = load_profile("dgx-h100").topology(("dp", "tp"), (64, 8))
    small = 24.8e-6 + 12 * 0.45e-6 + 126 / 64 * 4096 / (0.24 * 47.5e9)
    large = 26.4e-6 + 126 * 5e-6 + 126 / 64 * 2**30 / 47.5e9
    assert topology.collective_s("all_reduce", 0, 4096) == pytest.approx(small)
    assert topology.collective_s("all_reduce", 0, 1 << 30) == pytest.approx(large)


def test_a_switch_that_reduces_sends_the_buffer_once_by_hand() -> None:
    """8 ranks, 80 bytes: the ring takes 14 hops of 10 s and 140 bytes at 10 bytes/s, the switch 1 + 10 + 80 / 5 s.

    A reduce-scatter may take it too; an all-gather, 7 hops and 70 bytes, has nothing to reduce.
    """
    switch = Algorithm("switch", "switch", launch_s=1, latency_s=10, bandwidth_share=0.5)
    link = Link("toy", latency_s=10, bandwidth_bytes_per_s=10, alternatives=(switch,))
    assert collective_s("all_reduce", 8, 80, link) == pytest.approx(1 + 10 + 16)
    assert collective_s("reduce_scatter", 8, 80, link) == pytest.approx(1 + 10 + 16)
    assert collective_s("all_gather", 8, 80, link) == pytest.approx(70 + 7)
    assert collective_s("all_reduce", 2, 8000, link) == pytest.approx(20 + 800)  # the ring: the switch would take 1611


def test_a_ring_through_hosts_waits_for_every_rank_by_hand() -> None:
    """4 ranks on each of 3 hosts: a level inside has 3 hops, a ring through all 9, so 6 more of 5 s.

    It has no trees. An all-reduce goes by trees, up and down each host once.
    """
    tree = Algorithm("tree", "tree", launch_s=0, latency_s=1, bandwidth_share=1)
    between = Link("between", latency_s=10, bandwidth_bytes_per_s=1e9, hop_inside_s=5, alternatives=(tree,))
    levels = ((4, Link("inside", latency_s=1, bandwidth_bytes_per_s=1e9)), (3, between))
    for kind in ("all_gather", "reduce_scatter", "all_to_all", "broadcast"):
        assert leveled_s(kind, 1, levels, at_once=True) == pytest.approx(3 * 1 + 2 * 10 + 6 * 5)
        assert leveled_s(kind, 0, levels, at_once=True) == 0
    assert leveled_s("all_reduce", 1, levels, at_once=True) == pytest.approx(3 * 1 + 2 * 2 * 1 + 3 * 1)


def test_measured_latencies_over_hosts_are_met() -> None:
    """Gathers of small buffers on 2 to 256 H100, as published, less what the host takes to issue them (151 us)."""
    measured = {(2, 8): 210, (4, 8): 273, (8, 8): 362, (16, 8): 527, (32, 8): 871, (32, 1): 214}
    for (hosts, inside), microseconds in measured.items():
        shape = (hosts * inside, 8 // inside)
        ranks = np.arange(hosts * 8).reshape(hosts, inside, 8 // inside).reshape(-1)
        topology = load_profile("h100-500w-hbm2e").topology(("dp", "tp"), shape, ranks.tolist())
        assert topology.collective_s("all_gather", 0, 4096) + 151e-6 == pytest.approx(microseconds * 1e-6, rel=0.2)


@pytest.mark.parametrize("size", [-1, math.nan, math.inf, np.array([1.0, -1.0]), np.array([math.nan])])
def test_a_size_that_is_no_amount_is_refused(size: float) -> None:
    with pytest.raises(ValueError, match="size_bytes must be finite and not negative"):
        collective_s("all_gather", 2, size, Link("toy", 1, 1))


def test_an_unknown_kind_is_refused_with_the_nearest() -> None:
    with pytest.raises(ValueError, match=r"unknown collective 'allgather'.*did you mean 'all_gather'"):
        collective_s("allgather", 2, 1, Link("toy", 1, 1))


@pytest.mark.parametrize("axis", [-1, 2, (0, 2), (0, 0), ()])
def test_an_axis_that_is_not_there_is_refused(axis: int) -> None:
    topology = load_profile("dgx-h100").topology(("dp", "tp"), (8, 8))
    with pytest.raises(ValueError, match=r"no mesh axis of index .*dp, tp"):
        topology.collective_s("all_gather", axis, 1)
