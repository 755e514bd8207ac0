"""The meshes that a number of devices can form: every way to write it as a product of sizes, in order, from 2 up.

Ranks are counted with the last axis fastest, as ``init_device_mesh`` does, and they fill hosts in order. So the first
axes cross hosts and the last ones lie inside, and the order of sizes matters: of 64 devices in hosts of 8, dp=16,tp=4
keeps tp inside a host, dp=4,tp=16 spreads it over two. Where the order makes no difference (in one host with a switch,
2 x 4 is 4 x 2) one of the two is kept, that with the larger axis last.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import combinations, permutations
from math import prod
from typing import Literal, TypeAlias

from cost_models import Hosts, Link, Profile, ProfileError, Topology
from cost_models.collectives import Levels

from ..errors import MeshError
from ..mesh import MAX_RANKS, Mesh

AXES: Mapping[int, tuple[str, ...]] = {
    1: ("dp",),
    2: ("dp", "tp"),
    3: ("pod", "dp", "tp"),
    4: ("pod", "dp", "cp", "tp"),
}
"""The names of axes, by how many there are. They are names alone: a plan says what each axis is used for."""
MOST_AXES = 4
"""How many axes a search looks at by default."""

Place: TypeAlias = Literal["inside hosts", "across hosts", "inside and across hosts"]


@dataclass(frozen=True)
class Shape:
    """A mesh, and of each of its axes whether the ranks of a group are in one host, each in another, or both."""

    mesh: Mesh
    places: tuple[Place, ...]

    @property
    def text(self) -> str:
        """``dp=8 across hosts, tp=8 inside hosts``."""
        return ", ".join(f"{a}={n} {place}" for a, n, place in zip(self.mesh.axes, self.mesh.shape, self.places))


def shapes_of(devices: int, profile: Profile, most_axes: int = MOST_AXES) -> tuple[Shape, ...]:
    """Every mesh of so many devices that the machine can have, those of few axes first.

    Raises:
        MeshError: the number of devices or of axes is out of range, or the machine has no mesh of so many devices.
    """
    if not 1 <= devices <= MAX_RANKS:
        raise MeshError(f"cannot search meshes of {devices} devices: give a whole number from 1 to {MAX_RANKS}")
    if most_axes not in AXES:
        raise MeshError(f"cannot search meshes of up to {most_axes} axes: choose from 1 to {max(AXES)}")
    found: list[Shape] = []
    known: list[_Links] = []
    refused: ProfileError | None = None
    for sizes in sorted(_factorisations(devices, most_axes), key=lambda sizes: (len(sizes), sizes)):
        mesh = Mesh(AXES[len(sizes)], sizes)
        try:
            topology = profile.topology(mesh.axes, mesh.shape)
        except ProfileError as error:
            refused = refused or error
            continue
        links = _links(topology)
        if not any(_reordered(links, order) in known for order in permutations(range(mesh.ndim))):
            known.append(links)
            found.append(Shape(mesh, _places(mesh, profile)))
    if not found:
        raise MeshError(f"there is no mesh of {devices} devices: {refused}")
    return tuple(found)


def _factorisations(number: int, most: int) -> Iterator[tuple[int, ...]]:
    """Every way to write a number as an ordered product of at most so many factors from 2 up; 1 is (1,).

    >>> sorted(_factorisations(8, 2))
    [(2, 4), (4, 2), (8,)]
    """
    yield (number,)
    if most > 1:
        for first in range(2, number // 2 + 1):
            if number % first == 0:
                yield from ((first, *rest) for rest in _factorisations(number // first, most - 1))


_Links: TypeAlias = dict[frozenset[int], tuple[int, Link, Levels]]
"""Of each group of axes how many ranks it has, and what it runs on: what prices depend on."""


def _links(topology: Topology) -> _Links:
    links: _Links = {}
    count = len(topology.axes)
    for size in range(1, count + 1):
        for group in combinations(range(count), size):
            route = topology.routes[group[0]] if size == 1 else topology.flattened[group]
            levels = tuple(sorted(route.levels, key=lambda level: (level[0], level[1].name)))
            links[frozenset(group)] = prod(topology.shape[axis] for axis in group), route.link, levels
    return links


def _reordered(links: _Links, order: tuple[int, ...]) -> _Links:
    return {frozenset(order[axis] for axis in group): found for group, found in links.items()}


def _places(mesh: Mesh, profile: Profile) -> tuple[Place, ...]:
    network = profile.network
    per_host = network.devices_per_host if isinstance(network, Hosts) else None
    places: list[Place] = []
    stride = mesh.size
    for size in mesh.shape:
        span, stride = stride, stride // size
        if per_host is None or mesh.size <= per_host or (span <= per_host and per_host % span == 0):
            places.append("inside hosts")
        else:
            places.append("across hosts" if stride >= per_host else "inside and across hosts")
    return tuple(places)
