"""Which link each mesh axis runs on.

Ranks are counted through the mesh with the last axis fastest, and fill the hosts in order, ``devices_per_host`` each.
A collective over an axis runs in groups of ranks that differ in this coordinate alone. Where every group stays inside a
host the axis runs on the link inside a host; where no group has two ranks in one host it runs on the link between
hosts; an axis across both (or whose groups fall unevenly on the hosts) is priced on the slower link throughout, which
is what a ring pays at its slowest hop.

Source: the rank-major order is that of torch's ``DeviceMesh``; the slowest hop sets the rate of a ring: P. Patarasuk,
X. Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", JPDC 69(2), 2009. A hierarchical
algorithm, or a ring per network card, does better on an axis across both; neither is modelled.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import overload

import numpy as np

from .amounts import Amount, Array
from .collectives import collective_s
from .errors import ProfileError
from .link import Link

MAX_RANKS = 1 << 20


@dataclass(frozen=True)
class Topology:
    """The links of a mesh: one per axis, in the order of the axes. Made by ``Profile.topology``."""

    axes: tuple[str, ...]
    shape: tuple[int, ...]
    links: tuple[Link, ...]

    @overload
    def collective_s(self, kind: str, axis: int, size_bytes: float) -> float: ...
    @overload
    def collective_s(self, kind: str, axis: int, size_bytes: Array) -> Array: ...
    def collective_s(self, kind: str, axis: int, size_bytes: Amount) -> Amount:
        """Seconds of one collective over the mesh axis of index ``axis``.

        ``size_bytes`` is the larger of a rank's input and output buffer: of an all-gather the gathered output, of a
        reduce-scatter the input, of an all-reduce and an all-to-all the buffer. An array of sizes gives an array of
        seconds. The formula is that of :mod:`cost_models.collectives`.

        Raises:
            ValueError: an unknown kind, no such axis, or a size that is negative or not finite.
        """
        if not 0 <= axis < len(self.axes):
            raise ValueError(f"no mesh axis of index {axis!r}; the mesh has {len(self.axes)}: {', '.join(self.axes)}")
        return collective_s(kind, self.shape[axis], size_bytes, self.links[axis])


def place_axes(
    axes: tuple[str, ...],
    shape: tuple[int, ...],
    *,
    devices_per_host: int | None,
    intra_host: Link,
    inter_host: Link | None,
) -> Topology:
    """The links that the axes of a mesh get (rule above). ``devices_per_host`` None: one host of any size.

    Raises:
        ProfileError: the axes are malformed, or the mesh leaves the host and there is no ``inter_host`` link.
    """
    _check_mesh(axes, shape)
    size = math.prod(shape)
    if devices_per_host is None or size <= devices_per_host:
        return Topology(axes, shape, (intra_host,) * len(axes))
    if inter_host is None:
        raise ProfileError(
            f"the mesh {_text(axes, shape)} has {size} ranks, but this is one host of {devices_per_host} devices "
            "(the profile has no links.inter_host); use a smaller mesh, or give the profile a link between hosts"
        )
    hosts = np.arange(size).reshape(shape) // devices_per_host
    return Topology(axes, shape, tuple(_link(hosts, axis, intra_host, inter_host) for axis in range(len(axes))))


def _link(hosts: Array, axis: int, intra_host: Link, inter_host: Link) -> Link:
    """The link of one axis; ``hosts`` is the host of every rank, in the shape of the mesh."""
    leaves_host = np.diff(hosts, axis=axis) > 0
    if not leaves_host.any():
        return intra_host
    return inter_host if leaves_host.all() else intra_host.slower_of(inter_host)


def _check_mesh(axes: tuple[str, ...], shape: tuple[int, ...]) -> None:
    if not axes or len(axes) != len(shape):
        raise ProfileError(f"a mesh needs one size per axis, got axes {axes} and sizes {shape}")
    if any(size < 1 for size in shape):
        raise ProfileError(f"every axis of a mesh has a size of at least 1, got {_text(axes, shape)}")
    if math.prod(shape) > MAX_RANKS:
        raise ProfileError(f"the mesh {_text(axes, shape)} has {math.prod(shape)} ranks; the limit is {MAX_RANKS}")


def _text(axes: tuple[str, ...], shape: tuple[int, ...]) -> str:
    return ",".join(f"{axis}={size}" for axis, size in zip(axes, shape))
