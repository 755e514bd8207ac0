"""A network of which one mesh was measured, axis by axis: what a calibration writes. It prices that mesh alone."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import reduce
from typing import Any

import numpy as np

from .amounts import Array
from .errors import ProfileError
from .link import Link
from .topology import Route, Topology, axis_groups, mesh_text


@dataclass(frozen=True)
class MeasuredMesh:
    """The links of one mesh.

    Invariants (checked where a profile file is read): each flattened group names two axes or more of the mesh.

    Attributes:
        axes, shape: the mesh, in its order; ranks with the last axis fastest.
        links: one per axis; for that axis's number of ranks and no other.
        flattened: of groups of axes (their names, in mesh order) that were measured as one group.
    """

    axes: tuple[str, ...]
    shape: tuple[int, ...]
    links: tuple[Link, ...]
    flattened: Mapping[tuple[str, ...], Link] = field(default_factory=dict, hash=False)

    def topology(self, axes: tuple[str, ...], ranks: Array) -> Topology:
        """The routes of the mesh that was measured.

        Groups of axes that were not measured together are priced level by level, the fastest axis first.

        Raises:
            ProfileError: another mesh, or another order of ranks.
        """
        measured = mesh_text(self.axes, self.shape)
        if (axes, ranks.shape) != (self.axes, self.shape):
            asked = mesh_text(axes, ranks.shape)
            raise ProfileError(
                f"it was measured on the mesh {measured} and has no links for {asked}; use that mesh, calibrate "
                f"on this one (autoshard calibrate --mesh {asked} -o FILE), or name a profile with "
                "links inside and between hosts"
            )
        if not np.array_equal(ranks.ravel(), np.arange(ranks.size)):
            raise ProfileError(
                f"it was measured on the mesh {measured} with ranks in order, the last axis fastest, and knows no "
                "other order; use the plain mesh, or name a profile with links inside and between hosts"
            )
        routes = tuple(Route(link) for link in self.links)
        return Topology(axes, self.shape, routes, {group: self._flattened(group) for group in axis_groups(len(axes))})

    def entries(self) -> dict[str, Any]:
        """As a profile file spells it."""
        single = zip(self.axes, self.shape, self.links)
        entries = {axis: {"size": size} | link.entries() for axis, size, link in single}
        for names, link in self.flattened.items():
            size = math.prod(self.shape[self.axes.index(axis)] for axis in names)
            entries["+".join(names)] = {"size": size} | link.entries()
        return {"axes": entries}

    def _flattened(self, group: tuple[int, ...]) -> Route:
        names = tuple(self.axes[axis] for axis in group)
        if names in self.flattened:
            return Route(self.flattened[names])
        members = [(self.shape[axis], self.links[axis]) for axis in group]
        levels = sorted(members, key=lambda member: -member[1].bandwidth_bytes_per_s)
        return Route(reduce(Link.slower_of, (link for _, link in members)), tuple(levels))
