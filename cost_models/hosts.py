"""Machines of equal hosts: a fast network inside each, a slower one between them.

Ranks fill the hosts in order, ``devices_per_host`` each; a mesh may lay them out in any order. A group of ranks

- inside one host runs on the link inside a host (on a torus: what its part of the torus gives, ``cost_models.torus``);
- with no two ranks in one host runs on the link between hosts;
- across both runs as a flat ring at the worse constant of each, or level by level where each host holds equally many
  of its ranks in a row: inside the hosts first, so that every device uses its own network card, and in chunks, so that
  both networks are busy at once.

A group of several axes is such a group too; it may also run level by level, axis by axis. A *host* is whatever the fast
network connects: a server, an NVLink domain, a TPU slice.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import reduce
from typing import Any

import numpy as np

from .amounts import Array
from .collectives import Levels
from .errors import ProfileError
from .link import Link
from .topology import Route, Topology, axis_groups, groups_of, mesh_text
from .torus import Torus


@dataclass(frozen=True)
class Hosts:
    """Equal hosts.

    Attributes:
        devices_per_host: None where one host holds a mesh of any size.
        intra_host: inside a host; on a torus, the link to one neighbour.
        inter_host: None where no second host is known.
        torus: how the devices of a host are wired, None for a switch (every pair at the full rate).
    """

    devices_per_host: int | None
    intra_host: Link
    inter_host: Link | None = None
    torus: Torus | None = None

    def topology(self, axes: tuple[str, ...], ranks: Array) -> Topology:
        """The routes of a mesh; ``ranks`` holds the rank at each of its positions.

        Raises:
            ProfileError: the mesh leaves the host and there is no ``inter_host`` link, or it does not fit the torus.
        """
        if self.devices_per_host is not None and ranks.size > self.devices_per_host and self.inter_host is None:
            raise ProfileError(
                f"the mesh {mesh_text(axes, ranks.shape)} has {ranks.size} ranks, but this is one host of "
                f"{self.devices_per_host} devices (the profile has no links.inter_host); use a smaller mesh, or give "
                "the profile a link between hosts"
            )
        routes = tuple(self._route(groups_of(ranks, (axis,)), ranks.size) for axis in range(ranks.ndim))
        flattened = {group: self._flattened(group, routes, ranks) for group in axis_groups(ranks.ndim)}
        return Topology(axes, ranks.shape, routes, flattened)

    def entries(self) -> dict[str, Any]:
        """As a profile file spells it."""
        links = {"intra_host": self.intra_host.entries()}
        if self.inter_host is not None:
            links["inter_host"] = self.inter_host.entries()
        torus = {"torus": self.torus.entries()} if self.torus else {}
        return {"devices_per_host": self.devices_per_host or "any"} | torus | {"links": links}

    def _route(self, groups: Array, size: int) -> Route:
        """``groups`` is (groups, members): the ranks of each group; ``size`` that of the whole mesh.

        Members are taken in the order of their ranks, so host by host: a library lays its rings so, whatever the order
        of the mesh.
        """
        # With two hosts of four devices: the group (0, 1, 2, 3) stays inside a host; of (0, 4) every step to the next
        # member leaves the host; (0, 1, 4, 5) has two members in each host, so it can run level by level; (0, 1, 2, 4)
        # has three and one, so it is a flat ring at the worse of both links.
        groups = np.sort(groups, axis=1)
        hosts = groups // (self.devices_per_host or size)
        leaves = hosts[:, 1:] != hosts[:, :-1]
        if not leaves.any():
            return Route(self._inside(groups, size))
        assert self.inter_host is not None
        if leaves.all():
            return Route(self.inter_host)
        inside = _ranks_in_each_host(hosts)
        if inside is None:
            return Route(self.intra_host.slower_of(self.inter_host))
        link = self._inside(groups.reshape(-1, inside), size)
        levels: Levels = ((inside, link), (groups.shape[1] // inside, self.inter_host))
        return Route(link.slower_of(self.inter_host), levels, at_once=True)

    def _inside(self, groups: Array, size: int) -> Link:
        if self.torus is None or groups.shape[1] == 1:
            return self.intra_host
        per_host = self.devices_per_host or size
        return self.torus.link(groups % per_host, min(size, per_host), self.intra_host)

    def _flattened(self, group: tuple[int, ...], routes: tuple[Route, ...], ranks: Array) -> Route:
        """The route of several axes: flat, or axis by axis, the fastest first."""
        members = [(ranks.shape[axis], routes[axis].link) for axis in group]
        by_axis = tuple(sorted(members, key=lambda member: -member[1].bandwidth_bytes_per_s))
        try:
            own = self._route(groups_of(ranks, group), ranks.size)
        except ProfileError:  # no box of the torus: such a group has no ring of its own
            return Route(reduce(Link.slower_of, (link for _, link in members)), by_axis)
        return own if own.levels else Route(own.link, by_axis)


def _ranks_in_each_host(hosts: Array) -> int | None:
    """How many ranks of each group, (groups, members) sorted, are in each of its hosts; None where it differs."""
    inside = int((hosts[0] == hosts[0, 0]).sum())
    if hosts.shape[1] % inside:
        return None
    blocks = hosts.reshape(len(hosts), -1, inside)
    equal = (blocks == blocks[:, :, :1]).all() and (blocks[:, 1:, 0] != blocks[:, :-1, 0]).all()
    return inside if equal else None
