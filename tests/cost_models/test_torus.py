"""What parts of a torus give to a collective, against hand computations."""

from __future__ import annotations

import math

import numpy as np
import pytest

from cost_models import Link, ProfileError, Torus, load_profile
from cost_models.collectives import collective_s
from cost_models.hosts import Hosts
from cost_models.topology import mesh_ranks

# One link: 10 bytes/s in each direction, 1 s a hop.
ICI = Link("ICI", latency_s=1, bandwidth_bytes_per_s=10)


def axis_s(
    shape: tuple[int, ...], mesh: tuple[int, ...], axis: int, kind: str, size: float, wrap: bool = True
) -> float:
    hosts = Hosts(math.prod(shape), ICI, None, Torus(shape, (wrap,) * len(shape)))
    axes = tuple(f"axis{i}" for i in range(len(mesh)))
    return hosts.topology(axes, mesh_ranks(axes, mesh, None)).collective_s(kind, axis, size)


def test_a_ring_has_twice_the_bandwidth_of_one_direction() -> None:
    """Ring of 8: half of 7/8 x 800 bytes go each way at 10 bytes/s, 35 s; the farthest chip is 4 hops away."""
    assert axis_s((8,), (8,), 0, "all_gather", 800) == pytest.approx(35 + 4)


def test_a_line_has_the_bandwidth_of_one_direction() -> None:
    """Line of 8: 7/8 x 800 bytes at 10 bytes/s, 70 s; its ends are 7 hops apart."""
    assert axis_s((8,), (8,), 0, "all_gather", 800, wrap=False) == pytest.approx(70 + 7)


def test_an_all_reduce_is_two_passes() -> None:
    assert axis_s((8,), (8,), 0, "all_reduce", 800) == pytest.approx(2 * (35 + 4))


@pytest.mark.parametrize(
    ("shape", "wrap", "expected"),
    [
        # each rank sends 800/8 = 100 bytes to each other; on the line 4 x 4 pairs cross the middle in each direction
        ((8,), False, 16 * 100 / 10 + 7),
        # on the ring half as many cross each of two cuts: mean distance 2 over 8 links a direction
        ((8,), True, 8 * 100 / 10 + 4),
        # 4 x 4: 50 bytes to each; the middle of a row is crossed by the traffic of 2 columns to the 2 others in 4 rows,
        # 8 x 8 pairs over 4 rows: 16 x 50 bytes on each line, half on each ring; 6 hops at most, 4 with wraparound
        ((4, 4), False, 16 * 50 / 10 + 6),
        ((4, 4), True, 8 * 50 / 10 + 4),
    ],
)
def test_an_all_to_all_is_bound_by_the_middle(shape: tuple[int, ...], wrap: bool, expected: float) -> None:
    assert axis_s(shape, (math.prod(shape),), 0, "all_to_all", 800, wrap) == pytest.approx(expected)


def test_an_all_to_all_on_a_large_even_ring_is_a_quarter_of_an_all_gather_of_all_buffers() -> None:
    """As "How to Scale Your Model" has it; 1024 chips, so that (n - 1) / n is near 1, and no latency."""
    link = Torus((1024,), (True,)).link(np.arange(1024)[None], 1024, Link("ICI", 0, 10))
    gather = collective_s("all_gather", 1024, 1024 * 800, link)
    assert collective_s("all_to_all", 1024, 800, link) == pytest.approx(gather / 4, rel=2e-3)


def test_an_axis_over_two_dimensions_gets_the_sum_of_their_links() -> None:
    """4 x 4 with wraparound as one axis: four directions, 15/16 x 1600 / 40 = 37.5 s; 2 + 2 hops."""
    assert axis_s((4, 4), (16,), 0, "all_gather", 1600) == pytest.approx(37.5 + 4)
    assert axis_s((4, 4), (4, 4), 1, "all_gather", 1600) == pytest.approx(0.75 * 1600 / 20 + 2)


def test_a_part_of_a_ring_is_a_line_and_strided_groups_share_its_links() -> None:
    """dp=4,tp=2 on a ring of 8: tp pairs neighbours, one link; dp takes every second chip.

    The two dp groups share the ring, so each has 2 x 10 / 2 bytes/s, and its farthest chip is 2 x 2 hops away.
    """
    assert axis_s((8,), (4, 2), 1, "all_gather", 800) == pytest.approx(400 / 10 + 1)
    assert axis_s((8,), (4, 2), 0, "all_gather", 800) == pytest.approx(600 / 10 + 4)


def test_odd_rings_follow_the_count_of_paths() -> None:
    """A ring of 5: of the 4 others 2 are one hop and 2 two hops away, 6 hops over 10 directed links a chip of 2 each.

    Every rank sends 100 bytes to each other: 6 x 100 / 2 = 300 bytes on each link, 30 s; 2 hops at most.
    """
    assert axis_s((5,), (5,), 0, "all_to_all", 500) == pytest.approx(30 + 2)


def test_a_group_that_is_no_box_is_refused_with_what_to_do() -> None:
    with pytest.raises(
        ProfileError, match=r"devices 0, 1, 2, 3, 4, 5, are no box|no box of a slice of 4x4.*HybridMesh"
    ):
        hosts = Hosts(16, ICI, None, Torus((4, 4), (True, True)))
        order = [0, 5, 10, 15, *(rank for rank in range(16) if rank not in (0, 5, 10, 15))]
        hosts.topology(("a", "b"), mesh_ranks(("a", "b"), (4, 4), order))


def test_axes_that_form_no_box_together_are_priced_axis_by_axis() -> None:
    """Ring of 8 as 2 x 2 x 2: the outer and the inner axis together hold 0, 1, 4 and 5.

    All-gather of 800 bytes: over the inner axis (one link) 800 / 2 / 10 = 40 s and a hop; before it over the outer axis
    of 400 bytes: stride 4, a ring of 2 that 4 groups share, 200 / (20 / 4) = 40 s and 4 hops.
    """
    hosts = Hosts(8, ICI, None, Torus((8,), (True,)))
    topology = hosts.topology(("a", "b", "c"), mesh_ranks(("a", "b", "c"), (2, 2, 2), None))
    assert topology.collective_s("all_gather", (0, 2), 800) == pytest.approx(40 + 1 + 40 + 4)


def test_slices_of_a_pod_lose_the_wraparound_but_along_full_dimensions() -> None:
    profile = load_profile("tpu-v5e")
    names = {mesh: [link.name for link in profile.topology(("dp", "tp"), mesh).links] for mesh in [(8, 16), (4, 4)]}
    assert names == {
        (8, 16): ["ICI line of 8", "ICI ring of 16"],
        (4, 4): ["ICI line of 4", "ICI line of 4"],
    }
    with pytest.raises(ProfileError, match="no slice of this 16x16 torus has 6 devices; it has slices of 4, 8, 16"):
        profile.topology(("dp", "tp"), (2, 3))


def test_pods_talk_over_the_data_center_network() -> None:
    topology = load_profile("tpu-v5e").topology(("dp", "tp"), (2, 256))
    assert [link.name for link in topology.links] == ["DCN", "ICI ring of 16 x ring of 16"]


def test_a_ring_of_a_v5e_pod_by_hand() -> None:
    """All-gather of 64 MiB over 16 chips: 1 us + 8 hops x 0.5 us + 15/16 x 2^26 / (2 x 0.9 x 50e9) = 704 us."""
    topology = load_profile("tpu-v5e").topology(("dp", "tp"), (16, 16))
    assert topology.collective_s("all_gather", 1, 1 << 26) == pytest.approx(704.05e-6, rel=1e-4)
