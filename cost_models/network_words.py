"""What each axis of a mesh runs on, in words."""

from __future__ import annotations

from .hosts import Hosts
from .profile import Profile
from .topology import Topology


def axis_networks(profile: Profile, topology: Topology) -> tuple[str, ...]:
    """Of each axis of a mesh of the machine whether its groups lie in one host, each rank in another, or both, on which
    links and at what rate: ``across hosts, on inter_host, 50 GB/s a device``, in one direction.
    """
    return tuple(_network(profile, topology, axis) for axis in range(len(topology.axes)))


def _network(profile: Profile, topology: Topology, axis: int) -> str:
    network, route = profile.network, topology.routes[axis]
    if topology.shape[axis] == 1:
        return "one rank"
    if route.levels:
        levels = " and ".join(f"{link.name} ({_rate(link.bandwidth_bytes_per_s)})" for _, link in route.levels)
        return f"inside and across hosts, on {levels}"
    on = f"on {route.link.name}, {_rate(route.link.bandwidth_bytes_per_s)}"
    if not isinstance(network, Hosts):
        return f"{on}, as measured"
    if route.link == network.inter_host:
        return f"across hosts, {on}"
    return f"inside a host{f' of {network.devices_per_host}' if network.devices_per_host else ''}, {on}"


def _rate(bytes_per_s: float) -> str:
    """``450 GB/s``, per device and direction."""
    return f"{bytes_per_s / 1e9:.3g} GB/s a device"
