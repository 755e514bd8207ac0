"""What a part of an n-dimensional torus gives to a collective.

Devices are counted through the torus with its last dimension fastest. A group of ranks must be a box: on each dimension
it takes ``d`` positions, ``s`` apart, and it holds every combination of them. With ``w`` the bytes per second of one
link in one direction and ``L`` the dimension's length:

- the group closes to a ring on a dimension that wraps around if ``s * d = L``, else it is a line;
- a ring gives ``2 w / s`` (both directions at once), a line ``w / s``: where positions lie ``s`` apart, ``s`` groups
  share the same links;
- a group over several dimensions gets the sum of theirs;
- the farthest peer is ``s * floor(d / 2)`` hops away on a ring, ``s * (d - 1)`` on a line; the hops of a group over
  several dimensions add up, and so a pass waits for that many hops rather than for ``n - 1``;
- an all-to-all of B bytes a rank puts ``B / d * floor(d^2 / 4)`` bytes on each link of a line in either direction and
  half of it on a ring (s times that where s groups share); the busiest dimension decides.

The result is a ``Link`` of effective constants, so that the formula of :mod:`cost_models.collectives` gives these
seconds.

Source: J. Austin et al., "How to Scale Your Model" (jax-ml.github.io/scaling-book), part 3: an all-gather over an axis
that wraps takes V / W with W both directions together, at least hops / 2 of latency, several axes add up, an all-to-all
a quarter of an all-gather; the loads of an all-to-all: the number of paths over the middle of a line or ring.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from .amounts import Array
from .errors import ProfileError
from .link import Link


@dataclass(frozen=True)
class Torus:
    """The wiring of a slice.

    Attributes:
        shape: devices along each dimension.
        wraparound: of each dimension, whether its ends are connected.
        slices: the shape that a mesh of fewer devices gets, by its number of devices; a dimension of a slice wraps
            around only if it is as long as the torus and that wraps.
    """

    shape: tuple[int, ...]
    wraparound: tuple[bool, ...]
    slices: Mapping[int, tuple[int, ...]] = field(default_factory=dict, hash=False)

    @property
    def size(self) -> int:
        """The number of devices."""
        return math.prod(self.shape)

    def link(self, groups: Array, devices: int, neighbour: Link) -> Link:
        """What groups of ranks, (groups, members), get of a slice of ``devices``; ``neighbour`` is one link.

        Raises:
            ProfileError: no slice has that many devices, or a group is not a box of it.
        """
        # The places of a group's members, relative to its first, must be the same for every group and fill a box: on
        # each dimension `count` positions, `stride` apart. On a torus of 4 x 4 the group (0, 1, 4, 5) is at (0, 0),
        # (0, 1), (1, 0), (1, 1): two positions, one apart, on both dimensions.
        shape = self.slice_shape(devices)
        places = np.stack(np.unravel_index(groups, shape), axis=-1)
        offsets = places[0] - places[0, :1]
        if not (places - places[:, :1] == offsets).all():
            raise _no_box(groups, shape)
        spans = [_span(offsets[:, dim]) for dim in range(len(shape))]
        if any(span is None for span in spans) or not _is_product(offsets, spans):
            raise _no_box(groups, shape)
        parts = [
            _Part(count, stride, wraps=self._wraps(dim, shape) and count * stride == shape[dim])
            for dim, (count, stride) in enumerate(span for span in spans if span)
            if count > 1
        ]
        return _effective(neighbour, parts)

    def slice_shape(self, devices: int) -> tuple[int, ...]:
        """The shape of a slice of that many devices.

        Raises:
            ProfileError: the profile names none.
        """
        if devices == self.size:
            return self.shape
        if devices not in self.slices:
            known = ", ".join(str(size) for size in sorted({*self.slices, self.size}))
            raise ProfileError(
                f"no slice of this {'x'.join(map(str, self.shape))} torus has {devices} devices; it has slices of "
                f"{known} (torus.slices of the profile)"
            )
        return self.slices[devices]

    def entries(self) -> dict[str, Any]:
        """As a profile file spells it."""
        entries: dict[str, Any] = {"shape": list(self.shape), "wraparound": list(self.wraparound)}
        slices = [list(shape) for _, shape in sorted(self.slices.items())]
        return entries | ({"slices": slices} if slices else {})

    def _wraps(self, dim: int, shape: tuple[int, ...]) -> bool:
        return self.wraparound[dim] and shape[dim] == self.shape[dim]


@dataclass(frozen=True)
class _Part:
    """A group along one dimension: ``count`` positions, ``stride`` apart."""

    count: int
    stride: int
    wraps: bool

    def __str__(self) -> str:
        return f"{'ring' if self.wraps else 'line'} of {self.count}"

    @property
    def rates(self) -> float:
        """Its bandwidth in units of one link and direction."""
        return (2 if self.wraps else 1) / self.stride

    @property
    def hops(self) -> int:
        return self.stride * (self.count // 2 if self.wraps else self.count - 1)

    @property
    def all_to_all_load(self) -> float:
        """Bytes over the busiest link, in units of a rank's buffer."""
        return self.stride * (self.count**2 // 4) / self.count / (2 if self.wraps else 1)


def _effective(neighbour: Link, parts: list[_Part]) -> Link:
    ranks = math.prod(part.count for part in parts)
    rates = sum(part.rates for part in parts)
    share = (ranks - 1) / ranks / rates / max(part.all_to_all_load for part in parts)
    all_to_all = neighbour.efficiency.get("all_to_all", 1.0) * share
    return replace(
        neighbour,
        name=" x ".join([f"{neighbour.name} {parts[0]}", *map(str, parts[1:])]),
        latency_s=neighbour.latency_s * sum(part.hops for part in parts) / (ranks - 1),
        bandwidth_bytes_per_s=neighbour.bandwidth_bytes_per_s * rates,
        efficiency={**neighbour.efficiency, "all_to_all": all_to_all},
    )


def _span(offsets: Array) -> tuple[int, int] | None:
    """How many positions and how far apart, or None where they are not evenly spaced."""
    places = np.unique(offsets)
    if len(places) == 1:
        return 1, 1
    steps = np.diff(places)
    return (len(places), int(steps[0])) if (steps == steps[0]).all() else None


def _is_product(offsets: Array, spans: list[tuple[int, int] | None]) -> bool:
    return math.prod(span[0] for span in spans if span) == len(offsets) == len(np.unique(offsets, axis=0))


def _no_box(groups: Array, shape: tuple[int, ...]) -> ProfileError:
    shown = ", ".join(map(str, groups[0][:6])) + (", ..." if groups.shape[1] > 6 else "")
    return ProfileError(
        f"the devices {shown}, which one mesh axis groups, are no box of a slice of {'x'.join(map(str, shape))}; use "
        "axis sizes that multiply to its dimensions, or the order of autoshard.mesh.HybridMesh(..., torus=...)"
    )
